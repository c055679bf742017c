"""Whose the processes are that the driver lists: the engine's, somebody else's, or nobody can tell."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from loadmaster.core.observation import CardReading
from loadmaster.edge.process import Identity, mark_of, read_process

_LOOK_AGAIN_S = 10.0
_MOST_PARENTS = 64


class RunMembers:
    """Remembers what was found out of a process for ten seconds, so that a look every second costs next to nothing."""

    def __init__(self) -> None:
        self._run: Identity | None = None
        self._known: dict[int, tuple[float, bool | None]] = {}

    def follow(self, run: Identity | None) -> None:
        """The run whose processes are the engine's; None while no engine runs."""
        if run != self._run:
            self._run = run
            self._known.clear()

    def told(self, cards: Sequence[CardReading]) -> tuple[CardReading, ...]:
        """The cards with ``own`` of each process. In a container the driver's numbers are those of the machine
        outside: as soon as one does not exist here, none is called somebody else's."""
        now = time.monotonic()
        listed = {process.pid for card in cards for process in card.processes or ()}
        for pid in [pid for pid in self._known if pid not in listed]:
            del self._known[pid]
        owners = {pid: self._owner(pid, now) for pid in listed}
        numbers_are_ours = None not in owners.values()
        found = []
        for card in cards:
            if card.processes:
                processes = tuple(
                    msgspec.structs.replace(
                        process, own=owners[process.pid] if owners[process.pid] or numbers_are_ours else None
                    )
                    for process in card.processes
                )
                card = msgspec.structs.replace(card, processes=processes)
            found.append(card)
        return tuple(found)

    def _owner(self, pid: int, now: float) -> bool | None:
        known = self._known.get(pid)
        if known is None or now - known[0] > _LOOK_AGAIN_S:
            known = self._known[pid] = (now, self._find_out(pid))
        return known[1]

    def _find_out(self, pid: int) -> bool | None:
        process = read_process(pid)
        if process is None:
            return None
        run = self._run
        if run is None:
            return False
        for _ in range(_MOST_PARENTS):
            if process.pid == run.pid or process.session == run.pid or mark_of(process.pid) == run.marker:
                return True
            process = read_process(process.parent) if process.parent > 1 else None
            if process is None:
                return False
        return False
