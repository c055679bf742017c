"""run-engine by itself: what it says and how it exits, for every way in which an engine can go wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.deployment import Deployment, EngineSection
from loadmaster.core.diagnosis import Diagnosis
from loadmaster.core.facts import GIB, EngineFacts, GpuFacts, GpuLoad, GpuProcess, LaunchPlan, LoadSheet, ModelSummary
from loadmaster.core.logfacts import LogFacts
from loadmaster.edge.gpurelease import Release
from loadmaster.edge.process import Stopped, read_process
from loadmaster.service import gpumemory, run_engine
from loadmaster.service.causes import all_findings, exit_code_of, explained
from loadmaster.service.enginestate import EngineState, Pid, read_run, read_state, write_state
from loadmaster.service.preparation import Prepared
from loadmaster.service.run_engine import RunEngine
from tests.service.served import Served, served

SECRET = "correct-horse-battery"


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as deployment:
        yield deployment


# ---------------------------------------------------------------------------------------------- ways to go wrong

# name → options of the fake engine, changes of the configuration, exit code, first finding, words of the message
WAYS: dict[str, tuple[tuple[str, ...], dict[str, Any], int, str | None, str]] = {
    "load": (("--oom-at", "load"), {}, 1, "oom-weights", "in the phase loading"),
    "vision": (("--oom-at", "profile-vision"), {}, 1, "oom-profile-vision", "in the phase profiling"),
    "language": (("--oom-at", "profile-language"), {}, 1, "oom-profile-language", "in the phase profiling"),
    "sampler": (("--oom-at", "sampler", "--version", "0.24.0"), {}, 1, "oom-sampler-warmup", "exit code 1"),
    "pool": (("--oom-at", "graph-pool"), {}, 1, "oom-cudagraph-profile-pool", "exit code 1"),
    "kv": (("--oom-at", "kv"), {}, 1, "no-kv-memory", "in the phase cache"),
    "capture": (("--oom-at", "capture"), {}, 1, "oom-cudagraph-capture", "exit code 1"),
    "flag": (("--message", "bad-flag"), {}, 1, "unknown-flag", "exit code 2"),
    "context": (("--message", "context"), {}, 1, "context-exceeds-kv", "exit code 1"),
    "truncated": (("--message", "truncated"), {}, 1, "weights-truncated", "exit code 1"),
    "free": (("--message", "free-memory"), {}, 4, "gpu-held-by-other-process", "exit code 1"),
    "crash": (("--crash-at", "profile"), {}, 4, None, "killed by SIGSEGV"),
    "exit": (("--exit-at", "load", "--exit", "3"), {}, 4, None, "exit code 3"),
    "hang": (("--hang",), {"engine": {"start_timeout_s": 2.5}}, 4, None, "not ready in time"),
    "garbage": (("--garbage",), {"engine": {"start_timeout_s": 2.5}}, 4, None, "not ready in time"),
    "other": (("--model", "another"), {}, 1, None, "serves another, not fake"),
    "missing": ((), {"engine": {"command": ["/nowhere/engine"]}}, 1, None, "'/nowhere/engine' is not there"),
    "stuck": (("--stuck-after", "3"), {"supervision": {"stuck_after_s": 1.5}}, 4, None, "stuck: it has work"),
    "warm-up": (
        ("--stuck-after", "2"),
        {"engine": {"start_timeout_s": 2.5}},
        4,
        None,
        "stopped answering in its warm-up",
    ),
    "runtime": (("--tokens", "1"), {}, 4, "oom-runtime", "while it served"),
}
AT_ONCE = 5
ASKERS: list[subprocess.Popen[bytes]] = []


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, EngineState, Served]]]:
    """Every way, some at a time, since most of their time is waiting."""
    results: dict[str, tuple[int, EngineState, Served]] = {}
    everyone: list[Served] = []
    running: dict[str, tuple[Served, subprocess.Popen[str]]] = {}
    try:
        waiting = list(WAYS)
        begun: dict[str, float] = {}
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name = waiting.pop(0)
                options, changes, *_ = WAYS[name]
                way = Served(tmp_path_factory.mktemp(name), name)
                everyone.append(way)
                way.configure(*options, **changes)
                running[name] = (way, way.start("run-engine", name))
                begun[name] = time.monotonic()
            for name, (way, process) in list(running.items()):
                if process.poll() is None:
                    assert time.monotonic() - begun[name] < 40, f"{name} does not end"
                    _provoke(name, way)
                    continue
                out, err = process.communicate()
                state = read_state(way.places.engine)
                assert state is not None, out + err
                results[name] = (process.returncode, state, way)
                del running[name]
            time.sleep(0.05)
        yield results
    finally:
        for way in everyone:
            way.end()
        for asker in ASKERS:
            asker.wait(15)
        for _, process in running.values():
            process.communicate()


def _provoke(name: str, way: Served) -> None:
    """Requests that make a healthy engine go wrong."""
    state = way.state()
    if name not in ("stuck", "runtime") or state is None or state.state != "ready":
        return
    if (way.home / "asked").exists():
        return
    (way.home / "asked").touch()
    url = f"http://127.0.0.1:{state.port}"
    if name == "runtime":
        subprocess.run(["curl", "-s", "-m", "5", f"{url}/fake", "-d", '{"oom": true}'], check=False)
    body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 2})
    asked = ["curl", "-s", "-m", "10", "-o", str(way.home / "answer"), f"{url}/v1/completions", "-d", body]
    ASKERS.append(subprocess.Popen(asked, env=way.environment))


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_what_it_says_of_an_engine_that_goes_wrong(
    name: str, outcomes: dict[str, tuple[int, EngineState, Served]]
) -> None:
    _, _, code, finding, words = WAYS[name]
    returned, state, way = outcomes[name]
    assert returned == code, state
    assert state.state == ("exited" if code == 4 else "failed")
    assert words in state.message
    assert [found.code for found in state.findings][:1] == ([finding] if finding else [])
    assert state.failures == (1 if code == 4 else 0)
    assert state.process is None
    assert not way.processes(), "something was left behind"
    assert read_run(way.places.engine_run) is None


@pytest.mark.slow
def test_the_exit_is_written_as_it_was(outcomes: dict[str, tuple[int, EngineState, Served]]) -> None:
    crash = outcomes["crash"][1].exit
    left = outcomes["exit"][1].exit
    assert crash is not None
    assert left is not None
    assert (crash.code, crash.signal) == (None, signal.SIGSEGV)
    assert (left.code, left.signal) == (3, None)


# ---------------------------------------------------------------------------------------------- stop, kill, orphans


@pytest.mark.slow
def test_asked_to_stop_it_ends_the_engine_with_all_its_workers(one: Served) -> None:
    one.configure("--workers", "2", "--stray", engine={"env": {"MY_TOKEN": SECRET}})
    process = one.start("run-engine", one.name)
    now = one.until(lambda now: now.state == "ready", "the engine")  # by hand, without a supervisor
    assert len(one.processes()) >= 3
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    state = one.state()
    assert process.returncode == 0, out + err
    assert state is not None
    assert (state.state, state.message) == ("exited", "stopped: asked to stop by SIGTERM")
    assert state.exit is not None
    assert read_process(now.backend.pid or 0) is None
    assert not one.processes()
    assert SECRET not in out + err + one.places.engine.read_text()


@pytest.mark.slow
def test_the_guard_ends_an_engine_whose_run_engine_was_killed(one: Served) -> None:
    one.configure("--workers", "1", "--stray")
    process = one.start("run-engine", one.name)
    deadline = time.monotonic() + 20
    while (state := one.state()) is None or state.state != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run = read_run(one.places.engine_run)
    assert run is not None
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 8
    while _alive(run.marker):
        assert time.monotonic() < deadline, "the engine outlived run-engine"
        time.sleep(0.05)


def _alive(marker: str) -> bool:
    from loadmaster.edge.process import orphans

    return bool(orphans(marker))


def test_it_backs_off_after_a_crash_and_keeps_the_reason_in_view(one: Served) -> None:
    one.configure("--load", "0", supervision={"backoff_first_s": 30.0, "backoff_most_s": 60.0})
    one.places.make()
    write_state(one.places.engine, EngineState(state="exited", message="it crashed", failures=2, runner=Pid(1 << 22)))
    process = one.start("run-engine", one.name)
    try:
        now = one.until(lambda now: now.state == "backing-off", "the wait")
        assert now.message == "it crashed; starts again in 60 s"
        assert now.restarts == 1
    finally:
        process.terminate()
        process.communicate(timeout=10)
    assert process.returncode == 0


# ---------------------------------------------------------------------------------------------- GPU memory


def _card(free: int, *processes: GpuProcess) -> GpuFacts:
    return GpuFacts(index=0, name="card", total_bytes=24 * GIB, free_bytes=free, processes=processes, source="nvml")


SHEET = LoadSheet(
    fits=True,
    engine=EngineFacts(),
    model=ModelSummary(architecture=None, quantization=None, parameters=None),
    gpus=(
        GpuLoad(
            index=0,
            total_bytes=24 * GIB,
            budget_bytes=20 * GIB,
            components=(),
            peak_bytes={},
            peak_low_bytes={},
            peak_high_bytes={},
        ),
    ),
    kv_cache=None,
    launch=LaunchPlan(argv=()),
)


def test_a_card_with_too_little_free_memory_names_who_holds_it() -> None:
    held = _card(5 * GIB, GpuProcess(os.getppid(), "blender", 18 * GIB))
    (short,) = gpumemory.shortages({0: 20 * GIB}, [held])
    assert short.words == (
        f"GPU 0: 5.00 GiB free, 20.00 GiB needed; held by process {os.getppid()} blender (18.00 GiB)"
    )
    assert gpumemory.shortages({0: 5 * GIB}, [held]) == ()
    assert gpumemory.shortages({0: 20 * GIB}, [msgspec.structs.replace(held, free_bytes=None)]) == ()
    assert gpumemory.needed(SHEET, [held]) == {0: 20 * GIB}
    assert gpumemory.needed(SHEET, [msgspec.structs.replace(held, source="spec")]) == {}


def test_it_waits_for_memory_that_others_hold(one: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = one.configure("--oom-at", "load", supervision={"memory_wait_s": 30.0})
    one.places.make()
    monkeypatch.setenv("LOADMASTER_HOME", str(one.home))
    readings = [_card(4 * GIB, GpuProcess(os.getppid(), "blender", 18 * GIB)), _card(23 * GIB)]
    said: list[str] = []

    def read() -> tuple[GpuFacts, ...]:
        state = one.state()
        said.append(f"{state.state}: {state.message}" if state else "")
        return (readings.pop(0) if len(readings) > 1 else readings[0],)

    monkeypatch.setattr(run_engine, "_MEMORY_LOOK_S", 0.05)
    monkeypatch.setattr(gpumemory, "read_cards", read)
    monkeypatch.setattr(run_engine, "prepare", lambda *_: Prepared(sheet=SHEET, gpus=(_card(4 * GIB),)))
    assert asyncio.run(RunEngine(deployment, one.places).run()) == 1
    assert said[1].startswith("waiting-for-memory: GPU 0: 4.00 GiB free, 20.00 GiB needed; held by process")
    state = one.state()
    assert state is not None
    assert state.findings[0].code == "oom-weights"  # it went on to the start


def test_memory_that_never_becomes_free_is_a_failure_that_names_the_holder(
    one: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = one.configure(supervision={"memory_wait_s": 0.0})
    one.places.make()
    monkeypatch.setattr(gpumemory, "read_cards", lambda: (_card(4 * GIB, GpuProcess(os.getppid(), "blender", None)),))
    monkeypatch.setattr(run_engine, "prepare", lambda *_: Prepared(sheet=SHEET, gpus=(_card(4 * GIB),)))
    assert asyncio.run(RunEngine(deployment, one.places).run()) == 1
    state = one.state()
    assert state is not None
    assert state.findings[0].code == "gpu-held-by-other-process"
    assert f"process {os.getppid()} blender" in state.findings[0].cause


# ---------------------------------------------------------------------------------------------- causes


def test_the_memory_of_every_process_that_was_ever_seen_is_looked_for(
    one: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash nothing of the run lives that could be listed."""
    one.places.make()
    deployment = one.configure()
    asked: list[tuple[int, ...]] = []

    def wait_released(pids: tuple[int, ...], *, before: object) -> Release:
        asked.append(pids)
        return Release(free=True, why="", seconds=0.0)

    class Ended:
        def members(self) -> tuple[()]:
            return ()

        def stop(self, term_s: float) -> Stopped:
            return Stopped(exit=None, seconds=0.0, pids=(41, 42))

    monkeypatch.setattr(run_engine, "wait_released", wait_released)
    run = RunEngine(deployment, one.places)
    monkeypatch.setattr(run, "_child", Ended())
    card = GpuFacts(index=0, name="card", total_bytes=1 << 30, source="nvml")
    monkeypatch.setattr(run, "_prepared", Prepared(gpus=(card,)))
    try:
        asyncio.run(run._end_engine())
    finally:
        run._guard.close()
    assert asked == [(41, 42)]


