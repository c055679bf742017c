"""loadmaster diagnose"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.commands.deploymentname import DeploymentName
from loadmaster.commands.options import engine_version_option, json_option
from loadmaster.commands.reading import read_engine_cards, read_model
from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, USAGE, Failure
from loadmaster.terminal import after_a_second, progress, terminal_paint, terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.core.diagnosis import Diagnosis
    from loadmaster.core.facts import ModelFacts


@click.command()
@click.argument("logs", nargs=-1, metavar="[LOG]...")
@click.option("--deployment", type=DeploymentName(), metavar="NAME", help="The last start of this deployment.")
@click.option("--model", "model_path", metavar="MODEL", help="The checkpoint, so that fixes can be planned with it.")
@click.option("--gpus", "gpu_spec", metavar="SPEC", help="The cards that the log is from, if it does not say.")
@engine_version_option
@click.option("--all", "everything", is_flag=True, help="All findings in full, and all that was read in the log.")
@json_option
def diagnose(
    logs: tuple[str, ...],
    deployment: str | None,
    model_path: str | None,
    gpu_spec: str | None,
    engine_version: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """What an engine's log really says: the root cause, the evidence, and fixes.

    LOG is a file (also .gz, .xz, .zst), an export of docker or journald, or - for standard input. Several files are
    read in their order as one log.

    Exit code 0: healthy. 1: a cause was found. 3: could not tell.
    """
    if bool(logs) == (deployment is not None):
        raise Failure("give a log, or --deployment NAME", "loadmaster diagnose FILE; - reads standard input")
    if deployment is not None:
        found = of_deployment(deployment, model_path, gpu_spec, engine_version)
    else:
        found = with_computed_fixes(diagnosed(logs), model_path, gpu_spec, engine_version)
    if as_json:
        from loadmaster.render.diagnosis import diagnosis_document
        from loadmaster.render.documents import encode

        write_result(encode(diagnosis_document(found)))
    else:
        from loadmaster.render.diagnosis import diagnosis_text

        write_result(diagnosis_text(found, terminal_width(), terminal_paint(), everything=everything) + "\n")
    sys.exit(exit_code(found))


def diagnosed(logs: tuple[str, ...]) -> Diagnosis:
    from loadmaster.service.logreading import LogError, diagnose_logs

    try:
        with progress(sys.stderr.isatty(), "reading") as report:
            return diagnose_logs(logs, report=report)
    except LogError as error:
        raise Failure(error.message, error.hint, COULD_NOT_TELL if error.empty else USAGE) from None


def of_deployment(name: str, model_path: str | None, gpu_spec: str | None, engine_version: str | None) -> Diagnosis:
    """Of its last start, with the flags, the model and the cards of its configuration unless others are named."""
    from msgspec.structs import replace

    from loadmaster.commands.serve import serve_errors
    from loadmaster.config import load_deployment
    from loadmaster.service.lastdiagnosis import diagnose_deployment
    from loadmaster.service.logreading import LogError
    from loadmaster.service.places import Places

    with serve_errors():
        loaded = load_deployment(name)
    deployment = loaded.deployment
    if engine_version is not None:
        deployment = replace(deployment, engine=replace(deployment.engine, version=engine_version))
    if model_path is not None:
        read_model(model_path)  # says now what is wrong with it
        deployment = replace(deployment, model=model_path)
    if gpu_spec is not None:
        read_engine_cards(gpu_spec)
        deployment = replace(deployment, gpus=gpu_spec)
    try:
        with after_a_second("reading the log and planning the fixes"):
            return diagnose_deployment(deployment, Places(loaded.path.parent))
    except LogError as error:
        raise Failure(error.message, f"loadmaster up {name}", COULD_NOT_TELL) from None


def with_computed_fixes(
    diagnosis: Diagnosis, model_path: str | None, gpu_spec: str | None, engine_version: str | None
) -> Diagnosis:
    """The diagnosis with fixes for the checkpoint and the cards that were named, or that the log tells."""
    from msgspec.structs import replace

    from loadmaster.core.logfixes import with_fixes

    if engine_version is not None:
        engine = replace(diagnosis.facts.engine, version=engine_version)
        diagnosis = replace(diagnosis, facts=replace(diagnosis.facts, engine=engine))
    model = read_model(model_path) if model_path is not None else model_of_log(diagnosis)
    gpus = read_engine_cards(gpu_spec) if gpu_spec is not None else None
    with after_a_second("planning the fixes"):
        return with_fixes(diagnosis, model, gpus)


def model_of_log(diagnosis: Diagnosis) -> ModelFacts | None:
    """The log's checkpoint, where its directory or its download is on this machine."""
    from loadmaster.commands.check import cached_model, is_local_path

    facts = diagnosis.facts
    name = (facts.launch.model if facts.launch is not None else None) or facts.model
    if name is None:
        return None
    try:
        if is_local_path(name):
            return read_model(name) if Path(name).expanduser().is_dir() else None
        return cached_model(name)
    except (Failure, OSError, ValueError):
        return None  # not whole, or not to be read: a fix can do without


def exit_code(diagnosis: Diagnosis) -> int:
    if diagnosis.healthy:
        return OK
    failed = any(finding.severity == "error" for finding in diagnosis.findings)
    return PROBLEM if failed else COULD_NOT_TELL
