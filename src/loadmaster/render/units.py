"""Numbers as people read them. GiB is 2^30 bytes and always written so."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10

UNKNOWN = "unknown"


def gib(value: int | None, digits: int = 2) -> str:
    """``11.30 GiB``; ``unknown`` for None."""
    return UNKNOWN if value is None else f"{value / GIB:,.{digits}f} GiB"


def bare_gib(value: int | None, digits: int = 2) -> str:
    """The number alone, for table columns whose head names the unit."""
    return UNKNOWN if value is None else f"{value / GIB:,.{digits}f}"


def size(value: int | None) -> str:
    """Bytes in the largest binary unit that leaves at least 1: ``512 B``, ``3.1 MiB``, ``22.27 GiB``."""
    if value is None:
        return UNKNOWN
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if abs(value) >= unit:
            return f"{value / unit:,.{digits}f} {name}"
    return f"{value:,} B"


def count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def parameters(value: int | None) -> str:
    """``35.11 B`` (10^9), ``12.3 M`` (10^6)."""
    if value is None:
        return UNKNOWN
    if value >= 10**9:
        return f"{value / 1e9:,.2f} B"
    if value >= 10**6:
        return f"{value / 1e6:,.1f} M"
    return f"{value:,}"


def pixels(dimensions: tuple[int, int]) -> str:
    return f"{dimensions[0]}x{dimensions[1]}"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
