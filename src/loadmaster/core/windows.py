"""Figures over the last seconds of a series, each step in constant time, with readings that may be missing."""

from __future__ import annotations

from collections import deque


class MeanWindow:
    """The mean of the readings of the last ``seconds``. None is no reading."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._readings: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, at: float, value: float | None) -> None:
        readings = self._readings
        while readings and not at - self.seconds < readings[0][0] <= at:  # also after the clock was set back
            self._sum -= readings.popleft()[1]
        if value is not None:
            readings.append((at, value))
            self._sum += value
        elif not readings:
            self._sum = 0.0

    @property
    def mean(self) -> float | None:
        return self._sum / len(self._readings) if self._readings else None

    @property
    def count(self) -> int:
        return len(self._readings)

    @property
    def span_s(self) -> float:
        """From the oldest reading to the newest."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0

    def clear(self) -> None:
        self._readings.clear()
        self._sum = 0.0


class GrowthWindow:
    """How much a total has grown in the last ``seconds``, and how fast.

    A total that shrinks has begun anew from 0. What it grew by in a gap of the series counts, over the gap's length.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._readings: deque[tuple[float, float]] = deque()  # the first one is the last before the window
        self._last: float | None = None
        self._grown = 0.0

    def add(self, at: float, total: float | None) -> None:
        readings = self._readings
        if readings and at < readings[-1][0]:
            readings.clear()
            self._last = None
        if total is not None:
            if self._last is not None:
                self._grown += total - self._last if total >= self._last else total
            self._last = total
            readings.append((at, self._grown))
        while len(readings) > 1 and readings[1][0] <= at - self.seconds:
            readings.popleft()

    @property
    def growth(self) -> float | None:
        """None before there are two readings."""
        return self._readings[-1][1] - self._readings[0][1] if len(self._readings) > 1 else None

    def a_minute(self) -> float | None:
        """The growth a minute, over the time that it took, at least the window."""
        growth = self.growth
        if growth is None:
            return None
        return growth * 60.0 / max(self.seconds, self._readings[-1][0] - self._readings[0][0])
