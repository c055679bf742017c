"""The parts of supervision that need no process: back-off, stuck or not, the log on its way, ports, locks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.deployment import Deployment, EngineSection, KeysSection, SupervisionSection
from loadmaster.edge import ports
from loadmaster.edge.ports import holder, is_free, next_free
from loadmaster.edge.statehome import StateError
from loadmaster.engines.base import EngineCommand, Progress
from loadmaster.engines.command import CommandEngine
from loadmaster.service import enginestate
from loadmaster.service.backoff import begin_after, failures_after, wait_s
from loadmaster.service.enginestate import EngineState, Pid, read_state, write_state
from loadmaster.service.keywords import without_key
from loadmaster.service.outputs import Outputs, secret_values
from loadmaster.service.places import FOLDER_VARIABLE, Busy, Places, locked
from loadmaster.service.portchoice import choose_port, listening_port, remembered_port
from loadmaster.service.stuckwatch import StuckWatch

RULES = SupervisionSection(backoff_first_s=2.0, backoff_most_s=60.0, steady_after_s=100.0)


@given(st.integers(0, 10_000))
def test_waits_double_from_the_first_to_the_longest(failures: int) -> None:
    wait = wait_s(failures, RULES)
    assert wait == (0 if failures == 0 else min(60.0, 2.0 * 2 ** min(failures - 1, 10)))


def test_a_long_service_makes_the_next_crash_the_first_one() -> None:
    assert failures_after(5, None, 1000.0, RULES) == 6
    assert failures_after(5, 950.0, 1000.0, RULES) == 6
    assert failures_after(5, 900.0, 1000.0, RULES) == 1


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (None, (0, 0)),
        (EngineState(state="exited", failures=3, restarts=2), (3, 3)),  # a crash
        (EngineState(state="exited", failures=0, restarts=2), (0, 2)),  # stopped as asked
        (EngineState(state="failed", failures=0, restarts=2), (0, 2)),
        (EngineState(state="loading", failures=1, restarts=2), (2, 3)),  # run-engine was killed
        (EngineState(state="ready", since=900.0, failures=4, restarts=2), (1, 3)),
    ],
)
def test_a_run_engine_counts_what_the_last_one_left(last: EngineState | None, expected: tuple[int, int]) -> None:
    assert begin_after(last, 1000.0, RULES) == expected


# ---------------------------------------------------------------------------------------------- stuck


def _stuck_at(readings: Sequence[tuple[Progress | None, bool]]) -> int | None:
    """The second at which the watch says stuck, with a look a second; a probe takes half of one."""
    watch = StuckWatch(5.0)
    for second, (reading, answered) in enumerate(readings):
        if watch.look(float(second), reading) and watch.probed(second + 0.5, float(second), answered):
            return second
    return None


def test_stuck_is_work_without_a_step_and_without_an_answer_for_long() -> None:
    standing = [(Progress(1, 0, 7.0), False)] * 20
    assert _stuck_at(standing) == 6
    assert _stuck_at([(Progress(1, 0, float(n)), False) for n in range(20)]) is None  # it moves: a long queue
    assert _stuck_at([(Progress(0, 0, 7.0), False)] * 20) is None  # nothing to do
    assert _stuck_at([(Progress(1, 0, 7.0), True)] * 20) is None  # it answers
    assert _stuck_at([(Progress(0, 4, None), False)] * 20) is not None  # no counter: work and silence
    assert _stuck_at([(None, False)] * 20) is not None  # not even metrics


def test_one_step_or_one_answer_begins_the_count_anew() -> None:
    still, moved = (Progress(1, 0, 7.0), False), (Progress(1, 0, 8.0), False)
    assert _stuck_at([still] * 5 + [moved] * 5) is None
    assert _stuck_at([still] * 5 + [(Progress(1, 0, 7.0), True)] + [still] * 4) is None
    assert _stuck_at([still] * 5 + [moved] * 20) is not None


# ---------------------------------------------------------------------------------------------- the log


def _through(data: bytes, secrets: tuple[str, ...] = ()) -> tuple[bytes, Outputs, list[str]]:
    reader, sink = os.pipe()
    phases: list[str] = []
    outputs = Outputs(CommandEngine(), secrets, phases.append, sink=sink)
    writer = os.dup(outputs.writer)
    outputs.begin()
    os.write(writer, data)
    os.close(writer)
    outputs.finish(5.0)
    os.close(sink)
    with os.fdopen(reader, "rb") as file:
        return file.read(), outputs, phases


def test_the_log_passes_unchanged_and_is_read_on_the_way() -> None:
    lines = (
        b"Starting to load model x\r 50%|##\r100%|##\n\xff\xfe junk\nNo available memory for the cache blocks. Try\nend"
    )
    passed, outputs, phases = _through(lines)
    assert passed == lines + b"\n"
    assert phases == ["loading"]
    (found,) = outputs.diagnosis().findings
    assert (found.code, found.evidence[0].line) == ("no-kv-memory", 3)
    assert found.evidence[0].text == "No available memory for the cache blocks. Try"


def test_secrets_do_not_reach_the_log() -> None:
    passed, outputs, _ = _through(b"args: {'api_key': 'opensesame-1'} at http://me:pw12@host/\n", ("opensesame-1",))
    assert b"opensesame" not in passed
    assert b"pw12" not in passed
    assert "opensesame" not in "".join(outputs.last)


def test_secret_values_come_from_flags_variables_and_keys() -> None:
    deployment = Deployment(
        name="x",
        model="m",
        engine=EngineSection(
            flags=["--api-key", "flag-secret", "--port", "8000"], env={"HF_TOKEN": "hf-secret", "A": "bcdefgh"}
        ),
        keys=KeysSection(environment="MY_KEYS"),
    )
    found = secret_values(
        deployment,
        "engine-key",
        {"MY_KEYS": "key-one,ann=lm-0123456789abcdefghij", "MY": "key-three", "PATH": "/usr/bin:/bin"},
    )
    keys = {"key-one", "ann=lm-0123456789abcdefghij", "lm-0123456789abcdefghij"}
    whole = "key-one,ann=lm-0123456789abcdefghij"
    assert set(found) == {"flag-secret", "hf-secret", "engine-key", whole, *keys}


@pytest.mark.parametrize(
    ("words", "kind", "rest", "key", "visible"),
    [
        (("--api-key", "k1", "--port", "1"), "vllm", ("--port", "1"), "k1", False),
        (("--port", "1", "--api-key=k1"), "vllm", ("--port", "1"), "k1", False),
        (("--api-key", "k1", "k2"), "vllm", ("--api-key", "k1", "k2"), None, True),  # its variable holds one alone
        (("--set", "api_keys=k1"), "llamacpp", ("--set", "api_keys=k1"), None, True),
        (("--port", "1"), "vllm", ("--port", "1"), None, False),
    ],
)
def test_vllms_key_goes_into_its_environment(
    words: tuple[str, ...], kind: str, rest: tuple[str, ...], key: str | None, visible: bool
) -> None:
    command, seen = without_key(EngineCommand(argv=("vllm", *words)), kind, container=False)
    assert command.argv == ("vllm", *rest)
    assert command.env.get("VLLM_API_KEY") == key
    assert seen is visible


# ---------------------------------------------------------------------------------------------- ports


def test_the_next_free_port_steps_over_taken_and_promised_ones() -> None:
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        first.listen()
        port = first.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        found = next_free("127.0.0.1", port)
        assert found is not None
        assert found > port
        assert next_free("127.0.0.1", port, {found}) != found
        held = holder(port)
        assert held is not None
        assert held[0] == os.getpid()
    assert holder(port) is None


def test_a_port_is_kept_while_it_is_free_and_never_the_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path))
    places = Places.of("x")
    places.make()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        deployment = Deployment(name="x", model="m", engine=EngineSection(kind="command", command=["x"], port=port))
        chosen = choose_port(places, deployment)
        assert chosen > port
        assert remembered_port(places) == chosen
    assert choose_port(places, deployment) == chosen  # the gateway knows it, though the first one is free now


def test_a_port_that_another_deployment_waits_for_is_stepped_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path))
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    first, second = Places.of("first"), Places.of("second")
    chosen: list[int] = []
    for places in (first, second):
        places.make()
        engine = EngineSection(kind="command", command=["x"], port=port)
        chosen.append(choose_port(places, Deployment(name=places.name, model="m", engine=engine)))
        if places is first:  # it loads, and does not listen yet
            write_state(first.engine, EngineState(state="loading", runner=Pid.of(os.getpid())))
    assert chosen[0] == port
    assert port < chosen[1] < port + 1000
    second.backend_port.write_text(str(port))  # both chose at the same moment
    assert port < choose_port(second, Deployment(name="second", model="m", engine=engine)) < port + 1000


def test_when_none_is_left_above_its_own_port_the_engine_gets_one_near_the_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path))
    places = Places.of("x")
    places.make()
    monkeypatch.setattr(ports, "is_free", lambda host, port: port < 65535)
    engine = EngineSection(kind="command", command=["x"], port=65535)
    assert choose_port(places, Deployment(name="x", model="m", engine=engine)) == 8000


def test_who_holds_a_port_is_named_with_its_deployment() -> None:
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1]); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-uc", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={FOLDER_VARIABLE: "/state/deployments/shop"},
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        words = ports.holder_words(port)
    finally:
        process.communicate()
    assert words is not None
    assert words.startswith(f"process {process.pid} ")
    assert words.endswith(" (deployment shop)")
    assert ports.holder_words(port) is None


def test_a_port_among_vllms_own_flags_wins() -> None:
    deployment = Deployment(name="x", model="m", engine=EngineSection(flags=["--port=9123"]))
    assert listening_port(deployment, 8000) == 9123
    assert listening_port(Deployment(name="x", model="m"), 8000) == 8000


# ---------------------------------------------------------------------------------------------- files


def test_a_lock_is_held_by_one_and_says_by_whom(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    waited: list[int | None] = []
    with locked(path, 0.0):
        begin = time.monotonic()
        with pytest.raises(Busy) as busy, locked(path, 0.2, waited.append):
            pass
        assert time.monotonic() - begin >= 0.2
    assert busy.value.holder == os.getpid()
    assert waited == [os.getpid()]
    with locked(path, 0.0):
        pass


def test_a_long_path_gets_its_socket_in_a_short_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    places = Places(tmp_path / ("deep" * 20) / "x")
    places.make()
    path = places.prepare_socket()
    assert len(os.fsencode(path)) <= 96
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert places.prepare_socket() == path  # remembered
    path.parent.chmod(0o755)
    assert places.socket != path  # anybody could have put something there
    path.parent.chmod(0o700)
    places.remove_socket_folder()
    assert not path.parent.exists()


def test_on_a_full_disk_the_state_is_written_over_or_gone_but_never_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.json"
    write_state(path, EngineState(state="ready"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    write_state(path, EngineState(state="exited", message="crashed"))
    written = read_state(path)
    assert written is not None
    assert (written.state, written.message) == ("exited", "crashed")
    monkeypatch.setattr(enginestate, "_write_over", lambda *_: False)
    with pytest.raises(StateError, match="the disk is full"):
        write_state(path, EngineState(state="loading"))
    assert read_state(path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_state_is_none(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    for content in (b"", b"{", b"[1]", b'{"state": "flying"}', b"\xff", b"[" * 10_000):
        path.write_bytes(content)
        assert read_state(path) is None
