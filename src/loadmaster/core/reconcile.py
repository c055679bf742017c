"""Plan against actual, component by component, for what a run's log and the driver's readings say.

What a reading names is taken from the reading, what no reading names from the plan; what then is missing in the
driver's count is ``unexplained``. Nothing is spread over components to make the sum come out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal

from msgspec import Struct

from loadmaster.core.facts import MIB, Component, GpuLoad, LoadSheet
from loadmaster.core.logfacts import LogReadings
from loadmaster.core.served import RankReplay, ServedLoad, growth
from loadmaster.core.tables import load_toml

Point = Literal["ready", "serving"]

_NOTICED = 32 * MIB  # and a fiftieth of the plan: smaller differences are those of rounding
_NOTICED_SHARE = 0.02
_UNEXPLAINED_NOTICED = 320 * MIB  # the recorded runs have up to 0.30 GiB: docs/accuracy.md


class CardActual(Struct, frozen=True, kw_only=True):
    """What was read of one card, in bytes. None: not read.

    ``driver_reserved_bytes``: what the driver counts as used on an empty card and CUDA does not report at all.
    ``other_bytes``: held by other processes. ``ready_bytes``, ``serving_bytes``: the driver's count of used memory,
    all processes together, when the engine was ready, and the highest since.
    """

    index: int
    driver_reserved_bytes: int | None = None
    other_bytes: int | None = None
    ready_bytes: int | None = None
    serving_bytes: int | None = None


class RunActual(Struct, frozen=True, kw_only=True):
    """What was read of one run. ``context_bytes``: in use by CUDA before the first allocation, on each card."""

    cards: tuple[CardActual, ...] = ()
    log: LogReadings = LogReadings()
    context_bytes: int | None = None
    served: ServedLoad = ServedLoad()


class Part(Struct, frozen=True):
    name: str
    planned: int


class Line(Struct, frozen=True, kw_only=True):
    """One component, or several that are only read together (``parts``). Bytes.

    ``expected``: what the plan says for what this run really did. ``difference``: actual less expected. ``source`` of
    the actual: "log" or "nvml"; None: no reading names it.
    """

    name: str
    planned: int
    low: int
    high: int
    expected: int
    actual: int | None = None
    source: str | None = None
    difference: int | None = None
    reason: str | None = None
    parts: tuple[Part, ...] = ()


class CardReconciliation(Struct, frozen=True, kw_only=True):
    """One card at one point. ``expected_bytes``: the sum of the lines, each as read, else as planned for this run."""

    index: int
    name: str | None
    planned_bytes: int
    lines: tuple[Line, ...]
    expected_bytes: int
    driver_reserved_bytes: int | None = None
    actual_bytes: int | None = None  # as the driver counts
    unexplained_bytes: int | None = None
    other_bytes: int | None = None  # of that, held by other processes
    reason: str | None = None  # of what is unexplained
    off: tuple[str, ...] = ()  # lines that differ noticeably, the largest first


class HostReconciliation(Struct, frozen=True, kw_only=True):
    """Host memory of an engine that computes there. Bytes. ``low_bytes`` is of the idle engine, the rest of serving.

    ``resident_bytes``: of its processes, None: not read. Nothing tells it apart by component.
    """

    planned_bytes: int
    low_bytes: int
    high_bytes: int
    resident_bytes: int | None = None
    reason: str | None = None


class Reconciliation(Struct, frozen=True, kw_only=True):
    """Plan against actual of one run at one point. ``notes``: what could not be compared, and why."""

    point: Point
    cards: tuple[CardReconciliation, ...]
    served: ServedLoad = ServedLoad()
    notes: tuple[str, ...] = ()
    host: HostReconciliation | None = None


def reconcile_host(sheet: LoadSheet, resident_bytes: int | None) -> Reconciliation:
    """Compare the plan of host memory (core/hostplan.py) with what the ready engine's processes hold of it."""
    load = sheet.gpus[0]
    low, high = load.peak_low_bytes["steady"], load.peak_high_bytes["serving"]
    reason = None
    if resident_bytes is not None and not low <= resident_bytes <= high:
        reason = _reason("host", 1 if resident_bytes > high else -1)
    host = HostReconciliation(
        planned_bytes=load.peak_bytes["serving"],
        low_bytes=low,
        high_bytes=high,
        resident_bytes=resident_bytes,
        reason=reason,
    )
    notes = (
        () if resident_bytes is not None else ("the system does not tell how much memory the engine's processes hold",)
    )
    return Reconciliation(point="ready", cards=(), notes=notes, host=host)


