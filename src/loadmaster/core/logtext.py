"""A line of a log apart from what others have put around it: colours, who wrote it, when, and through which program."""

from __future__ import annotations

import re
from collections import deque

from msgspec import Struct

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SPEAKER = re.compile(r"^\(?(\S+ (?:rank=\d+|pid=\d+))\)")
LONGEST_LINE = 4000
_FRAMES_KEPT = 200
_SPEAKERS_KEPT = 64


class LogLine(Struct, frozen=True):
    """``text``: the line without colours. ``speaker``: the process that wrote it, "" where it does not say."""

    text: str
    speaker: str


def read_line(line: str) -> LogLine:
    text = _COLOUR.sub("", line[:LONGEST_LINE])
    found = _SPEAKER.match(text)
    return LogLine(text, found.group(1) if found else "")


class Tracebacks:
    """The frames that each process has printed since its last traceback began."""

    def __init__(self) -> None:
        self._frames: dict[str, deque[str]] = {}

    def above(self, line: LogLine) -> deque[str]:
        """The frames above this line that the same process wrote, this line's own among them."""
        if line.speaker not in self._frames and len(self._frames) >= _SPEAKERS_KEPT:
            self._frames.pop(next(iter(self._frames)))
        frames = self._frames.setdefault(line.speaker, deque(maxlen=_FRAMES_KEPT))
        if "Traceback (most recent call last)" in line.text:
            frames.clear()
        elif 'File "' in line.text or "    " in line.text:
            frames.append(line.text)
        return frames
