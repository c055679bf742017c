"""loadmaster check"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.commands.options import FlagsAfterDashes, engine_version_option, json_option
from loadmaster.commands.reading import (
    engine_facts,
    has_error,
    misspelt_path,
    read_cards,
    read_engine_cards,
    read_launch,
    read_model,
)
from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, Failure
from loadmaster.terminal import terminal_paint, terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.core.facts import GpuFacts, HostFacts, LaunchArgs, ModelFacts

_PATH_FLAGS = ("--chat-template", "--tokenizer", "--hf-config-path", "--generation-config", "--config")


@click.command(cls=FlagsAfterDashes, before_dashes="check", after_dashes="vllm serve MODEL ...")
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
@click.option(
    "--service", metavar="NAME", help="Which service of the file, if several run vLLM; the first if left out."
)
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
def check(
    gpu_spec: str | None,
    engine_version: str | None,
    model_path: str | None,
    command_file: Path | None,
    service: str | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """The checklist before launch: read a command as people paste it, and say what is wrong with it.

    COMMAND is 'vllm serve ...', a 'docker run' line, and so on. It is read, never run.
    """
    from loadmaster.core.check import checked_launch

    launch = read_launch(command, command_file, engine_version, service)
    engine = engine_facts("vllm", engine_version or launch.engine_version, None)
    not_checked: list[str] = []
    gpus = cards_for_check(gpu_spec, not_checked)
    folder = command_file.parent if command_file is not None else Path()
    model = model_for_check(launch, model_path, folder, not_checked)
    host = host_for_check(launch, gpus, model, folder)
    checked = checked_launch(launch, model=model, gpus=gpus, engine=engine, host=host)
    findings = checked.findings
    not_checked += checked.undecided
    not_checked += [f"{other}: it runs vLLM too; {_how_to_choose(launch)}" for other in launch.others]
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
        return read_engine_cards(spec)
    try:
        return read_cards("auto")
    except Failure:
        not_checked.append("memory: no GPU is visible here and --gpus was not given")
        return None


def _how_to_choose(launch: LaunchArgs) -> str:
    if launch.kind in ("compose", "kubernetes", "supervisor"):
        return "check it with --service NAME"
    return "check it by itself, after --"


def host_for_check(
    launch: LaunchArgs, gpus: Sequence[GpuFacts] | None, model: ModelFacts | None, folder: Path
) -> HostFacts:
    """This machine, and whether it is the one that the launch is meant for."""
    from msgspec.structs import replace

    from loadmaster.edge.host import read_host

    here = gpus is None or all(gpu.source == "nvml" for gpu in gpus)
    missing = []
    # whose model's files are here has its other files here as well
    if model is not None and model.path is not None:
        for flag in _PATH_FLAGS:
            value = launch.flags.get(flag)
            if isinstance(value, str) and _is_missing(value, launch, folder):
                missing.append(value)
    return replace(read_host(), holds_cards=here, missing_files=tuple(missing))


def _is_missing(path: str, launch: LaunchArgs, folder: Path) -> bool:
    """Whether a file is surely not there. What no mount of a container covers may be in its image."""
    from loadmaster.edge.mounts import host_path

    if not is_local_path(path) or place_of(path, launch, folder) is not None:
        return False
    contained = launch.image is not None or launch.kind in ("docker-run", "compose", "kubernetes")
    return not contained or host_path(path, launch.mounts, folder) is not None


def is_local_path(text: str) -> bool:
    """Whether the text is a path for certain: no hub name, no template written out, no variable in it."""
    begins, ends = text.startswith(("/", "./", "../", "~/")), text.endswith((".jinja", ".jinja2", ".j2"))
    return (begins or ends) and not any(mark in text for mark in "${}\n%")


def place_of(path: str, launch: LaunchArgs, folder: Path) -> Path | None:
    """Where a path of the command is on this machine, its container's mounts followed; None if it is not here."""
    from loadmaster.edge.mounts import host_path

    mounted = host_path(path, launch.mounts, folder) if launch.mounts else None
    for candidate in (mounted, Path(path).expanduser()):
        try:
            if candidate is not None and candidate.exists():
                return candidate
        except (OSError, ValueError):
            continue
    return None


def model_for_check(
    launch: LaunchArgs, explicit: str | None, folder: Path, not_checked: list[str]
) -> ModelFacts | None:
    """The checkpoint if it is here, else what the table of public models knows, else None; and what is not known.

    ``explicit``: where the checkpoint is, whatever the command says. ``folder``: where the text's paths begin.
    """
    if explicit is not None:
        return read_model(explicit)
    name = launch.model
    if name is None:
        not_checked.append("the model: the command names no model")
        return None
    from loadmaster.core.knownmodels import known_model

    place = place_of(name, launch, folder)
    if place is not None:
        return read_model(str(place))
    cached = cached_model(name)
    if cached is not None:
        return cached
    where = f"there is no such directory: {name}" if misspelt_path(name) else f"{name} is not on this machine"
    hint = "; --model DIR says where it is" if is_local_path(name) or launch.mounts else ""
    known = known_model(name)
    if known is not None:
        not_checked.append(f"the model's files: {where}; planned from the table of public models{hint}")
    else:
        not_checked.append(f"the model: {where}, and it is not among the public models known here{hint}")
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
