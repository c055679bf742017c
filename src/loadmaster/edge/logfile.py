"""A log that another process writes: its new lines, and its rotation."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

_MOST_AT_ONCE = 1 << 20
_LONGEST_LINE = 64 * 1024
_KNOWN_BYTES = 256


class LogFile:
    """Reads what is appended to ``path``. A file that was cut or replaced is read from its beginning."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._place = 0
        self._inode: int | None = None
        self._rest = b""
        self._before = b""  # the last bytes that were read: they are gone when the file was cut and filled again
        if from_end:
            with contextlib.suppress(OSError), path.open("rb") as file:
                state = os.fstat(file.fileno())
                self._place, self._inode = state.st_size, state.st_ino
                file.seek(max(0, self._place - _KNOWN_BYTES))
                self._before = file.read(_KNOWN_BYTES)

    def new_lines(self, *, last: bool = False) -> list[str]:
        """The whole lines since the last call, at most a MiB of them; call again until there are none.

        ``last``: also what stands after the last line's end, for a writer that has ended.
        """
        try:
            with self.path.open("rb") as file:
                state = os.fstat(file.fileno())
                file.seek(max(0, self._place - len(self._before)))
                if state.st_ino != self._inode or file.read(len(self._before)) != self._before:
                    self._place, self._inode, self._rest, self._before = 0, state.st_ino, b"", b""
                    file.seek(0)
                data = file.read(_MOST_AT_ONCE)
        except OSError:
            data = b""
        self._place += len(data)
        self._before = (self._before + data)[-_KNOWN_BYTES:]
        # a progress bar writes over its line again and again
        *lines, self._rest = (self._rest + data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).split(b"\n")
        if len(self._rest) > _LONGEST_LINE or (last and not data and self._rest):
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]


def last_lines(path: Path, count: int) -> list[str]:
    """The last whole lines of a file, of at most a MiB at its end; none when it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _MOST_AT_ONCE))
            data = file.read(_MOST_AT_ONCE)
    except OSError:
        return []
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    whole = lines[1 if size > _MOST_AT_ONCE else 0 : -1]
    return [line.decode("utf-8", "replace") for line in whole[-count:]]


def rotate(path: Path, *, most_bytes: int, keep: int) -> bool:
    """Move a log that is over ``most_bytes`` to ``path.1`` (older ones to .2 and so on); True when it did.

    The file itself is copied and cut, for its writer goes on writing to it; the writer has to append. What a
    :class:`LogFile` has not read by then it does not see.
    Raises OSError when the disk is full or the folder not writable.
    """
    try:
        if path.stat().st_size <= most_bytes:
            return False
    except FileNotFoundError:
        return False
    for number in range(keep - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(f"{path.name}.{number}").replace(path.with_name(f"{path.name}.{number + 1}"))
    if keep > 0:
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    os.truncate(path, 0)
    return True
