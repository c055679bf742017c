"""Whether an engine that has work stands still. Pure: time and readings are given."""

from __future__ import annotations

from loadmaster.engines.base import Progress


class StuckWatch:
    """Stuck: there is work, the counter of steps stands still, and probes fail, all for ``after_s`` seconds.

    An engine whose metrics do not answer has unknown work; failing probes alone decide then. ``look`` is told what was
    read at a time, ``probed`` what a probe said.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._steps: float | None = None
        self._moved_at: float | None = None
        self._failing_since: float | None = None

    def look(self, now: float, progress: Progress | None) -> bool:
        """Take a reading (None: the metrics did not answer). Whether a probe is worth its while."""
        moved = progress is not None and progress.steps is not None and progress.steps != self._steps
        idle = progress is not None and not progress.busy
        if progress is not None:
            self._steps = progress.steps
        if moved or idle or self._moved_at is None:
            self._moved_at = now
            self._failing_since = None
        return not idle and not moved

    def probed(self, now: float, began: float, answered: bool) -> bool:
        """Take a probe's result; ``began``: when it was sent. Whether the engine is stuck."""
        if answered:
            self._failing_since = None
            self._moved_at = now
            return False
        if self._failing_since is None:
            self._failing_since = began
        still_since = self._moved_at if self._moved_at is not None else now
        return now - max(still_since, self._failing_since) >= self._after_s

    @property
    def standing_since(self) -> float | None:
        """Since when the counter stands still and probes fail, None while all is well."""
        if self._failing_since is None or self._moved_at is None:
            return None
        return max(self._moved_at, self._failing_since)
