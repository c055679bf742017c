"""What a gateway keeps of its deployment beside serving it: readings, the highest point of serving, the findings."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from loadmaster.core.facts import Finding, LoadSheet
from loadmaster.core.observation import Snapshot
from loadmaster.edge.runstore import RunStore
from loadmaster.service.deploymentmetrics import DeploymentMetrics
from loadmaster.service.gatewaysettings import Watched
from loadmaster.service.places import Places
from loadmaster.service.runrecorder import store_path
from loadmaster.service.servingpeak import ServingPeak

_log = logging.getLogger("loadmaster.watching")


class Watching:
    """One of a gateway. ``watch``: what sees cards and engine; set it before :meth:`run`, None: nothing does."""

    def __init__(self, places: Places, plan: LoadSheet | None) -> None:
        self.store = RunStore(store_path(places), places.name, _log.warning)
        self.peak = ServingPeak(self.store, places.engine)
        self.watch: Watched | None = None
        self.metrics = DeploymentMetrics(plan, self._latest, self._findings, lambda: self.peak.found)

    async def run(self) -> None:
        """Follow what the watch sees, until cancelled."""
        if self.watch is None:
            return
        async for event in self.watch.subscribe():
            if event.kind == "snapshot" and isinstance(event.data, Snapshot):
                await self.peak.take(event.data)

    def close(self) -> None:
        """Write what is still to be written."""
        self.store.close()

    def _latest(self) -> Snapshot | None:
        return None if self.watch is None else self.watch.latest

    def _findings(self) -> Sequence[Finding]:
        return () if self.watch is None else self.watch.findings
