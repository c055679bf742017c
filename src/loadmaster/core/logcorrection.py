"""What a real start measured, put into the plans that are made to find its fix.

A plan is made again for every change that is tried. So that it starts from what happened, the engine's own readings
replace what was computed: weights and graphs by their ratio, the cache by the difference. Where memory ran out, that
stage took at least what was in use then and what was asked for: what the engine measures in a profile grows by the
ratio, what comes after the cache was made by the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct, structs

from loadmaster.core.facts import Amount
from loadmaster.core.logfacts import LogReadings
from loadmaster.core.ranks import RankMemory
from loadmaster.core.sheet import Plan, cache_of, card_load

Stage = Literal["weights", "profile", "pool", "capture", "serving"]


class Seen(Struct, frozen=True, kw_only=True):
    """Bytes that the log gives; None: it does not say. ``used``: on the card, with what could not be allocated."""

    weights: int | None = None  # of the heaviest rank
    cache: int | None = None  # of the smallest rank
    graphs: int | None = None
    used: int | None = None
    stage: Stage | None = None


def seen_in(readings: LogReadings, stage: Stage | None) -> Seen:
    """What of a log's readings corrects a plan. ``stage``: where memory ran out, None where it did not."""
    weights = [size for size in readings.model_loading_bytes if size]
    used = None
    total, free, tried = readings.card_total_bytes, readings.card_free_bytes, readings.tried_to_allocate_bytes
    if stage is not None and total is not None and free is not None and tried is not None:
        used = total - free + tried
    return Seen(
        weights=max(weights, default=None),
        cache=readings.kv_available_bytes,
        graphs=readings.graph_bytes,
        used=used,
        stage=stage,
    )


def correction(base: Plan, seen: Seen) -> Callable[[Plan], Plan]:
    """What makes a plan start from what was seen. ``base``: the launch of the log, as planned."""
    weights = _ratio(seen.weights, max((rank.weight_bytes for rank in base.ranks), default=0))
    graphs = _ratio(seen.graphs, max((rank.graphs.bytes for rank in base.ranks if rank.graphs), default=0))
    plan = _with_ranks(base, [_scaled(rank, weights, graphs) for rank in base.ranks])
    before = _tightest_left(plan)
    lacking = before.bytes - seen.cache if before is not None and seen.cache is not None else 0

    def measured(plan: Plan) -> Plan:
        ranks = [_scaled(rank, weights, graphs) for rank in plan.ranks]
        if before is not None and seen.cache is not None and plan.settings.kv_cache_memory_bytes is None:
            ranks = [_cache_as_seen(rank, before, seen.cache, lacking) for rank in ranks]
        return _with_ranks(plan, ranks)

    over = _beyond(measured(base), seen)
    ratio = max((_profile_ratio(rank, seen.stage, over) for rank in measured(base).ranks), default=1.0)

    def corrected(plan: Plan) -> Plan:
        plan = measured(plan)
        if not over or seen.stage is None:
            return plan
        return _with_ranks(plan, [_heavier(rank, seen.stage, over, ratio, seen.cache is None) for rank in plan.ranks])

    return corrected


def _ratio(measured: int | None, planned: int) -> float | None:
    return measured / planned if measured and planned else None


def _with_ranks(plan: Plan, ranks: list[RankMemory]) -> Plan:
    cache, tightest, request = cache_of(plan.settings, plan.layouts, ranks)
    return structs.replace(plan, ranks=tuple(ranks), kv_cache=cache, tightest=tightest, request_bytes=request)


def _tightest_left(plan: Plan) -> Amount | None:
    return plan.ranks[plan.tightest].left if plan.tightest is not None else None


