"""Recordings of readings: JSON lines, a header and then a snapshot a line, for tests and for reports of bugs.

A recording has no model's words in it and no requests, only figures, names of cards and names of processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from loadmaster.core.observation import Snapshot
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
        self._write(header)

    def add(self, snapshot: Snapshot) -> None:
        """Raises :class:`RecordingError`."""
        self._write(snapshot)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Struct) -> None:
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            self._file.close()
            raise RecordingError(f"cannot write {self.path}: {error.strerror or error}") from None


def open_recording(path: Path) -> tuple[Header, Iterator[Snapshot]]:
    """The header, and the snapshots one after the other.

    The last line of a recording whose writer was killed may be cut: it is left out. Raises :class:`RecordingError`,
    the snapshots too.
    """
    try:
        file = open_to_read(path)
    except (OSError, ValueError) as error:
        raise RecordingError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    first = file.readline(_LONGEST_LINE)
    hint = "make one with: loadmaster watch --record FILE"
    try:
        header = msgspec.json.decode(first, type=Header)
    except (msgspec.MsgspecError, RecursionError):
        file.close()
        raise RecordingError(f"{path} is no recording of readings: its first line is not a header", hint) from None
    if header.kind != KIND:
        file.close()
        raise RecordingError(f"{path} is no recording of readings: it is a {header.kind!r}", hint)
    if header.schema != SCHEMA:
        file.close()
        raise RecordingError(f"{path} has schema {header.schema}, only {SCHEMA} is known")
    return header, _snapshots(path, file)


def _snapshots(path: Path, file: IO[bytes]) -> Iterator[Snapshot]:
    decoder = msgspec.json.Decoder(Snapshot)
    before = float("-inf")
    with file:
        number = 1
        while line := file.readline(_LONGEST_LINE):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) >= _LONGEST_LINE:
                    raise RecordingError(f"{path}: line {number} is over {_LONGEST_LINE >> 20} MiB long")
                return  # cut: its writer was killed
            try:
                snapshot = decoder.decode(line)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise RecordingError(f"{path}: line {number}: {error}") from None
            if snapshot.at <= before:
                raise RecordingError(f"{path}: line {number} is not later than the line before it")
            before = snapshot.at
            yield snapshot
