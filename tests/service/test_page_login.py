"""Who may use the page: keys, cookies, and pages of strangers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loadmaster.service.keys import KeyRing, add_key, remove_key
from loadmaster.service.pagesessions import IDLE_S, LONGEST_S, Sessions
from tests.drawn_pictures import corner_picture, encoded
from tests.gateways import Open, soon
from tests.pages import Browser, page, sha256
from tests.running import Running, fake_engine

PICTURE = encoded(corner_picture(), "PNG")


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


@asynccontextmanager
async def two(engine: Running, folder: Path) -> AsyncIterator[tuple[Open, Browser, Browser, Path]]:
    """A gateway with keys, and two people who are logged in."""
    keys = folder / "keys.json"
    secrets = [add_key(keys, name) for name in ("ann", "bo")]
    async with page(engine, folder, keys_file=str(keys)) as (opened, _):
        people = [Browser(opened), Browser(opened)]
        try:
            for person, secret in zip(people, secrets, strict=True):
                assert (await person.ask("POST", "/api/login", json={"key": secret})).status == 200
            yield opened, people[0], people[1], keys
        finally:
            for person in people:
                await person.close()


def test_without_a_key_the_page_shows_only_that_one_is_needed(tmp_path: Path) -> None:
    async def scene() -> None:
        keys = tmp_path / "keys.json"
        add_key(keys, "ann")
        async with page(engine, tmp_path, keys_file=str(keys)) as (_, browser):
            session = await browser.ask("GET", "/api/session")
            assert session.json == {
                "schema": 1, "version": session.json["version"], "keys_required": True, "user": None,
            }  # fmt: skip
            assert (await browser.ask("GET", "/")).status == 200
            for method, path in (
                ("GET", "/api/conversations"),
                ("POST", "/api/conversations"),
                ("GET", "/api/events"),
                ("GET", "/api/history"),
                ("GET", "/api/log"),
                ("POST", "/api/verify"),
                ("POST", "/api/answer"),
                ("PUT", f"/api/pictures/{'0' * 64}"),
                ("GET", f"/api/pictures/{'0' * 64}"),
                ("DELETE", "/api/conversations/x"),
            ):
                answer = await browser.ask(method, path, json={} if method == "POST" else None)
                assert (answer.status, answer.code) == (401, "login_required"), path
            bad = await browser.ask("POST", "/api/login", json={"key": "lm-" + "x" * 40})
            assert (bad.status, bad.code) == (401, "api_key_invalid")

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_the_cookie_is_closed_to_scripts_and_other_sites(tmp_path: Path) -> None:
    async def scene() -> None:
        async with two(engine, tmp_path) as (opened, ann, _, keys):
            (cookie,) = ann.cookies
            assert cookie["httponly"] and cookie["samesite"] == "Strict" and cookie["path"] == "/"
            assert cookie.key == f"loadmaster-{opened.port}" and not cookie["secure"]
            secure = Browser(opened, Origin=f"https://127.0.0.1:{opened.port}")
            secret = add_key(keys, "cy")

            async def knows() -> bool:
                answer = await secure.ask("POST", "/api/login", json={"key": secret})
                return answer.status == 200 and "Secure" in answer.headers["set-cookie"]

            await soon(knows, "a login behind https")
            await secure.close()
            assert (await ann.ask("GET", "/api/session")).json["user"] == "ann"
            assert (await ann.ask("POST", "/api/logout", json={})).status == 200
            assert (await ann.ask("GET", "/api/conversations")).status == 401

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_a_change_has_to_come_from_our_own_page(tmp_path: Path) -> None:
    async def scene() -> None:
        async with two(engine, tmp_path) as (opened, ann, _, __):
            number = await ann.new()
            own = dict(ann.headers)
            cases: list[tuple[dict[str, str], int]] = [
                ({}, 403),
                ({"Origin": "https://evil.example"}, 403),
                ({"Origin": "null"}, 403),
                ({"Origin": f"http://127.0.0.1:{opened.port + 1}"}, 403),
                ({"Sec-Fetch-Site": "cross-site"}, 403),
                ({"Sec-Fetch-Site": "none"}, 403),
                ({"Sec-Fetch-Site": "same-origin"}, 204),
            ]
            for headers, status in cases:
                ann.headers = headers
                assert (await ann.ask("DELETE", f"/api/conversations/{number}")).status == status, headers
            ann.headers = own
            plain = await ann.ask("POST", "/api/conversations", data=b"{}", Content_Type="text/plain")
            assert (plain.status, plain.code) == (415, "content_type")
            assert (await ann.ask("POST", "/api/login", data=b"{}", Content_Type="text/plain")).status == 415

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_a_key_sees_its_own_and_nothing_else(tmp_path: Path) -> None:
    async def scene() -> None:
        async with two(engine, tmp_path) as (_, ann, bo, __):
            number = await ann.new()
            assert (await ann.put_picture(PICTURE)).status == 201
            told = await ann.answer(number, text="Secret", pictures=[sha256(PICTURE)], parameters={"max_tokens": 1})
            mid = told[0].data["user"]["id"]
            assert (await bo.ask("GET", "/api/conversations?search=Secret")).json["conversations"] == []
            answer = {"model": "fake", "text": "x"}
            for method, path, body in (
                ("GET", f"/api/conversations/{number}", None),
                ("PATCH", f"/api/conversations/{number}", {"title": "mine"}),
                ("DELETE", f"/api/conversations/{number}", None),
                ("GET", f"/api/conversations/{number}/export", None),
                ("GET", f"/api/conversations/{number}/answer", None),
                ("POST", f"/api/conversations/{number}/answer", answer),
                ("POST", f"/api/conversations/{number}/stop", {}),
                ("PUT", f"/api/conversations/{number}/messages/{mid}", {"text": "x"}),
                ("GET", f"/api/pictures/{sha256(PICTURE)}", None),
                ("HEAD", f"/api/pictures/{sha256(PICTURE)}", None),
            ):
                assert (await bo.ask(method, path, json=body)).status == 404, (method, path)
            own = await bo.new()
            stolen = await bo.ask(
                "POST", f"/api/conversations/{own}/answer", json={**answer, "pictures": [sha256(PICTURE)]}
            )
            assert (stolen.status, stolen.code) == (409, "picture_missing")
            used = (await bo.ask("GET", "/api/session")).json["quota"]["used"]
            assert used == 0
            # both may keep the same picture; it goes when neither does
            assert (await bo.put_picture(PICTURE)).status == 201
            assert (await ann.ask("DELETE", f"/api/conversations/{number}")).status == 204
            assert (await ann.ask("GET", f"/api/pictures/{sha256(PICTURE)}")).status == 404
            assert (await bo.ask("GET", f"/api/pictures/{sha256(PICTURE)}")).body == PICTURE

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_a_key_that_is_taken_away_ends_its_sessions_and_its_streams(tmp_path: Path) -> None:
    async def scene() -> None:
        async with two(engine, tmp_path) as (opened, ann, bo, keys):
            async with ann.stream("GET", "/api/events") as events:
                await events.until("state")
                remove_key(keys, "ann")
                add_key(keys, "ann")  # another key of the same name

                async def dead() -> bool:
                    return (await ann.ask("GET", "/api/conversations")).status == 401

                await soon(dead, "the end of the session")
                opened.gateway.page.events._put("state", {"state": "secret"})  # type: ignore[union-attr]
                assert all("secret" not in str(event.data) for event in await events.rest())
            assert (await bo.ask("GET", "/api/conversations")).status == 200

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_sessions_end_and_attempts_are_counted() -> None:
    now = 0.0
    sessions = Sessions(KeyRing(None, "ann=" + "a" * 30), lambda: now)
    cookie, key = sessions.login("a" * 30, "here")
    assert key.name == "ann" and sessions.find(cookie) is not None
    now += IDLE_S - 1
    assert sessions.find(cookie) is not None
    now += IDLE_S + 1
    assert sessions.find(cookie) is None
    cookie, _ = sessions.login("a" * 30, "here")
    for _ in range(40):
        now += IDLE_S - 1
        if sessions.find(cookie) is None:
            break
    assert now > LONGEST_S and sessions.find(cookie) is None
    with pytest.raises(Exception, match="too many attempts"):
        for _ in range(20):
            with pytest.raises(Exception, match="not valid"):
                sessions.login("b" * 30, "there")
    assert sessions.login("a" * 30, "elsewhere")
