"""No packet leaves the machine: names and addresses beyond loopback are answered by the stubs of this file."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.service import urlfetch
from loadmaster.service.urladdress import RefusedError, check_address, read_url
from loadmaster.service.urlfetch import Fetcher, FetchError, FetchLimits

T = TypeVar("T")
PORTS = frozenset((80, 443))
LIMITS = FetchLimits(max_bytes=1000, timeout_s=5)
PUBLIC = "93.184.216.34"
BODY = b"\x89PNG picture"


# URLs


@pytest.mark.parametrize(
    "url",
    [
        # loopback and its spellings
        "http://127.0.0.1/",
        "http://127.0.0.1:80/",
        "http://127.1/",
        "http://127.0.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://017700000001/",
        "http://127.0.0.01/",
        "http://127.0.0.1./",
        "http://0/",
        "http://0.0.0.0/",
        "http://localhost/",
        "http://LOCALHOST/",
        "http://localhost./",
        "http://a.localhost/",
        "http://printer/",
        "http://printer.local/",
        "http://metadata.google.internal/",
        "http://[::1]/",
        "http://[::]/",
        "http://[0:0:0:0:0:0:0:1]/",
        # IPv4 inside IPv6
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://[::127.0.0.1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[64:ff9b:1::a00:1]/",
        "http://[2002:7f00:1::]/",
        "http://[2001:0:7f00:1::]/",
        "http://[2001:4860:4860::5efe:7f00:1]/",
        # private, link-local, shared, multicast, reserved
        "http://10.0.0.1/",
        "http://172.16.0.1/",
        "http://172.31.255.255/",
        "http://192.168.1.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://2852039166/",
        "http://100.64.0.1/",
        "http://100.100.100.200/",
        "http://192.0.0.192/",
        "http://168.63.129.16/",
        "http://198.18.0.1/",
        "http://224.0.0.1/",
        "http://240.0.0.1/",
        "http://255.255.255.255/",
        "http://[fe80::1]/",
        "http://[fe80::1%25eth0]/",
        "http://[fc00::1]/",
        "http://[fd00:ec2::254]/",
        "http://[ff02::1]/",
        "http://[2001:db8::1]/",
        # parts that two programs read differently
        "http://user@127.0.0.1/",
        "http://example.com@127.0.0.1/",
        "http://example.com:80@127.0.0.1/",
        "http://example.com\\@127.0.0.1/",
        "http://example.com%00.evil.com/",
        "http://%31%32%37.0.0.1/",
        "http://example.com#@127.0.0.1:22/x y",
        "http://exa mple.com/",
        "http://example.com\t/",
        "http://example.com/\r\nHost: x",
        "http:///example.com/",
        "http:/example.com/",
        "http:example.com",
        "//example.com/",
        "http://",
        "http://[::1/",
        "http://[93.184.216.34]/",
        "http://..example.com/",
        "http://-x-.example.com/",
        "http://" + "a" * 64 + ".com/",
        "http://" + "a." * 130 + "com/",
        "http://example.com/" + "x" * 9000,
        # letters that only look like others
        "http://１２７.０.０.１/",
        "http://127。0。0。1/",
        "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/",
        "http://①②⑦.⓪.⓪.①/",
        "http://ｅxample.com/",
        "http://ü。localhost/",
        "http://ex\u00adample.com/",
        "http://ex\u200bample.com/",
        # ports and schemes
        "http://example.com:22/",
        "http://example.com:8000/",
        "http://example.com:0/",
        "http://example.com:080/",
        "http://example.com:65616/",
        "http://example.com:/",
        "http://example.com:+80/",
        "http://example.com:8 0/",
        "http://example.com:\u0668\u0660/",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "ftp://example.com/",
        "gopher://example.com/",
        "dict://example.com/",
        "data:,x",
        "",
    ],
)
def test_hostile_urls_are_refused(url: str) -> None:
    with pytest.raises(RefusedError):
        read_url(url, PORTS)


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://example.com", "example.com", 80, "/"),
        ("HTTPS://Example.COM/a/b.png?x=1&y=%20#part", "example.com", 443, "/a/b.png?x=1&y=%20"),
        ("https://example.com./", "example.com", 443, "/"),
        ("http://example.com:443/", "example.com", 443, "/"),
        ("http://example.com?q", "example.com", 80, "/?q"),
        ("https://bücher.example.com/ü", "xn--bcher-kva.example.com", 443, "/%C3%BC"),
        ("http://93.184.216.34/", "93.184.216.34", 80, "/"),
        ("http://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]:443/", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", 443, "/"),
        ("http://a_b.example.com/", "a_b.example.com", 80, "/"),
        ("http://1.example.com/", "1.example.com", 80, "/"),
        ("http://example.com/@user", "example.com", 80, "/@user"),
    ],
)
def test_honest_urls_are_read(url: str, host: str, port: int, path: str) -> None:
    target = read_url(url, PORTS)
    assert (target.host, target.port, target.path) == (host, port, path)
    assert read_url(target.url, PORTS) == target


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for url in (text, "http://" + text, "http://example.com" + text):
        try:
            target = read_url(url, PORTS)
        except RefusedError as error:
            assert str(error).isascii()
            continue
        assert target.url.isascii() and target.url.isprintable() and " " not in target.url
        if target.address is not None:
            check_address(target.host)


@given(st.ip_addresses(v=4))
def test_every_address_that_is_taken_is_global(address: object) -> None:
    with contextlib.suppress(RefusedError):
        taken = check_address(str(address))
        assert taken.is_global and not (taken.is_multicast or taken.is_private or taken.is_reserved)


@pytest.mark.parametrize("address", [PUBLIC, "1.1.1.1", "2606:4700:4700::1111", "172.32.0.1", "100.128.0.1"])
def test_public_addresses_are_taken(address: str) -> None:
    assert str(check_address(address)) == address


@pytest.mark.parametrize("address", ["", "x", "1.2.3", "01.1.1.1", "1.1.1.1 ", "fe80::1%eth0", "2606::1%eth0"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(RefusedError):
        check_address(address)


# Fetching


class Net:
    """A stubbed internet: names, and one loopback server that plays every public address."""

    def __init__(self, names: dict[str, list[str] | list[list[str]]], answers: dict[str, bytes]) -> None:
        self.names = names
        self.answers = answers
        self.resolved: list[str] = []
        self.connected: list[tuple[str, int, str | None]] = []
        self.requests: list[str] = []
        self.port = 0
        self.hang = False

    async def resolve(self, host: str) -> list[str]:
        self.resolved.append(host)
        answers: Any = self.names.get(host)
        if answers is None:
            raise OSError("unknown")
        if answers and isinstance(answers[0], list):  # another answer every time
            return list(answers[min(len([name for name in self.resolved if name == host]), len(answers)) - 1])
        return list(answers)

    async def connect(
        self, address: str, port: int, server_name: str | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        check_address(address)  # nothing else may ever reach a connection
        self.connected.append((address, port, server_name))
        if address == "1.0.0.1":
            raise ConnectionRefusedError
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            host = re.search(r"\r\nHost: (\S+)\r\n", head)
            assert host is not None
            writer.write(self.answers[host[1] + head.split(" ")[1]])
            await writer.drain()
            if self.hang:
                await reader.read()
        writer.close()


@contextlib.asynccontextmanager
async def serving(net: Net) -> AsyncIterator[None]:
    server = await asyncio.start_server(net.serve, "127.0.0.1", 0)
    net.port = server.sockets[0].getsockname()[1]
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()


def fetched(net: Net, url: str, limits: FetchLimits = LIMITS) -> bytes:
    async def run() -> bytes:
        async with serving(net):
            return await asyncio.wait_for(Fetcher(limits, resolve=net.resolve, connect=net.connect).fetch(url), 20)

    return asyncio.run(run())


def failure(net: Net, url: str, limits: FetchLimits = LIMITS) -> FetchError:
    with pytest.raises(FetchError) as caught:
        fetched(net, url, limits)
    assert caught.value.message.isascii()
    return caught.value


def ok(body: bytes = BODY, headers: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n{headers}\r\n".encode() + body


def moved(to: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


SITE: dict[str, Any] = {"example.com": [PUBLIC]}


def test_a_picture_is_fetched_from_the_checked_address() -> None:
    net = Net(SITE, {"example.com/a.png?x=1": ok(headers="Content-Type: text/plain\r\n")})
    assert fetched(net, "http://example.com/a.png?x=1") == BODY
    assert net.connected == [(PUBLIC, 80, None)]
    assert net.resolved == ["example.com"]
    (request,) = net.requests
    assert request.startswith("GET /a.png?x=1 HTTP/1.1\r\n")
    assert "cookie" not in request.lower() and "authorization" not in request.lower()


def test_tls_is_asked_for_under_the_name_not_the_address() -> None:
    net = Net(SITE, {"example.com/": ok()})
    assert fetched(net, "https://example.com/") == BODY
    assert net.connected == [(PUBLIC, 443, "example.com")]


def test_an_address_needs_no_name_server() -> None:
    net = Net({}, {PUBLIC + "/": ok()})
    assert fetched(net, f"http://{PUBLIC}/") == BODY
    assert net.resolved == []


@pytest.mark.parametrize(
    "answers",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:10.0.0.1"],
        ["64:ff9b::a00:1"],
        ["fe80::1%eth0"],
        [PUBLIC, "10.0.0.1"],
        ["10.0.0.1", PUBLIC],
        ["not an address"],
    ],
)
def test_names_of_addresses_within_are_refused(answers: list[str]) -> None:
    net = Net({"example.com": answers}, {})
    assert failure(net, "http://example.com/").code == "invalid_image_url"
    assert net.connected == []


@pytest.mark.parametrize("answers", [None, []])
def test_names_that_are_not_known(answers: list[str] | None) -> None:
    net = Net({} if answers is None else {"example.com": answers}, {})
    assert failure(net, "http://example.com/").code == "failed_to_download_image"


def test_a_second_answer_of_the_name_server_does_not_count() -> None:
    net = Net({"example.com": [[PUBLIC], ["127.0.0.1"]]}, {"example.com/": ok()})
    assert fetched(net, "http://example.com/") == BODY
    assert net.resolved == ["example.com"] and net.connected == [(PUBLIC, 80, None)]


def test_rebinding_between_redirects_is_caught() -> None:
    net = Net({"example.com": [[PUBLIC], ["127.0.0.1"]]}, {"example.com/": moved("/b")})
    assert failure(net, "http://example.com/").code == "invalid_image_url"
    assert len(net.connected) == 1


def test_the_next_address_is_tried() -> None:
    net = Net({"example.com": ["1.0.0.1", PUBLIC]}, {"example.com/": ok()})
    assert fetched(net, "http://example.com/") == BODY
    assert [address for address, _, _ in net.connected] == ["1.0.0.1", PUBLIC]
    net = Net({"example.com": ["1.0.0.1"]}, {})
    assert "cannot be reached" in failure(net, "http://example.com/").message


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(status: int) -> None:
    answers = {"example.com/": moved("/b?c", status), "example.com/b?c": moved("//other.org/d", status)}
    net = Net(SITE | {"other.org": ["1.1.1.1"]}, answers | {"other.org/d": ok()})
    assert fetched(net, "http://example.com/") == BODY
    assert [address for address, _, _ in net.connected] == [PUBLIC, PUBLIC, "1.1.1.1"]


def test_at_most_three_redirects() -> None:
    answers = {f"example.com/{step}": moved(f"/{step + 1}") for step in range(9)}
    net = Net(SITE, answers | {"example.com/3": ok()})
    assert fetched(net, "http://example.com/0") == BODY
    net = Net(SITE, answers)
    assert "more than 3 times" in failure(net, "http://example.com/0").message
    assert len(net.connected) == 4


@pytest.mark.parametrize(
    "to",
    [
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://169.254.169.254/",
        "http://0x7f.1/",
        "http://inner.example.com/",
        "//localhost/",
        "file:///etc/passwd",
        "ftp://example.com/",
        "gopher://example.com:70/",
        "data:image/png;base64,AAAA",
        "http://example.com:8000/",
        "http://user@example.com/",
        "http://example.com\\@127.0.0.1/",
        "javascript:alert(1)",
    ],
)
def test_redirects_to_where_we_do_not_go(to: str) -> None:
    net = Net(SITE | {"inner.example.com": ["192.168.0.7"]}, {"example.com/": moved(to)})
    assert failure(net, "http://example.com/").code == "invalid_image_url"
    assert len(net.connected) == 1


def test_chunks_are_put_together() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    net = Net(SITE, {"example.com/": head + b"3;x=y\r\nabc\r\n0A\r\n0123456789\r\n0\r\n\r\n"})
    assert fetched(net, "http://example.com/") == b"abc0123456789"


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    net = Net(SITE, {"example.com/": b"HTTP/1.0 200 OK\r\n\r\n" + BODY})
    assert fetched(net, "http://example.com/") == BODY


def test_informational_answers_are_skipped() -> None:
    net = Net(SITE, {"example.com/": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok()})
    assert fetched(net, "http://example.com/") == BODY


@pytest.mark.parametrize(
    "answer",
    [
        ok(b"x" * 1001),
        ok(b"", length=10**15),
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1F4\r\n"
        + b"x" * 500
        + b"\r\n1F5\r\n"
        + b"x" * 501,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n",
    ],
)
def test_too_large_answers_are_cut_off(answer: bytes) -> None:
    assert failure(Net(SITE, {"example.com/": answer}), "http://example.com/").code == "image_file_too_large"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\n\r\n",
        b"HTTP/1.1 206 Partial\r\nContent-Length: 1\r\n\r\nx",
        ok(length=500),
        ok(headers="Content-Encoding: gzip\r\n"),
        ok(headers="Content-Length: 3\r\n"),
        ok(length=-1),
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x10\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabXX0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
        b"\x00" * 5000,
    ],
)
def test_answers_that_are_no_picture_in_http(answer: bytes) -> None:
    assert failure(Net(SITE, {"example.com/": answer}), "http://example.com/").code == "failed_to_download_image"


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n", ok(length=100)])
def test_a_server_that_hangs_is_left_in_time(answer: bytes) -> None:
    net = Net(SITE, {"example.com/": answer})
    net.hang = True
    error = failure(net, "http://example.com/", FetchLimits(max_bytes=1000, timeout_s=0.2))
    assert "within 0.2 s" in error.message


def test_a_name_server_that_hangs_is_left_in_time() -> None:
    async def resolve(host: str) -> list[str]:
        await asyncio.sleep(30)
        return []

    async def connect(*_: object) -> Any:
        raise AssertionError

    fetcher = Fetcher(FetchLimits(max_bytes=10, timeout_s=0.1), resolve=resolve, connect=connect)
    with pytest.raises(FetchError, match=r"within 0\.1 s"):
        asyncio.run(fetcher.fetch("http://example.com/"))


# The real resolver and connector, on loopback


def on_loopback(work: Callable[[int], Awaitable[T]]) -> T:
    async def run() -> T:
        async with serving(net := Net({}, {})):
            return await work(net.port)

    return asyncio.run(run())


def test_the_real_resolver_knows_this_machine_and_nothing_of_it_passes() -> None:
    answers = asyncio.run(urlfetch.resolve("localhost"))
    assert answers
    for answer in answers:
        with pytest.raises(RefusedError):
            check_address(answer)


def test_the_real_connector_does_not_talk_to_this_machine() -> None:
    async def work(port: int) -> None:
        with pytest.raises(ConnectionRefusedError, match="this machine"):
            await urlfetch.connect("127.0.0.1", port, None)

    on_loopback(work)
