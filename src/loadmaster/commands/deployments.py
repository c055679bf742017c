"""loadmaster init, config, remove, completion"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.commands.deploymentname import deployment_argument
from loadmaster.commands.options import json_option
from loadmaster.failure import OK, PROBLEM, USAGE, Failure
from loadmaster.terminal import terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.commands.firstplan import FirstPlan
    from loadmaster.config import Loaded
    from loadmaster.core.deployment import Deployment

GATEWAY_PORT, ENGINE_PORT = 7860, 8000


@contextmanager
def config_errors() -> Iterator[None]:
    """A configuration or state folder that cannot be used, as the error that a user sees."""
    from loadmaster.edge.statehome import StateError, WriteError

    try:
        yield
    except StateError as error:
        raise Failure(error.message, error.hint, PROBLEM if isinstance(error, WriteError) else USAGE) from None


def read_configuration(name: str) -> Loaded:
    """The deployment NAME. Raises :class:`Failure`."""
    from loadmaster.config import load_deployment

    with config_errors():
        return load_deployment(name)


# ---------------------------------------------------------------------------------------------- init


@click.command(name="init")
@click.argument("name")
@click.option("--model", required=True, metavar="MODEL", help="A directory, a GGUF file, or a name on the hub.")
@click.option(
    "--gpus", "gpu_spec", default="auto", metavar="SPEC", show_default=True, help="Cards to plan for, as for plan."
)
@click.option("--engine", type=click.Choice(["vllm", "llamacpp"]), help="vllm; llamacpp for a GGUF file.")
@click.option("--projector", type=click.Path(path_type=Path), metavar="FILE", help="Projector of a GGUF model.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the gateway; 7860 or the next one left.")
@click.option("--force", is_flag=True, help="Write the configuration anew; the old one is kept as .bak.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE FLAGS]")
def init(
    name: str,
    model: str,
    gpu_spec: str,
    engine: str | None,
    projector: Path | None,
    port: int | None,
    force: bool,
    flags: tuple[str, ...],
) -> None:
    """Write the configuration of a deployment: planned, with every key explained.

    The flags that the plan recommends are written out, each with its reason. Flags of your own follow
    after --.
    """
    from loadmaster.commands.firstplan import first_plan
    from loadmaster.config import CONFIGURATION, deployment_folder, write_deployment

    with config_errors():
        path = deployment_folder(name) / CONFIGURATION
        if path.exists() and not force:
            raise Failure(f"{path} exists already", "--force writes it anew and keeps the old one as .bak")
        others = [one for one in _readable() if one.name != name]
    version = _installed_version(engine)
    planned = first_plan(model, projector, gpu_spec, engine, version, flags)
    deployment = _first_deployment(name, gpu_spec, port, planned, others, version)
    with config_errors():
        write_deployment(deployment, notes=planned.notes, overwrite=force)
    write_result(_said(path, deployment, planned))
    for other in others:
        if other.gateway.port == deployment.gateway.port:
            click.echo(f"warning: {other.name} has the port {other.gateway.port} for its gateway too", err=True)
    if planned.not_planned is not None:
        click.echo(f"note: not planned: {planned.not_planned}", err=True)
    if planned.sheet is not None and planned.sheet.fits is False:
        more = f"loadmaster plan {deployment.model} --gpus {deployment.gpus}"
        click.echo(f"note: it does not fit as it stands; {more} says why and what would", err=True)
        sys.exit(PROBLEM)
    sys.exit(OK)


def _installed_version(kind: str | None) -> str | None:
    """The vLLM that would be started: the newest environment of our own."""
    if kind == "llamacpp":
        return None
    from loadmaster.edge.environments import installed
    from loadmaster.edge.statehome import state_home

    with config_errors():
        found = installed(state_home())
    return found[0].version if found else None


def _first_deployment(
    name: str, gpu_spec: str, port: int | None, planned: FirstPlan, others: list[Deployment], version: str | None
) -> Deployment:
    import msgspec

    from loadmaster.core.deployment import Deployment
    from loadmaster.core.ports import free_port, used_ports

    taken = used_ports(others)
    gateway = port or free_port(GATEWAY_PORT, taken)
    values = {
        "name": name,
        "model": planned.model,
        "projector": planned.projector,
        "gpus": gpu_spec,
        "engine": {
            "kind": planned.kind,
            "version": version if planned.kind == "vllm" else None,
            "flags": list(planned.flags),
            "port": free_port(ENGINE_PORT, {*taken, gateway}),
        },
        "gateway": {"port": gateway},
    }
    return msgspec.convert(values, Deployment)


def _said(path: Path, deployment: Deployment, planned: FirstPlan) -> str:
    given = "the plan's flags" if planned.recommended else "flags as given"
    flags = sum(word.startswith("-") for word in planned.flags)
    rows = [
        ("engine", f"{deployment.engine.kind}, {given}: {flags}"),
        ("fits", _fits(planned)),
        ("gateway", f"http://{deployment.gateway.host}:{deployment.gateway.port}"),
        ("next", f"loadmaster up {deployment.name}"),
    ]
    return f"wrote {path}\n\n" + "".join(f"{label:9}{text}\n" for label, text in rows)


def _fits(planned: FirstPlan) -> str:
    sheet = planned.sheet
    if sheet is None:
        return "not planned"
    if sheet.fits is None:
        return "could not be told"
    from loadmaster.core.facts import GIB

    tightest = max(sheet.gpus, key=lambda gpu: max(gpu.peak_high_bytes.values()) / gpu.total_bytes, default=None)
    if tightest is None:
        return "yes" if sheet.fits else "no"
    high, total = max(tightest.peak_high_bytes.values()) / GIB, tightest.total_bytes / GIB
    answer = "yes" if sheet.fits else "no"
    return f"{answer}: at most {high:.2f} of {total:.2f} GiB"


def _readable() -> list[Deployment]:
    """The deployments whose configuration can be read; the others do not stand in the way of a new one."""
    from loadmaster.config import ConfigError, list_deployments, load_deployment

    found = []
    for name in list_deployments():
        try:
            found.append(load_deployment(name).deployment)
        except ConfigError:
            continue
    return found


# ---------------------------------------------------------------------------------------------- config


@click.command(name="config")
@deployment_argument
@json_option
def config(name: str, as_json: bool) -> None:
    """Every value of a deployment's configuration, and where it comes from.

    Secrets in flags, variables and addresses are never shown.
    """
    from loadmaster.render.configuration import config_document, config_text

    loaded = read_configuration(name)
    if as_json:
        from loadmaster.render.documents import encode

        write_result(encode(config_document(loaded.deployment, loaded.origins, str(loaded.path))))
    else:
        write_result(config_text(loaded.deployment, loaded.origins, str(loaded.path), terminal_width()) + "\n")


# ---------------------------------------------------------------------------------------------- remove


@click.command(name="remove")
@deployment_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(name: str, yes: bool) -> None:
    """Remove a deployment: configuration, state, logs and sockets. Models stay."""
    from loadmaster.config import deployment_folder
    from loadmaster.edge.removal import remove_deployment, running

    with config_errors():
        folder = deployment_folder(name)
        if not folder.is_dir():
            read_configuration(name)  # says which deployments there are
        still = running(folder, name)
        if still:
            shown = "\n".join(f"       {one.name} (process {one.pid}): {one.sign}" for one in still[:10])
            raise Failure(f"{name} still runs\n{shown}", f"loadmaster down {name}", PROBLEM)
        if not yes:
            if not sys.stdin.isatty():
                raise Failure("nobody is here to ask", "give --yes")
            click.confirm(f"remove {folder} with all its logs?", abort=True, err=True)
        remove_deployment(folder)
    write_result(f"removed {folder}\n")


# ---------------------------------------------------------------------------------------------- completion

_PLACES = {
    "bash": ("~/.local/share/bash-completion/completions/loadmaster", "bash"),
    "zsh": ("a folder of $fpath as _loadmaster, or at the end of ~/.zshrc", "zsh"),
    "fish": ("~/.config/fish/completions/loadmaster.fish", "fish"),
}


@click.command(name="completion")
@click.argument("shell", type=click.Choice(list(_PLACES)))
def completion(shell: str) -> None:
    """Print the script that completes commands, options and deployments in a shell."""
    from click.shell_completion import ShellComplete, get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise Failure(f"no completion for {shell}")
    root = click.get_current_context().find_root().command
    # the class's own source() would run a shell to ask for its version; the script says what it needs
    script = ShellComplete.source(kind(root, {}, "loadmaster", "_LOADMASTER_COMPLETE")).strip("\n")
    first, *rest = script.split("\n")
    place = f"# Put this into {_PLACES[shell][0]}"
    lines = [first, place, *rest] if first.startswith("#compdef") else [place, first, *rest]
    write_result("\n".join(lines) + "\n")
