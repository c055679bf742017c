"""Questions to the file of runs, from any thread, while another process writes it."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from loadmaster.core.downsampling import Slots, coarser
from loadmaster.core.facts import Finding, LoadSheet
from loadmaster.core.reconcile import Reconciliation, RunActual
from loadmaster.core.runrecord import KeptFinding, RunEnding, RunRecord
from loadmaster.core.served import RankReplay
from loadmaster.edge.readingtiers import TIERS, layout_names, second_slots, unpack
from loadmaster.edge.runschema import SchemaTooNew, connect_for_reading, is_damaged

_MOST_NUMBER = (1 << 63) - 1  # SQLite has no larger integers


class RunsUnreadable(Exception):
    """The file of runs cannot be read; the message says why, ``hint`` what to do about it."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class StoredRun(Struct, frozen=True, kw_only=True):
    """A run as kept. ``ending`` None: it goes on, or nobody saw its end."""

    number: int
    record: RunRecord
    ending: RunEnding | None = None


class RunObservation(Struct, frozen=True, kw_only=True):
    """What was read of a run when it was ready, and what the growth of its ranks is replayed from."""

    actual: RunActual
    replays: tuple[RankReplay, ...] = ()


class Column(Struct, frozen=True):
    """One series, a value for each point; None: not read then."""

    low: Sequence[float | None]
    mean: Sequence[float | None]
    high: Sequence[float | None]


class Readings(Struct, frozen=True, kw_only=True):
    """``at``: begin of each point, seconds of the epoch; ``step_s``: its width, 1 for single readings."""

    step_s: int
    at: list[float]
    series: dict[str, Column]


