"""Fixes for what a log shows: computed from its own arguments and readings, planned again where that decides.

A fix is ``replanned`` when a plan that starts from the log's readings holds with it, or when the engine's own numbers
decide all that it touches. What it costs is named in its ``why``; why nothing was planned is said in a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any

from msgspec import Struct, convert, structs

from loadmaster.core.argv import parse_argv
from loadmaster.core.changecosts import costs
from loadmaster.core.diagnosis import Diagnosis
from loadmaster.core.facts import Finding, Fix, GpuFacts, LoadSheet, ModelFacts
from loadmaster.core.knownremedies import known_remedies
from loadmaster.core.levers import Found, gentlest
from loadmaster.core.logcards import estimated_cards
from loadmaster.core.logcase import LogCase, case_of
from loadmaster.core.logconflict import other_checkpoint
from loadmaster.core.logcorrection import Seen, Stage, correction, seen_in
from loadmaster.core.readingfixes import largest_free_share, reading_fixes
from loadmaster.core.remedy import fix_of, smallest_fix_of
from loadmaster.core.replanning import Case
from loadmaster.core.sheet import Plan
from loadmaster.core.tables import load_toml
from loadmaster.core.valuefixes import value_fixes
from loadmaster.core.verdict import gib, starts_of
from loadmaster.core.wrongadvice import wrong_advice

_ENOUGH = 2  # planned fixes of one cause
_MOST = 5  # fixes of one cause
_TREATED = 3  # findings that get fixes
_BY_FREE_MEMORY = ("free-memory-below-request", "gpu-held-by-other-process")
_BY_THE_ENGINE = ("context-exceeds-kv", "mamba-blocks")  # whose message names the value that fits
_ABOUT_MEMORY = ("quant-method-mismatch", "host-ram-killed")  # whose cure moves memory to the cards
_UNPLANNED = "the fix was not planned"
_MORE = "Needs other hardware: "  # what the cards at hand can do comes first
_PEAK_WORDS = {"start": "the peak of the start", "steady": "the card at rest", "serving": "the serving peak"}


class Remedy(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of ``log-remedies.toml``, described there."""

    peak: str
    levers: tuple[str, ...]
    stage: Stage | None = None


@cache
def remedies() -> dict[str, Remedy]:
    return convert(load_toml("log-remedies.toml"), dict[str, Remedy])


def with_fixes(diagnosis: Diagnosis, model: ModelFacts | None, gpus: Sequence[GpuFacts] | None) -> Diagnosis:
    """The diagnosis whose causes carry computed fixes before the known remedies.

    ``model`` None: what the table of public models knows by the log's name for it. ``gpus`` None: the cards that the
    log describes. Never raises for what a log can contain.
    """
    findings = list(diagnosis.findings)
    notes: list[str] = []
    for place, item in enumerate(findings[:_TREATED]):
        if place > 0 and item.severity != "error":
            continue
        case = case_of(diagnosis, item, model, gpus)
        other = other_checkpoint(case)
        if other is not None:
            case = structs.replace(case, model=None)
        computed, note = _computed(case)
        if place == 0:
            notes += [said for said in (other or note, case.conflict if item.code in remedies() else None) if said]
        fixes = _joined(computed, item.fixes)
        if not any(fix.replanned for fix in fixes):
            known = known_remedies(item.code, case.launch, case.engine)
            if case.engine.name == "vllm" and item.code not in remedies():
                known = tuple(_planned(case, fix) for fix in known)
            fixes = tuple(_distinct([*fixes, *known]))
        fixes = tuple(sorted(fixes, key=lambda fix: fix.why.startswith(_MORE)))
        findings[place] = structs.replace(item, fixes=fixes)
    findings += _wrong_advice(diagnosis, model)
    return structs.replace(diagnosis, findings=tuple(findings), notes=(*diagnosis.notes, *notes))


def _wrong_advice(diagnosis: Diagnosis, model: ModelFacts | None) -> tuple[Finding, ...]:
    """Remedies in the launch that do not help against the root cause; none where nothing failed."""
    first = next(iter(diagnosis.findings), None)
    if first is None or first.severity != "error":
        return ()
    case = case_of(diagnosis, first, model, None)
    said = [item.code for item in diagnosis.findings]
    return wrong_advice(case.launch, first.code, _is_quantised(case), said, case.engine.version)


