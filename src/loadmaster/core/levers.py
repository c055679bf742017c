"""Single changes of a launch that free memory, each as a row of values from the gentlest to the harshest.

``no-video``      no videos, where the profile runs on one nobody asked for
``pictures``      a smaller largest picture
``batch``         fewer tokens in a step
``sequences``     fewer requests at once
``capture-size``  CUDA graphs for smaller batches only
``share-down``    a smaller share of the card, which leaves more beside the budget
``share-up``      a larger share, which leaves more for the cache
``context``       a shorter context
``cache-8bit``    a cache of 8-bit values
``cards``         more of the cards that are there
``eager``         no CUDA graphs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from loadmaster.core.facts import LoadSheet
from loadmaster.core.flagtable import flag_table
from loadmaster.core.pictures import picture_rules
from loadmaster.core.replanning import SHORTEST_CONTEXT, Case, divides, least_batch, longest_in, no_video, picture_cap
from loadmaster.core.sheet import Plan

_SIDES = (3584, 3072, 2560, 2048, 1792, 1536, 1280, 1024, 896, 768, 640, 512)  # pixels
_SEQUENCES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 2, 1)
_BATCHES = (16384, 8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512)
_CAPTURES = (256, 192, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1)
_LEAST_SHARE = 0.3
_STEP_BY_STEP = ("share-down",)
_FULL_WIDTH = ("auto", "bfloat16", "float16")


class Found(Struct, frozen=True):
    """A change that makes the launch fit, with its plan."""

    lever: str
    changes: dict[str, Any]
    plan: Plan
    sheet: LoadSheet


Holds = Callable[[Plan, LoadSheet], bool]


def gentlest(case: Case, lever: str, plan: Plan, sheet: LoadSheet, holds: Holds) -> Found | None:
    """The gentlest value of a lever with which the plan ``holds``; None when even with the harshest it does not.

    What holds with one value holds with every harsher one, so few of them are planned; but a smaller share of the
    card can be too small, and is looked for step by step.
    """
    known = flag_table(case.engine.version).options
    values = [changes for changes in _LEVERS[lever](case, plan, sheet) if all(flag in known for flag in changes)]
    if not values:
        return None
    if lever in _STEP_BY_STEP:
        tried = (_tried(case, lever, changes, holds) for changes in values)
        return next((found for found in tried if found is not None), None)
    best = _tried(case, lever, values[-1], holds)
    if best is None:
        return None
    low, high = 0, len(values) - 1  # the last one holds
    while low < high:
        middle = (low + high) // 2
        found = _tried(case, lever, values[middle], holds)
        if found is not None:
            best, high = found, middle
        else:
            low = middle + 1
    return best


def _tried(case: Case, lever: str, changes: dict[str, Any], holds: Holds) -> Found | None:
    plan, sheet = case.with_changes(changes)
    return Found(lever, changes, plan, sheet) if holds(plan, sheet) else None


# ------------------------------------------------------------------------------------------------ the levers


def _no_video(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    silent = no_video(case.launch, sheet)
    if silent is not None:
        yield silent


def _pictures(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    settings = plan.settings
    rules = picture_rules(case.model, settings.max_pixels, settings.min_pixels)
    if rules is None or rules.side is None or settings.language_model_only:
        return
    for side in _SIDES:
        if rules.max_pixels is None or side * side < rules.max_pixels:
            yield picture_cap(case.launch, side * side)


def _batch(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    least = least_batch(plan)
    for tokens in _BATCHES:
        if least <= tokens < plan.settings.max_num_batched_tokens:
            yield {"--max-num-batched-tokens": tokens}


def _sequences(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    yield from ({"--max-num-seqs": count} for count in _SEQUENCES if count < plan.settings.max_num_seqs)


def _capture_size(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    sizes = plan.settings.cudagraph_capture_sizes
    most = max(sizes, default=0)
    yield from ({"--max-cudagraph-capture-size": size} for size in _CAPTURES if size < most)


def _share_down(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    if plan.settings.kv_cache_memory_bytes is not None:
        return
    now = plan.settings.gpu_memory_utilization
    share = math.ceil(now * 100) - 1
    # below, one request has no room any more: no smaller share helps then
    least = max(_share_of_one_request(plan), _LEAST_SHARE)
    while share / 100 >= least:
        yield {"--gpu-memory-utilization": share / 100}
        share -= 1


def _share_of_one_request(plan: Plan) -> float:
    """The share of the card at which the cache still holds one request of the longest context."""
    if plan.tightest is None or plan.request_bytes is None:
        return _LEAST_SHARE
    rank = plan.ranks[plan.tightest]
    spare = rank.left.low - plan.request_bytes
    return plan.settings.gpu_memory_utilization - spare / rank.gpu.total_bytes


def _share_up(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    """Upwards a share has two limits: too little leaves no cache, too much is not free. The least that does."""
    if plan.settings.kv_cache_memory_bytes is not None or not plan.ranks or plan.tightest is None:
        return
    rank = plan.ranks[plan.tightest]
    least = plan.settings.gpu_memory_utilization
    if plan.request_bytes is not None:
        least += max(0, plan.request_bytes - rank.left.low) / rank.gpu.total_bytes
    share = math.ceil(least * 100 + 1e-9)
    if share / 100 <= plan.settings.gpu_memory_utilization:
        share += 1
    if share <= 99:
        yield {"--gpu-memory-utilization": share / 100}


def _context(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    longest = longest_in(plan)
    if plan.settings.max_model_len is not None and SHORTEST_CONTEXT <= longest < plan.settings.max_model_len:
        yield {"--max-model-len": longest}


def _cache_8bit(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    if plan.settings.kv_cache_dtype in _FULL_WIDTH:
        yield {"--kv-cache-dtype": "fp8"}


def _cards(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    settings = plan.settings
    if settings.pipeline_parallel_size * settings.data_parallel_size > 1:
        return
    for size in range(settings.tensor_parallel_size + 1, len(case.gpus) + 1):
        if divides(case.model, size):
            yield {"--tensor-parallel-size": size}


def _eager(case: Case, plan: Plan, sheet: LoadSheet) -> Iterator[dict[str, Any]]:
    if plan.settings.cudagraph_mode != "NONE":
        yield {"--enforce-eager": True}


_LEVERS: dict[str, Callable[[Case, Plan, LoadSheet], Iterator[dict[str, Any]]]] = {
    "no-video": _no_video,
    "pictures": _pictures,
    "batch": _batch,
    "sequences": _sequences,
    "capture-size": _capture_size,
    "share-down": _share_down,
    "share-up": _share_up,
    "context": _context,
    "cache-8bit": _cache_8bit,
    "cards": _cards,
    "eager": _eager,
}
