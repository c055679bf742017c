"""The page's API under input that means no good, and on disks that do not take it. Nothing is a 500, nothing is lost."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import zipfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadmaster.service import generation, pageanswers, pageevents, shelf
from loadmaster.service.conversationfiles import FileError, read_file
from tests.drawn_pictures import corner_picture, encoded, photograph, png_claiming
from tests.gateways import soon
from tests.pages import page, sha256, text_of
from tests.running import fake_engine

PICTURE = encoded(corner_picture(), "PNG")


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_pictures_that_are_none_are_refused_and_not_kept(tmp_path: Path) -> None:
    photo = encoded(photograph(400, 300), "JPEG")
    cases = [
        (b"", "body_missing"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "image_parse_error"),
        (photo[: len(photo) // 2], "image_parse_error"),
        (png_claiming(60_000, 60_000), "image_too_large"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", "unsupported_image_media_type"),
        (b"<!doctype html><script>alert(1)</script>", "unsupported_image_media_type"),
        (b"GIF89a" + b"\xff" * 50, "image_parse_error"),
        (b"not a picture", "invalid_image_format"),
    ]

    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            for content, code in cases[1:]:
                answer = await browser.put_picture(content)
                assert (answer.status, answer.code) == (400, code), content[:20]
                assert (await browser.ask("HEAD", f"/api/pictures/{sha256(content)}")).status == 404
            assert (await browser.put_picture(b"")).status == 400
            wrong = await browser.ask("PUT", f"/api/pictures/{'0' * 64}", data=PICTURE, Content_Type="image/png")
            assert (wrong.status, wrong.code) == (400, "picture_hash_wrong")
            for name in ("0" * 63, "A" * 64, "../../etc/passwd", "%2e%2e", "0" * 5000):
                assert (await browser.ask("PUT", f"/api/pictures/{name}", data=PICTURE)).status in (400, 404, 415)
            typed = await browser.ask("PUT", f"/api/pictures/{sha256(PICTURE)}", data=PICTURE, Content_Type="text/html")
            assert typed.status == 415
            # what is kept is shown under headers that let nothing in it run
            assert (await browser.put_picture(PICTURE)).status == 201
            shown = await browser.ask("GET", f"/api/pictures/{sha256(PICTURE)}")
            assert "sandbox" in shown.headers["content-security-policy"]
            assert shown.headers["content-type"] == "image/png" and shown.headers["x-content-type-options"] == "nosniff"

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_fifty_megabytes_are_refused_by_their_length_and_while_they_come(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"\xff" * (1 << 20)

    async def scene() -> None:
        async with page(engine, tmp_path) as (opened, browser):
            head = (
                f"PUT /api/pictures/{'0' * 64} HTTP/1.1\r\nHost: 127.0.0.1:{opened.port}\r\nContent-Type: image/jpeg\r\n"
                f"Content-Length: {50 << 20}\r\nConnection: close\r\n\r\n"
            )
            answer = await opened.raw(head.encode())
            assert b" 413 " in answer[:20] and b"image_file_too_large" in answer
            try:
                stream = await browser.ask(
                    "PUT", f"/api/pictures/{'0' * 64}", data=endless(), Content_Type="image/jpeg"
                )
                assert (stream.status, stream.code) == (413, "image_file_too_large")
            except ConnectionError:
                pass  # the gateway does not read to the end
            assert opened.gateway.budget.held == 0

    with fake_engine(tmp_path) as engine:
        play(scene())


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"text": 5}',
    b'{"text": "\\ud800"}',
    b'{"unknown": 1}',
    b'{"title": {"a": 1}}',
    b'{"parameters": {"temperature": "hot"}, "text": "x"}',
    b'{"parameters": {"temperature": 1e400}, "text": "x"}',
    b'{"parameters": {"max_tokens": -5}, "text": "x"}',
    b'{"parameters": {"max_tokens": 99999999999999999999}, "text": "x"}',
    b'{"parameters": {"chat_template": "x"}, "text": "x"}',
    b'{"pictures": ["x"], "text": "x"}',
    b'{"pictures": "x", "text": "x"}',
    b'{"pictures": [{"sha256": 5}]}',
    b'{"text": "", "pictures": []}',
    b'{"regenerate": "x", "continue": "y"}',
    b'{"regenerate": "no such"}',
    b'{"continue": "no such"}',
    b'{"model": "other", "text": "x"}',
    b'{"model": 5, "text": "x"}',
    b'{"messages": []}',
    b'{"messages": [{"role": "tool", "text": "x"}]}',
    b'{"messages": [{"role": "user", "text": ["x"]}]}',
    b'{"key": ["x"]}',
]


def test_bodies_that_make_no_sense_are_client_errors(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            routes = [
                ("POST", "/api/conversations"),
                ("PATCH", f"/api/conversations/{number}"),
                ("POST", f"/api/conversations/{number}/answer"),
                ("PUT", f"/api/conversations/{number}/messages/x"),
                ("POST", "/api/answer"),
                ("POST", "/api/login"),
                ("POST", "/api/conversations/import"),
            ]
            for method, path in routes:
                for body in BAD_BODIES:
                    answer = await browser.ask(method, path, data=body, Content_Type="application/json")
                    allowed = (201,) if path.endswith("import") and body == b'{"messages": []}' else ()
                    assert 400 <= answer.status < 500 or answer.status in allowed, (path, body[:60], answer.status)
            assert (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"] == []

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_names_and_queries_that_make_no_sense_find_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            for name in ("x", "'; DROP TABLE message; --", "%00", "..", "a" * 3000, "%F0%9F%98%80", "%ff"):
                for end in ("", "/answer", "/export"):
                    answer = await browser.ask("GET", f"/api/conversations/{name}{end}")
                    assert answer.status in (400, 404, 405), (name, end)
            for query in (
                "before=nan",
                "before=inf",
                "before=x",
                "limit=x",
                "limit=-1",
                "limit=1e9",
                "before=" + "9" * 400,
                "search=%00",
                "search=%00abc",
            ):
                assert (await browser.ask("GET", f"/api/conversations?{query}")).status == 400, query
            for query in ("search=%27%20OR%201=1%20--", "search=%22%29%20OR%20%28%22", "search=%25",
                          "search=NEAR(a%20b)", "search=*", "search=" + "%E7%8C%AB" * 1000, "limit=999999", "before=1e308"):  # fmt: skip
                assert (await browser.ask("GET", f"/api/conversations?{query}")).status == 200, query
            found = (await browser.ask("GET", "/api/conversations?search=%27%20OR%201=1%20--")).json
            assert found["conversations"] == []
            assert (await browser.ask("GET", "/api/history?seconds=-5")).status == 400
            assert (await browser.ask("GET", "/api/log?lines=" + "9" * 30)).status == 400
            assert (await browser.ask("GET", f"/api/conversations/{number}")).status == 200
            address = f"/api/conversations/{number}"
            assert (await browser.ask("PATCH", address, {"title": "t" * 201})).status == 400
            assert (await browser.ask("PATCH", address, {"title": "t" * 200})).json["title"] == "t" * 200

    with fake_engine(tmp_path) as engine:
        play(scene())


def zipped(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def exported(*messages: dict[str, Any], pictures: dict[str, str] | None = None) -> bytes:
    return json.dumps({"conversation": {"title": "t", "messages": list(messages)}, "pictures": pictures or {}}).encode()


SHOWN = {"sha256": sha256(PICTURE), "width": 64, "height": 48}


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 broken",
        zipped({"other.json": b"{}"}),
        zipped({"conversation.json": b"\0" * (100 << 20)}),
        zipped({"conversation.json": b'{"messages": []}', **{f"pictures/{place}": b"" for place in range(2100)}}),
        zipped({"conversation.json": b'{"messages": []}', "pictures/../../etc/x": b"x"}),
        exported({"role": "god", "text": "x"}),
        exported({"role": "user", "text": "x" * (1 << 21)}),
        exported({"role": "user", "pictures": [SHOWN] * 65}),
        exported(pictures={"0" * 64: base64.b64encode(PICTURE).decode()}),
        exported(pictures={"0" * 64: "not base64"}),
        b'{"messages": 5}',
        b"[" * 100_000,
    ],
)
def test_files_that_are_no_conversations_are_refused(content: bytes) -> None:
    with pytest.raises(FileError):
        read_file(content)


def test_what_is_exported_comes_back_in_both_forms(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            await browser.put_picture(PICTURE)
            given = {"sha256": sha256(PICTURE), "name": "猫.png", "original_width": 4000, "original_height": 3000}
            await browser.answer(number, text="猫在哪里？", pictures=[given], parameters={"max_tokens": 3})
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json
            files = [
                await browser.ask("GET", f"/api/conversations/{number}/export?format={form}")
                for form in ("json", "markdown")
            ]
            with zipfile.ZipFile(io.BytesIO(files[1].body)) as archive:
                text = archive.read("conversation.md").decode()
                assert "猫在哪里？" in text and f"pictures/{sha256(PICTURE)}.png" in text
            assert (await browser.ask("DELETE", f"/api/conversations/{number}")).status == 204
            assert (await browser.ask("HEAD", f"/api/pictures/{sha256(PICTURE)}")).status == 404
            for file, kind in zip(files, ("application/json", "application/zip"), strict=True):
                assert "attachment" in file.headers["content-disposition"]
                taken = await browser.ask("POST", "/api/conversations/import", data=file.body, Content_Type=kind)
                assert taken.status == 201, taken.body
                again = (await browser.ask("GET", f"/api/conversations/{taken.json['id']}")).json
                for one, other in zip(again["messages"], kept["messages"], strict=True):
                    assert {**one, "id": 0} == {**other, "id": 0}
                assert (await browser.ask("GET", f"/api/pictures/{sha256(PICTURE)}")).body == PICTURE
            # a picture that only its hash names, and that is not here, is left out
            bare = exported({"role": "user", "text": "x", "pictures": [{**SHOWN, "sha256": "0" * 64}]})
            taken = await browser.ask("POST", "/api/conversations/import", data=bare, Content_Type="application/json")
            assert taken.json["messages"][0]["pictures"] == []

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_streams_have_a_most_and_a_reader_that_stands_still_holds_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pageevents, "MOST_STREAMS", 3)
    monkeypatch.setattr(pageanswers, "_MOST_FOLLOWERS", 3)

    async def scene() -> None:
        async with page(engine, tmp_path) as (opened, browser), AsyncExitStack() as open_streams:
            number = await browser.new()
            for _ in range(3):
                await (await open_streams.enter_async_context(browser.stream("GET", "/api/events"))).until("state")
            assert (await browser.ask("GET", "/api/events")).code == "too_many_streams"
            body = msgspec.json.encode({"model": "fake", "text": "Tell"})
            _, writer = await asyncio.open_connection("127.0.0.1", opened.port, limit=1024)
            writer.write(
                f"POST /api/conversations/{number}/answer HTTP/1.1\r\nHost: 127.0.0.1:{opened.port}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )

            async def running() -> bool:
                return bool((await browser.ask("GET", f"/api/conversations/{number}")).json["messages"])

            await soon(running, "the question")
            for _ in range(2):
                await open_streams.enter_async_context(browser.stream("GET", f"/api/conversations/{number}/answer"))
            assert (await browser.ask("GET", f"/api/conversations/{number}/answer")).code == "too_many_followers"

            async def done() -> bool:
                kept = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"][-1]
                return bool(kept["state"] == "done" and len(kept["text"]) > 100_000)

            await soon(done, "the end of the answer")
            writer.close()

    with fake_engine(tmp_path, "--tokens", "25000", "--tps", "20000") as engine:
        play(scene())


def test_a_disk_that_does_not_take_it_is_said_and_the_answer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "AGAIN_S", 0.0)
    monkeypatch.setattr(generation, "_SAVE_S", 0.05)

    async def scene() -> None:
        async with page(engine, tmp_path) as (opened, browser):
            number = await browser.new()
            store = opened.gateway.page.desk.shelf._store  # type: ignore[union-attr]
            assert store is not None
            body = {"model": "fake", "text": "Tell"}
            async with browser.stream("POST", f"/api/conversations/{number}/answer", body) as events:
                seen = await events.until("delta")
                tight = {"on": True}
                monkeypatch.setattr(type(store), "_opened", full_disk(type(store)._opened, tight))
                seen += await events.rest()
            assert seen[-1].name == "done" and seen[-1].data["stored"] is False
            assert len(text_of(seen)) > 50
            session = (await browser.ask("GET", "/api/session")).json
            assert session["storage"] == "browser" and "the disk is full" in session["read_only"]
            refused = await browser.ask("POST", "/api/conversations", json={})
            assert (refused.status, refused.code) == (507, "storage_full")
            # pictures and questions go on from the browser's own conversations
            assert (await browser.put_picture(PICTURE)).status == 201
            asked = {"model": "fake", "messages": [{"role": "user", "text": "x", "pictures": [sha256(PICTURE)]}]}
            async with browser.stream("POST", "/api/answer", asked) as events:
                assert (await events.rest())[-1].name == "done"
            tight["on"] = False
            session = (await browser.ask("GET", "/api/session")).json
            assert session["storage"] == "server" and session["read_only"] is None
            assert (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"][0]["text"] == "Tell"

    with fake_engine(tmp_path, "--tps", "40", "--tokens", "30") as engine:
        play(scene())


def full_disk(opened: Any, tight: dict[str, bool]) -> Any:
    """The store's connection on a disk that is full while ``tight`` says so."""

    def connection(self: Any) -> Any:
        database = opened(self)
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages if tight['on'] else 1 << 30}")
        if tight["on"]:
            import sqlite3

            raise sqlite3.OperationalError("database or disk is full")
        return database

    return connection


def test_the_quota_is_told_in_words(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path, page_fields={"quota_bytes": len(PICTURE) + 200}) as (_, browser):
            number = await browser.new()
            assert (await browser.put_picture(PICTURE)).status == 201
            other = await browser.put_picture(encoded(photograph(200, 200), "JPEG"), "image/jpeg")
            assert (other.status, other.code) == (413, "quota_exceeded") and "page.quota_bytes" in other.body.decode()
            long = await browser.ask(
                "POST", f"/api/conversations/{number}/answer", json={"model": "fake", "text": "x" * 500}
            )
            assert (long.status, long.code) == (413, "quota_exceeded")
            assert (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"] == []
            events = await browser.answer(number, text="short", parameters={"max_tokens": 1})
            assert events[-1].name == "done"
            session = (await browser.ask("GET", "/api/session")).json
            assert session["quota"]["used"] == len(PICTURE) + len("shortThe")

    with fake_engine(tmp_path) as engine:
        play(scene())
