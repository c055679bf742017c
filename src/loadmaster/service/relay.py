"""One request on its way to an engine and the answer on its way back.

A stream passes event by event: whole events at once as they come, an unfinished one held until it is whole. So an
engine that dies never leaves half an event, and every stream that is not finished ends with an error event.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec
from aiohttp import web

from loadmaster.service.backends import Backend
from loadmaster.service.errors import MESSAGES_ROUTE, RESPONSES_ROUTE, ApiError, engine_error, error_event
from loadmaster.service.gatewaysettings import CHAT_ROUTE, COMPLETIONS_ROUTE, LimitSettings
from loadmaster.service.upstream import (
    Exchange,
    FramingError,
    SilenceError,
    UpstreamError,
    connect,
    request_head,
)

MOST_EVENT_BYTES = 16 << 20
MOST_ERROR_BYTES = 1 << 20

# The events that end a whole stream, by their type; ``[DONE]`` and an error do so on every route.
_ENDS: dict[str, tuple[str, ...]] = {
    CHAT_ROUTE: (),
    COMPLETIONS_ROUTE: (),
    RESPONSES_ROUTE: ("response.completed", "response.failed", "response.incomplete"),
    MESSAGES_ROUTE: ("message_stop",),
}
_THOUGHTS = (b'"reasoning_content":"', b'"reasoning":"')  # an empty text is no thought
_EVENT_HEADS = (b"data", b"event", b"id", b"retry", b":")


class NotConnectedError(Exception):
    """The engine did not take the connection; nothing was sent."""


class Outlet(Protocol):
    """Where a streamed answer goes: to the client's connection, or into a conversation that is kept here."""

    @property
    def begun(self) -> bool:
        """Whether anything was written; then no other answer can be given."""

    async def begin(self, headers: dict[str, str]) -> None: ...

    async def write(self, part: bytes | bytearray) -> None: ...

    async def finish(self) -> None: ...

    def abort(self) -> None:
        """Whoever should read does not."""


