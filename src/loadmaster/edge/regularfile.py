"""Opens regular files only: a pipe would wait for its other end for ever, a device has no end."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# What the shell hands over: <(command) and standard input. Their other end is there already.
_HANDED_OVER = re.compile(r"/dev/stdin|/dev/stdout|/dev/fd/\d+|/proc/self/fd/\d+")


def open_to_read(path: Path) -> BinaryIO:
    """The file, open for reading. Raises OSError whose ``strerror`` says what the path is if it is no regular file."""
    if _HANDED_OVER.fullmatch(str(path)):
        return path.open("rb")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text file, new or in place of a regular one. Raises OSError as :func:`open_to_read`."""
    if not _HANDED_OVER.fullmatch(str(path)):
        with contextlib.suppress(FileNotFoundError):
            _check(path, path.stat().st_mode)
    path.write_text(text, encoding="utf-8")


def kind_of(path: Path) -> str | None:
    """What a path is that is neither a regular file nor a directory, in words; None for those two."""
    mode = path.stat().st_mode
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else _words(mode)


def _check(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {_words(mode)}, not a file", str(path))


def _words(mode: int) -> str:
    return next((words for test, words in _KINDS if test(mode)), "something else")
