"""The engines behind the gateway: which of them answer, and which one is next.

An engine is looked after in two ways: a probe of ``/v1/models`` every few seconds, and every connection that it
refuses. It is out at once when it refuses one, after some failed probes otherwise, and back after one success.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from loadmaster.service.admission import Admission
from loadmaster.service.enginestate import FINAL, EngineState, read_state
from loadmaster.service.errors import ApiError
from loadmaster.service.gatewaysettings import (
    CHAT_ROUTE,
    COMPLETIONS_ROUTE,
    MODELS_ROUTE,
    BackendSettings,
    LimitSettings,
    ProbeSettings,
)

MOST_PROBE_BYTES = 1 << 20
_PROBE_FAULTS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)

_log = logging.getLogger("loadmaster.gateway")


# What the engine's state means to a request: the error's code, how it is said, and when to ask again in seconds.
_STATES = {
    "checking": ("model_starting", "model starting", 5),
    "waiting-for-memory": ("model_starting", "model starting", 5),
    "loading": ("model_starting", "model starting", 5),
    "warming-up": ("model_starting", "model starting", 5),
    "stuck": ("engine_stuck", "the engine is stuck and is restarted", 5),
    "stopping": ("engine_stopping", "the engine is stopping", 10),
    "exited": ("engine_down", "the engine has exited", 10),
    "failed": ("engine_failed", "the engine failed and is not started again", 60),
}


def current_state(path: str | None) -> EngineState | None:
    """What ``engine.json`` says; None when there is none, or whoever wrote it ended before it could be true."""
    state = read_state(Path(path)) if path is not None else None
    if state is None or (state.state not in FINAL and state.runner is not None and not state.runner.alive):
        return None
    return state


def state_error(state: EngineState | None, now: float) -> ApiError | None:
    """The refusal that an engine's state asks for; None when the state is no obstacle. ``now``: since 1970."""
    if state is None or state.state not in _STATES:
        return None
    code, words, wait = _STATES[state.state]
    why = state.message or state.phase or state.state.replace("-", " ")
    if state.findings:
        why = state.findings[0].title
    spent = f", {max(0.0, now - state.since):.0f} s so far" if code == "model_starting" and state.since else ""
    return ApiError(503, code, f"{words}: {' '.join(why.split())[:300]}{spent}", retry_after=wait)


class Backend:
    """One engine as the gateway sees it."""

    def __init__(self, settings: BackendSettings) -> None:
        self.settings = settings
        self.url = settings.url.rstrip("/")
        self.served_name = settings.served_name or settings.model
        self.outstanding = 0
        self.up = False
        self.failures = 0
        self.error: ApiError | None = None
        self.card: dict[str, Any] = {}
        self.answered_at: float | None = None  # when a byte of an answer last came, by the loop's clock
        self.thinking_tokens = 0  # of thoughts that streams passed on, about one an event
        self.look = asyncio.Event()
        self._asking: asyncio.Task[bool] | None = None

    def follow(self, state: EngineState | None) -> None:
        """Take over where the engine listens and what it calls its model: a restart may change both."""
        if state is None:
            return
        if state.port is not None:
            self.url = str(URL(self.settings.url).with_port(state.port)).rstrip("/")
        if state.model is not None and self.settings.served_name is None:
            self.served_name = state.model

    def headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity"}
        if self.settings.api_key is not None:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        return headers

    def reason(self) -> ApiError:
        """Why it does not answer, by its state and by the last probe."""
        error = state_error(current_state(self.settings.state_file), time.time())
        return error or self.error or ApiError(503, "engine_down", "the engine does not answer", retry_after=5)


