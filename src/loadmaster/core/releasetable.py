"""Which vLLM release has which architecture, and what a quantisation method asks of the card.

The first release looked at means "at most", the last one "at least". A version between two releases that differ is
unknown; one beyond the newest counts as the newest.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from loadmaster.core.engineversion import version_key
from loadmaster.core.tables import load_json

_DATA = "vllm-architectures.json"


def releases() -> tuple[str, ...]:
    """The releases that the table was read from, oldest first."""
    return tuple(load_json(_DATA)["releases"])


def architecture_runs(architecture: str | None) -> tuple[tuple[str, str], ...]:
    """The (first, last) releases that list the architecture, () when none does."""
    entry = load_json(_DATA)["architectures"].get(architecture or "")
    return () if entry is None else tuple((releases()[first], releases()[last]) for first, last in entry["in"])


def has_class(architecture: str, version: str) -> bool | None:
    """Whether a version has the architecture; None between two releases that differ, and before the oldest."""
    entry = load_json(_DATA)["architectures"].get(architecture)
    if entry is None:
        return False
    answers = {any(first <= at <= last for first, last in entry["in"]) for at in _around(version)}
    if not _around(version) or len(answers) > 1:
        return None
    return answers.pop()


def method_capability(method: str, version: str | None) -> int | None:
    """Lowest compute capability (75 is 7.5) of a quantisation method in a version (None: the newest).

    None: the version has no such method, or the method asks for none. Between two releases the milder holds.
    """
    return _lowest(load_json(_DATA)["quantization"].get(method, ()), version)


def scheme_capability(schemes: Iterable[str], version: str | None) -> int | None:
    """As :func:`method_capability`, of whichever of these schemes inside compressed-tensors asks for least."""
    table = load_json(_DATA)["schemes"]
    found = [_lowest(table.get(name, ()), version) for name in schemes]
    return min((number for number in found if number is not None), default=None)


def method_dtypes(method: str, version: str | None) -> tuple[str, ...]:
    """Activation types that a method's kernels take in a version (None: the newest), () when nothing is said."""
    held = _held(load_json(_DATA)["quantization"].get(method, ()), version)
    return tuple(dict.fromkeys(name for variant in held for name in variant["dtypes"]))


def _lowest(variants: Iterable[dict[str, Any]], version: str | None) -> int | None:
    numbers = [variant["min_capability"] for variant in _held(variants, version)]
    return min((number for number in numbers if number is not None), default=None)


def _held(variants: Iterable[dict[str, Any]], version: str | None) -> list[dict[str, Any]]:
    """The variants that hold in a version, or in one of its neighbours."""
    places = _around(version) if version is not None else (len(releases()) - 1,)
    return [
        variant
        for variant in variants
        if any(first <= at <= last for first, last in variant["in"] for at in places or (0,))
    ]


@lru_cache(maxsize=64)
def _around(version: str) -> tuple[int, ...]:
    """Places of the releases that decide for a version: itself, or its neighbours; () before the oldest."""
    keys = [version_key(release) for release in releases()]
    key = version_key(version)
    if key in keys:
        return (keys.index(key),)
    after = next((at for at, other in enumerate(keys) if other > key), None)
    if after is None:
        return (len(keys) - 1,)
    return () if after == 0 else (after - 1, after)
