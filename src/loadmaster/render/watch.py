"""Cards and engine as they are now, with the plan's lines drawn in: a view for a terminal, and plain lines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from loadmaster.core.alerts import AlertChange
from loadmaster.core.facts import Finding
from loadmaster.core.observation import CardReading, EngineReading, Snapshot
from loadmaster.core.tables import load_toml
from loadmaster.core.watchlimits import CardLimits
from loadmaster.core.watchview import WatchView
from loadmaster.render.lines import wrap
from loadmaster.render.paint import Paint, plain
from loadmaster.render.status import duration
from loadmaster.render.units import UNKNOWN, bare_gib, count, gib, size
from loadmaster.render.visible import visible

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LABEL = 9
_SHORTEST_BAR = 16
_WIDE = 72  # columns, from which a line a card has room for its temperature beside the rest
_SEVERITY = {"error": ("bold", "red"), "warning": ("bold", "yellow"), "note": ("bold", "blue")}
_STATES = {"ready": ("bold", "green"), "stuck": ("bold", "red"), "failed": ("bold", "red"), "exited": ("bold", "red")}
_USED, _OTHERS, _LEFT, _RESERVED = "█", "▓", "·", "/"
# what the plan's lines and the highest reading look like in the bar
_REST, _SERVING, _BOUND, _REACHED = "╎", "│", "┃", "▴"
_MARK_STYLES = {_BOUND: ("bold", "red"), _REACHED: ("bold",)}


def watch_text(view: WatchView, width: int = 80, paint: Paint = plain, height: int | None = None) -> str:
    """The whole view, of a few lines a card; of one line a card where ``height`` lines do not hold it."""
    snapshot = view.latest
    if snapshot is None:
        return "nothing was read yet"
    cards = [_card(view, card, width, paint) for card in snapshot.cards or ()]
    text = _joined(view, snapshot, cards, width, paint)
    if height is None or not cards or text.count("\n") < height:
        return text
    return _joined(view, snapshot, [_short_cards(view, snapshot.cards or (), width, paint)], width, paint)


def _joined(view: WatchView, snapshot: Snapshot, cards: list[list[str]], width: int, paint: Paint) -> str:
    blocks = [_head(view, snapshot, width, paint), *cards]
    if view.limits.host is not None or (snapshot.engine is not None and snapshot.engine.resident_bytes is not None):
        blocks.append(_host(view, snapshot.engine, width, paint))
    if snapshot.engine is not None:
        blocks.append(_engine(view, snapshot.engine, width, paint))
    alerts = _alerts(view, snapshot.at, width, paint)
    if alerts:
        blocks.append(alerts)
    if snapshot.missing:
        blocks.append(
            [line for text in snapshot.missing for line in wrap(visible(text), width, "not read: ", " " * 10)]
        )
    return "\n\n".join("\n".join(block) for block in blocks)


# ------------------------------------------------------------------------------------------ the head


def _head(view: WatchView, snapshot: Snapshot, width: int, paint: Paint) -> list[str]:
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at))
    name = visible(view.name) if view.name else "cards of this machine"
    engine = snapshot.engine
    if engine is None or engine.state is None:
        said, state = "", ""
    else:
        lasting = f" for {duration(snapshot.at - engine.since)}" if engine.since is not None else ""
        phase = f" ({engine.phase})" if engine.phase and engine.state == "loading" else ""
        said, state = f"{engine.state}{phase}{lasting}", engine.state
    if said and len(name) + len(said) + len(clock) + 4 > width:
        name = _cropped(name, width - len(clock) - 2)
        gap = " " * max(2, width - len(name) - len(clock))
        told = paint(said, *_STATES.get(state, ("bold", "yellow")))
        return [f"{paint(name, 'bold')}{gap}{paint(clock, 'dim')}", f"  {told}"]
    left = f"{name}  {said}".rstrip()
    painted = f"{paint(name, 'bold')}  {paint(said, *_STATES.get(state, ('bold', 'yellow')))}" if said else left
    return [painted + " " * max(2, width - len(left) - len(clock)) + paint(clock, "dim")]


# ------------------------------------------------------------------------------------------ a card


def _card(view: WatchView, card: CardReading, width: int, paint: Paint) -> list[str]:
    limit = view.limits.card(card.index)
    title = f"GPU {card.index}"
    facts = "  ".join(filter(None, (_degrees(card), _watts(card), _clock(card))))
    name = visible(card.name or "")
    room = width - len(title) - len(facts) - 4
    shown = _cropped(name, room)
    gap = " " * max(2, width - len(title) - 2 - len(shown) - len(facts))
    lines = [f"{paint(title, 'bold')}  {shown}{gap}{facts}".rstrip()]
    if card.throttle_reasons:
        lines += wrap("; ".join(map(_throttle_words, card.throttle_reasons)), width, " " * (_LABEL + 2))
    lines += _memory(card, limit, view.reached.get(card.index), width, paint)
    lines += _work(card, width, paint)
    return lines


def _cropped(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 1)] + "…"


def _short_cards(view: WatchView, cards: Sequence[CardReading], width: int, paint: Paint) -> list[str]:
    """A line a card, and what the plan's lines mean under the last."""
    lines = []
    for card in cards:
        limit = view.limits.card(card.index)
        total, used = card.total_bytes, card.used_bytes
        busy = f"{card.utilization:>4.0%}" if card.utilization is not None else ""
        held = "held back" if any(name in _alerting() for name in card.throttle_reasons or ()) else ""
        degrees = f"{card.temperature_c:>3.0f} °C" if card.temperature_c is not None else ""
        end = "  ".join(
            filter(None, (busy, held if held and width < _WIDE else degrees, held if width >= _WIDE else ""))
        )
        if not total or used is None:
            lines.append(_row(f"GPU {card.index}", f"memory {UNKNOWN}  {end}".rstrip()))
            continue
        figures = f"{bare_gib(used, 1):>5} of {gib(total, 1)}  {end}".rstrip()
        room = max(12, width - _LABEL - 4 - len(figures))
        cells = _bar(card, total, used, card.reserved_bytes or 0, room)
        for cell, mark in _marks(limit, view.reached.get(card.index), total, room).items():
            if mark[0] != _REACHED or cells[cell][0] == _LEFT:
                cells[cell] = mark
        bar = _painted(cells, paint)
        lines.append(_row(f"GPU {card.index}", f"{bar}  {figures}"))
    if view.limits.cards:
        lines.append(_row("plan", f"{_REST} at rest   {_SERVING} serving   {_BOUND} at most   {_REACHED} reached"))
    return lines


