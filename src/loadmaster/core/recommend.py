"""The launch that fits with the most useful settings, each change with its reason in bytes.

What is given up first, and what never: :mod:`loadmaster.core.search` and its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from loadmaster.core.argv import parse_argv, with_flags
from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import order
from loadmaster.core.cleaning import cleaned
from loadmaster.core.facts import (
    GIB,
    Change,
    EngineFacts,
    Fix,
    GpuFacts,
    LaunchArgs,
    LaunchPlan,
    LoadSheet,
    ModelFacts,
)
from loadmaster.core.remedy import fewer_bits, more_cards, with_fixes
from loadmaster.core.replanning import Case, serving_peak
from loadmaster.core.review import review, reviewed
from loadmaster.core.search import Found, Search, policy, useful_card
from loadmaster.core.sheet import Plan
from loadmaster.core.verdict import gib
from loadmaster.core.wishes import Wishes, unmet, within_model

_LEFT_OUT = "not used by this launch"
_CARD_SIZES = tuple(size * GIB for size in (16, 24, 32, 48, 80, 96, 141, 180))  # of cards that are sold


def recommend(
    model: ModelFacts,
    gpus: Sequence[GpuFacts],
    launch: LaunchArgs,
    engine: EngineFacts,
    *,
    context: int | None = None,
    concurrency: int | None = None,
    max_image_pixels: int | None = None,
) -> LoadSheet:
    """The load sheet of the launch that fits with the most useful settings.

    ``context``: tokens that a request must have room for (default: the model's). ``concurrency``: sequences that
    run at once. ``max_image_pixels``: area of the largest picture that must be served. ``launch.changed`` of the
    result names each flag that was set, with its reason in bytes. When nothing fits for certain, a launch that may
    fit is returned and called so; when none may, the launch as given with its findings, on the cards it can use.
    """
    asked = Wishes(context=context, concurrency=concurrency, pixels=max_image_pixels)
    granted = within_model(asked, model)
    clean, dropped = cleaned(LaunchCase(launch, model, gpus, engine, None))
    case = Case(model, tuple(gpus), clean, engine)
    search = Search(case, granted.wishes)
    best = search.run()
    sheet = _with_changes(case, best, (*dropped, *_reasons(search, best)))
    idle = _idle_words(search, best)
    notes = tuple(note for note in sheet.notes if not idle or _LEFT_OUT not in note)
    sheet = structs.replace(sheet, notes=(*_not_useful(search, best), *idle, *notes))
    sheet = structs.replace(
        sheet, findings=order([*granted.findings, *sheet.findings]), notes=(*granted.notes, *sheet.notes)
    )
    final = parse_argv(sheet.launch.argv, engine_version=engine.version, env=clean.env)
    sheet = reviewed(sheet, review(LaunchCase(final, model, gpus, engine, None)), model)
    if asked.concurrency is not None and asked.context is None:  # as many requests of the length that a flag gives
        asked = structs.replace(asked, context=search.given_context)
    missed = unmet(structs.replace(asked, pixels=granted.wishes.pixels), sheet, model)
    if not missed:
        return sheet
    # A launch that fits is not what was asked for.
    fits = False if sheet.fits is True else sheet.fits
    return structs.replace(sheet, fits=fits, unmet=missed, notes=(*missed, *sheet.notes))


def _with_changes(case: Case, best: Found, changes: tuple[Change, ...]) -> LoadSheet:
    launch = with_flags(case.launch, best.changes)
    plan = LaunchPlan(argv=launch.argv, changed=changes, env=launch.env)
    sheet = structs.replace(best.sheet, launch=plan)
    if sheet.fits is True:
        return sheet
    idle = _idle_cards(case)
    fixes = (*idle, *more_cards(case.model, case.gpus, case.launch, case.engine)) if sheet.fits is False else idle
    said = (_failure(case, best, fixes), *sheet.notes)
    sheet = structs.replace(sheet, notes=said)
    return with_fixes(sheet, (*fixes, *fewer_bits(case.model, case.launch, sheet)))


def _idle_words(search: Search, best: Found) -> tuple[str, ...]:
    """How many cards a recommendation leaves free, and what they are good for."""
    if best.sheet.fits is not True:
        return ()
    settings, cards = best.plan.settings, len(search.case.gpus)
    used = settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size
    copies = cards // used
    if copies < 2 or "--tensor-parallel-size" in search.given:
        return ()
    fits = f"the launch needs {used} of the {cards} cards: {cards - used} {'is' if cards - used == 1 else 'are'} left"
    if search.case.model.text.num_experts:
        how = f"for replicas of their own behind one gateway, {copies} in all"
    else:
        how = f"for replicas: --data-parallel-size {copies} serves {copies} times as many requests"
    return (f"{fits} {how}",)


def _not_useful(search: Search, best: Found) -> tuple[str, ...]:
    """What to say of a launch that starts, with a context that is no good to anybody."""
    length, useful = best.plan.settings.max_model_len, policy().useful_context
    if best.sheet.fits is False or length is None or length >= min(useful, search.context or useful):
        return ()
    larger = useful_card(search.case, [size for size in _CARD_SIZES if size > search.case.gpus[0].total_bytes])
    would = [f"a card with {larger // GIB} GiB"] if larger is not None else []
    if fewer_bits(search.case.model, search.case.launch, best.sheet):
        would.append("a checkpoint of fewer bits")
    words = f"not useful: only a context of {length:,} tokens {'fits' if best.sheet.fits else 'may fit'}"
    return (f"{words}; what would do: {' or '.join(would)}" if would else words,)


def _idle_cards(case: Case) -> tuple[Fix, ...]:
    """The size that fits where the given one leaves cards idle."""
    given = case.launch.flags.get("--tensor-parallel-size")
    if given is None or case.settings.tensor_parallel_size >= len(case.gpus):
        return ()
    free = structs.replace(case, launch=with_flags(case.launch, {"--tensor-parallel-size": None}))
    found = Search(free, Wishes()).run()
    size = found.changes.get("--tensor-parallel-size")
    if found.sheet.fits is not True or size is None:
        return ()
    words = f"{size} of the {len(case.gpus)} cards, where {given} is given: planned, it fits with --recommend"
    return (Fix(words, argv=("--tensor-parallel-size", str(size)), replanned=True),)


def _failure(case: Case, best: Found, fixes: Sequence[Fix]) -> str:
    """Why nothing fits, in one sentence with numbers, and what would."""
    ranks, loads = best.plan.ranks, best.sheet.gpus
    certain = best.sheet.fits is False
    if not best.plan.weights_known and not certain:
        return "nothing can be recommended for certain: how large the weights are is not known"
    words = "no settings make this launch fit" if certain else "no settings make this launch fit for certain"
    words += f" on {len(ranks)} card{'' if len(ranks) == 1 else 's'}"
    if loads:
        rank, load = max(zip(ranks, loads, strict=True), key=lambda pair: pair[0].weight_bytes)
        words += (
            f" of {gib(load.total_bytes)}: weights take {gib(rank.weight_bytes)} of it and the context "
            f"{gib(rank.context.bytes + rank.other_processes)}, which leaves "
            f"{gib(max(0, load.total_bytes - rank.weight_bytes - rank.context.bytes - rank.other_processes))} "
            "for everything else"
        )
    if not certain:
        words += "; the launch below fits by the expected figures"
    if fixes:
        words += f"; what would do: {fixes[0].why}"
    return words


def _reasons(search: Search, best: Found) -> tuple[Change, ...]:
    """Each changed flag, with what it frees or costs on the tightest card: planned with and without it."""
    changes = []
    for flag, value in best.changes.items():
        before = search.given.get(flag)
        if value == before or (value is None and before is None):
            continue
        without = dict(best.changes)
        del without[flag]
        plan, sheet = search.case.with_changes(without)
        freed = serving_peak(sheet) - serving_peak(best.sheet)
        why = _why(search, flag, value, best, plan, sheet, freed)
        default = getattr(search.settings, flag.removeprefix("--").replace("-", "_"), None) if before is None else None
        changes.append(Change(flag, False if value is None else value, why, before, freed, default))
    return tuple(changes)


def _why(search: Search, flag: str, value: Any, best: Found, plan: Plan, sheet: LoadSheet, freed: int) -> str:
    cache, other = best.plan.kv_cache, plan.kv_cache
    left = (cache.available_bytes or 0) if cache is not None else 0
    before = (other.available_bytes or 0) if other is not None else 0
    if flag == "--tensor-parallel-size":
        weights = max((rank.weight_bytes for rank in best.plan.ranks), default=0)
        if value in (None, 1):
            return f"one card holds the weights, {gib(weights)}"
        return f"each of {value} cards holds {gib(weights)} of weights"
    if flag == "--enforce-eager":
        if value is None:
            graphs = max((rank.graphs.bytes for rank in best.plan.ranks if rank.graphs is not None), default=0)
            return f"graphs decode many times faster and take {gib(graphs)}"
        return f"without graphs {gib(max(0, left - before))} more are left for the cache"
    if flag == "--max-model-len":
        need = best.plan.request_bytes or 0
        words = "the model's whole context" if value == search.declared else "the longest that fits"
        if value == search.context != search.declared:
            words = "the context that was asked for"
        if search.wishes.context is None and search.wishes.pixels and (search.given_context or value) < value:
            words = "room for a picture of the size that was asked for"
        return f"{words}: one request takes {gib(need)} of the cache's {gib(left)}"
    if flag == "--mm-processor-kwargs":
        picture = best.sheet.images.largest_size if best.sheet.images is not None else None
        size = f"{picture[0]}x{picture[1]}" if picture else "the capped size"
        return f"the largest picture is {size}: {gib(max(0, freed))} less at the serving peak"
    if flag == "--limit-mm-per-prompt" and sheet.images is not None:
        video = f"the profile runs on a video of {sheet.images.profiled_tokens or 0:,} tokens"
        return f"no videos: {video}, {gib(max(0, left - before))} more for the cache without"
    if flag == "--max-num-seqs":
        gained = left - before
        if freed > 0 or gained > 0:
            return f"{gib(max(0, freed))} less at the serving peak, {gib(max(0, gained))} more cache"
        return f"{value} sequences fit at once: {gib(-freed)} at the serving peak"
    if flag == "--gpu-memory-utilization":
        total = min(gpu.total_bytes for gpu in search.case.gpus)
        if freed >= 0:
            return f"keeps the serving peak below {gib(total)}: {gib(freed)} less"
        return f"{gib(max(0, left - before))} more for the cache"
    return f"{gib(abs(freed))} {'less' if freed >= 0 else 'more'} at the serving peak"