class Group:
    """The replicas of one model, and who may go to them."""

    def __init__(self, model: str, backends: tuple[Backend, ...], queue: int) -> None:
        self.model = model
        self.backends = backends
        self.admission = Admission(sum(backend.settings.concurrency for backend in backends), queue)

    def fit(self) -> None:
        """Places are those of the replicas that answer; of all, while none does."""
        working = [backend for backend in self.backends if backend.up] or list(self.backends)
        self.admission.set_limit(sum(backend.settings.concurrency for backend in working))

    def check_up(self) -> None:
        """Raises :class:`ApiError` when no replica answers."""
        if not any(backend.up for backend in self.backends):
            raise self.reason()

    def reason(self) -> ApiError:
        errors = [backend.reason() for backend in self.backends]
        return next((error for error in errors if error.code == "model_starting"), errors[0])

    def choose(self, tried: Iterable[Backend] = ()) -> Backend:
        """The replica with the fewest requests, one with a free place first. Raises :class:`ApiError`."""
        able = [backend for backend in self.backends if backend.up and backend not in tried]
        if not able:
            raise self.reason()
        return min(able, key=lambda one: (one.outstanding >= one.settings.concurrency, one.outstanding))


class Backends:
    """All engines by the model that users ask for."""

    def __init__(self, settings: Iterable[BackendSettings], limits: LimitSettings, probes: ProbeSettings) -> None:
        by_model: dict[str, list[Backend]] = {}
        for one in settings:
            by_model.setdefault(one.model, []).append(Backend(one))
        self.groups = {model: Group(model, tuple(those), limits.queue) for model, those in by_model.items()}
        self._limits = limits
        self._probes = probes
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the backends are not open")
        return self._session

    async def open(self) -> None:
        """Begin to look after the engines; returns when each was asked once."""
        # A connection for each request: an engine closes idle ones when it likes, and a request that runs into that
        # must not be sent twice. On the same machine a new one costs a fraction of a millisecond.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self._limits.connect_timeout_s,
            sock_read=self._limits.first_byte_timeout_s,
        )
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )
        pairs = [(group, backend) for group in self.groups.values() for backend in group.backends]
        await asyncio.gather(*(self.probe(group, backend) for group, backend in pairs))
        self._tasks = [asyncio.create_task(self._look_after(group, backend)) for group, backend in pairs]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def group(self, model: str | None) -> Group:
        """The replicas of a model. Raises :class:`ApiError` 404, which names the models that there are."""
        if model is None and len(self.groups) == 1:
            return next(iter(self.groups.values()))
        group = self.groups.get(model) if model is not None else None
        if group is None:
            there = ", ".join(list(self.groups)[:20])
            if model is None:
                raise ApiError(400, "model_missing", f"say which model: {there}", param="model")
            raise ApiError(404, "model_not_found", f"no model {model[:100]!r}, there is {there}", param="model")
        return group

    def refused(self, group: Group, backend: Backend) -> None:
        """A connection to it failed: it is out until a probe succeeds."""
        self._down(group, backend, None, at_once=True)

    async def _look_after(self, group: Group, backend: Backend) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._probes.interval_s):
                    await backend.look.wait()
            backend.look.clear()
            try:
                await self.probe(group, backend)
            except Exception:
                _log.exception("a probe of %s failed in an unforeseen way", backend.url)

    async def probe(self, group: Group, backend: Backend) -> None:
        """Ask the engine once for its models, unless its state says that it is not ready."""
        state = current_state(backend.settings.state_file)
        backend.follow(state)
        blocked = state_error(state, time.time())
        if blocked is not None:
            self._down(group, backend, blocked, at_once=True)
            return
        try:
            status, value = await self._fetch(backend, MODELS_ROUTE, None, self._probes.timeout_s)
        except _PROBE_FAULTS as error:
            what = "too slow" if isinstance(error, TimeoutError) else "not reachable"
            if isinstance(error, aiohttp.ClientResponseError):
                what = "not speaking HTTP"
            reason = ApiError(503, "engine_down", f"the engine is {what}", retry_after=5)
            self._down(group, backend, reason, at_once=isinstance(error, aiohttp.ClientConnectorError))
            return
        cards = value.get("data") if isinstance(value, dict) else None
        if status != 200 or not isinstance(cards, list):
            known = {401: "asks for another key", 403: "asks for another key", 503: "is not ready yet"}
            what = known.get(status, f"answers {status} when asked for its models")
            code = "model_starting" if status == 503 else "engine_down"
            self._down(group, backend, ApiError(503, code, f"the engine {what}", retry_after=5), at_once=True)
            return
        names = [card.get("id") for card in cards if isinstance(card, dict)]
        if backend.served_name not in names:
            served = ", ".join(str(name)[:60] for name in names[:5]) or "nothing"
            reason = ApiError(
                503, "engine_serves_another", f"the engine serves {served}, not {backend.served_name}", retry_after=30
            )
            self._down(group, backend, reason, at_once=True)
            return
        backend.card = cards[names.index(backend.served_name)]
        backend.failures, backend.error = 0, None
        if not backend.up:
            _log.info("%s answers at %s", backend.served_name, backend.url)
            backend.up = True
            group.fit()

    def _down(self, group: Group, backend: Backend, reason: ApiError | None, *, at_once: bool) -> None:
        backend.failures += 1
        backend.error = reason
        if backend.up and (at_once or backend.failures >= self._probes.failures):
            _log.warning("%s is out: %s", backend.url, reason or "it refused a connection")
            backend.up = False
            group.fit()

    async def _fetch(
        self, backend: Backend, route: str, question: dict[str, Any] | None, timeout_s: float
    ) -> tuple[int, Any]:
        """Status and the JSON value of a short answer. Raises one of the probe's faults."""
        content = None if question is None else msgspec.json.encode(question)
        headers = backend.headers() | ({} if content is None else {"Content-Type": "application/json"})
        async with asyncio.timeout(timeout_s):
            async with self.session.request(
                "GET" if content is None else "POST",
                backend.url + route,
                data=content,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                parts = bytearray()
                async for part in answer.content.iter_any():
                    parts += part
                    if len(parts) > MOST_PROBE_BYTES:
                        raise ValueError("the answer to a probe is too long")
                try:
                    return answer.status, msgspec.json.decode(parts)
                except (msgspec.MsgspecError, RecursionError):
                    return answer.status, None

    async def answers(self, backend: Backend) -> bool:
        """Whether the engine truly answers: a byte came just now, or it writes one token when asked.

        All who ask at the same time share one question.
        """
        if not backend.up:
            return False
        now = asyncio.get_running_loop().time()
        if backend.answered_at is not None and now - backend.answered_at < self._probes.answer_fresh_s:
            return True
        if backend._asking is None or backend._asking.done():
            backend._asking = asyncio.create_task(self._ask(backend))
        return await asyncio.shield(backend._asking)

    async def _ask(self, backend: Backend) -> bool:
        common = {"model": backend.served_name, "max_tokens": 1, "temperature": 0}
        questions = (
            (CHAT_ROUTE, common | {"messages": [{"role": "user", "content": "1"}]}),
            (COMPLETIONS_ROUTE, common | {"prompt": "1"}),
        )
        for route, question in questions:
            try:
                status, value = await self._fetch(backend, route, question, self._probes.answer_timeout_s)
            except _PROBE_FAULTS:
                return False
            if status == 200 and isinstance(value, dict) and value.get("choices"):
                backend.answered_at = asyncio.get_running_loop().time()
                return True
            if status not in (400, 404, 405, 501):
                return False
        return False

    def cards(self) -> list[dict[str, Any]]:
        """The models that answer, as ``/v1/models`` lists them; paths of the machine are left out."""
        found = []
        for group in self.groups.values():
            for backend in group.backends:
                if backend.up:
                    created = backend.card.get("created")
                    card = {
                        "id": group.model,
                        "object": "model",
                        "created": created if isinstance(created, int) else 0,
                        "owned_by": "loadmaster",
                    }
                    length = backend.card.get("max_model_len")
                    found.append(card | ({"max_model_len": length} if isinstance(length, int) else {}))
                    break
        return found