@cache
def _throttle_table() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in load_toml("throttle-reasons.toml")["reason"]}


def _throttle_words(name: str) -> str:
    row = _throttle_table().get(name)
    return visible(name) if row is None else str(row["words"])


@cache
def _alerting() -> frozenset[str]:
    return frozenset(name for name, row in _throttle_table().items() if row["alert"])


def _memory(card: CardReading, limit: CardLimits | None, reached: int | None, width: int, paint: Paint) -> list[str]:
    total, used = card.total_bytes, card.used_bytes
    if not total or used is None:
        return [_row("memory", UNKNOWN)]
    left = card.free_bytes if card.free_bytes is not None else total - used - (card.reserved_bytes or 0)
    figures = f"{bare_gib(used)} of {gib(total)}, {size(left)} left"
    lines = _drawn(card, total, figures, limit, reached, width, paint)
    lines += _plan_words(limit, reached, bare_gib, width)
    others = sum(process.used_bytes or 0 for process in card.processes or () if process.own is False)
    if others:
        lines.append(_row("", f"{_OTHERS} other processes {gib(others)}"))
    return lines


def _drawn(
    card: CardReading, total: int, figures: str, limit: CardLimits | None, reached: int | None, width: int, paint: Paint
) -> list[str]:
    """The bar with its figures beside it, or under it where there is no room, and the plan's marks."""
    room = width - _LABEL - 4 - len(figures)
    beside = room >= _SHORTEST_BAR
    if not beside:
        room = width - _LABEL - 2
    bar = _painted(_bar(card, total, card.used_bytes or 0, card.reserved_bytes or 0, room), paint)
    lines = [_row("memory", f"{bar}  {figures}" if beside else bar)]
    marks = _marks(limit, reached, total, room) if limit is not None else {}
    if marks:
        lines.append(_row("", _painted([marks.get(cell, (" ", ())) for cell in range(max(marks) + 1)], paint)))
    return lines if beside else [*lines, _row("", figures)]


