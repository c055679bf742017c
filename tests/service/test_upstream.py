"""Answers of engines, cut anywhere: understood the same, and never waited for when they cannot come."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.service.upstream import (
    MOST_WAITING_BYTES,
    ClosedError,
    Exchange,
    FramingError,
    SilenceError,
    UpstreamError,
    connect,
    request_head,
)


class Wire(asyncio.Transport):
    """A transport that remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.aborted = False
        self.written = b""

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def write(self, data: Any) -> None:
        self.written += bytes(data)


def chunked(parts: list[bytes], extension: bytes = b"") -> bytes:
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n\r\n"


async def understood(pieces: list[bytes], *, closes: bool) -> tuple[int, bytes]:
    exchange, wire = Exchange(), Wire()
    exchange.connection_made(wire)
    for piece in pieces:
        exchange.data_received(piece)
    if closes:
        exchange.connection_lost(None)
    async with asyncio.timeout(2):
        status = await exchange.head()
        body = b""
        while part := await exchange.read():
            body += part
    return status, body


def cut(content: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(content) + 1) for place in places} | {0, len(content)})
    return [content[a:b] for a, b in itertools.pairwise(ends)]


@given(
    parts=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    places=st.lists(st.integers(0, 1000), max_size=12),
    framing=st.sampled_from(["chunked", "extended", "length", "closing"]),
    interim=st.booleans(),
)
def test_the_same_wherever_it_is_cut(parts: list[bytes], places: list[int], framing: str, interim: bool) -> None:
    body = b"".join(parts)
    if framing in ("chunked", "extended"):
        head, rest = b"Transfer-Encoding: chunked\r\n", chunked(parts, b"; a=b" if framing == "extended" else b"")
    elif framing == "length":
        head, rest = b"Content-Length: %d\r\n" % len(body), body
    else:
        head, rest = b"", body
    content = b"HTTP/1.1 200 OK\r\nServer: x\r\n" + head + b"\r\n" + rest
    if interim:
        content = b"HTTP/1.1 100 Continue\r\n\r\n" + content
    assert asyncio.run(understood(cut(content, places), closes=framing == "closing")) == (200, body)


@given(content=st.binary(max_size=300), places=st.lists(st.integers(0, 300), max_size=5))
def test_any_bytes_end_in_an_answer_or_an_error(content: bytes, places: list[int]) -> None:
    for begin in (b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 200 OK\r\n"):
        try:
            asyncio.run(understood(cut(begin + content, places), closes=True))
        except UpstreamError:
            continue


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", ClosedError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", ClosedError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", FramingError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\nabc", FramingError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", FramingError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", FramingError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", FramingError),
        (b"HTTP/1.1 200 OK\r\nno header\r\n\r\n", FramingError),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", FramingError),
        (b"HTTP/1.1 20 OK\r\n\r\n", FramingError),
        (b"SSH-2.0-OpenSSH\r\n", FramingError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, FramingError),
        (b"", ClosedError),
    ],
)
def test_what_is_no_answer(content: bytes, kind: type[UpstreamError]) -> None:
    with pytest.raises(kind):
        asyncio.run(understood([content] if content else [], closes=True))


def test_an_engine_faster_than_its_client_has_to_wait() -> None:
    async def scene() -> None:
        exchange, wire = Exchange(), Wire()
        exchange.connection_made(wire)
        exchange.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n")
        while wire.reading:
            exchange.data_received(b"x" * 65_536)
        exchange.check(0.0)  # it is we who do not read: no silence of the engine
        assert MOST_WAITING_BYTES < len(await exchange.read()) <= MOST_WAITING_BYTES + 65_536
        assert wire.reading
        await asyncio.sleep(0.01)
        exchange.check(0.001)
        with pytest.raises(SilenceError):
            await exchange.read()
        assert wire.aborted

    asyncio.run(scene())


def test_an_early_answer_ends_the_sending() -> None:
    content = b"x" * 20_000_000

    async def scene() -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            await left.wait()
            writer.transport.abort()
            done.set()

        left, done = asyncio.Event(), asyncio.Event()
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        exchange = await connect(url, 2.0)
        async with asyncio.timeout(5):
            await exchange.send(request_head(url, "/x", {}, len(content)), content)
            assert await exchange.head() == 413
        exchange.close()
        left.set()
        await done.wait()
        server.close()

    asyncio.run(scene())


def test_a_head_cannot_be_broken_out_of() -> None:
    assert request_head("http://h:1/base", "/v1/x", {"A": "b"}, 3) == (
        b"POST /base/v1/x HTTP/1.1\r\nHost: h:1\r\nContent-Length: 3\r\nA: b\r\nConnection: close\r\n\r\n"
    )
    with pytest.raises(ValueError, match="line end"):
        request_head("http://h", "/x", {"Authorization": "Bearer a\r\nX: y"}, 0)
