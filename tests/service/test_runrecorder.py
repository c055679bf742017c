"""A run as it is kept: begun with its plan and without secrets, compared when ready, ended with its cause."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import GIB, EngineFacts, GpuFacts, GpuProcess
from loadmaster.core.localcalibration import Learnt, key_of, with_learnt
from loadmaster.core.logfacts import LogReadings
from loadmaster.edge.gpurelease import Release
from loadmaster.edge.runquery import RunQuery
from loadmaster.engines.vllm import VllmEngine
from loadmaster.service import gpumemory, run_engine
from loadmaster.service.outputs import Outputs
from loadmaster.service.places import Places
from loadmaster.service.preparation import Prepared
from loadmaster.service.run_engine import RunEngine
from loadmaster.service.runrecorder import RunRecorder, context_of, said_of, store_path
from tests.keptruns import CARD, LONG, cards_of, sheet_of
from tests.recordedruns import RECORDS, model_of
from tests.service.served import served

_MEASURED = RECORDS[LONG]["measured"]
_RESERVED = round(_MEASURED["driver_reserved_gib"] * GIB)

# Lines that decide, in the wording of vLLM 0.24.0 (own run h200-tp2-graph-262144-s16).
_LOG = """\
(Worker_TP0 pid=2966) INFO 11-30 09:32:13 [gpu_model_runner.py:5255] Model loading took 11.3 GiB memory and 2.98 seconds
(Worker_TP0 pid=2966) INFO 11-30 09:35:01 [gpu_model_runner.py:6588] Estimated CUDA graph memory: 0.18 GiB total
(Worker_TP0 pid=2966) INFO 11-30 09:35:02 [gpu_worker.py:508] Available KV cache memory: 8.05 GiB
(EngineCore pid=2855) INFO 11-30 09:35:02 [kv_cache_utils.py:2146] GPU KV cache size: 831,162 tokens
(EngineCore pid=2855) INFO 11-30 09:35:02 [kv_cache_utils.py:2147] Maximum concurrency for 262,144 tokens per request: 3.17x
(Worker_TP0 pid=2966) INFO 11-30 09:35:06 [gpu_model_runner.py:6656] Graph capturing finished in 4 secs, took 0.12 GiB
"""


def _deployment(**engine: Any) -> Deployment:
    flags = [*RECORDS[LONG]["flags"], "--api-key", "sk-horse-battery-staple"]
    section = {"kind": "vllm", "version": "0.24.0", "flags": flags, "env": {"HF_TOKEN": "hf_batterystaple"}, **engine}
    return msgspec.convert({"name": "demo", "model": "owner/model", "engine": section}, Deployment)


def _cards(gib: list[float] | None = None) -> tuple[GpuFacts, ...]:
    """The cards as NVML tells them, with that much in use as it counts."""
    return tuple(
        structs.replace(
            card,
            source="nvml",
            driver_total_bytes=card.total_bytes + _RESERVED,
            free_bytes=None if gib is None else card.total_bytes + _RESERVED - round(gib[card.index] * GIB),
            processes=None if gib is None else (GpuProcess(100 + card.index, "VLLM::Worker", 20 * GIB),),
        )
        for card in cards_of(LONG)
    )


def _prepared(gpus: tuple[GpuFacts, ...] | None = None) -> Prepared:
    sample = RECORDS[LONG]["sample"]
    return Prepared(
        version="0.24.0",
        model=model_of(sample["name"], sample["quantization"]),
        gpus=_cards() if gpus is None else gpus,
        sheet=sheet_of(LONG),
    )


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def recorder(tmp_path: Path, said: list[str]) -> Iterator[RunRecorder]:
    made = RunRecorder(Places(tmp_path / "deployments" / "demo"), said.append)
    try:
        yield made
    finally:
        made.close()


def _readings() -> LogReadings:
    """What the reader of the engine's output makes of the log."""
    sink = os.open(os.devnull, os.O_WRONLY)
    outputs = Outputs(VllmEngine(), (), lambda phase: None, sink)
    os.write(outputs.writer, _LOG.encode())
    outputs.begin()
    outputs.finish(10)
    os.close(sink)
    return outputs.readings()


