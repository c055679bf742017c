"""A very long answer through the real gateway: the page stays quick and small while it streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, expect

from tests.page.deployed import address, deployed
from tests.page.measuring import CATEGORIES, frames_of, long_answer, tab_bytes

LETTERS = 100_000
MOST_FRAME_MS = 16.0
MOST_TAB_BYTES = 200 << 20


def test_a_hundred_thousand_letters_stream_smoothly(tmp_path: Path, browser: Browser, look: Callable[..., Any]) -> None:
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps([["everything", long_answer(LETTERS)]]))
    limits = {"max_body_bytes": 32 << 20}
    with (
        deployed(tmp_path / "home", fake=("--tps", "2500", "--answers", str(answers)), gateway=limits) as one,
        look(address(one)) as (page, _),
    ):
        page.locator("#question").fill("Tell me everything.")
        browser.start_tracing(page=page, categories=CATEGORIES)
        page.locator(".send").click()
        expect(page.locator(".message.assistant")).to_have_attribute("aria-busy", "false", timeout=90_000)
        trace = browser.stop_tracing()
        shown = page.locator(".markdown").text_content() or ""
        assert len(shown) > LETTERS * 0.7
        assert page.locator(".markdown > *").count() > 300
        frames = frames_of(trace)
        assert frames.count > 30
        assert frames.median_ms < MOST_FRAME_MS, frames
        assert tab_bytes(browser) < MOST_TAB_BYTES
        # nothing above moved: the view followed to the end
        assert page.locator(".thread").evaluate("(n) => n.scrollHeight - n.scrollTop - n.clientHeight") < 60
