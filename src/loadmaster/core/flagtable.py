"""The flags of ``vllm serve`` by engine version.

Read from ``core/data/vllm-flags.json``, which ``scripts/vllm_flags.py`` writes from the sources of the releases it
names. A version between two of those has the flags of both neighbours, one beyond the ends has those of the end,
and an unknown version (``None``) has every flag that any release has.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from msgspec import Struct

from loadmaster.core.tables import load_json

_DATA = "vllm-flags.json"
_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)+)")

# Kinds that stand alone or take an optional word; all others need a value.
SWITCH_KINDS = frozenset({"switch", "bool"})


class Flag(Struct, frozen=True):
    """One flag as the asked version reads it.

    ``kind``: "switch", "bool", "truth", "int", "float", "str", "human", "human-auto", "json", "json-or-str",
    "pairs" (of one value). ``nargs``: None one value, "+" several, "?" at most one, "append" one a time.
    ``names``: other spellings; ``negations``: names that set it false; ``choices``: () when any value is taken.
    ``known``: what the version has by itself where only plugins can add to it, in any case where ``fold``.
    ``kinds``: every kind that any version has read it as.
    """

    name: str
    kind: str
    nargs: str | int | None = None
    names: tuple[str, ...] = ()
    negations: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    known: tuple[str, ...] = ()
    fold: bool = False
    kinds: tuple[str, ...] = ()

    @property
    def takes_value(self) -> bool:
        return self.kind not in SWITCH_KINDS


class Option(Struct, frozen=True):
    """What a spelling on the command line means."""

    flag: Flag
    negated: bool = False


class FlagTable(Struct, frozen=True):
    """All spellings that a version takes; ``elsewhere``: spellings that only other versions take."""

    version: str | None
    flags: dict[str, Flag]
    options: dict[str, Option]
    elsewhere: dict[str, Option]
    features: frozenset[str]


def version_numbers(version: str | None) -> tuple[int, ...] | None:
    """``v0.11.0rc1`` -> (0, 11, 0); ``0.24`` -> (0, 24, 0); None when it is no version ("nightly")."""
    found = _NUMBERS.match(version.strip()) if version else None
    if found is None or len(found.group(1)) > 40:
        return None
    numbers = tuple(int(part) for part in found.group(1).split("."))
    return numbers + (0,) * (3 - len(numbers))


def _releases() -> list[tuple[int, ...]]:
    return [version_numbers(text) or () for text in load_json(_DATA)["releases"]]


def _indices(version: str | None) -> tuple[int, ...] | None:
    """The releases looked at that speak for ``version``; None for all of them."""
    wanted = version_numbers(version)
    if wanted is None:
        return None
    releases = _releases()
    if wanted in releases:
        return (releases.index(wanted),)
    after = next((index for index, release in enumerate(releases) if release > wanted), len(releases))
    return tuple(index for index in (after - 1, after) if 0 <= index < len(releases))


def _within(ranges: list[list[int]], indices: tuple[int, ...] | None) -> bool:
    return indices is None or any(first <= index <= last for first, last in ranges for index in indices)


def flag_table(version: str | None) -> FlagTable:
    """The flags of ``version``; those of all versions when it is None or no version number."""
    indices = _indices(version)
    return _table(indices, version if indices is not None else None)


@lru_cache(maxsize=8)
def _table(indices: tuple[int, ...] | None, version: str | None) -> FlagTable:
    data = load_json(_DATA)
    flags: dict[str, Flag] = {}
    others: dict[str, Flag] = {}
    for name, variants in data["flags"].items():
        present = [variant for variant in variants if _within(variant["in"], indices)]
        (flags if present else others)[name] = _flag(name, present or variants, variants)
    options = _options(flags)
    features = {name for name, ranges in data["syntax"].items() if _within(ranges, indices)}
    elsewhere = {name: option for name, option in _options(others).items() if name not in options}
    return FlagTable(version, flags, options, elsewhere, frozenset(features))


def _flag(name: str, present: list[dict[str, Any]], variants: list[dict[str, Any]]) -> Flag:
    newest = present[-1]
    return Flag(
        name=name,
        kind=newest["kind"],
        nargs=newest.get("nargs"),
        names=tuple(dict.fromkeys(text for variant in present for text in variant.get("names", ()))),
        negations=tuple(dict.fromkeys(text for variant in reversed(present) for text in variant.get("no", ()))),
        choices=_choices(present),
        known=_known(present),
        fold=any(variant.get("fold") for variant in present),
        kinds=tuple(dict.fromkeys(variant["kind"] for variant in variants)),
    )


def _choices(present: list[dict[str, Any]]) -> tuple[Any, ...]:
    if any("choices" not in variant for variant in present):
        return ()
    return tuple(dict.fromkeys(choice for variant in present for choice in variant["choices"]))


def _known(present: list[dict[str, Any]]) -> tuple[str, ...]:
    """Values of any of the releases; () when one of them takes whatever is given."""
    if all("choices" in variant for variant in present):
        return ()
    found = [variant.get("known") or variant.get("choices") for variant in present]
    return tuple(dict.fromkeys(str(value) for values in found for value in values or ())) if all(found) else ()


def _options(flags: dict[str, Flag]) -> dict[str, Option]:
    """Every spelling; a flag's own name goes before another flag's alias or negation."""
    options: dict[str, Option] = {}
    for flag in flags.values():
        for negation in flag.negations:
            options[negation] = Option(flag, negated=True)
    for flag in flags.values():
        for name in flag.names:
            options[name] = Option(flag)
    for flag in flags.values():
        options[flag.name] = Option(flag)
    return options


def known_flags(version: str | None) -> tuple[str, ...]:
    """The long names that ``version`` has, sorted."""
    return tuple(sorted(flag_table(version).flags))


def flag_history(name: str) -> tuple[tuple[str, str], ...]:
    """The (first, last) releases looked at that have the flag, () for a flag that none has.

    ``name`` is any spelling. The first release looked at means "at most", the last one "at least".
    """
    option = flag_table(None).options.get(name)
    if option is None:
        return ()
    data = load_json(_DATA)
    present = sorted(
        {
            index
            for variant in data["flags"][option.flag.name]
            for first, last in variant["in"]
            for index in range(first, last + 1)
        }
    )
    spans: list[tuple[int, int]] = []
    for index in present:
        if spans and spans[-1][1] == index - 1:
            spans[-1] = (spans[-1][0], index)
        else:
            spans.append((index, index))
    return tuple((data["releases"][first], data["releases"][last]) for first, last in spans)


def quantization_methods(version: str | None) -> tuple[str, ...]:
    """Names that ``--quantization`` takes in ``version`` (in any version when it is None), sorted."""
    indices = _indices(version)
    methods = load_json(_DATA)["quantization_methods"]
    return tuple(sorted(name for name, ranges in methods.items() if _within(ranges, indices)))


def releases_looked_at() -> tuple[str, ...]:
    """The releases that the table was read from, oldest first."""
    return tuple(load_json(_DATA)["releases"])
