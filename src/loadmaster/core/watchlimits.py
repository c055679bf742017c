"""What readings are held against: the part of a plan, and of a deployment, that alerts and views need."""

from __future__ import annotations

from msgspec import Struct

from loadmaster.core.facts import LoadSheet

_STUCK_AFTER_S = 60.0


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
    """None: there is no plan, or it does not say. ``places``: requests that the engine works on at once."""

    cards: tuple[CardLimits, ...] = ()
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
    return WatchLimits(
        cards=tuple(
            CardLimits(
                index=load.index,
                total_bytes=load.total_bytes,
                budget_bytes=load.budget_bytes,
                start_bytes=load.peak_bytes["start"],
                steady_bytes=load.peak_bytes["steady"],
                serving_bytes=load.peak_bytes["serving"],
                serving_high_bytes=load.peak_high_bytes.get("serving", load.peak_bytes["serving"]),
                spread_bytes=max(
                    0,
                    load.peak_high_bytes.get("serving", load.peak_bytes["serving"])
                    - load.peak_low_bytes.get("steady", load.peak_bytes["steady"]),
                ),
            )
            for load in sheet.gpus
        ),
        eager=None if settings is None else settings.enforce_eager,
        tensor_parallel_size=None if settings is None else settings.tensor_parallel_size,
        places=None if settings is None else settings.max_num_seqs,
        kv_tokens=None if sheet.kv_cache is None else sheet.kv_cache.tokens,
        stuck_after_s=stuck_after_s,
    )
