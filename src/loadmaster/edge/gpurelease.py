"""Whether the cards' memory is free again after a run has ended, and who holds it when it is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct

from loadmaster.core.facts import MIB, GpuFacts
from loadmaster.edge.gpus import GpuSpecError, read_nvml
from loadmaster.edge.process import read_process

_LOOK_EVERY_S = 0.25
# Contexts of other programs come and go between two readings; less than any engine's weights.
_DRIFT_BYTES = 512 * MIB

Reader = Callable[[], Sequence[GpuFacts]]


class Held(Struct, frozen=True):
    """Memory of one card that a process holds; ``used_bytes`` None: the driver does not say how much."""

    card: int
    pid: int
    used_bytes: int | None


class Release(Struct, frozen=True, kw_only=True):
    """``free``: True proven, False still held, None not to be told here (``why``)."""

    free: bool | None
    held: tuple[Held, ...] = ()
    why: str
    seconds: float


def holders(pids: Collection[int], cards: Sequence[GpuFacts]) -> tuple[Held, ...]:
    """What these processes hold on the cards."""
    return tuple(
        Held(card.index, process.pid, process.used_bytes)
        for card in cards
        for process in card.processes or ()
        if process.pid in pids
    )


def wait_released(
    pids: Collection[int],
    *,
    before: Sequence[GpuFacts] | None = None,
    timeout_s: float = 15.0,
    read: Reader = read_nvml,
) -> Release:
    """Wait until none of the processes holds GPU memory; the driver takes it back a moment after they have ended.

    ``before``: the cards as they were before the start. It decides where the driver's process numbers say nothing, as
    in a container: then the memory is free when as much is free as before.
    """
    begin = time.monotonic()
    while True:
        release = _look(pids, before, read, begin)
        if release.free is not False or release.seconds >= timeout_s:
            return release
        time.sleep(_LOOK_EVERY_S)


def _look(pids: Collection[int], before: Sequence[GpuFacts] | None, read: Reader, begin: float) -> Release:
    try:
        cards = read()
    except GpuSpecError as error:
        return Release(free=None, why=error.message, seconds=time.monotonic() - begin)
    held = holders(pids, cards)
    seconds = time.monotonic() - begin
    if held:
        return Release(free=False, held=held, why=f"{len(held)} processes of the run hold GPU memory", seconds=seconds)
    if _numbers_are_ours(cards):
        return Release(free=True, why="the driver lists no process of the run", seconds=seconds)
    if before is None:
        return Release(free=None, why="the driver's process numbers are not those seen here", seconds=seconds)
    missing = _missing(before, cards)
    if missing is None:
        return Release(free=None, why="the free memory before the start is not known", seconds=seconds)
    if missing > _DRIFT_BYTES:
        why = f"{missing // MIB:,} MiB less is free than before the start"
        return Release(free=False, why=why, seconds=seconds)
    return Release(free=True, why="as much memory is free as before the start", seconds=seconds)


def _numbers_are_ours(cards: Sequence[GpuFacts]) -> bool:
    """Whether the process numbers that the driver lists are those of this machine's (or container's) table."""
    if any(card.processes is None for card in cards):
        return False
    listed = [process.pid for card in cards for process in card.processes or ()]
    seen = sum(read_process(pid) is not None for pid in listed)
    # in a container the list is of other numbers, or empty though memory is held
    return seen == len(listed) and (bool(listed) or read_process(1) is None or _first_is_init())


def _first_is_init() -> bool:
    """Whether process 1 is a whole machine's, not a container's: the kernel's own threads have 2 as their parent."""
    second = read_process(2)
    return second is not None and second.name == "kthreadd"


def _missing(before: Sequence[GpuFacts], after: Sequence[GpuFacts]) -> int | None:
    """Bytes less that are free on the card that lacks most; None when either reading does not say."""
    earlier = {card.uuid or str(card.index): card.free_bytes for card in before}
    most = 0
    for card in after:
        was = earlier.get(card.uuid or str(card.index))
        if was is None or card.free_bytes is None:
            return None
        most = max(most, was - card.free_bytes)
    return most
