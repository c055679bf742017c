"""One browser for each module: Debian's Chromium, driven by Playwright. Nothing is ever downloaded for it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.page.chromium import chromium, launched
from tests.page.scripted import Script, ScriptedServer

PATIENCE_MS = 20_000  # a busy machine with two cores; what works takes a fraction of it


@pytest.fixture(scope="module")  # a longer life would leave its event loop to tests that start their own
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        words = "these tests need Chromium: apt-get install --no-install-recommends chromium fonts-noto-cjk"
        if os.environ.get("CI") == "true":
            pytest.fail(words)
        pytest.skip(words)
    with sync_playwright() as playwright:
        browser = launched(playwright, path)
        yield browser
        browser.close()


class Watched:
    """A page whose console, errors and requests are kept; ``check`` fails when one of them is not as it should be."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.expected: list[str] = []  # parts of console errors that the test causes itself
        self.problems: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", lambda request: self._request(request.url))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(part in message.text for part in self.expected):
            self.problems.append(f"{message.type}: {message.text}")

    def _request(self, url: str) -> None:
        if not url.startswith((self.origin, "blob:", "data:")):
            self.problems.append(f"a request left the server: {url}")

    def check(self) -> None:
        assert not self.problems, "\n".join(self.problems)


@contextmanager
def opened(browser: Browser, url: str, path: str = "/", **options: Any) -> Iterator[tuple[Page, Watched]]:
    """A page in a context of its own; at the end nothing may have gone wrong in its console or left the server."""
    options.setdefault("locale", "en-US")
    options.setdefault("viewport", {"width": 1280, "height": 800})
    context: BrowserContext = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page = context.new_page()
    watched = Watched(page, url)
    try:
        page.goto(url + path)
        yield page, watched
        watched.check()
    finally:
        context.close()


@contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    """The scripted server in a thread of its own; Playwright keeps this one."""
    server = ScriptedServer(script)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.open(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_ended(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _ended(server: ScriptedServer) -> None:
    await server.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def scripted(script: Script) -> Iterator[ScriptedServer]:
    with scripted_server(script) as server:
        yield server


@pytest.fixture
def look(browser: Browser) -> Callable[..., AbstractContextManager[tuple[Page, Watched]]]:
    def at(url: str, path: str = "/", **options: Any) -> AbstractContextManager[tuple[Page, Watched]]:
        return opened(browser, url, path, **options)

    return at
