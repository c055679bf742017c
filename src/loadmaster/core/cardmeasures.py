"""Figures of the cards that alerts are judged by: memory against plan and card, balance, heat, errors, strangers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from loadmaster.core.alertrules import Measure, MeasureMaker, Seen, Subject
from loadmaster.core.facts import GIB, MIB
from loadmaster.core.observation import CardReading, ProcessReading, Snapshot
from loadmaster.core.tables import load_toml
from loadmaster.core.trend import Creep
from loadmaster.core.watchlimits import WatchLimits
from loadmaster.core.windows import GrowthWindow, MeanWindow

_UNKNOWN = Seen(None)
_FINE = Seen(0.0)
_FEW = 5  # readings, before a share of them says anything


def is_ready(snapshot: Snapshot) -> bool | None:
    """Whether the engine serves; None when that is not known."""
    engine = snapshot.engine
    return None if engine is None or engine.state is None else engine.state == "ready"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def _beside(size: int) -> str:
    return f"{_gib(abs(size))} {'over' if size >= 0 else 'under'}"


class LittleMemoryLeft:
    """What has to be left over what is left."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._least = settings["bytes"]

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        return {card.index: self._of(card) for card in snapshot.cards or ()}

    def _of(self, card: CardReading) -> Seen:
        free = card.free_bytes
        if free is None and card.total_bytes is not None and card.used_bytes is not None:
            free = card.total_bytes - card.used_bytes - (card.reserved_bytes or 0)
        if free is None:
            return _UNKNOWN
        left = free
        of = f" of {_gib(card.total_bytes)}" if card.total_bytes is not None else ""
        return Seen(self._least / max(1, left), lambda: f"card {card.index} has {left // MIB:,} MiB left{of}")


class OverPlan:
    """Memory in use beyond the upper bound of the plan's serving peak, over what is let pass."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._bytes = settings["bytes"]
        self._limits = limits

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        ready = is_ready(snapshot)
        found: dict[Subject, Seen] = {}
        for card in snapshot.cards or ():
            limit = self._limits.card(card.index)
            if limit is None:
                continue
            used = card.used_bytes
            if ready is False:
                found[card.index] = _FINE
            elif ready is None or used is None:
                found[card.index] = _UNKNOWN
            else:
                found[card.index] = _over_plan(card.index, used, limit.serving_high_bytes, self._bytes)
        return found


def _over_plan(index: int, used: int, most: int, passes: float) -> Seen:
    return Seen(
        max(0.0, (used - most) / passes),
        lambda: f"card {index} uses {_gib(used)}, the plan's upper bound is {_gib(most)}",
    )


class MemoryApart:
    """How much further the cards lie from their plans, one against another, than the plan's bounds allow."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._bytes = settings["bytes"]
        self._limits = limits

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        if len(self._limits.cards) < 2 or snapshot.cards is None:
            return {}
        ready = is_ready(snapshot)
        if ready is not True:
            return {None: _FINE if ready is False else _UNKNOWN}
        off: list[tuple[int, int]] = []
        for card in snapshot.cards:
            limit = self._limits.card(card.index)
            if limit is not None and card.used_bytes is not None:
                off.append((card.used_bytes - limit.steady_bytes, card.index))
        if len(off) < len(self._limits.cards):
            return {None: _UNKNOWN}
        (least, low), (most, high) = min(off), max(off)
        allowed = max(card.spread_bytes for card in self._limits.cards)
        apart = most - least - allowed
        words = (
            f"card {high} is {_beside(most)} its plan at rest, card {low} {_beside(least)}; "
            f"the plan allows {_gib(allowed)} between them"
        )
        return {None: Seen(max(0.0, apart / self._bytes), lambda: words)}


class OneCardIdle:
    """1 while one of the engine's cards does nothing and another works."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._window_s = settings["window_s"]
        self._busy, self._idle = settings["busy"], settings["idle"]
        self._planned = {card.index for card in limits.cards}
        self._means: dict[int, MeanWindow] = {}

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        cards = [card for card in snapshot.cards or () if self._counts(card)]
        if snapshot.cards is None:
            return {}
        means: dict[int, float] = {}
        for card in cards:
            window = self._means.setdefault(card.index, MeanWindow(self._window_s))
            window.add(snapshot.at, card.utilization)
            if window.mean is None:
                return {None: _UNKNOWN}
            if window.span_s >= self._window_s / 2:
                means[card.index] = window.mean
        if len(cards) < 2:
            return {None: _FINE}
        if len(means) < len(cards):
            return {None: _UNKNOWN}
        least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        idle = means[most] >= self._busy and means[least] <= self._idle
        words = f"card {least} is {means[least]:.0%} busy while card {most} is {means[most]:.0%} busy"
        return {None: Seen(1.0 if idle else 0.0, lambda: words)}

    def _counts(self, card: CardReading) -> bool:
        """Cards of the plan; without one, those on which the engine holds memory."""
        if self._planned:
            return card.index in self._planned
        return any(process.own for process in card.processes or ())


class Throttling:
    """The share of the last seconds in which something that is wrong held the clocks back."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._window_s = settings["window_s"]
        self._shares: dict[int, MeanWindow] = {}

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        return {card.index: self._of(snapshot.at, card) for card in snapshot.cards or ()}

    def _of(self, at: float, card: CardReading) -> Seen:
        window = self._shares.setdefault(card.index, MeanWindow(self._window_s))
        reasons = card.throttle_reasons
        if reasons is None:
            window.add(at, None)
            return _UNKNOWN
        bad = [_throttle_words()[name] for name in reasons if name in _throttle_words()]
        window.add(at, 1.0 if bad else 0.0)
        if window.span_s < self._window_s / 3 or window.count < _FEW:
            return _UNKNOWN
        hot = f" at {card.temperature_c:.0f} °C" if card.temperature_c is not None else ""
        clock = f", {card.sm_clock_hz // 1_000_000:,} MHz" if card.sm_clock_hz is not None else ""
        why = ", ".join(bad) or "its clocks were held back"
        return Seen(window.mean, lambda: f"card {card.index}{hot}{clock}: {why}")


