"""What a run really served, and what its ranks take for that: the serving peak of this run rather than of any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from loadmaster.core.activations import Load, Served, served_growth
from loadmaster.core.pictures import PictureRules, picture_rules

if TYPE_CHECKING:
    from loadmaster.core.sheet import Plan

_MOST_PICTURES = 64


class ServedLoad(Struct, frozen=True, kw_only=True):
    """The heaviest that was asked of a run. None: not known, then the plan's own assumption stands.

    ``pictures``: width and height in the order in which they first came. ``requests``: at once. ``prompt_tokens``: of
    the longest prompt.
    """

    pictures: tuple[tuple[int, int], ...] | None = None
    requests: int | None = None
    prompt_tokens: int | None = None
    log_probabilities: bool | None = None


class RankReplay(Struct, frozen=True, kw_only=True):
    """What the growth of one rank is replayed from; kept with a run, whose model may be gone later."""

    load: Load
    pictures: PictureRules | None = None
    expandable: bool = False
    beside: int = 0  # ranks that share out whole pictures, when this is not the first of them
    growth_bytes: int = 0  # planned for what libraries take after the look at free memory
    profile_bytes: int = 0  # planned for the peak that the engine measures


def rank_replays(plan: Plan) -> tuple[RankReplay, ...]:
    """One for each card of the plan, in its order."""
    settings = plan.settings
    rules = picture_rules(plan.model, settings.max_pixels, settings.min_pixels)
    shares = settings.tensor_parallel_size if settings.mm_encoder_tp_mode == "data" else 1
    return tuple(
        RankReplay(
            load=rank.load,
            pictures=rules,
            expandable=settings.expandable_segments,
            # a picture that comes alone goes to the first rank (vision.py: get_load_balance_assignment)
            beside=shares if shares > 1 and rank.tensor_rank > 0 else 0,
            growth_bytes=rank.growth.bytes,
            profile_bytes=rank.profile.bytes,
        )
        for rank in plan.ranks
    )


def growth(replay: RankReplay, served: ServedLoad) -> tuple[int | None, int]:
    """Bytes of activations beyond the idle state, of pictures and of text; pictures None: which came is not known."""
    load, rules = replay.load, replay.pictures
    sent = served.pictures
    patches: tuple[int, ...] = ()
    if sent and rules is not None:
        patches = tuple(rules.patches(rules.tokens(*size)) for size in sent[:_MOST_PICTURES])
    assumed = load.context or load.tokens
    found = Served(
        patches=patches,
        tokens=_tokens(served, rules, assumed),
        rows=load.rows if served.requests is None else served.requests,
        log_probabilities=served.log_probabilities is not False,
        expandable=replay.expandable,
        beside=replay.beside,
    )
    vision, text = served_growth(load, found)
    return (None if sent is None and load.tower is not None else vision), text


def _tokens(served: ServedLoad, rules: PictureRules | None, assumed: int) -> int:
    """Tokens of the longest prompt: of text as told, of pictures as they are."""
    if served.prompt_tokens is None and served.pictures is None:
        return assumed
    largest = max((rules.tokens(*size) for size in served.pictures or ()), default=0) if rules is not None else 0
    return max(1, largest, served.prompt_tokens if served.prompt_tokens is not None else 0 if largest else assumed)


def with_picture(sent: Sequence[tuple[int, int]], size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """``sent`` and one more picture, bounded: a size that came before, or a small one after many, changes nothing."""
    if size in sent:
        return tuple(sent)
    if len(sent) < _MOST_PICTURES:
        return (*sent, size)
    largest = max(range(len(sent)), key=lambda place: sent[place][0] * sent[place][1])
    if size[0] * size[1] <= sent[largest][0] * sent[largest][1]:
        return tuple(sent)
    return (*sent[:-1], size)
