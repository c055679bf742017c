"""Logs from files and streams, read into one diagnosis in constant memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct, structs

from loadmaster.core.diagnosis import Diagnoser, Diagnosis, ExitSeen
from loadmaster.core.facts import Evidence, Finding
from loadmaster.edge.logstream import blocks

STDIN = "-"
_HEAD = 4096
_FEW_NULS = 0.02  # a text has none; a broken one may have some

Report = Callable[[int, int, str], None]


class LogError(Exception):
    """A log that cannot be read. ``empty``: there is nothing in it, which is no mistake of its reader."""

    def __init__(self, message: str, hint: str | None = None, *, empty: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.empty = empty


class _Span(Struct, frozen=True):
    """The lines of one file among those of all: numbers above ``before``."""

    name: str
    before: int


def diagnose_logs(names: Sequence[str], *, exit: ExitSeen | None = None, report: Report | None = None) -> Diagnosis:
    """The diagnosis of these files (``-``: standard input), read one after the other as one log.

    With several, each line of evidence has the ``path`` of its file and the number that the line has there. Raises
    :class:`LogError`.
    """
    diagnoser = Diagnoser()
    spans: list[_Span] = []
    number = 0
    for name in names:
        spans.append(_Span("standard input" if name == STDIN else name, number))
        for line in _lines(name, report):
            number += 1
            diagnoser.feed(line, number)
    if not number:
        raise LogError(f"there is nothing in {', '.join(span.name for span in spans)}", empty=True)
    return _placed(diagnoser.close(exit), spans)


def _lines(name: str, report: Report | None) -> Iterator[str]:
    if name == STDIN:
        yield from _read(sys.stdin.buffer, "standard input", 0, report)
        return
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            raise LogError(f"{name} is a directory", "name the log files in it")
        with path.open("rb") as stream:
            if stream.seekable():
                _refuse_binary(stream.read(_HEAD), name)
                stream.seek(0)
            size = path.stat().st_size
            yield from _read(stream, name, size, report)
    except FileNotFoundError:
        raise LogError(f"there is no file {name}", "give the path of a log, or - for standard input") from None
    except OSError as error:
        raise LogError(f"cannot read {name}: {error.strerror or error}") from None


def _read(stream: BinaryIO, name: str, size: int, report: Report | None) -> Iterator[str]:
    done = 0
    for block in blocks(stream):
        yield from block.decode("utf-8", "replace").removesuffix("\n").split("\n")
        done += len(block)
        if report is not None:
            report(done, size, name)


def _refuse_binary(head: bytes, name: str) -> None:
    if head.count(0) > _FEW_NULS * len(head) and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise LogError(f"{name} is no text", "diagnose reads what an engine printed")


def _placed(diagnosis: Diagnosis, spans: Sequence[_Span]) -> Diagnosis:
    """The diagnosis with each line's number in its own file; the file's name only where there are several."""
    if len(spans) < 2:
        return diagnosis

    def moved(evidence: Evidence) -> Evidence:
        if evidence.line is None:
            return evidence
        span = next(span for span in reversed(spans) if evidence.line > span.before)
        return structs.replace(evidence, line=evidence.line - span.before, path=evidence.path or span.name)

    def placed(item: Finding) -> Finding:
        return structs.replace(item, evidence=tuple(moved(one) for one in item.evidence))

    return structs.replace(
        diagnosis,
        findings=tuple(placed(item) for item in diagnosis.findings),
        suspicious=tuple(moved(one) for one in diagnosis.suspicious),
    )
