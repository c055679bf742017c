"""Tells a model's thinking from its answer while it is written.

Engines with a reasoning parser send thinking in a field of its own. Without one it stands in the text, as
``<think>...</think>`` at its begin; templates that open the block themselves leave only the closing tag.
"""

from __future__ import annotations

from msgspec import Struct

OPEN, CLOSE = "<think>", "</think>"


class Split(Struct, frozen=True):
    """What a piece of the stream adds. ``moved``: all text that was given before is thinking, before this thinking."""

    text: str = ""
    thinking: str = ""
    moved: bool = False


class ThinkingSplit:
    """Fed piece by piece; how the stream is cut into pieces does not change the result.

    ``inside``: the block is open already, as it is in an answer that is continued within its thinking.
    """

    def __init__(self, *, inside: bool = False) -> None:
        # "start": nothing but white space yet; "opened", "gap": line ends after a tag are dropped
        self._state = "inside" if inside else "start"
        self._held = ""  # what may be the begin of a tag
        self._bare = not inside  # no thinking was seen: a closing tag means that all before it was thinking

    def feed(self, piece: str) -> Split:
        return self._take(self._held + piece, last=False)

    def end(self) -> Split:
        """What was held back."""
        return self._take(self._held, last=True)

    def _take(self, data: str, *, last: bool) -> Split:
        text, thinking, moved = "", "", False
        self._held = ""
        while data:
            if self._state == "start":
                begin = data.lstrip()
                if begin.startswith(OPEN):
                    self._state, self._bare, data = "opened", False, begin[len(OPEN) :]
                elif OPEN.startswith(begin) and not last:
                    self._held, data = data, ""
                else:
                    self._state = "text"
            elif self._state in ("opened", "gap"):
                data = data.lstrip("\r\n")
                if data:
                    self._state = "inside" if self._state == "opened" else "text"
            elif self._state == "text" and not self._bare:
                text, data = text + data, ""
            else:
                before, closed, rest = data.partition(CLOSE)
                if not closed and not last:
                    kept = _begin_of(CLOSE, before)
                    before, self._held = before[: len(before) - kept], before[len(before) - kept :]
                if self._state == "inside":
                    thinking += before
                elif closed:
                    thinking, text, moved = text + before, "", True
                else:
                    text += before
                if closed:
                    self._state, self._bare = "gap", False
                data = rest
        return Split(text, thinking, moved)


def _begin_of(tag: str, data: str) -> int:
    """How many letters at the end of the data may be the begin of the tag."""
    for length in range(min(len(tag) - 1, len(data)), 0, -1):
        if data.endswith(tag[:length]):
            return length
    return 0
