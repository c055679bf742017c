"""loadmaster engine install, list, remove, upgrade"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.commands.deploymentname import DeploymentName
from loadmaster.commands.deployments import config_errors
from loadmaster.commands.options import json_option
from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, USAGE, Failure
from loadmaster.terminal import write_result

if TYPE_CHECKING:
    from loadmaster.core.deployment import Deployment
    from loadmaster.edge.environments import Environment
    from loadmaster.service.upgrade import Steps

INTERRUPTED = 130
_VERSION_HELP = "Release, such as 0.33.0; the newest that fits if left out."
_MODEL_HELP = "Choose a release that has this model's architecture."
_PYTHON_HELP = "Interpreter for the environment; the one that runs loadmaster if left out."


@click.group(name="engine")
def engine() -> None:
    """vLLM in environments of its own, one a release."""


# ---------------------------------------------------------------------------------------------- install


@engine.command(name="install")
@click.argument("name", default="vllm", type=click.Choice(["vllm", "llamacpp"]), metavar="[vllm]")
@click.option("--version", metavar="V", help=_VERSION_HELP)
@click.option("--model", metavar="MODEL", help=_MODEL_HELP)
@click.option("--python", default=sys.executable, metavar="PATH", show_default=False, help=_PYTHON_HELP)
def install(name: str, version: str | None, model: str | None, python: str) -> None:
    """Install vLLM, in the release that fits driver, cards, Python and the model.

    pip's own configuration (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf) decides where packages come from.
    """
    if name == "llamacpp":
        raise Failure("llama.cpp is a part of loadmaster itself", "pip install 'loadmaster[cpu]'")
    version = chosen_release(version, model, python)
    made = run_install(version, python)
    newest = [one.name for one in _deployments() if _takes_the_newest(one)]
    if newest:
        click.echo(f"note: {', '.join(newest)}: no engine.version, so the newest release is taken at a start", err=True)
    write_result(f"installed vLLM {made.version} in {made.path}\n")


def _takes_the_newest(deployment: Deployment) -> bool:
    from loadmaster.service.upgrade import can_move

    return can_move(deployment) and deployment.engine.version is None


def run_install(version: str, python: str) -> Environment:
    from loadmaster.edge import environments
    from loadmaster.edge.statehome import state_home

    click.echo(f"installing vLLM {version}", err=True)
    _end_like_an_interrupt()
    try:
        with config_errors():
            return environments.install(state_home(), version, python=python, report=_report)
    except KeyboardInterrupt:
        click.echo("interrupted; nothing is left of it", err=True)
        sys.exit(INTERRUPTED)
    except Failure as error:
        # a release that cannot be had is a fact about this machine, not a wrong use of the command
        raise Failure(error.message, error.hint, PROBLEM) from None


def _end_like_an_interrupt() -> None:
    """SIGTERM and a closed terminal clear up as Ctrl-C does; pip runs in a session of its own and would go on."""
    import signal
    import threading

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, interrupt)


def _report(line: str) -> None:
    """What pip says, without what it says of each wheel that is there already."""
    from loadmaster.render.visible import visible_log

    if line.strip() and not line.startswith(("Requirement already", "  ", "version ")):
        click.echo(f"  {visible_log(line[:200])}", err=True)


def chosen_release(version: str | None, model: str | None, python: str) -> str:
    """The release to install; a given one is checked against the machine. Raises :class:`Failure`."""
    from loadmaster.core.enginechoice import choose_release, objections, refusal_words
    from loadmaster.core.engineversion import is_release
    from loadmaster.edge.machine import read_machine
    from loadmaster.render.visible import visible

    if version is not None and not is_release(version):
        raise Failure(f"{visible(version[:60])!r} is no release of vLLM", "for example 0.33.0")
    machine = read_machine(python)
    if machine.python is None:
        raise Failure(f"{python} is no Python that runs")
    architecture = _architecture(model)
    if version is not None:
        against = list(objections(version, machine, architecture))
        if against:
            fitting = choose_release(machine, architecture).version
            hint = f"{fitting} fits: --version {fitting}" if fitting else None
            raise Failure(f"vLLM {version} does not fit here: {'; '.join(against)}", hint, PROBLEM)
        return version
    if machine.driver is None and machine.system == "Linux":
        raise Failure(
            "no NVIDIA driver answers here, so no release can be chosen", "name one with --version", COULD_NOT_TELL
        )
    choice = choose_release(machine, architecture)
    if choice.version is None:
        raise Failure(f"no vLLM release fits here: {refusal_words(choice)}", None, PROBLEM)
    return choice.version


def _architecture(model: str | None) -> str | None:
    if model is None:
        return None
    from loadmaster.commands.reading import read_model

    return read_model(model).architecture


# ---------------------------------------------------------------------------------------------- list, remove


@engine.command(name="list")
@json_option
def list_environments(as_json: bool) -> None:
    """The environments, newest first, with the deployments that name them."""
    from loadmaster.edge.environments import installed, size_bytes
    from loadmaster.edge.statehome import state_home
    from loadmaster.render.units import size

    with config_errors():
        found = installed(state_home())
    users = {one.version: users_of(one.version) for one in found}
    if as_json:
        from loadmaster.render.documents import encode

        rows = [
            {
                "engine": "vllm",
                "version": one.version,
                "path": str(one.path),
                "python": str(one.python),
                "bytes": size_bytes(one),
                "deployments": users[one.version],
            }
            for one in found
        ]
        write_result(encode({"schema": 1, "environments": rows}))
        return
    if not found:
        click.echo("no environment yet; make one with: loadmaster engine install", err=True)
    for one in found:
        used = f"used by {', '.join(users[one.version])}" if users[one.version] else "named by no deployment"
        write_result(f"vllm {one.version:10} {size(size_bytes(one)):>10}  {one.path}\n{'':16}{used}\n")


def users_of(version: str) -> list[str]:
    from loadmaster.service.upgrade import uses

    return [one.name for one in _deployments() if uses(one, version)]


def _deployments() -> list[Deployment]:
    from loadmaster.config import ConfigError, list_deployments, load_deployment

    found = []
    with config_errors():
        for name in list_deployments():
            try:
                found.append(load_deployment(name).deployment)
            except ConfigError as error:
                click.echo(f"warning: {error.message}", err=True)
    return found


@engine.command(name="remove")
@click.argument("version")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(version: str, yes: bool) -> None:
    """Remove an environment that no deployment names and nothing runs from."""
    from loadmaster.edge import environments
    from loadmaster.edge.statehome import state_home

    users = users_of(version)
    if users:
        raise Failure(f"vLLM {version} is named by {', '.join(users)}", "loadmaster engine upgrade moves them", PROBLEM)
    with config_errors():
        known = [one.version for one in environments.installed(state_home())]
        if version in known and not yes:
            if not sys.stdin.isatty():
                raise Failure("nobody is here to ask", "give --yes")
            click.confirm(f"remove vLLM {version}?", abort=True, err=True)
        path = environments.remove(state_home(), version)
    write_result(f"removed {path}\n")


# ---------------------------------------------------------------------------------------------- upgrade


@engine.command(name="upgrade")
@click.argument("names", nargs=-1, type=DeploymentName(), metavar="[NAME]...")
@click.option("--version", metavar="V", help=_VERSION_HELP)
@click.option("--python", default=sys.executable, metavar="PATH", show_default=False, help=_PYTHON_HELP)
def upgrade(names: tuple[str, ...], version: str | None, python: str) -> None:
    """Move deployments to another release: plan again, restart, verify, and go back where that fails.

    Without NAME all that use an environment of loadmaster's own.
    """
    from loadmaster.edge import environments
    from loadmaster.edge.statehome import state_home
    from loadmaster.service import upgrade as service

    with config_errors():
        there = {one.version for one in environments.installed(state_home())}
    version = chosen_release(version, None, python)
    chosen = [one.name for one in _deployments() if (one.name in names if names else service.can_move(one))]
    missing = [name for name in names if name not in chosen]
    if missing:
        raise Failure(f"no deployment {missing[0]!r}", "loadmaster list shows them", USAGE)
    if version not in there:
        run_install(version, python)
    _end_like_an_interrupt()
    outcomes = []
    for name in chosen:
        with config_errors():
            if service.go_back_if_interrupted(name):
                click.echo(f"note: an upgrade of {name} was interrupted; it has its old release again", err=True)
            outcomes.append(service.upgrade(name, version, steps()))
        write_result(f"{name}: {outcomes[-1].result}: {outcomes[-1].detail}\n")
    if not chosen:
        click.echo("no deployment to move", err=True)
    sys.exit(PROBLEM if any(one.result == "went back" for one in outcomes) else OK)


def steps() -> Steps:
    """The real steps: the plan in this process, restart and proof by the commands of the same names."""
    from loadmaster.service.upgrade import Steps

    return Steps(plan=_plan, running=_running, restart=_restart, verify=_verify)


def _plan(deployment: Deployment) -> str | None:
    from loadmaster.service.preparation import engine_of, prepare, refuse
    from loadmaster.service.refusal import Refusal

    try:
        refuse(prepare(deployment, engine_of(deployment)))
    except Refusal as error:
        return f"with {deployment.engine.version}: {error.message}"
    return None


def _running(name: str) -> bool:
    from loadmaster.config import load_deployment
    from loadmaster.service.places import Places
    from loadmaster.service.status import status_of

    loaded = load_deployment(name)
    return status_of(Places(loaded.path.parent), loaded.deployment).supervisor.pid is not None


def _restart(name: str) -> str | None:
    return _command("restart", name)


def _verify(name: str) -> str | None:
    return _command("verify", name)


def _command(*words: str) -> str | None:
    """Runs one of our own commands; None when it succeeds or cannot tell, else its last words."""
    done = subprocess.run(
        [sys.executable, "-m", "loadmaster", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        cwd=Path.home(),
    )
    if done.returncode in (OK, COULD_NOT_TELL) if words[0] == "verify" else done.returncode == OK:
        return None
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "")
    return f"{words[0]} failed: {said.removeprefix('error:').strip()}"
