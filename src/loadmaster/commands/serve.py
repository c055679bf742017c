"""loadmaster up, down, restart, status, logs; and run-engine and run-web, which supervisor runs"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.commands.deploymentname import DeploymentName, deployment_argument
from loadmaster.commands.options import json_option
from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, USAGE, Failure
from loadmaster.terminal import terminal_paint, terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.core.deployment import Deployment
    from loadmaster.core.facts import Finding
    from loadmaster.service.places import Places
    from loadmaster.service.status import Status

_INTERRUPTED = 130
_LOG_LINES = 100


@contextmanager
def serve_errors() -> Iterator[None]:
    """What can go wrong at a start or stop, as the error that a user sees."""
    from loadmaster.edge.statehome import StateError, WriteError
    from loadmaster.engines.base import EngineError
    from loadmaster.service.refusal import Refusal, SuperviseError

    try:
        yield
    except StateError as error:
        raise Failure(error.message, error.hint, PROBLEM if isinstance(error, WriteError) else USAGE) from None
    except Refusal as error:
        _show_findings(tuple(finding for finding in error.findings if finding.severity == "error"))
        raise Failure(error.message, error.hint, error.exit_code) from None
    except (SuperviseError, EngineError) as error:
        raise Failure(error.message, error.hint, PROBLEM) from None


def _opened(name: str) -> tuple[Deployment, Places]:
    from loadmaster.config import load_deployment
    from loadmaster.service.places import Places

    with serve_errors():
        loaded = load_deployment(name)
        return loaded.deployment, Places(loaded.path.parent)


def _found(name: str) -> Places:
    """The files of a deployment that exists, however its configuration is."""
    from loadmaster.service.places import Places

    with serve_errors():
        places = Places.of(name)
    if not places.folder.is_dir():
        _opened(name)  # says which deployments there are
    return places


def _say(text: str) -> None:
    click.echo(text, err=True)


# ---------------------------------------------------------------------------------------------- up


@click.command()
@click.argument("name", type=DeploymentName(), metavar="NAME|MODEL")
@click.option(
    "--foreground", is_flag=True, help="Stay until Ctrl-C or SIGTERM, then stop it again; the logs on stderr."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1),
    metavar="S",
    help="Wait at most S seconds for its first answer; engine.start_timeout_s if left out.",
)
@click.option("--verify", "proof", is_flag=True, help="Then prove it from end to end, as loadmaster verify does.")
@click.pass_context
def up(context: click.Context, name: str, foreground: bool, timeout_s: float | None, proof: bool) -> None:
    """Start a deployment under supervision and wait until it truly answers.

    A path or a hub name in place of NAME makes a deployment of that model first.
    """
    from loadmaster.service import launch

    deployment, places = _opened(_named(name))
    line = Line()
    for number in (signal.SIGTERM, signal.SIGHUP) if foreground else (signal.SIGTERM,):
        signal.signal(number, _interrupt)
    begun = None
    try:
        with serve_errors():
            begun = launch.begin(deployment, places, line.note, foreground=foreground)
        if begun.already:
            line.note(f"{deployment.name} is up already")
            if begun.not_in_force:
                keys = ", ".join(begun.not_in_force)
                line.note(f"changed since its start and not in force yet: {keys}; loadmaster restart {deployment.name}")
        _show_preparation(begun.prepared, line)
        patience = timeout_s if timeout_s is not None else deployment.engine.start_timeout_s + 60
        with serve_errors():
            status = launch.wait_until_up(deployment, places, patience, line.show)
        line.end()
        if not status.healthy:
            _explain(status, line.seconds)
        if status.healthy:
            write_result(_where(deployment, status))
            if proof:
                _prove(context, deployment.name, foreground)
        if foreground and not begun.already and status.healthy:
            _stay(deployment, places)
        sys.exit(OK if status.healthy else PROBLEM)
    except KeyboardInterrupt:
        line.end()
        if not foreground:
            _say(f"interrupted; it goes on in the background: loadmaster status {deployment.name}")
        sys.exit(_INTERRUPTED)
    finally:
        if foreground and begun is not None and not begun.already:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # it ends already
            _down(deployment, places)
            if begun.process is not None:
                begun.process.wait(10)


def _prove(context: click.Context, name: str, foreground: bool) -> None:
    """``loadmaster verify NAME``; its exit code is that of ``up``, unless ``up`` stays."""
    from loadmaster.commands.verify import verify

    write_result("\n")
    command = verify.make_context("verify", [name], parent=context)
    try:
        verify.invoke(command)
    except SystemExit as done:
        if not foreground:
            sys.exit(done.code)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _named(text: str) -> str:
    """The name of a deployment that exists, or of one that is made for this model now."""
    from loadmaster.commands.reading import no_hub_name
    from loadmaster.edge.statehome import list_deployments

    with serve_errors():
        known = list_deployments()
    if text in known:
        return text
    path = Path(text).expanduser()
    is_model = path.exists() or "/" in text or no_hub_name(text)
    return _made_for(text, known) if is_model else text


def _made_for(model: str, known: list[str]) -> str:
    """Configure a deployment for the model as ``loadmaster init`` does; one that has the model already is taken."""
    from loadmaster.commands.deployments import init
    from loadmaster.commands.firstplan import absolute
    from loadmaster.config import ConfigError, load_deployment

    model = absolute(model)
    for name in known:
        try:
            if load_deployment(name).deployment.model == model:
                return name
        except ConfigError:
            continue
    name = derived_name(model, known)
    _say(f"no deployment has this model yet: loadmaster init {name} --model {model}")
    context = click.get_current_context()
    try:
        context.invoke(
            init, name=name, model=model, gpu_spec="auto", engine=None, projector=None, port=None, force=False, flags=()
        )
    except SystemExit as done:
        if done.code not in (OK, None):
            raise
    return name


def derived_name(model: str, known: list[str]) -> str:
    """A name for a deployment of this model: ``/models/Qwen3.5-9B-Q4.gguf`` is ``qwen3-5-9b-q4``."""
    import re

    last = model.rstrip("/").rpartition("/")[2]
    base = re.sub(r"[^a-z0-9]+", "-", last.lower().removesuffix(".gguf")).strip("-")[:36].strip("-") or "model"
    if base not in known:
        return base
    return next(f"{base}-{number}" for number in range(2, 1000) if f"{base}-{number}" not in known)


def _show_preparation(prepared: object, line: Line) -> None:
    from loadmaster.service.preparation import Prepared

    if not isinstance(prepared, Prepared):
        return
    for sentence in prepared.not_checked:
        line.note(f"not checked: {sentence}")
    worth = [finding for finding in prepared.findings if finding.severity != "note"]
    if worth:
        line.end()
        _show_findings(tuple(worth))


def _show_findings(findings: tuple[Finding, ...]) -> None:
    from loadmaster.render.findings import findings_text

    if findings:
        _say(findings_text(findings, terminal_width(), terminal_paint()) + "\n")


def _show_failure(status: Status) -> None:
    from loadmaster.render.diagnosis import failure_text

    text = failure_text(status.findings, status.notes, terminal_width(), terminal_paint())
    if text:
        _say(text + "\n")


def _explain(status: Status, seconds: float) -> None:
    _show_failure(status)
    web = status.supervisor.programs.get(f"{status.name}-web")
    if status.supervisor.pid is None:
        said = f": {status.state}{f', {status.message}' if status.message else ''}"
        reason, hint = f"is not up, its supervisor has gone{said}", f"loadmaster up {status.name}"
    elif status.gateway.problem is not None:
        reason = f"is not reachable: its gateway {status.gateway.problem}"
        hint = (
            f"the supervisor goes on trying; end the other one, or give gateway.port another number and: "
            f"loadmaster restart {status.name}"
        )
    elif status.state == "ready" and web in ("EXITED", "FATAL"):
        reason, hint = "does not answer: the gateway has ended", f"loadmaster logs {status.name} --web"
    elif status.healthy is None or status.state == "ready" or (status.crashes and status.state != "failed"):
        times = f"crashed {status.crashes} time{'s' if status.crashes > 1 else ''}"
        what = times if status.crashes else f"is not ready after {seconds:.0f} s"
        reason = f"{what}: {status.state}: {status.message}"
        hint = f"the supervisor goes on trying: loadmaster status {status.name}, loadmaster down {status.name}"
    else:
        reason = f"{status.state}: {status.message}"
        hint = f"loadmaster logs {status.name}; loadmaster diagnose --deployment {status.name}"
    raise Failure(f"{status.name} {reason}", hint, PROBLEM)


def _where(deployment: Deployment, status: Status) -> str:
    name = deployment.name
    seconds = status.timings.get("ready")
    rows = [
        ("gateway", f"{status.gateway.url}/v1   (OpenAI API)"),
        ("model", str(status.backend.model)),
        ("engine", f"{deployment.engine.kind}, process {status.backend.pid}, port {status.backend.port}"),
        ("ready", f"after {seconds:.1f} s" if seconds is not None else "yes"),
    ]
    if status.run_engine is None:  # what is shown comes from processes and answers alone
        rows.append(("note", status.message))
    rows.append(("next", f"loadmaster verify {name}; loadmaster status {name}; loadmaster logs {name} -f"))
    return f"{name} answers\n\n" + "".join(f"{label:9}{text}\n" for label, text in rows)


def _stay(deployment: Deployment, places: Places) -> None:
    """Until a signal; the logs go by on stderr. Raises :class:`Failure` when the supervisor has gone."""
    from loadmaster.edge.logfile import LogFile
    from loadmaster.service.supervise import supervisor_pid

    logs = [LogFile(places.backend_log, from_end=True), LogFile(places.web_log, from_end=True)]
    while True:
        for log in logs:
            for text in log.new_lines():
                _say(text)
        if supervisor_pid(places) is None:
            raise Failure(f"the supervisor of {deployment.name} has gone", f"loadmaster up {deployment.name}", PROBLEM)
        time.sleep(0.3)


class Line:
    """Progress on stderr: one line that is written over where there is a terminal, a line a change elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = ""
        self._said = ""
        self._begin = time.monotonic()

    def note(self, text: str) -> None:
        """A line that stays."""
        self.end()
        _say(text)

    def show(self, status: Status) -> None:
        what = f"{status.state}: {status.message}" if status.message else status.state
        if status.state == "ready":
            what = f"ready: {status.message}; waiting for an answer through the gateway"
        if self._live:
            text = f"{self.seconds:6.0f} s  {what}"[: max(20, terminal_width() - 1)]
            sys.stderr.write("\r" + text.ljust(len(self._shown)))
            sys.stderr.flush()
            self._shown = text
        elif what != self._said:
            _say(f"{self.seconds:6.1f} s  {what}")
        self._said = what

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\n")
            self._shown = ""