def reconcile(sheet: LoadSheet, actual: RunActual, point: Point, replays: Sequence[RankReplay] = ()) -> Reconciliation:
    """Compare. ``replays``: what the growth of each rank is replayed from, in the order of the sheet's cards."""
    read = {card.index: card for card in actual.cards}
    notes: list[str] = []
    cards = []
    for place, load in enumerate(sheet.gpus):
        replay = replays[place] if place < len(replays) else None
        cards.append(_card(sheet, load, place, actual, read.get(load.index), point, replay))
    if not read:
        notes.append("the driver's readings are missing: what is unexplained is not known")
    elif any(card.driver_reserved_bytes is None for card in cards):
        notes.append("what the driver reserves for itself is not known: it counts as unexplained")
    towers = any(replay.load.tower is not None for replay in replays)
    if point == "serving" and towers and actual.served.pictures is None:
        notes.append("which pictures came is not known: the plan's largest are assumed")
    return Reconciliation(point=point, cards=tuple(cards), served=actual.served, notes=tuple(notes))


def _card(
    sheet: LoadSheet,
    load: GpuLoad,
    place: int,
    actual: RunActual,
    read: CardActual | None,
    point: Point,
    replay: RankReplay | None,
) -> CardReconciliation:
    lines = tuple(_lines(sheet, load, place, actual, read, point, replay))
    expected = sum(line.expected if line.actual is None else line.actual for line in lines)
    used = None if read is None else read.serving_bytes if point == "serving" else read.ready_bytes
    reserved = _reserved(load, read)
    unexplained = None if used is None else used - (reserved or 0) - expected
    off = [line for line in lines if line.difference is not None and _is_noticed(line.difference, line.expected)]
    return CardReconciliation(
        index=load.index,
        name=load.name,
        planned_bytes=load.peak_bytes["serving" if point == "serving" else "steady"],
        lines=lines,
        expected_bytes=expected,
        driver_reserved_bytes=reserved,
        actual_bytes=used,
        unexplained_bytes=unexplained,
        other_bytes=None if read is None else read.other_bytes,
        reason=None
        if unexplained is None or abs(unexplained) < _UNEXPLAINED_NOTICED
        else _reason("unexplained", unexplained),
        off=tuple(line.name for line in sorted(off, key=lambda line: -abs(line.difference or 0))),
    )


def _reserved(load: GpuLoad, read: CardActual | None) -> int | None:
    if read is not None and read.driver_reserved_bytes is not None:
        return read.driver_reserved_bytes
    return None if load.driver_total_bytes is None else max(0, load.driver_total_bytes - load.total_bytes)


def _lines(
    sheet: LoadSheet,
    load: GpuLoad,
    place: int,
    actual: RunActual,
    read: CardActual | None,
    point: Point,
    replay: RankReplay | None,
) -> Iterator[Line]:
    log = actual.log
    planned = {part.name: part for part in load.components if part.name != "headroom"}
    weights = [part for name, part in planned.items() if name.startswith("weights.")]
    passing = [part for name, part in planned.items() if name.startswith("activations.")]
    if (part := planned.get("context")) is not None:
        others = 0 if read is None else read.other_bytes or 0
        # what the engine found in use at its start has other processes in it already
        yield _line("context", [part], actual.context_bytes, "log", part.bytes + others)
    if weights:
        loaded = log.model_loading_bytes
        own = loaded[place] if place < len(loaded) else None
        # ranks that say nothing hold what the first said: the engine logs one of a tensor-parallel group
        own = own if own is not None else next((one for one in loaded if one is not None), None)
        yield _line("weights", weights, own if load.pipeline_rank == 0 or place < len(loaded) else None, "log")
    if (part := planned.get("workspace")) is not None:
        expected = part.bytes
        if log.non_torch_bytes is not None and replay is not None:
            expected += log.non_torch_bytes - replay.growth_bytes
        yield _line("workspace", [part], None, None, expected)
    if (part := planned.get("sampler")) is not None:
        yield _line("sampler", [part], None, None)
    if (part := planned.get("cuda_graphs")) is not None or log.graph_bytes:
        yield _line("cuda_graphs", [] if part is None else [part], log.graph_bytes, "log")
    if (part := planned.get("kv_cache")) is not None:
        yield _line("kv_cache", [part], _cache(sheet, part, log), "log", reason=_cache_reason(log, replay))
    if passing:
        if point == "ready":
            yield _line("activations", passing, None, None, 0)
        else:
            yield _activations(passing, actual, read, replay)


