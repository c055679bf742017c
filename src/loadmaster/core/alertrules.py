"""The rules of ``core/data/alerts.toml``, and what a figure is that they judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from loadmaster.core.facts import Confidence
from loadmaster.core.observation import Snapshot
from loadmaster.core.tables import load_toml
from loadmaster.core.watchlimits import WatchLimits


class FixRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    why: str
    argv: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    command: str | None = None


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One alert. ``settings`` is ``with`` in the file."""

    code: str
    measure: str
    raise_at: float
    clear_at: float
    raise_after_s: float
    clear_after_s: float
    settings: dict[str, float] = msgspec.field(name="with", default_factory=dict)
    unless: tuple[str, ...] = ()
    confidence: Confidence = "certain"
    fix: tuple[FixRule, ...] = ()


class Seen(Struct, frozen=True):
    """A figure of one subject now. ``value`` None: it could not be read. ``words`` tells it in a sentence's words."""

    value: float | None
    words: Callable[[], str] = lambda: ""


Subject = int | None  # a card's index, None: the engine


class Measure(Protocol):
    """Takes every snapshot in order and tells each subject's figure; higher is worse."""

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]: ...


MeasureMaker = Callable[[Mapping[str, float], WatchLimits], Measure]


@cache
def rules() -> tuple[Rule, ...]:
    return msgspec.convert(load_toml("alerts.toml")["rule"], tuple[Rule, ...])


def longest_gap_s() -> float:
    """Seconds of a gap in the series that count at most."""
    return float(load_toml("alerts.toml")["gap_s"])


@cache
def event_texts() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Events of the engine's log, and the texts of which any in a line is one."""
    table: dict[str, Any] = load_toml("alerts.toml")["events"]
    return tuple((name, tuple(texts)) for name, texts in table.items() if name != "source")


def events_of(line: str) -> tuple[str, ...]:
    """The events that a line of the engine's log is."""
    return tuple(name for name, texts in event_texts() if any(text in line for text in texts))
