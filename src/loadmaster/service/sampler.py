"""One look at everything that can be read of a deployment: cards, engine, log. What cannot be read is said.

A look costs a few milliseconds of one core. The driver is asked in a thread: one that hangs holds up nothing, its
cards are then missing until it answers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp
import msgspec
from msgspec import Struct

from loadmaster.core.alertrules import events_of
from loadmaster.core.deployment import Deployment
from loadmaster.core.observation import CardReading, EngineReading, Snapshot
from loadmaster.edge.cardreadings import CardSampler
from loadmaster.edge.logfile import LogFile
from loadmaster.edge.process import Identity
from loadmaster.edge.processtime import ProcessorUse
from loadmaster.edge.residentmemory import resident_bytes
from loadmaster.edge.runmembers import RunMembers
from loadmaster.engines.metrics import Figures, engine_reading, read_figures
from loadmaster.service.background import in_thread
from loadmaster.service.enginechoice import engine_of
from loadmaster.service.enginestate import EngineState, read_run, read_state
from loadmaster.service.places import Places

_METRICS_TIMEOUT_S = 0.8
_MOST_METRICS_BYTES = 8 * 1024 * 1024
_CARDS_WAIT_S = 0.8
_MOST_BLOCKS = 8  # of the log at one look, each a MiB
_LOOK_FOR_DRIVER_S = 60.0  # a driver that is not there may be installed, or come up late
_STUCK = "stuck: "  # how run-engine's message begins
_LISTENING = ("ready", "stuck", "warming-up")


class GatewayLoad(Struct, frozen=True):
    """What only the gateway knows: requests that wait in it, and tokens of thoughts that it passed on."""

    held: int | None = None
    thinking_tokens: int | None = None


class Looker(Protocol):
    """What a watch takes its readings from."""

    async def look(self) -> Snapshot: ...

    async def close(self) -> None: ...


class Cards:
    """The cards through NVML, read in a thread of its own each time. ``library``: stands in for pynvml."""

    def __init__(self, library: Any = None, environ: Mapping[str, str] | None = None) -> None:
        self._sampler = CardSampler(library, environ)
        self._reading: asyncio.Future[tuple[CardReading, ...] | None] | None = None
        self._asked_at = 0.0
        self._none_until = 0.0
        self._missing = ""

    async def look(self) -> tuple[tuple[CardReading, ...] | None, str | None]:
        """All cards, and what is missing in a sentence."""
        now = time.monotonic()
        if self._reading is None:
            if now < self._none_until:
                return None, self._missing
            self._asked_at = now
            self._reading = asyncio.ensure_future(in_thread(self._sampler.read))
        done, _ = await asyncio.wait({self._reading}, timeout=_CARDS_WAIT_S)
        if not done:
            return None, f"the cards: the driver has not answered for {time.monotonic() - self._asked_at:.0f} s"
        reading, self._reading = self._reading, None
        try:
            cards = reading.result()
        except Exception as error:
            return None, f"the cards: {type(error).__name__} while they were read"
        problem = self._sampler.problem
        if cards is None:
            self._none_until = time.monotonic() + _LOOK_FOR_DRIVER_S
            self._missing = f"the cards: {problem}"
            return None, self._missing
        return cards, f"the cards: {problem}" if problem is not None else None

    def close(self) -> None:
        if self._reading is None:  # else the driver hangs, and would hang here too
            self._sampler.close()


class Sampler:
    """Of one deployment; ``deployment`` None: the cards alone. ``load``: what the gateway around it knows."""

    def __init__(
        self,
        deployment: Deployment | None,
        places: Places | None,
        *,
        library: Any = None,
        load: GatewayLoad | None = None,
    ) -> None:
        self._deployment = deployment
        self._places = places
        environ = {**os.environ, **(deployment.engine.env if deployment is not None else {})}
        self._cards = Cards(library, environ)
        self._members = RunMembers()
        self._processors = ProcessorUse()
        self._state: EngineState | None = None
        self._state_seen: tuple[int, int] | None = None
        self._run: Identity | None = None
        self._log = LogFile(places.backend_log, from_end=True) if places is not None else None
        self._events: dict[str, int] = {}
        self._figures: Figures | None = None
        self._session: aiohttp.ClientSession | None = None
        self._key = engine_of(deployment).api_key(deployment) if deployment is not None else None
        # a container's first process is docker; llama.cpp computes in its own
        section = deployment.engine if deployment is not None else None
        self._in_host_memory = section is not None and section.kind == "llamacpp" and section.container is None
        self._has_host_process = section is not None and section.kind == "vllm" and section.container is None
        self.load = load

    async def look(self) -> Snapshot:
        """Everything, now."""
        missing: list[str] = []
        cards_work = asyncio.ensure_future(self._cards.look())
        try:
            engine = await self._engine(missing)
            cards, problem = await cards_work
        finally:
            cards_work.cancel()
        if problem is not None:
            missing.append(problem)
        if cards is not None:
            self._members.follow(self._run)
            cards = self._members.told(cards)
            if engine is not None and any(process.own is None for card in cards for process in card.processes or ()):
                missing.append("whose the cards' processes are: the driver's numbers are of another process table")
        return Snapshot(at=time.time(), cards=cards, engine=engine, missing=tuple(missing))

    async def close(self) -> None:
        self._cards.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ------------------------------------------------------------------------------------------ the engine

    async def _engine(self, missing: list[str]) -> EngineReading | None:
        if self._places is None:
            return None
        self._read_events()
        state = self._read_state(self._places)
        if state is None:
            missing.append("the engine: it has not been started, or its state cannot be read")
            return None
        pid = state.pid
        reading = EngineReading(
            # run-engine ends a stuck engine at once: its last word may be all that a look each second sees of it
            state="stuck" if state.state == "exited" and state.message.startswith(_STUCK) else state.state,
            phase=state.phase,
            since=state.since or None,
            pid=pid,
            held=self.load.held if self.load is not None else None,
            thinking_tokens=self.load.thinking_tokens if self.load is not None else None,
            host_cores=self._processors.cores(pid if self._has_host_process else None, time.monotonic()),
            events=dict(self._events),
            resident_bytes=resident_bytes((pid,)) if self._in_host_memory and pid is not None else None,
        )
        if self._in_host_memory and pid is not None and reading.resident_bytes is None:
            missing.append("the engine's memory: the system does not tell it")
        if pid is None or state.port is None or state.state not in _LISTENING:
            self._figures = None
            return reading
        figures, problem = await self._ask_metrics(state.port)
        if figures is None:
            missing.append(f"the engine's metrics: {problem}")
            return reading
        before, self._figures = self._figures, figures
        return engine_reading(figures, before, reading)

    def _read_state(self, places: Places) -> EngineState | None:
        """The file, decoded only when it has changed; a state whose writer is gone is an engine that has ended."""
        try:
            found = places.engine.stat()
        except OSError:
            self._state, self._state_seen, self._run = None, None, None
            return None
        seen = (found.st_mtime_ns, found.st_ino)
        if seen != self._state_seen:
            self._state, self._state_seen = read_state(places.engine), seen
            run = read_run(places.engine_run)
            self._run = run.identity if run is not None else None
        state = self._state
        if state is not None and state.state not in ("exited", "failed") and not _runs(state):
            return msgspec.structs.replace(state, state="exited", pid=None, port=None)
        return state

    def _read_events(self) -> None:
        if self._log is None:
            return
        for _ in range(_MOST_BLOCKS):
            lines = self._log.new_lines()
            if not lines:
                return
            for line in lines:
                for event in events_of(line):
                    self._events[event] = self._events.get(event, 0) + 1

    async def _ask_metrics(self, port: int) -> tuple[Figures | None, str]:
        if self._session is None:
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(
                headers=headers, trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=True
            )
        timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT_S)
        try:
            async with self._session.get(
                f"http://127.0.0.1:{port}/metrics", timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    return None, f"it answers with status {answer.status}"
                data = bytearray()
                async for part in answer.content.iter_any():
                    data += part
                    if len(data) > _MOST_METRICS_BYTES:
                        return None, f"more than {_MOST_METRICS_BYTES >> 20} MiB"
        except TimeoutError:
            return None, f"no answer within {_METRICS_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return None, f"it does not answer ({type(error).__name__})"
        figures = read_figures(data.decode("utf-8", "replace"))
        return figures, "it tells nothing of requests" if figures is None else ""


def _runs(state: EngineState) -> bool:
    """Whether somebody still stands behind what the file says."""
    return state.runner is None or state.runner.alive
