"""The memory of one rank: what it holds beside the cache, and what is left for the cache.

The budget is vLLM's own arithmetic (v1/worker/gpu_worker.py: determine_available_memory), by version. The card
holds more than the budget: the context beside it, and what the allocator reserves beyond the profile's peak.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct, structs

from loadmaster.core import graphs
from loadmaster.core.activations import (
    Load,
    Replay,
    encoded_at_once,
    language_of,
    matrix_workspace,
    replay,
    token_counts,
)
from loadmaster.core.architectures import family_of
from loadmaster.core.calibration import constant
from loadmaster.core.enginerules import EngineRules
from loadmaster.core.facts import Amount, CacheLayout, GpuFacts, ImagePlan, ModelFacts, RankWeights, Settings
from loadmaster.core.localcalibration import Learnt, corrected
from loadmaster.core.pictures import PictureRules, profile_of
from loadmaster.core.pipeline import layer_ranges
from loadmaster.core.tower import tower_of

_DEFAULT_MULTIPROCESSORS = 128
_CONSUMER_BELOW = 48 << 30
_DATACENTER = ((7, 0), (8, 0), (9, 0), (10, 0), (10, 3))
_WIDTHS = {"float32": 4}


class RankMemory(Struct, frozen=True, kw_only=True):
    """One rank on one card. Amounts are bytes; ``left`` is what the budget leaves for the cache."""

    gpu: GpuFacts
    pipeline_rank: int
    tensor_rank: int
    data_rank: int
    context: Amount
    other_processes: int
    weights: dict[str, Amount]
    largest_transient: int
    slack: Amount
    growth: Amount
    persistent: Amount
    sampler: Amount | None
    vision: Amount | None
    language: Amount
    graphs: Amount | None
    estimate: Amount
    profile: Amount
    profile_phase: str  # "vision", "language" or "sampler": which decides the profile's peak
    profile_reserved: int
    load: Load
    trial_pool: int
    requested: int
    left: Amount
    left_when_full: int  # for the cache when everything else is at its high
    left_when_light: int
    vision_live: int

    @property
    def weight_bytes(self) -> int:
        return sum(amount.bytes for amount in self.weights.values())


def rank_memory(
    model: ModelFacts,
    settings: Settings,
    rules: EngineRules,
    layout: CacheLayout | None,
    weights: RankWeights,
    gpu: GpuFacts,
    pictures: PictureRules | None,
    images: ImagePlan | None,
    data_rank: int = 0,
) -> RankMemory:
    """All that one rank holds on its card, for these settings."""
    group = settings.tensor_parallel_size * settings.pipeline_parallel_size > 1
    datacenter = is_datacenter(gpu)
    kind = "datacenter" if datacenter else "consumer"
    context = constant(f"context_{graphs.kind_of(group)}_{kind}").amount()
    others = 0 if gpu.free_bytes is None else max(0, gpu.total_bytes - gpu.free_bytes)
    load = _load(model, settings, rules, weights, gpu, pictures, images)
    found = replay(load)
    layers = _layers(model, settings, weights.pipeline_rank)
    taken = graphs.taken(settings, layers, group)
    estimate = graphs.estimated(settings, rules, layers, "linear_attention" in model.text.layer_types, group)
    slack = constant("load_slack").amount()
    if settings.expandable_segments and _packs_weights(model):
        slack = _add(slack, constant("load_slack_expandable").times(layers), slack.note)
    growth = constant(f"growth_{graphs.kind_of(group)}_{kind}").amount()
    if taken is not None and graphs.profiled(settings, rules) and settings.kv_cache_memory_bytes is None:
        growth = _add(growth, constant(f"growth_graph_trial_{graphs.kind_of(group)}").amount(), growth.note)
    if rules.note is not None:
        slack = _add(slack, constant("unknown_rules").amount(), slack.note)
        slack = Amount(slack.bytes, max(0, slack.low), slack.high, slack.basis, slack.note)
    profile, phase = _profile(found, load)
    if rules.outside:
        slack, growth, profile, estimate = (_unread(one) for one in (slack, growth, profile, estimate))
    requested = math.ceil(gpu.total_bytes * settings.gpu_memory_utilization)
    counts = token_counts(load.language, settings.max_num_seqs) if load.second_runner and load.samples else 0
    consumed = Amount(slack.bytes + counts, slack.low + counts, slack.high + counts, slack.basis)
    left, full, light = _left(settings, rules, requested, weights, consumed, growth, profile, estimate)
    if rules.outside and left.low < left.high:
        left = structs.replace(left, basis="assumed")
    buffers = found.persistent + counts
    if taken is not None:
        # Matrix kernels get a workspace for each of the two streams that graphs are captured on.
        buffers += 2 * load.matrix_workspace
    persistent = Amount.exact(buffers, note="workspaces of matrix and expert kernels, sampling buffer")
    sampler = _sampler(found) if load.samples else None
    vision = _vision(found, load, settings.expandable_segments)
    language = _scaled(
        found.language_growth,
        load.language.known,
        "a batch of the longest prompt, and logits with log probabilities",
    )
    if rules.outside:
        persistent, language = _unread(persistent), _unread(language)
        sampler, vision, taken = (None if one is None else _unread(one) for one in (sampler, vision, taken))
    stranded = found.stranded
    if stranded:
        slack = Amount(slack.bytes + stranded, slack.low, slack.high + stranded, slack.basis, slack.note)
    return RankMemory(
        gpu=gpu,
        pipeline_rank=weights.pipeline_rank,
        tensor_rank=weights.tensor_rank,
        data_rank=data_rank,
        context=context,
        other_processes=others,
        weights=weights.components,
        largest_transient=weights.largest_transient,
        slack=slack,
        growth=growth,
        persistent=persistent,
        sampler=sampler,
        vision=vision,
        language=language,
        graphs=taken,
        estimate=estimate,
        profile=profile,
        profile_phase=phase,
        profile_reserved=found.profile_reserved,
        load=load,
        trial_pool=graphs.trial_pool(settings, rules, layout) if layout is not None else 0,
        requested=requested,
        left=left,
        left_when_full=full,
        left_when_light=light,
        vision_live=found.vision_live,
    )


def with_local_calibration(rank: RankMemory, learnt: Mapping[str, Learnt]) -> RankMemory:
    """The rank with what runs on this machine agree on, by component; none of it is part of the engine's budget."""
    if (one := learnt.get("context")) is not None:
        rank = structs.replace(rank, context=corrected(rank.context, one))
    if (one := learnt.get("cuda_graphs")) is not None and rank.graphs is not None:
        rank = structs.replace(rank, graphs=corrected(rank.graphs, one))
    if (one := learnt.get("workspace")) is not None:
        growth = Amount.exact(rank.growth.bytes, "measured", rank.growth.note)
        persistent = Amount.exact(rank.persistent.bytes, note=rank.persistent.note)
        whole = corrected(_add(_add(rank.slack, growth, None), persistent, None), one)
        rest = growth.bytes + persistent.bytes
        slack = Amount(whole.bytes - rest, whole.low - rest, whole.high - rest, whole.basis, whole.note)
        rank = structs.replace(rank, slack=slack, growth=growth, persistent=persistent)
    return rank