class ClientOutlet:
    """The connection of the client that asked. ``response``: once the stream began."""

    def __init__(self, request: web.BaseRequest) -> None:
        self.request = request
        self.response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self.response is not None and self.response.prepared

    async def begin(self, headers: dict[str, str]) -> None:
        self.response = web.StreamResponse(headers=headers)
        await self.response.prepare(self.request)

    async def write(self, part: bytes | bytearray) -> None:
        if self.response is not None:
            await self.response.write(part)

    async def finish(self) -> None:
        if self.response is not None:
            await self.response.write_eof()

    def abort(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()


class Flight:
    """A request that is being answered, for those who may have to end it from outside. ``name``: the request's."""

    def __init__(self, task: asyncio.Task[object], outlet: Outlet, name: str) -> None:
        self.task = task
        self.outlet = outlet
        self.name = name
        self.exchange: Exchange | None = None
        self.stopped: ApiError | None = None
        self.writing_since: float | None = None
        self.first_byte_at: float | None = None
        self.bytes_out = 0
        self.broken = False

    def stop(self, why: ApiError) -> None:
        if self.stopped is None:
            self.stopped = why
            self.task.cancel()


def _died(why: str) -> ApiError:
    return ApiError(503, "engine_down", f"the engine broke off: {why}", retry_after=5)


def _garbage(what: str) -> ApiError:
    return ApiError(502, "engine_garbage", f"the engine answered {what}")


def fault(error: UpstreamError) -> ApiError:
    """What a failure of the exchange with the engine means to the client."""
    if isinstance(error, SilenceError):
        return ApiError(504, "engine_silent", "the engine was silent for too long")
    if isinstance(error, FramingError):
        return _garbage("with something that is not HTTP")
    return _died("its connection closed")


async def relay(
    backend: Backend, route: str, content: bytes, flight: Flight, headers: dict[str, str], limits: LimitSettings
) -> web.Response | None:
    """Send ``content`` to the engine; its answer is returned whole, or None when it went into the flight's outlet.

    Raises :class:`NotConnectedError` when nothing was sent, :class:`ApiError` when nothing was answered.
    """
    sent = backend.headers() | {"Content-Type": "application/json", "X-Request-Id": flight.name}
    head = request_head(backend.url, route, sent, len(content))
    try:
        exchange = await connect(backend.url, limits.connect_timeout_s)
    except OSError as error:
        raise NotConnectedError from error
    flight.exchange = exchange
    try:
        await exchange.send(head, content)
        del content
        status = await exchange.head()
        kind = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
        if status == 200 and kind == "text/event-stream":
            await _stream(exchange, backend, route, flight, headers)
            return None
        body = await _read(exchange, limits.max_answer_bytes if status < 400 else MOST_ERROR_BYTES)
    except UpstreamError as error:
        backend.look.set()
        raise fault(error) from error
    finally:
        exchange.close()
    if status >= 400:
        if status in (401, 403):
            raise ApiError(502, "engine_refuses_gateway", "the engine does not accept the gateway's key")
        wait = exchange.headers.get("retry-after", "")
        if wait.isascii() and wait.isdigit():
            headers = headers | {"Retry-After": wait[:6]}
        return _whole(status, engine_error(status, body, kind, route), headers, flight)
    if status != 200:
        raise _garbage(f"with status {status}")
    if kind != "application/json":
        raise _garbage(f"with {kind[:60]} instead of JSON")
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        raise _garbage("with damaged JSON") from None
    backend.answered_at = asyncio.get_running_loop().time()
    return _whole(200, body, headers, flight)


def _whole(status: int, body: bytes, headers: dict[str, str], flight: Flight) -> web.Response:
    flight.first_byte_at = asyncio.get_running_loop().time()
    flight.bytes_out = len(body)
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")


async def _read(exchange: Exchange, most: int) -> bytes:
    body = bytearray()
    while part := await exchange.read():
        body += part
        if len(body) > most:
            raise _garbage(f"with more than {most:,} bytes")
    return bytes(body)


def events_end(part: bytes | bytearray) -> int:
    """Where the last whole event of the bytes ends; 0 when none does."""
    end = part.rfind(b"\n\n") + 2
    other = part.rfind(b"\r\n\r\n") + 4
    return max(end if end > 1 else 0, other if other > 3 else 0)


def thoughts_in(events: bytes | bytearray) -> int:
    """How many of the events carry thoughts: about a token each. Some engines tell them under both names."""
    return max(events.count(name) - events.count(name + b'"') for name in _THOUGHTS)


def is_end(events: bytes | bytearray, route: str) -> bool:
    """Whether the last of these whole events ends a stream of the route: judged by its type, never by its text."""
    for event in reversed(bytes(events).replace(b"\r\n", b"\n").split(b"\n\n")):
        lines = [line.partition(b":") for line in event.lstrip(b"\xef\xbb\xbf").split(b"\n")]
        data = b"\n".join(value.removeprefix(b" ") for name, _, value in lines if name == b"data")
        if not data:
            continue  # a comment that keeps the connection open
        if data.strip() == b"[DONE]":
            return True
        try:
            value = msgspec.json.decode(data)
        except (msgspec.MsgspecError, RecursionError):
            return False
        if not isinstance(value, dict):
            return False
        return value.get("type") in ("error", *_ENDS[route]) or bool(value.get("error"))
    return False


async def _stream(exchange: Exchange, backend: Backend, route: str, flight: Flight, headers: dict[str, str]) -> None:
    loop = asyncio.get_running_loop()
    outlet = flight.outlet
    headers = headers | {
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no",
    }
    read = exchange.read
    held = bytearray()
    last: bytes | bytearray = b""
    problem: ApiError | None = None
    try:
        while True:
            try:
                part: bytes | bytearray = await read()
            except UpstreamError as error:
                problem = fault(error)
                break
            if not part:
                if held or (route in _ENDS and not is_end(last, route)):
                    problem = _died("its stream ended too early")
                break
            if held or not part.endswith(b"\n\n"):
                held += part
                end = events_end(held)
                if not end:
                    if len(held) > MOST_EVENT_BYTES:
                        problem = _garbage("with an event without an end")
                        break
                    continue
                part = held[:end]
                del held[:end]
            now = loop.time()
            if flight.first_byte_at is None:
                if not part.lstrip(b"\r\n\xef\xbb\xbf").startswith(_EVENT_HEADS):
                    problem = _garbage("with something that is no event stream")
                    break
                flight.first_byte_at = now
                await outlet.begin(headers)
            backend.answered_at = flight.writing_since = now
            await outlet.write(part)
            flight.writing_since = None
            flight.bytes_out += len(part)
            if b'"reasoning' in part:
                backend.thinking_tokens += thoughts_in(part)
            if b"data" in part:
                last = part
    except asyncio.CancelledError:
        if flight.stopped is None or not outlet.begun or flight.writing_since is not None:
            raise
        flight.task.uncancel()
        problem = flight.stopped
    if problem is not None:
        flight.broken = True
        backend.look.set()
        if not outlet.begun:
            raise problem
        await outlet.write(error_event(problem, route))
    await outlet.finish()
