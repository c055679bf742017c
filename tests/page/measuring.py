"""What the page costs: script time of each frame, memory of its tab, time to the first paint."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from msgspec import Struct
from playwright.sync_api import Browser, Page

# what runs script, as Chromium's tracing names it
SCRIPT = frozenset(
    {
        "FunctionCall",
        "EvaluateScript",
        "v8.run",
        "FireAnimationFrame",
        "RunMicrotasks",
        "TimerFire",
        "EventDispatch",
        "v8.callFunction",
    }
)
FRAME = "AnimationFrame"
CATEGORIES = ["devtools.timeline", "v8", "disabled-by-default-devtools.timeline"]


class Frames(Struct, frozen=True):
    """Script time of frames, in milliseconds of the main thread's own time."""

    count: int
    median_ms: float
    high_ms: float  # 95 of 100 are below
    longest_ms: float


def frames_of(trace: bytes) -> Frames:
    """Frames in which script ran, from a trace of one page."""
    events = json.loads(trace)["traceEvents"]
    threads: dict[tuple[int, int], int] = {}
    for one in events:
        if one["name"] == FRAME and one["ph"] == "b":
            key = one["pid"], one["tid"]
            threads[key] = threads.get(key, 0) + 1
    main = max(threads, key=lambda key: threads[key])
    mine = [one for one in events if (one["pid"], one["tid"]) == main]
    starts = sorted(one["ts"] for one in mine if one["name"] == FRAME and one["ph"] == "b")
    script = sorted((one for one in mine if one["name"] in SCRIPT and one["ph"] == "X"), key=lambda one: one["ts"])
    spent = [0.0] * (len(starts) + 1)
    inside = 0
    place = 0
    for one in script:
        if one["ts"] < inside:
            continue  # within one that is counted already
        inside = one["ts"] + one.get("dur", 0)
        while place < len(starts) and starts[place] <= one["ts"]:
            place += 1
        spent[place] += one.get("tdur", one.get("dur", 0)) / 1000
    busy = sorted(time for time in spent[1:] if time > 0.05)
    return Frames(len(busy), statistics.median(busy), busy[int(len(busy) * 0.95)], busy[-1])


def tab_bytes(browser: Browser) -> int:
    """Private memory of the largest tab process."""
    session = browser.new_browser_cdp_session()
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    return max(_private(one["id"]) for one in found if one["type"] == "renderer")


def _private(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def first_paint_ms(page: Page) -> float:
    """From the start of the load to the first contentful paint."""
    found: Any = page.wait_for_function(
        "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    ).json_value()
    return float(found)


def long_answer(letters: int) -> str:
    """Prose, tables, code and lists, as a talkative model writes them."""
    part = (
        "## Section {n}\n\nA paragraph with **strong** and *soft* words, `code`, a [link](https://example.org/{n}) and "
        "enough text to wrap over some lines of the page, as answers about pictures tend to do when one asks for detail.\n\n"
        "| part | bytes | share |\n|---|---:|---:|\n"
        + "".join(f"| row {row} of {{n}} | {row * 1021:,} | {row} % |\n" for row in range(12))
        + "\n```python\n" + "".join(f"def step_{row}(value):\n    return value * {row}\n" for row in range(10)) + "```\n\n"
        + "".join(f"{row + 1}. point {row} of section {{n}}\n" for row in range(8)) + "\n"
    )  # fmt: skip
    text = ""
    number = 0
    while len(text) < letters:
        number += 1
        text += part.replace("{n}", str(number))
    return text[:letters]
