"""A gateway with its page inside a test, and a browser's part: cookies, origin, server-sent events."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from loadmaster.service.gatewaysettings import BackendSettings, PageSettings
from loadmaster.service.imagepool import ImagePool, Outcome
from loadmaster.service.images import ImageRules, apply
from tests.gateways import Answer, Open, gateway, soon
from tests.running import Running

RULES = ImageRules(max_pixels=1024 * 1024, max_images=4)


@dataclass
class Event:
    name: str
    data: Any


class Events:
    """The events of a stream that is open."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self._rest = b""

    async def next(self) -> Event | None:
        """The next event, None at the end."""
        while b"\n\n" not in self._rest:
            part = await self.response.content.readany()
            if not part:
                return None
            self._rest += part
        block, _, self._rest = self._rest.partition(b"\n\n")
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line and line[:1] != b":")
        if b"data" not in fields:
            return await self.next()
        return Event(fields[b"event"].decode(), msgspec.json.decode(fields[b"data"]))

    async def until(self, name: str) -> list[Event]:
        """All events up to the first of this name, which is the last in the list."""
        found: list[Event] = []
        async with asyncio.timeout(15):
            while True:
                event = await self.next()
                assert event is not None, [one.name for one in found]
                found.append(event)
                if event.name == name:
                    return found

    async def rest(self) -> list[Event]:
        found: list[Event] = []
        async with asyncio.timeout(15):
            while (event := await self.next()) is not None:
                found.append(event)
        return found


def text_of(events: list[Event], kind: str = "text") -> str:
    """What the deltas add up to, as the page puts them together."""
    text = ""
    for event in events:
        if event.name == "delta" and kind in event.data:
            text = text[: event.data["at"]] + event.data[kind]
    return text


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Browser:
    """One visitor with cookies of their own; sends what a browser sends with each request of the page."""

    def __init__(self, opened: Open, **headers: str) -> None:
        self._open = opened
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.CookieJar(unsafe=True), timeout=aiohttp.ClientTimeout(total=20)
        )
        self.headers = {"Origin": opened.url, "Sec-Fetch-Site": "same-origin", **headers}

    async def close(self) -> None:
        await self._session.close()

    @property
    def cookies(self) -> list[Any]:
        return list(self._session.cookie_jar)

    async def ask(self, method: str, path: str, json: Any = None, data: Any = None, **headers: str) -> Answer:
        sent = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        if json is not None:
            data = msgspec.json.encode(json)
            sent.setdefault("Content-Type", "application/json")
        async with self._session.request(method, self._open.url + path, data=data, headers=sent) as answer:
            return Answer(
                answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read()
            )

    @asynccontextmanager
    async def stream(self, method: str, path: str, json: Any = None) -> AsyncIterator[Events]:
        sent = dict(self.headers)
        data = None
        if json is not None:
            data = msgspec.json.encode(json)
            sent["Content-Type"] = "application/json"
        async with self._session.request(method, self._open.url + path, data=data, headers=sent) as answer:
            assert answer.status == 200, await answer.text()
            yield Events(answer)

    async def put_picture(self, data: bytes, kind: str = "image/png") -> Answer:
        return await self.ask("PUT", f"/api/pictures/{sha256(data)}", data=data, Content_Type=kind)

    async def new(self) -> str:
        answer = await self.ask("POST", "/api/conversations", json={})
        assert answer.status == 201, answer.body
        number: str = answer.json["id"]
        return number

    async def answer(self, number: str, **fields: Any) -> list[Event]:
        """Ask and wait for the whole answer."""
        async with self.stream("POST", f"/api/conversations/{number}/answer", {"model": "fake", **fields}) as events:
            return await events.rest()


@asynccontextmanager
async def page(
    engine: Running | str, folder: Path | None, *, page_fields: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[tuple[Open, Browser]]:
    """A gateway with a page in front of a fake engine. ``folder`` None: browsers keep the conversations."""
    pool = ImagePool(workers=1)

    async def look_at(content: bytes) -> Outcome:
        return await pool.convert_bytes(content, RULES)

    async def rules(messages: list[Any]) -> tuple[list[Any], list[str]]:
        return await apply(messages, RULES, pool)

    settings: dict[str, Any] = {
        "deployment": "test",
        "database": None if folder is None else str(folder / "conversations.db"),
        "look_at": look_at,
        "max_images": RULES.max_images,
        "max_pixels": RULES.max_pixels,
    }
    backend = BackendSettings(
        model="fake",
        url=engine if isinstance(engine, str) else engine.url,
        concurrency=fields.pop("concurrency", 8),
        state_file=fields.pop("state_file", None),
    )
    async with gateway(
        (backend,),
        image_rules=rules,
        closing=pool.stop,
        page=PageSettings(**(settings | (page_fields or {}))),
        **fields,
    ) as opened:
        browser = Browser(opened)
        try:
            await soon(lambda: next(iter(opened.gateway.backends.groups.values())).backends[0].up, "the engine")
            yield opened, browser
        finally:
            await browser.close()
