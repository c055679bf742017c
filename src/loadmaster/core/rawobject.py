"""Typed values out of one object of a JSON file that nobody vouches for.

A value of the wrong type, out of bounds or not finite reads as ``None`` and is written down in ``problems``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from loadmaster.core.tables import load_toml

_Value = TypeVar("_Value")


class RawObject:
    """Takes typed values out of one JSON object and collects what cannot be used."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any], problems: list[str], where: str) -> None:
        self.raw = raw
        self.defaults = defaults
        self.problems = problems
        self.where = where

    def take(self, names: Iterable[str], convert: Callable[[Any], _Value | None], default: str | None) -> _Value | None:
        """The first of ``names`` that is there and not null, converted; else the class default of field ``default``."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            result = convert(value)
            if result is None:
                self.problems.append(f"{self.where}{name} = {shown(value)}")
            return result
        if default is not None and default not in self.raw and default in self.defaults:
            return convert(self.defaults[default])
        return None

    def integer(self, field: str, names: Iterable[str] | None = None, *, low: int = 1) -> int | None:
        limits = load_toml("config-defaults.toml")["limits"]
        high = limits.get(field, limits["other"])
        return self.take(names or (field,), lambda value: integer(value, low, high), field)

    def number(self, field: str) -> float | None:
        return self.take((field,), number, field)

    def flag(self, field: str) -> bool | None:
        return self.take((field,), lambda value: value if isinstance(value, bool) else None, field)

    def text(self, field: str) -> str | None:
        return self.take((field,), word, field)

    def integers(self, *names: str, low: int = 0, high: int = 1 << 20) -> tuple[int, ...]:
        def convert(value: Any) -> tuple[int, ...] | None:
            if not isinstance(value, list) or len(value) > 4096:
                return None
            numbers = [integer(item, low, high) for item in value]
            return None if None in numbers else tuple(number for number in numbers if number is not None)

        return self.take(names, convert, names[0]) or ()


def word(value: Any) -> str | None:
    """A name: printable, since it will be shown, and of bearable length."""
    return value if isinstance(value, str) and value.isprintable() and len(value) <= 200 else None


def integer(value: Any, low: int, high: int) -> int | None:
    """A whole number within bounds; a pair of equal sides (``[16, 16]``) counts as one."""
    if isinstance(value, list) and 0 < len(value) <= 3 and all(side == value[0] for side in value):
        value = value[0]
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if low <= value <= high else None


def number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def shown(value: Any) -> str:
    """A value as evidence, cut to a length that a terminal can bear."""
    if isinstance(value, list | dict):
        return f"{'list' if isinstance(value, list) else 'object'} of {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts
        return "an integer of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
