"""loadmaster verify"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.commands.deploymentname import DeploymentName
from loadmaster.commands.options import json_option
from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, Failure
from loadmaster.terminal import file_errors, terminal_paint, terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.config import Loaded
    from loadmaster.core.verification import Report, Step
    from loadmaster.service.verifylocal import Installation

EXIT_CODES = {True: OK, False: PROBLEM, None: COULD_NOT_TELL}
_KEY_LIMIT_BYTES = 64 << 10
_GIVE_KEY = "give the key with --api-key-file"


@click.command()
@click.argument("name", required=False, type=DeploymentName())
@click.option("--url", metavar="URL", help="Any service that speaks the OpenAI API, such as http://127.0.0.1:8000.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File whose first line is the API key.",
)
@click.option("--model", metavar="M", help="The model to ask; the first one that the service lists if left out.")
@click.option("--concurrency", type=click.IntRange(1, 1024), metavar="N", help="Requests that it should take at once.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1, max=86400),
    default=120.0,
    show_default=True,
    metavar="S",
    help="Seconds for one request; the longest prompt gets five times as many.",
)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write a page.")
@json_option
def verify(
    name: str | None,
    url: str | None,
    api_key_file: Path | None,
    model: str | None,
    concurrency: int | None,
    timeout_s: float,
    html: Path | None,
    as_json: bool,
) -> None:
    """Prove from end to end that a service works: text, streams, pictures, schema, load, cancel.

    NAME is a deployment; the only one if left out. With --url it is any service that speaks the OpenAI API.
    Pictures with known answers are drawn and asked about, each after the same question in words, so that a model
    that is too weak (exit code 3) is told apart from pictures that do not arrive (exit code 1).
    """
    import asyncio

    from msgspec import structs

    from loadmaster.core.verification import Limits
    from loadmaster.service.serviceaddress import AddressError, parse_address
    from loadmaster.service.verify import planned_limits
    from loadmaster.service.verify import verify as prove

    key = _key(api_key_file)
    limits, installation = Limits(), None
    if url is not None:
        if name is not None:
            raise Failure("either the name of a deployment or --url, not both")
        try:
            shown = parse_address(url).url
        except AddressError as error:
            raise Failure(error.message, error.hint) from None
    else:
        loaded = _deployment(name)
        url, installation = find_service(loaded)
        key = key or _key_of(loaded)
        limits = planned_limits(installation)
        shown = url
    if concurrency is not None:
        limits = structs.replace(limits, concurrency=concurrency)
    progress = None if as_json else _show
    if not as_json:
        write_result(f"{shown}\n\n")
    report = asyncio.run(
        prove(
            url,
            api_key=key,
            model=model,
            limits=limits,
            installation=installation,
            timeout_s=timeout_s,
            progress=progress,
        )
    )
    _finish(report, html, as_json)
    sys.exit(EXIT_CODES[report.ok])


def _show(step: Step) -> None:
    from loadmaster.render.verification import step_line

    write_result(step_line(step, terminal_width(), terminal_paint()))


def _finish(report: Report, html: Path | None, as_json: bool) -> None:
    from loadmaster.core.verification import report_document
    from loadmaster.render.documents import encode
    from loadmaster.render.verification import report_html, report_summary

    if html is not None:
        from datetime import datetime

        when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        from loadmaster.edge.regularfile import write_text

        with file_errors(html):
            write_text(html, report_html(report, when))
    if as_json:
        write_result(encode(report_document(report)))
    else:
        write_result("\n" + report_summary(report, terminal_width(), terminal_paint()))


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    from loadmaster.edge.regularfile import open_to_read

    try:
        with open_to_read(path) as file:
            lines = file.read(_KEY_LIMIT_BYTES).decode("utf-8", "strict").split("\n")
    except OSError as error:
        raise Failure(f"cannot read the key in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Failure(f"{path} is not a text file with a key") from None
    key = lines[0].strip()
    if not key or not key.isascii() or not key.isprintable():
        raise Failure(f"the first line of {path} is no key", "it has to be printable ASCII letters")
    return key


def _deployment(name: str | None) -> Loaded:
    from loadmaster.config import ConfigError, list_deployments, load_deployment

    try:
        if name is None:
            known = list_deployments()
            if len(known) != 1:
                there = f"there are: {', '.join(known)}" if known else "there is none yet"
                raise Failure(f"name a deployment, or a service with --url; {there}")
            name = known[0]
        return load_deployment(name)
    except ConfigError as error:
        raise Failure(error.message, error.hint) from None


def find_service(loaded: Loaded) -> tuple[str, Installation]:
    """Where the deployment's gateway listens, and where its engine runs, with the plan of its last start."""
    from loadmaster.service.places import Places
    from loadmaster.service.status import status_of
    from loadmaster.service.verifylocal import Installation
    from loadmaster.service.webprogram import read_plan

    deployment = loaded.deployment
    places = Places(loaded.path.parent)
    status = status_of(places, deployment)
    if status.gateway.url is None:
        said = f", {status.message}" if status.message else ""
        raise Failure(
            f"{deployment.name} is not up: {status.state}{said}", f"loadmaster up {deployment.name}", exit_code=PROBLEM
        )
    return status.gateway.url, Installation(
        deployment=deployment,
        plan=read_plan(places.plan),
        log=places.backend_log,
        engine_pid=status.backend.pid,
        engine_url=status.backend.url,
    )


def _key_of(loaded: Loaded) -> str | None:
    """A key that the deployment takes: the one that its gateway made for this, else one of its variable."""
    import os

    from loadmaster.service.keys import read_own_key, secrets_of_environment
    from loadmaster.service.places import Places

    keys = loaded.deployment.keys
    if keys.environment is None and keys.file is None:
        return None
    own = read_own_key(Places(loaded.path.parent).web_key)
    if own is not None:
        return own
    given = os.environ.get(keys.environment, "") if keys.environment is not None else ""
    if given.strip():
        return secrets_of_environment(given)[0][1]
    if keys.environment is not None:
        raise Failure(f"the deployment asks for a key of {keys.environment}, which is not set here", _GIVE_KEY)
    raise Failure("the deployment asks for a key and keeps only its hash", _GIVE_KEY)
