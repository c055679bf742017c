"""The load sheet: what every card holds, component by component, when a launch starts and serves.

Joins the settings, the weights and the cache layout of each rank with what runs on it. Components without
``headroom`` add up to the serving peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from loadmaster.core.assumedweights import rank_weights
from loadmaster.core.cache import bytes_for_context, cache_capacity, cache_layout, cached_bytes, largest_context
from loadmaster.core.enginerules import EngineRules, rules_for
from loadmaster.core.facts import (
    Amount,
    CacheLayout,
    Component,
    EngineFacts,
    GpuFacts,
    GpuLoad,
    ImagePlan,
    KvCache,
    LaunchArgs,
    LaunchPlan,
    LoadSheet,
    ModelFacts,
    ModelSummary,
    RankWeights,
    Settings,
)
from loadmaster.core.localcalibration import learnt_for, words
from loadmaster.core.pictures import PictureRules, image_plan, picture_rules
from loadmaster.core.ranks import RankMemory, rank_memory, with_local_calibration
from loadmaster.core.settings import effective_settings
from loadmaster.core.verdict import findings_of, fits_of

_MOST_RANKS = 4096
PEAKS = ("start", "steady", "serving")


class Plan(Struct, frozen=True, kw_only=True):
    """All that a plan was made from; the load sheet is drawn from it."""

    model: ModelFacts
    gpus: tuple[GpuFacts, ...]
    launch: LaunchArgs
    engine: EngineFacts
    settings: Settings
    rules: EngineRules
    ranks: tuple[RankMemory, ...]
    layouts: tuple[CacheLayout, ...]
    kv_cache: KvCache | None
    tightest: int | None  # index of the rank whose cache is smallest
    images: ImagePlan | None
    request_bytes: int | None  # of cache for one request of max_model_len, on the rank that decides
    notes: tuple[str, ...]
    weights_known: bool = True  # False: the size of the weights is assumed, or not even that


def plan_of(model: ModelFacts, gpus: Sequence[GpuFacts], launch: LaunchArgs, engine: EngineFacts) -> Plan:
    """Plan a launch. What is unknown is said in ``notes``; never raises for what a model or a command can contain."""
    rules = rules_for(engine)
    settings = effective_settings(launch, model, gpus, engine)
    notes = [*model.notes, *([] if rules.note is None else [rules.note])]
    try:
        if settings.tensor_parallel_size * settings.pipeline_parallel_size > _MOST_RANKS:
            raise ValueError(f"more than {_MOST_RANKS:,} ranks are asked for")
        weights = rank_weights(model, settings)
    except ValueError as problem:
        weights = ()
        notes.append(f"the weights cannot be spread over the cards: {problem}")
    layouts = _layouts(model, settings, notes) if weights else ()
    notes += [note for rank in weights for note in rank.notes] + [note for layout in layouts for note in layout.notes]
    pictures = picture_rules(model, settings.max_pixels, settings.min_pixels, settings.max_model_len)
    _say_unknowns(model, settings, pictures, notes)
    plan = _place(model, tuple(gpus), launch, engine, settings, rules, weights, layouts, pictures, tuple(notes))
    if settings.max_model_len_auto and plan.kv_cache is not None and plan.kv_cache.largest_model_len:
        fitted = min(settings.max_model_len or plan.kv_cache.largest_model_len, plan.kv_cache.largest_model_len)
        if fitted != settings.max_model_len:
            settings = structs.replace(settings, max_model_len=fitted, max_model_len_auto=False)
            told = (*plan.notes, f"--max-model-len auto: {fitted:,} tokens fit")
            plan = _place(model, tuple(gpus), launch, engine, settings, rules, weights, layouts, pictures, told)
    return plan


def _place(
    model: ModelFacts,
    gpus: tuple[GpuFacts, ...],
    launch: LaunchArgs,
    engine: EngineFacts,
    settings: Settings,
    rules: EngineRules,
    weights: Sequence[RankWeights],
    layouts: tuple[CacheLayout, ...],
    pictures: PictureRules | None,
    notes: tuple[str, ...],
) -> Plan:
    images = image_plan(pictures, settings) if pictures is not None else None
    ranks: list[RankMemory] = []
    said: list[str] = []
    replicas = settings.data_parallel_size
    for data_rank in range(min(replicas, len(gpus))):
        for rank in weights:
            index = len(ranks)
            if index >= len(gpus):
                break
            layout = layouts[rank.pipeline_rank] if layouts else None
            memory = rank_memory(model, settings, rules, layout, rank, gpus[index], pictures, images, data_rank)
            learnt = learnt_for(gpus[index], len(gpus), engine, model.architecture)
            ranks.append(memory if not learnt else with_local_calibration(memory, learnt))
            said += [f"{name} of {gpus[index].name}: {words(one)}" for name, one in learnt.items()]
    told = [*notes, *(f"local calibration, {text}" for text in said)]
    unused = len(gpus) - settings.tensor_parallel_size * settings.pipeline_parallel_size * replicas
    if unused > 0:
        told.append(f"{unused} of {len(gpus)} cards {'is' if unused == 1 else 'are'} not used by this launch")
    cache, tightest, request = cache_of(settings, layouts, ranks)
    if images is not None and ranks:
        images = structs.replace(images, peak_bytes=max(rank.vision_live for rank in ranks) or None)
    return Plan(
        model=model,
        gpus=gpus,
        launch=launch,
        engine=engine,
        settings=settings,
        rules=rules,
        ranks=tuple(ranks),
        layouts=layouts,
        kv_cache=cache,
        tightest=tightest,
        images=images,
        request_bytes=request,
        notes=tuple(dict.fromkeys(told)),
        weights_known=all(rank.known for rank in weights),
    )


def _layouts(model: ModelFacts, settings: Settings, notes: list[str]) -> tuple[CacheLayout, ...]:
    try:
        return tuple(cache_layout(model, settings, stage) for stage in range(settings.pipeline_parallel_size))
    except ValueError as problem:
        notes.append(f"the cache is unknown: {problem}")
        return ()


def cache_of(
    settings: Settings, layouts: tuple[CacheLayout, ...], ranks: Sequence[RankMemory]
) -> tuple[KvCache | None, int | None, int | None]:
    """The cache of the rank that has room for the fewest blocks: all ranks take its number."""
    if not ranks:
        return None, None, None
    if not layouts:
        tight = min(range(len(ranks)), key=lambda index: ranks[index].left.bytes)
        left = ranks[tight].left
        unknown = KvCache(
            available_bytes=left.bytes,
            block_tokens=None,
            blocks=None,
            tokens=None,
            max_concurrency=None,
            bytes_per_request_at_max_len=None,
            available_low_bytes=left.low,
            available_high_bytes=left.high,
            max_model_len=settings.max_model_len,
        )
        return unknown, tight, None

    def blocks(index: int) -> tuple[int, int]:
        rank = ranks[index]
        pool = layouts[rank.pipeline_rank].pool_block_bytes
        return (rank.left.bytes // pool if pool else 1 << 60), rank.left.bytes

    tight = min(range(len(ranks)), key=blocks)
    rank = ranks[tight]
    layout = layouts[rank.pipeline_rank]
    available = max(0, rank.left.bytes)
    capacity = cache_capacity(layout, settings, available)
    request = None
    if settings.max_model_len is not None:
        request = bytes_for_context(layout, settings, settings.max_model_len)
    return (
        structs.replace(
            capacity,
            available_bytes=rank.left.bytes,
            available_low_bytes=rank.left.low,
            available_high_bytes=rank.left.high,
            max_model_len=settings.max_model_len,
            largest_model_len=largest_context(layout, settings, cached_bytes(layout, settings, available)),
        ),
        tight,
        request,
    )


def _say_unknowns(model: ModelFacts, settings: Settings, pictures: PictureRules | None, notes: list[str]) -> None:
    if settings.max_model_len is None:
        notes.append("the context is unknown: config.json names no positions and --max-model-len is not given")
    if model.text.vocab_size is None:
        notes.append("the vocabulary's size is unknown: 152,064 is assumed for the logits")
    if model.vision is not None and pictures is None and not settings.language_model_only:
        notes.append("the size of pictures is unknown: no rule for this vision tower, its activations are left out")
    elif pictures is not None and pictures.largest_tokens is None:
        notes.append("the processor names no largest picture, so only the context bounds one")
    if settings.enable_lora:
        notes.append("the memory of LoRA adapters is not counted")
    if settings.speculative_method is not None and not settings.speculative_method.endswith(("mtp", "ngram")):
        notes.append(f"the draft model of --speculative-config ({settings.speculative_method}) is not counted")


# ------------------------------------------------------------------------------------------------ the sheet


def _format_words(model: ModelFacts, settings: Settings) -> str | None:
    """How the weights are stored; None when neither files nor a configuration say."""
    said = model.quantization.label or model.quantization.method
    if said is not None or not (model.tensors or model.config):
        return said
    own = model.text.dtype
    if settings.quantization is not None:
        return f"{settings.quantization}, quantised while loading"
    return f"{own}, not quantised" if own is not None else "not quantised"


def load_sheet(plan: Plan) -> LoadSheet:
    """Draw the load sheet of a plan: cards, cache, verdict and findings."""
    loads = tuple(card_load(plan, rank) for rank in plan.ranks)
    model = plan.model
    sheet = LoadSheet(
        fits=None,
        engine=plan.engine,
        model=ModelSummary(
            architecture=model.architecture,
            quantization=_format_words(model, plan.settings),
            parameters=model.parameters,
            name=model.name,
            weight_bytes=model.weight_bytes,
        ),
        gpus=loads,
        kv_cache=plan.kv_cache,
        launch=LaunchPlan(argv=plan.launch.argv, env=plan.launch.env),
        images=plan.images,
        settings=plan.settings,
        notes=plan.notes,
    )
    fits = fits_of(plan, loads)
    return structs.replace(sheet, fits=fits, findings=findings_of(plan, loads))


def cache_amount(plan: Plan, rank: RankMemory) -> tuple[Amount, int, int]:
    """Bytes that the cache takes on a rank, and the same when everything else is at its high, or its low."""
    note = "blocks of the rank that has fewest"
    if not plan.layouts:
        left, full, light = (max(0, value) for value in (rank.left.bytes, rank.left_when_full, rank.left_when_light))
        return Amount(left, max(0, rank.left.low), max(0, rank.left.high), rank.left.basis, note), full, light
    pool = plan.layouts[rank.pipeline_rank].pool_block_bytes
    override = plan.settings.num_gpu_blocks_override
    if override is not None:
        size = override * pool
        return Amount.exact(size, note="--num-gpu-blocks-override"), size, size

    def fewest(side: str) -> int:
        counts = []
        for other in plan.ranks:
            block = plan.layouts[other.pipeline_rank].pool_block_bytes
            value: Any = getattr(other.left, side) if side in ("bytes", "low", "high") else getattr(other, side)
            if block:
                counts.append(max(0, value) // block)
        return min(counts, default=0) * pool

    amount = Amount(fewest("bytes"), fewest("low"), fewest("high"), rank.left.basis, note)
    return amount, fewest("left_when_full"), fewest("left_when_light")


def card_load(plan: Plan, rank: RankMemory) -> GpuLoad:
    """Components and peaks of one card."""
    cache, when_full, when_light = cache_amount(plan, rank)
    context = rank.context
    if rank.other_processes:
        others = rank.other_processes
        context = Amount(
            context.bytes + others, context.low + others, context.high + others, context.basis, "with other processes"
        )
    workspace = _total([rank.persistent, rank.growth, rank.slack], "buffers, libraries, and segments that stay open")
    held: list[tuple[str, Amount]] = [("context", context), *sorted(rank.weights.items()), ("workspace", workspace)]
    if rank.sampler is not None:
        held.append(("sampler", rank.sampler))
    if rank.graphs is not None:
        held.append(("cuda_graphs", rank.graphs))
    passing = [("activations.language", rank.language)]
    if rank.vision is not None:
        passing.insert(0, ("activations.vision", rank.vision))
    steady = [amount for _, amount in held]
    serving = [*steady, *(amount for _, amount in passing)]
    peaks = {
        "steady": _with_cache(steady, cache.bytes, when_full, when_light),
        "serving": _with_cache(serving, cache.bytes, when_full, when_light),
    }
    peaks["start"] = _start(plan, rank, context, peaks["steady"])
    total = rank.gpu.total_bytes
    lines = [_component(name, amount) for name, amount in (*held, *passing) if amount.high > 0]
    lines.append(_component("kv_cache", cache))
    room, low, high = (total - peaks["serving"][side] for side in (0, 2, 1))
    lines.append(Component("headroom", room, low, high, "computed", "of the card, at the serving peak"))
    return GpuLoad(
        index=rank.gpu.index,
        name=rank.gpu.name,
        total_bytes=total,
        driver_total_bytes=rank.gpu.driver_total_bytes,
        free_bytes=rank.gpu.free_bytes,
        budget_bytes=rank.requested,
        tensor_rank=rank.tensor_rank,
        pipeline_rank=rank.pipeline_rank,
        data_rank=rank.data_rank,
        components=tuple(lines),
        peak_bytes={name: peaks[name][0] for name in PEAKS},
        peak_low_bytes={name: peaks[name][1] for name in PEAKS},
        peak_high_bytes={name: peaks[name][2] for name in PEAKS},
    )


def _start(plan: Plan, rank: RankMemory, context: Amount, steady: tuple[int, int, int]) -> tuple[int, int, int]:
    """Highest of loading, profiling, capturing on trial, and being ready."""
    weights = list(rank.weights.values())
    loading = [context, *weights, Amount.exact(rank.largest_transient), rank.slack]
    profile = Amount(rank.profile.bytes, rank.profile.low, rank.profile.high, rank.profile.basis)
    beyond = max(0, rank.profile_reserved - rank.profile.bytes)
    profiling = [context, *weights, rank.slack, rank.growth, profile, Amount(beyond, 0, beyond, "computed")]
    stages = [_sums(loading), _sums(profiling), steady]
    if rank.trial_pool:
        trial = [
            context,
            *weights,
            rank.slack,
            rank.growth,
            rank.persistent,
            Amount.exact(rank.trial_pool),
            rank.estimate,
        ]
        stages.append(_sums(trial))
    expected, low, high = (max(stage[side] for stage in stages) for side in range(3))
    return expected, low, high


def _sums(amounts: Sequence[Amount]) -> tuple[int, int, int]:
    return (
        sum(amount.bytes for amount in amounts),
        sum(amount.low for amount in amounts),
        sum(amount.high for amount in amounts),
    )


def _with_cache(amounts: Sequence[Amount], cache: int, when_full: int, when_light: int) -> tuple[int, int, int]:
    """Sums with the cache: what weighs more in the profile leaves less cache, so bounds move together."""
    expected, low, high = _sums(amounts)
    values = (expected + cache, low + when_light, high + when_full)
    return values[0], min(values), max(values)


def _total(amounts: Sequence[Amount], note: str) -> Amount:
    expected, low, high = _sums(amounts)
    basis = "assumed" if any(amount.basis == "assumed" for amount in amounts) else "measured"
    return Amount(expected, low, high, basis, note)  # type: ignore[arg-type]


def _component(name: str, amount: Amount) -> Component:
    return Component(name, amount.bytes, amount.low, amount.high, amount.basis, amount.note)
