"""The watch: over real processes, over a simulated driver, without either, and with everything around it failing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from loadmaster.core.alerts import AlertChange
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.deployment import AlertsSection, Deployment, EngineKind, EngineSection, problems
from loadmaster.core.observation import Snapshot
from loadmaster.render.configuration import shown_value
from loadmaster.service import alertoutlets
from loadmaster.service.alertoutlets import AlertOutlets
from loadmaster.service.enginestate import EngineState, Pid, write_state
from loadmaster.service.places import Places
from loadmaster.service.relay import thoughts_in
from loadmaster.service.sampler import GatewayLoad, Sampler
from loadmaster.service.watch import Watch, WatchEvent
from tests.running import fake_engine
from tests.service.served import Served, served
from tests.simulated_nvml import SimulatedCard, SimulatedNvml
from tests.watchcases import BEGAN, shot, xid

VLLM = Deployment(name="one", model="m", engine=EngineSection(kind="vllm"))


def places_in(folder: Path) -> Places:
    places = Places(folder / "one")
    places.make()
    return places


def say(places: Places, state: Any, **changes: Any) -> None:
    write_state(
        places.engine,
        EngineState(state=state, since=time.time(), runner=Pid.of(os.getpid()), **changes),
    )


# ------------------------------------------------------------------------------------------ one look


def test_a_look_at_a_running_engine_and_its_cards(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    places.backend_log.write_text("an old line: JIT compilation during inference\n", encoding="utf-8")
    with fake_engine(tmp_path, "--tps", "200") as engine:
        port, pid = int(engine.url.rpartition(":")[2]), engine.child.pid
        say(places, "ready", pid=pid, port=port, process=Pid.of(pid))
        library = SimulatedNvml(SimulatedCard(0, processes=[(pid, 1 << 30)]))

        async def looks() -> tuple[Snapshot, Snapshot]:
            sampler = Sampler(VLLM, places, library=library, load=GatewayLoad(held=3, thinking_tokens=7))
            first = await sampler.look()
            body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{engine.url}/v1/chat/completions", json=body) as answer,
            ):
                assert answer.status == 200
            with places.backend_log.open("a", encoding="utf-8") as log:
                log.write("Triton kernel JIT compilation during inference: _a_kernel.\n")
            second = await sampler.look()
            await sampler.close()
            return first, second

        first, second = asyncio.run(looks())
    for seen in (first, second):
        assert seen.missing == (("the engine: ",) if seen.engine is None else ())
        assert seen.engine is not None
        assert (seen.engine.state, seen.engine.running, seen.engine.held) == ("ready", 0, 3)
        assert seen.cards is not None
        assert [(process.pid, process.own) for process in seen.cards[0].processes or ()] == [(pid, False)]
    assert first.engine is not None
    assert second.engine is not None
    assert first.engine.events == {}
    assert second.engine.events == {"kernel-compiled": 1}
    assert first.engine.host_cores is None
    assert second.engine.host_cores is not None
    assert (second.engine.steps or 0) > (first.engine.steps or 0)
    assert (second.engine.generation_tokens or 0) - (first.engine.generation_tokens or 0) == 5


def test_the_hosts_memory_of_an_engine_that_computes_there_is_read(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    filled = bytearray(os.urandom(1 << 20) * 64)
    say(places, "loading", pid=os.getpid(), process=Pid.of(os.getpid()))

    async def look(kind: EngineKind) -> Snapshot:
        deployment = Deployment(name="one", model="m", engine=EngineSection(kind=kind))
        sampler = Sampler(deployment, places, library=SimulatedNvml(driver=False))
        try:
            return await sampler.look()
        finally:
            await sampler.close()

    engine = asyncio.run(look("llamacpp")).engine
    assert engine is not None
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert len(filled) < (engine.resident_bytes or 0) <= highest
    engine = asyncio.run(look("vllm")).engine
    assert engine is not None
    assert engine.resident_bytes is None


def test_without_driver_and_engine_everything_missing_is_said(tmp_path: Path) -> None:
    async def look() -> Snapshot:
        sampler = Sampler(VLLM, places_in(tmp_path), library=SimulatedNvml(driver=False))
        try:
            await sampler.look()
            return await sampler.look()
        finally:
            await sampler.close()

    seen = asyncio.run(look())
    assert seen.cards is None
    assert seen.engine is None
    assert [text.partition(":")[0] for text in seen.missing] == ["the engine", "the cards"]


def test_a_driver_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadmaster.service.sampler._CARDS_WAIT_S", 0.05)
    library = SimulatedNvml(SimulatedCard(0))
    awake = time.monotonic() + 0.6
    reach = SimulatedNvml.nvmlDeviceGetUtilizationRates

    def sleepy(self: SimulatedNvml, card: SimulatedCard) -> Any:
        time.sleep(max(0.0, awake - time.monotonic()))
        return reach(self, card)

    monkeypatch.setattr(SimulatedNvml, "nvmlDeviceGetUtilizationRates", sleepy)

    async def looks() -> list[Snapshot]:
        sampler = Sampler(None, None, library=library)
        found = [await sampler.look() for _ in range(3)]
        while time.monotonic() < awake + 0.1:
            await asyncio.sleep(0.05)
        found.append(await sampler.look())
        await sampler.close()
        return found

    hung, *_, last = asyncio.run(looks())
    assert hung.cards is None
    assert "has not answered for" in hung.missing[0]
    assert last.cards is not None
    assert last.missing == ()


def test_a_state_that_nobody_stands_behind_is_an_engine_that_has_ended(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    write_state(places.engine, EngineState(state="ready", since=1.0, pid=1, port=9, runner=Pid(2**22 - 3, 5)))

    async def look() -> Snapshot:
        sampler = Sampler(VLLM, places, library=SimulatedNvml(driver=False))
        try:
            return await sampler.look()
        finally:
            await sampler.close()

    seen = asyncio.run(look())
    assert seen.engine is not None
    assert (seen.engine.state, seen.engine.pid) == ("exited", None)


def test_the_last_word_of_a_stuck_engine_is_seen_after_its_end(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    say(
        places, "exited", message="stuck: it has work, its counter stands still and probes fail, for 61 s; starts again"
    )

    async def look() -> Snapshot:
        sampler = Sampler(VLLM, places, library=SimulatedNvml(driver=False))
        try:
            return await sampler.look()
        finally:
            await sampler.close()

    seen = asyncio.run(look())
    assert seen.engine is not None
    assert seen.engine.state == "stuck"


# ------------------------------------------------------------------------------------------ the watch


class Played:
    """Plays snapshots; what is no snapshot is raised."""

    def __init__(self, *looks: Snapshot | Exception) -> None:
        self.looks = list(looks)
        self.closed = False

    async def look(self) -> Snapshot:
        item = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(item, Exception):
            raise item
        return item

    async def close(self) -> None:
        self.closed = True


def test_what_fails_is_said_once_and_the_watch_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    played = Played(ValueError("a secret"), ValueError("a secret"), OSError(), *xid())

    async def follow() -> list[WatchEvent]:
        watch = Watch(VLLM, places_in(tmp_path), None, sampler=played, interval_s=0.001)
        task = asyncio.create_task(watch.run())
        seen = []
        async with asyncio.timeout(20):
            async for event in watch.subscribe():
                seen.append(event)
                if event.kind == "findings" and event.data:
                    break
        assert [item.code for item in watch.findings] == ["xid-error"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return seen

    seen = asyncio.run(follow())
    assert {event.kind for event in seen} == {"snapshot", "findings", "state"}
    assert played.closed
    said = [record.getMessage() for record in caplog.records if "a look failed" in record.getMessage()]
    assert len(said) == 2
    assert "a secret" not in caplog.text
    assert "alert xid-error: The driver reports an error of a card: card 1: Xid 79" in caplog.text


def test_a_reader_that_does_not_read_misses_the_oldest_and_holds_up_nothing(tmp_path: Path) -> None:
    played = Played(*(shot(at) for at in range(300)))

    async def follow() -> tuple[float, int]:
        watch = Watch(VLLM, places_in(tmp_path), None, sampler=played, interval_s=0.0)
        reader = watch.subscribe()
        waiting = asyncio.ensure_future(anext(reader))
        task = asyncio.create_task(watch.run())
        await waiting
        async with asyncio.timeout(20):
            while watch.latest is None or watch.latest.at < BEGAN + 299:
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        event = await anext(reader)
        assert isinstance(event.data, Snapshot)
        return event.data.at - BEGAN, len(watch._mailboxes)

    oldest, readers = asyncio.run(follow())
    assert oldest > 200
    assert readers == 1


# ------------------------------------------------------------------------------------------ outlets

CHANGE = AlertChange(BEGAN, True, finding("xid-error", "card 1: Xid 79"))
OVER = AlertChange(BEGAN + 60, False, CHANGE.finding)
MILD = AlertChange(BEGAN, True, finding("slow-thinking", "a request takes 41 s"))


@asynccontextmanager
async def webhook(*statuses: int, wait_s: float = 0.0) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    got: list[dict[str, Any]] = []
    answers = list(statuses)

    async def take(request: web.Request) -> web.Response:
        await asyncio.sleep(wait_s)
        got.append(await request.json())
        return web.Response(status=answers.pop(0) if answers else 204)

    app = web.Application()
    app.router.add_post("/hooks/{secret}", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/hooks/T0PSECRET", got
    finally:
        await runner.cleanup()


async def tell(section: AlertsSection, *changes: AlertChange, until: Any, timeout_s: float = 20.0) -> None:
    outlets = AlertOutlets("one", section)
    task = asyncio.create_task(outlets.run())
    for change in changes:
        outlets.tell(change)
    async with asyncio.timeout(timeout_s):
        while not until():
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_webhook_gets_what_is_bad_enough_again_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alertoutlets, "_FIRST_PAUSE_S", 0.01)

    async def go() -> list[dict[str, Any]]:
        async with webhook(500, 503) as (url, got):
            await tell(AlertsSection(webhook=url), MILD, CHANGE, OVER, until=lambda: len(got) == 4)
            return got

    got = asyncio.run(go())
    assert [(one["event"], one["finding"]["code"]) for one in got] == [("began", "xid-error")] * 3 + [
        ("ended", "xid-error")
    ]
    assert got[0]["deployment"] == "one"
    assert got[0]["schema"] == 1
    assert "T0PSECRET" not in caplog.text


def test_a_webhook_that_stays_away_is_given_up_and_its_address_stays_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alertoutlets, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9/hooks/T0PSECRET")
    asyncio.run(
        tell(
            AlertsSection(webhook_environment="HOOK"), CHANGE, until=lambda: "did not reach the webhook" in caplog.text
        )
    )
    assert "in 3 tries: 127.0.0.1: ClientConnectorError" in caplog.text
    assert "T0PSECRET" not in caplog.text


def test_a_webhook_that_is_slow_does_not_hold_up_the_command(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"

    async def go() -> None:
        async with webhook(wait_s=5.0) as (url, _):
            program = ["sh", "-c", 'cat > "$0" && printf %s "$LOADMASTER_ALERT" >> "$0"', str(kept)]
            section = AlertsSection(webhook=url, command=program, timeout_s=10.0)
            await tell(section, CHANGE, until=lambda: kept.exists() and kept.read_text().endswith("xid-error"))

    asyncio.run(go())
    text = kept.read_text(encoding="utf-8").removesuffix("xid-error")
    assert json.loads(text)["finding"]["cause"] == "card 1: Xid 79"


def test_a_command_that_hangs_is_ended_and_one_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alertoutlets, "_FIRST_PAUSE_S", 0.01)
    numbers = tmp_path / "pids"
    program = ["sh", "-c", 'echo $$ >> "$0"; sleep 600', str(numbers)]
    asyncio.run(
        tell(AlertsSection(command=program, timeout_s=0.2), CHANGE, until=lambda: "did not reach" in caplog.text)
    )
    assert "sh was ended after 0.2 s" in caplog.text
    pids = [int(line) for line in numbers.read_text().split()]
    assert len(pids) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    caplog.clear()
    missing = AlertsSection(command=["/no/such/program"])
    asyncio.run(tell(missing, CHANGE, until=lambda: "did not reach" in caplog.text))
    assert "cannot start /no/such/program: No such file or directory" in caplog.text


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (AlertsSection(webhook="ftp://x/SECRET"), "alerts.webhook: has to begin with http:// or https://"),
        (AlertsSection(webhook="https:// x/SECRET"), "alerts.webhook: has to begin with"),
        (AlertsSection(webhook_environment="A B"), "alerts.webhook_environment: 'A B' cannot be the name"),
        (AlertsSection(command=[""]), "alerts.command: its first word has to be a program"),
        (AlertsSection(timeout_s=0), "alerts.timeout_s: 0 is no number of seconds"),
    ],
)
def test_sections_that_make_no_sense_are_refused(section: AlertsSection, said: str) -> None:
    (found,) = problems(Deployment(name="one", model="m", alerts=section))
    assert found.startswith(said)
    assert "SECRET" not in found


# ------------------------------------------------------------------------------------------ real processes


def _ask_in_vain(one: Served) -> None:
    with contextlib.suppress(OSError, ValueError):
        one.ask(timeout_s=60.0)


@pytest.mark.slow
def test_the_gateways_watch_and_run_engine_agree_that_an_engine_is_stuck(tmp_path: Path) -> None:
    """A gateway under supervision watches, also while the engine is down; both say of a stuck engine that it is."""
    kept = tmp_path / "alerts"
    with served(tmp_path / "home") as one:
        one.configure(
            alerts={"command": ["sh", "-c", 'echo "$LOADMASTER_ALERT_EVENT $LOADMASTER_ALERT" >> "$0"', str(kept)]}
        )
        one.up()
        asked = one.ask()
        assert asked
        healthy = one.run("watch", one.name, "--once", "--json")
        seen = json.loads(healthy.stdout)
        assert healthy.returncode == 0, healthy.stderr
        assert seen["engine"]["state"] == "ready"
        assert seen["engine"]["running"] == 0
        assert seen["cards"] is None
        assert seen["findings"] == []
        assert any("no NVIDIA driver" in text for text in seen["missing"])
        one.fake(stuck=True)
        threading.Thread(target=_ask_in_vain, args=(one,), daemon=True).start()
        one.until(lambda status: kept.exists() and "began engine-stuck" in kept.read_text(), "the watch's alert")
        one.until(
            lambda status: "stuck: it has work" in one.places.backend_log.read_text(errors="replace"),
            "run-engine's own judgement",
        )
        one.until(lambda status: status.state == "ready", "the restart")
        one.until(lambda status: "ended engine-stuck" in kept.read_text(), "the alert's end")
        assert "a look failed" not in one.log()
        assert one.ask()


def test_the_address_of_a_webhook_is_hidden_where_settings_are_shown() -> None:
    secret = Deployment(name="one", model="m", alerts=AlertsSection(webhook="https://hooks.example.org/T0P/SECRET?x=1"))
    assert shown_value(secret, "alerts.webhook") == "https://hooks.example.org/(hidden)"
    assert shown_value(Deployment(name="one", model="m"), "alerts.webhook") is None


def test_thoughts_in_a_stream_are_counted_once() -> None:
    events = (
        b'data: {"choices":[{"delta":{"reasoning_content":"I","reasoning":"I"}}]}\n\n'
        b'data: {"choices":[{"delta":{"reasoning_content":" see","reasoning":" see"}}]}\n\n'
        b'data: {"choices":[{"delta":{"reasoning_content":"","content":"A"}}]}\n\n'
    )
    assert thoughts_in(events) == 2
    assert thoughts_in(b'data: {"choices":[{"delta":{"content":"reasoning"}}]}\n\n') == 0
