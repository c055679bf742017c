"""engine install, list, remove and upgrade: exit code, stdout, stderr. Nothing is really installed here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from inline_snapshot import snapshot

from loadmaster.commands import engine as module
from loadmaster.config import load_deployment, write_deployment
from loadmaster.core.deployment import Deployment, EngineSection
from loadmaster.core.enginechoice import Machine
from loadmaster.core.engineversion import is_release
from loadmaster.edge import environments, machine
from loadmaster.edge.environments import EngineEnvironmentError, Environment
from loadmaster.service.upgrade import Steps
from tests.commands.transcript import Transcript, run

GOOD = Machine(driver="580.95.05", compute_capability=(8, 6), python=(3, 11), glibc="2.36", machine="x86_64")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in [name for name in os.environ if name.startswith("LOADMASTER_")]:
        monkeypatch.delenv(variable)
    state = tmp_path / "state"
    monkeypatch.setenv("LOADMASTER_HOME", str(state))
    monkeypatch.setattr(machine, "read_machine", lambda python=sys.executable: GOOD)
    monkeypatch.setattr(module, "_end_like_an_interrupt", lambda: None)

    def install(state: Path, version: str, *, python: str, report: Callable[[str], None]) -> Environment:
        report(f"Collecting vllm=={version}")
        report("  Downloading")
        if version == "0.32.0":
            raise EngineEnvironmentError(f"vLLM {version} could not be installed\n       ERROR: no wheel")
        return make(state, version)

    monkeypatch.setattr(environments, "install", install)
    return state


def make(state: Path, version: str) -> Environment:
    path = state / "engines" / f"vllm-{version}"
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(sys.executable)
    return Environment(version, path)


def have(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(machine, "read_machine", lambda python: msgspec.structs.replace(GOOD, **changes))


def loadmaster(*arguments: str) -> Transcript:
    return run(module.engine, arguments, "engine")


def deploy(name: str, version: str | None, **engine: Any) -> None:
    write_deployment(Deployment(name=name, model="org/model", engine=EngineSection(version=version, **engine)))


# ---------------------------------------------------------------------------------------------- install


def test_the_newest_that_fits_is_installed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loadmaster("install").without(home=str(home)) == snapshot(
        (
            0,
            "installed vLLM 0.33.0 in HOME/engines/vllm-0.33.0\n",
            """\
installing vLLM 0.33.0
  Collecting vllm==0.33.0
""",
        )
    )
    have(monkeypatch, driver="570.86.10")
    assert loadmaster("install", "vllm").without(home=str(home)) == snapshot(
        (
            0,
            "installed vLLM 0.19.1 in HOME/engines/vllm-0.19.1\n",
            """\
installing vLLM 0.19.1
  Collecting vllm==0.19.1
""",
        )
    )


def test_the_model_has_a_say(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["AquilaForCausalLM"], "model_type": "aquila"}')
    assert loadmaster("install", "--model", str(folder)).out == f"installed vLLM 0.24.0 in {home}/engines/vllm-0.24.0\n"


@pytest.mark.parametrize(
    ("changes", "arguments", "expected"),
    [
        (
            {"driver": None},
            [],
            snapshot(
                (
                    3,
                    "",
                    """\
error: no NVIDIA driver answers here, so no release can be chosen
hint: name one with --version
""",
                )
            ),
        ),
        (
            {"driver": "470.199.02"},
            [],
            snapshot(
                (
                    1,
                    "",
                    "error: no vLLM release fits here: 0.20.0 to 0.33.0: it is built for CUDA 13.0, which needs driver 580.65.06; this one is 470.199.02; 0.12.0 to 0.19.1: it is built for CUDA 12.9, which needs driver 525.60.13; this one is 470.199.02; 0.10.2 to 0.11.2: it is built for CUDA 12.8, which needs driver 525.60.13; this one is 470.199.02\n",
                )
            ),
        ),
        (
            {"driver": "570.86.10"},
            ["--version", "0.33.0"],
            snapshot(
                (
                    1,
                    "",
                    """\
