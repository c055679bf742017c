"""Models, cards and launches as commands read them; every error a user can cause becomes a Failure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.failure import COULD_NOT_TELL, USAGE, Failure
from loadmaster.terminal import progress

if TYPE_CHECKING:
    from loadmaster.core.facts import EngineFacts, Finding, GpuFacts, LaunchArgs, ModelFacts


def read_model(
    name: str, *, projector: Path | None = None, hash_files: bool = False, allow_known: bool = False
) -> ModelFacts:
    """The model of that name. ``allow_known``: where its files cannot be had, what the table of public models says."""
    from loadmaster.edge.modeldir import read_model as read_any
    from loadmaster.edge.source import ModelError

    if no_hub_name(name) and not _exists(name):
        raise Failure(
            f"{name}: no such file or directory", "Give an existing path, or a hub name of the form owner/name"
        )
    try:
        if projector is not None:
            from loadmaster.edge.gguf import read_gguf

            return read_gguf(Path(name), projector)
        with progress(hash_files, "hashing") as report:
            return read_any(name, hash_files=hash_files, progress=report)
    except ModelError as error:
        if allow_known and "/" in name and not Path(name).expanduser().exists():
            from loadmaster.core.knownmodels import known_model
            from loadmaster.render.visible import visible

            known = known_model(name)
            if known is not None:
                click.echo(f"{visible(str(error))}; planning from the table of public models", err=True)
                return known
        if misspelt_path(name):
            raise Failure(
                f"there is no such directory: {name}", f"{error}; {error.hint}" if error.hint else str(error)
            ) from None
        # a hub that could not be asked leaves the question open; anything else is a wrong name
        raise Failure(str(error), error.hint, COULD_NOT_TELL if error.code else USAGE) from None


def read_cards(spec: str) -> tuple[GpuFacts, ...]:
    from loadmaster.edge.gpus import GpuSpecError, resolve_gpus

    try:
        return resolve_gpus(spec)
    except GpuSpecError as error:
        raise Failure(str(error), error.hint) from None


def read_engine_cards(spec: str) -> tuple[GpuFacts, ...]:
    """Cards that vLLM can run on; at least one."""
    cards = read_cards(spec)
    if not cards:
        raise Failure(
            f"vLLM is planned for GPUs, and --gpus {spec} names none", "cpu is for GGUF files, which llama.cpp serves"
        )
    return cards


def _exists(name: str) -> bool:
    """Whether something is at the path; what cannot be looked at is for its reader to refuse."""
    try:
        return Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return True


def no_hub_name(name: str) -> bool:
    """Whether the name can only be a path: it begins as one, or ends as a file of weights does."""
    return name.startswith(("./", "../", "/", "~")) or name.endswith((".gguf", ".safetensors"))


def misspelt_path(name: str) -> bool:
    """Whether the name, though it looks like one of a hub, is meant as a path: its folder is here, it is not."""
    path = Path(name).expanduser()
    try:
        return "/" in name and not path.exists() and (path.parent.is_dir() and str(path.parent) not in (".", "/"))
    except (OSError, ValueError):
        return False


def read_launch(
    command: Sequence[str], command_file: Path | None, engine_version: str | None, service: str | None = None
) -> LaunchArgs:
    import shlex

    from loadmaster.edge.commandfile import CommandError, read_command, read_command_file

    if bool(command) == (command_file is not None):
        raise Failure("give the command after --, or --command-file FILE", "loadmaster check -- vllm serve MODEL ...")
    try:
        if command_file is None:
            return read_command(shlex.join(command), None, engine_version=engine_version, service=service)
        if str(command_file) == "-":
            return read_command(sys.stdin.read(), None, engine_version=engine_version, service=service)
        return read_command_file(command_file, engine_version=engine_version, service=service)
    except CommandError as error:
        raise Failure(str(error), error.hint) from None


def engine_facts(name: str | None, version: str | None, model: ModelFacts | None) -> EngineFacts:
    from loadmaster.core.facts import EngineFacts

    is_gguf = model is not None and model.format == "gguf"
    if name == "llamacpp" and model is not None and not is_gguf:
        raise Failure("llama.cpp reads GGUF files, and this model is none", "leave --engine out, or name a .gguf file")
    if name == "llamacpp" or (name is None and is_gguf):
        return EngineFacts("llamacpp", version)
    return EngineFacts("vllm", version)


def has_error(findings: Sequence[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)
