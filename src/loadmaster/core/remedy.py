"""What makes a launch fit that does not: the smallest change of its flags, else more cards or fewer bits.

Flags are tried in the order of harm: cards that lie idle, no videos, a smaller picture, another share of the card,
fewer sequences, a shorter context, no graphs. Only what was planned again is offered as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import structs

from loadmaster.core.facts import GIB, EngineFacts, Fix, GpuFacts, LaunchArgs, LoadSheet, ModelFacts
from loadmaster.core.pictures import picture_rules
from loadmaster.core.replanning import (
    SHORTEST_CONTEXT,
    SMALL_BATCH,
    Case,
    Flags,
    cards_that_run,
    divides,
    least_batch,
    longest_in,
    no_video,
    other_share,
    picture_cap,
    serving_peak,
)
from loadmaster.core.search import Search, too_heavy
from loadmaster.core.sheet import Plan
from loadmaster.core.verdict import gib
from loadmaster.core.wishes import Wishes

_SIDES = (3072, 2048, 1536, 1024)  # pixels
_SEQUENCES = (64, 16, 4)
_MOST_CARDS = 64
_FOUR_BITS = (0.5 + 2.5 / 128) / 2  # of 16 bits: 4 with a scale and a zero point for groups of 128
_NOTHING: Flags = {}
_NOT_ABOUT_FITTING = ("image-tokens-exceed-context", "profile-below-images", "gpus-unequal")
_FULL_WIDTH = ("bfloat16", "float16")


def smallest_fix(
    model: ModelFacts, gpus: Sequence[GpuFacts], launch: LaunchArgs, engine: EngineFacts, sheet: LoadSheet
) -> tuple[Fix, ...]:
    """The smallest change, of one flag or of two, that makes a launch fit: planned again, with what it is for.

    Where no two flags help, all flags of the launch that a recommendation finds, as one fix. Where none help on
    these cards: the first number of such cards that does, and what a checkpoint of fewer bits would take. Empty
    when the launch fits already, or nothing of the kind is known to help.
    """
    return smallest_fix_of(Case(model, tuple(gpus), launch, engine), sheet)


def smallest_fix_of(case: Case, sheet: LoadSheet) -> tuple[Fix, ...]:
    """As :func:`smallest_fix`, for a case whose plans may be corrected by what a start showed."""
    if sheet.fits is True or not sheet.gpus:
        return ()
    model, gpus, launch, engine = case.model, case.gpus, case.launch, case.engine
    found = _by_flags(case, case.plan(), sheet)
    if found is not None:
        return (found,)
    recommended = _recommended(case, sheet)
    if recommended is not None and recommended.replanned:
        return (recommended,)
    if sheet.fits is None:
        return ()
    own = (recommended,) if recommended is not None else ()
    return (*own, *more_cards(model, gpus, launch, engine), *fewer_bits(model, launch, sheet))


def with_fixes(sheet: LoadSheet, fixes: Sequence[Fix]) -> LoadSheet:
    """The sheet whose first error (else its first finding) carries these fixes before its own."""
    if not fixes or not sheet.findings:
        return sheet
    errors = (at for at, item in enumerate(sheet.findings) if item.severity == "error")
    doubts = (at for at, item in enumerate(sheet.findings) if item.code not in _NOT_ABOUT_FITTING)
    place = next(errors, next(doubts, 0))
    findings = list(sheet.findings)
    said = {fix.argv for fix in fixes if fix.argv}
    kept = tuple(fix for fix in findings[place].fixes if fix.argv not in said)
    findings[place] = structs.replace(findings[place], fixes=(*fixes, *kept))
    return structs.replace(sheet, findings=tuple(findings))


def more_cards(model: ModelFacts, gpus: Sequence[GpuFacts], launch: LaunchArgs, engine: EngineFacts) -> tuple[Fix, ...]:
    """The first number of cards, 2, 4, 8 and so on of the smallest kind that is there, that the launch fits.

    A number that holds the weights and a cache counts where one change more makes all fit; where none does, the
    first such number is given as not planned to the end. Empty when no number holds so much.
    """
    if not gpus:
        return ()
    smallest = min(gpus, key=lambda gpu: gpu.total_bytes)
    settings = Case(model, tuple(gpus), launch, engine).settings
    others = settings.pipeline_parallel_size * settings.data_parallel_size
    size, holding = 2, None
    while size * others <= _MOST_CARDS:
        if size * others > len(gpus) and divides(model, size):
            cards = tuple(structs.replace(smallest, index=index) for index in range(size * others))
            found = _on_cards(Case(model, cards, launch, engine), size)
            if found is not None and found.replanned:
                return (found,)
            holding = holding or found
        size *= 2
    return (holding,) if holding is not None else ()


def fewer_bits(model: ModelFacts, launch: LaunchArgs, sheet: LoadSheet) -> tuple[Fix, ...]:
    """What a checkpoint of 8 or 4 bits would take on the heaviest card; empty when this one is quantised."""
    if model.quantization.method is not None or launch.flags.get("--quantization") is not None:
        return ()
    if model.text.dtype is not None and model.text.dtype not in _FULL_WIDTH:
        return ()
    held = max(
        (sum(part.bytes for part in load.components if part.name.startswith("weights.")) for load in sheet.gpus),
        default=0,
    )
    if not held:
        return ()
    return (
        Fix(
            f"a checkpoint of fewer bits: instead of {gib(held)} of weights on each card about {gib(held // 2)} in 8 "
            f"bits or {gib(int(held * _FOUR_BITS))} in 4"
        ),
    )


# ------------------------------------------------------------------------------------------------ flags


def _by_flags(case: Case, plan: Plan, sheet: LoadSheet) -> Fix | None:
    """One change, else two, that make the launch fit on the cards that are there."""
    singles = list(_candidates(case, plan, sheet))
    if any(rank.weight_bytes + rank.context.low > rank.gpu.total_bytes for rank in plan.ranks):
        singles = [change for change in singles if "--tensor-parallel-size" in change[0]]
    found = _search(case, singles)
    return fix_of(found[0], found[1]) if found is not None else None


def _search(
    case: Case, singles: Sequence[tuple[dict[str, Any], str]], base: Flags = _NOTHING
) -> tuple[dict[str, Any], str, LoadSheet] | None:
    """The first of these changes beside ``base`` that makes the launch fit, else the first two that do."""
    if not singles or not _fits_at_all(case, [base, *(changes for changes, _ in singles)]):
        return None
    planned: list[tuple[dict[str, Any], str, Plan, LoadSheet]] = []
    for changes, why in singles:
        after, then = case.with_changes({**base, **changes})
        if then.fits is True:
            return changes, why, then
        planned.append((changes, why, after, then))
    tried: set[tuple[str, ...]] = set()
    for first, why, after, then in planned:
        flags = tuple(first)
        if flags in tried:
            continue  # one of each kind as the first of two
        tried.add(flags)
        for second, also in _candidates(case, after, then, {**base, **first}):
            if set(second) & {*first, *base}:
                continue
            _, last = case.with_changes({**base, **first, **second})
            if last.fits is True:
                return {**first, **second}, f"{why}; {also}", last
    return None


def _fits_at_all(case: Case, singles: Sequence[Flags]) -> bool:
    """Whether all changes at once, each at its most, make the launch fit: if not, no two of them do."""
    together: dict[str, Any] = {}
    for changes in singles:
        together.update({flag: value for flag, value in changes.items() if flag != "--gpu-memory-utilization"})
    longest = case.settings.max_model_len
    if longest is not None and longest > SHORTEST_CONTEXT:
        together["--max-model-len"] = SHORTEST_CONTEXT
    for _ in range(3):
        plan, sheet = case.with_changes(together)
        if sheet.fits is True:
            return True
        share = other_share(plan, sheet)
        if share is None:
            return False
        together |= share
    return case.with_changes(together)[1].fits is True


def _candidates(
    case: Case, plan: Plan, sheet: LoadSheet, changed: Flags = _NOTHING
) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes in the order of harm, few of each kind, the gentler first. ``changed``: what the plan has already."""
    settings = plan.settings
    if settings.num_gpu_blocks_override is not None:
        yield {"--num-gpu-blocks-override": None}, "as many blocks as the memory holds"
    cards = cards_that_run(case)
    usable = [size for size in range(len(case.gpus), 0, -1) if divides(case.model, size)]
    if not cards and usable and usable[0] > settings.tensor_parallel_size and settings.pipeline_parallel_size == 1:
        cards = {"--tensor-parallel-size": usable[0]}
    if cards:
        yield cards, "as many cards as the model divides over"
    silent = no_video(plan.launch, sheet)
    if silent is not None and sheet.images is not None:
        words = f"no videos: the profile runs on one of {sheet.images.profiled_tokens or 0:,} tokens"
        yield silent, words
        moved = other_share(*case.with_changes({**changed, **silent}))
        if moved is not None:  # less harm than smaller pictures
            yield {**silent, **moved}, f"{words}; {_share_words(moved, settings.gpu_memory_utilization)}"
    rules = picture_rules(case.model, settings.max_pixels, settings.min_pixels)
    if rules is not None and rules.side is not None and not settings.language_model_only:
        for side in _SIDES:
            if rules.max_pixels is not None and side * side < rules.max_pixels:
                yield picture_cap(plan.launch, side * side), f"pictures of at most {side}x{side}"
    share = other_share(plan, sheet) if plan.ranks else None
    if share is not None:
        yield share, _share_words(share, settings.gpu_memory_utilization)
    for count in _SEQUENCES:
        if count < settings.max_num_seqs:
            yield {"--max-num-seqs": count}, f"at most {count} sequences at once"
    if least_batch(plan) <= SMALL_BATCH < settings.max_num_batched_tokens:
        yield {"--max-num-batched-tokens": SMALL_BATCH}, f"steps of at most {SMALL_BATCH:,} tokens"
    if settings.max_model_len is not None:
        longest = longest_in(plan)
        if SHORTEST_CONTEXT <= longest < settings.max_model_len:
            yield {"--max-model-len": longest}, "the longest context that fits"
    if settings.cudagraph_mode != "NONE":
        yield {"--enforce-eager": True}, "no CUDA graphs: slower, but without their memory"


