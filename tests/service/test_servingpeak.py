"""The highest point of serving, from recorded readings second by second."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from loadmaster.core.facts import GIB
from loadmaster.core.observation import CardReading, EngineReading, Snapshot
from loadmaster.edge.runquery import RunObservation
from loadmaster.edge.runschema import FILE
from loadmaster.edge.runstore import RunStore
from loadmaster.service.enginestate import EngineState, write_state
from loadmaster.service.servingpeak import ServingPeak
from tests.keptruns import LONG, record_of, sheet_of
from tests.recordedruns import RECORDS, planned, readings_of

_MEASURED = RECORDS[LONG]["measured"]
_RESERVED = round(_MEASURED["driver_reserved_gib"] * GIB)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    made = RunStore(tmp_path / FILE, "demo")
    try:
        yield made
    finally:
        made.close()


def _begin(store: RunStore, folder: Path) -> tuple[int, ServingPeak]:
    number = store.begin_run(record_of(LONG, 1000.0), sheet_of(LONG))
    assert number is not None
    actual = readings_of(LONG)
    cards = tuple(structs.replace(card, serving_bytes=None) for card in actual.cards)
    ready = structs.replace(actual, cards=cards, served=type(actual.served)())
    store.observe(number, RunObservation(actual=ready, replays=planned(LONG)[1]))
    store.begin_run(record_of(LONG, 1.0))  # waits until what was handed over before is written
    write_state(folder / "engine.json", EngineState(state="ready", run=number, pid=7))
    return number, ServingPeak(store, folder / "engine.json")


def _snapshot(at: float, gib: list[float], state: str = "ready", running: int = 1, since: float = 1990.0) -> Snapshot:
    cards = tuple(
        CardReading(index=index, used_bytes=round(value * GIB) - _RESERVED, reserved_bytes=_RESERVED)
        for index, value in enumerate(gib)
    )
    engine = EngineReading(state=state, pid=7, since=since, running=running)  # type: ignore[arg-type]
    return Snapshot(at=at, cards=cards, engine=engine)


def test_each_new_height_is_compared_with_the_pictures_that_came(store: RunStore, tmp_path: Path) -> None:
    number, peak = _begin(store, tmp_path)
    at = 2000.0
    for label, gib in _MEASURED["nvml_peak_gib"].items():
        if label[0].isdigit():
            width, height, _ = map(int, label.split("x"))
            peak.saw_picture((width, height))
        for _ in range(3):
            asyncio.run(peak.take(_snapshot(at, gib)))
            at += 7
    asyncio.run(peak.take(_snapshot(at, _MEASURED["nvml_ready_gib"])))
    [found] = peak.found
    assert found.point == "serving"
    assert found.served.pictures == ((512, 512), (1024, 1024), (2000, 2000), (4096, 4096))
    for card in found.cards:
        assert card.actual_bytes == pytest.approx(max(v[card.index] for v in _MEASURED["nvml_peak_gib"].values()) * GIB)
        assert card.unexplained_bytes is not None and abs(card.unexplained_bytes) < 0.3 * GIB
    store.close()
    assert store.query.reconciliations(number) == [found]


def test_a_gateway_that_restarts_goes_on_from_what_was_compared(store: RunStore, tmp_path: Path) -> None:
    number, peak = _begin(store, tmp_path)
    peak.saw_picture((4096, 4096))
    asyncio.run(peak.take(_snapshot(2000.0, [25.5, 25.5], running=3)))
    store.begin_run(record_of(LONG, 2.0))  # waits until that is written
    again = ServingPeak(store, tmp_path / "engine.json")
    again.saw_picture((512, 512))
    asyncio.run(again.take(_snapshot(9000.0, [25.0, 25.0])))
    assert again.found == peak.found  # lower than before: nothing new
    asyncio.run(again.take(_snapshot(9020.0, [25.9, 25.9])))
    [found] = again.found
    assert found.served.pictures == ((4096, 4096), (512, 512))
    assert found.served.requests == 3
    assert number == 1


def test_a_gateway_that_comes_late_knows_no_pictures(store: RunStore, tmp_path: Path) -> None:
    _, peak = _begin(store, tmp_path)
    asyncio.run(peak.take(_snapshot(9000.0, [25.5, 25.5])))
    [found] = peak.found
    assert found.served.pictures is None
    assert "which pictures came is not known: the plan's largest are assumed" in found.notes


def test_at_rest_nothing_is_compared(store: RunStore, tmp_path: Path) -> None:
    _, peak = _begin(store, tmp_path)
    for second in range(30):
        asyncio.run(peak.take(_snapshot(2000.0 + second, _MEASURED["nvml_ready_gib"])))
    assert peak.found == ()


def test_a_new_start_begins_anew(store: RunStore, tmp_path: Path) -> None:
    _, peak = _begin(store, tmp_path)
    peak.saw_picture((4096, 4096))
    asyncio.run(peak.take(_snapshot(2000.0, [25.5, 25.5])))
    assert len(peak.found) == 1
    asyncio.run(peak.take(_snapshot(2001.0, [1.0, 1.0], state="loading")))
    assert not peak.found
    asyncio.run(peak.take(_snapshot(2100.0, [23.5, 23.5], since=2095.0)))
    [found] = peak.found
    assert found.served.pictures == ()


def test_without_a_recorded_run_it_waits(store: RunStore, tmp_path: Path) -> None:
    peak = ServingPeak(store, tmp_path / "engine.json")
    asyncio.run(peak.take(_snapshot(2000.0, [25.5, 25.5])))
    write_state(tmp_path / "engine.json", EngineState(state="ready", run=99, pid=7))
    asyncio.run(peak.take(_snapshot(2001.0, [25.5, 25.5])))
    asyncio.run(peak.take(Snapshot(at=2002.0)))
    assert peak.found == ()
