"""``make_plan``: the load sheet of a launch, with the smallest change that makes it fit when it does not."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from loadmaster.core.facts import EngineFacts, GpuFacts, LaunchArgs, LoadSheet, ModelFacts
from loadmaster.core.recommend import smallest_fix
from loadmaster.core.sheet import load_sheet, plan_of


def make_plan(model: ModelFacts, gpus: Sequence[GpuFacts], launch: LaunchArgs, engine: EngineFacts) -> LoadSheet:
    """Plan a launch of vLLM on these cards.

    Works for any model: what no rule covers is bounded widely, what is unknown is said in ``notes``, and
    ``fits`` is None when that decides. When it does not fit, the first finding carries the smallest change that
    was planned again and fits. Never raises for what a model directory or a command can contain.
    """
    sheet = load_sheet(plan_of(model, gpus, launch, engine))
    if sheet.fits is True or not sheet.findings:
        return sheet
    fixes = smallest_fix(model, gpus, launch, engine, sheet)
    if not fixes:
        return sheet
    first, *others = sheet.findings
    kept = tuple(fix for fix in first.fixes if fix.argv not in [found.argv for found in fixes])
    return structs.replace(sheet, findings=(structs.replace(first, fixes=(*fixes, *kept)), *others))
