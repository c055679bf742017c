"""The table of known cards, and the text in which people name their cards.

``24GiB``, ``2x24GiB``, ``24GiB,16GiB``, ``RTX4090``, ``2xRTX3090``, ``4 x A100-80GB``, ``RTX4090,RTX3090``.
A size is what CUDA sees; a name brings what ``core/data/gpus.toml`` knows of the card.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from functools import lru_cache
from statistics import median

import msgspec

from loadmaster.core.facts import GIB, MIB, GpuFacts
from loadmaster.core.tables import load_toml

MAX_CARDS = 1024
MAX_CARD_BYTES = 4096 * GIB

_COUNT_BEFORE = re.compile(r"^(\d+)\s*[x×*]\s*(.+)$", re.IGNORECASE)
# "RTX 3090 x 2", "A6000:2", "24GiBx2"; the x of "RTX4090" is no sign of a count
_COUNT_AFTER = re.compile(r"^(.+?)(?:\s+x\s*|(?<=iB)x|\s*[×*:]\s*)(\d{1,4})$", re.IGNORECASE)
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([a-z]*)$", re.IGNORECASE)
_BINARY_UNITS = {"gib": GIB, "mib": MIB, "tib": 1024 * GIB}
_DECIMAL_UNITS = {"gb": 10**9, "g": 10**9, "mb": 10**6, "m": 10**6, "tb": 10**12, "t": 10**12}
_NOISE = re.compile(r"NVIDIA|GEFORCE|TESLA|INSTINCT|AMD|GPU|[^A-Z0-9]")
_GIGABYTES = re.compile(r"(\d+)GI?B?(?![A-Z0-9])")


class GpuSpecError(Exception):
    """A card specification that cannot be understood. ``hint`` is a sentence with something to paste."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of ``gpus.toml``. Absent is unknown.

    ``driver_name``: what the driver reports where several cards share a name (RTX 4060 Ti 8 GB and 16 GB).
    ``memory_gib``: as the maker sells it. ``driver_total_mib``: NVML's total. ``cuda_total_mib``: what CUDA
    reports under Linux, from the newest log at hand; ``cuda_total_mib_range``: lowest and highest seen.
    ``bandwidth_gb_per_s``: 10^9 bytes a second. ``peer_access``: peer-to-peer with a card of its kind, by the
    driver as it is shipped.
    """

    name: str
    memory_gib: float
    source: tuple[str, ...]
    driver_name: str | None = None
    vendor: str = "NVIDIA"
    aliases: tuple[str, ...] = ()
    driver_total_mib: int | None = None
    cuda_total_mib: int | None = None
    cuda_total_mib_range: tuple[int, int] | None = None
    compute_capability: tuple[int, int] | None = None
    bandwidth_gb_per_s: float | None = None
    sm_count: int | None = None
    peer_access: bool | None = None
    nvlink: bool | None = None
    note: str | None = None


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    card: tuple[Card, ...]


@lru_cache(maxsize=1)
def cards() -> tuple[Card, ...]:
    """All cards of the table, in the order of the file."""
    return msgspec.convert(load_toml("gpus.toml"), _Table).card


def plain_name(name: str) -> str:
    """The name without maker, series, case and punctuation: ``NVIDIA GeForce RTX 4090`` -> ``RTX4090``.

    ``80G``, ``80GB`` and ``80GiB`` in a name are one spelling: people and drivers mix them.
    """
    spelled = name.upper().replace("(TM)", "").replace("(R)", "")
    spelled = _GIGABYTES.sub(r"\1GB", spelled)
    return _NOISE.sub("", spelled)


@lru_cache(maxsize=1)
def _index() -> dict[str, tuple[Card, ...]]:
    index: dict[str, list[Card]] = {}
    for card in cards():
        for spelling in {plain_name(text) for text in _spellings(card)}:
            index.setdefault(spelling, []).append(card)
    return {spelling: tuple(found) for spelling, found in index.items()}


def _spellings(card: Card) -> Iterable[str]:
    yield card.name
    for alias in card.aliases:
        yield alias
        yield f"{alias}-{card.memory_gib:g}GB"
        plain = plain_name(alias)
        # people say "4090" and "A6000"
        if plain.startswith("RTX") and re.match(r"A?\d{4}", plain[3:]):
            yield plain[3:]


def find_card(name: str, driver_total_bytes: int | None = None) -> Card | None:
    """The card of this name (any usual spelling), or None when it is unknown or could be one of several.

    ``driver_total_bytes``, NVML's total, decides between cards that the driver gives one name.
    """
    plain = plain_name(name)
    found = [card for card in cards() if card.driver_name is not None and plain_name(card.driver_name) == plain]
    found = list(dict.fromkeys([*_index().get(plain, ()), *found]))
    if driver_total_bytes is not None:
        found = [card for card in found if _close(card, driver_total_bytes)]
    return found[0] if len(found) == 1 else None


def _close(card: Card, driver_total_bytes: int) -> bool:
    """Whether a card may report this total: within 7 % of what it is sold with, as ECC takes 1/16."""
    return abs(card.memory_gib * GIB - driver_total_bytes) <= 0.07 * card.memory_gib * GIB


@lru_cache(maxsize=1)
def typical_driver_reserve() -> int:
    """Bytes that the driver keeps from CUDA: the median over the cards of the table whose two totals are known."""
    known = [
        card.driver_total_mib - card.cuda_total_mib
        for card in cards()
        if card.driver_total_mib is not None and card.cuda_total_mib is not None
    ]
    return int(median(known)) * MIB


def card_facts(card: Card, index: int) -> GpuFacts:
    """The card as :class:`GpuFacts`. An unknown CUDA total is assumed from what is known, and the note says so."""
    driver_total = None if card.driver_total_mib is None else card.driver_total_mib * MIB
    note = card.note
    if card.cuda_total_mib is not None:
        total = card.cuda_total_mib * MIB
    else:
        total = driver_total if driver_total is not None else math.floor(card.memory_gib * GIB)
        known = "the driver's total" if driver_total is not None else f"the {card.memory_gib:g} GiB it is sold with"
        assumed = f"what the engine sees is assumed: {known}"
        if card.vendor == "NVIDIA":
            total -= typical_driver_reserve()
            assumed += f" less {typical_driver_reserve() // MIB} MiB, the driver's usual reserve"
        note = assumed if note is None else f"{note}; {assumed}"
    bandwidth = card.bandwidth_gb_per_s
    return GpuFacts(
        index=index,
        name=card.name,
        total_bytes=total,
        driver_total_bytes=driver_total,
        compute_capability=card.compute_capability,
        bandwidth_bytes_per_s=None if bandwidth is None else round(bandwidth * 1e9),
        sm_count=card.sm_count,
        peer_access=card.peer_access,
        nvlink=card.nvlink,
        source="table",
        note=note,
    )


def parse_gpu_spec(spec: str) -> tuple[GpuFacts, ...]:
    """The cards that ``spec`` names, numbered from 0; ``cpu`` or ``none`` is no card.

    Raises :class:`GpuSpecError` for an empty or unreadable text, a name that is unknown or could be several
    cards, a decimal or missing unit, and more than 1024 cards.
    """
    text = spec.strip()
    if not text:
        raise GpuSpecError("no cards are named", "for example --gpus 2x24GiB, --gpus RTX4090 or --gpus auto")
    if text.lower() in ("cpu", "none"):
        return ()
    if len(text) > 20_000:
        raise GpuSpecError("the card specification is over 20,000 characters long", "write equal cards as 8x24GiB")
    facts: list[GpuFacts] = []
    for item in text.split(","):
        count, what = _count(item.strip(), text)
        if count == 0:
            raise GpuSpecError(f"{item.strip()!r} names no card", f"write 1x{what}")
        if len(facts) + count > MAX_CARDS:
            raise GpuSpecError(f"more than {MAX_CARDS} cards in {_shorten(text)!r}", "plan one replica at a time")
        one = _one(what, count)
        first = len(facts)
        facts.extend(msgspec.structs.replace(one, index=first + n) for n in range(count))
    return tuple(facts)


def _count(item: str, whole: str) -> tuple[int, str]:
    if not item:
        raise GpuSpecError(f"an empty place between the commas of {_shorten(whole)!r}", "for example 24GiB,16GiB")
    before = _COUNT_BEFORE.match(item)
    if before:
        return _bounded(before.group(1)), before.group(2).strip()
    after = _COUNT_AFTER.match(item)
    if after and plain_name(item) not in _index():
        return _bounded(after.group(2)), after.group(1).strip()
    return 1, item


def _bounded(digits: str) -> int:
    # int() of thousands of digits is refused by Python itself; more than the limit is all that matters here
    return int(digits) if len(digits) <= 6 else MAX_CARDS + 1


def _one(what: str, count: int) -> GpuFacts:
    found = _index().get(plain_name(what), ())
    if len(found) == 1:
        return card_facts(found[0], 0)
    times = f"{count}x" if count > 1 else ""
    if found:
        choices = " or ".join(f"{times}{_pasteable(card)}" for card in found)
        raise GpuSpecError(f"{what!r} could be one of {len(found)} cards", f"write {choices}")
    size = _SIZE.match(what)
    if size:
        return GpuFacts(index=0, total_bytes=_size_bytes(size.group(1), size.group(2), times, what), source="spec")
    raise GpuSpecError(f"{_shorten(what)!r} is neither a size nor a known card", _suggestion(what, times))


def _size_bytes(number: str, unit: str, times: str, what: str) -> int:
    if len(number) > 12:
        raise GpuSpecError(f"{_shorten(what)!r} is no size of a card", "for example 24GiB")
    value = float(number)
    unit = unit.lower()
    if unit in _BINARY_UNITS:
        size = math.floor(value * _BINARY_UNITS[unit])
        if not 256 * MIB <= size <= MAX_CARD_BYTES:
            raise GpuSpecError(f"{what!r} is no size of a card", "sizes run from 256MiB to 4096GiB, for example 24GiB")
        return size
    if not unit:
        raise GpuSpecError(f"{what!r} has no unit", f"write {times}{number}GiB if you mean GiB (2^30 bytes)")
    if unit in _DECIMAL_UNITS:
        sold = f"{times}{number}{unit[0].upper()}iB"
        decimal = f"{times}{value * _DECIMAL_UNITS[unit] / GIB:.2f}GiB"
        raise GpuSpecError(
            f"{what!r} is ambiguous: makers write GB for GiB, and CUDA sees less than either",
            f"write {sold} (2^30 each), {decimal} (10^9 each), or the card's name, as in {times}RTX4090",
        )
    raise GpuSpecError(f"unknown unit {unit!r} in {what!r}", f"write {times}{number}GiB or {times}{number}MiB")


def _pasteable(card: Card) -> str:
    """The shortest spelling that means this card alone."""
    alone = [
        re.sub(r"\s+", "", spelling)
        for spelling in _spellings(card)
        if _index().get(plain_name(spelling)) == (card,) and not spelling[0].isdigit()
    ]
    return min(alone, key=len, default=card.name)


def _suggestion(what: str, times: str) -> str:
    close = difflib.get_close_matches(plain_name(what)[:64], list(_index()), n=3, cutoff=0.7)
    names = list(dict.fromkeys(_pasteable(card) for spelling in close for card in _index()[spelling]))[:3]
    size = f"{times}24GiB"
    if names:
        return f"did you mean {' or '.join(times + name for name in names)}? A size works too: {size}"
    return f"give the memory that CUDA sees instead, as in {size}"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
