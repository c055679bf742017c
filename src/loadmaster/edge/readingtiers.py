"""How readings are kept: every second for an hour, then in slots of 10 s, 60 s and 600 s, one column a series.

Every ten minutes all tiers are brought up to date from the readings of every second. A block is a row of one series;
the newest is written again until it is full.
"""

from __future__ import annotations

import sqlite3
import zlib
from array import array
from collections.abc import Sequence

from msgspec import Struct

from loadmaster.core.downsampling import Slots, coarser, slots_of

HOUR = 3600
DAY = 24 * HOUR


class Tier(Struct, frozen=True):
    """Slots of ``step`` seconds in blocks of ``block`` seconds, kept for ``keep`` seconds."""

    step: int
    block: int
    keep: int


# the finest first; every step is a whole number of the steps before, and divides ROUND
TIERS = (Tier(10, HOUR, 26 * HOUR), Tier(60, 6 * HOUR, 8 * DAY), Tier(600, 2 * DAY, 62 * DAY))
ROUND = 600
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
        if self._next_look is None or at >= self._next_look or at < self._next_look - 2 * ROUND:
            self.consolidate(database, at)
            self._next_look = (at // ROUND + 1) * ROUND

    def consolidate(self, database: sqlite3.Connection, now: float) -> None:
        """Bring the tiers up to date, and drop what is too old."""
        source = self._number(database, self._source)
        oldest = database.execute("SELECT min(at) FROM reading WHERE source = ?", (source,)).fetchone()[0]
        if oldest is None:
            return
        begin = self._begin(database, source, oldest)
        while begin + ROUND <= now:
            for name, slots in second_slots(database, source, begin, begin + ROUND, TIERS[0].step).items():
                number = self._number(database, name)
                self._register(database, source, number)
                for tier in TIERS:
                    self._put(database, source, tier, number, begin, coarser(slots, tier.step // TIERS[0].step))
            begin += ROUND
            later = database.execute(
                "SELECT min(at) FROM reading WHERE source = ? AND at >= ?", (source, begin)
            ).fetchone()[0]
            if later is not None:  # a time without any reading needs no slots
                begin = max(begin, int(later // ROUND) * ROUND)
        database.execute("UPDATE tier SET until = ? WHERE source = ?", (begin, source))
        database.execute("DELETE FROM reading WHERE source = ? AND at < ?", (source, begin - KEEP_SECONDS))
        for tier in TIERS:
            since = int((now - tier.keep) // tier.block) * tier.block
            database.execute(
                "DELETE FROM slots WHERE source = ? AND step = ? AND begin < ?", (source, tier.step, since)
            )
            database.execute(
                "UPDATE tier SET since = max(since, ?) WHERE source = ? AND step = ?", (since, source, tier.step)
            )

    def _begin(self, database: sqlite3.Connection, source: int, oldest: float) -> int:
        row = database.execute("SELECT min(until) FROM tier WHERE source = ?", (source,)).fetchone()
        if row[0] is not None:
            return int(row[0])
        begin = int(oldest // ROUND) * ROUND
        for tier in TIERS:
            database.execute("INSERT INTO tier VALUES (?, ?, ?, ?)", (source, tier.step, begin, begin))
        return begin

    def _register(self, database: sqlite3.Connection, source: int, number: int) -> None:
        if number not in self._registered:
            database.execute("INSERT OR IGNORE INTO series VALUES (?, ?)", (source, number))
            self._registered.add(number)

    def _put(
        self, database: sqlite3.Connection, source: int, tier: Tier, series: int, begin: int, slots: Slots
    ) -> None:
        block = begin // tier.block * tier.block
        key = (source, tier.step, series, block)
        row = database.execute(
            "SELECT content FROM slots WHERE source = ? AND step = ? AND series = ? AND begin = ?", key
        ).fetchone()
        place = (begin - block) // tier.step
        whole = Slots.empty(place + len(slots))
        if row is not None:
            whole.put(0, unpack(row[0]))
        whole.put(place, slots)
        database.execute("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?)", (*key, pack(whole)))

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
    """What :func:`pack` made. Raises sqlite3.DatabaseError for anything else: the file is broken."""
    try:
        return Slots.from_bytes(zlib.decompress(content))
    except (zlib.error, ValueError) as error:
        raise sqlite3.DatabaseError(f"malformed slots: {error}") from None


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
