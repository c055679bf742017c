"""One supervisord for each deployment: its configuration, its start, its end, and what it left when it was killed.

The programs are ``NAME-backend`` (``loadmaster run-engine NAME``) and ``NAME-web`` (``loadmaster run-web NAME``).
``supervisorctl -c FILE`` works with the file that is written here.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from loadmaster.core.deployment import RUN_VARIABLE, Deployment
from loadmaster.edge.marked import end_marked, marked
from loadmaster.edge.process import Member, read_process
from loadmaster.edge.process import leftovers as leftovers_of_run
from loadmaster.edge.statehome import StateError, write_file
from loadmaster.service.enginestate import FINAL, next_state, read_run, read_state, write_state
from loadmaster.service.guard import end_run
from loadmaster.service.places import FOLDER_VARIABLE, Places
from loadmaster.service.refusal import SuperviseError
from loadmaster.service.supervisorclient import Supervisor, SupervisorError

LOG_BYTES = 20 << 20
LOG_KEEP = 5
_START_S = 20.0
_LEFTOVERS_TERM_S = 6.0
_OWN_END_S = 1.0
# beyond stop_s: what run-engine takes to end stragglers, read the rest of the log, and look at the cards
_STOP_SLACK_S = 40
_WEB_STOP_S = 30


# ---------------------------------------------------------------------------------------------- the file


def configuration_text(deployment: Deployment, places: Places, socket: Path, python: str = sys.executable) -> str:
    """The configuration of supervisord. Raises :class:`SuperviseError` for a path that it could not be told."""
    stop_s = int(deployment.supervision.stop_s) + _STOP_SLACK_S
    head = {
        "unix_http_server": {"file": _word(socket), "chmod": "0700"},
        "supervisord": {
            "identifier": f"loadmaster-{deployment.name}",
            "pidfile": _word(places.supervisor_pid),
            "logfile": _word(places.supervisor_log),
            "logfile_maxbytes": str(LOG_BYTES),
            "logfile_backups": str(LOG_KEEP),
            "childlogdir": _word(places.logs),
            "directory": _word(places.run),
            "umask": "077",
            # its own name, so that it does not warn that it keeps the rights of the one who started it
            **({"user": "root"} if os.geteuid() == 0 else {}),
        },
        "rpcinterface:supervisor": {
            "supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"
        },
        "supervisorctl": {"serverurl": f"unix://{_word(socket)}", "prompt": f"loadmaster-{deployment.name}"},
        f"program:{deployment.name}-backend": _program(
            [python, "-m", "loadmaster", "run-engine", deployment.name], places.backend_log, stop_s, 10
        ),
        f"program:{deployment.name}-web": _program(
            [python, "-m", "loadmaster", "run-web", deployment.name], places.web_log, _WEB_STOP_S, 20
        ),
    }
    lines = [f"; written by: loadmaster up {deployment.name}   (a change here is lost at the next start)"]
    for section, values in head.items():
        lines += ["", f"[{section}]", *(f"{name} = {value}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _program(argv: list[str], log: Path, stop_s: int, priority: int) -> dict[str, str]:
    return {
        "command": " ".join(shlex.quote(_word(word)) for word in argv),
        "priority": str(priority),
        "autostart": "true",
        "autorestart": "unexpected",
        # 0 as asked, 1 to 3 useless to try again; the rest is a crash. Readiness is run-engine's own affair.
        "exitcodes": "0,1,2,3",
        "startsecs": "0",
        "stopsignal": "TERM",
        "stopasgroup": "true",
        "killasgroup": "true",
        "stopwaitsecs": str(stop_s),
        "redirect_stderr": "true",
        "stdout_logfile": _word(log),
        "stdout_logfile_maxbytes": str(LOG_BYTES),
        "stdout_logfile_backups": str(LOG_KEEP),
    }


def _word(value: Path | str) -> str:
    """A value as supervisord's configuration takes it.

    Raises :class:`SuperviseError` also for a percent sign: it begins a variable there, in some values of the file once
    and in others twice, so that no way of writing it holds everywhere.
    """
    text = str(value)
    if any(letter in text for letter in "%\n\r\"'") or " ;" in text or " #" in text:
        raise SuperviseError(
            f"supervisord cannot be told the path {text!r}", "set LOADMASTER_HOME to a folder with a plain name"
        )
    return text


# ---------------------------------------------------------------------------------------------- who runs


def supervisor_pid(places: Places) -> int | None:
    """The supervisord of this deployment, if it lives. Its number may belong to another process by now."""
    try:
        pid = int(places.supervisor_pid.read_bytes())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return _answering_pid(places)
    process = read_process(pid)
    if process is None or process.state in "ZX" or os.fsencode(places.configuration) not in command:
        return _answering_pid(places)
    return pid


def _answering_pid(places: Places) -> int | None:
    """A supervisord without a file of its number (full disk), or on a system without ``/proc``."""
    if not places.socket.exists():
        return None
    with contextlib.suppress(SupervisorError):
        return Supervisor(places.socket, 2.0).pid()
    return None


def leftovers(places: Places) -> tuple[Member, ...]:
    """All processes of the deployment, also those of its engine that have written a title over their environment."""
    found = {member.pid: member for member in marked(FOLDER_VARIABLE, str(places.folder))}
    run = read_run(places.engine_run)
    if run is not None:
        found |= {member.pid: member for member in leftovers_of_run(run.identity)}
    return tuple(found[pid] for pid in sorted(found))


# ---------------------------------------------------------------------------------------------- start


def environment_of(places: Places, environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != RUN_VARIABLE} | {
        FOLDER_VARIABLE: str(places.folder)
    }


def write_configuration(deployment: Deployment, places: Places) -> Path:
    """Write supervisord's configuration and return its path. Raises StateError, :class:`SuperviseError`."""
    socket = places.prepare_socket()
    write_file(places.configuration, configuration_text(deployment, places, socket).encode())
    return places.configuration


