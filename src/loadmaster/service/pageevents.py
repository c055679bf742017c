"""The deployment as the page sees it: one stream of events for each browser, the history, the log, the checklist.

What changes is read once for all browsers, and only while one listens. Each has a mailbox that holds the newest of a
kind and so many lines of the log: a browser that is slow misses what is outdated and costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from aiohttp import web

from loadmaster.core.secrets import hide_in_text
from loadmaster.core.verification import Report, Step
from loadmaster.edge.logfile import LogFile, last_lines
from loadmaster.edge.runquery import RunQuery, RunsUnreadable
from loadmaster.service.backends import current_state
from loadmaster.service.enginestate import EngineState
from loadmaster.service.errors import ApiError
from loadmaster.service.gatewaysettings import Watched
from loadmaster.service.pagerequest import Desk, event, reply, whole_number

MOST_STREAMS = 256
_LOOK_S = 0.5
_KEEP_ALIVE_S = 15.0
_LINES_AT_FIRST = 200
_MOST_LINES = 1000  # of the log that wait for a browser
_MOST_READS = 16  # of the log's new lines, a MiB each, before the state is looked at again
_LONGEST_LINE = 4000  # letters
_POINTS = 900

# The page's name of a series -> the store's; "{}" stands for a card's number.
_OF_CARDS = {"used": "used_bytes", "utilization": "utilization"}
_OF_ENGINE = {
    "running": "engine.running",
    "waiting": "engine.waiting",
    "cache": "engine.kv_cache_usage",
    "first_token": "engine.time_to_first_token_s",
    "tokens": "engine.generation_tokens_per_s",
}

_log = logging.getLogger("loadmaster.gateway")


class Mailbox:
    """What a browser has not been told yet: the newest of each kind, the log's last lines, all steps of a proof."""

    def __init__(self) -> None:
        self._newest: dict[str, Any] = {}
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._steps: list[Any] = []
        self._reset = False
        self._filled = asyncio.Event()

    def put(self, kind: str, data: Any) -> None:
        self._newest[kind] = data
        self._filled.set()

    def put_lines(self, lines: Iterable[str], *, reset: bool = False) -> None:
        if reset:
            self._lines.clear()
            self._reset = True
        self._lines += lines
        self._filled.set()

    def put_step(self, data: Any, *, reset: bool = False) -> None:
        if reset:
            self._steps.clear()
        self._steps.append(data)
        self._filled.set()

    async def take(self) -> bytes:
        """All that is there, once something is."""
        await self._filled.wait()
        self._filled.clear()
        parts = [event(kind, data) for kind, data in self._newest.items()]
        self._newest.clear()
        if self._lines or self._reset:
            parts.append(event("log", {"lines": list(self._lines), "reset": self._reset}))
            self._lines.clear()
            self._reset = False
        parts += [event("verify", data) for data in self._steps]
        self._steps.clear()
        return b"".join(parts)


