"""Slots of readings: bounds and means over any readings, gaps included."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.downsampling import Slots, coarser, slots_of

_VALUES = st.one_of(st.just(math.nan), st.floats(-1e9, 1e9, width=32))


@given(values=st.lists(_VALUES, max_size=200), width=st.integers(1, 12), by=st.integers(1, 9))
def test_bounds_and_means_of_any_readings(values: list[float], width: int, by: int) -> None:
    places = [place // width for place in range(len(values))]
    count = max(1, -(-len(values) // width))
    slots = coarser(slots_of(places, values, count), by)
    assert len(slots) == -(-count // by)
    for place in range(len(slots)):
        here = [value for value in values[place * by * width : (place + 1) * by * width] if not math.isnan(value)]
        if not here:
            assert math.isinf(slots.low[place]) and math.isinf(slots.high[place]) and math.isnan(slots.mean[place])
            continue
        assert slots.low[place] == min(here)
        assert slots.high[place] == max(here)
        room = 1e-5 * max(1.0, *map(abs, here))
        assert slots.low[place] - room <= slots.mean[place] <= slots.high[place] + room


def test_the_mean_of_slots_leaves_gaps_out() -> None:
    slots = slots_of([0, 0, 2], [1.0, 3.0, 8.0], 4)
    assert list(coarser(slots, 2).mean) == [2.0, 8.0]
    assert list(coarser(slots, 4).mean) == [5.0]


@given(st.lists(_VALUES, max_size=50))
def test_bytes_bring_slots_back(values: list[float]) -> None:
    slots = slots_of(range(len(values)), values, len(values))
    assert Slots.from_bytes(slots.to_bytes()).to_bytes() == slots.to_bytes()


def test_other_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="three columns"):
        Slots.from_bytes(b"abcd")


@given(place=st.integers(-10, 20), length=st.integers(0, 12))
def test_what_reaches_beyond_the_ends_is_left_out(place: int, length: int) -> None:
    target = Slots.empty(10)
    target.put(place, slots_of(range(length), [float(number) for number in range(length)], length))
    for slot, value in enumerate(target.mean):
        inside = 0 <= slot - place < length
        assert (value == slot - place) if inside else math.isnan(value)
