"""How long to wait before an engine that crashed is started again. Pure."""

from __future__ import annotations

from loadmaster.core.deployment import SupervisionSection
from loadmaster.service.enginestate import FINAL, EngineState

_MOST_DOUBLINGS = 60


def wait_s(failures: int, supervision: SupervisionSection) -> float:
    """Seconds before the next start after so many crashes in a row."""
    if failures <= 0:
        return 0.0
    doubled = supervision.backoff_first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS)
    return min(doubled, supervision.backoff_most_s)


def failures_after(failures: int, ready_since: float | None, now: float, supervision: SupervisionSection) -> int:
    """Crashes in a row, when an engine crashes now: a long service makes it the first one again."""
    steady = ready_since is not None and now - ready_since >= supervision.steady_after_s
    return 1 if steady else failures + 1


def begin_after(last: EngineState | None, now: float, supervision: SupervisionSection) -> tuple[int, int]:
    """``(failures, restarts)`` of a run-engine that starts and finds this state.

    A state that is not final was left by a run-engine that was killed; that counts as a crash.
    """
    if last is None:
        return 0, 0
    if last.state not in FINAL:
        ready_since = last.since if last.state == "ready" else None
        return failures_after(last.failures, ready_since, now, supervision), last.restarts + 1
    if last.state == "exited" and last.failures:
        return last.failures, last.restarts + 1
    return 0, last.restarts