def start(places: Places, *, foreground: bool = False) -> subprocess.Popen[bytes] | None:
    """Start supervisord with the configuration that was written; returns when it answers.

    ``foreground``: as this process's child, which is returned. Raises :class:`SuperviseError`.
    """
    for stale in (places.socket, places.supervisor_pid, places.web_problem):
        with contextlib.suppress(OSError):
            stale.unlink()
    argv = [sys.executable, "-m", "supervisor.supervisord", "-c", str(places.configuration)]
    if foreground:
        argv.append("--nodaemon")
    _own_log(places.supervisor_log)
    complaints = places.run / "supervisord.err"
    errors = os.open(complaints, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment_of(places, os.environ),
            start_new_session=foreground,
        )
    except OSError as error:
        raise SuperviseError(f"supervisord cannot be started: {error.strerror}") from None
    finally:
        os.close(errors)
    supervisor = Supervisor(places.socket, 2.0)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(SupervisorError):
            supervisor.pid()
            if foreground:
                return process
            _leave(process)
            return None
        if process.poll() not in (None, 0):
            said = " ".join(complaints.read_text(encoding="utf-8", errors="replace").split())
            raise SuperviseError(f"supervisord did not start: {said[-300:]}", f"see {places.supervisor_log}")
        time.sleep(0.05)
    raise SuperviseError(f"supervisord does not answer after {_START_S:.0f} s", f"see {places.supervisor_log}")


def _own_log(path: Path) -> None:
    """supervisord opens its log before it has set its mask."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)


def _leave(process: subprocess.Popen[bytes]) -> None:
    """The daemon goes on; its first process has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


# ---------------------------------------------------------------------------------------------- stop


def stop(places: Places, stop_s: float, said: Callable[[str], None] = lambda text: None) -> tuple[Member, ...]:
    """Stop the deployment and sweep up after it, whatever state it is in. Returns what could not be ended.

    Raises StateError when what is true now cannot be written.
    """
    pid = supervisor_pid(places)
    if pid is not None:
        _shut_down(places, pid, stop_s + _STOP_SLACK_S + 5)
    return sweep(places, said)


def _shut_down(places: Places, pid: int, patience_s: float) -> None:
    first = read_process(pid)
    try:
        Supervisor(places.socket).shutdown()
    except SupervisorError:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        now = read_process(pid)
        if now is None or now.state in "ZX" or (first is not None and now.started != first.started):
            return
        time.sleep(0.05)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def sweep(places: Places, said: Callable[[str], None] = lambda text: None) -> tuple[Member, ...]:
    """End what a killed supervisor left, remove stale files, and make ``engine.json`` true. Returns what is left."""
    _end_runner(places)
    # their own way to an end takes a moment when the supervisor has just gone
    deadline = time.monotonic() + _OWN_END_S
    while (found := leftovers(places)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if found:
        names = ", ".join(f"{member.pid} {member.name}" for member in found[:8])
        said(f"ending what an earlier run left: {names}")
        end_marked(FOLDER_VARIABLE, str(places.folder), term_s=_LEFTOVERS_TERM_S)
    run = read_run(places.engine_run)
    if run is not None and end_run(run):
        with contextlib.suppress(OSError):
            places.engine_run.unlink()
    for stale in (places.socket, places.supervisor_pid, places.web, places.web_key, places.web_problem):
        with contextlib.suppress(OSError):
            stale.unlink()
    places.remove_socket_folder()
    state = read_state(places.engine)
    if state is not None and state.state not in FINAL and (state.runner is None or not state.runner.alive):
        ended = next_state(state, "exited", message="stopped", pid=None, process=None, retry_at=None)
        with contextlib.suppress(StateError):
            write_state(places.engine, ended)
    return leftovers(places)


def _end_runner(places: Places) -> None:
    """Ask a run-engine to stop that no supervisor of ours started."""
    state = read_state(places.engine)
    if state is None or state.runner is None or not state.runner.alive or state.runner.pid == os.getpid():
        return
    with contextlib.suppress(OSError):
        os.kill(state.runner.pid, signal.SIGTERM)
    deadline = time.monotonic() + _LEFTOVERS_TERM_S
    while state.runner.alive and time.monotonic() < deadline:
        time.sleep(0.05)
