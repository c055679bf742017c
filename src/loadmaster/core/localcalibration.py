"""What was learnt on this machine (core/learning.py), as a plan uses it: for the very same, and said."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from loadmaster.core.facts import Amount, EngineFacts, GpuFacts

COMPONENTS = ("context", "cuda_graphs", "workspace")


class Learnt(Struct, frozen=True, kw_only=True):
    """What to add to a planned component. ``low``, ``high``: at least as far apart as what was seen."""

    key: str
    component: str
    difference: int
    low: int
    high: int
    runs: tuple[int, ...]
    last: str  # date of the newest run, ISO


class LearntGpu(GpuFacts, frozen=True, kw_only=True):
    """A card of this machine with what was learnt of it."""

    learnt: tuple[Learnt, ...] = ()


def key_of(cards: int, card: str, engine: str, version: str, architecture: str, component: str) -> str:
    return f"{cards} x {card}/{engine} {version}/{architecture}/{component}"


def learnt_for(gpu: GpuFacts, cards: int, engine: EngineFacts, architecture: str | None) -> dict[str, Learnt]:
    """What was learnt of this card for just this use, by component."""
    if not isinstance(gpu, LearntGpu) or gpu.name is None or engine.version is None or architecture is None:
        return {}
    wanted = {
        key_of(cards, gpu.name, engine.name, engine.version, architecture, component): component
        for component in COMPONENTS
    }
    return {one.component: one for one in gpu.learnt if wanted.get(one.key) == one.component}


def with_learnt(gpus: Sequence[GpuFacts], learnt: Sequence[Learnt]) -> tuple[GpuFacts, ...]:
    """The cards, those with a name with what was learnt of any card of that name."""
    if not learnt:
        return tuple(gpus)
    return tuple(
        gpu
        if gpu.name is None or not (own := _of_card(gpu.name, learnt))
        else LearntGpu(**{name: getattr(gpu, name) for name in GpuFacts.__struct_fields__}, learnt=own)
        for gpu in gpus
    )


def _of_card(name: str, learnt: Sequence[Learnt]) -> tuple[Learnt, ...]:
    return tuple(one for one in learnt if one.key.partition(" x ")[2].startswith(f"{name}/"))


def corrected(amount: Amount, learnt: Learnt) -> Amount:
    """A planned amount with what was learnt of it."""
    return Amount(
        max(0, amount.bytes + learnt.difference),
        max(0, amount.bytes + learnt.low),
        max(0, amount.bytes + learnt.high),
        "measured",
        words(learnt),
    )


def words(learnt: Learnt) -> str:
    return f"learnt from {len(learnt.runs)} runs on this machine, the last on {learnt.last}"