def _unread(amount: Amount) -> Amount:
    """The amount with the bounds of an engine version that nobody read."""
    wide = constant("outside_rules")
    low, high = int(amount.low * wide.low), int(amount.high * wide.high)
    return Amount(amount.bytes, low, high, "assumed", amount.note)


def is_datacenter(gpu: GpuFacts) -> bool:
    """Whether the card counts as a data-centre card; one of unknown kind does from 48 GiB on."""
    if gpu.compute_capability is not None:
        return gpu.compute_capability in _DATACENTER
    return gpu.total_bytes >= _CONSUMER_BELOW


def _load(
    model: ModelFacts,
    settings: Settings,
    rules: EngineRules,
    weights: RankWeights,
    gpu: GpuFacts,
    pictures: PictureRules | None,
    images: ImagePlan | None,
) -> Load:
    width = _WIDTHS.get(settings.dtype, 2)
    split = settings.tensor_parallel_size
    language = language_of(model.text, split, width, settings.expert_parallel)
    if not family_of(model.architecture).exact:
        language = structs.replace(language, known=False)
    data_mode = settings.mm_encoder_tp_mode == "data"
    first = weights.pipeline_rank == 0
    tower = None
    if first and model.vision is not None and not settings.language_model_only:
        tower = tower_of(model.vision, split, data_mode, width)
    profiled = serving = 0
    if tower is not None and pictures is not None:
        profile = profile_of(pictures, settings)
        if profile is not None:
            items = profile.items
            if data_mode:  # whole pictures are dealt out to the ranks
                items = items // split + (weights.tensor_rank < items % split)
            unseen = settings.second_model_runner and not rules.second_runner_profiles_pictures
            if not settings.skip_mm_profiling and not unseen:
                profiled = pictures.patches(profile.tokens * items)
        if images is not None and images.largest_tokens:
            budget = profile.budget if profile is not None else images.largest_tokens
            serving = pictures.patches(encoded_at_once(settings, images.largest_tokens, budget))
    return Load(
        language=language,
        tower=tower,
        profile_patches=profiled,
        serving_patches=serving,
        second_runner=settings.second_model_runner,
        expert_reduction=_packs_weights(model) and language.experts > 0,
        tokens=settings.max_num_batched_tokens,
        rows=min(settings.max_num_seqs, settings.max_num_batched_tokens),
        matrix_workspace=matrix_workspace(gpu.compute_capability, gpu.total_bytes >= _CONSUMER_BELOW),
        multiprocessors=gpu.sm_count or _DEFAULT_MULTIPROCESSORS,
        samples=weights.pipeline_rank == settings.pipeline_parallel_size - 1,
        limited_profile=rules.split_limited_while_profiling,
        context=settings.max_model_len or 0,
    )


