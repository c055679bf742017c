"""Fetches a picture from the public internet and from nowhere else.

A name is resolved once and the connection goes to the address that was checked: a second answer of the name server
never counts. Each redirect is checked like the first URL. The client is plain HTTP/1.1, one request a connection, with
no cookie, no credential and no compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeAlias
from urllib.parse import urljoin

import msgspec

from loadmaster.service.urladdress import RefusedError, Target, check_address, read_url

MAX_REDIRECTS = 3
MAX_HEADER_BYTES = 32 << 10
_CHUNK = 64 << 10
_REDIRECTS = frozenset((301, 302, 303, 307, 308))

# A host name -> its addresses as text, in the order to try.
Resolve: TypeAlias = Callable[[str], Awaitable[list[str]]]
# (address, port, name for TLS or None for plain HTTP) -> streams of a connection to exactly that address.
Connect: TypeAlias = Callable[[str, int, str | None], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class FetchError(Exception):
    """A picture that could not be fetched. ``code``: an OpenAI code; ``message``: a sentence for the sender."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class FetchLimits(msgspec.Struct, frozen=True):
    """``timeout_s``: for everything from the name to the last byte, redirects included."""

    max_bytes: int
    timeout_s: float
    max_redirects: int = MAX_REDIRECTS
    ports: frozenset[int] = frozenset((80, 443))


async def resolve(host: str) -> list[str]:
    """The addresses of a name, by the system's resolver. Raises OSError."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


async def connect(
    address: str, port: int, server_name: str | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to an address, with TLS when a name is given. Raises OSError."""
    context = None if server_name is None else ssl.create_default_context()
    # Connected and looked at before TLS says a word: an address of this machine itself is no public service.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
        if sock.getsockname()[0] == sock.getpeername()[0]:
            raise ConnectionRefusedError("the address is one of this machine")
        return await asyncio.open_connection(
            sock=sock, ssl=context, server_hostname=server_name, limit=MAX_HEADER_BYTES
        )
    except BaseException:
        sock.close()
        raise


class Fetcher:
    """Fetches pictures within limits. ``resolve`` and ``connect`` are exchanged in tests only."""

    def __init__(self, limits: FetchLimits, *, resolve: Resolve = resolve, connect: Connect = connect) -> None:
        self._limits = limits
        self._resolve = resolve
        self._connect = connect

    async def fetch(self, url: str) -> bytes:
        """The body of the answer, whatever its content type: the bytes are judged by decoding. Raises FetchError."""
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await self._follow(url)
        except TimeoutError:
            raise _failed(f"it did not come within {self._limits.timeout_s:g} s") from None
        except RefusedError as error:
            raise FetchError("invalid_image_url", f"The URL of the picture is not allowed: {error}.") from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            target = read_url(url, self._limits.ports)
            answer = await self._get(target)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(target.url, answer)
        raise _failed(f"it was redirected more than {self._limits.max_redirects} times")

    async def _addresses(self, target: Target) -> list[str]:
        """Checked addresses. One that is not public spoils all: a name has no honest reason to mix them."""
        if target.address is not None:
            answers = [target.host]
        else:
            try:
                answers = await self._resolve(target.host)
            except (OSError, UnicodeError):
                answers = []
        if not answers:
            raise _failed("its host name is not known")
        return [str(check_address(answer)) for answer in answers]

    async def _get(self, target: Target) -> bytes | str:
        """The body, or where a redirect leads."""
        reader, writer = await self._open(target)
        try:
            writer.write(
                f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\nUser-Agent: loadmaster\r\n"
                "Accept: image/*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            await writer.drain()
            status, headers = await _read_head(reader)
            if status in _REDIRECTS and "location" in headers:
                return headers["location"]
            if status != 200:
                raise _failed(f"its server answers {status}")
            return await self._body(reader, headers)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            raise _failed("its server does not answer in proper HTTP") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await writer.wait_closed()

    async def _open(self, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        server_name = target.host if target.scheme == "https" else None
        for address in await self._addresses(target):
            try:
                return await self._connect(address, target.port, server_name)
            except ssl.SSLError:
                raise _failed("its server has no valid certificate") from None
            except OSError:
                continue
        raise _failed("its server cannot be reached")

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise _failed("its server sends it compressed, unasked")
        encoding = headers.get("transfer-encoding", "").lower()
        if encoding == "chunked":
            return await self._chunks(reader)
        if encoding:
            raise ValueError("unknown transfer encoding")
        length = headers.get("content-length")
        if length is None:
            return await self._read(reader, None, 0)
        size = _digits(length, "0123456789")
        body = await self._read(reader, size, 0)
        if len(body) < size:
            raise _failed("it ended early")
        return body

    async def _read(self, reader: asyncio.StreamReader, size: int | None, before: int) -> bytes:
        """Up to ``size`` bytes, or to the end; ``before``: bytes of the picture read already."""
        if size is not None and before + size > self._limits.max_bytes:
            raise self._too_large()
        body = bytearray()
        while size is None or len(body) < size:
            piece = await reader.read(_CHUNK if size is None else min(_CHUNK, size - len(body)))
            if not piece:
                break
            body += piece
            if before + len(body) > self._limits.max_bytes:
                raise self._too_large()
        return bytes(body)

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        body = bytearray()
        while True:
            line = await reader.readuntil(b"\r\n")
            if len(line) > 1024:
                raise ValueError("chunk header too long")
            size = _digits(line.partition(b";")[0].decode("latin-1").strip(), "0123456789abcdefABCDEF")
            if size == 0:
                return bytes(body)
            piece = await self._read(reader, size, len(body))
            if len(piece) < size or await reader.readexactly(2) != b"\r\n":
                raise _failed("it ended early")
            body += piece

    def _too_large(self) -> FetchError:
        return FetchError("image_file_too_large", f"The picture has more than {self._limits.max_bytes} bytes.")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, names in lower case; informational answers are skipped. ValueError for what is no HTTP."""
    for _ in range(8):
        head = await reader.readuntil(b"\r\n\r\n")
        if len(head) > MAX_HEADER_BYTES:
            raise ValueError("header too long")
        first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        protocol, _, rest = first.partition(" ")
        if protocol not in ("HTTP/1.1", "HTTP/1.0"):
            raise ValueError("not HTTP")
        status = _digits(rest[:3], "0123456789")
        if status >= 200:
            break
    else:
        raise ValueError("no answer")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise ValueError("malformed header")
        name = name.lower()
        if name in headers and name in ("content-length", "transfer-encoding", "location"):
            raise ValueError("ambiguous header")
        headers[name] = value.strip()
    return status, headers


def _digits(text: str, allowed: str) -> int:
    if not text or len(text) > 16 or any(letter not in allowed for letter in text):
        raise ValueError("not a number")
    return int(text, 16 if "a" in allowed else 10)


def _failed(reason: str) -> FetchError:
    return FetchError("failed_to_download_image", f"The picture could not be fetched: {reason}.")
