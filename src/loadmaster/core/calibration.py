"""Measured constants, each with a meaning, bounds and a source (``data/calibration.toml``).

They stand for what the sources of the engine do not say: memory that drivers, libraries and the allocator take.
"""

from __future__ import annotations

from functools import cache

from msgspec import Struct

from loadmaster.core.facts import Amount, Basis
from loadmaster.core.tables import load_toml


class Constant(Struct, frozen=True):
    """One constant in bytes (or bytes per unit): expected value and bounds."""

    name: str
    value: float
    low: float
    high: float
    basis: Basis
    meaning: str

    def times(self, factor: float, note: str | None = None) -> Amount:
        """The constant times a count, as an amount of bytes; ``note`` replaces the meaning."""
        return Amount(
            round(self.value * factor),
            round(self.low * factor),
            round(self.high * factor),
            self.basis,
            note or self.meaning,
        )

    def amount(self, note: str | None = None) -> Amount:
        return self.times(1, note)


@cache
def constant(name: str) -> Constant:
    """The constant of this name. Raises KeyError for a name that the table does not have."""
    row = load_toml("calibration.toml")[name]
    unit = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1, "ratio": 1}[row["unit"]]
    return Constant(
        name, row["value"] * unit, row["low"] * unit, row["high"] * unit, row.get("basis", "assumed"), row["meaning"]
    )