class PageEvents:
    """The handlers, and what all browsers share."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        settings = desk.settings
        self._log_path = Path(settings.log) if settings.log is not None else None
        self._runs = RunQuery(Path(settings.runs)) if settings.runs is not None else None
        self._mailboxes: set[Mailbox] = set()
        self._looking: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._proof: asyncio.Task[None] | None = None
        self._steps: list[Any] = []
        self._verdict: dict[str, Any] | None = None
        self._lines: deque[str] = deque(maxlen=_LINES_AT_FIRST)

    def attach(self, app: web.Application) -> None:
        app.router.add_get("/api/events", self.events, allow_head=False)
        app.router.add_get("/api/history", self.history)
        app.router.add_get("/api/log", self.log)
        app.router.add_post("/api/verify", self.verify)

    async def close(self) -> None:
        tasks = [task for task in (self._looking, self._listening, self._proof) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------ the stream

    async def events(self, request: web.Request) -> web.StreamResponse:
        self._desk.visitor(request)
        if len(self._mailboxes) >= MOST_STREAMS:
            raise ApiError(429, "too_many_streams", "as many pages listen as may listen", retry_after=10)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        patience = self._desk.gateway.limits.client_timeout_s
        async with self._mailbox() as mailbox:
            await response.prepare(request)
            await response.write(b"retry: 2000\n\n")
            await self._tell_all(mailbox)
            while not self._desk.gateway.stopping:
                try:
                    async with asyncio.timeout(_KEEP_ALIVE_S):
                        news = await mailbox.take()
                except TimeoutError:
                    news = b": still here\n\n"
                if not self._desk.welcome(request):
                    break  # a key that was taken away hears nothing more
                try:
                    async with asyncio.timeout(patience):
                        await response.write(news)
                except TimeoutError:
                    raise ConnectionResetError("the browser did not read its events") from None
            await response.write_eof()
        return response

    @contextlib.asynccontextmanager
    async def _mailbox(self) -> AsyncIterator[Mailbox]:
        mailbox = Mailbox()
        self._mailboxes.add(mailbox)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        watch = self._desk.settings.watch
        if watch is not None and (self._listening is None or self._listening.done()):
            self._listening = asyncio.create_task(self._listen(watch))
        try:
            yield mailbox
        finally:
            self._mailboxes.discard(mailbox)
            if not self._mailboxes:
                for task in (self._looking, self._listening):
                    if task is not None:
                        task.cancel()
                self._looking = self._listening = None

    async def _tell_all(self, mailbox: Mailbox) -> None:
        """What a page that was just opened has to know."""
        settings = self._desk.settings
        mailbox.put("state", self._state())
        if settings.plan is not None:
            mailbox.put("plan", settings.plan)
        if settings.watch is not None:
            if settings.watch.latest is not None:
                mailbox.put("snapshot", settings.watch.latest)
            mailbox.put("findings", settings.watch.findings)
        reconciled = await asyncio.to_thread(self._reconciled)
        if reconciled is not None:
            mailbox.put("reconcile", reconciled)
        mailbox.put_lines(self._lines, reset=True)
        if self._steps or self._verdict is not None:
            mailbox.put_step({"steps": list(self._steps)} | (self._verdict or {}))

    async def _look(self) -> None:
        """Twice a second: the engine's state and its log's new lines."""
        log = LogFile(self._log_path, from_end=True) if self._log_path is not None else None
        if self._log_path is not None:
            self._lines.clear()
            self._tell_lines(map(_shown, await asyncio.to_thread(last_lines, self._log_path, _LINES_AT_FIRST)))
        before: dict[str, Any] = {}
        while True:
            state = self._state()
            if {**state, "seconds": None} != before:
                before = {**state, "seconds": None}
                self._put("state", state)
                if state["state"] == "ready":
                    reconciled = await asyncio.to_thread(self._reconciled)
                    if reconciled is not None:
                        self._put("reconcile", reconciled)
            for _ in range(_MOST_READS):
                lines = await asyncio.to_thread(log.new_lines) if log is not None else []
                if not lines:
                    break
                self._tell_lines([_shown(line) for line in lines[-_MOST_LINES:]])
            await asyncio.sleep(_LOOK_S)

    def _tell_lines(self, lines: Iterable[str]) -> None:
        told = list(lines)
        self._lines += told
        for mailbox in self._mailboxes:
            mailbox.put_lines(told)

    async def _listen(self, watch: Watched) -> None:
        """Hand on what the watch sees."""
        async for seen in watch.subscribe():
            if seen.kind in ("snapshot", "findings"):
                self._put(seen.kind, seen.data)

    def _put(self, kind: str, data: Any) -> None:
        for mailbox in self._mailboxes:
            mailbox.put(kind, data)

    def _state(self) -> dict[str, Any]:
        """The engine's state, and how busy the gateway is."""
        group = next(iter(self._desk.gateway.backends.groups.values()))
        path = self._desk.settings.engine_state
        known = current_state(path)
        up = any(backend.up for backend in group.backends)
        state = _name(known, up=up)
        reason = None if up else group.reason()
        finding = known.findings[0] if known is not None and known.findings else None
        return {
            "state": state,
            "phase": known.phase if known is not None else None,
            "words": None if reason is None else reason.message,
            "code": None if reason is None else reason.code,
            "seconds": time.time() - known.since if known is not None and known.since else None,
            "finding": finding,
            "restarts": known.restarts if known is not None else None,
            "retry_at": known.retry_at if known is not None else None,
            "answering": group.admission.running,
            "queue": group.admission.waiting,
            "places": group.admission.limit,
        }

    def _reconciled(self) -> Any:
        """Plan against actual of the newest run; None: nothing was compared yet."""
        if self._runs is None:
            return None
        with contextlib.suppress(RunsUnreadable):
            runs = self._runs.runs(self._desk.settings.deployment, 1)
            found = self._runs.reconciliations(runs[0].number) if runs else []
            return found[-1] if found else None
        return None

    # ------------------------------------------------------------------------------------------ history and log

    async def history(self, request: web.Request) -> web.StreamResponse:
        """Readings of the last seconds as columns on one axis, by the page's names."""
        self._desk.visitor(request)
        seconds = whole_number(request, "seconds", 900, 1, 400 * 24 * 3600)
        points = whole_number(request, "points", _POINTS, 1, 4 * _POINTS)
        if self._runs is None:
            return reply({"schema": 1, "at": [], "step_s": 1, "columns": {}})
        now = time.time()
        try:
            found = await asyncio.to_thread(
                self._runs.readings, self._desk.settings.deployment, now - seconds, now + 1, points
            )
        except RunsUnreadable as error:
            raise ApiError(503, "history_unreadable", str(error)) from None
        columns = {}
        for name, column in found.series.items():
            shown = _page_name(name)
            if shown is not None:
                columns[shown] = column.mean
        return reply({"schema": 1, "at": found.at, "step_s": found.step_s, "columns": columns})

    async def log(self, request: web.Request) -> web.StreamResponse:
        self._desk.visitor(request)
        count = whole_number(request, "lines", _LINES_AT_FIRST, 1, 5000)
        lines = [] if self._log_path is None else await asyncio.to_thread(last_lines, self._log_path, count)
        return reply({"schema": 1, "lines": [_shown(line) for line in lines]})

    # ------------------------------------------------------------------------------------------ the checklist

    async def verify(self, request: web.Request) -> web.StreamResponse:
        """Begin the checklist, one at a time; its steps come as events."""
        self._desk.visitor(request)
        await self._desk.read(request, dict, 4096)
        prove = self._desk.settings.prove
        if prove is None:
            raise ApiError(503, "verify_unavailable", "this gateway cannot prove a deployment")
        if self._proof is not None and not self._proof.done():
            raise ApiError(409, "verify_running", "the checklist runs already")
        self._steps, self._verdict = [], None

        def progress(step: Step) -> None:
            self._steps.append(step)
            for mailbox in self._mailboxes:
                mailbox.put_step({"step": step})

        async def run() -> None:
            try:
                self._verdict = _verdict(await prove(progress))
            except Exception as error:
                _log.error("the checklist failed: %s", type(error).__name__)
                problem = {"code": "verify_failed", "message": "the checklist failed; the log says where"}
                self._verdict = {"done": True, "ok": None, "error": problem}
            for mailbox in self._mailboxes:
                mailbox.put_step(self._verdict)

        self._proof = asyncio.create_task(run())
        return reply({"schema": 1, "running": True}, 202)


def _verdict(report: Report) -> dict[str, Any]:
    return {"done": True, "ok": report.ok, "seconds": report.seconds, "notes": report.notes}


def _name(state: EngineState | None, *, up: bool) -> str:
    """The state's name; the gateway's own eyes count where nobody else looks."""
    if state is None:
        return "ready" if up else "down"
    return "down" if state.state == "ready" and not up else state.state


def _page_name(name: str) -> str | None:
    """The page's name of a stored series; None: the page does not draw it."""
    for shown, stored in _OF_ENGINE.items():
        if name == stored:
            return shown
    card, _, what = name.partition(".")
    for shown, stored in _OF_CARDS.items():
        if what == stored and card.startswith("card") and card[4:].isdigit():
            return f"{shown}.{card[4:]}"
    return None


def _shown(line: str) -> str:
    """A line as it may be read by others: secrets of known shapes and controls taken out, bounded."""
    text = hide_in_text(line[:_LONGEST_LINE])
    return "".join(letter if letter >= " " or letter == "\t" else "\ufffd" for letter in text)