# ---------------------------------------------------------------------------------------------- down, restart


@click.command()
@deployment_argument
def down(name: str) -> None:
    """Stop a deployment and everything that it started."""
    places = _found(name)
    try:
        deployment = _opened(name)[0]
    except Failure as error:
        _say(f"warning: {error.message}")  # no reason to let it run
        deployment = None
    _down(deployment, places)


def _down(deployment: Deployment | None, places: Places) -> None:
    from loadmaster.service.takedown import take_down

    begin = time.monotonic()
    with serve_errors():
        ran, left = take_down(deployment, places, _say)
    if left:
        names = ", ".join(f"{member.pid} {member.name}" for member in left)
        raise Failure(f"these processes cannot be ended, they wait for a device: {names}", exit_code=PROBLEM)
    _say(f"{places.name} is down ({time.monotonic() - begin:.1f} s)" if ran else f"{places.name} was not up")


@click.command()
@deployment_argument
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0.1), metavar="S", help="As for up.")
@click.pass_context
def restart(context: click.Context, name: str, timeout_s: float | None) -> None:
    """Stop a deployment and start it again with its configuration as it is now."""
    deployment, places = _opened(name)
    _down(deployment, places)
    context.invoke(up, name=name, foreground=False, timeout_s=timeout_s, proof=False)


