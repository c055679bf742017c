"""A deployment moves to another release, or has the old one again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loadmaster.config import change_value, deployment_folder, load_deployment, read_deployment
from loadmaster.core.deployment import Deployment
from loadmaster.service.upgrade import BEFORE, Outcome, Steps, go_back_if_interrupted, upgrade

TEXT = """# mine
schema = 1
name = "cat"
model = "org/model"

[engine]  # the engine
kind = "vllm"
version = "0.24.0"
port = 8001 # not 8000
"""


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in [name for name in os.environ if name.startswith("LOADMASTER_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path))
    folder = deployment_folder("cat")
    folder.mkdir(parents=True)
    (folder / "loadmaster.toml").write_text(TEXT)
    return folder / "loadmaster.toml"


class Fake:
    """Steps that note when they are called, and with which release in the file."""

    def __init__(self, path: Path, *, plan: str | None = None, running: bool = True) -> None:
        self.path = path
        self.plan_says = plan
        self.is_running = running
        self.restarts: list[str | None] = []
        self.proofs: list[str | None] = []
        self.seen: list[tuple[str, str | None]] = []

    def note(self, what: str) -> None:
        self.seen.append((what, read_deployment(self.path, {}).deployment.engine.version))

    def plan(self, deployment: Deployment) -> str | None:
        self.seen.append(("plan", deployment.engine.version))
        return self.plan_says

    def running(self, name: str) -> bool:
        return self.is_running

    def restart(self, name: str) -> str | None:
        self.note("restart")
        return self.restarts.pop(0) if self.restarts else None

    def verify(self, name: str) -> str | None:
        self.note("verify")
        return self.proofs.pop(0) if self.proofs else None

    @property
    def steps(self) -> Steps:
        return Steps(plan=self.plan, running=self.running, restart=self.restart, verify=self.verify)


def test_a_verified_release_stays(path: Path) -> None:
    fake = Fake(path)
    assert upgrade("cat", "0.33.0", fake.steps) == Outcome("cat", "upgraded", "0.24.0 -> 0.33.0, verified")
    assert fake.seen == [("plan", "0.33.0"), ("restart", "0.33.0"), ("verify", "0.33.0")]
    assert path.read_text() == TEXT.replace("0.24.0", "0.33.0")
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["loadmaster.toml"]


def test_what_does_not_fit_is_not_tried(path: Path) -> None:
    fake = Fake(path, plan="it does not fit")
    assert upgrade("cat", "0.33.0", fake.steps) == Outcome("cat", "kept", "it does not fit")
    assert fake.seen == [("plan", "0.33.0")]
    assert path.read_text() == TEXT


@pytest.mark.parametrize("step", ["restarts", "proofs"])
def test_a_failure_brings_the_old_release_back(path: Path, step: str) -> None:
    fake = Fake(path)
    getattr(fake, step).append("pictures do not arrive")
    outcome = upgrade("cat", "0.33.0", fake.steps)
    assert outcome == Outcome("cat", "went back", "0.33.0: pictures do not arrive; the old release serves again")
    assert fake.seen[-1] == ("restart", "0.24.0")
    assert path.read_text() == TEXT
    assert not path.with_name(BEFORE).exists()


def test_an_old_release_that_does_not_start_either_is_said(path: Path) -> None:
    fake = Fake(path)
    fake.proofs, fake.restarts = ["wrong"], [None, "no memory"]
    outcome = upgrade("cat", "0.33.0", fake.steps)
    assert outcome.detail == "0.33.0: wrong; and the old release does not start: no memory"


def test_what_does_not_run_is_only_switched(path: Path) -> None:
    outcome = upgrade("cat", "0.33.0", Fake(path, running=False).steps)
    assert (outcome.result, load_deployment("cat", {}).deployment.engine.version) == ("not proved", "0.33.0")


def test_an_error_or_interruption_in_the_middle_leaves_the_old_file(path: Path) -> None:
    fake = Fake(path)

    def interrupted(name: str) -> str | None:
        fake.note("verify")
        raise KeyboardInterrupt

    steps = Steps(plan=fake.plan, running=fake.running, restart=fake.restart, verify=interrupted)
    with pytest.raises(KeyboardInterrupt):
        upgrade("cat", "0.33.0", steps)
    assert fake.seen[-1] == ("verify", "0.33.0")
    assert path.read_text() == TEXT
    assert not path.with_name(BEFORE).exists()


def test_a_killed_upgrade_is_undone_by_the_next(path: Path) -> None:
    path.with_name(BEFORE).write_text(TEXT)
    path.write_text(TEXT.replace("0.24.0", "0.33.0"))
    assert go_back_if_interrupted("cat")
    assert path.read_text() == TEXT
    assert not go_back_if_interrupted("cat")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TEXT.replace('"vllm"', '"llamacpp"').replace('version = "0.24.0"\n', ""), "its engine is llamacpp"),
        (TEXT.replace("port =", 'python = "/x"\nport ='), "it has an engine.python or engine.container of its own"),
        (TEXT.replace("0.24.0", "0.33.0"), "it has 0.33.0 already"),
    ],
)
def test_what_cannot_move(path: Path, text: str, why: str) -> None:
    path.write_text(text)
    fake = Fake(path)
    assert upgrade("cat", "0.33.0", fake.steps) == Outcome("cat", "kept", why)
    assert fake.seen == []


def test_a_release_that_the_environment_decides(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_ENGINE_VERSION", "0.23.0")
    outcome = upgrade("cat", "0.33.0", Fake(path).steps)
    assert outcome == Outcome("cat", "kept", "environment LOADMASTER_ENGINE_VERSION decides its release")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('[engine]\nkind = "vllm"\n', '[engine]\nversion = "0.33.0"\nkind = "vllm"\n'),
        ("[engine] # here\nversion='0.1.0'\n", '[engine] # here\nversion = "0.33.0"\n'),
        ('[engine]\n# version = "0.1.0"\n', '[engine]\nversion = "0.33.0"\n# version = "0.1.0"\n'),
    ],
)
def test_one_value_changes_and_every_other_line_stays(path: Path, before: str, after: str) -> None:
    head = 'name = "cat"\nmodel = "x"  # mine\n'
    path.write_text(head + before)
    change_value(path, "engine.version", "0.33.0")
    assert path.read_text() == head + after


@pytest.mark.parametrize(
    "given",
    [
        'engine = { kind = "vllm", version = "0.1.0" }\n',
        'engine.kind = "vllm"\n',
        "",
        '[engine]\nversion = "0.1.0" # a comment\n',
        '[engine]\nversion = """0.1.0"""\n',
    ],
)
def test_a_value_that_lines_cannot_reach_is_set_all_the_same(path: Path, given: str) -> None:
    path.write_text('name = "cat"\nmodel = "x"\n' + given)
    change_value(path, "engine.version", "0.33.0")
    assert load_deployment("cat", {}).deployment.engine.version == "0.33.0"
    assert path.with_name("loadmaster.toml.bak").exists()
