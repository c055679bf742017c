"""Whether somebody else holds the memory that an engine lacks, from what its messages say of the card."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from loadmaster.core.facts import GIB, KIB, MIB
from loadmaster.core.logfacts import LogReadings

# What a display and the engine's own context take of a card is nobody's fault.
USUALLY_HELD_BYTES = 3 * GIB // 2
# So little missing is a matter of the utilisation, whoever holds the rest.
LITTLE_BYTES = GIB // 2
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
_SIZE = r"([\d.]+) ?(bytes|[KMGT]iB)"
_CARD = re.compile(rf"total capac(?:i)?ty of {_SIZE} of which {_SIZE} is free")
_THIS = re.compile(rf"this process has {_SIZE} memory in use")
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_TORCH = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")


class Held(Struct, frozen=True):
    """``held_bytes`` of a card's ``total_bytes`` are not the engine's own. ``decides``: it would fit without them."""

    held_bytes: int
    total_bytes: int
    decides: bool


def held_at_start(readings: LogReadings) -> Held | None:
    """From the free memory that the engine found before it took any; None: not said, or no more than usual."""
    total, free, asked = readings.total_bytes, readings.free_bytes, readings.requested_bytes
    if total is None or free is None or total - free <= USUALLY_HELD_BYTES:
        return None
    return Held(total - free, total, asked is None or asked - free > LITTLE_BYTES)


def held_beside(message: str) -> Held | None:
    """From the message of an out-of-memory error, which counts the processes on the card; None: not said, or little.

    In a container the process does not know its own number: the one that holds at least what PyTorch has taken is it.
    """
    text = " ".join(message.split())
    card = _CARD.search(text)
    if card is None:
        return None
    total, free = _bytes(card[1], card[2]), _bytes(card[3], card[4])
    this, torch = _THIS.search(text), _TORCH.search(text)
    others = [_bytes(size, unit) for size, unit in _PROCESS.findall(text)]
    if this is not None:
        held = total - free - _bytes(this[1], this[2])
    elif torch is not None and others:
        held = sum(others) - _own(others, _bytes(torch[1], torch[2]))
    else:
        return None
    if held <= max(USUALLY_HELD_BYTES, total // 16):
        return None
    return Held(held, total, decides=True)


def _own(processes: Sequence[int], taken: int) -> int:
    return min((size for size in processes if size >= taken), default=0)


def _bytes(number: str, unit: str) -> int:
    try:
        return round(float(number) * _UNITS[unit])
    except ValueError:
        return 0
