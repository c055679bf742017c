"""From readings to the store, to plan against actual at the highest point, and to /metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest

from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import GIB
from loadmaster.core.observation import CardReading, EngineReading, Snapshot
from loadmaster.edge.runquery import RunObservation
from loadmaster.edge.runstore import RunStore
from loadmaster.service.enginestate import EngineState, write_state
from loadmaster.service.places import Places
from loadmaster.service.runrecorder import store_path
from loadmaster.service.watch import Watch
from loadmaster.service.watching import Watching
from tests.keptruns import LONG, record_of, sheet_of
from tests.recordedruns import RECORDS, planned, readings_of

_MEASURED = RECORDS[LONG]["measured"]
_RESERVED = round(_MEASURED["driver_reserved_gib"] * GIB)
_T0 = 1_790_000_000.0


class _Recorded:
    """The readings of a recorded launch, twelve seconds apart; the last one again and again."""

    def __init__(self) -> None:
        self.looks = 0
        self.closed = False
        self._heights = [_MEASURED["nvml_ready_gib"], *_MEASURED["nvml_peak_gib"].values()]

    async def look(self) -> Snapshot:
        heights = self._heights[min(self.looks, len(self._heights) - 1)]
        self.looks += 1
        cards = tuple(
            CardReading(
                index=index,
                name="NVIDIA H200",
                total_bytes=round(140.4 * GIB),
                used_bytes=round(height * GIB) - _RESERVED,
                reserved_bytes=_RESERVED,
            )
            for index, height in enumerate(heights)
        )
        engine = EngineReading(state="ready", pid=7, since=_T0, running=1)
        return Snapshot(at=_T0 + 12 * self.looks, cards=cards, engine=engine)

    async def close(self) -> None:
        self.closed = True


def _run_of(places: Places) -> int:
    """A run as run-engine leaves it when the engine is ready."""
    store = RunStore(store_path(places), places.name)
    number = store.begin_run(structs.replace(record_of(LONG, _T0), deployment=places.name), sheet_of(LONG))
    assert number is not None
    actual = readings_of(LONG)
    cards = tuple(structs.replace(card, serving_bytes=None) for card in actual.cards)
    store.observe(number, RunObservation(actual=structs.replace(actual, cards=cards), replays=planned(LONG)[1]))
    store.close()
    write_state(places.engine, EngineState(state="ready", run=number, pid=7))
    return number


def test_what_the_watch_sees_is_kept_compared_and_exported(tmp_path: Path) -> None:
    places = Places(tmp_path / "deployments" / "demo")
    places.make()
    number = _run_of(places)
    looker = _Recorded()

    async def life() -> bytes:
        deployment = msgspec.convert({"name": "demo", "model": "owner/model"}, Deployment)
        watching = Watching(places, sheet_of(LONG))
        watching.watch = watch = Watch(
            deployment, places, sheet_of(LONG), sampler=looker, store=watching.store, interval_s=0.02
        )
        for label in _MEASURED["nvml_peak_gib"]:
            if label[0].isdigit():
                width, height, _ = map(int, label.split("x"))
                watching.peak.saw_picture((width, height))
        tasks = [asyncio.create_task(work()) for work in (watching.run, watch.run)]
        try:
            async with asyncio.timeout(30):
                while looker.looks < 12 or not watching.peak.found:
                    await asyncio.sleep(0.02)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        registry = CollectorRegistry()
        registry.register(watching.metrics)
        text = generate_latest(registry)
        watching.close()
        return text

    text = asyncio.run(life()).decode()
    assert looker.closed
    assert 'loadmaster_unexplained_bytes{gpu="0",point="serving"}' in text
    assert 'loadmaster_gpu_memory_used_bytes{gpu="1"}' in text
    store = RunStore(store_path(places), places.name)
    query = store.query
    store.close()
    [found] = query.reconciliations(number)
    assert found.point == "serving"
    for card in found.cards:
        highest = max(values[card.index] for values in _MEASURED["nvml_peak_gib"].values())
        assert card.actual_bytes is not None and abs(card.actual_bytes - highest * GIB) < 2
        assert card.unexplained_bytes is not None and abs(card.unexplained_bytes) < 0.3 * GIB
    read = query.readings("demo", _T0, _T0 + 600, points=600, names=["card0.used_bytes"])
    assert len(read.at) >= 12
    assert max(value for value in read.series["card0.used_bytes"].mean if value is not None) > 24 * GIB
    assert query.run_readings(number, points=60, names=["card0.used_bytes"]).series
