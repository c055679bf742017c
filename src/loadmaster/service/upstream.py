"""One request to an engine over a connection of its own, and its answer as it comes.

Written for what engines send (HTTP/1.1, a length, chunks, or an end by closing) and nothing else: a token of a stream
costs a fraction of what a general client needs for it. A connection serves one request: engines close idle ones when
they like, and a request that runs into that must not be sent twice. Whatever is not HTTP ends the exchange.
"""

from __future__ import annotations

import asyncio
import re
from urllib.parse import urlsplit

MOST_HEAD_BYTES = 1 << 16
MOST_WAITING_BYTES = 1 << 18  # of an answer that the client has not read yet; then the engine has to wait
_SLICE = 1 << 18

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: .*)?")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)


class UpstreamError(Exception):
    """The exchange ended too early."""


class ClosedError(UpstreamError):
    """The engine closed the connection before the answer was whole."""


class FramingError(UpstreamError):
    """What came is not HTTP."""


class SilenceError(UpstreamError):
    """Nothing came for too long."""


class Exchange(asyncio.Protocol):
    """The answer: ``status`` and ``headers`` (names in small letters) once :meth:`head` returns, then its body."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.heard_at = self._loop.time()
        self._raw = bytearray()  # received and not understood yet
        self._body: list[bytes] = []
        self._waiting = 0
        self._paused = False
        self._state = self._head
        self._left = 0  # bytes of the chunk or of the body that are still to come
        self._done = False
        self._error: UpstreamError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._writable = True

    # ------------------------------------------------------------------------------------- for the caller

    async def send(self, head: bytes, content: bytes) -> None:
        """Send a request. An engine that answers or leaves before it is whole is no error here."""
        transport = self._transport
        if transport is None or self._error is not None:
            return
        if len(content) <= _SLICE:
            transport.write(head + content)
            return
        transport.write(head)
        view = memoryview(content)
        for place in range(0, len(view), _SLICE):
            if self._error is not None or self.status or transport.is_closing():
                return
            transport.write(view[place : place + _SLICE])
            if not self._writable:
                self._writer = self._loop.create_future()
                await self._writer
        self.heard_at = self._loop.time()

    async def head(self) -> int:
        """The answer's status. Raises :class:`UpstreamError`."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._more()
        return self.status

    async def read(self) -> bytes:
        """What has come of the body since, empty at its end. Raises :class:`UpstreamError`."""
        while not self._body:
            if self._done:
                return b""
            if self._error is not None:
                raise self._error
            await self._more()
        parts, self._body = self._body, []
        self._waiting = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
            self.heard_at = self._loop.time()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check(self, longest_silence_s: float) -> None:
        """End the exchange when nothing came for so long though we would have read it."""
        if not self._paused and not self._done and self._loop.time() - self.heard_at > longest_silence_s:
            self._fail(SilenceError("nothing came"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def _more(self) -> None:
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    # ----------------------------------------------------------------------------------- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        if self._done or self._error is not None:
            return
        if self._raw:
            self._raw += data
        else:
            self._raw = bytearray(data)
        try:
            while self._raw and not self._done and self._state():
                pass
        except FramingError as error:
            self._fail(error)
            return
        if self._waiting > MOST_WAITING_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writable = True
        if self._state == self._until_closed and exc is None and self._error is None:
            self._done = True
        elif not self._done and self._error is None:
            self._error = ClosedError("the connection closed")
        self._wake()
        self._let_write()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._let_write()

    def _let_write(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
        self._writer = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        if self._error is None:
            self._error = error
        self.close()
        self._wake()
        self._let_write()

    # ------------------------------------------------------------------------------- states: True to go on

    def _head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > MOST_HEAD_BYTES or not b"HTTP/1.".startswith(bytes(self._raw[:7])):
                raise FramingError("the answer does not begin as HTTP does")
            return False
        lines = bytes(self._raw[:end]).split(b"\r\n")
        del self._raw[: end + 4]
        match = _STATUS.fullmatch(lines[0])
        if match is None or end > MOST_HEAD_BYTES:
            raise FramingError("the answer does not begin as HTTP does")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or not name or name != name.strip():
                raise FramingError("a header of the answer is none")
            key, text = name.decode("latin-1").lower(), value.strip().decode("latin-1")
            if key in ("content-length", "transfer-encoding") and headers.get(key, text) != text:
                raise FramingError("the answer has two lengths")
            headers[key] = text
        status = int(match[1])
        if status < 200:
            if status == 101:
                raise FramingError("the engine wants another protocol")
            return True  # an interim answer: the real one follows
        self.headers = headers
        self._frame(status)
        self.status = status
        self._let_write()  # whatever of the request is not sent yet is not wanted
        return True

    def _frame(self, status: int) -> None:
        coding = self.headers.get("transfer-encoding", "").lower()
        if status in (204, 304):
            self._done = True
        elif coding == "chunked":
            self._state = self._size
        elif coding:
            raise FramingError("the answer comes in an unknown coding")
        elif "content-length" in self.headers:
            length = self.headers["content-length"]
            if not (length.isascii() and length.isdigit() and len(length) < 16):
                raise FramingError("the answer's length is none")
            self._left = int(length)
            self._state = self._counted
            self._done = self._left == 0
        else:
            self._state = self._until_closed

    def _take(self, size: int) -> None:
        """Move bytes of the body to the reader."""
        raw = self._raw
        if size == len(raw):
            part = bytes(raw)
            self._raw = bytearray()
        else:
            part = bytes(raw[:size])
            del raw[:size]
        self._body.append(part)
        self._waiting += size

    def _counted(self) -> bool:
        size = min(self._left, len(self._raw))
        self._left -= size
        self._take(size)
        self._done = self._left == 0
        return False

    def _until_closed(self) -> bool:
        self._take(len(self._raw))
        return False

    def _size(self) -> bool:
        end = self._raw.find(b"\r\n")
        if end < 0:
            if len(self._raw) > 4096:
                raise FramingError("a chunk has no size")
            return False
        match = _SIZE.fullmatch(self._raw, 0, end)
        if match is None:
            raise FramingError("a chunk has no size")
        self._left = int(match[1], 16)
        del self._raw[: end + 2]
        self._state = self._chunk if self._left else self._trailer
        return True

    def _chunk(self) -> bool:
        size = min(self._left, len(self._raw))
        self._left -= size
        self._take(size)
        if self._left == 0:
            self._state = self._chunk_end
        return True

    def _chunk_end(self) -> bool:
        if len(self._raw) < 2:
            return False
        if not self._raw.startswith(b"\r\n"):
            raise FramingError("a chunk is longer than its size")
        del self._raw[:2]
        self._state = self._size
        return True

    def _trailer(self) -> bool:
        end = self._raw.find(b"\r\n")
        if end < 0:
            if len(self._raw) > MOST_HEAD_BYTES:
                raise FramingError("the answer does not end")
            return False
        del self._raw[: end + 2]
        self._done = end == 0
        return True


async def connect(url: str, timeout_s: float) -> Exchange:
    """A connection for one request to the engine at ``url``. Raises OSError, TimeoutError included."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        _, exchange = await loop.create_connection(
            Exchange, parts.hostname or "", parts.port or (443 if secure else 80), ssl=True if secure else None
        )
    return exchange


def request_head(url: str, route: str, headers: dict[str, str], length: int) -> bytes:
    """The head of a POST. Raises ValueError for a header that would break out of its line."""
    parts = urlsplit(url)
    lines = [f"POST {parts.path}{route} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line or "\0" in line for line in lines):
        raise ValueError("a header has a line end")
    return ("\r\n".join(lines) + "\r\nConnection: close\r\n\r\n").encode("latin-1")
