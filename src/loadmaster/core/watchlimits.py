"""What readings are held against: the part of a plan, and of a deployment, that alerts and views need."""

from __future__ import annotations

from msgspec import Struct

from loadmaster.core.facts import GpuLoad, LoadSheet

_STUCK_AFTER_S = 60.0
_IN_HOST_MEMORY = "llamacpp"  # core/hostplan.py: the host stands in the sheet as its only card


class CardLimits(Struct, frozen=True, kw_only=True):
    """The plan of one card, bytes as CUDA counts. ``spread_bytes``: how far readings of it may lie apart."""

    index: int
    total_bytes: int
    budget_bytes: int
    start_bytes: int
    steady_bytes: int
    serving_bytes: int
    serving_high_bytes: int
    spread_bytes: int


class WatchLimits(Struct, frozen=True, kw_only=True):
    """None: there is no plan, or it does not say. ``places``: requests that the engine works on at once.

    ``host``: the plan is of the host's memory, and of no card.
    """

    cards: tuple[CardLimits, ...] = ()
    host: CardLimits | None = None
    eager: bool | None = None
    tensor_parallel_size: int | None = None
    places: int | None = None
    kv_tokens: int | None = None
    stuck_after_s: float = _STUCK_AFTER_S

    def card(self, index: int) -> CardLimits | None:
        return next((card for card in self.cards if card.index == index), None)


def limits_of(sheet: LoadSheet | None, stuck_after_s: float = _STUCK_AFTER_S) -> WatchLimits:
    """What a plan allows; without one only what holds for every engine."""
    if sheet is None:
        return WatchLimits(stuck_after_s=stuck_after_s)
    settings = sheet.settings
    loads = tuple(map(_limits_of_load, sheet.gpus))
    of_host = sheet.engine.name == _IN_HOST_MEMORY
    return WatchLimits(
        cards=() if of_host else loads,
        host=loads[0] if of_host and loads else None,
        eager=None if settings is None else settings.enforce_eager,
        tensor_parallel_size=None if settings is None else settings.tensor_parallel_size,
        places=None if settings is None else settings.max_num_seqs,
        kv_tokens=None if sheet.kv_cache is None else sheet.kv_cache.tokens,
        stuck_after_s=stuck_after_s,
    )


def _limits_of_load(load: GpuLoad) -> CardLimits:
    serving = load.peak_bytes["serving"]
    serving_high = load.peak_high_bytes.get("serving", serving)
    steady = load.peak_bytes["steady"]
    return CardLimits(
        index=load.index,
        total_bytes=load.total_bytes,
        budget_bytes=load.budget_bytes,
        start_bytes=load.peak_bytes["start"],
        steady_bytes=steady,
        serving_bytes=serving,
        serving_high_bytes=serving_high,
        spread_bytes=max(0, serving_high - load.peak_low_bytes.get("steady", steady)),
    )