def _recommended(case: Case, sheet: LoadSheet) -> Fix | None:
    """All flags that a recommendation changes, where what it finds fits for certain, or may where ``sheet`` does not;
    else the cards over which the weights fit."""
    found = Search(case, Wishes()).run()
    if not found.changes:
        return None
    size = found.plan.settings.tensor_parallel_size
    cards = f" on {size} cards" if size > 1 else ""
    words = f"the launch that --recommend finds{cards}: serving {gib(serving_peak(found.sheet))}"
    if found.sheet.fits is True:
        return fix_of(found.changes, words)
    if sheet.fits is None or too_heavy(found.plan):
        return None
    if found.sheet.fits is None:
        return structs.replace(fix_of(found.changes, f"{words}; it may fit"), replanned=False)
    if size == case.settings.tensor_parallel_size:
        return None
    held = max((rank.weight_bytes for rank in found.plan.ranks), default=0)
    words = f"the weights fit, {gib(held)} on each of {size} cards; not all else does"
    return structs.replace(fix_of(found.changes, words), replanned=False)


def _share_words(change: Flags, now: float) -> str:
    return f"{'a smaller' if change['--gpu-memory-utilization'] < now else 'a larger'} share of the card"


# ------------------------------------------------------------------------------------------------ cards


def _on_cards(case: Case, size: int) -> Fix | None:
    base = {"--tensor-parallel-size": size}
    count = len(case.gpus)
    cards = f"{count} cards of {_size(case)}; planned with so many: serving "
    plan, sheet = case.with_changes(base)
    if sheet.fits is True:
        return fix_of(base, cards + gib(serving_peak(sheet)))
    if not _holds_weights_and_cache(plan):
        return None
    singles = [change for change in _candidates(case, plan, sheet, base) if not set(change[0]) & set(base)]
    found = _search(case, singles, base)
    if found is not None:
        changes, why, then = found
        return fix_of({**base, **changes}, f"{cards}{gib(serving_peak(then))}; {why}")
    search = Search(case, Wishes())
    recommended = search.certain()
    everyday = min(search.policy.small_context, search.context or 0)
    if recommended is not None and (recommended.plan.settings.max_model_len or 0) >= everyday:
        return fix_of(
            recommended.changes, f"{cards}{gib(serving_peak(recommended.sheet))}; the launch that --recommend finds"
        )
    cache = gib(plan.kv_cache.available_bytes or 0) if plan.kv_cache is not None else ""
    words = f"{count} cards of {_size(case)} hold the weights and {cache} of cache; planned with so many, not all fits"
    return structs.replace(fix_of(base, words), replanned=False)


def _size(case: Case) -> str:
    return f"{case.gpus[0].total_bytes / GIB:.0f} GiB"


def _holds_weights_and_cache(plan: Plan) -> bool:
    return plan.kv_cache is not None and (plan.kv_cache.available_bytes or 0) > 0


# ------------------------------------------------------------------------------------------------ words


def fix_of(changes: Flags, why: str) -> Fix:
    """The changes as a fix that was planned again."""
    words: list[str] = []
    for flag, value in changes.items():
        if value is None:
            continue
        words.append(flag)
        if value is not True:
            words.append(_text(value))
    removed = tuple(flag for flag, value in changes.items() if value is None)
    return Fix(why, argv=tuple(words), remove=removed, replanned=True)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
