"""What a view of the readings shows beside the newest: the highest so far, rates, alerts and since when they hold."""

from __future__ import annotations

from loadmaster.core.alerts import AlertChange, Alerts
from loadmaster.core.facts import Finding
from loadmaster.core.observation import Snapshot
from loadmaster.core.series import values_of
from loadmaster.core.watchlimits import WatchLimits


class WatchView:
    """Takes snapshots in order. ``reached``: the most that a card held since this engine's start, by its index;
    ``host_reached``: the most that the engine held of the host's memory.

    ``rates``: as :func:`values_of`. ``begun``: when each alert that holds began, by its code.
    """

    def __init__(self, limits: WatchLimits, name: str | None = None) -> None:
        self.limits = limits
        self.name = name
        self.latest: Snapshot | None = None
        self.reached: dict[int, int] = {}
        self.host_reached: int | None = None
        self.rates: dict[str, float | None] = {}
        self.begun: dict[str, float] = {}
        self._alerts = Alerts(limits, name)
        self._pid: int | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self._alerts.findings

    def take(self, snapshot: Snapshot) -> tuple[AlertChange, ...]:
        """The next snapshot; which alerts began and ended."""
        pid = snapshot.engine.pid if snapshot.engine is not None else None
        if pid is not None and pid != self._pid:
            self._pid = pid
            self.reached.clear()
            self.host_reached = None
        for card in snapshot.cards or ():
            if card.used_bytes is not None:
                self.reached[card.index] = max(card.used_bytes, self.reached.get(card.index, 0))
        resident = snapshot.engine.resident_bytes if snapshot.engine is not None else None
        if resident is not None:
            self.host_reached = max(resident, self.host_reached or 0)
        self.rates = values_of(snapshot, self.latest)
        self.latest = snapshot
        changes = self._alerts.step(snapshot)
        for change in changes:
            if change.began:
                self.begun.setdefault(change.finding.code, change.at)
            else:
                self.begun.pop(change.finding.code, None)
        return changes
