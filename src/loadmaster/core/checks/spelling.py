"""Which flag was meant, and in which releases a name is known, in words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from loadmaster.core.flagtable import flag_table, releases_looked_at
from loadmaster.core.tables import load_json, load_toml

_NEAR_ENOUGH = 0.8  # difflib's ratio: one wrong letter in five


def nearest(flag: str, version: str | None) -> str | None:
    """The flag of that version that was meant, None when none is near enough.

    First a flag whose words begin with the words given, in their order (``--gpu-util``), the common ones before the
    others; then the nearest spelling.
    """
    wanted = flag.split("=", 1)[0].replace("_", "-").lower()
    known = [name for name in flag_table(version).options if name.startswith("--")]
    words = wanted.strip("-").split("-")
    if len(words) > 1:
        common = load_toml("flag-hints.toml")["common"]
        longer = [name for name in known if _abbreviates(words, name.strip("-").split("-"))]
        if longer:
            return min(longer, key=lambda name: (name not in common, len(name)))
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=_NEAR_ENOUGH)
    return close[0] if close else None


def _abbreviates(words: list[str], full: list[str]) -> bool:
    """Whether each word begins a word of the full name, in the same order."""
    rest = iter(full)
    return all(any(word and part.startswith(word) for part in rest) for word in words)


def newest_release() -> str:
    return releases_looked_at()[-1]


def in_newest(runs: Sequence[tuple[str, str]]) -> bool:
    """Whether the runs of releases reach to the newest that was looked at."""
    return bool(runs) and runs[-1][1] == newest_release()


def method_history(method: str) -> tuple[tuple[str, str], ...]:
    """The (first, last) releases that have a quantisation method, () when none has it."""
    releases = releases_looked_at()
    runs = load_json("vllm-flags.json")["quantization_methods"].get(method, ())
    return tuple((releases[first], releases[last]) for first, last in runs)


def release_words(runs: Sequence[tuple[str, str]]) -> str:
    """``from 0.8.5 to 0.33.0`` for people; the newest release that was looked at counts as open."""
    oldest = releases_looked_at()[0]
    parts = []
    for first, last in runs:
        if last == newest_release():
            parts.append("in every release" if first == oldest else f"from {first} on")
        else:
            parts.append(f"up to {last}" if first == oldest else f"from {first} to {last}")
    return " and ".join(parts)
