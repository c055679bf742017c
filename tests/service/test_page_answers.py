"""Answers of the page over real sockets: written by the server, kept as they grow, followed by whoever comes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.drawn_pictures import corner_picture, encoded, photograph
from tests.pages import page, sha256, text_of
from tests.running import fake_engine


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_a_conversation_of_two_turns_about_a_picture(tmp_path: Path) -> None:
    picture = encoded(corner_picture(), "PNG")

    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            put = await browser.put_picture(picture)
            assert put.status == 201, put.body
            assert (put.json["width"], put.json["height"], put.json["bytes"]) == (64, 48, len(picture))
            assert (await browser.ask("HEAD", f"/api/pictures/{sha256(picture)}")).status == 200
            events = await browser.answer(
                number, text="What is this?", pictures=[sha256(picture)], parameters={"max_tokens": 4}
            )
            assert [event.name for event in events if event.name != "delta"] == ["start", "numbers", "done"]
            assert events[0].data["title"] == "What is this?"
            assert text_of(events) == "The picture shows a"
            assert events[-1].data["state"] == "done" and events[-1].data["numbers"]["completion_tokens"] == 4
            await browser.answer(number, text="And then?", parameters={"max_tokens": 2})
            sent = (await asyncio.to_thread(engine.fake))["last_body"]["messages"]
            assert [message["role"] for message in sent] == ["user", "assistant", "user"]
            assert sent[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json
            assert [message["text"] for message in kept["messages"]] == [
                "What is this?", "The picture shows a", "And then?", "The picture",
            ]  # fmt: skip
            assert kept["messages"][0]["pictures"][0]["sha256"] == sha256(picture)
            listed = (await browser.ask("GET", "/api/conversations")).json["conversations"]
            assert [(one["title"], one["messages"], one["pictures"]) for one in listed] == [("What is this?", 4, 1)]

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_ten_photographs_do_not_make_the_request_of_the_browser_longer(tmp_path: Path) -> None:
    pictures = [encoded(photograph(200 + place, 150), "JPEG") for place in range(10)]

    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            for picture in pictures:
                assert (await browser.put_picture(picture, "image/jpeg")).status == 201
                body = {"text": "This?", "pictures": [sha256(picture)], "parameters": {"max_tokens": 2}}
                assert len(str(body)) < 200
                events = await browser.answer(number, **body)
                assert events[-1].name == "done"
            sent = (await asyncio.to_thread(engine.fake))["last_body"]["messages"]
            shown = [part for message in sent for part in message["content"] if isinstance(part, dict)]
            assert sum(part["type"] == "image_url" for part in shown) == 4  # the newest; the rest is told in words
            assert "6 older pictures left out" in events[-1].data["numbers"]["changes"]

    with fake_engine(tmp_path) as engine:
        play(scene())
