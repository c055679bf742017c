"""The allocator's rules one by one, and laws that hold for any order of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.allocator import Allocator
from loadmaster.core.facts import MIB


def test_small_requests_share_a_segment_of_2_mib() -> None:
    state = Allocator()
    state.run([("a", 1000), ("b", MIB), ("c", 512)])
    assert state.reserved == 2 * MIB
    assert state.live == 1024 + MIB + 512


def test_middle_requests_share_a_segment_of_20_mib_and_large_ones_have_their_own() -> None:
    state = Allocator()
    state.run([("a", 2 * MIB), ("b", 9 * MIB)])
    assert state.reserved == 20 * MIB
    state.take("large", 11 * MIB)
    assert state.reserved == 20 * MIB + 12 * MIB


def test_a_freed_block_serves_only_what_it_can_hold() -> None:
    state = Allocator()
    state.run([("a", 100 * MIB), ("a", None), ("b", 101 * MIB)])
    assert state.reserved == 202 * MIB
    state.run([("b", None), ("c", 60 * MIB), ("d", 40 * MIB)])
    assert state.reserved == 202 * MIB


def test_neighbours_join_when_they_are_free() -> None:
    state = Allocator()
    state.run([("a", 100 * MIB), ("a", None), ("b", 40 * MIB), ("c", 40 * MIB), ("b", None), ("c", None)])
    state.take("whole", 100 * MIB)
    assert state.reserved == 100 * MIB


def test_a_live_block_pins_its_segment() -> None:
    state = Allocator()
    state.run([("a", 100 * MIB), ("a", None), ("kept", 15 * MIB)])
    state.empty_cache()
    assert (state.live, state.reserved) == (15 * MIB, 100 * MIB)
    state.release("kept")
    state.empty_cache()
    assert state.reserved == 0


def test_a_name_is_allocated_once() -> None:
    state = Allocator()
    state.take("a", 1)
    with pytest.raises(ValueError, match="a is allocated"):
        state.take("a", 1)


requests = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 300 * MIB)), max_size=40)


@given(requests)
def test_live_is_within_reserved_and_nothing_is_lost(steps: list[tuple[int, int]]) -> None:
    state, live = Allocator(), set()
    for number, size in steps:
        name = str(number)
        if name in live:
            state.release(name)
            live.discard(name)
        else:
            state.take(name, size)
            live.add(name)
        assert 0 <= state.live <= state.reserved <= state.reserved_peak
        assert state.live_peak >= state.live
    twin = state.copy()
    for name in live:
        state.release(name)
    state.empty_cache()
    assert (state.live, state.reserved) == (0, 0)
    assert twin.live >= sum(1 for _ in live)
    assert twin.reserved >= twin.live


@given(requests)
def test_repeating_the_same_requests_reserves_nothing_more(steps: list[tuple[int, int]]) -> None:
    sizes = [("x" + str(index), size) for index, (_, size) in enumerate(steps)]
    state = Allocator()
    state.run(sizes)
    state.run([(name, None) for name, _ in sizes])
    once = state.reserved
    largest_first = sorted(sizes, key=lambda step: -step[1])
    state.run(largest_first)
    assert state.reserved == once
