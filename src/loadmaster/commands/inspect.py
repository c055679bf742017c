"""loadmaster inspect"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from loadmaster.commands.options import json_option
from loadmaster.commands.reading import has_error, read_model
from loadmaster.failure import OK, PROBLEM
from loadmaster.terminal import terminal_paint, terminal_width, write_result


@click.command()
@click.argument("model")
@click.option(
    "--hash", "hash_files", is_flag=True, help="Compare the content with the SHA-256 of the Hugging Face cache."
)
@click.option(
    "--projector",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Projector of a GGUF model (mmproj); found beside it if left out.",
)
@click.option("--files", "all_files", is_flag=True, help="List every file.")
@json_option
def inspect(model: str, hash_files: bool, projector: Path | None, all_files: bool, as_json: bool) -> None:
    """Read a checkpoint: what it is, what each part weighs, and whether it is whole.

    MODEL is a directory, a GGUF file, a name in the Hugging Face or ModelScope cache, or a name on the
    hub (then only the configuration and the headers are fetched).
    """
    facts = read_model(model, projector=projector, hash_files=hash_files)
    if as_json:
        from loadmaster.render.documents import encode, inspect_document

        write_result(encode(inspect_document(facts)))
    else:
        from loadmaster.render.model import model_text

        write_result(model_text(facts, terminal_width(), terminal_paint(), all_files) + "\n")
    sys.exit(PROBLEM if has_error(facts.findings) else OK)
