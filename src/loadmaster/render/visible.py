"""Text from outside (commands, file names, configurations, logs) as a terminal may show it.

Control characters, escape sequences and marks that turn the reading direction are written out: ``\\x1b``, ``\\u202e``.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any, TypeVar

from msgspec import Struct, structs

_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_DEEPEST = 200
T = TypeVar("T")


def visible(text: str, lines: bool = False) -> str:
    """The text with every hidden character written out; ``lines``: line ends and tabs stay."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(letter if letter in kept or not _is_hidden(letter) else _written(letter) for letter in text)


def visible_log(text: str) -> str:
    """Lines of a log: colours are left out, the rest as :func:`visible`."""
    return visible(_COLOUR.sub("", text), lines=True)


def shown(value: T, lines: bool = True, depth: int = 0) -> T:
    """The same structure with every text in it made visible, keys too."""
    result: Any = value
    if depth > _DEEPEST:
        return value
    if isinstance(value, str):
        result = visible(value, lines)
    elif isinstance(value, Struct):
        changes: dict[str, Any] = {}
        for name in value.__struct_fields__:
            before = getattr(value, name)
            after = shown(before, lines, depth + 1)
            if after is not before:
                changes[name] = after
        result = structs.replace(value, **changes) if changes else value
    elif isinstance(value, dict):
        pairs = {shown(key, lines, depth + 1): shown(item, lines, depth + 1) for key, item in value.items()}
        same = all(one is other for one, other in zip(value, pairs, strict=False))
        result = value if same and all(pairs.get(key) is item for key, item in value.items()) else pairs
    elif type(value) in (list, tuple):
        items = [shown(item, lines, depth + 1) for item in value]  # type: ignore[attr-defined]
        changed = any(one is not other for one, other in zip(items, value, strict=True))  # type: ignore[call-overload]
        result = type(value)(items) if changed else value  # type: ignore[call-arg]
    return result  # type: ignore[no-any-return]


def _is_hidden(letter: str) -> bool:
    return letter in _TURNING or unicodedata.category(letter) in _HIDDEN


def _written(letter: str) -> str:
    common = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter)
    if common is not None:
        return common
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
