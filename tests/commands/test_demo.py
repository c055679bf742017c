"""The demonstration with the real engine: it answers, and it leaves nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from loadmaster.edge.process import read_processes
from loadmaster.service import demowatch
from loadmaster.service.enginestate import Pid
from tests.service.served import served

PATIENCE_S = 90.0
started: list[subprocess.Popen[str]] = []


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short name: what is temporary goes there and has to be gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="lm-", dir="/tmp"))
    yield folder
    for process in started:
        process.kill()
        process.communicate()
    started.clear()
    for pid in processes_in(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def environment(place: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOADMASTER_")}
    # settings of others must not reach the demonstration
    return kept | {
        "TMPDIR": str(place),
        "XDG_RUNTIME_DIR": str(place),
        "LOADMASTER_HOME": str(place / "home"),
        "LOADMASTER_ENGINE_KIND": "vllm",
    }


def processes_in(place: Path) -> list[int]:
    """The living processes that have this folder in their environment or their command."""
    found = []
    for pid in read_processes():
        if pid == os.getpid():
            continue
        for file in ("environ", "cmdline"):
            try:
                if os.fsencode(place) in Path(f"/proc/{pid}/{file}").read_bytes():
                    found.append(pid)
                    break
            except OSError:
                continue
    return found


def nothing_is_left(place: Path) -> None:
    assert processes_in(place) == []
    assert list(place.iterdir()) == []


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "loadmaster", "demo", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(place),
    )
    started.append(process)
    return process


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


def test_once_answers_a_picture_and_leaves_nothing(place: Path) -> None:
    begun = time.monotonic()
    process = start(place, "--once", "--port", str(free_port()))
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err + out
    assert time.monotonic() - begun < 60
    assert re.search(r"plan: .* fits\n", out)
    assert re.search(r"shown: +a black square and a green triangle\n", out)
    assert re.search(r"answered: 'The square is black\.' \(", out)
    for step in (
        "models",
        "text",
        "stream",
        "image",
        "image-large",
        "control-colour",
        "image-colour",
        "image-second-turn",
        "image-exif",
        "image-order",
        "control-number",
        "conversation",
        "image-number",
        "image-huge",
        "json-schema",
        "concurrent",
        "longest-prompt",
        "cancel",
    ):
        assert re.search(rf"ok +{step} ", out), step
    for step in ("memory", "arguments"):
        assert re.search(rf"ok +{step} ", out), step
    assert "PASSED: the service works" in out
    assert err.endswith("stopped; nothing is left\n")
    nothing_is_left(place)


def test_it_stays_until_interrupted_and_keeps_what_it_was_told_to(place: Path) -> None:
    port = free_port()
    process = start(place, "--keep", "--port", str(port))
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        shown.append(line)
        if "Ctrl-C stops it" in line:
            break
    assert f"http://127.0.0.1:{port}/v1" in "".join(shown)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        assert json.load(answer)["data"][0]["id"] == "demo"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    found = re.search(r"interrupted\nstopped; kept: (.+)\n$", err)
    assert found is not None
    folder = Path(found.group(1))
    names = {path.name for path in folder.rglob("*")}
    assert {"demo-qwen35.gguf", "mmproj-demo-qwen35.gguf", "loadmaster.toml", "plan.json", "backend.log"} <= names
    assert not any(path.is_socket() for path in folder.rglob("*"))
    assert processes_in(place) == []


@pytest.mark.parametrize("after", ["wrote a tiny model", "starting"])
def test_an_end_during_the_start_leaves_nothing(place: Path, after: str) -> None:
    process = start(place, "--once", "--port", str(free_port()))
    assert process.stderr is not None
    # states are looked at from time to time, so only those that last surely show
    assert any(line.startswith(after) for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    nothing_is_left(place)


def test_a_killed_demonstration_ends_by_itself(place: Path) -> None:
    process = start(place, "--port", str(free_port()))
    assert process.stderr is not None
    assert any(line.startswith("loading") for line in process.stderr)
    assert len(processes_in(place)) > 3
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    deadline = time.monotonic() + 30
    while (processes_in(place) or any(place.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    nothing_is_left(place)


def test_what_a_killed_demonstration_and_its_watcher_left_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, kept = tmp_path / "loadmaster-demo-x", tmp_path / "loadmaster-demo-kept"
    (tmp_path / "loadmaster-demo-file").touch()
    kept.mkdir()
    with served(folder / "state", demowatch.NAME) as one:
        one.configure()
        one.up()
        for path, keep in ((folder, False), (kept, True)):
            demowatch.own(path, keep)
        assert demowatch.earlier() == (kept, folder)
        assert not demowatch.take_away(folder)  # its demonstration, this process, lives
        assert one.status().healthy
        gone = demowatch.Owner(Pid(1 << 22, 1), False)
        (folder / "owner.json").write_bytes(msgspec.json.encode(gone))
        (kept / "owner.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(gone, keep=True)))
        assert demowatch.take_away(folder)
        assert not folder.exists()
        assert not one.processes()
        assert not demowatch.take_away(kept)
        assert kept.exists()


def test_a_port_that_is_taken_is_said(place: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        process = start(place, "--once", "--port", str(port))
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"error: port {port} on 127.0.0.1 is held by process {os.getpid()}" in err
    nothing_is_left(place)
