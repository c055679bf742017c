"""Any program as an engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadmaster.core.deployment import Deployment
from loadmaster.engines.base import EngineError, engine_for


def deployment(**engine: Any) -> Deployment:
    raw = {"name": "cat", "model": "my model", "engine": {"kind": "command", **engine}}
    return msgspec.convert(raw, Deployment)


def test_port_and_model_are_filled_in_and_nothing_else() -> None:
    subject = deployment(
        command=["prog", "--port={port}", "--model", "{model}", "{other}", "$HOME; rm {model}"],
        flags=["--more", "{port}"],
        env={"A": "{port}"},
    )
    engine = engine_for(subject)
    command = engine.command(subject, None, 8123)
    assert command.argv == (
        *("prog", "--port=8123", "--model", "my model", "{other}", "$HOME; rm my model", "--more", "8123"),
    )
    assert command.env == {"A": "{port}"}
    assert (engine.name, engine.served_model(subject), engine.api_key(subject)) == ("command", "my model", None)
    assert engine.fixed_port(subject) is None
    assert engine.detect_version() is None


def test_no_program() -> None:
    subject = deployment()
    with pytest.raises(EngineError, match="command is empty"):
        engine_for(subject).command(subject, None, 1)


def test_a_model_called_like_a_mark() -> None:
    subject = msgspec.structs.replace(deployment(command=["prog", "{port}", "{model}"]), model="{port}")
    assert engine_for(subject).command(subject, None, 5).argv == ("prog", "5", "{port}")
