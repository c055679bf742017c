"""What an engine's ``/metrics`` tells, by the names in ``core/data/engine-metrics.toml``.

The text of a busy engine has over a thousand lines, nearly all of them buckets; only the lines that are wanted are
looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from loadmaster.core.observation import EngineReading
from loadmaster.core.tables import load_toml
from loadmaster.engines.base import Progress

_COUNTS = ("running", "waiting")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Figures(Struct, frozen=True, kw_only=True):
    """One look. ``values``: by the names of :class:`EngineReading`. ``pairs``: (sum, count) of what has a mean."""

    engine: str
    running: int
    waiting: int
    steps: float | None = None
    values: dict[str, float] = {}
    pairs: dict[str, tuple[float, float]] = {}
    late: tuple[str, ...] = ()


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    steps: tuple[str, ...]
    source: str
    most: dict[str, tuple[str, ...]]
    sum: dict[str, tuple[str, ...]]
    first: dict[str, tuple[str, ...]]
    labelled: dict[str, _Labelled]
    mean: dict[str, tuple[str, ...]]
    ratio: dict[str, tuple[str, str]]
    late: tuple[str, ...] = ()

    def names(self) -> Iterator[str]:
        yield from (*self.running, *self.waiting, *self.steps)
        for group in (self.most, self.sum, self.first):
            for names in group.values():
                yield from names
        for labelled in self.labelled.values():
            yield from labelled.names
        for names in self.mean.values():
            yield from (f"{name}{end}" for name in names for end in ("_sum", "_count"))
        for pair in self.ratio.values():
            yield from pair


class _Labelled(Struct, frozen=True, forbid_unknown_fields=True):
    names: tuple[str, ...]
    label: str
    values: tuple[str, ...]


@cache
def _tables() -> tuple[_Table, ...]:
    return msgspec.convert(load_toml("engine-metrics.toml")["engine"], tuple[_Table, ...])


@cache
def _wanted() -> frozenset[str]:
    return frozenset(name for table in _tables() for name in table.names())


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of every wanted sample that has a finite value of 0 or more."""
    wanted = _wanted()
    for line in text.split("\n"):
        name, brace, rest = line.partition("{")
        labels = ""
        if brace:
            if name not in wanted:
                continue
            labels, _, rest = rest.rpartition("}")
        else:
            name, _, rest = line.partition(" ")
            if name not in wanted:
                continue
        try:
            value = float(rest.split(None, 1)[0])
        except (ValueError, IndexError):
            continue
        if math.isfinite(value) and value >= 0:
            yield name, labels, value


def progress(text: str) -> Progress | None:
    """Requests running and waiting, and the steps done, over all replicas; None when the text tells no requests."""
    figures = read_figures(text)
    return None if figures is None else Progress(figures.running, figures.waiting, figures.steps)


def read_figures(text: str) -> Figures | None:
    """All that is wanted of one look; None when the text tells no requests."""
    samples: dict[str, list[tuple[str, float]]] = {}
    for name, labels, value in _samples(text):
        samples.setdefault(name, []).append((labels, value))
    table = next((table for table in _tables() if any(name in samples for name in table.running)), None)
    return None if table is None else _figures(table, samples)


def _figures(table: _Table, samples: Mapping[str, list[tuple[str, float]]]) -> Figures:
    sums = {name: sum(value for _, value in rows) for name, rows in samples.items()}

    def total(names: tuple[str, ...]) -> float | None:
        there = [sums[name] for name in names if name in sums]
        return sum(there) if there else None

    values: dict[str, float | None] = {}
    for key, names in table.most.items():
        name = _first(names, samples)
        values[key] = None if name is None else max(value for _, value in samples[name])
    for key, names in table.sum.items():
        values[key] = total(names)
    for key, names in table.first.items():
        name = _first(names, samples)
        values[key] = None if name is None else sums[name]
    for key, wanted in table.labelled.items():
        rows = [row for name in wanted.names for row in samples.get(name, ())]
        told = [value for labels, value in rows if dict(_LABEL.findall(labels)).get(wanted.label) in wanted.values]
        values[key] = sum(told) if rows else None
    pairs: dict[str, tuple[float, float]] = {}
    for key, names in table.mean.items():
        name = next((name for name in names if f"{name}_sum" in sums and f"{name}_count" in sums), None)
        if name is not None:
            pairs[key] = (sums[f"{name}_sum"], sums[f"{name}_count"])
    for key, (above, below) in table.ratio.items():
        if above in sums and below in sums:
            pairs[key] = (sums[above], sums[below])
    return Figures(
        engine=table.name,
        running=int(total(table.running) or 0),
        waiting=int(total(table.waiting) or 0),
        steps=total(table.steps),
        values={key: value for key, value in values.items() if value is not None},
        pairs=pairs,
        late=table.late,
    )


def _first(names: tuple[str, ...], samples: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in samples), None)


_KINDS = {field.name: field.type for field in msgspec.structs.fields(EngineReading)}


def engine_reading(figures: Figures, before: Figures | None, reading: EngineReading) -> EngineReading:
    """``reading`` with what this look tells; means are over what ended since ``before``, None when nothing did.

    An engine that was started anew in between has smaller counts: then there is no mean.
    """
    changes: dict[str, Any] = {
        "running": figures.running,
        "waiting": figures.waiting,
        "steps": figures.steps,
        "late_totals": figures.late,
    }
    for key, value in figures.values.items():
        changes[key] = int(value) if _KINDS[key] == int | None else value
    for key, (added, count) in figures.pairs.items():
        earlier = before.pairs.get(key) if before is not None else None
        if earlier is not None and count > earlier[1] and added >= earlier[0]:
            changes[key] = (added - earlier[0]) / (count - earlier[1])
    return msgspec.structs.replace(reading, **changes)
