#!/usr/bin/env python3
"""What keeping readings costs: bytes on disk, processor time for each reading, time of the page's questions.

runstore.py [--cards 8] [--days 7] [--json]

Readings of every second are written as a gateway writes them, each value with noise in all its digits, which is the
worst for the compression. A week of eight cards takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from array import array
from pathlib import Path

from loadmaster.core.series import OF_CARD, OF_ENGINE, RATES
from loadmaster.edge.readingtiers import Tiers
from loadmaster.edge.runquery import RunQuery
from loadmaster.edge.runschema import FILE, connect

DAY = 86_400
COMMIT_S = 2
PAGE = ("used_bytes", "utilization")
SPANS = {"7 days": 7 * DAY, "1 day": DAY, "6 hours": 6 * 3600, "1 hour": 3600, "10 minutes": 600}


def series(cards: int) -> list[str]:
    return [
        *(f"card{card}.{name}" for card in range(cards) for name in OF_CARD),
        *(f"engine.{name}" for name in OF_ENGINE),
        *(f"engine.{name}_per_s" for name in RATES),
    ]


def write(path: Path, cards: int, seconds: int) -> dict[str, float]:
    """Write the readings; processor seconds of all, and of the slowest one."""
    names = series(cards)
    noise = random.Random(1)
    pool = array("f", (noise.random() * 1e11 for _ in range(50_000)))
    database = connect(path)
    tiers = Tiers("demo")
    slowest, begin = 0.0, time.process_time()
    for second in range(seconds):
        if second % COMMIT_S == 0:
            database.execute("BEGIN IMMEDIATE")
        place = second * 7919 % (len(pool) - len(names))
        before = time.process_time()
        tiers.add(database, 1_790_000_000 + second, names, pool[place : place + len(names)].tobytes())
        slowest = max(slowest, time.process_time() - before)
        if second % COMMIT_S == COMMIT_S - 1 or second == seconds - 1:
            database.execute("COMMIT")
    spent = time.process_time() - begin
    database.close()
    return {"seconds_a_reading": spent / seconds, "slowest_reading_s": slowest}


def ask(path: Path, cards: int, seconds: int) -> dict[str, float]:
    """Best processor time of three for each span, of the series that the page draws."""
    query, end = RunQuery(path), 1_790_000_000 + seconds
    names = [f"card{card}.{name}" for card in range(cards) for name in PAGE]
    names += ["engine.running", "engine.kv_cache_usage"]
    found = {}
    for label, span in SPANS.items():
        times = []
        for _ in range(3):
            begin = time.process_time()
            query.readings("demo", end - span, end, points=300, names=names)
            times.append(time.process_time() - begin)
        found[label] = min(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--days", type=float, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seconds = int(options.days * DAY)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        written = write(path, options.cards, seconds)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        asked = ask(path, options.cards, seconds)
    result = {"cards": options.cards, "days": options.days, "series": len(series(options.cards)), "bytes": size}
    if options.json:
        print(json.dumps({**result, **written, "questions_s": asked}, indent=1))
        return
    print(f"{options.cards} cards, {result['series']} series, {options.days:g} days: {size / 1e6:.1f} MB on disk")
    print(
        f"a reading takes {written['seconds_a_reading'] * 1e6:.0f} us of processor time, "
        f"the slowest {written['slowest_reading_s'] * 1e3:.0f} ms"
    )
    for label, taken in asked.items():
        print(f"question over {label}: {taken * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