def _is_quantised(case: LogCase) -> bool | None:
    if case.facts.quantization is not None:
        return case.facts.quantization.lower() not in ("none", "null", "")
    if case.model is not None:
        return case.model.quantization.method is not None
    return True if case.launch.flags.get("--quantization") else None


def _computed(case: LogCase) -> tuple[list[Fix], str | None]:
    own = [*reading_fixes(case), *value_fixes(case)]
    if case.engine.name != "vllm":
        return own, None
    remedy = remedies().get(case.finding.code)
    if remedy is None:
        return [_planned(case, fix) for fix in own], None
    planned, note = _replanned(case, remedy)
    sure = [fix for fix in own if fix.replanned]
    rest = [fix for fix in own if not fix.replanned]
    if case.finding.code in _BY_THE_ENGINE:
        fixes = _distinct([*sure, *planned, *rest])
    elif case.finding.code in _BY_FREE_MEMORY:  # what holds the memory comes before a share that may not do
        holding = [fix for fix in planned if fix.replanned]
        fixes = _distinct([*holding, *(fix for fix in own if fix.command), *planned, *own])
    else:
        fixes = _distinct([*planned, *sure, *rest])
    if note is not None and note.startswith(_UNPLANNED) and any(fix.replanned for fix in fixes):
        note = None
    return fixes, note


def _joined(computed: Sequence[Fix], known: Sequence[Fix]) -> tuple[Fix, ...]:
    return tuple(_distinct([*computed, *known])[:_MOST])


def _distinct(fixes: Sequence[Fix]) -> list[Fix]:
    """Each once: of those that turn the same flags, variables or command, the first."""
    kept: dict[Any, Fix] = {}
    for fix in fixes:
        flags = tuple(word for word in fix.argv if word.startswith("-"))
        turned = (*flags, *fix.remove, *fix.env, fix.command or "")
        kept.setdefault(turned if any(turned) else fix.why, fix)
    return list(kept.values())


# ------------------------------------------------------------------------------------------------ planned again


def _replanned(case: LogCase, remedy: Remedy) -> tuple[list[Fix], str | None]:
    """Fixes that the planner holds for good, else what comes nearest; and why there are none."""
    if case.model is None:
        return [], (
            "the fix was not planned: the checkpoint is not here and its name is in no table; --model DIR says where "
            f"it is{'' if case.gpus else ', --gpus what cards it ran on'}"
        )
    if not case.gpus:
        return _on_estimated_cards(case, case.model, remedy)
    if case.finding.code in _BY_FREE_MEMORY:
        return _beside_others(case, remedy)
    given = Case(case.model, case.gpus, case.launch, case.engine)
    plan = given.plan()
    if not plan.ranks:
        return [], "the fix was not planned: the weights cannot be spread over these cards"
    return _by_levers(structs.replace(given, corrected=correction(plan, _seen(case, remedy))), remedy)


def _on_estimated_cards(case: LogCase, model: ModelFacts, remedy: Remedy) -> tuple[list[Fix], str | None]:
    cards = estimated_cards(case, model) if remedy.peak == "cache" else None
    if cards is None:
        return [], "the fix was not planned: the log does not say how large the cards are; --gpus says it"
    fixes, note = _replanned(structs.replace(case, gpus=cards), remedy)
    size = gib(cards[0].total_bytes)
    words = f"the cards are taken to have about {size}, to which weights, cache and share in the log add up"
    return fixes, words if note is None else f"{note}; {words}"


def _by_levers(given: Case, remedy: Remedy) -> tuple[list[Fix], str | None]:
    """The gentlest values of this cause's levers; where they cure the start alone, also what makes all fit."""
    plan, sheet = given.with_changes({})
    holds = _fits if remedy.stage == "serving" else _starts
    if holds(plan, sheet):
        return [], _contradiction(sheet)
    tried = (gentlest(given, lever, plan, sheet, holds) for lever in remedy.levers)
    held = list(islice((found for found in tried if found is not None), _ENOUGH))
    fixes = [_fix(remedy, plan, sheet, found) for found in held]
    if any(found.sheet.fits is True for found in held):
        return fixes, None
    further = [_weighed(given, remedy, fix, plan, sheet) for fix in smallest_fix_of(given, sheet)]
    if fixes:
        return [*fixes, *(fix for fix in further if fix.replanned)], None
    if any(fix.replanned for fix in further):
        return further, None
    unsure = "; ".join(sheet.notes[:1])
    return further, "no change was found with which the plan fits for certain" + (f" ({unsure})" if unsure else "")


