"""Opens a gateway inside a test, in the test's own event loop, and talks to it over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from loadmaster.service.connections import Listener
from loadmaster.service.gateway import GATEWAY, Gateway, create_app
from loadmaster.service.gatewaysettings import BackendSettings, GatewaySettings, LimitSettings, ProbeSettings

CHAT = "/v1/chat/completions"
QUICK = ProbeSettings(interval_s=0.1, timeout_s=1.0, failures=2, answer_timeout_s=1.0, answer_fresh_s=0.5)
PATIENCE_S = 15.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]  # names in small letters
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str:
        code: str = self.json["error"]["code"]
        return code

    @property
    def events(self) -> list[bytes]:
        return [event.removeprefix(b"data: ") for event in self.body.split(b"\n\n") if event]


@dataclass
class Open:
    """A gateway that listens. ``url`` has no slash at its end."""

    url: str
    port: int
    gateway: Gateway
    session: aiohttp.ClientSession

    async def ask(self, method: str, path: str, *, json: Any = None, data: Any = None, **headers: str) -> Answer:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if json is not None:
            data = msgspec.json.encode(json)
            sent.setdefault("Content-Type", "application/json")
        async with self.session.request(method, self.url + path, data=data, headers=sent) as answer:
            return Answer(
                answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read()
            )

    async def chat(self, text: str = "Hello", *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        body = {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}
        return await self.ask("POST", CHAT, json=body, **(headers or {}))

    async def raw(self, content: bytes, *, end: bool = False) -> bytes:
        """Send bytes as they are and read until the gateway closes; ``end``: close the sending side."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(content)
            if end:
                writer.write_eof()
            async with asyncio.timeout(PATIENCE_S):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


def one_backend(url: str, **fields: Any) -> tuple[BackendSettings, ...]:
    return (BackendSettings(model="fake", url=url, **fields),)


@asynccontextmanager
async def gateway(
    backends: tuple[BackendSettings, ...],
    *,
    limits: LimitSettings = LimitSettings(),  # noqa: B008 - frozen
    probes: ProbeSettings = QUICK,
    **fields: Any,
) -> AsyncIterator[Open]:
    settings = GatewaySettings(backends=backends, port=0, limits=limits, probes=probes, **fields)
    app = create_app(settings)
    listener = Listener(app, settings)
    await listener.open()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
            yield Open(f"http://127.0.0.1:{listener.port}", listener.port, app[GATEWAY], session)
    finally:
        await listener.close()


async def soon(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Wait until it holds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE_S
    while True:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        assert loop.time() < end, f"{what} did not come about"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def scripted(*parts: bytes, pause_s: float = 0.0, cut: bool = False) -> AsyncIterator[str]:
    """An engine that lists its model and answers everything else with these bytes; its URL.

    ``cut``: reset the connection after them.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"GET /v1/models" in head:
                body = b'{"data": [{"id": "fake"}]}'
                writer.write(HEAD.replace(b"text/event-stream", b"application/json") + b"%x\r\n" % len(body))
                writer.write(body + b"\r\n0\r\n\r\n")
            else:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
                if cut:
                    writer.transport.abort()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
