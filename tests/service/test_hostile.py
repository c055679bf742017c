"""Requests that mean harm: none is answered with an error of ours, none costs much, and the next good one is answered."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import random
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.running import fake_engine

CHAT = "/v1/chat/completions"
REQUESTS = 500
MIB = 1 << 20
MOST_RISE_BYTES = 150 * MIB
MAX_BODY = 16 * MIB
ROUTES = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize")

PROGRAM = f"""
import sys
from loadmaster.service.gateway import serve
from loadmaster.service.gatewaysettings import BackendSettings, GatewaySettings, LimitSettings
from loadmaster.service.images import ImagePool, ImageRules, apply
pool = ImagePool()
rules = ImageRules(max_pixels=250_000, max_images=2, timeout_s=5.0)
async def convert(messages):
    return await apply(messages, rules, pool)
serve(
    GatewaySettings(
        backends=(BackendSettings(model="fake", url=sys.argv[1], concurrency=4),),
        port=0,
        limits=LimitSettings(max_body_bytes={MAX_BODY}, body_idle_timeout_s=0.5, idle_connection_s=10.0, drain_s=1.0),
        image_rules=convert,
        closing=pool.stop,
    ),
    lambda url: print(url, flush=True),
)
"""

# Ways to write an address that a gateway must not ask. None may lead to a connection, so all are refused unread.
SPELLINGS = (
    "http://127.0.0.1/x.png",
    "http://localhost/x.png",
    "http://127.1/x.png",
    "http://2130706433/x.png",
    "http://0x7f000001/x.png",
    "http://0177.0.0.1/x.png",
    "http://[::1]/x.png",
    "http://[::ffff:127.0.0.1]/x.png",
    "http://[0:0:0:0:0:ffff:7f00:1]/x.png",
    "http://0/x.png",
    "http://0.0.0.0/x.png",
    "http://169.254.169.254/latest/meta-data/",
    "http://metadata.google.internal/",
    "http://10.0.0.1/x.png",
    "http://192.168.0.1/x.png",
    "http://[fd00::1]/x.png",
    "http://user:pass@127.0.0.1/x.png",
    "http://127.0.0.1%2f@example.org/x.png",
    "HTTP://LOCALHOST:8000/v1/models",
    "file:///etc/passwd",
    "file://localhost/etc/passwd",
    "gopher://127.0.0.1:6379/_INFO",
    "ftp://127.0.0.1/x",
    "//127.0.0.1/x.png",
    "\thttp://127.0.0.1/x.png",
    "http:\\\\127.0.0.1\\x.png",
    "http://①②⑦.⓪.⓪.①/x.png",
)


def png(width: int, height: int, rows: bytes) -> bytes:
    def block(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", head) + block(b"IDAT", zlib.compress(rows, 9)) + block(b"IEND", b"")


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


GOOD_PICTURE = data_url(png(8, 8, (b"\0" + b"\xff\0\0" * 8) * 8))
BOMBS = (
    data_url(png(60_000, 60_000, b"\0" * 100_000)),
    data_url(png(7_000, 7_000, b"\0" * 100_000)),
    data_url(png(2, 2, b"\0" * (32 * MIB))),
    data_url(png(0xFFFFFFFF, 1, b"")),
    data_url(b"\x89PNG\r\n\x1a\n" + b"\xff" * 1000),
    data_url(gzip.compress(b"\0" * MIB), "image/svg+xml"),
    data_url(b"GIF89a" + b"\xff\xff\xff\xff" + b"\0" * 50, "image/gif"),
    "data:image/png;base64,!!!!",
    "data:image/png,%00%00",
    "data:;base64,",
    "data:",
)


def message(content: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}]}


def good() -> dict[str, Any]:
    return message("Hello") | {"max_tokens": 2}


def post(body: bytes | str, path: str = CHAT, *, headers: tuple[str, ...] = (), length: int | None = None) -> bytes:
    content = body.encode() if isinstance(body, str) else body
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(content) if length is None else length}",
        *headers,
    ]
    return "\r\n".join((*lines, "", "")).encode("utf-8", "surrogateescape") + content


def head(*lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join((*lines, "", "")).encode("latin-1", "replace") + body


class Visit:
    """One visit: bytes to send, how long to stay, whether to read. ``may_be_silent``: no answer is fine."""

    def __init__(
        self, content: bytes, *, stay: bool = True, read: bool = True, may_be_silent: bool = False, slowly: bool = False
    ) -> None:
        self.content = content
        self.stay = stay
        self.read = read
        self.may_be_silent = may_be_silent
        self.slowly = slowly


def malformed(chance: random.Random) -> Visit:
    text = json.dumps(good())
    ways: tuple[bytes, ...] = (
        text[: chance.randrange(len(text))].encode(),
        chance.randbytes(chance.randrange(1, 2000)),
        b"\xef\xbb\xbf" + text.encode(),
        text.replace("Hello", "\\ud800").encode(),
        text.encode().replace(b"Hello", b"\xc0\x80\xff"),
        text.replace(
            "2}", f"{chance.choice(('NaN', 'Infinity', '-Infinity', '1e999', '9' * 5000, '+1', '01'))}}}"
        ).encode(),
        text.replace('"', "'").encode(),
        (text + chance.choice((text, "x", "\0", "]"))).encode(),
        text.replace("Hello", "a\0b\nc").encode(),
        text.encode("utf-16"),
        b"",
        b" " * chance.randrange(1, 100_000),
        b'{"messages": [], "messages": [{"role": "user", "content": "x"}], "messages": 7}',
    )
    return Visit(post(chance.choice(ways), chance.choice(ROUTES)))


def wrong_types(chance: random.Random) -> Visit:
    odd: tuple[Any, ...] = (
        None, True, 0, -1, 1.5, 10**18, 10**25, "", "x", "x" * 10_000, [], [[]], [None], [1, "x"], {}, {"a": {}}, [{}],
        [{"role": "user"}], [{"role": 1, "content": "x"}], [{"role": "user", "content": [1]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": {"type": "text"}}],
    )  # fmt: skip
    fields = (
        "messages", "model", "prompt", "input", "stream", "n", "max_tokens", "temperature", "top_p", "best_of",
        "system", "tools", "stop", "stream_options", "seed", "logit_bias", "response_format",
    )  # fmt: skip
    body: dict[str, Any] = good()
    for _ in range(chance.randrange(1, 4)):
        body[chance.choice(fields)] = chance.choice(odd)
    if chance.random() < 0.2:
        return Visit(post(json.dumps(chance.choice(odd)), chance.choice(ROUTES)))
    return Visit(post(json.dumps(body), chance.choice(ROUTES)))


def nested(chance: random.Random) -> Visit:
    depth = chance.choice((50, 500, 5_000, 100_000))
    opened, closed = chance.choice((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")))
    core = opened * depth + "1" + closed * depth
    return Visit(post(f'{{"model": "fake", "messages": {core}}}' if chance.random() < 0.5 else core))


def giant(chance: random.Random) -> Visit:
    way = chance.randrange(6)
    if way == 0:
        return Visit(post(b"{", length=chance.choice((MAX_BODY + 1, 10**12, 10**18))))
    if way == 1:
        part = b"x" * MIB
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for _ in range(MAX_BODY // MIB + 2)) + b"0\r\n\r\n"
        lines = (f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
        return Visit(head(*lines, "Transfer-Encoding: chunked", body=body), may_be_silent=True)
    fillers = ("[],", "{},", '"",', "0,", '{"a":1},')
    if way == 2:
        many = "[" + chance.choice(fillers) * chance.choice((150_000, 3_000_000)) + "0]"
        return Visit(post(many), may_be_silent=len(many) > MAX_BODY)
    if way == 3:
        content = [{"type": "text", "text": "x"}] * 190_000
        return Visit(post(json.dumps(message(content))))
    if way == 4:
        return Visit(post(json.dumps(message("x" * (MAX_BODY - 200)))))
    return Visit(post(json.dumps({"model": "x" * MIB, "messages": [{"role": "y" * MIB, "content": "z"}]})))


@lru_cache
def packed_bomb() -> bytes:
    return gzip.compress(b" " * (64 * MIB) + json.dumps(good()).encode())


def bomb(chance: random.Random) -> Visit:
    if chance.random() < 0.3:
        packed = packed_bomb()
        coding = chance.choice(("gzip", "deflate", "br", "gzip, gzip", "zstd"))
        return Visit(post(packed, headers=(f"Content-Encoding: {coding}",)))
    parts = [{"type": "image_url", "image_url": {"url": chance.choice(BOMBS)}} for _ in range(chance.randrange(1, 3))]
    return Visit(post(json.dumps(message(parts))))


def forged(chance: random.Random) -> Visit:
    url = chance.choice(SPELLINGS)
    part = chance.choice(
        (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"image_url": url},
            {"type": "input_image", "image_url": url},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "audio_url", "audio_url": {"url": url}},
            {"type": "text", "text": "x", "image_url": url, "uuid": "1"},
            {"type": "image", "source": {"type": "url", "url": url}},
            {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": url}}]},
            {"type": "input_file", "file_url": url},
        )
    )
    path = chance.choice((CHAT, "/v1/messages", "/tokenize", "/v1/embeddings", "/v1/responses"))
    body = message([part])
    if path == "/v1/responses":
        body["input"] = body.pop("messages")
    return Visit(post(json.dumps(body), path))


def headers(chance: random.Random) -> Visit:
    body = json.dumps(good()).encode()
    size = f"Content-Length: {len(body)}"
    first, host, kind = f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json"
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    tricks: tuple[bytes, ...] = (
        head(first, host, kind, size, f"Content-Length: {len(body) + 5}", body=body),
        head(first, host, kind, size, "Transfer-Encoding: chunked", body=chunked),
        head(first, host, kind, "Transfer-Encoding: chunked", "Transfer-Encoding: identity", body=chunked),
        head(first, host, kind, "Transfer-Encoding: xchunked", body=chunked),
        head(first, host, kind, "Transfer-Encoding : chunked", body=chunked),
        head(first, host, kind, "Transfer-Encoding: chunked", body=b"-1\r\n\r\n"),
        head(first, host, kind, "Transfer-Encoding: chunked", body=b"fffffffffffffffff\r\n" + body),
        head(first, host, kind, "Transfer-Encoding: chunked", body=b"5;" + b"x" * 100_000 + b"\r\nhello\r\n0\r\n\r\n"),
        head(first, host, kind, "Content-Length: -5", body=body),
        head(first, host, kind, "Content-Length: +5", body=body),
        head(first, host, kind, "Content-Length: 5, 5", body=body),
        head(first, host, kind, "Content-Length: 0x10", body=body),
        head(first, host, host, kind, size, body=body),
        head(first, kind, size, body=body),
        head(first, "Host: evil.example", kind, size, body=body),
        head(first, host, "Origin: http://evil.example", kind, size, body=body),
        head(first, host, "Content-Type: text/plain", size, body=body),
        head(first, host, size, body=body),
        head(first, host, kind, size, "X-Long: " + "x" * 100_000, body=body),
        head(first, host, kind, size, *(f"X-{number}: y" for number in range(2_000)), body=body),
        head(first, host, kind, size, "X-Fold: a", " b", body=body),
        head(first, host, kind, size, "X-Null: a\0b", body=body),
        head(first, host, kind, size, "Expect: 100-continue, and-more", body=body),
        head(first, host, kind, size, "Authorization: Bearer " + "x" * 8000, body=body),
        head(first, host, kind, size, "X-Request-Id: a\tb<script>", body=body),
        head("GET / HTTP/1.1", host, "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"),
        head("PRI * HTTP/2.0", "", "SM"),
        head("CONNECT 127.0.0.1:22 HTTP/1.1", host),
        head("TRACE / HTTP/1.1", host),
        head("GET http://169.254.169.254/ HTTP/1.1", host),
        head("GET //evil.example/v1/models HTTP/1.1", host),
        head("GET /v1/models/../../fake HTTP/1.1", host),
        head("GET /%2e%2e/fake HTTP/1.1", host),
        head("GET /v1/%00models HTTP/1.1", host),
        head("GET /" + "a" * 60_000 + " HTTP/1.1", host),
        head("GET /v1/models HTTP/9.9", host),
        head("GET /v1/models", host),
        head("get /v1/models HTTP/1.1", host),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),
        chance.randbytes(300) + b"\r\n\r\n",
        b"\r\n" * 1000,
        head("GET /health HTTP/1.1", host) * 50,
    )
    return Visit(chance.choice(tricks), may_be_silent=True)


def slow(chance: random.Random) -> Visit:
    whole = post(json.dumps(good()))
    return Visit(whole[: chance.randrange(1, len(whole) - 1)], slowly=True, may_be_silent=True)


def leaving(chance: random.Random) -> Visit:
    body = good() | {"stream": chance.random() < 0.5, "max_tokens": 500}
    whole = post(json.dumps(body))
    cut = len(whole) if chance.random() < 0.6 else chance.randrange(1, len(whole))
    return Visit(whole[:cut], stay=False, read=chance.random() < 0.5, may_be_silent=True)


KINDS = (malformed, wrong_types, nested, giant, bomb, forged, headers, slow, leaving)
WEIGHTS = (100, 115, 25, 18, 40, 82, 80, 15, 25)


async def make(visit: Visit, port: int) -> list[int]:
    """The statuses that the visit was answered with."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(visit.content)
        if not visit.stay:
            if visit.read:
                await asyncio.wait_for(reader.read(100), 0.05)
            writer.transport.abort()
            return []
        async with asyncio.timeout(2 if visit.may_be_silent else 20):
            await writer.drain()
            while part := await reader.read(1 << 16):
                answer += part
                if not visit.slowly and b"Connection: close" not in visit.content[:200]:
                    writer.write_eof()  # whatever comes is complete: the gateway need not wait for more
    except (OSError, TimeoutError):
        assert visit.may_be_silent or answer, f"no answer to {visit.content[:200]!r}"
    finally:
        writer.close()
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)]
    assert statuses or visit.may_be_silent, f"no answer to {visit.content[:200]!r}"
    return statuses