error: vLLM 0.33.0 does not fit here: it is built for CUDA 13.0, which needs driver 580.65.06; this one is 570.86.10
hint: 0.19.1 fits: --version 0.19.1
""",
                )
            ),
        ),
        (
            {"system": "Darwin", "driver": None},
            [],
            snapshot(
                (
                    1,
                    "",
                    "error: no vLLM release fits here: 0.10.2 to 0.33.0: vLLM's packages are for Linux, this is Darwin\n",
                )
            ),
        ),
        ({"python": None}, ["--python", "/no/python"], snapshot((2, "", "error: /no/python is no Python that runs\n"))),
        (
            {},
            ["--version", "newest"],
            snapshot(
                (
                    2,
                    "",
                    """\
error: 'newest' is no release of vLLM
hint: for example 0.33.0
""",
                )
            ),
        ),
        (
            {},
            ["--version", "0.32.0"],
            snapshot(
                (
                    1,
                    "",
                    """\
installing vLLM 0.32.0
  Collecting vllm==0.32.0
error: vLLM 0.32.0 could not be installed
       ERROR: no wheel
""",
                )
            ),
        ),
        (
            {},
            ["llamacpp"],
            snapshot(
                (
                    2,
                    "",
                    """\
error: llama.cpp is a part of loadmaster itself
hint: pip install 'loadmaster[cpu]'
""",
                )
            ),
        ),
    ],
)
def test_install_refuses(
    changes: dict[str, Any], arguments: Sequence[str], expected: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, **changes)
    assert loadmaster("install", *arguments).without(home=str(home)) == expected
    assert not home.exists()


@pytest.mark.parametrize(
    "version",
    ["0.33.0; rm -rf /", "0.33.0\n", "../0.33", "", "0", "0.33.0 ", "-e .", "0.33.0[x]", "v0.33.0", "0." * 80],
)
def test_what_is_no_release_is_wrong_usage(version: str, home: Path) -> None:
    seen = loadmaster("install", "--version", version)
    assert (seen.code, seen.out) == (2, "")
    assert "is no release of vLLM" in seen.err
    assert "installing" not in seen.err
    assert not home.exists()


@pytest.mark.parametrize("version", ["0.33.0", "0.20.1rc2.dev9+g1abc", "0.9.0.post1", "0.8.5+cu121.x"])
def test_releases_are_known_as_such(version: str) -> None:
    assert is_release(version)


def test_install_says_who_will_take_the_new_release(home: Path) -> None:
    deploy("cat", None)
    deploy("dog", "0.24.0")
    assert loadmaster("install").err.splitlines()[-1] == snapshot(
        "note: cat: no engine.version, so the newest release is taken at a start"
    )


def test_a_given_release_needs_no_driver_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, driver=None, compute_capability=None)
    assert loadmaster("install", "--version", "0.24.0").code == 0


STOPPED = """
import signal, sys
from loadmaster.commands import engine
from loadmaster.edge import environments

def install(state, version, **more):
    try:
        print("installing", flush=True)
        signal.pause()
    finally:
        print("cleared up", flush=True)

environments.install = install
engine.run_install("0.33.0", sys.executable)
"""


def test_a_termination_clears_up() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "installing\n"
            child.send_signal(signal.SIGTERM)
            out, err = child.communicate(timeout=20)
        finally:
            child.kill()
    assert (child.returncode, out) == (130, "cleared up\n")
    assert err.endswith("interrupted; nothing is left of it\n")


# ---------------------------------------------------------------------------------------------- list, remove


def test_list(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loadmaster("list").without() == snapshot(
        (0, "", "no environment yet; make one with: loadmaster engine install\n")
    )
    make(home, "0.9.2")
    make(home, "0.33.0")
    deploy("cat", "0.33.0")
    deploy("dog", "0.33.0", python="/opt/python")
    monkeypatch.setattr(environments, "size_bytes", lambda environment: 10 << 30)
    assert loadmaster("list").without(home=str(home)) == snapshot(
        (
            0,
            """\
