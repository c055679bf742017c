"""loadmaster check"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.commands.options import engine_version_option, json_option
from loadmaster.commands.reading import engine_facts, has_error, read_cards, read_launch, read_model
from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, Failure
from loadmaster.terminal import terminal_paint, terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.core.facts import GpuFacts, ModelFacts


@click.command()
@click.option(
    "--gpus", "gpu_spec", metavar="SPEC", help="Cards that the command is meant for; those of this machine if left out."
)
@engine_version_option
@click.option("--model", "model_path", metavar="MODEL", help="Where the checkpoint is, if not where the command says.")
@click.option(
    "--command-file",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Read the command, compose file, manifest, unit or YAML configuration from FILE (- for stdin).",
)
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
def check(
    gpu_spec: str | None,
    engine_version: str | None,
    model_path: str | None,
    command_file: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """The checklist before launch: read a command as people paste it, and say what is wrong with it.

    COMMAND is 'vllm serve ...', a 'docker run' line, and so on. It is read, never run.
    """
    from loadmaster.core.check import check_launch
    from loadmaster.edge.host import read_host

    launch = read_launch(command, command_file, engine_version)
    engine = engine_facts("vllm", engine_version or launch.engine_version, None)
    not_checked: list[str] = []
    gpus = cards_for_check(gpu_spec, not_checked)
    model = model_for_check(model_path or launch.model, explicit=model_path is not None, not_checked=not_checked)
    findings = check_launch(launch, model=model, gpus=gpus, engine=engine, host=read_host())
    ok = False if has_error(findings) else (None if not_checked else True)
    if as_json:
        from loadmaster.render.documents import check_document, encode

        write_result(encode(check_document(launch, findings, ok, not_checked)))
    else:
        from loadmaster.render.launch import check_text

        write_result(check_text(launch, findings, ok, not_checked, terminal_width(), terminal_paint()) + "\n")
    sys.exit({True: OK, False: PROBLEM, None: COULD_NOT_TELL}[ok])


def cards_for_check(spec: str | None, not_checked: list[str]) -> tuple[GpuFacts, ...] | None:
    """The cards to check against; None, and a sentence why, when none were named and none can be seen."""
    if spec is not None:
        return read_cards(spec)
    try:
        return read_cards("auto")
    except Failure:
        not_checked.append("memory: no GPU is visible here and --gpus was not given")
        return None


def model_for_check(name: str | None, *, explicit: bool, not_checked: list[str]) -> ModelFacts | None:
    """The checkpoint if it is here, else what the table of public models knows, else None and why."""
    if name is None:
        not_checked.append("the model: the command names none")
        return None
    from loadmaster.core.knownmodels import known_model

    if explicit or Path(name).expanduser().exists():
        return read_model(name)
    cached = cached_model(name)
    if cached is not None:
        return cached
    known = known_model(name)
    if known is None:
        not_checked.append(f"the model: {name} is not on this machine and not among the public models known here")
    return known


def cached_model(name: str) -> ModelFacts | None:
    """A model of the local caches; never the network, since a check must not wait for it."""
    import os

    from loadmaster.edge.modeldir import read_source
    from loadmaster.edge.resolve import resolve
    from loadmaster.edge.source import ModelError

    try:
        source = resolve(name, {**os.environ, "HF_HUB_OFFLINE": "1"})
        return None if isinstance(source, Path) else read_source(source)
    except ModelError:
        return None
