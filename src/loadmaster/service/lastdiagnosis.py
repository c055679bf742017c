"""The diagnosis of a deployment's last start: from its log, how it ended, and what it launches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from loadmaster.core.deployment import Deployment
from loadmaster.core.diagnosis import Diagnoser, Diagnosis, ExitSeen
from loadmaster.service.causes import explained
from loadmaster.service.enginechoice import engine_of
from loadmaster.service.enginestate import EngineState, read_state
from loadmaster.service.logreading import LogError
from loadmaster.service.places import Places
from loadmaster.service.preparation import Prepared, prepare
from loadmaster.service.refusal import Refusal

_OWN = re.compile(rb"^\[loadmaster(?: \d\d:\d\d:\d\d)?\] ")
_BEGINS = re.compile(rb"^\[loadmaster \d\d:\d\d:\d\d\] checking: ")
_KILLED = "host-ram-killed"


def diagnose_deployment(deployment: Deployment, places: Places) -> Diagnosis:
    """Lines of evidence have their numbers in the log's file. Raises :class:`LogError` when there is no log."""
    path, before = _last_start(places.backend_log)
    diagnoser = Diagnoser(deployment.engine.kind if deployment.engine.kind in ("vllm", "llamacpp") else None)
    for number, line in enumerate(_lines(path), 1):
        if number > before and not _OWN.match(line):
            diagnoser.feed(line.decode("utf-8", "replace").rstrip("\r\n"), number)
    state = read_state(places.engine)
    found = diagnoser.close(_exit(state))
    return explained(found, deployment, _prepared(deployment))


def _last_start(log: Path) -> tuple[Path, int]:
    """The file that holds the last start, and how many lines stand before it there. The log may have been rotated."""
    for path in (log, log.with_name(f"{log.name}.1")):
        begins = [number for number, line in enumerate(_lines(path), 1) if _BEGINS.match(line)]
        if begins:
            return path, begins[-1]
    if not log.exists():
        raise LogError(f"there is no log yet at {log}", empty=True)
    return log, 0


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror or error}") from None


def _exit(state: EngineState | None) -> ExitSeen | None:
    if state is None or state.exit is None or state.state == "ready":
        return None
    kills = 1 if any(item.code == _KILLED for item in state.findings) else None
    return ExitSeen(code=state.exit.code, signal=state.exit.signal, oom_kills=kills)


def _prepared(deployment: Deployment) -> Prepared:
    """Model, cards and version as they are here; nothing of them where the start would be refused now."""
    try:
        return prepare(deployment, engine_of(deployment))
    except Refusal:
        return Prepared(version=deployment.engine.version)