class RunQuery:
    """Reads what a :class:`RunStore` wrote. Every method raises :class:`RunsUnreadable` for a damaged file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def runs(self, deployment: str | None = None, limit: int = 100) -> list[StoredRun]:
        """The newest first."""
        with self._open() as database:
            if database is None:
                return []
            where, values = ("WHERE deployment = ?", (deployment,)) if deployment is not None else ("", ())
            rows = database.execute(
                f"SELECT number, record, ended, message, code FROM run {where} ORDER BY number DESC LIMIT ?",
                (*values, min(limit, _MOST_NUMBER)),
            ).fetchall()
            return [run for row in rows if (run := _run(row)) is not None]

    def run(self, number: int) -> StoredRun | None:
        with self._open() as database:
            if database is None or number > _MOST_NUMBER:
                return None
            row = database.execute(
                "SELECT number, record, ended, message, code FROM run WHERE number = ?", (number,)
            ).fetchone()
            return None if row is None else _run(row)

    def plan(self, number: int) -> LoadSheet | None:
        """The plan that the run was started with; None: there was none, or an older release wrote it otherwise."""
        with self._open() as database:
            row = (
                None
                if database is None
                else database.execute("SELECT plan FROM run WHERE number = ?", (number,)).fetchone()
            )
        if row is None or row[0] is None:
            return None
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(row[0], type=LoadSheet)
        return None

    def observation(self, number: int) -> RunObservation | None:
        """What the ready engine of a run was compared with, to go on from."""
        with self._open() as database:
            row = (
                None
                if database is None
                else database.execute("SELECT content FROM observation WHERE run = ?", (number,)).fetchone()
            )
        with contextlib.suppress(msgspec.MsgspecError):
            return None if row is None else msgspec.json.decode(row[0], type=RunObservation)
        return None

    def reconciliations(self, number: int) -> list[Reconciliation]:
        """Plan against actual of a run, at the points that it reached; what an older release wrote otherwise is not."""
        with self._open() as database:
            if database is None:
                return []
            rows = database.execute(
                "SELECT content FROM reconciliation WHERE run = ? ORDER BY at", (number,)
            ).fetchall()
        return [found for row in rows if (found := _reconciliation(row[0])) is not None]

    def reconciled_runs(self, limit: int) -> list[tuple[StoredRun, list[Reconciliation]]]:
        """The newest runs that were reconciled when they were ready."""
        with self._open() as database:
            if database is None:
                return []
            rows = database.execute(
                "SELECT number, record, ended, message, code, content FROM run"
                " JOIN reconciliation ON run = number AND point = 'ready' ORDER BY number DESC LIMIT ?",
                (limit,),
            ).fetchall()
        pairs = [(_run(row[:5]), _reconciliation(row[5])) for row in rows]
        return [(run, [found]) for run, found in pairs if run is not None and found is not None]

    def findings(self, deployment: str, since: float = 0.0, until: float = math.inf) -> list[KeptFinding]:
        """The findings of a deployment that held at any time in between, the oldest first."""
        with self._open() as database:
            if database is None:
                return []
            rows = database.execute(
                "SELECT content, since, until FROM finding WHERE deployment = ? AND since <= ?"
                " AND (until IS NULL OR until >= ?) ORDER BY since",
                (deployment, min(until, 1e18), since),
            ).fetchall()
        return [
            KeptFinding(finding=msgspec.json.decode(content, type=Finding), since=begin, until=end)
            for content, begin, end in rows
        ]

    def series(self, deployment: str) -> list[str]:
        """Names of all series that were ever kept for a deployment."""
        with self._open() as database:
            if database is None:
                return []
            source = _source(database, deployment)
            names = set(_series(database, source).values())
            newest = database.execute(
                "SELECT layout FROM reading WHERE source = ? ORDER BY at DESC LIMIT 1", (source,)
            ).fetchone()
            if newest is not None:
                names.update(layout_names(database, newest[0]))
            return sorted(names)

    def readings(
        self, deployment: str, since: float, until: float, points: int = 600, names: Sequence[str] | None = None
    ) -> Readings:
        """Readings in at most ``points`` points. ``names``: only these series, None: all."""
        with self._open() as database:
            if database is None or until <= since:
                return Readings(step_s=1, at=[], series={})
            return _readings(database, _source(database, deployment), since, until, max(1, points), names)

    def run_readings(self, number: int, points: int = 600, names: Sequence[str] | None = None) -> Readings:
        """The readings in the time of a run; of one that goes on, up to the newest."""
        run = self.run(number)
        if run is None:
            return Readings(step_s=1, at=[], series={})
        until = run.ending.ended if run.ending is not None else self.newest(run.record.deployment)
        if until is None:
            return Readings(step_s=1, at=[], series={})
        return self.readings(run.record.deployment, run.record.started, until + 1, points, names)

    def newest(self, deployment: str) -> float | None:
        """When the last reading of a deployment was."""
        with self._open() as database:
            if database is None:
                return None
            source = _source(database, deployment)
            row = database.execute("SELECT max(at) FROM reading WHERE source = ?", (source,)).fetchone()
            return None if row is None else row[0]

    def forgotten(self) -> dict[str, float]:
        """What is not to be learnt from runs up to a time, by key of the calibration."""
        with self._open() as database:
            return {} if database is None else dict(database.execute("SELECT key, at FROM forgotten").fetchall())

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        """A connection; None when there is no file, or nothing in it yet."""
        if not self.path.exists():
            yield None
            return
        try:
            with contextlib.closing(connect_for_reading(self.path)) as database:
                if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'run'").fetchone() is None:
                    yield None
                    return
                yield database
        except SchemaTooNew:
            raise RunsUnreadable(
                f"{self.path} was written by a newer release of loadmaster; it is left alone",
                "pip install --upgrade loadmaster",
            ) from None
        except sqlite3.Error as error:
            raise RunsUnreadable(*_unreadable(error, self.path)) from None


def _unreadable(error: sqlite3.Error, path: Path) -> tuple[str, str | None]:
    """What is wrong with the file, and what helps."""
    if path.is_dir():
        return f"{path} is a folder, where the file of runs should be", f"move it away: {move_away(path)}"
    if is_damaged(error):
        words = "loadmaster up NAME sets a damaged file aside and begins a new one"
        return f"{path} cannot be read: {error}", words
    if not os.access(path, os.R_OK):
        return f"{path} cannot be read: you may not read it", f"chmod u+r {shlex.quote(str(path))}"
    return f"{path} cannot be read: {error}", None


def move_away(path: Path) -> str:
    """A command that gives the place of the file of runs free."""
    return shlex.join(["mv", str(path), f"{path}.away"])


def _reconciliation(content: str) -> Reconciliation | None:
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(content, type=Reconciliation)
    return None


def _run(row: tuple[int, str, float | None, str | None, int | None]) -> StoredRun | None:
    number, record, ended, message, code = row
    try:
        decoded = msgspec.json.decode(record, type=RunRecord)
    except msgspec.MsgspecError:
        return None
    ending = None if ended is None else RunEnding(ended=ended, message=message or "", code=code)
    return StoredRun(number=number, record=decoded, ending=ending)


def _source(database: sqlite3.Connection, deployment: str) -> int:
    row = database.execute("SELECT number FROM name WHERE text = ?", (deployment,)).fetchone()
    return -1 if row is None else int(row[0])


def _series(database: sqlite3.Connection, source: int) -> dict[int, str]:
    return dict(
        database.execute(
            "SELECT series.number, text FROM series JOIN name ON name.number = series.number WHERE source = ?",
            (source,),
        ).fetchall()
    )


def _readings(
    database: sqlite3.Connection, source: int, since: float, until: float, points: int, names: Sequence[str] | None
) -> Readings:
    wanted = None if names is None else set(names)
    width = (until - since) / points
    bounds = {
        step: (begin, end)
        for step, begin, end in database.execute("SELECT step, since, until FROM tier WHERE source = ?", (source,))
    }
    numbers = {number: name for number, name in _series(database, source).items() if wanted is None or name in wanted}
    step = 1 if width <= 1 else max((tier.step for tier in TIERS if tier.step <= width), default=TIERS[0].step)
    begin = math.floor(since / step) * step
    count = math.ceil((until - begin) / step)
    end = begin + count * step
    if step == 1:
        return _single(database, source, begin, end, wanted)
    found: dict[str, Slots] = {}
    # What is too old for the wanted tier stands in a coarser one, what is too new in none.
    cursor = begin
    for place in range(len(TIERS) - 1, -1, -1):
        tier = TIERS[place]
        if tier.step < step or tier.step not in bounds:
            continue
        stop = min(end, bounds[tier.step][1])
        if tier.step > step:
            stop = min(stop, bounds[TIERS[place - 1].step][0])
        if stop <= cursor:
            continue
        for number, name in numbers.items():
            for at, slots in _blocks(database, source, tier.step, number, cursor - tier.block, stop):
                found.setdefault(name, Slots.empty(count)).put((at - begin) // step, _split(slots, tier.step // step))
        cursor = stop
    if cursor < end:
        for name, slots in second_slots(database, source, cursor, end, step, wanted).items():
            found.setdefault(name, Slots.empty(count)).put((cursor - begin) // step, slots)
    by = max(1, math.ceil(width / step))
    return Readings(
        step_s=step * by,
        at=[float(begin + place * step * by) for place in range(-(-count // by))],
        series={name: _column(coarser(slots, by)) for name, slots in sorted(found.items())},
    )


def _blocks(
    database: sqlite3.Connection, source: int, step: int, series: int, since: int, until: int
) -> Iterator[tuple[int, Slots]]:
    rows = database.execute(
        "SELECT begin, content FROM slots"
        " WHERE source = ? AND step = ? AND series = ? AND begin > ? AND begin < ? ORDER BY begin",
        (source, step, series, since, until),
    )
    for begin, content in rows:
        yield begin, unpack(content)


def _single(database: sqlite3.Connection, source: int, since: int, until: int, wanted: set[str] | None) -> Readings:
    """Each reading as a point of its own, at its own time."""
    rows = database.execute(
        "SELECT at, layout, content FROM reading WHERE source = ? AND at >= ? AND at < ? ORDER BY at",
        (source, since, until),
    ).fetchall()
    columns: dict[str, list[float | None]] = {}
    for place, (_, layout, content) in enumerate(rows):
        for name, value in zip(layout_names(database, layout), array("f", content)):
            if wanted is None or name in wanted:
                columns.setdefault(name, [None] * len(rows))[place] = value if value == value else None
    series = {name: Column(column, column, column) for name, column in sorted(columns.items())}
    return Readings(step_s=1, at=[row[0] for row in rows], series=series)


def _split(slots: Slots, by: int) -> Slots:
    """The same in slots that are ``by`` times as narrow, each value standing for all of its slot."""
    if by == 1:
        return slots
    low, mean, high = (
        array("f", (value for value in column for _ in range(by))) for column in (slots.low, slots.mean, slots.high)
    )
    return Slots(low, mean, high)


def _column(slots: Slots) -> Column:
    if math.isfinite(math.fsum(slots.mean)):  # no gap
        return Column(slots.low.tolist(), slots.mean.tolist(), slots.high.tolist())
    low, mean, high = (
        [value if math.isfinite(value) else None for value in column] for column in (slots.low, slots.mean, slots.high)
    )
    return Column(low, mean, high)
