"""Arguments as engines print them: ``{'a': 1}``, ``Namespace(a=1)``, ``ServerArgs(a=1)``, ``a=1, b='x'``.

The text may be cut off anywhere, and values may be objects of the engine that no Python reads.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

_OPEN, _CLOSE = "([{<", ")]}>"
_ENUMERATION = re.compile(r"<[\w.]+: (.+)>", re.DOTALL)
_KEY = re.compile(r"\s*(?:(?P<quote>['\"])(?P<quoted>[\w.-]+)(?P=quote)\s*:|(?P<plain>[A-Za-z_][\w.]*)\s*=)\s*")
_LONGEST = 64_000


def read_arguments(text: str) -> dict[str, Any]:
    """Name -> value of the arguments at the front of ``text``; what cannot be read as a value stays text.

    A last value that is cut off is left out.
    """
    text = text[:_LONGEST].strip()
    named = re.match(r"[\w.]*\(", text)
    if named:
        text = text[named.end() :]
    elif text.startswith("{"):
        text = text[1:]
    found: dict[str, Any] = {}
    for name, value in _pairs(text):
        found.setdefault(name, _value(value))
    return found


def is_whole(text: str) -> bool:
    """Whether every bracket that the text opens is closed again."""
    depth = 0
    for _, char in _outside_quotes(text[:_LONGEST]):
        depth += (char in "([{") - (char in ")]}")
    return depth <= 0


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while (key := _KEY.match(text, place)) is not None:
        end = _end_of_value(text, key.end())
        if end is None:
            return
        yield key["quoted"] or key["plain"], text[key.end() : end].strip()
        if text[end] != ",":
            return
        place = end + 1


def _end_of_value(text: str, start: int) -> int | None:
    """Where the value that begins at ``start`` ends: at a comma, or at the bracket that closes the whole."""
    depth = 0
    for place, char in _outside_quotes(text, start):
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            if depth == 0:
                return place
            depth -= 1
        elif char == "," and depth == 0:
            return place
    return None


def _outside_quotes(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    quote = ""
    place = start
    while place < len(text):
        char = text[place]
        if quote:
            if char == "\\":
                place += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        else:
            yield place, char
        place += 1


def _value(text: str) -> Any:
    enumeration = _ENUMERATION.fullmatch(text)
    if enumeration:
        return _value(enumeration[1])
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
