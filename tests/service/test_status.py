"""The status against made-up states and real processes: nothing is said that is not so."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadmaster.core.checks.catalogue import finding
from loadmaster.render.status import duration, status_table, status_text
from loadmaster.service.enginestate import EngineState, ExitFacts, Pid, write_state
from loadmaster.service.places import FOLDER_VARIABLE, Places
from loadmaster.service.status import (
    BackendStatus,
    GatewayStatus,
    Status,
    SupervisorStatus,
    status_document,
    status_of,
)

GONE = Pid(1 << 22, 1)  # beyond the kernel's numbers


@pytest.fixture
def places(tmp_path: Path) -> Places:
    made = Places(tmp_path / "deployments" / "shop")
    made.make()
    return made


@pytest.fixture
def living(places: Places) -> Iterator[Pid]:
    """A process of the deployment that sleeps."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={FOLDER_VARIABLE: str(places.folder)}
    )
    time.sleep(0.1)
    try:
        yield Pid.of(process.pid)
    finally:
        process.kill()
        process.wait()


def test_nothing_at_all_is_down(places: Places) -> None:
    now = status_of(places)
    assert (now.state, now.healthy, now.message) == ("down", False, "")


@pytest.mark.parametrize(
    "state", ["checking", "waiting-for-memory", "loading", "warming-up", "ready", "stuck", "stopping"]
)
def test_a_state_that_a_dead_run_engine_left_is_never_shown(places: Places, state: str) -> None:
    write_state(places.engine, EngineState(state=state, runner=GONE, process=GONE, port=1, since=1.0))  # type: ignore[arg-type]
    now = status_of(places)
    assert now.state == "dead"
    assert now.message == f"supervisor and run-engine have died in the state {state}; loadmaster up shop"
    assert (now.healthy, now.backend.pid, now.backend.answers, now.since) == (False, None, None, None)


def test_a_ready_engine_that_has_gone_is_not_ready(places: Places, living: Pid) -> None:
    write_state(places.engine, EngineState(state="ready", runner=living, process=GONE, port=1, since=1.0))
    now = status_of(places)
    assert (now.state, now.message, now.healthy) == ("exited", "the engine has just ended", False)


def test_a_ready_engine_that_does_not_answer_is_not_healthy(places: Places, living: Pid) -> None:
    write_state(places.engine, EngineState(state="ready", runner=living, process=living, port=1, since=time.time()))
    now = status_of(places)
    assert (now.state, now.backend.answers, now.healthy) == ("ready", False, False)


def test_a_supervisor_that_was_killed_is_said_while_run_engine_ends(places: Places, living: Pid) -> None:
    said = EngineState(state="ready", runner=living, process=living, port=1, since=1.0, supervisor=GONE.pid)
    write_state(places.engine, said)
    now = status_of(places)
    assert (now.state, now.message) == ("stopping", "its supervisor was killed; loadmaster up shop")


def test_a_number_that_belongs_to_another_process_now_is_not_believed(places: Places, living: Pid) -> None:
    assert living.started is not None
    reused = Pid(living.pid, living.started - 1)
    write_state(places.engine, EngineState(state="loading", runner=reused, process=reused, port=1, since=1.0))
    assert status_of(places).state == "dead"


def test_the_last_word_counts_after_the_end(places: Places) -> None:
    lack = finding("no-kv-memory", "none")
    ended = EngineState(
        state="failed", runner=GONE, message="no memory", since=1.0, findings=(lack,), exit=ExitFacts(code=1)
    )
    write_state(places.engine, ended)
    now = status_of(places)
    assert (now.state, now.message, now.healthy) == ("failed", "no memory", False)
    assert now.findings == (lack,)
    write_state(places.engine, EngineState(state="exited", runner=GONE, message="stopped", since=1.0))
    assert status_of(places).state == "down"
    write_state(places.engine, EngineState(state="exited", runner=GONE, message="crashed", since=1.0, failures=1))
    assert status_of(places).state == "exited"


def test_a_wait_before_the_next_start_is_under_way(places: Places, living: Pid) -> None:
    said = EngineState(state="exited", runner=living, message="crashed; starts again in 8 s", retry_at=9.0, since=1.0)
    write_state(places.engine, said)
    now = status_of(places)
    assert (now.state, now.message, now.healthy) == ("backing-off", "crashed; starts again in 8 s", None)


def test_processes_without_a_supervisor_are_named(places: Places, living: Pid) -> None:
    now = status_of(places)
    assert (now.state, now.left_over) == ("dead", (living.pid,))
    assert now.message == "processes run without a supervisor; loadmaster up shop"


def test_a_damaged_engine_file_is_no_state(places: Places) -> None:
    places.engine.write_text("{")
    assert status_of(places).state == "down"


# ---------------------------------------------------------------------------------------------- shown

READY = Status(
    name="shop",
    state="ready",
    message="answers at http://127.0.0.1:8000",
    since=0.0,
    seconds=3725.0,
    backend=BackendStatus(pid=12, port=8000, url="http://127.0.0.1:8000", model="qwen", answers=True),
    gateway=GatewayStatus(pid=13, url="http://127.0.0.1:7860", answers=True),
    supervisor=SupervisorStatus(pid=10, programs={"shop-web": "RUNNING", "shop-backend": "RUNNING"}),
)


def test_the_text_has_a_line_for_each_part() -> None:
    assert status_text(READY) == (
        "shop\n"
        "  state       ready for 1 h 2 min: answers at http://127.0.0.1:8000\n"
        "  engine      process 12, http://127.0.0.1:8000, model qwen, answers\n"
        "  gateway     process 13, http://127.0.0.1:7860, open\n"
        "  supervisor  process 10, shop-backend RUNNING, shop-web RUNNING"
    )
    dead = Status(name="shop", state="dead", message="gone", exit=ExitFacts(signal=9), restarts=2, left_over=(4, 5))
    assert status_text(dead).splitlines()[1:] == [
        "  state       dead: gone",
        "  engine      no process",
        "  gateway     not open",
        "  supervisor  no process",
        "  last exit   signal 9",
        "  restarts    2",
        "  left over   4, 5",
    ]


def test_the_table_has_a_line_for_each_deployment() -> None:
    assert status_table([READY, Status(name="b", state="down")]).splitlines() == [
        "NAME  STATE  FOR        GATEWAY                MESSAGE",
        "shop  ready  1 h 2 min  http://127.0.0.1:7860  answers at http://127.0.0.1:8000",
        "b     down   -          -",
    ]


def test_durations_are_two_units_at_most() -> None:
    shown = [duration(seconds) for seconds in (None, 0.4, 59.9, 200, 7500, 90_000 + 3 * 86_400)]
    assert shown == ["-", "0 s", "59 s", "3 min 20 s", "2 h 5 min", "4 d 1 h"]


def test_the_document_says_whether_it_is_healthy() -> None:
    document = status_document([READY, Status(name="b", state="loading"), Status(name="c", state="failed")])
    assert document["schema"] == 1
    assert [one["healthy"] for one in document["deployments"]] == [True, None, False]
    assert document["deployments"][0]["backend"]["pid"] == 12