def _activations(
    passing: Sequence[Component], actual: RunActual, read: CardActual | None, replay: RankReplay | None
) -> Line:
    """What requests took beyond the idle state. It is expected, not read: the driver shows only the sum of both."""
    expected = None
    if replay is not None:
        vision, text = growth(replay, actual.served)
        if vision is None:
            vision = sum(part.bytes for part in passing if part.name == "activations.vision")
        expected = vision + text
    grown = None
    if read is not None and read.serving_bytes is not None and read.ready_bytes is not None:
        grown = read.serving_bytes - read.ready_bytes
    line = _line("activations", passing, None, None, expected)
    if grown is None:
        return line
    difference = grown - line.expected
    reason = _reason("activations", difference) if _is_noticed(difference, line.expected) else None
    source = f"nvml: {'grew' if grown >= 0 else 'shrank'} since ready"
    return Line(
        name=line.name,
        planned=line.planned,
        low=line.low,
        high=line.high,
        expected=line.expected,
        source=source,
        difference=difference,
        reason=reason,
        parts=line.parts,
    )


def _line(
    name: str,
    parts: Sequence[Component],
    actual: int | None,
    source: str | None,
    expected: int | None = None,
    reason: str | None = None,
) -> Line:
    planned, low, high = (sum(getattr(part, side) for part in parts) for side in ("bytes", "low", "high"))
    expected = planned if expected is None else expected
    difference = None if actual is None else actual - expected
    why = None
    if difference is not None and _is_noticed(difference, expected):
        why = "; ".join(filter(None, (_reason(name, difference), reason)))
    shown = tuple(Part(part.name, part.bytes) for part in parts)
    return Line(
        name=name,
        planned=planned,
        low=low,
        high=high,
        expected=expected,
        actual=actual,
        source=None if actual is None else source,
        difference=difference,
        reason=why,
        parts=shown if len(shown) > 1 or any(part.name != name for part in shown) else (),
    )


def _cache(sheet: LoadSheet, part: Component, log: LogReadings) -> int | None:
    """Bytes of the cache that was really made: whole blocks of what was available."""
    available = log.kv_available_bytes
    if available is None:
        return None
    blocks = sheet.kv_cache.blocks if sheet.kv_cache is not None else None
    if sheet.settings is not None and sheet.settings.num_gpu_blocks_override is not None:
        return part.bytes
    if not blocks or not part.bytes:
        return available
    pool = part.bytes // blocks
    return available // pool * pool if pool else available


def _cache_reason(log: LogReadings, replay: RankReplay | None) -> str | None:
    if log.profile_peak_bytes is None or replay is None or not replay.profile_bytes:
        return None
    more = log.profile_peak_bytes - replay.profile_bytes
    if not _is_noticed(more, replay.profile_bytes):
        return None
    return f"its memory profile measured {abs(more) // MIB:,} MiB {'more' if more > 0 else 'less'} than planned"


def _is_noticed(difference: int, planned: int) -> bool:
    return abs(difference) > max(_NOTICED, _NOTICED_SHARE * abs(planned))


def _reason(name: str, difference: int) -> str | None:
    row = _reasons().get(name, {})
    return row.get("over" if difference > 0 else "under")


@cache
def _reasons() -> dict[str, dict[str, str]]:
    return load_toml("reconcile.toml")
