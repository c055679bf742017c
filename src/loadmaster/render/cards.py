"""Cards as text."""

from __future__ import annotations

from collections.abc import Sequence

from loadmaster.core.facts import GpuFacts
from loadmaster.render.paint import Paint, plain
from loadmaster.render.units import gib
from loadmaster.render.visible import shown


def cards_text(cards: Sequence[GpuFacts], paint: Paint = plain) -> str:
    """One paragraph a card; what is unknown is said to be."""
    if not cards:
        return "no GPU: planned for the host's memory, with llama.cpp"
    return "\n\n".join(_card(card, paint) for card in shown(cards, lines=False))


def _card(card: GpuFacts, paint: Paint) -> str:
    capability = ".".join(map(str, card.compute_capability)) if card.compute_capability else "unknown"
    rows = [
        ("memory, CUDA", gib(card.total_bytes)),
        ("memory, driver", gib(card.driver_total_bytes)),
        ("free now", gib(card.free_bytes)),
        ("compute capability", capability),
        (
            "bandwidth",
            "unknown" if card.bandwidth_bytes_per_s is None else f"{card.bandwidth_bytes_per_s / 1e9:,.0f} GB/s",
        ),
        ("peer to peer", {True: "yes", False: "no", None: "unknown"}[card.peer_access]),
        ("NVLink", {True: "yes", False: "no", None: "unknown"}[card.nvlink]),
        ("source", card.source),
    ]
    lines = [f"{paint(f'GPU {card.index}', 'bold')}  {card.name or 'no name'}"]
    lines += [f"  {name:<20}{value}" for name, value in rows]
    for process in card.processes or ():
        lines.append(f"  process {process.pid:<12}{process.name or 'name unknown'}, {gib(process.used_bytes)}")
    return "\n".join(lines)
