"""Planning a launch again with other flags, and the flags that the search for a launch that fits turns.

Each function returns flags as :func:`loadmaster.core.argv.with_flags` takes them: a value, or None to drop one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from loadmaster.core.argv import with_flags
from loadmaster.core.cache import largest_context
from loadmaster.core.facts import EngineFacts, GpuFacts, LaunchArgs, LoadSheet, ModelFacts, Settings
from loadmaster.core.loaderlimits import stored_whole
from loadmaster.core.settings import effective_settings
from loadmaster.core.sheet import Plan, load_sheet, plan_of

Flags = Mapping[str, Any]

SHORTEST_CONTEXT = 2048  # tokens; less is of no use to anybody
SMALL_BATCH = 2048  # tokens of a step: the engine's own choice for small cards
_LEAST_SHARE = 0.05


class Case(Struct, frozen=True):
    """What is planned again and again: the model, the cards, the launch as given, the engine.

    ``corrected``: what a real start showed to be otherwise than planned, put into each plan.
    """

    model: ModelFacts
    gpus: tuple[GpuFacts, ...]
    launch: LaunchArgs
    engine: EngineFacts
    corrected: Callable[[Plan], Plan] | None = None

    def plan(self, changes: Flags = MappingProxyType({})) -> Plan:
        plan = plan_of(self.model, self.gpus, with_flags(self.launch, changes), self.engine)
        return plan if self.corrected is None else self.corrected(plan)

    def with_changes(self, changes: Flags) -> tuple[Plan, LoadSheet]:
        plan = self.plan(changes)
        return plan, load_sheet(plan)

    @property
    def settings(self) -> Settings:
        return effective_settings(self.launch, self.model, self.gpus, self.engine)


def divides(model: ModelFacts, size: int) -> bool:
    """Whether heads, expert widths and quantisation groups can be divided over ``size`` ranks."""
    if size > 1 and stored_whole(model):
        return False
    text, vision = model.text, model.vision
    if text.num_attention_heads is not None and text.num_attention_heads % size:
        return False
    if vision is not None and vision.num_heads is not None and vision.num_heads % size:
        return False
    if text.linear_num_key_heads is not None and text.linear_num_key_heads % size:
        return False
    kv = text.num_key_value_heads
    if kv is not None and kv % size and size % kv:
        return False
    group = model.quantization.group_size
    if model.quantization.block_shape is not None:
        group = model.quantization.block_shape[1]
    if group is not None and group > 0 and size > 1:
        widths = (text.moe_intermediate_size, text.intermediate_size if not text.num_experts else None)
        if any(width is not None and width % (size * group) for width in widths):
            return False
    return True


def cards_that_run(case: Case) -> dict[str, Any]:
    """Tensor parallel size: as given when it can run, else the largest that the cards and shapes allow."""
    settings, cards = case.settings, len(case.gpus)
    world = settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size
    size = settings.tensor_parallel_size
    if "--tensor-parallel-size" in case.launch.flags and world <= cards and divides(case.model, size):
        return {}
    changes: dict[str, Any] = {}
    others = settings.pipeline_parallel_size * settings.data_parallel_size
    if others > cards:
        changes |= {"--pipeline-parallel-size": None, "--data-parallel-size": None}
        others = 1
    size = next(size for size in range(max(1, cards // others), 0, -1) if divides(case.model, size))
    if size != settings.tensor_parallel_size:
        changes["--tensor-parallel-size"] = size
    return changes


def picture_cap(launch: LaunchArgs, pixels: int) -> dict[str, Any]:
    """A cap on the area of pictures, beside what ``--mm-processor-kwargs`` holds already."""
    given = launch.flags.get("--mm-processor-kwargs")
    kept = dict(given) if isinstance(given, dict) else {}
    if isinstance(kept.get("size"), dict):
        kept["size"] = {**kept["size"], "longest_edge": pixels}
    else:
        kept["max_pixels"] = pixels
    return {"--mm-processor-kwargs": kept}


def no_video(launch: LaunchArgs, sheet: LoadSheet) -> dict[str, Any] | None:
    """No video served, where the profile runs on one that nobody asked for; None where it does not."""
    if sheet.images is None or sheet.images.profiled_modality != "video":
        return None
    given = launch.flags.get("--limit-mm-per-prompt")
    if given is None:
        return {"--limit-mm-per-prompt": {"video": 0}}
    if isinstance(given, dict) and "video" not in given:
        return {"--limit-mm-per-prompt": {**given, "video": 0}}
    return None


def other_share(plan: Plan, sheet: LoadSheet, requests: float = 1.0) -> dict[str, Any] | None:
    """``--gpu-memory-utilization`` moved down by the overshoot, or up by what the cache of ``requests`` lacks."""
    if plan.settings.kv_cache_memory_bytes is not None or not plan.ranks:
        return None
    now = plan.settings.gpu_memory_utilization
    over = max(
        (high - load.total_bytes) / load.total_bytes for load in sheet.gpus for high in load.peak_high_bytes.values()
    )
    most = min(
        (rank.gpu.total_bytes - rank.other_processes - rank.context.high) / rank.gpu.total_bytes for rank in plan.ranks
    )
    share = now
    if over > 0:
        share = now - over
    elif plan.request_bytes is not None and plan.kv_cache is not None:
        lacking = plan.request_bytes * max(1.0, requests) - (plan.kv_cache.available_low_bytes or 0)
        if lacking > 0:
            share = now + max(lacking / rank.gpu.total_bytes for rank in plan.ranks) + 0.005
    share = math.floor(min(share, most) * 100) / 100
    if over <= 0 and share < now < most:
        share = min(math.floor(most * 100) / 100, math.ceil(now * 100) / 100)
    if share == now or share <= _LEAST_SHARE:
        return None
    return {"--gpu-memory-utilization": share}


def least_batch(plan: Plan) -> int:
    """Tokens of a step below which the engine refuses the launch."""
    settings = plan.settings
    least = settings.max_num_seqs
    if not settings.enable_chunked_prefill:
        least = max(least, settings.max_model_len or 0)
    if plan.rules.align_within_batch and settings.mamba_cache_mode == "align" and plan.layouts:
        least = max(least, plan.layouts[0].block_tokens)
    return least


def longest_in(plan: Plan) -> int:
    """Tokens of the longest request that has room for certain."""
    if plan.tightest is None or not plan.layouts:
        return 0
    rank = plan.ranks[plan.tightest]
    return largest_context(plan.layouts[rank.pipeline_rank], plan.settings, max(0, rank.left.low))


def serving_peak(sheet: LoadSheet) -> int:
    """Bytes of the highest expected serving peak over all cards; 0 when none was planned."""
    return max((load.peak_bytes["serving"] for load in sheet.gpus), default=0)
