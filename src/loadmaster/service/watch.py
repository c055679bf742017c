"""The watch of a deployment: reads once a second, judges, keeps, tells. It never takes down what it watches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal

from msgspec import Struct

from loadmaster.core.alerts import Alerts
from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import Finding, LoadSheet
from loadmaster.core.observation import Snapshot
from loadmaster.core.watchlimits import limits_of
from loadmaster.edge.runstore import RunStore
from loadmaster.service.alertoutlets import AlertOutlets
from loadmaster.service.places import Places
from loadmaster.service.sampler import GatewayLoad, Looker, Sampler

_INTERVAL_S = 1.0
_MAILBOX = 64
_SAY_AGAIN_S = 600.0

_log = logging.getLogger("loadmaster.watch")


class WatchEvent(Struct, frozen=True):
    """``data``: a Snapshot, the findings that hold, the engine's state."""

    kind: Literal["snapshot", "findings", "state"]
    data: Snapshot | tuple[Finding, ...] | str | None


class Watch:
    """One of a gateway. ``latest``: the newest readings. ``findings``: the alerts that hold.

    ``load`` is asked at each look for what only the gateway knows.
    """

    def __init__(
        self,
        deployment: Deployment,
        places: Places,
        plan: LoadSheet | None,
        sampler: Looker | None = None,
        store: RunStore | None = None,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self.latest: Snapshot | None = None
        self.load: Callable[[], GatewayLoad] = GatewayLoad
        self._own = Sampler(deployment, places) if sampler is None else None
        self._sampler: Looker = sampler if sampler is not None else self._own  # type: ignore[assignment]
        self._alerts = Alerts(limits_of(plan, deployment.supervision.stuck_after_s), deployment.name)
        self._outlets = AlertOutlets(deployment.name, deployment.alerts)
        self._store = store
        self._interval_s = interval_s
        self._mailboxes: set[asyncio.Queue[WatchEvent]] = set()
        self._state: str | None = None
        self._said: dict[str, float] = {}

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self._alerts.findings

    async def run(self) -> None:
        """Look once a second until cancelled. What fails is said in the log, now and then, and tried again."""
        outlets = asyncio.create_task(self._outlets.run())
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while True:
                try:
                    await self._look()
                except Exception as error:
                    self._complain(error)
                due = max(due + self._interval_s, loop.time())  # after a pause no look is made up for
                await asyncio.sleep(due - loop.time())
        finally:
            outlets.cancel()
            await asyncio.gather(outlets, return_exceptions=True)
            with contextlib.suppress(Exception):
                await self._sampler.close()
            if self._store is not None:
                self._store.set_findings(time.time(), ())  # nobody looks any longer whether they hold

    async def subscribe(self) -> AsyncIterator[WatchEvent]:
        """What is seen from now on, the newest of each kind first. A reader that is slow misses the oldest."""
        mailbox: asyncio.Queue[WatchEvent] = asyncio.Queue(_MAILBOX)
        if self.latest is not None:
            mailbox.put_nowait(WatchEvent("snapshot", self.latest))
            mailbox.put_nowait(WatchEvent("findings", self.findings))
        self._mailboxes.add(mailbox)
        try:
            while True:
                yield await mailbox.get()
        finally:
            self._mailboxes.discard(mailbox)

    async def _look(self) -> None:
        if self._own is not None:
            self._own.load = self.load()
        snapshot = await self._sampler.look()
        before = self.findings
        changes = self._alerts.step(snapshot)
        self.latest = snapshot
        self._tell(WatchEvent("snapshot", snapshot))
        state = snapshot.engine.state if snapshot.engine is not None else None
        if state != self._state:
            self._state = state
            self._tell(WatchEvent("state", state))
        if self._store is not None:
            self._store.add(snapshot)
        if self.findings != before:
            self._tell(WatchEvent("findings", self.findings))
            if self._store is not None:
                self._store.set_findings(snapshot.at, self.findings)
        for change in changes:
            self._outlets.tell(change)

    def _tell(self, event: WatchEvent) -> None:
        for mailbox in self._mailboxes:
            if mailbox.full():
                mailbox.get_nowait()
            mailbox.put_nowait(event)

    def _complain(self, error: Exception) -> None:
        """Name the failure and where it was, without values, once in ten minutes each."""
        trace, place = error.__traceback__, ""
        while trace is not None:
            place, trace = f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}", trace.tb_next
        text = f"a look failed: {type(error).__name__} at {place}"
        if time.monotonic() - self._said.get(text, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            self._said[text] = time.monotonic()
            _log.error("%s", text)
