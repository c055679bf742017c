"""Deployments of the fake engine under a real supervisord: up, down, and everything that comes between."""

from __future__ import annotations

import configparser
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadmaster.commands.serve import derived_name
from loadmaster.core.deployment import Deployment
from loadmaster.edge.statehome import StateError
from loadmaster.service.enginestate import EngineRun, Pid, write_run
from loadmaster.service.launch import begin
from loadmaster.service.places import Places
from loadmaster.service.refusal import SuperviseError
from loadmaster.service.supervise import configuration_text, leftovers, supervisor_pid, sweep
from tests.service.killrounds import Rounds
from tests.service.served import Served, served

pytestmark = pytest.mark.slow
SECRET = "correct-horse-battery"


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as deployment:
        yield deployment


# ---------------------------------------------------------------------------------------------- the file


def test_the_configuration_says_what_supervisord_has_to_do(tmp_path: Path) -> None:
    places = Places(tmp_path / "half of it" / "shop")
    text = configuration_text(Deployment(name="shop", model="m"), places, places.socket, "/opt/my python/bin/python")
    parsed = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"), strict=True)
    parsed.read_string(text)
    backend, web = dict(parsed["program:shop-backend"]), dict(parsed["program:shop-web"])
    assert backend["command"] == "'/opt/my python/bin/python' -m loadmaster run-engine shop"
    assert web["command"] == "'/opt/my python/bin/python' -m loadmaster run-web shop"
    for program in (backend, web):
        assert (program["autorestart"], program["exitcodes"], program["startsecs"]) == ("unexpected", "0,1,2,3", "0")
        assert (program["stopasgroup"], program["killasgroup"], program["redirect_stderr"]) == ("true",) * 3
    assert int(backend["stopwaitsecs"]) > 20 + 30  # run-engine's own patience, and the sweep after it
    assert backend["stdout_logfile"] == str(places.backend_log)
    assert parsed["supervisorctl"]["serverurl"] == f"unix://{places.socket}"


@pytest.mark.parametrize("name", ["a;b #c", "x ;y", "quote'd", 'double"d', "two\nlines", "50%", "%(here)s", "%%"])
def test_a_path_that_the_file_cannot_hold_is_refused(tmp_path: Path, name: str) -> None:
    places = Places(tmp_path / name / "shop")
    with pytest.raises(SuperviseError, match="cannot be told the path"):
        configuration_text(Deployment(name="shop", model="m"), places, places.socket)


@pytest.mark.parametrize(
    ("model", "known", "name"),
    [
        ("/models/Qwen3.5-9B-Q4_K.gguf", [], "qwen3-5-9b-q4-k"),
        ("cyankiwi/Qwen3.5-35B-A3B-AWQ-4bit", ["x"], "qwen3-5-35b-a3b-awq-4bit"),
        ("/models/one/", ["one", "one-2"], "one-3"),
        ("/models/模型", [], "model"),
        ("a/" + "b" * 90, [], "b" * 36),
    ],
)
def test_a_model_gives_its_deployment_a_name(model: str, known: list[str], name: str) -> None:
    assert derived_name(model, known) == name


# ---------------------------------------------------------------------------------------------- one life