def _scaled(rank: RankMemory, weights: float | None, graphs: float | None) -> RankMemory:
    """Weights and graphs as large as they were measured, without bounds; the cache has the difference."""
    if graphs is not None and rank.graphs is not None:
        rank = structs.replace(rank, graphs=_exact(rank.graphs, graphs))
    if weights is None:
        return rank
    exact = {name: _exact(amount, weights) for name, amount in rank.weights.items()}
    now = sum(amount.bytes for amount in exact.values())
    sides = {side: sum(getattr(amount, side) for amount in rank.weights.values()) for side in ("bytes", "low", "high")}
    left = rank.left
    return structs.replace(
        rank,
        weights=exact,
        left=Amount(
            left.bytes - now + sides["bytes"],
            left.low - now + sides["high"],
            left.high - now + sides["low"],
            left.basis,
            left.note,
        ),
        left_when_full=rank.left_when_full - now + sides["high"],
        left_when_light=rank.left_when_light - now + sides["low"],
    )


def _exact(amount: Amount, ratio: float) -> Amount:
    return Amount.exact(round(amount.bytes * ratio), "measured", "as this start measured it")


def _cache_as_seen(rank: RankMemory, before: Amount, seen: int, lacking: int) -> RankMemory:
    """The cache that was measured, and what a change does to it: the smallest and largest of what its sides say."""
    left = rank.left
    sides = sorted(getattr(left, side) - getattr(before, side) + seen for side in ("bytes", "low", "high"))
    return structs.replace(
        rank,
        growth=_more(rank.growth, lacking),
        left=Amount(left.bytes - lacking, sides[0], sides[2], "measured", "as this start measured it"),
        left_when_full=rank.left_when_full - lacking,
        left_when_light=rank.left_when_light - lacking,
    )


def _beyond(plan: Plan, seen: Seen) -> int:
    """By how much more was in use where memory ran out than planned for that stage; 0 where it was not more."""
    if seen.used is None or seen.stage is None or not plan.ranks:
        return 0
    planned = max(_planned(plan, rank, seen.stage) for rank in plan.ranks)
    return max(0, seen.used - planned)


def _planned(plan: Plan, rank: RankMemory, stage: Stage) -> int:
    held = rank.context.bytes + rank.other_processes + rank.weight_bytes + rank.slack.bytes
    if stage == "weights":
        return held
    if stage == "profile":
        return held + rank.growth.bytes + rank.profile.bytes
    if stage == "pool":
        return held + rank.growth.bytes + rank.persistent.bytes + rank.trial_pool + rank.estimate.bytes
    return card_load(plan, rank).peak_bytes["steady" if stage == "capture" else "serving"]


def _profile_ratio(rank: RankMemory, stage: Stage | None, over: int) -> float:
    planned = {"profile": rank.profile.bytes, "pool": rank.trial_pool}.get(stage or "", 0)
    return (planned + over) / planned if planned else 1.0


def _heavier(rank: RankMemory, stage: Stage, over: int, ratio: float, from_cache: bool) -> RankMemory:
    """The rank with what this stage takes beyond the plan. ``from_cache``: a larger profile leaves less cache."""
    if stage == "weights":
        return structs.replace(rank, slack=_more(rank.slack, over))
    if stage == "pool":
        return structs.replace(rank, trial_pool=round(rank.trial_pool * ratio))
    if stage == "capture":
        return structs.replace(rank, persistent=_more(rank.persistent, over))
    if stage == "serving":
        return structs.replace(rank, language=_more(rank.language, over))
    old = rank.profile
    low, high = round(old.low * ratio), round(old.high * ratio)
    new = Amount(round(old.bytes * ratio), low, high, old.basis, old.note)
    rank = structs.replace(rank, profile=new, profile_reserved=round(rank.profile_reserved * ratio))
    if not from_cache:
        return rank
    left = rank.left
    return structs.replace(
        rank,
        left=Amount(
            left.bytes - new.bytes + old.bytes,
            left.low - new.high + old.high,
            left.high - new.low + old.low,
            left.basis,
            left.note,
        ),
        left_when_full=rank.left_when_full - new.high + old.high,
        left_when_light=rank.left_when_light - new.low + old.low,
    )


def _more(amount: Amount, size: int) -> Amount:
    return Amount(amount.bytes + size, amount.low + size, amount.high + size, amount.basis, amount.note)
