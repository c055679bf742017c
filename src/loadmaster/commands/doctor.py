"""loadmaster doctor"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.commands.options import json_option
from loadmaster.failure import OK, PROBLEM, Failure
from loadmaster.terminal import terminal_paint, terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.core.facts import ModelFacts


@click.command()
@click.option("--deployment", "name", metavar="NAME", help="Also its configuration, its state and the end of its log.")
@click.option("--model", metavar="DIR", help="Also what a checkpoint is and whether it is whole.")
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="Where the report goes; - for stdout alone."
)
@click.option("--no-peer-copy", is_flag=True, help="Do not copy between the cards to see whether it arrives.")
@json_option
def doctor(name: str | None, model: str | None, output: Path | None, no_peer_copy: bool, as_json: bool) -> None:
    """Look at this machine, and write a report to paste into a bug.

    The report names no user, host, path, key or address. Read it before you send it all the same. Exit
    code 1 when something is wrong that stops an engine.
    """
    import msgspec

    from loadmaster.commands.reading import has_error, read_model
    from loadmaster.core.checks.catalogue import order
    from loadmaster.core.machinereport import machine_findings
    from loadmaster.core.redaction import redact, redact_value
    from loadmaster.render.doctor import report_text
    from loadmaster.render.documents import SCHEMA, encode
    from loadmaster.render.findings import findings_text, summary
    from loadmaster.service.doctor import deployment_sections, identity, last_findings, read_machine_report

    loaded = None
    if name is not None:
        from loadmaster.commands.deployments import read_configuration

        loaded = read_configuration(name)
        if model is None and Path(loaded.deployment.model).expanduser().exists():
            model = loaded.deployment.model
    click.echo("looking at the machine", err=True)
    report = read_machine_report(loaded, Path(model) if model else None, peer_copy=not no_peer_copy)
    facts: ModelFacts | None = read_model(model) if model else None
    ended = last_findings(loaded) if loaded is not None else ()
    found = order((*ended, *machine_findings(report), *(facts.findings if facts else ())))
    sections = deployment_sections(loaded) if loaded is not None else {}
    who = identity(report)
    text = redact(report_text(report, found, facts, sections), who)
    if as_json:
        document = {"machine": msgspec.to_builtins(report), "findings": msgspec.to_builtins(found), "report": text}
        write_result(encode({"schema": SCHEMA, **redact_value(document, who)}))
    elif output is not None and str(output) == "-":
        write_result(text)
    if not as_json and str(output) != "-":
        shown = findings_text(found, terminal_width(), terminal_paint())
        write_result(f"{summary(found)}\n" + (f"\n{shown}\n" if shown else ""))
    if str(output) != "-" and not (as_json and output is None):
        path = _written(output, text)
        if not as_json:
            write_result(f"\nreport: {path}\n")
    sys.exit(PROBLEM if has_error(found) else OK)


def _written(output: Path | None, text: str) -> Path:
    """The file that the report was written to; one that is there already is never replaced."""
    path = output or Path(time.strftime("loadmaster-report-%Y%m%d-%H%M%S.md"))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise Failure(f"{path} exists already", "name another file with --output, or remove it") from None
    except OSError as error:
        hint = "name a file in another folder with --output, or - for stdout"
        raise Failure(f"cannot write {path}: {error.strerror}", hint, PROBLEM) from None
    return path
