"""Several engines behind one gateway: other deployments by name, any OpenAI service by MODEL=URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadmaster.config import write_deployment
from loadmaster.core.deployment import Deployment, EngineSection, GatewaySection, problems
from loadmaster.service.gatewaysettings import SettingsError
from loadmaster.service.places import Places
from loadmaster.service.webprogram import further_backends, gateway_settings


def deployment(name: str, *backends: str, port: int = 8000) -> Deployment:
    return Deployment(
        name=name,
        model=f"org/{name}",
        engine=EngineSection(kind="command", command=["engine", "{port}"], port=port),
        gateway=GatewaySection(backends=list(backends)),
    )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path))
    return tmp_path


def test_a_deployment_and_a_service_stand_beside_its_own_engine() -> None:
    write_deployment(deployment("dog", port=8011))
    cat = deployment("cat", "dog", "org/other=http://127.0.0.1:9000/")
    settings = gateway_settings(cat, Places.of("cat"), None, 8123, None)
    assert [(each.model, each.url) for each in settings.backends] == [
        ("org/cat", "http://127.0.0.1:8123"),
        ("org/dog", "http://127.0.0.1:8011"),
        ("org/other", "http://127.0.0.1:9000"),
    ]
    assert settings.backends[1].state_file == str(Places.of("dog").engine)


def test_a_deployment_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match=r"gateway\.backends: dog: "):
        further_backends(deployment("cat", "dog"))


@pytest.mark.parametrize("text", ["Dog!", "cat", "model=ftp://host", "=http://host", "model=http://host/path", ""])
def test_what_names_no_engine_is_refused(text: str) -> None:
    (problem,) = problems(deployment("cat", text))
    assert problem.startswith("gateway.backends: ")


def test_replicas_of_one_model_are_fine() -> None:
    assert problems(deployment("cat", "m=http://127.0.0.1:1", "m=http://127.0.0.1:2", "dog")) == []
