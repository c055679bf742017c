"""loadmaster fetch"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from loadmaster.commands.reading import engine_facts, read_cards
from loadmaster.failure import COULD_NOT_TELL, PROBLEM, USAGE, Failure
from loadmaster.terminal import write_result

if TYPE_CHECKING:
    from loadmaster.core.facts import LoadSheet
    from loadmaster.edge.fetch import Fetch

GIB = 1 << 30
INTERRUPTED = 130


@click.command(name="fetch")
@click.argument("model")
@click.option(
    "--from", "hub", type=click.Choice(["hf", "modelscope"]), default="hf", show_default=True, help="Which hub."
)
@click.option(
    "--to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Instead of the hub's cache."
)
@click.option("--gpus", "gpu_spec", default="auto", metavar="SPEC", show_default=True, help="Cards to plan for first.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only files of such names; may be repeated.")
@click.option("--force", is_flag=True, help="Download also what does not fit the cards.")
def fetch(
    model: str, hub: Literal["hf", "modelscope"], to: Path | None, gpu_spec: str, include: tuple[str, ...], force: bool
) -> None:
    """Download a model: plan it first, check the disk, resume, compare every hash.

    MODEL is owner/name on Hugging Face (or the mirror that HF_ENDPOINT names) or ModelScope; a revision
    may follow after @.
    """
    from loadmaster.commands.transfer import transfer_progress
    from loadmaster.edge.download import DownloadError
    from loadmaster.edge.fetch import fetch as run
    from loadmaster.edge.source import ModelError

    prepared = prepared_fetch(model, hub, to, include)
    fits, words = plan_first(prepared, gpu_spec)
    click.echo(announcement(prepared, words), err=True)
    if fits is False and not force:
        raise Failure("the model does not fit these cards, so nothing was downloaded", "--force downloads it", PROBLEM)
    try:
        with transfer_progress("fetching") as progress:
            failed = run(prepared, progress)
    except ModelError as error:
        raise Failure(error.message, error.hint, COULD_NOT_TELL if error.code == "hub-offline" else PROBLEM) from None
    except DownloadError as error:
        raise Failure(error.message, error.hint, PROBLEM) from None
    except KeyboardInterrupt:
        from loadmaster.render.units import size

        there = size(prepared.total_bytes - prepared.missing_bytes)
        click.echo(f"interrupted; {there} kept, the same command goes on from there", err=True)
        sys.exit(INTERRUPTED)
    if failed is not None:
        click.echo(f"note: {failed}; the rest was fetched without it", err=True)
    by_name = to is None and hub == "hf"
    write_result(
        f"fetched {prepared.folder}\nnext    loadmaster init NAME --model {model if by_name else prepared.folder}\n"
    )


def prepared_fetch(model: str, hub: Literal["hf", "modelscope"], to: Path | None, include: tuple[str, ...]) -> Fetch:
    """The list of files. Raises :class:`Failure`."""
    from loadmaster.edge.download import DownloadError
    from loadmaster.edge.fetch import prepare
    from loadmaster.edge.resolve import repository_name
    from loadmaster.edge.source import ModelError

    try:
        repository, revision = repository_name(model)
        return prepare(repository, hub, revision=revision, to=to, include=include)
    except ModelError as error:
        raise Failure(error.message, error.hint, COULD_NOT_TELL if error.code else USAGE) from None
    except DownloadError as error:
        raise Failure(error.message, error.hint) from None


def plan_first(prepared: Fetch, gpu_spec: str) -> tuple[bool | None, str]:
    """Whether it fits the cards, from configuration and headers alone, and the answer in words."""
    from loadmaster.core.argv import parse_argv
    from loadmaster.core.recommend import recommend
    from loadmaster.edge.modeldir import read_source
    from loadmaster.edge.source import ModelError

    try:
        cards = read_cards(gpu_spec)
    except Failure as error:
        if gpu_spec != "auto":
            raise
        return None, f"not planned: {error.message}"
    if any(name.endswith(".gguf") for name in prepared.names):
        return None, "not planned: a GGUF file is planned when it is here"
    try:
        facts = read_source(prepared.source)
    except ModelError as error:
        return None, f"not planned: {error.message}"
    launch = parse_argv(["vllm", "serve", prepared.source.label])
    sheet = recommend(facts, cards, launch, engine_facts("vllm", None, facts))
    return sheet.fits, _verdict(sheet, gpu_spec)


def _verdict(sheet: LoadSheet, gpu_spec: str) -> str:
    where = "this machine's cards" if gpu_spec == "auto" else gpu_spec
    if sheet.fits is None:
        return f"whether it fits {where} cannot be told"
    high, total = max(
        ((max(gpu.peak_high_bytes.values()), gpu.total_bytes) for gpu in sheet.gpus), key=lambda pair: pair[0] / pair[1]
    )
    return f"{'fits' if sheet.fits else 'does not fit'} {where}: at most {high / GIB:.2f} of {total / GIB:.2f} GiB"


def announcement(prepared: Fetch, plan: str) -> str:
    """What will be done: the source, the files, the plan's answer, the room on the disk."""
    missing, total, free = prepared.missing_bytes, prepared.total_bytes, prepared.free_bytes
    source = prepared.source
    from loadmaster.render.units import size

    files = f"{len(prepared.names)}, {size(total)} in all, {size(total - missing)} of it here"
    if prepared.unknown_sizes:
        files += f"; {prepared.unknown_sizes} of a size that the hub does not tell"
    room = f"{size(free)} free" if free is not None else "how much is free is unknown"
    rows = [
        ("from", f"{source.client.host}, {source.label} at {source.commit[:12]}"),
        ("files", files),
        ("plan", plan),
        ("disk", f"{size(missing)} needed, {room}"),
        ("to", str(prepared.folder)),
    ]
    return "\n".join(f"{label:7}{text}" for label, text in rows)
