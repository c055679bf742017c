"""Where Chromium is, and how it is started here: without its sandbox, which root may not have."""

from __future__ import annotations

import shutil

from playwright.sync_api import Browser, Playwright

ARGUMENTS = (
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--enable-precise-memory-info",
    "--js-flags=--expose-gc",
)


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


def launched(playwright: Playwright, path: str) -> Browser:
    return playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
