"""How readings are kept: every second for an hour, then in slots of 10 s, 60 s and 600 s, one column a series.

A tier is filled from the finer one when a whole block of it has passed, and loses what is older than it keeps.
"""

from __future__ import annotations

import sqlite3
import zlib
from array import array
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from loadmaster.core.downsampling import Slots, coarser, slots_of

HOUR = 3600
DAY = 24 * HOUR


class Tier(Struct, frozen=True):
    """Slots of ``step`` seconds in blocks of ``block`` seconds, kept for ``keep`` seconds."""

    step: int
    block: int
    keep: int

    @property
    def slots(self) -> int:
        return self.block // self.step


# the finest first; each block is a whole number of blocks of the one before
TIERS = (Tier(10, 600, 26 * HOUR), Tier(60, HOUR, 8 * DAY), Tier(600, 6 * HOUR, 62 * DAY))
KEEP_SECONDS = HOUR  # of readings of every second


class Tiers:
    """The readings of one source, written inside transactions of the caller."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._numbers: dict[str, int] = {}
        self._registered: set[int] = set()
        self._next_look: float | None = None

    def forget(self) -> None:
        """Another file is written from now on."""
        self._numbers.clear()
        self._registered.clear()
        self._next_look = None

    def add(self, database: sqlite3.Connection, at: float, names: Sequence[str], content: bytes) -> None:
        """Keep one reading; ``content``: 32-bit floats in the order of ``names``."""
        source = self._number(database, self._source)
        layout = self._number(database, "\n".join(names))
        database.execute("INSERT OR REPLACE INTO reading VALUES (?, ?, ?, ?)", (source, at, layout, content))
        if self._next_look is None or at >= self._next_look or at < self._next_look - 2 * TIERS[0].block:
            self.consolidate(database, at)
            block = TIERS[0].block
            self._next_look = (at // block + 1) * block

    def consolidate(self, database: sqlite3.Connection, now: float) -> None:
        """Fill the blocks that have passed, and drop what is too old."""
        source = self._number(database, self._source)
        fine = TIERS[0]
        oldest = database.execute("SELECT min(at) FROM reading WHERE source = ?", (source,)).fetchone()[0]
        if oldest is None:
            return
        begin = self._begin(database, source, fine, oldest)
        while begin + fine.block <= now:
            self._fill_from_readings(database, source, fine, begin)
            begin += fine.block
            later = database.execute(
                "SELECT min(at) FROM reading WHERE source = ? AND at >= ?", (source, begin)
            ).fetchone()[0]
            if later is not None:  # a time without any reading needs no block
                begin = max(begin, int(later // fine.block) * fine.block)
        self._until(database, source, fine, begin)
        for finer, tier in pairwise(TIERS):
            self._fill_from_slots(database, source, finer, tier, now)
        database.execute("DELETE FROM reading WHERE source = ? AND at < ?", (source, begin - KEEP_SECONDS))
        for tier in TIERS:
            since = int((now - tier.keep) // tier.block) * tier.block
            database.execute(
                "DELETE FROM slots WHERE source = ? AND step = ? AND begin < ?", (source, tier.step, since)
            )
            database.execute(
                "UPDATE tier SET since = max(since, ?) WHERE source = ? AND step = ?", (since, source, tier.step)
            )

    def _begin(self, database: sqlite3.Connection, source: int, tier: Tier, oldest: float) -> int:
        row = database.execute("SELECT until FROM tier WHERE source = ? AND step = ?", (source, tier.step)).fetchone()
        begin = int(oldest // tier.block) * tier.block
        if row is None:
            database.execute("INSERT INTO tier VALUES (?, ?, ?, ?)", (source, tier.step, begin, begin))
            return begin
        return int(row[0])

    def _until(self, database: sqlite3.Connection, source: int, tier: Tier, until: int) -> None:
        database.execute("UPDATE tier SET until = ? WHERE source = ? AND step = ?", (until, source, tier.step))

    def _fill_from_readings(self, database: sqlite3.Connection, source: int, tier: Tier, begin: int) -> None:
        for name, slots in second_slots(database, source, begin, begin + tier.block, tier.step).items():
            self._put(database, source, tier, name, begin, slots)

    def _fill_from_slots(self, database: sqlite3.Connection, source: int, finer: Tier, tier: Tier, now: float) -> None:
        since, until = database.execute(
            "SELECT since, until FROM tier WHERE source = ? AND step = ?", (source, finer.step)
        ).fetchone()
        begin = self._begin(database, source, tier, since)
        factor = tier.step // finer.step
        while begin + tier.block <= until:
            rows = database.execute(
                "SELECT series, begin, content FROM slots WHERE source = ? AND step = ? AND begin >= ? AND begin < ?",
                (source, finer.step, begin, begin + tier.block),
            ).fetchall()
            wide: dict[int, Slots] = {}
            for series, at, content in rows:
                slots = wide.setdefault(series, Slots.empty(tier.block // finer.step))
                slots.put((at - begin) // finer.step, unpack(content))
            for series, slots in wide.items():
                self._put(database, source, tier, series, begin, coarser(slots, factor))
            begin += tier.block
        self._until(database, source, tier, begin)

    def _put(
        self, database: sqlite3.Connection, source: int, tier: Tier, series: str | int, begin: int, slots: Slots
    ) -> None:
        number = series if isinstance(series, int) else self._number(database, series)
        if number not in self._registered:
            database.execute("INSERT OR IGNORE INTO series VALUES (?, ?)", (source, number))
            self._registered.add(number)
        database.execute(
            "INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?)", (source, tier.step, number, begin, pack(slots))
        )

    def _number(self, database: sqlite3.Connection, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            database.execute("INSERT OR IGNORE INTO name (text) VALUES (?)", (text,))
            number = int(database.execute("SELECT number FROM name WHERE text = ?", (text,)).fetchone()[0])
            self._numbers[text] = number
        return number


def pack(slots: Slots) -> bytes:
    return zlib.compress(slots.to_bytes(), 1)


def unpack(content: bytes) -> Slots:
    return Slots.from_bytes(zlib.decompress(content))


def second_slots(
    database: sqlite3.Connection, source: int, since: int, until: int, step: int, wanted: set[str] | None = None
) -> dict[str, Slots]:
    """The readings of every second in slots of ``step``, by series. ``wanted``: only these."""
    rows = database.execute(
        "SELECT at, layout, content FROM reading WHERE source = ? AND at >= ? AND at < ? ORDER BY at",
        (source, since, until),
    ).fetchall()
    count = -(-(until - since) // step)
    found: dict[str, Slots] = {}
    for layout in dict.fromkeys(row[1] for row in rows):
        names = layout_names(database, layout)
        own = [row for row in rows if row[1] == layout]
        places = [int((row[0] - since) // step) for row in own]
        numbers = array("f", b"".join(row[2] for row in own))
        for place, name in enumerate(names):
            if wanted is not None and name not in wanted:
                continue
            slots = slots_of(places, numbers[place :: len(names)], count)
            found[name] = slots if name not in found else merged(found[name], slots)
    return found


def layout_names(database: sqlite3.Connection, layout: int) -> list[str]:
    row = database.execute("SELECT text FROM name WHERE number = ?", (layout,)).fetchone()
    return str(row[0]).split("\n") if row is not None else []


def merged(first: Slots, second: Slots) -> Slots:
    """Slots of two layouts: where both have readings, the second's mean stands."""
    return Slots(
        array("f", map(min, first.low, second.low)),
        array("f", (a if b != b else b for a, b in zip(first.mean, second.mean))),
        array("f", map(max, first.high, second.high)),
    )
