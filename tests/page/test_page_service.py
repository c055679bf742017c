"""What surrounds the chat, against the real gateway: keys, the queue, the panel, languages, themes, a phone, axe."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.page.deployed import address, deployed
from tests.page.injections import injections
from tests.service.served import Served

AXE = Path(__file__).parents[1] / "data" / "axe" / "axe.min.js"
LONG_S = 30_000
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
Look = Callable[..., Any]


@pytest.fixture(scope="module")
def scripted_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real gateway before an engine whose speed is set: one request at once, two may wait."""
    home = tmp_path_factory.mktemp("scripted")
    limits = {"concurrency": 1, "queue": 2}
    with deployed(home, fake=("--tps", "40", "--tokens", "24"), limits=limits) as one:
        yield one


def serious(page: Page) -> list[str]:
    """Axe's serious and critical findings."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{one['id']}: {one['help']}: {one['nodes'][0]['target']} {one['nodes'][0].get('failureSummary', '')}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def ask(page: Page, text: str) -> None:
    page.locator("#question").fill(text)
    page.locator(".send").click()


def whole(page: Page) -> None:
    expect(page.locator(".message.assistant")).to_have_attribute("aria-busy", "false", timeout=LONG_S)


def test_both_languages_by_the_browser_and_by_choice(scripted_engine: Served, look: Look) -> None:
    with look(address(scripted_engine), locale="zh-CN") as (page, _):
        expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
        expect(page.get_by_role("heading", name="就图片提问")).to_be_visible()
        page.locator("#question").fill("桌上有什么？")
        page.get_by_role("button", name="English").click()
        expect(page.locator("html")).to_have_attribute("lang", "en")
        expect(page.get_by_role("heading", name="Ask about a picture")).to_be_visible()
        expect(page.locator("#question")).to_have_value("桌上有什么？")
        page.reload()
        expect(page.get_by_role("heading", name="Ask about a picture")).to_be_visible()
    with look(address(scripted_engine), locale="fr-FR") as (page, _):
        expect(page.locator("html")).to_have_attribute("lang", "en")


@pytest.mark.parametrize(
    ("theme", "locale", "device"),
    [
        ("light", "en-US", "desktop"),
        ("dark", "zh-CN", "desktop"),
        ("light", "zh-CN", "phone"),
        ("dark", "en-US", "phone"),
    ],
)
def test_axe_finds_nothing_serious(theme: str, locale: str, device: str, scripted_engine: Served, look: Look) -> None:
    options: dict[str, Any] = dict(PHONE) if device == "phone" else {"viewport": {"width": 1440, "height": 900}}
    with look(address(scripted_engine), color_scheme=theme, locale=locale, **options) as (page, _):
        expect(page.locator(".example").first).to_be_visible()
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        page.evaluate("document.getAnimations().forEach((one) => one.finish())")
        assert serious(page) == []
        page.locator(".example").first.click()
        expect(page.locator(".preview.ready")).to_be_visible()
        page.locator(".send").click()
        whole(page)
        if page.locator("#panel").count() == 0:
            page.locator("[aria-controls=panel]").click()
        for tab in ("load", "live", "log", "check"):
            page.locator(f"#tab-{tab}").click()
            page.wait_for_timeout(100)
            assert serious(page) == [], tab
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"


def test_nothing_is_cut_off_at_any_width(scripted_engine: Served, look: Look) -> None:
    with look(address(scripted_engine)) as (page, _):
        expect(page.locator(".send")).to_be_visible()
        for width in (320, 480, 700, 1000, 1440, 3840):
            page.set_viewport_size({"width": width, "height": 700})
            outside = page.evaluate(
                """() => [...document.querySelectorAll(".top button, .composer button, .composer textarea, .top h1")]
                    .filter((node) => { const box = node.getBoundingClientRect();
                                        return box.width > 0 && (box.left < 0 || box.right > innerWidth + 1); })
                    .map((node) => node.outerHTML.slice(0, 80))"""
            )
            assert outside == [], width
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width


def test_the_keyboard_alone_is_enough(scripted_engine: Served, look: Look) -> None:
    with look(address(scripted_engine)) as (page, _):
        expect(page.locator(".example").first).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Go to the question")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.type("Typed with keys alone")
        page.keyboard.press("Enter")
        whole(page)
        expect(page.locator(".entry.open")).to_contain_text("Typed with keys alone")
        page.locator("[aria-controls=panel]").focus()
        if page.locator("#panel").count() == 0:
            page.keyboard.press("Enter")
        page.locator("#tab-load").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#tab-live")).to_be_focused()
        expect(page.locator("#tab-live")).to_have_attribute("aria-selected", "true")
        page.keyboard.press("Escape")
        expect(page.locator("#panel")).to_have_count(0)
        assert (
            page.evaluate(
                """() => [...document.querySelectorAll("button, a[href], input:not([hidden]), textarea, select")]
                .filter((node) => !node.hidden && !(node.ariaLabel || node.textContent.trim() || node.labels?.length))
                .map((node) => node.outerHTML.slice(0, 80))"""
            )
            == []
        )


def test_reduced_motion_stills_everything(scripted_engine: Served, look: Look) -> None:
    with look(address(scripted_engine), reduced_motion="reduce") as (page, _):
        expect(page.locator(".send")).to_be_visible()
        moving = (
            "[...document.querySelectorAll('*')].filter((n) => getComputedStyle(n).transitionDuration !== '0s').length"
        )
        assert page.evaluate(moving) == 0
        assert page.evaluate("document.getAnimations().length") == 0


def test_a_hostile_answer_through_the_gateway_runs_nothing(scripted_engine: Served, look: Look) -> None:
    hostile = "\n\n".join(text for text in injections() if len(text) < 300)
    scripted_engine.fake(answers=[["hostile", hostile]], tps=3000.0)
    try:
        with look(address(scripted_engine)) as (page, _):
            ask(page, "Something hostile")
            whole(page)
            expect(page.locator(".markdown")).to_have_text(re.compile(r".{3000}", re.DOTALL))
            page.locator(".markdown a").evaluate_all(
                "(links) => links.forEach((one) => one.dispatchEvent(new MouseEvent('mouseover', { bubbles: true })))"
            )
            page.reload()
            whole(page)
            assert page.evaluate("window.owned") is None
            assert page.locator(".markdown :is(script, img, iframe, svg, style, form, object)").count() == 0
    finally:
        scripted_engine.fake(answers=[], tps=40.0)


def test_a_reload_in_mid_stream_follows_on(scripted_engine: Served, look: Look) -> None:
    scripted_engine.fake(tps=6.0, tokens=60)
    try:
        with look(address(scripted_engine)) as (page, _):
            ask(page, "Slowly, please")
            expect(page.locator(".markdown")).to_have_text(re.compile(".{6}"))
            page.reload()
            expect(page.locator(".message.assistant")).to_have_attribute("aria-busy", "true")
            before = len(page.locator(".markdown").text_content() or "")
            expect(page.locator(".markdown")).to_have_text(re.compile(f".{{{before + 6}}}"))
            whole(page)
            assert (page.locator(".markdown").text_content() or "").count("picture") == 6
    finally:
        scripted_engine.fake(tps=40.0, tokens=24)


def test_the_panel_tells_plan_state_log_and_checklist(scripted_engine: Served, look: Look) -> None:
    with look(address(scripted_engine), viewport={"width": 1440, "height": 900}) as (page, _):
        expect(page.locator(".sidebar .state")).to_contain_text("ready")
        expect(page.locator("#panel .state")).to_contain_text("ready")
        page.locator("#tab-log").click()
        expect(page.locator(".log pre")).to_contain_text("Application startup complete")
        page.locator("#tab-check").click()
        page.get_by_role("button", name="Run the check").click()
        expect(page.locator(".steps li")).not_to_have_count(0, timeout=LONG_S)
        expect(page.locator(".checklist .verdict")).to_be_visible(timeout=60_000)


def test_a_full_queue_keeps_the_question_and_waiting_shows_the_place(scripted_engine: Served, look: Look) -> None:
    scripted_engine.fake(tps=4.0, tokens=2000)
    try:
        with look(address(scripted_engine)) as (first, _), look(address(scripted_engine)) as (second, _):
            ask(first, "holds the only place")
            expect(first.locator(".markdown")).not_to_be_empty(timeout=LONG_S)
            ask(second, "waits in the queue")
            expect(second.locator(".progress")).to_contain_text("Waiting in the queue")
            with look(address(scripted_engine)) as (third, _), look(address(scripted_engine)) as (fourth, watched):
                ask(third, "waits too")
                expect(third.locator(".progress")).to_contain_text(re.compile("place 2"))
                watched.expected = ["429"]
                ask(fourth, "finds it full")
                expect(fourth.get_by_role("alert")).to_contain_text("The queue is full.")
                expect(fourth.locator("#question")).to_have_value("finds it full")
                for page in (first, second, third):
                    page.get_by_role("button", name="Stop", exact=True).click()
                expect(third.locator(".send")).to_contain_text("Send", timeout=LONG_S)
                fourth.get_by_role("button", name="Try again").click()
                expect(fourth.locator(".message.assistant")).to_have_count(1)
                fourth.get_by_role("button", name="Stop", exact=True).click()
                expect(fourth.locator("#question")).to_have_value("")
    finally:
        scripted_engine.fake(tps=40.0, tokens=24)


def test_a_server_that_goes_away_is_said_and_the_draft_stays(tmp_path: Path, look: Look) -> None:
    with deployed(tmp_path / "home", fake=()) as one, look(address(one)) as (page, watched):
        watched.expected = ["ERR_", "Failed to load"]
        expect(page.locator(".sidebar .state")).to_contain_text("ready")
        page.locator("#question").fill("still here")
        one.run("down", one.name)
        expect(page.locator(".banners")).to_contain_text("not reachable", timeout=LONG_S)
        page.locator(".send").click()
        expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
        expect(page.locator("#question")).to_have_value("still here")


def test_a_key_opens_its_own_conversations_only(tmp_path: Path, look: Look) -> None:
    keys = {"file": str(tmp_path / "keys.toml")}
    home = tmp_path / "home"
    secret = {}
    for name in ("mia", "tom"):
        command = [sys.executable, "-m", "loadmaster", "keys", "add", name, "--file", keys["file"]]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        secret[name] = next(word for word in done.stdout.split() if len(word) > 20)
    with deployed(home, fake=("--tps", "100"), keys=keys) as one, look(address(one)) as (page, watched):
        watched.expected = ["401"]
        page.get_by_role("textbox", name="Key").fill("not-a-key")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("alert")).to_contain_text("This key is not valid here.")
        page.get_by_role("textbox", name="Key").fill(secret["mia"])
        page.get_by_role("button", name="Open").click()
        ask(page, "only for mia")
        whole(page)
        expect(page.locator(".entry")).to_have_count(1)
        assert page.evaluate("document.cookie") == ""
        page.reload()
        expect(page.locator(".entry")).to_have_count(1)
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("textbox", name="Key").fill(secret["tom"])
        page.get_by_role("button", name="Open").click()
        expect(page.locator(".list .empty")).to_be_visible()


def test_a_browser_keeps_what_the_server_does_not(tmp_path: Path, look: Look) -> None:
    fake = ("--tps", "60", "--tokens", "40")
    with (
        deployed(tmp_path / "home", fake=fake, page={"storage": "browser"}) as one,
        look(address(one)) as (page, _),
    ):
        expect(page.locator(".example").first).to_be_visible()
        page.locator(".example").first.click()
        expect(page.locator(".preview.ready")).to_be_visible()
        page.locator(".send").click()
        whole(page)
        expect(page.locator(".sidebar footer")).to_contain_text("kept in this browser only")
        text = page.locator(".markdown").inner_text()
        page.reload()
        expect(page.locator(".markdown")).to_have_text(text)
        expect(page.locator(".message.user figure img")).to_have_count(1)
        ask(page, "And now?")
        expect(page.locator(".message.assistant")).to_have_count(2)
        expect(page.locator(".message.assistant").last).to_have_attribute("aria-busy", "false", timeout=LONG_S)
