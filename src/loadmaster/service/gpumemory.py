"""Whether the cards have the memory that an engine asks for at its start, and who holds what it lacks."""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec import Struct

from loadmaster.core.facts import GIB, GpuFacts, GpuProcess, LoadSheet
from loadmaster.edge.gpus import GpuSpecError, read_nvml


class Shortage(Struct, frozen=True, kw_only=True):
    """A card with less free memory than the engine takes at once."""

    card: int
    name: str | None
    free_bytes: int
    needed_bytes: int
    holders: tuple[GpuProcess, ...] = ()

    @property
    def words(self) -> str:
        held = ", ".join(_holder(process) for process in self.holders) or "a process that the driver does not name"
        free, needed = self.free_bytes / GIB, self.needed_bytes / GIB
        return f"GPU {self.card}: {free:.2f} GiB free, {needed:.2f} GiB needed; held by {held}"


def read_cards() -> tuple[GpuFacts, ...] | None:
    """The cards with free memory and processes; None where no driver answers."""
    try:
        return read_nvml()
    except GpuSpecError:
        return None


def needed(sheet: LoadSheet | None, gpus: Sequence[GpuFacts]) -> dict[int, int]:
    """Bytes by card that the engine wants free at its start: its budget. Empty for other machines' cards."""
    if sheet is None or not gpus or any(gpu.source != "nvml" for gpu in gpus):
        return {}
    return {load.index: load.budget_bytes for load in sheet.gpus}


def shortages(wanted: dict[int, int], cards: Sequence[GpuFacts]) -> tuple[Shortage, ...]:
    """The cards with less free than wanted; those whose free memory is unknown are not judged."""
    found = []
    for card in cards:
        want = wanted.get(card.index)
        if want is None or card.free_bytes is None or card.free_bytes >= want:
            continue
        holders = tuple(process for process in card.processes or () if process.pid != os.getpid())
        found.append(
            Shortage(card=card.index, name=card.name, free_bytes=card.free_bytes, needed_bytes=want, holders=holders)
        )
    return tuple(found)


def _holder(process: GpuProcess) -> str:
    # the name is the driver's: in a container its process numbers are not those seen here
    used = f" ({process.used_bytes / GIB:.2f} GiB)" if process.used_bytes is not None else ""
    return f"process {process.pid}{f' {process.name}' if process.name else ''}{used}"
