"""Which of the kept runs go on now: those whose run-engine lives and says that its engine is theirs."""

from __future__ import annotations

from collections.abc import Sequence

from loadmaster.edge.runquery import StoredRun
from loadmaster.edge.statehome import StateError
from loadmaster.service.enginestate import FINAL, read_state
from loadmaster.service.places import Places


def running_among(runs: Sequence[StoredRun]) -> frozenset[int]:
    """Their numbers."""
    without_end = [run for run in runs if run.ending is None]
    now = {name: _running(name) for name in {run.record.deployment for run in without_end}}
    return frozenset(run.number for run in without_end if now[run.record.deployment] == run.number)


def _running(deployment: str) -> int | None:
    try:
        said = read_state(Places.of(deployment).engine)
    except StateError:
        return None
    if said is None or said.state in FINAL or said.runner is None or not said.runner.alive:
        return None
    return said.run
