"""Values of flags that the version does not have, where its parser takes any text and a registry decides later."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from loadmaster.core.flagtable import FlagTable

_UNFILLED = re.compile(r"\$|%\w+%")
_MANY = 24
# Flags that bring values of their own to another one, and a flag without which nobody looks at its value.
_ADDED_BY = {"--tool-call-parser": "--tool-parser-plugin", "--reasoning-parser": "--reasoning-parser-plugin"}
_ASKED_WITH = {"--tool-call-parser": "--enable-auto-tool-choice"}


def unregistered(flags: Mapping[str, Any], table: FlagTable) -> Iterator[tuple[str, str]]:
    """Flags with a value that nothing registers, and the reason in words."""
    for name, value in flags.items():
        flag = table.flags.get(name)
        if flag is None or not flag.known or not isinstance(value, str) or _UNFILLED.search(value):
            continue
        if flags.get(_ADDED_BY.get(name, "")) or (name in _ASKED_WITH and not flags.get(_ASKED_WITH[name])):
            continue
        known = {text.lower() for text in flag.known} if flag.fold else set(flag.known)
        if (value.lower() if flag.fold else value) not in known:
            yield name, f"takes {_listed(flag.known, value)}; {value[:60]!r} was given"


def _listed(known: tuple[str, ...], value: str) -> str:
    """The known values; of many, those that look like the one that was given."""
    if len(known) <= _MANY:
        return ", ".join(known)
    near = get_close_matches(value, known, 4, 0.5) or known[:4]
    return f"{', '.join(near)} and {len(known) - len(near)} others"
