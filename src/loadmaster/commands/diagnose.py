"""loadmaster diagnose"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from loadmaster.commands.deploymentname import DeploymentName
from loadmaster.commands.options import engine_version_option, json_option
from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, USAGE, Failure
from loadmaster.terminal import progress, terminal_paint, terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.core.diagnosis import Diagnosis


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
    found = diagnosed(logs)
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


def exit_code(diagnosis: Diagnosis) -> int:
    if diagnosis.healthy:
        return OK
    failed = any(finding.severity == "error" for finding in diagnosis.findings)
    return PROBLEM if failed else COULD_NOT_TELL
