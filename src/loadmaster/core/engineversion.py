"""Comparing engine versions, which rules are chosen by.

Settings name the rules in use ("0.33", "0.20.1"). Two components mean the last patch release of that line.
"""

from __future__ import annotations

import re
from functools import lru_cache

_LAST_PATCH = 1 << 20


# PEP 440 in its normal form, without an epoch
_RELEASE = re.compile(r"\d+(\.\d+)+((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?", re.ASCII)


def is_release(text: str) -> bool:
    """Whether the text, as a whole, can be the number of a release."""
    return len(text) <= 100 and _RELEASE.fullmatch(text) is not None


@lru_cache(maxsize=256)
def version_key(version: str) -> tuple[int, int, int]:
    """``"0.20.1rc2.dev9+g1"`` -> ``(0, 20, 1)``; a line without patch number is its last release.

    Raises ValueError when the text does not begin with two numbers.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ValueError(f"not an engine version: {version!r}")
    major, minor, patch = match.groups()
    return int(major), int(minor), _LAST_PATCH if patch is None else int(patch)


def is_before(version: str | None, bound: str) -> bool | None:
    """Whether ``version`` is older than ``bound``; None where it is not known or has no number ("nightly")."""
    if version is None:
        return None
    try:
        return not at_least(version, bound)
    except ValueError:
        return None


def at_least(version: str, bound: str) -> bool:
    """Whether ``version`` is ``bound`` or newer; a ``bound`` without patch number is its first release."""
    key = version_key(bound)
    floor = (key[0], key[1], 0 if key[2] == _LAST_PATCH else key[2])
    return version_key(version) >= floor
