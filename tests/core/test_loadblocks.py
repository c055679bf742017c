"""Blocks of the allocator beyond the tensors in them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.facts import MIB
from loadmaster.core.loadblocks import SPLIT_LIMIT, allocated_bytes

SIZES = st.lists(st.integers(1, 64 * MIB), max_size=40)


def test_a_segment_of_its_own_is_kept_whole_when_little_is_left() -> None:
    # Qwen2.5-VL-7B: gate and up are 259 MiB, in a segment of 260, of which exactly 1 MiB is left
    assert allocated_bytes([259 * MIB]) == 260 * MIB
    assert allocated_bytes([258 * MIB + 1024]) == 258 * MIB + 1024
    assert allocated_bytes([258 * MIB]) == 258 * MIB


def test_what_is_left_serves_the_next_tensor() -> None:
    assert allocated_bytes([18 * MIB + 512 * 1024, 512 * 1024]) == 19 * MIB  # small tensors have segments of their own
    assert allocated_bytes([18 * MIB + 512 * 1024, 5 * MIB // 4]) == 20 * MIB  # and this one takes the rest
    assert allocated_bytes([5 * MIB] * 4) == 20 * MIB
    assert allocated_bytes([9 * MIB, 9 * MIB]) == 18 * MIB
    assert allocated_bytes([9 * MIB, 9 * MIB, 2 * MIB]) == 20 * MIB


def test_large_tensors_keep_their_segment_under_the_split_limit() -> None:
    size = 20 * MIB + 512
    assert allocated_bytes([size]) == size
    assert allocated_bytes([size], SPLIT_LIMIT) == 22 * MIB
    assert allocated_bytes([19 * MIB + 512], SPLIT_LIMIT) == 20 * MIB


@given(SIZES, st.sampled_from([None, SPLIT_LIMIT]))
def test_blocks_are_never_smaller_and_at_most_2_mib_larger(sizes: list[int], limit: int | None) -> None:
    total = allocated_bytes(sizes, limit)
    assert sum(sizes) <= total <= sum(size + 2 * MIB for size in sizes)
