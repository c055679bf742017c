"""What is read, planned and refused before an engine starts, for each kind of engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadmaster.core.deployment import Deployment
from loadmaster.edge.demomodel import write_demo_model
from loadmaster.edge.sample import write_sample
from loadmaster.engines.base import engine_for
from loadmaster.service.preparation import Prepared, prepare, refuse, shown_sheet
from loadmaster.service.refusal import Refusal
from loadmaster.service.webprogram import concurrency, gateway_settings, picture_rules, read_plan

FLAGS = ["--max-model-len", "8192", "--api-key", "sesame-sesame"]


def _deployment(model: Path | str, kind: str = "vllm", **changes: Any) -> Deployment:
    engine = {"kind": kind, "flags": FLAGS if kind == "vllm" else [], **changes.pop("engine", {})}
    if kind == "vllm":
        engine.setdefault("version", "0.33.0")
    return msgspec.convert({"name": "shop", "model": str(model), "engine": engine, **changes}, Deployment)


def _prepared(deployment: Deployment) -> Prepared:
    return prepare(deployment, engine_for(deployment))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample("Qwen3.5-9B", "bf16", tmp_path_factory.mktemp("models") / "Qwen3.5-9B")


def test_a_checkpoint_is_planned_on_its_cards(checkpoint: Path, tmp_path: Path) -> None:
    prepared = _prepared(_deployment(checkpoint, gpus="1x48GiB"))
    refuse(prepared)
    assert prepared.sheet is not None
    assert prepared.sheet.fits is True
    assert prepared.version == "0.33.0"
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(shown_sheet(prepared.sheet)))
    assert "sesame" not in path.read_text()
    plan = read_plan(path)
    assert plan is not None
    assert plan.gpus == prepared.sheet.gpus
    assert concurrency(_deployment(checkpoint), plan) == plan.settings.max_num_seqs  # type: ignore[union-attr]
    rules = picture_rules(_deployment(checkpoint, limits={"max_images": 2}), plan)
    assert rules.max_pixels == plan.images.largest_pixels  # type: ignore[union-attr]
    assert rules.max_images == 2
    assert picture_rules(_deployment(checkpoint, limits={"max_image_pixels": 5000}), plan).max_pixels == 5000


def test_what_cannot_fit_is_refused_with_the_findings(checkpoint: Path) -> None:
    with pytest.raises(Refusal) as refused:
        refuse(_prepared(_deployment(checkpoint, gpus="1x12GiB")))
    assert refused.value.exit_code == 1
    assert refused.value.findings


def test_a_flag_that_the_engine_does_not_have_is_refused(checkpoint: Path) -> None:
    deployment = _deployment(checkpoint, gpus="1x48GiB", engine={"flags": ["--max-modle-len", "4096"]})
    with pytest.raises(Refusal) as refused:
        refuse(_prepared(deployment))
    assert [found.code for found in refused.value.findings][:1] == ["unknown-flag"]


def test_cards_that_are_not_here_leave_the_memory_unchecked(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loadmaster.core.gputable import GpuSpecError
    from loadmaster.service import preparation

    def none(spec: str) -> None:
        raise GpuSpecError("no NVIDIA driver answers here", "name the cards")

    monkeypatch.setattr(preparation, "resolve_gpus", none)
    prepared = _prepared(_deployment(checkpoint))
    refuse(prepared)
    assert (prepared.sheet, prepared.not_checked) == (None, ("memory: no NVIDIA driver answers here",))
    with pytest.raises(Refusal) as refused:
        _prepared(_deployment(checkpoint, gpus="2x24GiB"))
    assert refused.value.exit_code == 2


def test_a_name_that_is_nowhere_is_left_to_the_engine_and_a_path_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    prepared = _prepared(_deployment("nobody/has-this-model", gpus="1x24GiB"))
    assert prepared.not_checked == ("the model: nobody/has-this-model is not on this machine; the engine fetches it",)
    assert prepared.sheet is None
    with pytest.raises(Refusal) as refused:
        _prepared(_deployment(tmp_path / "nothing", gpus="1x24GiB"))
    assert refused.value.exit_code == 2


def test_a_gguf_file_is_planned_for_the_hosts_memory(tmp_path: Path) -> None:
    model, projector = write_demo_model(tmp_path)
    prepared = _prepared(_deployment(model, "llamacpp", projector=str(projector)))
    refuse(prepared)
    assert prepared.sheet is not None
    assert prepared.sheet.engine.name == "llamacpp"
    model.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(Refusal) as refused:
        refuse(_prepared(_deployment(model, "llamacpp")))
    assert refused.value.exit_code == 1
    with pytest.raises(Refusal, match="there is no projector at"):
        _prepared(_deployment(model, "llamacpp", projector="/nowhere/mmproj.gguf"))


def test_a_program_of_ones_own_is_looked_for_and_nothing_else() -> None:
    prepared = _prepared(_deployment("any", "command", engine={"command": [sys.executable]}))
    assert prepared.not_checked == ("the model: a program of your own serves it",)
    with pytest.raises(Refusal, match="is not there"):
        _prepared(_deployment("any", "command", engine={"command": ["/nowhere/engine"]}))


def test_the_gateway_is_told_of_the_engine_and_of_the_limits(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loadmaster.service.places import Places

    monkeypatch.setenv("SHOP_KEYS", "key-one-key-one")
    deployment = _deployment(
        checkpoint,
        gateway={
            "port": 7999,
            "extra_routes": ["/tokenize"],
            "allowed_hosts": ["models.example.org"],
            "allowed_origins": ["https://chat.example.org"],
        },
        limits={"queue": 3, "concurrency": 5, "per_key_requests_per_minute": 9},
        keys={"environment": "SHOP_KEYS"},
    )

    async def closing() -> None:
        """Never called here."""

    settings = gateway_settings(deployment, Places(Path("/state/shop")), None, 8123, None, closing=closing)
    (backend,) = settings.backends
    assert settings.allowed_hosts == ("models.example.org",)
    assert settings.allowed_origins == ("https://chat.example.org",)
    assert settings.closing is closing and backend.llamacpp is False
    assert (backend.model, backend.url, backend.api_key) == ("shop", "http://127.0.0.1:8123", "sesame-sesame")
    assert (backend.concurrency, backend.state_file) == (5, "/state/shop/engine.json")
    assert (settings.port, settings.further_routes) == (7999, ("/tokenize",))
    assert (settings.limits.queue, settings.limits.requests_per_minute) == (3, 9)
    assert settings.keys_environment == "key-one-key-one"