def test_one_life_from_up_to_down(one: Served) -> None:
    """Up, ask, supervisorctl, a second up, restart of the engine by hand, logs, down: one start serves them all."""
    one.configure("--workers", "1", "--stray", engine={"env": {"MY_TOKEN": SECRET}})
    assert one.run("logs", one.name).returncode == 1
    said = one.up()
    assert f"http://127.0.0.1:{one.gateway_port}/v1" in said
    assert f"port {one.engine_port}" in said
    assert one.ask().startswith("The picture")
    now = one.status()
    assert now.healthy
    assert now.supervisor.programs == {"one-backend": "RUNNING", "one-web": "RUNNING"}
    assert not one.orphans()

    shown = json.loads(one.run("status", one.name, "--json").stdout)["deployments"][0]
    assert (shown["state"], shown["healthy"], shown["backend"]["answers"]) == ("ready", True, True)
    listing = one.run("status")
    assert listing.returncode == 0
    assert listing.stdout.splitlines()[1].split()[:2] == ["one", "ready"]

    control = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(one.places.configuration)]
    done = subprocess.run([*control, "status"], capture_output=True, text=True, check=False)
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["one-backend", "RUNNING"],
        ["one-web", "RUNNING"],
    ]

    again = one.up()
    assert "one is up already" in again
    assert "not in force" not in again
    assert one.status().supervisor.pid == now.supervisor.pid

    subprocess.run([*control, "restart", "one-backend"], capture_output=True, check=True)
    fresh = one.until(lambda new: new.state == "ready" and new.backend.pid != now.backend.pid, "the restart")
    assert fresh.restarts == 0  # as asked, not after a crash
    assert not one.orphans()

    follower = one.start("logs", one.name, "-f", "-n", "0")
    web = one.run("logs", one.name, "--web", "-n", "3").stdout
    assert len(web.splitlines()) == 3
    assert "Application startup complete" in one.run("logs", one.name).stdout

    secrets = [
        path for path in one.places.folder.rglob("*") if path.is_file() and SECRET in path.read_text("utf-8", "replace")
    ]
    assert [path.name for path in secrets] == ["loadmaster.toml"]
    for process in one.processes():
        assert SECRET not in Path(f"/proc/{process.pid}/cmdline").read_text()
    for path in (one.places.folder, *one.places.folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path

    done_down = one.run("down", one.name)
    assert done_down.returncode == 0, done_down.stderr
    assert [process for process in one.processes() if process.pid != follower.pid] == []
    follower.terminate()
    followed = follower.communicate(timeout=10)[0]
    assert "asked to stop by SIGTERM" in followed
    assert one.status().state == "down"
    left = sorted(path.name for path in one.places.run.iterdir())
    assert [name for name in left if name.endswith((".sock", ".pid", ".run")) or name == "web.json"] == []
    assert one.run("status", one.name).returncode == 1
    assert one.run("down", one.name).stderr == "one was not up\n"


def test_up_says_which_changes_are_not_in_force_yet(one: Served) -> None:
    one.configure()
    one.up()
    one.configure(gpus="cpu", limits={"queue": 7}, engine={"env": {"MY_TOKEN": SECRET}})
    words = "changed since its start and not in force yet: gpus, engine.env, limits.queue; loadmaster restart one\n"
    assert words in one.up()
    assert SECRET not in one.places.started.read_text()
    assert one.run("restart", one.name).returncode == 0
    assert "not in force" not in one.up()


def test_two_ups_at_once_are_one_start(one: Served) -> None:
    one.configure("--load", "0.5")
    both = [one.start("up", one.name) for _ in range(2)]
    ends = [process.communicate(timeout=40) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    text = "".join(out + err for out, err in ends)
    assert text.splitlines().count("planning") == 1
    assert text.count("is up already") == 1
    assert len([process for process in one.processes() if process.parent == one.status().supervisor.pid]) == 2


def test_a_deterministic_failure_is_not_started_again_and_up_starts_anew(one: Served) -> None:
    one.configure("--oom-at", "kv")
    done = one.run("up", one.name)
    assert done.returncode == 1
    assert "error[no-kv-memory]: Nothing is left for the cache" in done.stderr
    assert done.stderr.rstrip().endswith(
        f"hint: loadmaster logs {one.name}; loadmaster diagnose --deployment {one.name}"
    )
    now = one.until(lambda now: now.supervisor.programs.get("one-backend") == "EXITED", "the end")
    assert (now.state, now.restarts, now.healthy) == ("failed", 0, False)
    one.configure()
    assert "one-backend had ended; starting anew" in one.up()


def test_a_crash_is_started_again_after_a_wait(one: Served) -> None:
    one.configure("--crash-at", "load", "--starts", str(one.home / "starts"), "--only-first", "1")
    said = one.up()
    assert "backing-off: the engine ended in the phase loading (killed by SIGSEGV)" in said
    assert one.status().restarts == 1


@pytest.mark.parametrize("kind", ["environment", "file"])
def test_a_deployment_that_asks_for_keys_is_verified_without_giving_one(one: Served, kind: str) -> None:
    key = "sk-0123456789abcdefghij"
    if kind == "environment":
        one.environment["MY_KEYS"] = f"alice={key}"
        one.configure(keys={"environment": "MY_KEYS"})
    else:
        one.configure(keys={"file": "keys.json"})
        assert one.run("keys", "add", "alice", "--deployment", one.name).returncode == 0
    one.up()
    own = one.places.web_key
    assert own.stat().st_mode & 0o777 == 0o600
    first = own.read_text()
    assert first != key
    with pytest.raises(urllib.error.HTTPError, match="401"):
        one.ask()
    one.environment.pop("MY_KEYS", None)  # as in another shell
    report = json.loads(one.run("verify", one.name, "--json", "--timeout", "5").stdout)
    steps = {step["name"]: step["status"] for step in report["steps"]}
    assert (steps["models"], steps["stream"]) == ("passed", "passed"), report
    one.run("down", one.name)
    assert not own.exists()


# ---------------------------------------------------------------------------------------------- what stands in the way


def test_stale_files_and_a_taken_engine_port_are_no_obstacle(one: Served) -> None:
    one.configure()
    one.places.make()
    one.places.supervisor_pid.write_text(f"{os.getpid()}\n")  # the number belongs to another process now
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(one.places.prepare_socket()))
    assert supervisor_pid(one.places) is None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", one.engine_port))
        taken.listen()
        said = one.up()
        now = one.status()
        assert now.backend.port is not None
        assert now.backend.port > one.engine_port
        held = f"port {one.engine_port} is held by process {os.getpid()}"
        assert held in said
        assert f"the engine gets {now.backend.port}" in said
        assert one.ask()


def test_a_taken_gateway_port_is_refused_with_its_holder(one: Served) -> None:
    one.configure()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", one.gateway_port))
        taken.listen()
        done = one.run("up", one.name)
    assert done.returncode == 1
    assert f"error: port {one.gateway_port} on 127.0.0.1 is held by process {os.getpid()}" in done.stderr
    assert not one.processes()


def test_a_missing_engine_and_a_missing_model_are_said_before_anything_starts(one: Served) -> None:
    one.configure(engine={"command": ["/nowhere/engine"]})
    done = one.run("up", one.name)
    assert (done.returncode, done.stderr.splitlines()[-2]) == (
        1,
        "error: the engine's program '/nowhere/engine' is not there",
    )
    one.configure(model="/nowhere/model.gguf", engine={"kind": "llamacpp", "command": []})
    done = one.run("up", one.name)
    assert (done.returncode, done.stderr.splitlines()[-2]) == (2, "error: there is no model at /nowhere/model.gguf")
    done = one.run("up", "onne")
    assert (done.returncode, done.stderr) == (2, "error: no deployment 'onne'\nhint: did you mean 'one'?\n")
    assert not one.processes()
    assert supervisor_pid(one.places) is None


def test_a_configuration_that_was_broken_meanwhile_is_said_and_can_be_stopped(one: Served) -> None:
    one.configure()
    one.up()
    with (one.places.folder / "loadmaster.toml").open("a") as file:
        file.write("nonsense = 1\n")
    now = one.status()
    assert now.run_engine is not None
    os.kill(now.run_engine, signal.SIGKILL)
    now = one.until(lambda now: now.state == "failed", "the refusal")
    assert "nonsense" in now.message
    done = one.run("status", one.name)
    assert (done.returncode, done.stdout.splitlines()[1].split()[:2]) == (1, ["state", "failed"])
    done = one.run("down", one.name)
    assert done.returncode == 0
    assert done.stderr.startswith("warning: ")
    assert not one.processes()


def test_a_broken_file_and_a_stray_variable_keep_nobody_from_stopping_it(one: Served) -> None:
    """Down, status, logs and remove need the folder alone."""
    one.configure()
    one.up()
    file = one.places.folder / "loadmaster.toml"
    with file.open("a") as text:
        text.write("foo = \n")
    one.environment["LOADMASTER_ENGIN_PORT"] = "5"
    assert one.run("status", one.name).returncode == 0
    assert one.run("logs", one.name, "-n", "1").returncode == 0
    done = one.run("down", one.name)
    assert (done.returncode, one.processes()) == (0, ())
    assert done.stderr.startswith("warning: ")
    assert "not TOML" in done.stderr
    file.unlink()
    assert one.run("status", one.name).returncode == 1
    assert one.run("down", one.name).returncode == 0
    assert one.run("remove", one.name, "--yes").returncode == 0
    assert not one.places.folder.exists()


def test_up_ends_with_words_when_supervisor_and_engine_are_killed_while_it_waits(one: Served) -> None:
    one.configure("--load", "60")
    waiting = one.start("up", one.name)
    now = one.until(lambda now: now.backend.pid is not None and now.state == "loading", "the load")
    assert now.supervisor.pid is not None
    assert now.backend.pid is not None
    os.kill(now.supervisor.pid, signal.SIGKILL)
    os.kill(now.backend.pid, signal.SIGKILL)
    _, err = waiting.communicate(timeout=20)
    assert waiting.returncode == 1
    # whether run-engine had come to its last word when `up` looked
    assert re.search(r"error: one is not up, its supervisor has gone: (exited, |down, stopped: )", err)
    assert err.endswith("hint: loadmaster up one\n")


def test_a_gateway_whose_port_is_taken_is_named_by_up_and_status(one: Served) -> None:
    """Another program takes the port of a gateway that was killed."""
    one.configure()
    one.up()
    gateway = one.status().gateway.pid
    assert gateway is not None
    taker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import socket, sys, time\n"
            "port, end = int(sys.argv[1]), time.monotonic() + 20\n"
            "print(flush=True)\n"
            "while time.monotonic() < end:\n"
            "    try:\n"
            "        taken = socket.create_server(('127.0.0.1', port))\n"
            "        break\n"
            "    except OSError:\n"
            "        time.sleep(0.001)\n"
            "time.sleep(40)\n",
            str(one.gateway_port),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert taker.stdout is not None
        taker.stdout.readline()
        os.kill(gateway, signal.SIGKILL)
        now = one.until(lambda now: now.gateway.problem is not None, "the problem")
        assert f"held by process {taker.pid} " in str(now.gateway.problem)
        assert f"cannot listen on port {one.gateway_port}" in one.run("status", one.name).stdout
        done = one.run("up", one.name, timeout_s=15)
        assert done.returncode == 1
        assert f"error: one is not reachable: its gateway cannot listen on port {one.gateway_port}" in done.stderr
    finally:
        taker.kill()
        taker.communicate()
    one.until(lambda now: now.healthy is True and now.gateway.problem is None, "the gateway, when the port is free")


def test_of_two_deployments_with_one_gateway_port_the_second_ends_at_once(one: Served) -> None:
    with served(one.home, "two") as two:
        two.gateway_port, two.engine_port = one.gateway_port, one.engine_port
        one.configure("--load", "1")
        two.configure("--load", "1")
        starts = [each.start("up", each.name) for each in (one, two)]
        ends = [start.communicate(timeout=30) for start in starts]
        assert sorted(start.returncode for start in starts) == [0, 1], ends
        loser = next(err for start, (_, err) in zip(starts, ends, strict=True) if start.returncode)
        assert re.search(rf"error: .*port {one.gateway_port} (of|on) 127.0.0.1.* held by process \d+ ", loser)
        chosen = {each.status().backend.port for each in (one, two)} - {None}
        assert all(one.engine_port <= int(port or 0) < one.engine_port + 1000 for port in chosen)


def test_a_full_disk_is_said_and_nothing_is_started(one: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = one.configure()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match="the disk is full"):
        begin(deployment, one.places, lambda text: None)
    assert not leftovers(one.places)


def test_what_cannot_be_written_is_exit_code_1_for_down_too(one: Served) -> None:
    one.configure()
    one.places.change_lock.mkdir(parents=True)
    done = one.run("down", one.name)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot write {one.places.change_lock}: ")


def test_a_folder_that_cannot_be_written_is_said(one: Served) -> None:
    one.configure()
    one.places.run.write_text("a file in the place of the folder")
    done = one.run("up", one.name)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot write {one.places.run}: not a directory")
    assert not one.processes()


def test_in_the_foreground_of_a_long_path_it_stays_until_a_signal_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with served(tmp_path / ("deep" * 20)) as one:
        one.configure()
        process = one.start("up", one.name, "--foreground")
        lines: list[str] = []
        assert process.stdout is not None
        assert process.stderr is not None
        reading = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        reading.start()
        one.until(lambda now: now.healthy is True, "the foreground start")
        assert process.stdout.readline() == "one answers\n"
        folder = one.places.socket.parent
        assert folder != one.places.run
        control = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(one.places.configuration), "pid"]
        shown = subprocess.run(control, capture_output=True, text=True, check=False).stdout
        assert int(shown) == one.status().supervisor.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
        reading.join(5)
        process.stdout.close()
        process.stderr.close()
        assert any("one is down" in line for line in lines), lines
        assert not one.processes()
        assert not folder.exists()


