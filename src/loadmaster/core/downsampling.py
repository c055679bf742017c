"""Readings over time in fewer points: lowest, mean and highest of each slot of a fixed width.

A slot without a reading has ``inf``, ``nan`` and ``-inf``, so that the lowest and the highest of slots come out right
without a look at each; the mean is then taken over the slots that have one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from msgspec import Struct


class Slots(Struct, frozen=True):
    """One series over slots of equal width: three numbers a slot."""

    low: array[float]
    mean: array[float]
    high: array[float]

    @classmethod
    def empty(cls, count: int) -> Slots:
        return cls(
            array("f", [math.inf]) * count,
            array("f", [math.nan]) * count,
            array("f", [-math.inf]) * count,
        )

    def __len__(self) -> int:
        return len(self.mean)

    @classmethod
    def from_bytes(cls, content: bytes) -> Slots:
        """What :meth:`to_bytes` made. Raises ValueError for anything else."""
        size, rest = divmod(len(content), 3)
        if rest:
            raise ValueError("three columns of equal length are expected")
        columns = [array("f") for _ in range(3)]
        for place, column in enumerate(columns):
            column.frombytes(content[place * size : (place + 1) * size])
        return cls(*columns)

    def to_bytes(self) -> bytes:
        return self.low.tobytes() + self.mean.tobytes() + self.high.tobytes()

    def put(self, place: int, other: Slots) -> None:
        """Put ``other`` in, its first slot at ``place``; what reaches beyond either end is left out."""
        begin, end = max(0, place), min(len(self), place + len(other))
        if begin >= end:
            return
        part = slice(begin - place, end - place)
        self.low[begin:end] = other.low[part]
        self.mean[begin:end] = other.mean[part]
        self.high[begin:end] = other.high[part]


def slots_of(places: Sequence[int], values: Sequence[float], count: int) -> Slots:
    """Readings as slots. ``places``: the slot of each value, rising; ``nan`` is no reading."""
    slots = Slots.empty(count)
    low, mean, high = slots.low, slots.mean, slots.high
    begin, total = 0, len(places)
    while begin < total:
        place, end = places[begin], begin + 1
        while end < total and places[end] == place:
            end += 1
        here: Sequence[float] = values[begin:end]
        added = math.fsum(here)
        if math.isnan(added):
            here = [value for value in here if value == value]
            added = math.fsum(here)
        if here and 0 <= place < count:
            low[place], mean[place], high[place] = min(here), added / len(here), max(here)
        begin = end
    return slots


def coarser(slots: Slots, by: int) -> Slots:
    """The same in slots that are ``by`` times as wide; the last one may be filled up with nothing."""
    if by == 1:
        return slots
    count = len(slots)
    missing = -count % by
    if missing:
        longer = Slots.empty(count + missing)
        longer.put(0, slots)
        slots = longer
    low = array("f", map(min, *(slots.low[place::by] for place in range(by))))
    high = array("f", map(max, *(slots.high[place::by] for place in range(by))))
    mean = array("f", (added / by for added in map(math.fsum, zip(*(slots.mean[place::by] for place in range(by))))))
    if math.isnan(math.fsum(mean)):
        for place, value in enumerate(mean):
            if value != value:
                here = [one for one in slots.mean[place * by : (place + 1) * by] if one == one]
                if here:
                    mean[place] = math.fsum(here) / len(here)
    return Slots(low, mean, high)
