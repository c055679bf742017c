"""A store of runs, as a machine has it after some starts of one recorded launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import EngineFacts, GpuFacts, LoadSheet
from loadmaster.core.gputable import parse_gpu_spec
from loadmaster.core.reconcile import reconcile
from loadmaster.core.runrecord import RunEnding, RunRecord
from loadmaster.edge.runquery import RunObservation
from loadmaster.edge.runschema import FILE
from loadmaster.edge.runstore import RunStore
from tests.recordedruns import RECORDS, model_of, planned, readings_of

GRAPHS, EAGER, LONG = "h200-tp2-graph-4096-s256", "h200-tp2-eager-4096-s256", "h200-tp2-graph-262144-s16"
STARTED = 1_790_000_000.0
CARD = "NVIDIA H200"


def cards_of(name: str) -> tuple[GpuFacts, ...]:
    return tuple(structs.replace(card, name=CARD) for card in parse_gpu_spec(RECORDS[name]["gpus"]))


def sheet_of(name: str) -> LoadSheet:
    sheet, _ = planned(name)
    return structs.replace(sheet, gpus=tuple(structs.replace(load, name=CARD) for load in sheet.gpus))


def record_of(name: str, started: float) -> RunRecord:
    record = RECORDS[name]
    sheet = sheet_of(name)
    model = model_of(record["sample"]["name"], record["sample"]["quantization"])
    return RunRecord(
        deployment="demo",
        started=started,
        engine=EngineFacts("vllm", record["engine_version"]),
        argv=("vllm", "serve", "owner/Qwen3.5-35B-A3B-AWQ", *record["flags"]),
        env=record["env"],
        model="owner/Qwen3.5-35B-A3B-AWQ",
        architecture=model.architecture,
        quantization=sheet.model.quantization,
        cards=cards_of(name),
        loadmaster="0.1.0",
    )


def keep_runs(home: Path, names: Sequence[str] = (GRAPHS, LONG)) -> list[int]:
    """Keep a run of each of these recorded launches, an hour apart; returns their numbers."""
    home.mkdir(parents=True, exist_ok=True)
    store = RunStore(home / FILE, "demo")
    numbers = []
    try:
        for place, name in enumerate(names):
            started = STARTED + place * 3600
            sheet, replays = sheet_of(name), planned(name)[1]
            number = store.begin_run(record_of(name, started), sheet)
            assert number is not None
            actual = structs.replace(readings_of(name), context_bytes=2_060_000_000)
            store.observe(number, RunObservation(actual=actual, replays=replays))
            store.reconcile(number, started + 240, reconcile(sheet, actual, "ready", replays))
            store.reconcile(number, started + 900, reconcile(sheet, actual, "serving", replays))
            store.set_findings(started + 1000, [finding("one-gpu-idle", "GPU 1 does nothing while GPU 0 works.")])
            store.set_findings(started + 1060, [])
            store.finish_run(number, RunEnding(ended=started + 1800, message="stopped: asked to stop", code=0))
            numbers.append(number)
    finally:
        store.close()
    assert store.problem is None
    return numbers


def begin_runs(home: Path, count: int) -> list[int]:
    """Keep the beginnings of runs whose end nobody has seen; returns their numbers."""
    home.mkdir(parents=True, exist_ok=True)
    store = RunStore(home / FILE, "demo")
    begun = [store.begin_run(record_of(GRAPHS, STARTED + place), sheet_of(GRAPHS)) for place in range(count)]
    store.close()
    numbers = [number for number in begun if number is not None]
    assert len(numbers) == count
    return numbers
