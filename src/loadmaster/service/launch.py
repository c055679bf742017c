"""``up`` as functions: plan, check, start under supervision, and wait for a true answer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable

from msgspec import Struct

from loadmaster.core.deployment import Deployment
from loadmaster.edge.ports import holder_words, is_free
from loadmaster.edge.process import Member
from loadmaster.edge.statehome import write_file
from loadmaster.render.documents import encode, plan_document
from loadmaster.service.enginechoice import engine_of
from loadmaster.service.inforce import not_in_force, remember
from loadmaster.service.places import Places
from loadmaster.service.portchoice import choose_port, forget_port
from loadmaster.service.preparation import Prepared, prepare, refuse, shown_sheet
from loadmaster.service.refusal import USAGE, Refusal, SuperviseError
from loadmaster.service.status import Status, gateway_ready, status_of
from loadmaster.service.supervise import (
    leftovers,
    start,
    stop,
    supervisor_pid,
    sweep,
    write_configuration,
)
from loadmaster.service.supervisorclient import Supervisor, SupervisorError
from loadmaster.service.takedown import Said, alone

_LOOK_EVERY_S = 0.2
_LOST_S = 2.0  # a supervisor or gateway that is away for so long has gone
# A first start that crashes so often in a row is no start; the supervisor goes on trying all the same.
_MOST_CRASHES = 3
# supervisord's names: programs in these states stay as they are
_SETTLED = frozenset({"EXITED", "FATAL", "STOPPED"})


class Begun(Struct, frozen=True, kw_only=True):
    """``already``: it was up, nothing was started. ``process``: supervisord, when it is our child.

    ``not_in_force``: keys of settings that were changed since the start.
    """

    already: bool
    not_in_force: tuple[str, ...] = ()
    port: int | None = None
    prepared: Prepared | None = None
    process: subprocess.Popen[bytes] | None = None


def begin(deployment: Deployment, places: Places, said: Said, *, foreground: bool = False) -> Begun:
    """Plan, check and start; returns when the supervisor answers, long before the engine does.

    Raises Refusal, StateError, SuperviseError, EngineError.
    """
    places.make()
    with alone(places, deployment, said):
        if supervisor_pid(places) is not None:
            why = _why_anew(places)
            if why is None:
                return Begun(already=True, not_in_force=not_in_force(places, deployment))
            said(f"{why}; starting anew")
            stop(places, deployment.supervision.stop_s, said)
        if leftovers(places) or places.socket.exists() or places.engine_run.exists():
            left = sweep(places, said)
            if left:
                raise SuperviseError(f"processes of an earlier run cannot be ended: {_names(left)}")
        engine = engine_of(deployment)
        said("planning")
        prepared = prepare(deployment, engine)
        for old in (places.engine, places.plan):
            with contextlib.suppress(OSError):
                old.unlink()
        if prepared.sheet is not None:
            write_file(places.plan, encode(plan_document(shown_sheet(prepared.sheet))).encode())
        refuse(prepared)
        _check_keys(deployment)
        _check_gateway_port(deployment)
        forget_port(places)
        port = choose_port(places, deployment)
        engine.command(deployment, prepared.sheet, port)  # says now what could not be started later
        if port != deployment.engine.port:
            by = holder_words(deployment.engine.port) or "another deployment or process"
            said(f"port {deployment.engine.port} is held by {by}; the engine gets {port}")
        write_configuration(deployment, places)
        remember(places, deployment)
        try:
            process = start(places, foreground=foreground)
        except BaseException:  # Ctrl-C as well: what has begun by halves is ended
            sweep(places, said)
            raise
        return Begun(already=False, port=port, prepared=prepared, process=process)


def wait_until_up(deployment: Deployment, places: Places, timeout_s: float, show: Callable[[Status], None]) -> Status:
    """The last status: healthy, or what came of it. ``show`` gets each status on the way."""
    deadline = time.monotonic() + timeout_s
    gone_since: float | None = None
    while True:
        now = status_of(places, deployment)
        show(now)
        if now.healthy and gateway_ready(now):
            return now
        # without a supervisor nobody starts anything again, whatever was said last
        lost = now.supervisor.pid is None or now.gateway.problem is not None or _web_ended(now)
        gone_since = (gone_since or time.monotonic()) if lost else None
        settled = now.state == "failed" or (gone_since is not None and time.monotonic() - gone_since > _LOST_S)
        if settled or _crashes(now, places) >= _MOST_CRASHES or time.monotonic() >= deadline:
            return now
        time.sleep(_LOOK_EVERY_S)


def _why_anew(places: Places) -> str | None:
    """Why a supervisor that lives is no reason to leave all as it is; None: it is one."""
    supervisor = Supervisor(places.socket)
    try:
        if not supervisor.stays():
            return "the supervisor is shutting down"
        states = {name: str(one["statename"]) for name, one in supervisor.programs().items()}
    except SupervisorError:
        return "the supervisor does not answer"
    ended = [name for name in sorted(states) if states[name] in _SETTLED]
    return f"{' and '.join(ended)} had ended" if ended else None


def _check_keys(deployment: Deployment) -> None:
    """The gateway would ask for keys of which there are none."""
    variable = deployment.keys.environment
    if variable is not None and not os.environ.get(variable, "").strip():
        raise Refusal(f"keys.environment names {variable}, which is not set", f"export {variable}=...", USAGE)


def _check_gateway_port(deployment: Deployment) -> None:
    gateway = deployment.gateway
    if not is_free(gateway.host, gateway.port):
        raise Refusal(
            f"port {gateway.port} on {gateway.host} is held by {holder_words(gateway.port) or 'another process'}",
            "end it, or give gateway.port in loadmaster.toml another number",
        )


def _web_ended(now: Status) -> bool:
    """The gateway has ended for good, which its log explains."""
    return now.supervisor.programs.get(f"{now.name}-web") in _SETTLED


def _crashes(now: Status, places: Places) -> int:
    return now.crashes if now.state in ("backing-off", "exited", "dead") else 0


def _names(members: tuple[Member, ...]) -> str:
    return ", ".join(f"{member.pid} {member.name}" for member in members[:8])
