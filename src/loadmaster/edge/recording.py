"""Recordings of readings: JSON lines, a header and then a snapshot a line, for tests and for reports of bugs.

A recording has no model's words in it and no requests, only figures, names of cards and names of processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from loadmaster.core.observation import Snapshot, impossible
from loadmaster.core.watchlimits import WatchLimits
from loadmaster.edge.regularfile import open_to_read

KIND = "loadmaster-recording"
SCHEMA = 1
_LONGEST_LINE = 1 << 20


class RecordingError(Exception):
    """A recording that cannot be read or written. ``hint``: what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Header(Struct, frozen=True, kw_only=True):
    """The first line. ``limits``: what the plan allows, so that alerts come out the same elsewhere."""

    kind: str = KIND
    schema: int = SCHEMA
    loadmaster: str | None = None
    deployment: str | None = None
    began: float | None = None
    interval_s: float = 1.0
    limits: WatchLimits = WatchLimits()


class _Told(Struct, frozen=True):
    """What a header cannot leave out."""

    kind: str
    schema: int


class RecordingWriter:
    """Appends to a new file; every line is written whole and at once."""

    def __init__(self, path: Path, header: Header) -> None:
        """Raises :class:`RecordingError`, also when there is such a file."""
        self.path = path
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise RecordingError(f"{path} exists already", "give --record the name of a new file") from None
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror or error}") from None
        self._file: IO[bytes] = os.fdopen(descriptor, "wb", buffering=0)
        try:
            self._write(header)
        except RecordingError:
            path.unlink(missing_ok=True)  # else the next attempt finds a file there
            raise

    def add(self, snapshot: Snapshot) -> None:
        """Raises :class:`RecordingError`."""
        self._write(snapshot)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Struct) -> None:
        """A line, whole or not at all: what a full disk took of one is cut off again."""
        left = msgspec.json.encode(line) + b"\n"
        begun = 0
        try:
            while left:
                taken = self._file.write(left)
                begun += taken
                left = left[taken:]
        except OSError as error:
            with contextlib.suppress(OSError):
                if begun:
                    self._file.truncate(os.fstat(self._file.fileno()).st_size - begun)
            self._file.close()
            raise RecordingError(f"cannot write {self.path}: {error.strerror or error}") from None


class Series:
    """The snapshots of a recording, once, one after the other. ``cut_line``: the number of a last line that was cut."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self.cut_line: int | None = None

    def __iter__(self) -> Iterator[Snapshot]:
        """Raises :class:`RecordingError`, which names the line."""
        decoder = msgspec.json.Decoder(Snapshot)
        before = float("-inf")
        number = 1
        with self._file as file:
            while line := file.readline(_LONGEST_LINE):
                number += 1
                whole = line.endswith(b"\n")
                if not whole and len(line) >= _LONGEST_LINE:
                    raise RecordingError(f"{self._path}: line {number} is over {_LONGEST_LINE >> 20} MiB long")
                try:
                    snapshot = decoder.decode(line)
                except (msgspec.MsgspecError, RecursionError) as error:
                    if whole:
                        raise RecordingError(f"{self._path}: line {number}: {error}") from None
                    self.cut_line = number
                    return
                problem = impossible(snapshot)
                if problem is not None:
                    raise RecordingError(f"{self._path}: line {number}: {problem}")
                if snapshot.at <= before:
                    raise RecordingError(f"{self._path}: line {number} is not later than the line before it")
                before = snapshot.at
                yield snapshot


def open_recording(path: Path) -> tuple[Header, Series]:
    """The header, and the snapshots.

    The last line of a recording whose writer was killed may be cut: it is left out. Raises :class:`RecordingError`.
    """
    try:
        file = open_to_read(path)
    except (OSError, ValueError) as error:
        raise RecordingError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return _header(path, file.readline(_LONGEST_LINE)), Series(path, file)
    except RecordingError:
        file.close()
        raise
    except OSError as error:
        file.close()
        raise RecordingError(f"cannot read {path}: {error.strerror or error}") from None


def _header(path: Path, line: bytes) -> Header:
    """The first line, which must call itself a header: any other object would pass for one with nothing in it."""
    hint = "make one with: loadmaster watch --record FILE"
    none = f"{path} is no recording of readings: its first line is not a header"
    try:
        told = msgspec.json.decode(line, type=_Told)
    except (msgspec.MsgspecError, RecursionError):
        raise RecordingError(none, hint) from None
    if told.kind != KIND:
        raise RecordingError(f"{path} is no recording of readings: it is a {told.kind!r}", hint)
    if told.schema != SCHEMA:
        raise RecordingError(f"{path} has schema {told.schema}, only {SCHEMA} is known")
    try:
        header = msgspec.json.decode(line, type=Header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RecordingError(f"{path}: line 1: {error}") from None
    problem = impossible(header)
    if problem is not None:
        raise RecordingError(f"{path}: line 1: {problem}")
    return header