def test_a_start_from_its_log_to_the_comparison(recorder: RunRecorder, tmp_path: Path, said: list[str]) -> None:
    number = recorder.begin(_deployment(), _prepared())
    assert number == 1
    found = recorder.ready(_readings(), _cards(_MEASURED["nvml_ready_gib"]), {100, 101})
    assert found is not None
    recorder.end("stopped: asked to stop by SIGTERM", 0)
    recorder.close()
    assert said == []
    query = RunQuery(store_path(Places(tmp_path / "deployments" / "demo")))
    assert query.path == tmp_path / "runs.sqlite3"
    [run] = query.runs("demo")
    assert run.ending is not None and (run.ending.message, run.ending.code) == ("stopped: asked to stop by SIGTERM", 0)
    assert query.reconciliations(1) == [found]
    for card in found.cards:
        lines = {line.name: line for line in card.lines}
        assert {name for name, line in lines.items() if line.actual is not None} == {
            "weights",
            "cuda_graphs",
            "kv_cache",
        }
        assert card.other_bytes == 0
        assert card.unexplained_bytes is not None and abs(card.unexplained_bytes) < 0.3 * GIB
    assert said_of(found)[0].startswith("GPU 0 holds 23.06 GiB, planned 23.0")
    observed = query.observation(1)
    assert observed is not None and len(observed.replays) == 2


def test_no_secret_is_kept(recorder: RunRecorder, tmp_path: Path) -> None:
    recorder.begin(_deployment(), _prepared())
    recorder.close()
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
    assert b"battery" not in content
    [run] = RunQuery(tmp_path / "runs.sqlite3").runs()
    assert run.record.argv[-2:] == ("--api-key", "(hidden)")
    assert run.record.env == {"HF_TOKEN": "(hidden)"}
    assert run.record.argv[:3] == ("vllm", "serve", "owner/model")
    assert run.record.architecture == "Qwen3_5MoeForConditionalGeneration"
    assert [card.name for card in run.record.cards] == [CARD, CARD]


def test_what_the_plan_had_learnt_is_kept(recorder: RunRecorder, tmp_path: Path) -> None:
    key = key_of(2, CARD, "vllm", "0.24.0", "Qwen3_5MoeForConditionalGeneration", "context")
    learnt = Learnt(key=key, component="context", difference=7, low=-9, high=9, runs=(1, 2, 3), last="2026-11-30")
    recorder.begin(_deployment(), _prepared(with_learnt(_cards(), [learnt])))
    recorder.close()
    assert RunQuery(tmp_path / "runs.sqlite3").runs()[0].record.corrections == {"context": 7}


def test_other_processes_count_only_when_their_numbers_are_ours(recorder: RunRecorder) -> None:
    recorder.begin(_deployment(), _prepared())
    cards = [
        structs.replace(card, processes=(*(card.processes or ()), GpuProcess(5, "other", GIB)))
        for card in _cards([24.0, 24.0])
    ]
    ours = recorder.ready(LogReadings(), cards, {100, 101})
    assert ours is not None and [card.other_bytes for card in ours.cards] == [GIB, GIB]
    strange = recorder.ready(LogReadings(), cards, {9000})
    assert strange is not None and [card.other_bytes for card in strange.cards] == [None, None]


