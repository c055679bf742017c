#!/usr/bin/env python3
"""What the page costs in Debian's Chromium, before the real gateway and an engine of set speed, on loopback.

* First contentful paint: median of LOADS loads with an empty cache, below LIMIT_PAINT_MS.
* An answer of LETTERS letters at RATE tokens a second: script time of each frame in the main thread's own time (a
  busy machine does not count), median below LIMIT_FRAME_MS; private memory of the tab below LIMIT_TAB_MIB.
* What a first visit transfers, and the whole page compressed, below LIMIT_PACKED_KB.

    bench/page.py [--loads N] [--letters N] [--rate N] [--check] [--json]

--check exits 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from playwright.sync_api import Browser, expect, sync_playwright

from tests.page.chromium import chromium, launched
from tests.page.deployed import address, deployed
from tests.page.measuring import CATEGORIES, first_paint_ms, frames_of, long_answer, tab_bytes

LIMIT_PAINT_MS, LIMIT_FRAME_MS, LIMIT_TAB_MIB, LIMIT_PACKED_KB = 300.0, 16.0, 200.0, 120.0
STATIC = Path(__file__).resolve().parent.parent / "src" / "loadmaster" / "service" / "static"
PATIENCE_MS = 180_000


def loads(browser: Browser, url: str, count: int) -> tuple[list[float], int]:
    """First paints in milliseconds, and the bytes that a first visit transfers."""
    paints, transferred = [], 0
    for _ in range(count + 1):
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        paints.append(first_paint_ms(page))
        transferred = page.evaluate(
            "performance.getEntriesByType('resource').reduce((n, one) => n + one.encodedBodySize, 0)"
        )
        context.close()
    return paints[1:], transferred  # the first starts processes of the browser


def stream(browser: Browser, url: str) -> tuple[Any, int]:
    page = browser.new_page()
    page.goto(url)
    page.locator("#question").fill("Tell me everything.")
    browser.start_tracing(page=page, categories=CATEGORIES)
    page.locator(".send").click()
    expect(page.locator(".message.assistant")).to_have_attribute("aria-busy", "false", timeout=PATIENCE_MS)
    frames = frames_of(browser.stop_tracing())
    memory = tab_bytes(browser)
    page.close()
    return frames, memory


def packed() -> int:
    files = [path for path in sorted(STATIC.rglob("*")) if path.suffix in (".js", ".css", ".html", ".svg")]
    return len(gzip.compress(b"".join(path.read_bytes() for path in files), 9))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loads", type=int, default=9)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=1500.0)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    path = chromium()
    if path is None:
        sys.exit("bench: Chromium is missing\nhint: apt-get install --no-install-recommends chromium fonts-noto-cjk")
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.json"
        answers.write_text(json.dumps([["everything", long_answer(options.letters)]]))
        fake = ("--tps", str(options.rate), "--answers", str(answers))
        with deployed(Path(folder) / "home", fake=fake) as one, sync_playwright() as playwright:
            browser = launched(playwright, path)
            paints, transferred = loads(browser, address(one), options.loads)
            frames, memory = stream(browser, address(one))
            browser.close()
    found = {
        "schema": 1,
        "first_paint_ms": round(statistics.median(paints), 1),
        "transferred_bytes": transferred,
        "packed_bytes": packed(),
        "frames": frames.count,
        "frame_median_ms": round(frames.median_ms, 2),
        "frame_95_ms": round(frames.high_ms, 2),
        "frame_longest_ms": round(frames.longest_ms, 2),
        "tab_bytes": memory,
    }
    within = {
        "first paint, ms": (found["first_paint_ms"], LIMIT_PAINT_MS),
        "script time of the median frame, ms": (found["frame_median_ms"], LIMIT_FRAME_MS),
        "memory of the tab, MiB": (round(memory / 2**20, 1), LIMIT_TAB_MIB),
        "whole page compressed, kB": (round(found["packed_bytes"] / 1000, 1), LIMIT_PACKED_KB),
    }
    if options.json:
        print(json.dumps(found))
    else:
        for name, (value, limit) in within.items():
            print(f"{name:40} {value:>9} below {limit:g}{'' if value < limit else '  BROKEN'}")
        spread = f"{frames.count}; {frames.high_ms:.1f}; {frames.longest_ms:.1f}"
        print(f"{'frames; 95 of 100 below, longest, ms':40} {spread}")
        print(f"{'a first visit transfers, kB':40} {transferred / 1000:>9.1f}")
    if options.check and any(value >= limit for value, limit in within.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