def test_another_start_is_worth_its_while_unless_the_cause_is_certain_and_stays() -> None:
    certain = finding("no-kv-memory", "x")
    assert exit_code_of([certain], "vllm-log.toml", served=False) == 1
    assert exit_code_of([certain], "vllm-log.toml", served=True) == 4
    assert exit_code_of([finding("no-kv-memory", "x", confidence="likely")], "vllm-log.toml", served=False) == 4
    for code in ("engine-dead-masked", "port-in-use", "free-memory-below-request", "illegal-memory-access"):
        assert exit_code_of([finding(code, "x")], "vllm-log.toml", served=False) == 4, code
    assert exit_code_of([finding("eager-mode-cost", "x")], "vllm-log.toml", served=False) == 4
    assert exit_code_of([], "vllm-log.toml", served=False) == 4


def test_what_the_log_shows_comes_before_what_was_found_before_the_start() -> None:
    log = Diagnosis(False, LogFacts(), (finding("no-kv-memory", "as it happened"),))
    planned = (finding("no-kv-memory", "as planned"), finding("eager-mode-cost", "x"))
    found = all_findings(log, Prepared(findings=planned))
    assert [(one.code, one.cause) for one in found] == [("no-kv-memory", "as it happened"), ("eager-mode-cost", "x")]


def test_a_deployment_of_vllm_is_diagnosed_with_its_own_flags_and_without_its_secrets() -> None:
    section = EngineSection(flags=["--max-model-len", "8k", "--api-key", SECRET], env={"HF_TOKEN": SECRET})
    deployment = Deployment(name="x", model="org/m", engine=section)
    found = explained(Diagnosis(False, LogFacts()), deployment, Prepared(version="0.24.0")).facts
    assert found.launch is not None
    assert found.launch.flags["--max-model-len"] == 8000
    assert found.engine == EngineFacts("vllm", "0.24.0")
    assert SECRET not in str(found)
