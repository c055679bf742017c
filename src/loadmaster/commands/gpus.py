"""loadmaster gpus"""

from __future__ import annotations

import click

from loadmaster.commands.options import json_option
from loadmaster.commands.reading import read_cards
from loadmaster.terminal import terminal_paint, write_result


@click.command()
@click.argument("spec", default="auto")
@json_option
def gpus(spec: str, as_json: bool) -> None:
    """The cards of this machine, or those of SPEC; --json writes a recording that --gpus takes."""
    from loadmaster.edge.gpus import record
    from loadmaster.render.cards import cards_text
    from loadmaster.render.documents import encode

    cards = read_cards(spec)
    write_result(encode(record(cards)) if as_json else cards_text(cards, terminal_paint()) + "\n")
