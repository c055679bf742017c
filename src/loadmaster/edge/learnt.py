"""What the kept runs of this machine teach, read from the file of runs."""

from __future__ import annotations

from pathlib import Path

from loadmaster.core.learning import Sample, learn, samples_of
from loadmaster.core.localcalibration import Learnt
from loadmaster.edge.runquery import RunQuery, RunsUnreadable
from loadmaster.edge.runschema import FILE
from loadmaster.edge.statehome import StateError, state_home

_MOST_RUNS = 200


def runs_file() -> Path:
    """The file of runs of all deployments. Raises :class:`StateError` without any home."""
    return state_home() / FILE


def read_samples(query: RunQuery) -> list[Sample]:
    """What each kept run teaches. Raises :class:`RunsUnreadable`."""
    samples: list[Sample] = []
    for run, found in query.reconciled_runs(_MOST_RUNS):
        samples += samples_of(run.number, run.record, found)
    return samples


def read_learnt(path: Path | None = None) -> tuple[tuple[Learnt, ...], str | None]:
    """What was learnt, and why it could not be read."""
    try:
        query = RunQuery(path or runs_file())
        return learn(read_samples(query), query.forgotten()), None
    except (RunsUnreadable, StateError) as error:
        return (), str(error)
