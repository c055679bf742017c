"""What is true of a deployment now: what run-engine said last, against the processes that really live."""

from __future__ import annotations

import contextlib
import http.client
import os
import time
from typing import Any, Literal

import msgspec
from msgspec import Struct

from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import Finding
from loadmaster.edge.process import Member
from loadmaster.edge.process import leftovers as leftovers_of_run
from loadmaster.service.enginestate import FINAL, EngineState, ExitFacts, Pid, read_run, read_state
from loadmaster.service.places import Places
from loadmaster.service.portchoice import remembered_port
from loadmaster.service.supervise import leftovers, supervisor_pid
from loadmaster.service.supervisorclient import Supervisor, SupervisorError

# what a person sees; "down": not started, "dead": died without a word, "starting": nothing said yet
Shown = Literal[
    "down",
    "starting",
    "checking",
    "backing-off",
    "waiting-for-memory",
    "loading",
    "warming-up",
    "ready",
    "stuck",
    "stopping",
    "exited",
    "failed",
    "dead",
]
UNDER_WAY: frozenset[str] = frozenset(
    {"starting", "checking", "backing-off", "waiting-for-memory", "loading", "warming-up"}
)
_PROBE_S = 2.0
_ROOM_BYTES = 16 * 1024
_READY_S = 20.0  # the gateway asks the engine for a token


class BackendStatus(Struct, frozen=True, kw_only=True):
    """The engine. ``answers``: whether it lists its models now, None: not asked, for it is not ready."""

    pid: int | None = None
    port: int | None = None
    url: str | None = None
    model: str | None = None
    answers: bool | None = None


class GatewayStatus(Struct, frozen=True, kw_only=True):
    """``answers``: whether its ``/health`` answers, None: it does not run. ``problem``: why it could not open."""

    pid: int | None = None
    url: str | None = None
    answers: bool | None = None
    problem: str | None = None


class SupervisorStatus(Struct, frozen=True, kw_only=True):
    """``programs``: program → its state as supervisorctl tells it; empty when it does not answer."""

    pid: int | None = None
    programs: dict[str, str] = {}


class Status(Struct, frozen=True, kw_only=True):
    """``seconds``: how long the state lasts. ``left_over``: processes that no supervisor looks after.

    ``restarts``: starts after a crash since ``up``; ``crashes``: one more while the last crash is not yet followed by a
    start.
    """

    name: str
    state: Shown
    message: str = ""
    phase: str | None = None
    since: float | None = None
    seconds: float | None = None
    restarts: int = 0
    crashes: int = 0
    backend: BackendStatus = BackendStatus()
    gateway: GatewayStatus = GatewayStatus()
    supervisor: SupervisorStatus = SupervisorStatus()
    run_engine: int | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    exit: ExitFacts | None = None
    timings: dict[str, float] = {}
    left_over: tuple[int, ...] = ()

    @property
    def healthy(self) -> bool | None:
        """True: it answers. None: under way. False: anything else."""
        if self.state == "ready":
            return self.backend.answers is not False and self.gateway.answers is True
        return None if self.state in UNDER_WAY else False


def status_of(places: Places, deployment: Deployment | None = None) -> Status:
    """Look at files, processes and ports; nothing is changed."""
    said = read_state(places.engine)
    supervisor = _supervisor(places)
    everyone = leftovers(places)
    gateway = _gateway(places)
    state, message = _judge(places, said, supervisor, gateway, everyone)
    runner = said.runner.pid if said is not None and said.runner is not None and said.runner.alive else None
    engine = said.process.pid if said is not None and said.process is not None and said.process.alive else None
    port = said.port if said is not None and engine is not None else None
    if said is None and supervisor.pid is not None:
        engine = _engine_of_run(places)
        port = remembered_port(places) if engine is not None else None
    url = f"http://127.0.0.1:{port}" if port is not None else None
    answers = None
    if state == "ready" and port is not None:
        answers = _lists_models(port)
    since = said.since if said is not None and state not in ("down", "starting", "dead") else None
    return Status(
        name=places.name,
        state=state,
        message=message,
        phase=said.phase if said is not None and state not in ("down", "starting") else None,
        since=since,
        seconds=max(0.0, time.time() - since) if since is not None else None,
        restarts=said.restarts if said is not None else 0,
        crashes=said.restarts + _crashed_last(said) if said is not None else 0,
        backend=BackendStatus(
            pid=engine,
            port=port,
            url=url,
            model=said.model if said is not None else None,
            answers=answers,
        ),
        gateway=gateway,
        supervisor=supervisor,
        run_engine=runner,
        findings=said.findings if said is not None else (),
        notes=said.notes if said is not None else (),
        exit=said.exit if said is not None else None,
        timings=said.timings if said is not None and state == "ready" else {},
        left_over=tuple(member.pid for member in everyone) if supervisor.pid is None and runner is None else (),
    )


