"""Whether memory creeps up between equal loads: a leak, told from noise and from a single step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

_EACH_PART = 0.25  # a leak grows in either half of the time; a step only in one
_RISING_PAIRS = 0.75
_ONE_STEP = 0.5  # an allocator that grew for one large picture has made its step at once


class Creep:
    """The lowest reading of each slot of time at each level of load; levels are compared with themselves alone."""

    def __init__(self, slot_s: float, slots: int, least_slots: int) -> None:
        self._slot_s = slot_s
        self._slots = slots
        self._least = least_slots
        self._lows: dict[int, deque[float]] = {}
        self._slot: int | None = None
        self._now: dict[int, float] = {}
        self._grown = 0.0

    def add(self, at: float, running: int, used: float) -> float:
        """Take a reading; bytes by which memory has crept up at some level of load, 0 when it has not."""
        slot = int(at // self._slot_s)
        if slot != self._slot:
            for level, low in self._now.items():
                self._lows.setdefault(level, deque(maxlen=self._slots)).append(low)
            self._now = {}
            self._slot = slot
            self._grown = max(
                (crept(list(lows)) for lows in self._lows.values() if len(lows) >= self._least), default=0.0
            )
        level = running.bit_length()  # 0, 1, 2-3, 4-7, ...
        self._now[level] = min(used, self._now.get(level, used))
        return self._grown

    def reset(self) -> None:
        """Another engine runs: what the last one held says nothing."""
        self._lows.clear()
        self._now.clear()
        self._grown = 0.0


def crept(lows: Sequence[float]) -> float:
    """By how much a series has grown steadily from its first third to its last, 0 when not steadily."""
    count = len(lows)
    third = max(1, count // 3)
    first, middle, last = median(lows[:third]), median(lows[third : count - third]), median(lows[count - third :])
    grown = last - first
    if grown <= 0 or min(middle - first, last - middle) < _EACH_PART * grown:
        return 0.0
    if max(after - before for before, after in pairwise(lows)) > _ONE_STEP * grown:
        return 0.0
    pairs = [lows[there] > lows[here] for here in range(count) for there in range(here + 1, count)]
    return grown if sum(pairs) >= _RISING_PAIRS * len(pairs) else 0.0
