"""The numbers in the message that shows a cause, by ``data/log-figures.toml``."""

from __future__ import annotations

import re
from functools import cache

from msgspec import Struct, convert

from loadmaster.core.facts import GIB
from loadmaster.core.tables import load_toml

_BLANKS = re.compile(r"\s+")


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    patterns: tuple[str, ...]
    source: str


@cache
def _patterns(code: str) -> tuple[re.Pattern[str], ...]:
    entry = load_toml("log-figures.toml").get(code)
    return () if entry is None else tuple(re.compile(text) for text in convert(entry, _Entry).patterns)


class Figures:
    """What a message says, by the names of the table. A number that is not there is None."""

    def __init__(self, code: str, message: str) -> None:
        text = _BLANKS.sub(" ", message)
        found = (pattern.search(text) for pattern in _patterns(code))
        first = next((match for match in found if match is not None), None)
        self._values = first.groupdict() if first is not None else {}

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def whole(self, name: str) -> int | None:
        value = self._values.get(name)
        return int(value) if value is not None and value.isdigit() and len(value) < 16 else None

    def gib(self, name: str) -> int | None:
        """Bytes of a figure that is printed in GiB."""
        value = self.number(name)
        return None if value is None else round(value * GIB)

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        try:
            return float(value.rstrip(".")) if value is not None else None
        except ValueError:
            return None
