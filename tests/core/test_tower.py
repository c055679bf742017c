"""What a vision tower holds, against allocations recorded in vLLM 0.24.0 on H200."""

from __future__ import annotations

import pytest

from loadmaster.core.allocator import Allocator
from loadmaster.core.facts import GIB, MIB, ModelFacts
from loadmaster.core.tower import Tower, encode, tower_of
from tests.core.launches import DENSE_9B, GEMMA_27B, MOE_35B, VL_7B


def qwen_3(split: int = 1, copies_pixels: bool = False, deepstack: int = 0) -> Tower:
    return Tower(
        hidden=1152,
        intermediate=4304,
        features=1536,
        merge=4,
        output=2048,
        split=split,
        copies_pixels=copies_pixels,
        deepstack=deepstack,
    )


def peak(tower: Tower, patches: int) -> float:
    """Live at once with the 32 MiB of cuBLAS, GiB."""
    state = Allocator()
    state.take("matrix workspace", 32 * MIB)
    steps, _, _ = encode(tower, patches, "")
    state.run(steps)
    return state.live_peak / GIB


# torch's peak increase in the profile of a picture of 4096 x 4096 (65,536 patches), or of the longest dummy video.
@pytest.mark.parametrize(
    ("tower", "patches", "recorded"),
    [
        (qwen_3(split=2), 65536, 1.494),  # 35B-A3B, two ranks share the matrices
        (qwen_3(copies_pixels=True), 65536, 2.104),  # data mode: a whole tower, its pictures cut out
        (qwen_3(), 65536, 1.916),  # 27B and 9B on one card
        (qwen_3(deepstack=3), 65536, 2.104),  # Qwen3-VL 30B-A3B
    ],
)
def test_recorded_peaks(tower: Tower, patches: int, recorded: float) -> None:
    assert peak(tower, patches) == pytest.approx(recorded, abs=0.005)


def test_recorded_peak_of_windowed_towers() -> None:
    assert VL_7B.vision is not None
    tower = tower_of(VL_7B.vision, 1, False, 2)
    assert tower is not None
    assert peak(tower, 131072) == pytest.approx(4.427, abs=0.03)


def test_recorded_growth_of_a_ladder_of_pictures() -> None:
    """Each picture finds only segments that are too small: what was reserved anew at 2896 and at 4096 pixels."""
    state, grown = Allocator(), {}
    for number, side in enumerate((512, 1024, 1984, 2880, 4096)):
        before = state.reserved
        steps, output, _ = encode(qwen_3(split=2), (side // 16) ** 2, f"{number} ")
        state.run(steps)
        state.release(output)
        grown[side] = (state.reserved - before) / GIB
    assert grown[1984] == pytest.approx(0.41, abs=0.05)
    assert grown[2880] == pytest.approx(0.953, abs=0.01)
    assert grown[4096] == pytest.approx(1.910, abs=0.01)


@pytest.mark.parametrize("model", [MOE_35B, DENSE_9B, VL_7B, GEMMA_27B], ids=lambda model: str(model.model_type))
def test_nothing_stays_but_the_output(model: ModelFacts) -> None:
    vision = model.vision
    assert vision is not None
    for split, data in ((1, False), (2, False), (2, True)):
        tower = tower_of(vision, split, data, 2)
        assert tower is not None
        state = Allocator()
        steps, output, size = encode(tower, 4096, "")
        state.run(steps)
        assert abs(state.live - size) <= MIB  # a segment's remainder may stay with the block
        state.release(output)
        assert state.live == 0
