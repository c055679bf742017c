"""Memory of the cards after a run: free, held, or not to be told."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest

from loadmaster.core.facts import GIB, GpuFacts, GpuProcess
from loadmaster.edge import gpurelease
from loadmaster.edge.gpurelease import Held, Reader, holders, wait_released
from loadmaster.edge.gpus import GpuSpecError

DEAD = 1 << 30  # above the kernel's largest process number


def card(free: int | None, *processes: int, index: int = 0, listed: bool = True) -> GpuFacts:
    held = tuple(GpuProcess(pid, "engine", 5 * GIB) for pid in processes) if listed else None
    return GpuFacts(index=index, total_bytes=24 * GIB, free_bytes=free, uuid=f"GPU-{index}", processes=held)


def readings(*each: Sequence[GpuFacts]) -> Reader:
    """A reader that gives these one after the other, the last one over and over."""
    left = list(each)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


@pytest.fixture(autouse=True)
def _whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpurelease, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(gpurelease, "_first_is_init", lambda: True)


def test_who_holds_what() -> None:
    cards = [card(1 * GIB, 7, 8), card(2 * GIB, 8, index=1), card(3 * GIB, listed=False, index=2)]
    assert holders({8, 9}, cards) == (Held(0, 8, 5 * GIB), Held(1, 8, 5 * GIB))


def test_free_once_the_driver_has_taken_it_back() -> None:
    mine, me = DEAD, os.getpid()
    release = wait_released({mine}, read=readings([card(0, mine)], [card(0, mine)], [card(24 * GIB, me)]))
    assert release.free is True
    assert release.held == ()


def test_held_for_too_long() -> None:
    release = wait_released({DEAD}, read=readings([card(0, DEAD)]), timeout_s=0.05)
    assert release.free is False
    assert release.held == (Held(0, DEAD, 5 * GIB),)
    assert release.seconds >= 0.05


def test_no_driver() -> None:
    def read() -> Sequence[GpuFacts]:
        raise GpuSpecError("no NVIDIA driver answers here")

    release = wait_released({1}, read=read)
    assert (release.free, release.why) == (None, "no NVIDIA driver answers here")


def test_in_a_container_the_free_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpurelease, "_first_is_init", lambda: False)
    before = [card(23 * GIB)]
    assert wait_released({5}, read=readings([card(23 * GIB)])).free is None
    assert wait_released({5}, before=before, read=readings([card(2 * GIB)], [card(23 * GIB)])).free is True
    held = wait_released({5}, before=before, read=readings([card(13 * GIB)]), timeout_s=0.01)
    assert (held.free, held.why) == (False, "10,240 MiB less is free than before the start")
    assert wait_released({5}, before=[card(None)], read=readings([card(23 * GIB)])).free is None


@pytest.mark.parametrize("strange", [lambda: card(9 * GIB, DEAD), lambda: card(9 * GIB, listed=False)])
def test_numbers_of_another_table_prove_nothing(strange: Callable[[], GpuFacts]) -> None:
    assert wait_released({5}, read=readings([strange()])).free is None
    assert wait_released({5}, before=[card(9 * GIB)], read=readings([strange()])).free is True
