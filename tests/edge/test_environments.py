"""Environments from a folder index: whole or not there, whatever happens on the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from loadmaster.edge import environments
from loadmaster.edge.environments import (
    EngineEnvironmentError,
    Environment,
    install,
    installed,
    python_for,
    remove,
    size_bytes,
)
from loadmaster.edge.statehome import WriteError
from tests.wheels import write_vllm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    write_vllm(folder, "0.24.0")
    write_vllm(folder, "0.33.0")
    write_vllm(folder, "0.32.0", says="0.31.0")
    write_vllm(folder, "0.30.0", fails=True)
    return folder


def only_this_index(index: Path, patch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        patch.delenv(name)
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(index))
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.setenv("PYTHONPATH", "/nowhere")


@pytest.fixture(autouse=True)
def only_the_folder(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_this_index(index, monkeypatch)


@pytest.fixture(scope="module")
def made(index: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Environment, list[str]]:
    """One environment that is really made, and what was said meanwhile."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        only_this_index(index, patch)
        return install(tmp_path_factory.mktemp("state"), "0.24.0", report=said.append), said


@pytest.fixture(scope="module")
def quick_python(made: tuple[Environment, list[str]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that makes environments by copying one, which takes a tenth of the time."""
    folder = tmp_path_factory.mktemp("template")
    shutil.copytree(made[0].path, folder / "venv", symlinks=True)
    script = folder / "python"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1 $2" = "-m venv" ]; then\n'
        "  for last; do :; done\n"
        f'  exec cp -r "{folder}/venv" "$last"\n'
        "fi\n"
        f'exec "{sys.executable}" "$@"\n'
    )
    script.chmod(0o700)
    return str(script)


def engines(state: Path) -> list[str]:
    """What stands beside the lock; the folder itself goes with the last environment."""
    folder = state / "engines"
    return sorted(entry.name for entry in folder.iterdir() if entry.name != ".lock") if folder.exists() else []


def test_an_environment_is_installed_listed_used_and_removed(
    made: tuple[Environment, list[str]], quick_python: str
) -> None:
    environment, said = made
    state = environment.path.parent.parent
    assert environment.path == state / "engines" / "vllm-0.24.0"
    assert engines(state) == ["vllm-0.24.0"]
    assert installed(state) == (environment,)
    assert python_for(state) == python_for(state, "0.24.0") == environment.python
    assert python_for(state, "0.33.0") is None
    assert any("vllm" in line for line in said)
    assert size_bytes(environment) > 1 << 20
    # scripts start with the place where they are, not with the one where they were made
    done = subprocess.run([environment.path / "bin" / "vllm"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "0.24.0\n"
    for script in (environment.path / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            assert b".building-" not in script.read_bytes(), script
    with pytest.raises(EngineEnvironmentError, match="installed already"):
        install(state, "0.24.0")
    with subprocess.Popen([environment.python, "-c", "input()"], stdin=subprocess.PIPE) as user:
        try:
            deadline = time.monotonic() + 10
            while not environments._users(environment.path) and time.monotonic() < deadline:
                time.sleep(0.02)
            with pytest.raises(EngineEnvironmentError, match=f"in use by process {user.pid}"):
                remove(state, "0.24.0")
        finally:
            user.kill()
    remove(state, "0.24.0")
    assert not (state / "engines").exists()
    with pytest.raises(EngineEnvironmentError, match="is not installed"):
        remove(state, "0.24.0")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.32.0", "vLLM 0.32.0 was asked for, but the engine says 0.31.0"),
        ("0.30.0", "vLLM 0.30.0 does not start"),
        ("0.29.0", "the package index has no such release"),
    ],
)
def test_what_fails_leaves_nothing(version: str, message: str, quick_python: str, tmp_path: Path) -> None:
    with pytest.raises(EngineEnvironmentError) as caught:
        install(tmp_path, version, python=quick_python)
    assert message in caught.value.message
    if version == "0.30.0":
        assert "libcudart.so.13 is missing" in caught.value.message
    assert engines(tmp_path) == []


@pytest.mark.parametrize("version", ["", "latest", "0.33.0; rm -rf /", "../x", "-r", "1"])
def test_what_is_no_release_is_refused(version: str, tmp_path: Path) -> None:
    with pytest.raises(EngineEnvironmentError, match="is no release"):
        install(tmp_path, version)
    assert not (tmp_path / "engines").exists()


def test_an_interruption_leaves_nothing_and_ends_what_it_started(quick_python: str, tmp_path: Path) -> None:
    def report(line: str) -> None:
        if line.startswith("making"):
            return
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(tmp_path, "0.24.0", python=quick_python, report=report)
    assert engines(tmp_path) == []
    mark = str(tmp_path).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert mark not in (folder / "cmdline").read_bytes()
        except OSError:
            continue


def test_a_python_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(EngineEnvironmentError, match="cannot start"):
        install(tmp_path, "0.24.0", python="/no/such/python")
    assert engines(tmp_path) == []
    assert environments.python_version("/no/such/python") is None
    assert environments.python_version("/bin/true") is None


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\necho 'ERROR: Could not install packages due to an OSError: "
        "[Errno 28] No space left on device'\nexit 1\n"
    )
    script.chmod(0o700)
    with pytest.raises(WriteError, match="the disk is full"):
        install(tmp_path / "state", "0.24.0", python=str(script))
    assert engines(tmp_path / "state") == []


def test_two_installations_and_what_a_killed_one_left(tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    (folder / ".building-0.24.0-abc").mkdir(parents=True)
    (folder / ".removed-0.24.0-abc").mkdir()
    (folder / "vllm-0.1.0").mkdir()  # without an interpreter: nothing of ours
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with environments._alone(folder):
            entered.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert entered.wait(10)
        assert engines(tmp_path) == ["vllm-0.1.0"]
        with pytest.raises(EngineEnvironmentError, match="another installation is at work"):
            install(tmp_path, "0.24.0")
    finally:
        leave.set()
        holder.join(10)
    assert installed(tmp_path) == ()


def test_a_download_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho starting\nsleep 60\n")
    script.chmod(0o700)
    with pytest.raises(EngineEnvironmentError, match="no end after"):
        environments._run((str(script),), lambda line: None, "it failed", 0.3)