# ---------------------------------------------------------------------------------------------- status, logs


@click.command()
@click.argument("name", type=DeploymentName(), required=False)
@json_option
def status(name: str | None, as_json: bool) -> None:
    """What is true now: engine, gateway and supervisor of a deployment, or of all.

    Exit code 0: it answers. 1: it does not. 3: it is under way.
    """
    from loadmaster.edge.statehome import list_deployments
    from loadmaster.service.places import Places
    from loadmaster.service.status import status_document, status_of

    with serve_errors():
        found = (
            [status_of(_found(name))] if name is not None else [status_of(Places.of(one)) for one in list_deployments()]
        )
    if as_json:
        from loadmaster.render.documents import encode

        write_result(encode(status_document(found)))
    elif not found:
        _say("no deployments yet; make one with: loadmaster init NAME --model MODEL")
    else:
        from loadmaster.render.status import status_table, status_text

        text = status_text(found[0]) if name is not None else status_table(found)
        write_result(text + "\n")
        if name is not None:
            _show_failure(found[0])
    health = [one.healthy for one in found if name is not None or one.state != "down"]
    sys.exit(PROBLEM if False in health else COULD_NOT_TELL if None in health else OK)


@click.command()
@deployment_argument
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come, until Ctrl-C.")
@click.option("--web", is_flag=True, help="The gateway's log in place of the engine's.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=_LOG_LINES, show_default=True, metavar="N")
def logs(name: str, follow: bool, web: bool, lines: int) -> None:
    """The log of the engine and of what supervises it."""
    from loadmaster.edge.logfile import LogFile
    from loadmaster.render.visible import visible_log

    places = _found(name)
    path = places.web_log if web else places.backend_log
    if not path.exists() and not follow:
        raise Failure(f"there is no log yet at {path}", f"loadmaster up {name}", PROBLEM)
    following = LogFile(path, from_end=True)
    write_result(visible_log(_last_lines(path, lines)))
    while follow:
        for text in following.new_lines():
            write_result(visible_log(text) + "\n")
        time.sleep(0.2)


def _last_lines(path: Path, lines: int) -> str:
    """The end of a file without reading all of it."""
    if lines == 0:
        return ""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            data = b""
            while end > 0 and data.count(b"\n") <= lines:
                begin = max(0, end - (1 << 16))
                file.seek(begin)
                data = file.read(end - begin) + data
                end = begin
    except OSError:
        return ""
    text = data.decode("utf-8", "replace").splitlines()[-lines:]
    return "".join(f"{line}\n" for line in text)


# ---------------------------------------------------------------------------------------------- what supervisor runs


@click.command(name="run-engine", hidden=True)
@deployment_argument
def run_engine(name: str) -> None:
    """Run the engine of a deployment; supervisor runs this.

    Exit code 0: stopped as asked. 1 to 3: starting it again is useless. 4: it crashed.
    """
    places = _found(name)
    try:
        deployment = _opened(name)[0]
    except Failure as error:
        from loadmaster.service.enginestate import refused_state, write_state

        with serve_errors():
            write_state(places.engine, refused_state(error.message))
        raise
    from loadmaster.service.run_engine import run_engine as run

    with serve_errors():
        sys.exit(run(deployment, places, _expected_parent(places)))


@click.command(name="run-web", hidden=True)
@deployment_argument
def run_web(name: str) -> None:
    """Run the gateway of a deployment; supervisor runs this."""
    from loadmaster.service.webprogram import run_web as run

    deployment, places = _opened(name)
    with serve_errors():
        sys.exit(run(deployment, places, _expected_parent(places)))


def _expected_parent(places: Places) -> int | None:
    """The supervisor that has started this, as it wrote it; None under another supervisor, or none."""
    if os.environ.get("SUPERVISOR_SERVER_URL") != f"unix://{places.socket}":
        return None
    try:
        return int(places.supervisor_pid.read_bytes())
    except (OSError, ValueError):
        return None