def _plan_words(
    limit: CardLimits | None, reached: int | None, amount: Callable[[int | None], str], width: int
) -> list[str]:
    said = []
    if limit is not None:
        said = [
            f"{_REST} at rest {amount(limit.steady_bytes)}",
            f"{_SERVING} serving {amount(limit.serving_bytes)}",
            f"{_BOUND} at most {amount(limit.serving_high_bytes)}",
        ]
    if reached is not None:
        said.append(f"{_REACHED} reached {amount(reached)}")
    return _fold("plan" if limit is not None else "", said, width) if said else []


def _host(view: WatchView, engine: EngineReading | None, width: int, paint: Paint) -> list[str]:
    """The host's memory of an engine that computes there; the bar ends a little beyond the plan and what was held."""
    limit, reached = view.limits.host, view.host_reached
    resident = engine.resident_bytes if engine is not None else None
    lines = [paint("host memory", "bold")]
    if resident is None:
        lines.append(_row("memory", UNKNOWN))
    else:
        most = max(resident, reached or 0, limit.serving_high_bytes if limit is not None else 0)
        held = CardReading(index=0, used_bytes=resident)
        figures = f"{size(resident)} resident"
        if limit is not None:
            lines += _drawn(held, max(1, most + most // 10), figures, limit, reached, width, paint)
        else:
            lines.append(_row("memory", figures))
    return [*lines, *_plan_words(limit, reached, size, width)]


def _bar(card: CardReading, total: int, used: int, reserved: int, width: int) -> list[tuple[str, tuple[str, ...]]]:
    """Cells: used by the engine, by others, left, and what the driver keeps."""
    others = sum(process.used_bytes or 0 for process in card.processes or () if process.own is False)
    full, end = _place(used, total, width), _place(total - reserved, total, width)
    foreign = _place(max(0, used - others), total, width)
    cells: list[tuple[str, tuple[str, ...]]] = []
    for cell in range(width):
        if cell < foreign:
            cells.append((_USED, ("green",)))
        elif cell < full:
            cells.append((_OTHERS, ("magenta",)))
        elif cell < end:
            cells.append((_LEFT, ("dim",)))
        else:
            cells.append((_RESERVED, ("dim",)))
    return cells


def _place(amount: int, total: int, width: int) -> int:
    return min(width, max(0, round(amount / total * width)))


def _marks(
    limit: CardLimits | None, reached: int | None, total: int, width: int
) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Cell → mark: the last cell of what each line allows. Those that fall together stand side by side."""
    marks: list[tuple[int, str]] = []
    if limit is not None:
        marks = [(limit.serving_high_bytes, _BOUND), (limit.serving_bytes, _SERVING), (limit.steady_bytes, _REST)]
    if reached is not None:
        marks.append((reached, _REACHED))
    # from the right, so that their order stays
    marks.sort(key=lambda mark: mark[0], reverse=True)
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    free = width - 1
    for amount, mark in marks:
        cell = min(free, max(0, _place(amount, total, width) - 1))
        if cell < 0:
            break
        found[cell] = (mark, _MARK_STYLES.get(mark, ("bold", "yellow")))
        free = cell - 1
    return found


def _painted(cells: Sequence[tuple[str, tuple[str, ...]]], paint: Paint) -> str:
    return "".join(paint(letter, *styles) for letter, styles in cells)


def _work(card: CardReading, width: int, paint: Paint) -> list[str]:
    busy = card.utilization
    meter = f"{_meter(busy, 12, paint)} {busy:>4.0%}" if busy is not None else UNKNOWN
    said = [meter]
    if card.memory_utilization is not None:
        said.append(f"memory bus {card.memory_utilization:.0%}")
    if card.pcie_rx_bytes_per_s is not None and card.pcie_tx_bytes_per_s is not None:
        said.append(f"PCIe in {_rate(card.pcie_rx_bytes_per_s)}, out {_rate(card.pcie_tx_bytes_per_s)}")
    if card.ecc_uncorrected:
        said.append(paint(f"{card.ecc_uncorrected} uncorrectable ECC errors", "bold", "red"))
    if card.xid:
        said.append(paint(f"Xid {', '.join(map(str, card.xid[-4:]))}", "bold", "red"))
    return _fold("busy", said, width)


def _degrees(card: CardReading) -> str:
    return f"{card.temperature_c:.0f} °C" if card.temperature_c is not None else ""


def _watts(card: CardReading) -> str:
    if card.power_w is None:
        return ""
    return f"{card.power_w:.0f} of {card.power_limit_w:.0f} W" if card.power_limit_w else f"{card.power_w:.0f} W"


def _clock(card: CardReading) -> str:
    return f"{card.sm_clock_hz // 1_000_000:,} MHz" if card.sm_clock_hz is not None else ""


# ------------------------------------------------------------------------------------------ the engine


def _engine(view: WatchView, engine: EngineReading, width: int, paint: Paint) -> list[str]:
    lines = [paint("engine", "bold")]
    if engine.running is None:
        return [*lines, _row("requests", UNKNOWN)]
    places = f" of {view.limits.places}" if view.limits.places is not None else ""
    asked = [f"{engine.running} running{places}", f"{engine.waiting or 0} waiting"]
    if engine.held is not None:
        asked.append(f"{engine.held} waiting in the gateway")
    if engine.errors:
        asked.append(f"{engine.errors} errors")
    lines += _fold("requests", asked, width)
    usage = engine.kv_cache_usage
    if usage is not None:
        tokens = view.limits.kv_tokens
        cache = [f"{_meter(usage, 12, paint)} {usage:>4.0%}"]
        if tokens is not None:
            cache.append(f"{count(round(usage * tokens))} of {count(tokens)} tokens")
        if engine.preemptions:
            cache.append(f"{count(engine.preemptions)} preemptions")
        lines += _fold("cache", cache, width)
    rates = view.rates
    tokens_now = [
        f"{rate:,.0f} {word} a second"
        for key, word in (("engine.generation_tokens_per_s", "generated"), ("engine.prompt_tokens_per_s", "read"))
        if (rate := rates.get(key)) is not None
    ]
    works = engine.running > 0
    if "generation_tokens" in engine.late_totals and works and not tokens_now:
        tokens_now = [f"{UNKNOWN} while requests run"]
    if tokens_now:
        lines += _fold("tokens", tokens_now, width)
    times = []
    if engine.time_to_first_token_s is not None:
        times.append(f"first token after {_seconds(engine.time_to_first_token_s)}")
    if engine.inter_token_latency_s:
        times.append(f"then one each {_seconds(engine.inter_token_latency_s)}")
    if engine.queue_s is not None:
        times.append(f"{_seconds(engine.queue_s)} in the queue")
    none = f"{UNKNOWN} until a request ends" if works and engine.late_totals else "nothing ended since the last look"
    lines += _fold("latency", times or [none], width)
    return lines


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


# ------------------------------------------------------------------------------------------ alerts


def _alerts(view: WatchView, at: float, width: int, paint: Paint) -> list[str]:
    lines = []
    for item in view.findings:
        since = view.begun.get(item.code)
        lasting = f" (for {duration(at - since)})" if since is not None else ""
        head = paint(f"{item.severity}[{item.code}]", *_SEVERITY[item.severity])
        lines += wrap(f"{item.title}{lasting}", width, f"{head}: ", "  ")
        lines += wrap(visible(item.cause), width, "  ")
    return lines


def change_line(change: AlertChange) -> str:
    """One line for an alert that began or ended."""
    clock = time.strftime("%H:%M:%S", time.localtime(change.at))
    item = change.finding
    if change.began:
        return f"{clock}  {item.severity}[{item.code}] began: {item.title}: {visible(item.cause)}"
    return f"{clock}  {item.severity}[{item.code}] ended: {item.title}"


def snapshot_line(view: WatchView) -> str:
    """One line for the newest snapshot."""
    snapshot = view.latest
    if snapshot is None:
        return "nothing was read yet"
    parts = [time.strftime("%H:%M:%S", time.localtime(snapshot.at))]
    engine = snapshot.engine
    if engine is not None:
        said: list[str] = [engine.state or "state unknown"]
        if engine.running is not None:
            said.append(f"{engine.running} running, {(engine.waiting or 0) + (engine.held or 0)} waiting")
        if engine.kv_cache_usage is not None:
            said.append(f"cache {engine.kv_cache_usage:.0%}")
        rate = view.rates.get("engine.generation_tokens_per_s")
        if rate is not None:
            said.append(f"{rate:,.0f} tokens/s")
        elif engine.running and "generation_tokens" in engine.late_totals:
            said.append(f"tokens/s {UNKNOWN}")
        if engine.resident_bytes is not None:
            said.append(f"{size(engine.resident_bytes)} of host memory")
        parts.append(", ".join(said))
    for card in snapshot.cards or ():
        said = [f"GPU {card.index} {bare_gib(card.used_bytes)} of {gib(card.total_bytes)}"]
        if card.utilization is not None:
            said.append(f"{card.utilization:.0%}")
        if card.temperature_c is not None:
            said.append(f"{card.temperature_c:.0f} °C")
        parts.append(" ".join(said))
    if snapshot.cards is None and engine is None:
        parts.append("nothing could be read")
    return "  ".join(parts)


# ------------------------------------------------------------------------------------------ pieces


def _row(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}}{text}"


def _fold(label: str, said: Sequence[str], width: int) -> list[str]:
    """Pieces on one line, three blanks apart, or on several where they do not fit."""
    lines: list[str] = []
    row = ""
    for piece in said:
        longer = f"{row}   {piece}" if row else piece
        if row and len(_COLOUR.sub("", longer)) > width - _LABEL - 2:
            lines.append(_row("" if lines else label, row))
            row = piece
        else:
            row = longer
    lines.append(_row("" if lines else label, row))
    return lines


def _meter(share: float, width: int, paint: Paint) -> str:
    full = round(share * width)
    return paint(_USED * full, "cyan") + paint(_LEFT * (width - full), "dim")


def _rate(value: int) -> str:
    """Bytes a second in decimal units, as links are sold: ``80 MB/s``."""
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if value >= unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value} B/s"


# ------------------------------------------------------------------------------------------ JSON


def watch_document(view: WatchView, changes: Sequence[AlertChange] = ()) -> dict[str, Any]:
    """One look for scripts; what is unknown is null."""
    snapshot = view.latest
    found: Mapping[str, Any] = {} if snapshot is None else _whole(snapshot)
    return {
        "schema": 1,
        "name": view.name,
        **found,
        "reached_bytes": {
            **{str(index): used for index, used in view.reached.items()},
            **({} if view.host_reached is None else {"host": view.host_reached}),
        },
        "plan": _whole(view.limits) if view.limits.cards or view.limits.host is not None else None,
        "findings": [_finding(item) for item in view.findings],
        "changes": [
            {"at": change.at, "event": "began" if change.began else "ended", "code": change.finding.code}
            for change in changes
        ],
    }


def _finding(item: Finding) -> Any:
    return msgspec.to_builtins(item)


def _whole(value: Any) -> Any:
    """A struct with every field, also those that have their default."""
    if isinstance(value, Struct):
        return {name: _whole(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (tuple, list)):
        return [_whole(item) for item in value]
    return value