def _fits(plan: Plan, sheet: LoadSheet) -> bool:
    return sheet.fits is True


def _starts(plan: Plan, sheet: LoadSheet) -> bool:
    return starts_of(plan, sheet.gpus) is True


def _seen(case: LogCase, remedy: Remedy) -> Seen:
    readings = case.readings
    stage = remedy.stage
    if case.finding.code == "oom-sampler-warmup" and readings.kv_available_bytes is not None:
        stage = "capture"  # the sampler is warmed up again after the cache was made
    seen = seen_in(readings, stage)
    if seen.cache is None and (said := case.figures.gib("available")) is not None:
        seen = structs.replace(seen, cache=said)
    return seen


def _contradiction(sheet: LoadSheet) -> str:
    fits = sheet.fits is True
    names = tuple(sheet.gpus[0].peak_high_bytes) if fits else ("start", "steady")  # else the start alone is sure
    load = max(sheet.gpus, key=lambda load: max(load.peak_high_bytes[name] for name in names) - load.total_bytes)
    highest = max(load.peak_high_bytes[name] for name in names)
    return (
        f"the fix was not planned: by the plan this launch {'fits' if fits else 'starts'}, with at most {gib(highest)} "
        f"of {gib(load.total_bytes)} on a card. Another process may have held memory then, or the checkpoint or the "
        "cards are others"
    )


def _beside_others(case: LogCase, remedy: Remedy) -> tuple[list[Fix], str | None]:
    """The largest share with which all fits beside what others hold, no larger than what was free at the start."""
    share = largest_free_share(case)
    if share is None or case.model is None or not case.gpus or share >= case.share:
        return [], None
    before = Case(case.model, case.gpus, case.launch, case.engine).plan()
    if not before.ranks:
        return [], None
    gpus = tuple(_beside(gpu, case, before) for gpu in case.gpus)
    given = Case(case.model, gpus, case.launch, case.engine)
    plan, sheet = given.with_changes({})
    found = gentlest(given, "share-down", plan, sheet, _starts)
    if found is None or found.plan.kv_cache is None:
        changes = {"--gpu-memory-utilization": share}
        _, sheet = given.with_changes(changes)
        reason = next((item.cause for item in sheet.findings if item.severity == "error"), "it may not fit")
        words = f"{share:g} of the card is free, but by the plan that is not surely enough: {reason}"
        return [structs.replace(fix_of(changes, words), replanned=False)], None
    cache = found.plan.kv_cache
    words = f"This much is free, and {gib(cache.available_bytes or 0)} of it are left for the cache"
    return [fix_of(found.changes, f"{words}.{_cost_words(before, found.plan)}{_risk(found.sheet)}")], None


def _beside(gpu: GpuFacts, case: LogCase, plan: Plan) -> GpuFacts:
    """The card with what others hold: what was not free at the start, less the engine's own context."""
    free, total = case.figures.number("free"), case.figures.number("total")
    if free is None or not total:
        return gpu
    context = max(rank.context.high for rank in plan.ranks)
    return structs.replace(gpu, free_bytes=min(gpu.total_bytes, round(free / total * gpu.total_bytes) + context))


# ------------------------------------------------------------------------------------------------ words


def _fix(remedy: Remedy, plan: Plan, sheet: LoadSheet, found: Found) -> Fix:
    effect = _effect(remedy.peak, plan, sheet, found)
    return fix_of(found.changes, f"{effect}.{_cost_words(plan, found.plan)}{_risk(found.sheet)}")


def _cost_words(before: Plan, after: Plan) -> str:
    said = costs(before, after)
    return f" It costs: {'; '.join(said)}." if said else " It costs nothing else."


def _risk(sheet: LoadSheet) -> str:
    """What may still go wrong after the start: the largest request beside the rest."""
    over = [load for load in sheet.gpus if load.peak_high_bytes["serving"] > load.total_bytes]
    if not over:
        return ""
    worst = max(over, key=lambda load: load.peak_high_bytes["serving"] - load.total_bytes)
    low, high = worst.peak_low_bytes["serving"], worst.peak_high_bytes["serving"]
    size = sheet.images.largest_size if sheet.images is not None else None
    what = f"a picture of {size[0]}x{size[1]}" if size is not None else "the largest request"
    sure = "takes" if low > worst.total_bytes else "may take"
    return f" Not cured by it: {what} {sure} the card to {gib(high)} of {gib(worst.total_bytes)} later."