def test_an_engine_in_host_memory_is_compared_by_what_is_resident(recorder: RunRecorder, tmp_path: Path) -> None:
    sheet = sheet_of(LONG)
    load = structs.replace(
        sheet.gpus[0], peak_low_bytes={"steady": 1}, peak_bytes={"serving": 2}, peak_high_bytes={"serving": 3}
    )
    host = structs.replace(sheet, engine=EngineFacts("llamacpp", "b9000"), gpus=(load,))
    assert recorder.begin(_deployment(), Prepared(sheet=host)) == 1
    found = recorder.ready(LogReadings(), None, {os.getpid()})
    assert found is not None and found.host is not None and found.cards == ()
    held = found.host.resident_bytes
    assert held is not None and held > 8 << 20
    assert (found.host.low_bytes, found.host.planned_bytes, found.host.high_bytes) == (1, 2, 3)
    assert said_of(found) == [f"host memory: {held / (1 << 20):,.1f} MiB resident, planned 0.0 to 0.0 MiB"]
    recorder.close()
    assert RunQuery(tmp_path / "runs.sqlite3").reconciliations(1) == [found]


def test_a_run_without_a_plan_is_kept_and_not_compared(recorder: RunRecorder, tmp_path: Path) -> None:
    deployment = msgspec.convert(
        {
            "name": "demo",
            "model": "fake",
            "engine": {"kind": "command", "command": ["serve", "--token", "hf_secretsecret"]},
        },
        Deployment,
    )
    assert recorder.begin(deployment, Prepared()) == 1
    assert recorder.ready(LogReadings(), None, ()) is None
    recorder.close()
    assert RunQuery(tmp_path / "runs.sqlite3").runs()[0].record.argv == ("serve", "--token", "(hidden)")


def test_a_bad_disk_is_said_once_and_harms_nothing(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "deployments").write_text("")
    recorder = RunRecorder(Places(tmp_path / "deployments" / "demo" / "x"), said.append)
    assert recorder.begin(_deployment(), _prepared()) is None
    assert recorder.ready(LogReadings(), None, ()) is None
    recorder.end("stopped", 0)
    recorder.close()
    assert len(said) == 1 and said[0].startswith("recording is off: ")


def test_the_context_is_what_was_in_use_before_the_engine() -> None:
    assert context_of(LogReadings(total_bytes=24 * GIB, free_bytes=23 * GIB)) == GIB
    assert context_of(LogReadings(total_bytes=24 * GIB)) is None
    assert context_of(LogReadings(total_bytes=2, free_bytes=3)) is None


@pytest.mark.slow
def test_run_engine_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine, whose log has vLLM's wording, under run-engine with a plan and with cards that are read."""
    monkeypatch.setattr(run_engine, "prepare", lambda *_: _prepared())
    monkeypatch.setattr(gpumemory, "read_cards", lambda: _cards(_MEASURED["nvml_ready_gib"]))
    monkeypatch.setattr(gpumemory, "needed", lambda *_: {})
    monkeypatch.setattr(run_engine, "wait_released", lambda *_, **__: Release(free=True, why="", seconds=0.0))
    monkeypatch.setattr(run_engine, "warm_up_picture", lambda *_: None)
    with served(tmp_path) as one:
        deployment = one.configure("--version", "0.24.0", supervision={"stop_s": 4.0})
        one.places.make()
        query = RunQuery(store_path(one.places))

        async def life() -> int:
            running = RunEngine(deployment, one.places)
            task = asyncio.create_task(running.run())
            while not query.reconciliations(1):
                await asyncio.sleep(0.05)
                assert not task.done(), one.log()
            running._ask_stop("seen enough")
            return await task

        assert asyncio.run(asyncio.wait_for(life(), 60)) == 0
        [run] = query.runs(one.name)
        state = one.state()
        assert state is not None and state.run == run.number == 1
        assert run.ending is not None and run.ending.message == "stopped: seen enough"
        [found] = query.reconciliations(1)
        lines = {line.name: line for line in found.cards[0].lines}
        assert lines["weights"].actual == round(11.28 * GIB)
        assert lines["kv_cache"].source == "log"
        assert found.cards[0].actual_bytes == pytest.approx(_MEASURED["nvml_ready_gib"][0] * GIB, abs=2)