vllm 0.33.0      10.00 GiB  HOME/engines/vllm-0.33.0
                used by cat
vllm 0.9.2       10.00 GiB  HOME/engines/vllm-0.9.2
                named by no deployment
""",
            "",
        )
    )
    document = json.loads(loadmaster("list", "--json").out)
    assert [(row["version"], row["bytes"], row["deployments"]) for row in document["environments"]] == [
        ("0.33.0", 10 << 30, ["cat"]),
        ("0.9.2", 10 << 30, []),
    ]


def test_remove(home: Path) -> None:
    make(home, "0.33.0")
    make(home, "0.24.0")
    deploy("cat", "0.33.0")
    assert loadmaster("remove", "0.33.0", "--yes").without() == snapshot(
        (
            1,
            "",
            """\
error: vLLM 0.33.0 is named by cat
hint: loadmaster engine upgrade moves them
""",
        )
    )
    assert loadmaster("remove", "0.24.0").without() == snapshot(
        (
            2,
            "",
            """\
error: nobody is here to ask
hint: give --yes
""",
        )
    )
    assert loadmaster("remove", "0.1.0").without() == snapshot(
        (
            2,
            "",
            """\
error: vLLM 0.1.0 is not installed
hint: there is 0.33.0, 0.24.0
""",
        )
    )
    assert loadmaster("remove", "0.24.0", "--yes").without(home=str(home)) == snapshot(
        (0, "removed HOME/engines/vllm-0.24.0\n", "")
    )
    assert [one.version for one in environments.installed(home)] == ["0.33.0"]


# ---------------------------------------------------------------------------------------------- upgrade


def use(monkeypatch: pytest.MonkeyPatch, *, plan: str | None = None, proof: dict[str, str] | None = None) -> None:
    steps = Steps(
        plan=lambda deployment: plan,
        running=lambda name: name != "asleep",
        restart=lambda name: None,
        verify=(proof or {}).get,
    )
    monkeypatch.setattr(module, "steps", lambda: steps)


def test_upgrade_moves_goes_back_and_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(home, "0.24.0")
    for name in ("asleep", "cat", "dog"):
        deploy(name, "0.24.0")
    deploy("own", "0.24.0", python="/opt/python")
    use(monkeypatch, proof={"dog": "verify failed: image-colour"})
    assert loadmaster("upgrade").without(home=str(home)) == snapshot(
        (
            1,
            """\
asleep: not proved: 0.24.0 -> 0.33.0; it is not running, so nothing was tried
cat: upgraded: 0.24.0 -> 0.33.0, verified
dog: went back: 0.33.0: verify failed: image-colour; the old release serves again
""",
            """\
installing vLLM 0.33.0
  Collecting vllm==0.33.0
""",
        )
    )
    releases = {name: load_deployment(name, {}).deployment.engine.version for name in ("asleep", "cat", "dog", "own")}
    assert releases == {"asleep": "0.33.0", "cat": "0.33.0", "dog": "0.24.0", "own": "0.24.0"}
    use(monkeypatch, plan="it does not fit")
    assert loadmaster("upgrade", "dog").without() == snapshot((0, "dog: kept: it does not fit\n", ""))
    assert loadmaster("upgrade", "bird").without() == snapshot(
        (
            2,
            "",
            """\
error: no deployment 'bird'
hint: loadmaster list shows them
""",
        )
    )


def test_upgrade_of_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(home, "0.33.0")
    assert loadmaster("upgrade").without() == snapshot((0, "", "no deployment to move\n"))


def test_the_real_steps_run_our_own_commands(home: Path) -> None:
    deploy("cat", "0.24.0")
    assert module.steps().running("cat") is False
    failed = module.steps().verify("no-such-deployment")
    assert failed is not None and failed.startswith("verify failed: ")
