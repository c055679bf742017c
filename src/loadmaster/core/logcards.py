"""How large the cards of a log are, where it does not say: the size with which its own readings add up."""

from __future__ import annotations

from msgspec import structs

from loadmaster.core.facts import GIB, GpuFacts, ModelFacts
from loadmaster.core.gputable import card_facts, cards
from loadmaster.core.logcase import LogCase, cards_of
from loadmaster.core.logcorrection import correction, seen_in
from loadmaster.core.replanning import Case

_LARGE = 70 * GIB  # engines have other defaults from this size on
_TRIALS = (24 * GIB, 96 * GIB)
_NEAR = 0.9
_SMALLEST, _LARGEST = 4 * GIB, 400 * GIB


def estimated_cards(case: LogCase, model: ModelFacts) -> tuple[GpuFacts, ...] | None:
    """Cards with which the plan leaves the cache that was measured; None where no size does.

    The budget is the share times the total. The plan says what of it is used beside the weights that were measured,
    and that is nearly the same on cards of any size.
    """
    seen = case.readings.kv_available_bytes
    if seen is None or not any(case.readings.model_loading_bytes) or not case.share_known:
        return None
    for trial in _TRIALS:
        gpus = cards_of(case, trial)
        if gpus is None:
            return None
        given = Case(model, gpus, case.launch, case.engine)
        plan = given.plan()
        if plan.tightest is None or plan.settings.kv_cache_memory_bytes is not None:
            return None
        weighed = structs.replace(seen_in(case.readings, None), cache=None)
        plan = correction(plan, weighed)(plan)
        assert plan.tightest is not None
        rank = plan.ranks[plan.tightest]
        total = round((rank.requested - rank.left.bytes + seen) / plan.settings.gpu_memory_utilization)
        if _SMALLEST <= total <= _LARGEST and (total >= _LARGE) == (trial >= _LARGE):
            return cards_of(case, _existing(total))
    return None


def _existing(total: int) -> int:
    """The largest card of the table of this size or a little less: plans of old versions count too much as used."""
    sizes = (card_facts(card, 0).total_bytes for card in cards() if card.vendor == "NVIDIA")
    near = (size for size in sizes if total * _NEAR <= size <= total * 1.01)
    return max(near, default=total)
