"""Deployments that the page is tested against: the real gateway with the real embedded engine, or with a scripted one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.service.served import QUICK, Served, served
from tests.tinymodel import write_tiny_model

UP_S = 90.0
FLAGS = ("--ctx-size", "16384", "--parallel", "4", "--image-max-tokens", "1024", "--cache-ram", "64")


def real_engine(home: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of a tiny model under llama.cpp, which runs embedded in loadmaster's own process."""
    model, projector = write_tiny_model(home / "model")
    values: dict[str, Any] = {
        "model": str(model),
        "projector": str(projector),
        "engine": {"kind": "llamacpp", "flags": list(FLAGS)},
        "supervision": dict(QUICK),
    }
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return values


@contextmanager
def deployed(home: Path, *, fake: tuple[str, ...] | None = None, **changes: Any) -> Iterator[Served]:
    """``fake``: options of the scripted engine instead of the real one."""
    home.mkdir(parents=True, exist_ok=True)
    with served(home) as one:
        if fake is None:
            changes = real_engine(home, **changes)
            changes["engine"] = {**changes["engine"], "port": one.engine_port}
            write(one, changes)
        else:
            one.configure(*fake, **changes)
        done = one.run("up", one.name, timeout_s=UP_S)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{one.log()}"
        yield one


def write(one: Served, values: dict[str, Any]) -> None:
    import msgspec

    from loadmaster.config import write_deployment
    from loadmaster.core.deployment import Deployment

    gateway = {"port": one.gateway_port, **values.pop("gateway", {})}
    deployment = msgspec.convert({"name": one.name, "gateway": gateway, **values}, Deployment)
    write_deployment(deployment, overwrite=True, folder=one.places.folder)


def address(one: Served) -> str:
    return f"http://127.0.0.1:{one.gateway_port}"


def kill_engine(one: Served) -> None:
    """End the engine as the kernel does when memory runs out."""
    pid = one.status().backend.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