def memory(pid: int, what: str) -> int:
    """Bytes: "VmRSS" now, "VmHWM" at most so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not tell {what}")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_five_hundred_of_them(tmp_path: Path) -> None:
    chance = random.Random(20261130)

    async def chat(session: aiohttp.ClientSession, url: str, content: Any) -> None:
        async with session.post(url + CHAT, json=message(content) | {"max_tokens": 2}) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            assert json.loads(text)["choices"][0]["message"]["content"] == "The picture"

    async def scene(url: str, pid: int) -> None:
        port = int(url.rpartition(":")[2])
        picture = [{"type": "image_url", "image_url": {"url": GOOD_PICTURE}}]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            await chat(session, url, picture)
            before = memory(pid, "VmRSS")
            turns = asyncio.Semaphore(12)

            async def one(kind: Callable[[random.Random], Visit], seed: int) -> list[int]:
                async with turns:
                    visit = kind(random.Random(seed))
                    statuses = await make(visit, port)
                    assert all(status < 500 for status in statuses), (kind.__name__, seed, statuses)
                    return statuses

            kinds = chance.choices(KINDS, WEIGHTS, k=REQUESTS)
            told = await asyncio.gather(*(one(kind, chance.getrandbits(32)) for kind in kinds))
            counts: dict[int, int] = {}
            for status in (status for statuses in told for status in statuses):
                counts[status] = counts.get(status, 0) + 1
            assert counts[400] > 150 and {403, 404, 408, 413, 415} <= set(counts), counts
            await chat(session, url, "Hello")
            await chat(session, url, picture)
            rise = memory(pid, "VmHWM") - before
            assert rise < MOST_RISE_BYTES, f"{rise / MIB:.0f} MiB"
            async with session.get(url + "/metrics") as answer:
                text = await answer.text()
            assert 'loadmaster_requests_running{model="fake"} 0.0' in text
            assert 'loadmaster_requests_waiting{model="fake"} 0.0' in text
            assert 'code="internal_error"' not in text

    with fake_engine(tmp_path, "--tps", "200") as engine:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, engine.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert program.stdout is not None and program.stderr is not None
            asyncio.run(scene(program.stdout.readline().strip(), program.pid))
            program.terminate()
            assert program.wait(10) == 0
            assert program.stderr.read() == ""
        finally:
            program.kill()
            program.communicate()
