"""Where an engine listens: its own port, or the next one that neither a process nor another deployment has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from loadmaster.core.argv import parse_argv
from loadmaster.core.deployment import Deployment
from loadmaster.edge.ports import is_free, next_free
from loadmaster.edge.removal import PORTS_LOCK
from loadmaster.edge.statehome import state_home, write_file
from loadmaster.engines.base import EngineError
from loadmaster.service.enginestate import FINAL, read_state
from loadmaster.service.places import Busy, Places, locked

_LOCK_WAIT_S = 10.0
HOST = "127.0.0.1"
_USUAL = 8000  # where engines listen; nothing is looked for below it, for other services live there


def choose_port(places: Places, deployment: Deployment) -> int:
    """The port for the next start, remembered in ``run/backend.port``: an engine listens only after it has loaded.

    Raises :class:`EngineError` when no port is left, StateError when it cannot be remembered.
    """
    with _alone():
        taken = {deployment.gateway.port, *_promised(places)}
        remembered = remembered_port(places)
        if remembered is not None and remembered not in taken and is_free(HOST, remembered):
            return remembered  # the gateway knows it
        for first in (deployment.engine.port, _USUAL):
            port = next_free(HOST, first, taken)
            if port is not None:
                write_file(places.backend_port, str(port).encode())
                return port
    raise EngineError("no port is free")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    try:
        with locked(state_home() / PORTS_LOCK, _LOCK_WAIT_S):
            yield
    except Busy:
        raise EngineError("another deployment chooses its port and does not come to an end") from None


def forget_port(places: Places) -> None:
    """The next start begins at the deployment's own port again."""
    with contextlib.suppress(OSError):
        places.backend_port.unlink()


def remembered_port(places: Places) -> int | None:
    try:
        port = int(places.backend_port.read_bytes())
    except (OSError, ValueError):
        return None
    return port if 0 < port < 65536 else None


def listening_port(deployment: Deployment, port: int) -> int:
    """Where the engine really listens: vLLM's own ``--port`` wins."""
    section = deployment.engine
    if section.kind != "vllm" or section.container is not None:
        return port
    given = parse_argv(["vllm", "serve", deployment.model, *section.flags]).flags.get("--port")
    return given if isinstance(given, int) and 0 < given < 65536 else port


def _promised(places: Places) -> set[int]:
    """The ports of other deployments whose engines run or load, and those of their gateways."""
    ports: set[int] = set()
    try:
        folders: list[Path] = [folder for folder in places.folder.parent.iterdir() if folder.name != places.name]
    except OSError:
        return ports
    for folder in folders:
        other = Places(folder)
        state = read_state(other.engine)
        if state is None or state.runner is None or not state.runner.alive:
            continue
        if state.state not in FINAL or state.retry_at is not None:
            port = remembered_port(other)
            ports |= {port} if port is not None else set()
    return ports
