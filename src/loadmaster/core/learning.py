"""What several runs on this machine agree on, where it differs from the plan's constants.

Learnt only for the same card, number of cards, engine version, architecture and component, from at least three runs
that agree, and never narrower than what was seen. Runs that disagree teach nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from loadmaster.core.facts import MIB
from loadmaster.core.localcalibration import Learnt, key_of
from loadmaster.core.reconcile import CardReconciliation, Reconciliation
from loadmaster.core.runrecord import RunRecord

_LEAST_RUNS = 3
_NEWEST_RUNS = 20
_AGREE_WITHIN = 64 * MIB  # or a twentieth of the plan, if that is more
_AGREE_SHARE = 0.05
_LEAST_MARGIN = 16 * MIB  # logs and drivers round
_RESTING = ("workspace", "sampler", "activations")  # no reading names these when a run is ready
_OFTEN_UNREAD = "context"  # few versions print it; what it is off by then counts as the workspace's


class Sample(Struct, frozen=True, kw_only=True):
    """One component of one card of one run: actual less planned, in bytes. ``at``: when the run began."""

    run: int
    at: float
    card: str
    cards: int
    engine: str
    version: str
    architecture: str
    component: str
    planned: int
    difference: int

    @property
    def key(self) -> str:
        return key_of(self.cards, self.card, self.engine, self.version, self.architecture, self.component)


def samples_of(run: int, record: RunRecord, found: Iterable[Reconciliation]) -> list[Sample]:
    """What one run teaches: from its state when it was ready, of components that a reading names."""
    if record.architecture is None or record.engine.version is None:
        return []
    samples = []
    for card in (card for one in found if one.point == "ready" for card in one.cards):
        if card.name is None or card.other_bytes:
            continue
        for component, (planned, difference) in _differences(card).items():
            used = record.corrections.get(component, 0)  # what had been learnt before is no part of the plan's own
            samples.append(
                Sample(
                    run=run,
                    at=record.started,
                    card=card.name,
                    cards=len(record.cards),
                    engine=record.engine.name,
                    version=record.engine.version,
                    architecture=record.architecture,
                    component=component,
                    planned=planned - used,
                    difference=difference + used,
                )
            )
    return samples


def _differences(card: CardReconciliation) -> dict[str, tuple[int, int]]:
    lines = {line.name: line for line in card.lines}
    found: dict[str, tuple[int, int]] = {
        name: (lines[name].planned, actual - lines[name].planned)
        for name in ("context", "cuda_graphs")
        if name in lines and lines[name].planned and (actual := lines[name].actual) is not None
    }
    # What is left belongs to the workspace when all else was read; both are held as long as the engine runs.
    read = all(line.actual is not None for name, line in lines.items() if name not in (*_RESTING, _OFTEN_UNREAD))
    if read and "workspace" in lines and card.unexplained_bytes is not None and card.driver_reserved_bytes is not None:
        workspace = lines["workspace"]
        found["workspace"] = (workspace.planned, workspace.expected + card.unexplained_bytes - workspace.planned)
    return found


def learn(samples: Sequence[Sample], forgotten: Mapping[str, float] | None = None) -> tuple[Learnt, ...]:
    """What agreeing runs say. ``forgotten``: by key, the time up to which runs do not count."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.at > (forgotten or {}).get(sample.key, float("-inf")):
            groups.setdefault(sample.key, []).append(sample)
    return tuple(learnt for key, group in sorted(groups.items()) if (learnt := _agreed(key, group)) is not None)


def _agreed(key: str, group: Sequence[Sample]) -> Learnt | None:
    runs = sorted({sample.run for sample in group})[-_NEWEST_RUNS:]
    group = [sample for sample in group if sample.run in runs]
    differences = sorted(sample.difference for sample in group)
    spread = differences[-1] - differences[0]
    if len(runs) < _LEAST_RUNS or spread > max(_AGREE_WITHIN, _AGREE_SHARE * max(s.planned for s in group)):
        return None
    margin = max(_LEAST_MARGIN, spread // 2)
    return Learnt(
        key=key,
        component=group[0].component,
        difference=differences[len(differences) // 2],
        low=differences[0] - margin,
        high=differences[-1] + margin,
        runs=tuple(runs),
        last=datetime.fromtimestamp(max(sample.at for sample in group), UTC).date().isoformat(),
    )