def _effect(peak: str, plan: Plan, sheet: LoadSheet, found: Found) -> str:
    """The figure that failed, before and after."""
    old, new = plan.kv_cache, found.plan.kv_cache
    if peak == "cache":
        assert old is not None
        assert new is not None
        words = f"The cache has {gib(old.available_bytes or 0)}"
        if (new.available_bytes or 0) != (old.available_bytes or 0):
            words = f"The cache grows from {gib(old.available_bytes or 0)} to {gib(new.available_bytes or 0)}"
        if found.plan.request_bytes is not None and found.plan.settings.max_model_len is not None:
            length = found.plan.settings.max_model_len
            words += f", and one request of {length:,} tokens takes {gib(found.plan.request_bytes)}"
            if plan.request_bytes is not None and plan.request_bytes != found.plan.request_bytes:
                words += f" in place of {gib(plan.request_bytes)}"
        return words
    worst = max(range(len(sheet.gpus)), key=lambda at: sheet.gpus[at].peak_bytes[peak] - sheet.gpus[at].total_bytes)
    before = sheet.gpus[worst]
    after = found.sheet.gpus[min(worst, len(found.sheet.gpus) - 1)]
    words = _PEAK_WORDS[peak]
    return (
        f"{words[0].upper()}{words[1:]} falls from {gib(before.peak_bytes[peak])} to {gib(after.peak_bytes[peak])} of "
        f"{gib(after.total_bytes)}"
    )


def _changes(fix: Fix, case: Case) -> dict[str, Any]:
    flags = parse_argv(["vllm", "serve", "m", *fix.argv], engine_version=case.engine.version).flags
    return {**dict.fromkeys(fix.remove), **flags}


def _weighed(case: Case, remedy: Remedy, fix: Fix, before: Plan, sheet: LoadSheet) -> Fix:
    """A fix of the general search, with the figure that failed before and after, and what it costs.

    One for more cards than there are is no fix of this launch: said to need them, and not called planned for it.
    """
    if not fix.argv and not fix.remove:
        return fix
    changes = _changes(fix, case)
    if _takes_more_cards(case, changes):
        return structs.replace(fix, why=_MORE + fix.why, replanned=False)
    plan, after = case.with_changes(changes)
    if not after.gpus or not after.gpus[0].peak_bytes:
        return fix
    effect = _effect(remedy.peak, before, sheet, Found("", changes, plan, after))
    if not fix.replanned:
        effect += "; it is not sure that all fits"
    return structs.replace(fix, why=f"{effect} ({fix.why}).{_cost_words(before, plan)}{_risk(after)}")


def _takes_more_cards(case: Case, changes: dict[str, Any]) -> bool:
    settings = case.plan(changes).settings
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size
    return ranks > len(case.gpus)


def _planned(case: LogCase, fix: Fix) -> Fix:
    """A fix of another kind, marked as planned where model and cards are known and it fits with them."""
    if fix.replanned or not (fix.argv or fix.remove) or case.model is None:
        return fix
    if case.finding.code == "quant-method-mismatch" and case.model.quantization.method is not None:
        fix = structs.replace(fix, why=f"The checkpoint is in the format {case.model.quantization.method}. {fix.why}")
    if not case.gpus:
        return structs.replace(fix, why=f"{fix.why} Not planned: the log does not name the cards; --gpus does.")
    given = Case(case.model, case.gpus, case.launch, case.engine)
    _, sheet = given.with_changes(_changes(fix, given))
    if not sheet.gpus:
        return fix
    peak = max(sheet.gpus, key=lambda load: load.peak_bytes["serving"])
    if sheet.fits is not True:
        if case.finding.code not in _ABOUT_MEMORY:
            return fix
        high = gib(max(peak.peak_high_bytes.values()))
        words = f"Planned with it, memory is not surely enough then: up to {high} of {gib(peak.total_bytes)} on a card."
        return structs.replace(fix, why=f"{fix.why} {words}")
    return structs.replace(
        fix,
        why=f"{fix.why} Planned with it: {gib(peak.peak_bytes['serving'])} of {gib(peak.total_bytes)} while serving.",
        replanned=True,
    )
