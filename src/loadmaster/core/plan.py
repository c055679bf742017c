"""``make_plan``: the load sheet of a launch, with the smallest change that makes it fit when it does not."""

from __future__ import annotations

from collections.abc import Sequence

from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.facts import EngineFacts, GpuFacts, LaunchArgs, LoadSheet, ModelFacts
from loadmaster.core.remedy import smallest_fix, with_fixes
from loadmaster.core.review import review, reviewed
from loadmaster.core.sheet import load_sheet, plan_of


def make_plan(model: ModelFacts, gpus: Sequence[GpuFacts], launch: LaunchArgs, engine: EngineFacts) -> LoadSheet:
    """Plan a launch of vLLM on these cards.

    Works for any model: what no rule covers is bounded widely, what is unknown is said in ``notes``, and
    ``fits`` is None when that decides. When it does not fit, the first error carries the smallest change that
    was planned again and fits, else more cards. Damaged files and flags that the engine refuses come first and
    decide, see :mod:`loadmaster.core.review`. Never raises for what a model directory or a command can contain.
    """
    found = review(LaunchCase(launch, model, gpus, engine, None))
    sheet = plan_alone(model, gpus, launch, engine) if found.refused else plan_memory(model, gpus, launch, engine)
    return reviewed(sheet, found, model)


def plan_memory(model: ModelFacts, gpus: Sequence[GpuFacts], launch: LaunchArgs, engine: EngineFacts) -> LoadSheet:
    """As :func:`make_plan`, of memory alone: as if files and flags were all in order."""
    sheet = plan_alone(model, gpus, launch, engine)
    if sheet.fits is True or not sheet.findings:
        return sheet
    return with_fixes(sheet, smallest_fix(model, gpus, launch, engine, sheet))


def plan_alone(model: ModelFacts, gpus: Sequence[GpuFacts], launch: LaunchArgs, engine: EngineFacts) -> LoadSheet:
    """As :func:`plan_memory`, without the search for what makes it fit."""
    return load_sheet(plan_of(model, gpus, launch, engine))
