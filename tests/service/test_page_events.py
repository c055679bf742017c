"""What the page is told of the deployment: one stream, bounded for slow readers, and the checklist."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from loadmaster.core.observation import CardReading, Snapshot
from loadmaster.core.verification import Limits, Report, Step
from loadmaster.service.enginestate import EngineState, Pid, write_state
from loadmaster.service.pageevents import Mailbox
from tests.gateways import soon
from tests.pages import page
from tests.running import fake_engine

STEP = Step(name="text", kind="transport", status="passed", seconds=0.1, detail="answered")


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


class FakeWatch:
    """Sees one snapshot, and hands on what a test puts in."""

    def __init__(self) -> None:
        self.latest: Snapshot | None = Snapshot(at=1.0, cards=(CardReading(index=0, used_bytes=5),))
        self.findings = ()
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.listening = 0

    async def subscribe(self) -> AsyncIterator[Any]:
        self.listening += 1
        try:
            while True:
                yield await self.queue.get()
        finally:
            self.listening -= 1


def test_a_page_is_told_everything_at_once_and_then_what_changes(tmp_path: Path) -> None:
    log, state = tmp_path / "backend.log", tmp_path / "engine.json"
    log.write_text("INFO loading\nAuthorization: Bearer hf_abcdefgh12345\n")

    async def scene() -> None:
        watch = FakeWatch()
        fields = {"log": str(log), "watch": watch, "engine_state": str(state)}
        write_state(state, EngineState(state="ready", runner=Pid.of(1), port=int(engine.url.rpartition(":")[2])))
        async with page(engine, tmp_path, page_fields=fields) as (_, browser):
            async with browser.stream("GET", "/api/events") as events:
                first: dict[str, Any] = {}
                while not first.get("log", {}).get("lines"):
                    event = await events.next()
                    assert event is not None
                    first[event.name] = event.data
                assert first["state"]["state"] == "ready" and first["snapshot"]["cards"][0]["used_bytes"] == 5
                assert first["log"]["lines"] == ["INFO loading", "Authorization: (hidden)"]
                watch.queue.put_nowait(SimpleNamespace(kind="snapshot", data=Snapshot(at=2.0)))
                assert (await events.until("snapshot"))[-1].data["at"] == 2.0
                with log.open("a") as file:
                    file.write("one more\n")
                assert (await events.until("log"))[-1].data["lines"] == ["one more"]
                write_state(state, EngineState(state="loading", phase="weights", runner=Pid.of(1), since=1.0))
                told = await events.until("state")
                assert (told[-1].data["state"], told[-1].data["phase"]) == ("loading", "weights")
            await soon(lambda: watch.listening == 0, "the end of listening")
            lines = await browser.ask("GET", "/api/log?lines=1")
            assert lines.json["lines"] == ["one more"]

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_the_checklist_runs_once_at_a_time_and_tells_its_steps(tmp_path: Path) -> None:
    async def scene() -> None:
        go_on = asyncio.Event()

        async def prove(progress: Callable[[Step], None]) -> Report:
            progress(STEP)
            await go_on.wait()
            return Report(ok=True, url="http://x", model="fake", seconds=1.0, limits=Limits(), steps=(STEP,), notes=())

        fields: dict[str, Callable[..., Awaitable[Report]]] = {"prove": prove}
        async with (
            page(engine, tmp_path, page_fields=fields) as (_, browser),
            browser.stream("GET", "/api/events") as events,
        ):
            assert (await browser.ask("POST", "/api/verify", json={})).status == 202
            assert (await events.until("verify"))[-1].data["step"]["name"] == "text"
            assert (await browser.ask("POST", "/api/verify", json={})).code == "verify_running"
            go_on.set()
            last = (await events.until("verify"))[-1].data
            assert last["ok"] is True and last["done"] is True
            async with browser.stream("GET", "/api/events") as later:
                told = (await later.until("verify"))[-1].data
                assert told["ok"] is True and [step["name"] for step in told["steps"]] == ["text"]

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_a_mailbox_stays_small_however_slow_its_reader_is() -> None:
    async def scene() -> None:
        mailbox = Mailbox()
        for place in range(5000):
            mailbox.put("snapshot", {"at": place})
            mailbox.put_lines([f"line {place}"])
        content = await mailbox.take()
        assert content.count(b"event: snapshot") == 1 and b'"at":4999' in content
        lines = msgspec.json.decode(content.partition(b"event: log\ndata: ")[2].partition(b"\n\n")[0])["lines"]
        assert len(lines) == 1000 and lines[-1] == "line 4999"

    play(scene())


def test_a_page_that_does_not_read_is_let_go(tmp_path: Path) -> None:
    log = tmp_path / "backend.log"
    log.write_text("")

    async def scene() -> None:
        from loadmaster.service.gatewaysettings import LimitSettings

        limits = LimitSettings(client_timeout_s=0.5)
        async with page(engine, tmp_path, limits=limits, page_fields={"log": str(log)}) as (opened, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.port, limit=1024)
            writer.write(f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{opened.port}\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            events = opened.gateway.page.events  # type: ignore[union-attr]
            assert len(events._mailboxes) == 1

            async def let_go() -> bool:
                with log.open("a") as file:
                    file.write(("x" * 3000 + "\n") * 1000)
                await asyncio.sleep(0.2)
                return not events._mailboxes

            await soon(let_go, "the end of a stream that nobody reads")
            writer.close()

    with fake_engine(tmp_path) as engine:
        play(scene())
