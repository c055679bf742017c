"""Answers of the page over real sockets: written by the server, kept as they grow, followed by whoever comes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from loadmaster.core.facts import Finding
from loadmaster.service import answerstream
from loadmaster.service.enginestate import EngineState, Pid, write_state
from loadmaster.service.gatewaysettings import LimitSettings
from tests.drawn_pictures import corner_picture, encoded, photograph
from tests.fake_engine import WORDS
from tests.gateways import soon
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


def test_a_reload_takes_up_the_answer_where_it_is_and_it_goes_on_without_a_reader(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            asked = {"model": "fake", "text": "Tell", "parameters": {}}
            async with browser.stream("POST", f"/api/conversations/{number}/answer", asked) as events:
                seen = await events.until("delta")
            known = text_of(seen)
            await asyncio.sleep(0.2)  # nobody reads
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"][-1]
            assert kept["state"] == "streaming"
            path = f"/api/conversations/{number}/answer?from={len(known)}"
            async with browser.stream("GET", path) as events:
                rest = await events.rest()
            assert rest[0].data["assistant"]["id"] == kept["id"]
            first = next(event for event in rest if event.name == "delta")
            assert first.data["at"] == len(known)
            whole = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"][-1]
            assert (whole["state"], whole["text"]) == ("done", text_of([*seen, *rest]))
            assert whole["text"] == "".join(WORDS[place % len(WORDS)] for place in range(40))
            assert (await browser.ask("GET", path)).code == "answer_not_found"

    with fake_engine(tmp_path, "--tps", "60", "--tokens", "40") as engine:
        play(scene())


def test_stop_keeps_what_was_said_and_continue_goes_on_from_there(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            asked = {"model": "fake", "text": "Tell"}
            async with browser.stream("POST", f"/api/conversations/{number}/answer", asked) as events:
                await events.until("delta")
                stopped = await browser.ask("POST", f"/api/conversations/{number}/stop", json={})
                assert stopped.json["state"] == "stopped"
                assert (await events.rest())[-1].data["state"] == "stopped"
            await soon_cancelled()
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"]
            assert kept[-1]["state"] == "stopped" and kept[-1]["text"].startswith("The")
            await asyncio.to_thread(engine.fake, tps=0)
            events_ = await browser.answer(number, **{"continue": kept[-1]["id"]}, parameters={"max_tokens": 2})
            sent = (await asyncio.to_thread(engine.fake))["last_body"]
            assert sent["continue_final_message"] is True and sent["add_generation_prompt"] is False
            assert sent["messages"][-1] == {"role": "assistant", "content": kept[-1]["text"]}
            again = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"]
            assert len(again) == 2 and again[-1]["text"] == kept[-1]["text"] + "The picture"
            assert events_[0].data["assistant"]["text"] == kept[-1]["text"]

    async def soon_cancelled() -> None:
        async def gone() -> bool:
            return bool((await asyncio.to_thread(engine.fake))["running"] == 0)

        await soon(gone, "the end at the engine")

    with fake_engine(tmp_path, "--tps", "20", "--tokens", "400") as engine:
        play(scene())


def test_an_answer_is_written_anew_and_a_question_is_edited(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            await browser.answer(number, text="One", parameters={"max_tokens": 1})
            await browser.answer(number, text="Two", parameters={"max_tokens": 1})
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"]
            events = await browser.answer(number, regenerate=kept[1]["id"], parameters={"max_tokens": 3})
            assert events[0].data["user"] is None
            again = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"]
            assert [one["text"] for one in again] == ["One", "The picture shows"]
            edited = await browser.ask(
                "PUT",
                f"/api/conversations/{number}/messages/{again[0]['id']}",
                json={"text": "Other", "truncate": True},
            )
            assert [one["text"] for one in edited.json["messages"]] == ["Other"]
            await browser.answer(number, regenerate=again[0]["id"], parameters={"max_tokens": 2})
            last = (await browser.ask("GET", f"/api/conversations/{number}")).json
            assert [one["text"] for one in last["messages"]] == ["Other", "The picture"]
            assert last["settings"]["max_tokens"] == 2

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_an_engine_killed_in_mid_answer_leaves_the_text_and_a_retry_works(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (opened, browser):
            number = await browser.new()
            asked = {"model": "fake", "text": "Tell"}
            async with browser.stream("POST", f"/api/conversations/{number}/answer", asked) as events:
                seen = await events.until("delta")
                os.kill((await asyncio.to_thread(engine.fake))["pid"], signal.SIGKILL)
                seen += await events.rest()
            assert seen[-1].name == "error" and seen[-1].data["code"] == "engine_down"
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"][-1]
            assert (kept["state"], kept["text"]) == ("failed", text_of(seen)) and kept["error"]["code"] == "engine_down"
            down = await browser.ask("POST", f"/api/conversations/{number}/answer", json=asked)
            assert (down.status, down.code) == (503, "engine_down")  # and nothing was kept of it
            port = engine.url.rpartition(":")[2]
            with fake_engine(tmp_path, "--port", port):
                await soon(lambda: opened.gateway.backends.group("fake").backends[0].up, "the engine's return")
                events_ = await browser.answer(number, regenerate=kept["id"], parameters={"max_tokens": 2})
                assert events_[-1].data["state"] == "done"
            again = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"]
            assert [(one["text"], one["state"]) for one in again] == [("Tell", "done"), ("The picture", "done")]

    with fake_engine(tmp_path, "--tps", "20", "--tokens", "400") as engine:
        play(scene())


def test_a_full_queue_tells_the_place_and_refuses_the_next(tmp_path: Path) -> None:
    async def scene() -> None:
        limits = LimitSettings(queue=1)
        async with page(engine, tmp_path, limits=limits, concurrency=1) as (_, browser):
            numbers = [await browser.new() for _ in range(3)]
            body = {"model": "fake", "text": "Tell"}
            async with (
                browser.stream("POST", f"/api/conversations/{numbers[0]}/answer", body) as first,
                browser.stream("POST", f"/api/conversations/{numbers[1]}/answer", body) as second,
            ):
                await first.until("delta")
                assert (await second.until("queue"))[-1].data == {"place": 1}
                third = await browser.ask("POST", f"/api/conversations/{numbers[2]}/answer", json=body)
                assert (third.status, third.code) == (429, "queue_full") and "retry-after" in third.headers
                empty = (await browser.ask("GET", f"/api/conversations/{numbers[2]}")).json
                assert empty["messages"] == []
                twice = await browser.ask("POST", f"/api/conversations/{numbers[0]}/answer", json=body)
                assert (twice.status, twice.code) == (409, "answer_running")
                for number in numbers[:2]:
                    await browser.ask("POST", f"/api/conversations/{number}/stop", json={})

    with fake_engine(tmp_path, "--tps", "20", "--tokens", "400") as engine:
        play(scene())


def test_thinking_is_told_apart_and_switched(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            await asyncio.to_thread(engine.fake, answers=[["tagged", "<think>It is a 猫 </think> A cat."]])
            events = await browser.answer(number, text="tagged", parameters={"thinking": True})
            assert (text_of(events, "thinking"), text_of(events)) == ("It is a 猫 ", " A cat.")
            sent = (await asyncio.to_thread(engine.fake))["last_body"]
            assert sent["chat_template_kwargs"] == {"enable_thinking": True}
            await asyncio.to_thread(engine.fake, answers=[["bare", "so it is </think> A dog."]])
            events = await browser.answer(number, text="bare")
            assert text_of(events) == " A dog."
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"]
            assert [(one["thinking"], one["text"]) for one in kept[1::2]] == [
                ("It is a 猫 ", " A cat."),
                ("so it is ", " A dog."),
            ]

    with fake_engine(tmp_path, "--tps", "200") as engine:
        play(scene())


def test_the_oldest_turns_are_left_out_when_the_context_is_full(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            for place in range(4):
                events = await browser.answer(
                    number, text=f"Turn {place} " + "word " * 300, parameters={"max_tokens": 2}
                )
            assert events[0].data["forgotten"] > 0 == events[0].data["forgotten"] % 2
            sent = (await asyncio.to_thread(engine.fake))["last_body"]["messages"]
            assert sent[0]["role"] == "user" and not sent[0]["content"].startswith("Turn 0")
            assert sent[-1]["content"].startswith("Turn 3")
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json
            assert len(kept["messages"]) == 8
            context = kept["context"]
            assert context["limit_tokens"] == 1000 and context["basis"] == "measured" and context["forgotten"] > 0

    with fake_engine(tmp_path, "--max-model-len", "1000") as engine:
        play(scene())


def test_a_browser_that_keeps_its_conversations_asks_with_all_messages(tmp_path: Path) -> None:
    picture = encoded(corner_picture(), "PNG")

    async def scene() -> None:
        async with page(engine, None) as (opened, browser):
            session = (await browser.ask("GET", "/api/session")).json
            assert session["storage"] == "browser" and session["read_only"] is None
            assert (await browser.ask("GET", "/api/conversations")).code == "storage_browser"
            assert (await browser.put_picture(picture)).status == 201
            body = {
                "model": "fake",
                "messages": [
                    {"role": "user", "text": "What?", "pictures": [sha256(picture)]},
                    {"role": "assistant", "text": "A cat", "pictures": []},
                    {"role": "user", "text": "Sure?", "pictures": []},
                ],
                "parameters": {"max_tokens": 2},
            }
            async with browser.stream("POST", "/api/answer", body) as events:
                told = await events.rest()
            assert text_of(told) == "The picture" and told[-1].name == "done"
            body["messages"][0]["pictures"] = ["0" * 64]  # type: ignore[index]
            missing = await browser.ask("POST", "/api/answer", json=body)
            assert (missing.status, missing.code) == (409, "picture_missing") and "0" * 64 in missing.body.decode()
            body = {"model": "fake", "messages": [{"role": "user", "text": "Tell"}]}
            await asyncio.to_thread(engine.fake, tps=20, tokens=400)
            async with browser.stream("POST", "/api/answer", body) as events:
                await events.until("delta")

            async def gone() -> bool:
                return bool((await asyncio.to_thread(engine.fake))["running"] == 0)

            await soon(gone, "the end at the engine when the browser leaves")
            assert not opened.gateway.passage.flights and opened.gateway.budget.held == 0

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_what_an_earlier_process_left_unfinished_has_failed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (opened, browser):
            number = await browser.new()
            body = {"model": "fake", "text": "Tell"}
            async with browser.stream("POST", f"/api/conversations/{number}/answer", body) as events:
                await events.until("delta")
                await opened.gateway.drain(0)
                last = (await events.rest())[-1]
                assert last.data["code"] == "gateway_stopping"
        async with page(engine, tmp_path) as (_, browser):
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"][-1]
            assert kept["state"] == "failed" and kept["text"].startswith("The")

    with fake_engine(tmp_path, "--tps", "20", "--tokens", "400") as engine:
        play(scene())


def test_the_diagnosis_of_the_engine_s_end_is_told_with_the_error(tmp_path: Path) -> None:
    state = tmp_path / "engine.json"
    found = Finding(code="oom-cudagraph-capture", severity="error", title="no room", cause="the cache did not fit")

    async def scene() -> None:
        port = int(engine.url.rpartition(":")[2])
        write_state(state, EngineState(state="ready", runner=Pid.of(os.getpid()), port=port))
        fields = {"engine_state": str(state)}
        async with page(engine, tmp_path, state_file=str(state), page_fields=fields) as (_, browser):
            number = await browser.new()
            asked = {"model": "fake", "text": "Tell"}
            async with browser.stream("POST", f"/api/conversations/{number}/answer", asked) as events:
                await events.until("delta")
                os.kill((await asyncio.to_thread(engine.fake))["pid"], signal.SIGKILL)
                await asyncio.sleep(0.3)
                write_state(state, EngineState(state="failed", runner=Pid.of(os.getpid()), findings=(found,)))
                last = (await events.rest())[-1]
            assert last.name == "error" and last.data["findings"][0]["cause"] == "the cache did not fit"
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"][-1]
            assert kept["error"]["findings"][0]["code"] == "oom-cudagraph-capture"

    with fake_engine(tmp_path, "--tps", "20", "--tokens", "400") as engine:
        play(scene())


def test_a_browser_that_leaves_at_once_loses_no_question(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (opened, browser):
            numbers = [await browser.new() for _ in range(8)]
            for place, number in enumerate(numbers):
                body = b'{"model": "fake", "text": "Tell", "parameters": {"max_tokens": 3}}'
                head = (
                    f"POST /api/conversations/{number}/answer HTTP/1.1\r\nHost: 127.0.0.1:{opened.port}\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                ).encode()
                _, writer = await asyncio.open_connection("127.0.0.1", opened.port)
                writer.write(head + body)
                await writer.drain()
                await asyncio.sleep(place * 0.002)
                writer.transport.abort()
            running = opened.gateway.page.conversations.running  # type: ignore[union-attr]
            await asyncio.sleep(0.2)
            await soon(lambda: not running, "the end of all answers")
            for number in numbers:
                kept = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"]
                assert [one["text"] for one in kept] in ([], ["Tell", "The picture shows"]), kept
            assert opened.gateway.budget.held == 0 and not opened.gateway.passage.flights

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_an_engine_that_writes_without_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answerstream, "MOST_LETTERS", 1000)

    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            events = await browser.answer(number, text="Tell")
            assert events[-1].data["code"] == "answer_too_long" and 1000 < len(text_of(events)) < 100_000

            async def gone() -> bool:
                return bool((await asyncio.to_thread(engine.fake))["running"] == 0)

            await soon(gone, "the end at the engine")

    with fake_engine(tmp_path, "--tps", "2000", "--tokens", "100000") as engine:
        play(scene())


def test_an_answer_stays_until_a_new_one_begins(tmp_path: Path) -> None:
    async def scene() -> None:
        async with page(engine, tmp_path) as (_, browser):
            number = await browser.new()
            await browser.answer(number, text="One", parameters={"max_tokens": 2})
            kept = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"]
            await asyncio.to_thread(engine.fake, status=500)
            for more in ({}, {"text": "Other"}):
                failed = await browser.answer(number, regenerate=kept[0]["id"], **more)
                assert failed[-1].name == "error"
                after = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"]
                assert after == kept
            await asyncio.to_thread(engine.fake, status=None)
            await browser.answer(number, regenerate=kept[0]["id"], text="Other", parameters={"max_tokens": 3})
            after = (await browser.ask("GET", f"/api/conversations/{number}")).json["messages"]
            assert [one["text"] for one in after] == ["Other", "The picture shows"]

    with fake_engine(tmp_path) as engine:
        play(scene())
