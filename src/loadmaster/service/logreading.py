"""Logs from files and streams, read into one diagnosis in constant memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from loadmaster.core.diagnosis import Diagnoser, Diagnosis, ExitSeen
from loadmaster.edge.logstream import blocks

STDIN = "-"
_HEAD = 4096
_FEW = 0.05  # control characters in a text: it has hardly any, and a broken one some
# Beside them a terminal's: bell, backspace, tabulator, line ends, escape.
_NO_LETTERS = bytes(code for code in (*range(32), 127) if code not in (7, 8, 9, 10, 12, 13, 27))

Report = Callable[[int, int, str], None]


class LogError(Exception):
    """A log that cannot be read. ``empty``: there is nothing in it, which is no mistake of its reader."""

    def __init__(self, message: str, hint: str | None = None, *, empty: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.empty = empty


def diagnose_logs(names: Sequence[str], *, exit: ExitSeen | None = None, report: Report | None = None) -> Diagnosis:
    """The diagnosis of these files (``-``: standard input), read one after the other as one log.

    With several, each line of evidence has the ``path`` of its file. ``report`` gets bytes read, bytes in all (0: not
    known) and a name. Raises :class:`LogError`.
    """
    diagnoser = Diagnoser()
    for name in names:
        said = "standard input" if name == STDIN else name
        if len(names) > 1:
            diagnoser.begin_file(said)
        if name == STDIN:
            _read(diagnoser, sys.stdin.buffer, 0, said, report)
        else:
            _read_file(diagnoser, name, report)
    found = diagnoser.close(exit)
    if not found.facts.lines:
        said = ", ".join("standard input" if name == STDIN else name for name in names)
        raise LogError(f"there is nothing in {said}" + "".join(f"; {note}" for note in found.notes), empty=True)
    return found


def _read_file(diagnoser: Diagnoser, name: str, report: Report | None) -> None:
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            raise LogError(f"{name} is a directory", "name the log files in it")
        with path.open("rb") as stream:
            _read(diagnoser, stream, path.stat().st_size, name, report)
    except FileNotFoundError:
        raise LogError(f"there is no file {name}", "give the path of a log, or - for standard input") from None
    except (OSError, EOFError) as error:
        raise LogError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError:
        raise LogError(f"cannot read {name}: no file has such a name") from None


def _read(diagnoser: Diagnoser, stream: BinaryIO, size: int, name: str, report: Report | None) -> None:
    done = 0
    for block in blocks(stream, diagnoser.lacks):
        if not done:
            _refuse_binary(block[:_HEAD], name)
        diagnoser.read(block)
        done += len(block)
        if report is not None:
            report(done, size, name)


def _refuse_binary(head: bytes, name: str) -> None:
    if len(head) - len(head.translate(None, _NO_LETTERS)) > _FEW * len(head):
        raise LogError(f"{name} is no text", "diagnose reads what an engine printed")
