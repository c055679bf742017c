"""The page's files: what a browser gets, keeps, and is kept from."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import zstandard

from loadmaster.service.pagefiles import FOLDER, PageFiles
from tests.pages import page
from tests.running import fake_engine


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_files_are_typed_compressed_and_kept_by_their_content(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (opened, _):
            index = await opened.ask("GET", "/", Accept_Encoding="identity")
            policy = index.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy and index.headers["x-content-type-options"] == "nosniff"
            assert index.headers["referrer-policy"] == "no-referrer" and index.headers["cache-control"] == "no-cache"
            assert index.headers["content-type"] == "text/html; charset=utf-8"
            text = index.body.decode()
            version = text.partition('src="static/')[2].partition("/")[0]
            assert f'src="static/{version}/page/main.js"' in text and 'href="static/page' not in text

            path = f"/static/{version}/page/main.js"
            own = (FOLDER / "page" / "main.js").read_bytes()
            raw = await opened.ask("GET", path, Accept_Encoding="identity")
            assert raw.body == own and raw.headers["content-type"] == "text/javascript; charset=utf-8"
            assert "immutable" in raw.headers["cache-control"]
            catalogue = f"/static/{version}/page/catalogue.js"
            plain = (FOLDER / "page" / "catalogue.js").read_bytes()
            for coding, unpack in (("gzip", gzip.decompress), ("zstd", zstandard.decompress)):
                async with opened.session.get(
                    opened.url + catalogue, headers={"Accept-Encoding": f"br;q=0, {coding}"}, auto_decompress=False
                ) as answer:
                    body = await answer.read()
                    assert answer.headers["Content-Encoding"] == coding and len(body) < len(plain)
                    assert unpack(body) == plain and answer.headers["Vary"] == "Accept-Encoding"
                    tag = answer.headers["ETag"]
                again = await opened.ask("GET", catalogue, If_None_Match=f'"x", W/{tag}', Accept_Encoding=coding)
                assert again.status == 304 and again.body == b"" and again.headers["etag"] == tag
            head = await opened.ask("HEAD", path, Accept_Encoding="identity")
            assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(own)))
            asked_each_time = await opened.ask("GET", "/static/page/main.js")
            assert asked_each_time.headers["cache-control"] == "no-cache"
            assert (await opened.ask("GET", f"/static/{'0' * 16}/page/main.js")).status == 404
            assert (await opened.ask("POST", path, data=b"x")).status == 405

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_no_path_leads_out_of_the_package(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (opened, _):
            for path in (
                "/static/../web.py",
                "/static/..%2fweb.py",
                "/static/%2e%2e/%2e%2e/web.py",
                "/static//etc/passwd",
                "/static/page/../../web.py",
                "/static/page%00/main.js",
                "/static/page\\..\\..\\web.py",
                "/static/page/",
                "/static/",
                "/static/page/main.js/",
                "/static/__init__.py",
                "/static/" + "a/" * 2000,
            ):
                answer = await opened.raw(
                    f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{opened.port}\r\nConnection: close\r\n\r\n".encode()
                )
                assert b" 404 " in answer[:20] or b" 400 " in answer[:20], (path, answer[:80])
                assert b"root:" not in answer and b"import asyncio" not in answer

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_links_are_not_followed_and_an_upgrade_is_seen(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<script type="module" src="static/a.js"></script>')
    (tmp_path / "a.js").write_text("1")
    secret = tmp_path.parent / "secret.js"
    secret.write_text("secret")
    (tmp_path / "link.js").symlink_to(secret)
    (tmp_path / "notes.md").write_text("not served")
    files = PageFiles(tmp_path)
    assert files.names() == ("a.js", "index.html")
    version = files.version
    assert (files.content("index.html") or b"").count(version.encode()) == 1
    (tmp_path / "a.js").write_text("22")
    files._read()
    assert files.version != version and files.content("a.js") == b"22"


def test_without_a_page_there_is_none(tmp_path: Path) -> None:
    from tests.gateways import gateway, one_backend

    async def scene() -> None:
        async with gateway(one_backend(engine.url)) as opened:
            for path in ("/", "/static/index.html", "/api/session", "/api/events"):
                assert (await opened.ask("GET", path)).code == "route_not_found"

    with fake_engine(tmp_path) as engine:
        play(scene())
