"""Which deployments make sense, and what is said about the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadmaster.core.deployment import FURTHER_ROUTES, Deployment, is_loopback, problems


def deployment(**values: Any) -> Deployment:
    return msgspec.convert({"name": "cat", "model": "org/model", **values}, Deployment)


def test_defaults_make_sense() -> None:
    plain = deployment()
    assert problems(plain) == []
    assert plain.gateway.extra_routes == list(FURTHER_ROUTES)
    assert msgspec.convert(msgspec.to_builtins(plain), Deployment) == plain


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"schema": 2}, "schema"),
        ({"name": "Cat"}, "name"),
        ({"name": "-cat"}, "name"),
        ({"name": "c" * 41}, "name"),
        ({"name": "a/../b"}, "name"),
        ({"name": "cat\n"}, "name"),
        ({"model": "  "}, "model"),
        ({"model": "a\0b"}, "model"),
        ({"projector": "x.gguf"}, "projector"),
        ({"gpus": ""}, "gpus"),
        ({"gpus": "2xNOSUCHCARD"}, "gpus"),
        ({"engine": {"kind": "command"}}, "engine.command"),
        ({"engine": {"command": ["x"]}}, "engine.command"),
        ({"engine": {"python": "/x", "container": "y"}}, "engine.container"),
        ({"engine": {"kind": "llamacpp", "container": "y"}}, "engine.container"),
        ({"engine": {"version": "new; rm"}}, "engine.version"),
        ({"engine": {"env": {"A B": "x"}}}, "engine.env"),
        ({"engine": {"env": {"LOADMASTER_RUN": "x"}}}, "engine.env"),
        ({"engine": {"env": {"A": "x\0"}}}, "engine.env"),
        ({"engine": {"flags": ["--x", "\0"]}}, "engine.flags"),
        ({"engine": {"port": 0}}, "engine.port"),
        ({"engine": {"port": 7860}}, "gateway.port"),
        ({"engine": {"start_timeout_s": 0}}, "engine.start_timeout_s"),
        ({"engine": {"start_timeout_s": float("inf")}}, "engine.start_timeout_s"),
        ({"gateway": {"host": "0.0.0.0"}}, "gateway.host"),
        ({"gateway": {"host": ""}}, "gateway.host"),
        ({"gateway": {"port": 70000}}, "gateway.port"),
        ({"gateway": {"max_body_bytes": 10}}, "gateway.max_body_bytes"),
        ({"gateway": {"extra_routes": ["/sleep"]}}, "gateway.extra_routes"),
        ({"gateway": {"allowed_hosts": ["models.example.org:80"]}}, "gateway.allowed_hosts"),
        ({"gateway": {"allowed_hosts": ["https://models.example.org"]}}, "gateway.allowed_hosts"),
        ({"gateway": {"allowed_origins": ["chat.example.org"]}}, "gateway.allowed_origins"),
        ({"gateway": {"allowed_origins": ["https://chat.example.org/page"]}}, "gateway.allowed_origins"),
        ({"keys": {"file": ""}}, "keys.file"),
        ({"keys": {"environment": "a-b"}}, "keys.environment"),
        ({"limits": {"max_images": -1}}, "limits.max_images"),
        ({"limits": {"concurrency": 0}}, "limits.concurrency"),
        ({"supervision": {"stuck_after_s": float("nan")}}, "supervision.stuck_after_s"),
        ({"supervision": {"backoff_first_s": 9, "backoff_most_s": 3}}, "supervision.backoff_most_s"),
    ],
)
def test_senseless_values_are_named(values: dict[str, Any], key: str) -> None:
    found = problems(deployment(**values))
    assert any(problem.startswith(f"{key}: ") for problem in found), found


@pytest.mark.parametrize(
    "values",
    [
        {"engine": {"kind": "llamacpp"}, "projector": "vision.gguf", "model": "model.gguf"},
        {"engine": {"kind": "command", "command": ["prog", "--port", "{port}"]}},
        {"engine": {"python": "/opt/vllm/bin/python", "version": "0.33.0"}},
        {"gateway": {"host": "0.0.0.0"}, "keys": {"file": "keys"}},
        {"gateway": {"host": "0.0.0.0", "insecure": True}},
        {"gpus": "cards.json"},
        {"gpus": "2x24GiB"},
        {"limits": {"queue": 0, "max_images": 0}},
    ],
)
def test_sensible_values_pass(values: dict[str, Any]) -> None:
    assert problems(deployment(**values)) == []


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="gatway"):
        deployment(gatway={})


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.0.1", "localhost", "::1", "[::1]")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")),
    ],
)
def test_loopback(host: str, own: bool) -> None:
    assert is_loopback(host) is own