def _judge(
    places: Places,
    said: EngineState | None,
    supervisor: SupervisorStatus,
    gateway: GatewayStatus,
    everyone: tuple[Member, ...],
) -> tuple[Shown, str]:
    """The state to show. What run-engine said counts as long as it lives; after that, only a final word does."""
    again = f"loadmaster up {places.name}"
    lives = said is not None and said.runner is not None and said.runner.alive
    if said is None:
        if supervisor.pid is not None:
            return _unsaid(places, supervisor, gateway)
        return ("dead", f"processes run without a supervisor; {again}") if everyone else ("down", "")
    if lives:
        if said.state == "exited" and said.retry_at is not None:
            return "backing-off", said.message
        if said.state == "ready" and (said.process is None or not said.process.alive):
            return "exited", "the engine has just ended"
        if said.supervisor is not None and supervisor.pid is None and said.state not in FINAL:
            return "stopping", f"its supervisor was killed; {again}"
        return said.state, said.message
    if said.state in FINAL:
        if said.state == "exited" and supervisor.pid is not None:
            if _backend(places, supervisor) in ("STOPPED", "STOPPING", "EXITED", "FATAL"):
                return "exited", said.message
            return "backing-off", f"{said.message}; it is being started again"
        if supervisor.pid is None and said.state == "exited" and not said.failures:
            return ("down", said.message) if not everyone else ("stopping", said.message)
        return said.state, said.message
    if supervisor.pid is not None:
        return "dead", f"run-engine has died in the state {said.state}; supervisor starts it again"
    return "dead", f"supervisor and run-engine have died in the state {said.state}; {again}"


def _unsaid(places: Places, supervisor: SupervisorStatus, gateway: GatewayStatus) -> tuple[Shown, str]:
    """No engine.json, though there is a supervisor: run-engine begins, or could not write. The gateway's answer
    and the processes tell what is true."""
    program = _backend(places, supervisor)
    full = _full(places)
    unwritten = "its state file cannot be written" + (": the disk is full" if full else "")
    if program == "RUNNING":
        port = remembered_port(places)
        if gateway.answers and port is not None and _lists_models(port) and _ready(gateway):
            return "ready", unwritten
        return "starting", unwritten if full else "run-engine has said nothing yet"
    if program in ("EXITED", "FATAL", "STOPPED"):
        if full:
            return "failed", f"run-engine ended, and {unwritten}"
        return "failed", f"run-engine ended without a word, see {places.backend_log}"
    return "starting", unwritten if full else ""


def _engine_of_run(places: Places) -> int | None:
    """The engine's first process by the mark of its run: the leader of its session."""
    run = read_run(places.engine_run)
    members = leftovers_of_run(run.identity) if run is not None else ()
    return next((member.pid for member in members if member.pid == member.session), None)


def _crashed_last(said: EngineState) -> bool:
    """Whether a crash is the last that happened: nothing was started after it."""
    if said.state in FINAL:
        return said.state == "exited" and said.failures > 0 and said.retry_at is None
    if said.runner is None or not said.runner.alive:
        return True
    return said.state == "ready" and (said.process is None or not said.process.alive)


def _full(places: Places) -> bool:
    """Whether not even a file of state has room."""
    try:
        system = os.statvfs(places.folder)
    except OSError:
        return False
    return system.f_bavail * system.f_frsize < _ROOM_BYTES


def _backend(places: Places, supervisor: SupervisorStatus) -> str:
    return supervisor.programs.get(f"{places.name}-backend", "")


def _supervisor(places: Places) -> SupervisorStatus:
    pid = supervisor_pid(places)
    if pid is None:
        return SupervisorStatus()
    with contextlib.suppress(SupervisorError):
        programs = Supervisor(places.socket, _PROBE_S).programs()
        return SupervisorStatus(pid=pid, programs={name: str(one["statename"]) for name, one in programs.items()})
    return SupervisorStatus(pid=pid)


class _Address(Struct):
    url: str
    host: str
    port: int
    pid: int


def _gateway(places: Places) -> GatewayStatus:
    """From the address file that the gateway writes when it is open, if that process still lives."""
    try:
        address = msgspec.json.decode(places.web.read_bytes(), type=_Address)
    except (OSError, msgspec.MsgspecError):
        return GatewayStatus(problem=_problem(places))
    if not Pid(address.pid).alive:
        return GatewayStatus(problem=_problem(places))
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    return GatewayStatus(pid=address.pid, url=address.url, answers=_get(host, address.port, "/health") == 200)


def _problem(places: Places) -> str | None:
    with contextlib.suppress(OSError):
        return places.web_problem.read_text(encoding="utf-8", errors="replace")[:1000] or None
    return None


def _get(host: str, port: int, path: str, timeout_s: float = _PROBE_S) -> int | None:
    """The status of a short request, None when there is no answer."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"Host": f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def gateway_ready(now: Status) -> bool:
    """Whether a request that goes through the gateway now is answered by the engine."""
    return _ready(now.gateway)


def _lists_models(port: int) -> bool:
    """Whether an engine answers there; one that asks for a key does, too."""
    return _get("127.0.0.1", port, "/v1/models") in (200, 401, 403)


def _ready(gateway: GatewayStatus) -> bool:
    if gateway.url is None:
        return False
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    return _get(host.strip("[]"), int(port), "/ready", _READY_S) == 200


def status_document(statuses: list[Status]) -> dict[str, Any]:
    built = [{**msgspec.to_builtins(one), "healthy": one.healthy} for one in statuses]
    return {"schema": 1, "deployments": built}