@cache
def _throttle_words() -> dict[str, str]:
    return {row["name"]: row["words"] for row in load_toml("throttle-reasons.toml")["reason"] if row["alert"]}


class MemoryTrend:
    """Bytes by which a card's memory has crept up between equal loads."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._settings = settings
        self._creeps: dict[int, Creep] = {}
        self._pid: int | None = None

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        engine = snapshot.engine
        if engine is None or engine.state is None:
            return {}
        if engine.state != "ready" or engine.pid != self._pid:
            self._pid = engine.pid
            for creep in self._creeps.values():
                creep.reset()
        if engine.state != "ready":
            return {card.index: _FINE for card in snapshot.cards or ()}
        if engine.running is None:
            return {}
        running = engine.running + (engine.waiting or 0)
        return {card.index: self._of(snapshot.at, running, card) for card in snapshot.cards or ()}

    def _of(self, at: float, running: int, card: CardReading) -> Seen:
        used = _held(card)
        if used is None:
            return _UNKNOWN
        creep = self._creeps.get(card.index)
        if creep is None:
            wanted = self._settings
            creep = Creep(wanted["slot_s"], int(wanted["slots"]), int(wanted["least_slots"]))
            self._creeps[card.index] = creep
        grown = creep.add(at, running, used)
        return Seen(grown, lambda: f"card {card.index} holds {grown / MIB:,.0f} MiB more than before at the same load")


def _held(card: CardReading) -> int | None:
    """What the engine's processes hold; the whole card where nobody tells whose they are."""
    own = [process.used_bytes for process in card.processes or () if process.own]
    known = [size for size in own if size is not None]
    return sum(known) if known and len(known) == len(own) else card.used_bytes


class ForeignBytes:
    """What processes hold that came while the engine ran, over what is let pass. Who was there before was planned."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._bytes = settings["bytes"]
        self._planned = {card.index for card in limits.cards}
        self._there: set[int] | None = None
        self._pid: int | None = None

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        cards = [card for card in snapshot.cards or () if not self._planned or card.index in self._planned]
        strangers = {
            card.index: [process for process in card.processes or () if process.own is False] for card in cards
        }
        engine = snapshot.engine
        pid = engine.pid if engine is not None and engine.pid is not None else self._pid
        if self._there is None or pid != self._pid:
            self._pid = pid
            self._there = {process.pid for found in strangers.values() for process in found}
        there = self._there
        return {
            card.index: _UNKNOWN
            if card.processes is None
            else self._of(card.index, [process for process in strangers[card.index] if process.pid not in there])
            for card in cards
        }

    def _of(self, index: int, found: list[ProcessReading]) -> Seen:
        # a driver that does not tell how much leaves the presence as the sign
        held = sum(self._bytes if process.used_bytes is None else process.used_bytes for process in found)
        return Seen(held / self._bytes, lambda: f"card {index}: {', '.join(map(_process, found))}")


def _process(process: ProcessReading) -> str:
    size = "memory unknown" if process.used_bytes is None else _gib(process.used_bytes)
    return f"process {process.pid} {process.name or ''}".rstrip() + f" ({size})"


class NewXids:
    """Errors that the driver reported in the last hour and that are no mere follow-up."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._window_s = settings["window_s"]
        table: dict[str, Any] = load_toml("alerts.toml")["xid"]
        self._harmless = set(table["harmless"])
        self._words: dict[str, str] = table["words"]
        self._counts: dict[int, GrowthWindow] = {}

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        return {card.index: self._of(snapshot.at, card) for card in snapshot.cards or ()}

    def _of(self, at: float, card: CardReading) -> Seen:
        if card.xid is None:
            return _UNKNOWN
        bad = [number for number in card.xid if number not in self._harmless]
        window = self._counts.get(card.index)
        if window is None:
            window = self._counts[card.index] = GrowthWindow(self._window_s)
            window.add(at, 0.0)
        window.add(at, float(len(bad)))
        last = bad[-1] if bad else 0
        words = self._words.get(str(last), "see NVIDIA's list of Xid errors")
        return Seen(window.growth, lambda: f"card {card.index}: Xid {last}, {words}")


class NewEccErrors:
    """Uncorrectable memory errors of the last hour."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._window_s = settings["window_s"]
        self._counts: dict[int, GrowthWindow] = {}

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        return {card.index: self._of(snapshot.at, card) for card in snapshot.cards or ()}

    def _of(self, at: float, card: CardReading) -> Seen:
        if card.ecc_uncorrected is None:
            return _UNKNOWN
        window = self._counts.setdefault(card.index, GrowthWindow(self._window_s))
        window.add(at, float(card.ecc_uncorrected))
        growth = window.growth
        errors = "error" if growth == 1 else "errors"
        return Seen(growth, lambda: f"card {card.index}: {growth:.0f} uncorrectable memory {errors} within an hour")


CARD_MEASURES: dict[str, MeasureMaker] = {
    "little_memory_left": LittleMemoryLeft,
    "over_plan": OverPlan,
    "memory_apart": MemoryApart,
    "one_card_idle": OneCardIdle,
    "throttling": Throttling,
    "memory_trend": MemoryTrend,
    "foreign_bytes": ForeignBytes,
    "new_xids": NewXids,
    "new_ecc_errors": NewEccErrors,
}

__all__ = ["CARD_MEASURES", "Measure", "is_ready"]
