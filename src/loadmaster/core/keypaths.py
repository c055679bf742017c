"""TOML text → the line on which each key is given. For text that ``tomllib`` has accepted.

The parser keeps no positions, so the statements are walked once more: strings, brackets and comments are
skipped as wholes, and each key's or header's own text is given to the parser again.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

# Longest first: multi-line strings, strings, comments, brackets, line ends, anything else.
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[{]|[\]}]|\n|=|[^\"'#\[\]{}\n=]+",
    re.DOTALL,
)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Path of each key and header → its line, counted from 1. Keys of inline tables are not listed by themselves."""
    lines: dict[tuple[str, ...], int] = {}
    header: tuple[str, ...] = ()
    line, depth = 1, 0
    left: list[str] = []  # the words of a statement up to its "=": the key, or a whole header
    started, in_value, is_header = 1, False, False
    for match in _TOKEN.finditer(text + "\n"):
        token = match[0]
        if token == "\n" and depth == 0:
            words = "".join(left).strip()
            if words and is_header:
                header = _path(words)
                lines.setdefault(header, started)
            left, in_value, is_header = [], False, False
        elif not in_value and token == "=" and not is_header:
            lines.setdefault(header + _path("".join(left) + "=0"), started)
            in_value = True
        elif not in_value and not token.startswith("#"):
            if not "".join(left).strip():
                started, is_header = line, token == "["
            left.append(token)
        elif in_value and token in ("[", "{"):
            depth += 1
        elif in_value and token in ("]", "}"):
            depth -= 1
        line += token.count("\n")
    return lines


def line_of(path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> int | None:
    """The line that gives ``path``: its own, else that of the table or inline table that holds it."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def _path(statement: str) -> tuple[str, ...]:
    value: Any = tomllib.loads(statement)
    keys: list[str] = []
    while isinstance(value, (dict, list)) and value:
        if isinstance(value, list):  # a header of an array of tables
            value = value[0]
            continue
        key, value = next(iter(value.items()))
        keys.append(key)
    return tuple(keys)