def _packs_weights(model: ModelFacts) -> bool:
    """Whether weights are packed integers, which are rearranged after loading for the Marlin kernels."""
    bits = model.quantization.bits
    return bits is not None and bits <= 8 and model.quantization.method != "fp8"


def _profile(found: Replay, load: Load) -> tuple[Amount, str]:
    """The peak that the engine measures, and the phase of the profile that it comes from."""
    phases = {"vision": found.vision_peak, "language": found.language_peak, "sampler": found.sampler_peak}
    phase = max(phases, key=lambda name: phases[name])
    known = load.language.known and (phase != "vision" or load.tower is None or load.tower.known)
    amount = _scaled(found.profile_peak, known, f"highest in the profile, while the {phase} runs")
    if load.second_runner and load.samples:
        each = constant("second_runner_sampling")
        logits = load.rows * load.language.vocabulary
        low = max(found.vision_peak, found.language_peak, int(found.sampler_peak - (each.value - each.low) * logits))
        high = int(found.sampler_peak + (each.high - each.value) * logits)
        amount = Amount(amount.bytes, min(amount.low, low), max(amount.high, high), "measured", amount.note)
    return amount, phase


def _scaled(size: int, known: bool, note: str) -> Amount:
    if known:
        # What is alive at once is counted tensor by tensor; temporary buffers of kernels are within these bounds.
        return Amount(size, int(size * 0.95), int(size * 1.08), "computed", note)
    wide = constant("unknown_language")
    return Amount(size, int(size * wide.low), int(size * wide.high), "assumed", note)


def _sampler(found: Replay) -> Amount:
    size = found.sampler
    return Amount(size, int(size * 0.85), int(size * 1.15), "computed", "left reserved by the warm-up of the sampler")


def _vision(found: Replay, load: Load, expandable: bool) -> Amount | None:
    """What the allocator reserves for the largest pictures beyond the idle state.

    Expected: after a picture of half the area, whose segments are too small to be used again. Low: what is alive
    at once, for the allocator gives unused segments back before it fails. High: after pictures of every size,
    each too large for what the ones before it left. With expandable segments pieces join, so what is free when the
    server is ready serves as well: all of it after a series of growing pictures (low), hardly any when the largest
    comes first (high, at most as much as segments of its own take); half of it is expected.
    """
    if load.tower is None or not load.serving_patches:
        return None
    size = found.vision_growth
    low, high = min(size, found.vision_growth_alone, found.vision_live), max(size, found.vision_growth_ladder)
    if expandable:
        low = max(0, found.vision_live - found.idle_free)
        size, high = max(0, found.vision_live - found.idle_free // 2), max(found.vision_live, found.vision_growth_alone)
    note = "reserved for the largest picture beyond what is free in the allocator"
    if load.tower.known:
        return Amount(size, low, high, "computed", note)
    wide = constant("unknown_tower")
    return Amount(size, int(low * wide.low), int(high * wide.high), "assumed", note)


def _left(
    settings: Settings,
    rules: EngineRules,
    requested: int,
    weights: RankWeights,
    consumed: Amount,
    growth: Amount,
    profile: Amount,
    estimate: Amount,
) -> tuple[Amount, int, int]:
    """What the budget leaves for the cache; and the same when all else is at its high, or at its low.

    ``consumed``: what only the driver's count of used memory sees, which not every version looks at.
    """
    if settings.kv_cache_memory_bytes is not None:
        given = settings.kv_cache_memory_bytes
        return Amount.exact(given, note="--kv-cache-memory-bytes"), given, given
    parts = [*weights.components.values(), growth, profile]
    if rules.budget == "consumed":
        parts.append(consumed)
    used, low, high = (sum(getattr(part, side) for part in parts) for side in ("bytes", "low", "high"))
    left = Amount(
        requested - used - estimate.bytes,
        requested - high - estimate.high,
        requested - low - estimate.low,
        "computed",
        "budget less weights, profile and growth",
    )
    full, light = requested - high - estimate.low, requested - low - estimate.high
    if rules.note is not None and rules.budget == "consumed":
        # Versions differ in whether the budget covers the slack: where it does not, the cache is that much larger.
        full += consumed.high
    return left, full, light


def _layers(model: ModelFacts, settings: Settings, pipeline_rank: int) -> int:
    layers = model.text.num_hidden_layers or len(model.text.layer_types) or 32
    ranges = layer_ranges(layers, settings.pipeline_parallel_size, settings.pipeline_layer_partition)
    return len(ranges[pipeline_rank])


def _add(first: Amount, second: Amount, note: str | None) -> Amount:
    basis = "assumed" if "assumed" in (first.basis, second.basis) else first.basis
    return Amount(first.bytes + second.bytes, first.low + second.low, first.high + second.high, basis, note)