# ---------------------------------------------------------------------------------------------- killed


def test_crashes_are_counted_as_they_are(one: Served) -> None:
    starts = one.home / "starts"
    one.configure("--crash-at", "load", "--starts", str(starts), supervision={"backoff_first_s": 0.5})
    done = one.run("up", one.name)
    begun = int(starts.read_text())
    assert done.returncode == 1
    assert begun == 3
    assert "error: one crashed 3 times: " in done.stderr


def test_without_a_state_file_the_status_comes_from_processes_and_answers(one: Served) -> None:
    """As on a full disk: a folder in the file's place can be neither written over nor removed."""
    one.configure()
    one.up()
    engine = one.status().backend.pid
    assert engine is not None
    one.places.engine.unlink()
    one.places.engine.mkdir()
    os.kill(engine, signal.SIGKILL)
    now = one.until(lambda now: now.healthy is True and now.backend.pid != engine, "the next start")
    assert (now.state, now.message) == ("ready", "its state file cannot be written")
    assert one.ask()
    assert f"process {now.backend.pid}" in one.run("status", one.name).stdout
    said = one.up()
    assert "note     its state file cannot be written" in said


def test_workers_that_have_written_over_their_environment_are_found_and_ended(one: Served) -> None:
    """As vLLM's do: the session and its leader's time tell whose they are."""
    one.places.make()
    overwrite = (
        "import time\n"
        "fields = open('/proc/self/stat').read().rpartition(')')[2].split()\n"
        "start, end = int(fields[47]), int(fields[48])\n"
        "memory = open('/proc/self/mem', 'r+b', buffering=0)\n"
        "memory.seek(start)\n"
        "memory.write(bytes(end - start))\n"
        "print(flush=True)\n"
        "time.sleep(60)\n"
    )
    first = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {overwrite!r}]); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", first], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()
    leader = Pid.of(child.pid)
    write_run(one.places.engine_run, EngineRun(marker="gone", pid=child.pid, started=leader.started))
    child.kill()
    child.wait()
    child.stdout.close()
    (left,) = leftovers(one.places)
    assert (left.session, left.parent != child.pid) == (child.pid, True)
    one.configure()
    refused = one.run("remove", one.name, "--yes")
    assert refused.returncode == 1
    assert f"(process {left.pid}): left of its engine" in refused.stderr
    assert sweep(one.places) == ()
    assert leftovers(one.places) == ()


def test_killed_processes_leave_no_orphan_a_true_status_and_a_working_up(one: Served) -> None:
    """A few of the rounds that scripts/soak plays by the hundred."""
    one.configure("--load", "0.3")
    rounds = Rounds(one, seed=3)
    for moment, victims in (
        ("loading", "run-engine and supervisord"),
        ("ready", "engine and gateway"),
        ("stopping", "run-engine"),
    ):
        rounds.round(moment, victims)
