"""The highest point of serving: follows the readings of a run and compares the plan with the most that was held."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, structs

from loadmaster.core.facts import MIB, LoadSheet
from loadmaster.core.observation import CardReading, Snapshot
from loadmaster.core.reconcile import CardActual, Reconciliation, reconcile
from loadmaster.core.series import other_bytes
from loadmaster.core.served import ServedLoad, with_picture
from loadmaster.edge.runquery import RunObservation, RunsUnreadable
from loadmaster.edge.runstore import RunStore
from loadmaster.service.background import in_thread
from loadmaster.service.enginestate import read_state

_NOTICED = 32 * MIB  # a peak that is less above the last one is not compared anew
_LEAST_BETWEEN_S = 10.0
_EARLY_S = 30.0  # a gateway that sees the engine so soon after it was ready has seen all of its requests


class _Run(Struct):
    """The run that is followed. ``highest``: bytes by card as the driver counts, its reserve included."""

    number: int
    plan: LoadSheet
    observed: RunObservation
    highest: dict[int, int]
    compared: dict[int, int]
    requests: int = 0
    compared_at: float = 0.0
    seen_whole: bool = True  # from its first request on; else pictures may have come that nobody noted


class ServingPeak:
    """One of a gateway. ``found``: what was compared of the run that goes on, for who shows it."""

    def __init__(self, store: RunStore, engine_state: Path) -> None:
        self._store = store
        self._engine_state = engine_state
        self._start: tuple[int | None, float | None] | None = None
        self._run: _Run | None = None
        self._pictures: tuple[tuple[int, int], ...] = ()
        self.found: tuple[Reconciliation, ...] = ()

    def saw_picture(self, size: tuple[int, int]) -> None:
        """A picture of this size, width and height, goes to the engine."""
        self._pictures = with_picture(self._pictures, size)

    async def take(self, snapshot: Snapshot) -> None:
        """One second's readings. Compares, and keeps the result, when more is held than ever in this run."""
        engine = snapshot.engine
        if engine is None or engine.state != "ready":
            if engine is None or engine.state != "stuck":
                self._start, self._run, self._pictures, self.found = None, None, (), ()
            return
        if self._run is None or self._start != (engine.pid, engine.since):
            self._run = await in_thread(self._read_run)
            self._start = (engine.pid, engine.since)
            if self._run is None:
                return  # it is being written, or nothing is recorded: the next second tells
            late = engine.since is not None and snapshot.at - engine.since > _EARLY_S
            self._run.seen_whole = not late or any(one.point == "serving" for one in self.found)
        run = self._run
        run.requests = max(run.requests, engine.running or 0)
        for card in snapshot.cards or ():
            held = held_bytes(card)
            if held is not None:
                run.highest[card.index] = max(held, run.highest.get(card.index, 0))
        more = any(size >= run.compared.get(index, 0) + _NOTICED for index, size in run.highest.items())
        if more and snapshot.at - run.compared_at >= _LEAST_BETWEEN_S:
            run.compared, run.compared_at = dict(run.highest), snapshot.at
            await in_thread(lambda: self._compare(run, snapshot))

    def _read_run(self) -> _Run | None:
        state = read_state(self._engine_state)
        if state is None or state.run is None:
            return None
        query = self._store.query
        try:
            plan, observed = query.plan(state.run), query.observation(state.run)
            self.found = tuple(query.reconciliations(state.run))
        except RunsUnreadable:
            return None
        if plan is None or observed is None:
            return None
        ready = {card.index: card.ready_bytes for card in observed.actual.cards}
        known = {index: size for index, size in ready.items() if size is not None}
        run = _Run(number=state.run, plan=plan, observed=observed, highest={}, compared=known)
        for earlier in (one for one in self.found if one.point == "serving"):  # of this gateway before it restarted
            held = {card.index: card.actual_bytes for card in earlier.cards if card.actual_bytes is not None}
            run.highest, run.compared = dict(held), dict(held)
            run.requests = earlier.served.requests or 0
            for size in reversed(earlier.served.pictures or ()):
                if size not in self._pictures:
                    self._pictures = (size, *self._pictures)
        return run

    def _compare(self, run: _Run, snapshot: Snapshot) -> None:
        actual = run.observed.actual
        before = {card.index: card for card in actual.cards}
        cards = []
        for card in snapshot.cards or ():
            ready = before.get(card.index, CardActual(index=card.index))
            others = other_bytes(card)
            cards.append(
                structs.replace(
                    ready,
                    driver_reserved_bytes=(
                        card.reserved_bytes if ready.driver_reserved_bytes is None else ready.driver_reserved_bytes
                    ),
                    other_bytes=ready.other_bytes if others is None else others,
                    serving_bytes=run.highest.get(card.index),
                )
            )
        pictures = self._pictures if run.seen_whole else None
        served = ServedLoad(pictures=pictures, requests=max(1, run.requests))
        found = reconcile(
            run.plan, structs.replace(actual, cards=tuple(cards), served=served), "serving", run.observed.replays
        )
        self._store.reconcile(run.number, snapshot.at, found)
        self.found = (*(one for one in self.found if one.point != "serving"), found)


def held_bytes(card: CardReading) -> int | None:
    """What is in use on a card as the driver counts, with what it keeps for itself."""
    return None if card.used_bytes is None else card.used_bytes + (card.reserved_bytes or 0)
