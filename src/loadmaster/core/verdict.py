"""Whether a plan fits, and what stands against it, in numbers.

``fits``: True when the high of every peak is within its card and one request of ``max_model_len`` fits the cache
for certain; False when a low exceeds the card, or the engine refuses to start for certain; else None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from loadmaster.core.cache import cached_bytes, largest_context
from loadmaster.core.checks.catalogue import finding, order
from loadmaster.core.facts import GIB, MIB, Confidence, Evidence, Finding, Fix, GpuLoad, Severity
from loadmaster.core.loaderlimits import split_refused
from loadmaster.core.settings import model_context

if TYPE_CHECKING:
    from loadmaster.core.ranks import RankMemory
    from loadmaster.core.sheet import Plan


_BEFORE_THE_CACHE = ("oom-profile-vision", "oom-profile-language", "oom-sampler-warmup", "oom-cudagraph-profile-pool")
_AFTER_THE_CACHE = ("oom-cudagraph-capture", "oom-runtime")


_PEAKS = ("start", "steady", "serving")


def fits_of(plan: Plan, loads: Sequence[GpuLoad], peaks: Sequence[str] = _PEAKS) -> bool | None:
    """The verdict over all cards; see the module. ``peaks``: those that count."""
    answers = [
        _enough_cards(plan),
        _heads_divide(plan),
        _split_refused(plan) is None,
        None if not loads else _peaks_fit(loads, peaks),
        True if plan.weights_known else None,
        *(_free_memory_fits(rank, plan) for rank in plan.ranks),
        _request_fits(plan),
        _state_blocks_fit(plan),
        _block_fits_batch(plan),
    ]
    if any(answer is False for answer in answers):
        return False
    return None if any(answer is None for answer in answers) else True


def findings_of(plan: Plan, loads: Sequence[GpuLoad]) -> tuple[Finding, ...]:
    """What the plan itself decides, the most severe first, each with its numbers."""
    found: list[Finding] = [*_card_findings(plan)]
    worst: dict[str, Finding] = {}
    for load, rank in zip(loads, plan.ranks, strict=True):
        for item in _memory_findings(plan, rank, load):
            worst.setdefault(item.code, item)
    found += _root_first(plan, [*worst.values(), *_cache_findings(plan)])
    if not _block_fits_batch(plan):
        block, tokens = plan.layouts[0].block_tokens, plan.settings.max_num_batched_tokens
        cause = f"A block of the cache is {block:,} tokens long, a step has room for {tokens:,}."
        fixes = [Fix("a step of one block", argv=("--max-num-batched-tokens", str(block)))]
        found.append(finding("batched-tokens-below-block", cause, fixes=fixes))
    found += _picture_findings(plan)
    if plan.rules.outside or not plan.weights_known:
        found = [_by_assumption(item) for item in found]
    if not plan.weights_known:
        found = [*_unknown_weights(plan), *found]
    return order(found)


# ------------------------------------------------------------------------------------------------ answers


def _enough_cards(plan: Plan) -> bool:
    return _wanted(plan) <= len(plan.gpus)


def _wanted(plan: Plan) -> int:
    settings = plan.settings
    return settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size


def _heads_divide(plan: Plan) -> bool:
    heads = plan.model.text.num_attention_heads
    return heads is None or heads % plan.settings.tensor_parallel_size == 0


def _split_refused(plan: Plan) -> Finding | None:
    return split_refused(plan.model, plan.settings.tensor_parallel_size, plan.settings.pipeline_parallel_size)


def starts_of(plan: Plan, loads: Sequence[GpuLoad]) -> bool | None:
    """Whether the start succeeds, whatever the requests after it take."""
    return fits_of(plan, loads, ("start", "steady"))


def _peaks_fit(loads: Sequence[GpuLoad], peaks: Sequence[str]) -> bool | None:
    answer: bool | None = True
    for load in loads:
        for name in peaks:
            if load.peak_low_bytes[name] > load.total_bytes:
                return False
            if load.peak_high_bytes[name] > load.total_bytes:
                answer = None
    return answer


def _free_memory_fits(rank: RankMemory, plan: Plan) -> bool | None:
    """vLLM refuses to start when less is free than it wants; with a given cache size it does not ask."""
    if plan.settings.kv_cache_memory_bytes is not None:
        return True
    total = rank.gpu.total_bytes - rank.other_processes
    if rank.requested > total - rank.context.low:
        return False
    return True if rank.requested <= total - rank.context.high else None


def _request_fits(plan: Plan) -> bool | None:
    cache, wanted = plan.kv_cache, plan.request_bytes
    if cache is None or cache.available_bytes is None:
        return None
    low, high = (
        cache.available_bytes if side is None else side
        for side in (cache.available_low_bytes, cache.available_high_bytes)
    )
    if plan.layouts and plan.tightest is not None:
        layout = plan.layouts[plan.ranks[plan.tightest].pipeline_rank]
        low, high = (cached_bytes(layout, plan.settings, side) for side in (low, high))
    if high <= 0:
        return False
    if wanted is None:
        return None
    if _length_is_left_to_the_engine(plan) and low > 0:
        return True  # it takes what fits
    if wanted > high:
        return False
    return True if wanted <= low else None


def _length_is_left_to_the_engine(plan: Plan) -> bool:
    given = plan.launch.flags.get("--max-model-len")
    return given == -1 or (isinstance(given, str) and given.strip().lower() in ("auto", "-1"))


def _state_blocks_fit(plan: Plan) -> bool | None:
    """With whole graphs, every sequence of a hybrid model needs a block of its own (from 0.19 said in words)."""
    cache = plan.kv_cache
    hybrid = any(group.kind == "state" for layout in plan.layouts for group in layout.groups)
    if not hybrid or cache is None or cache.blocks is None or not plan.settings.cudagraph_mode.startswith("FULL"):
        return True
    return cache.blocks >= plan.settings.max_num_seqs


def _block_fits_batch(plan: Plan) -> bool:
    """Whether a step has room for a block of state; older versions refuse to start without."""
    if not plan.rules.align_within_batch or plan.settings.mamba_cache_mode != "align" or not plan.layouts:
        return True
    return plan.layouts[0].block_tokens <= plan.settings.max_num_batched_tokens


# ------------------------------------------------------------------------------------------------ findings


def _card_findings(plan: Plan) -> list[Finding]:
    found = []
    settings, cards = plan.settings, len(plan.gpus)
    if not _enough_cards(plan):
        sizes = (
            f"tensor {settings.tensor_parallel_size} x pipeline {settings.pipeline_parallel_size} "
            f"x data {settings.data_parallel_size}"
        )
        found.append(finding("tp-exceeds-gpus", f"{sizes} asks for {_wanted(plan)} cards, there are {cards}."))
    if not _heads_divide(plan):
        heads = plan.model.text.num_attention_heads
        cause = f"{heads} attention heads cannot be divided over {settings.tensor_parallel_size} ranks."
        found.append(finding("heads-vs-tp", cause))
    refused = _split_refused(plan)
    if refused is not None:
        found.append(refused)
    used = [rank.gpu for rank in plan.ranks]
    totals = {gpu.total_bytes for gpu in used}
    if len(totals) > 1:
        spare = sum(gpu.total_bytes - min(totals) for gpu in used)
        cause = (
            f"The cards have {gib(min(totals))} to {gib(max(totals))}: the smallest decides the cache of all, "
            f"{gib(spare)} of the larger ones stay unused."
        )
        found.append(finding("gpus-unequal", cause))
    return found


def _unknown_weights(plan: Plan) -> list[Finding]:
    """Says what stands in for the size of the weights, so that nobody takes the sheet for a plan."""
    assumed = next((rank.weights for rank in plan.ranks if rank.weights), {})
    if assumed:
        low, high = (sum(getattr(one, side) for one in assumed.values()) for side in ("low", "high"))
        notes = dict.fromkeys(one.note for one in assumed.values() if one.note)
        said = f"they are taken as {gib(low)} to {gib(high)} a card ({'; '.join(notes)})"
    else:
        said = "they are left out of every figure"
    cause = f"Neither tensor headers nor a rule say how large all weights of {plan.model.name} are: {said}."
    fix = Fix("The headers of the checkpoint tell: plan the directory, or download it first.")
    return [finding("weights-unknown", cause, fixes=[fix])]


def _by_assumption(item: Finding) -> Finding:
    """What is said of memory stands on weights that are assumed, or on a version that nobody read: at most likely."""
    if item.code in ("tp-exceeds-gpus", "heads-vs-tp", "gpus-unequal") or item.confidence != "certain":
        return item
    return structs.replace(item, confidence="likely")


def _memory_findings(plan: Plan, rank: RankMemory, load: GpuLoad) -> list[Finding]:
    """Why this card does not hold the launch: the first stage of the start that fails, then serving."""
    total, found = load.total_bytes, []
    card = f"GPU {load.index}"
    context = rank.context.bytes + rank.other_processes
    weights = rank.weight_bytes
    if context + weights > total:
        cause = (
            f"{card} has {gib(total)}; weights take {gib(weights)} and the context {gib(context)}: "
            f"{gib(context + weights - total)} too much before anything else."
        )
        least = rank.context.low + rank.other_processes + sum(amount.low for amount in rank.weights.values())
        return [
            finding(
                "oom-weights",
                cause,
                evidence=[_evidence(load, ("context", "weights."))],
                confidence="certain" if least > total else "likely",
            )
        ]
    free = _free_memory_fits(rank, plan)
    if free is not True:
        available = total - context
        cause = (
            f"{card}: vLLM asks for {gib(rank.requested)} ({plan.settings.gpu_memory_utilization:g} x {gib(total)}), "
            f"about {gib(available)} of it will be free."
        )
        share = max(0, int((total - rank.other_processes - rank.context.high) / total * 100)) / 100
        fixes = [Fix("what is free at the start", argv=("--gpu-memory-utilization", f"{share:g}"))] if share else []
        sure = "certain" if free is False else "possible"
        severity = "error" if free is False else "warning"
        found.append(
            finding("free-memory-below-request", cause, fixes=fixes, severity=severity, confidence=sure)  # type: ignore[arg-type]
        )
    room = total - context - weights - rank.slack.bytes - rank.growth.bytes
    if rank.profile.bytes > room:
        code = {"vision": "oom-profile-vision", "language": "oom-profile-language"}.get(
            rank.profile_phase, "oom-sampler-warmup"
        )
        cause = (
            f"{card}: the {rank.profile_phase} part of the memory profile needs {gib(rank.profile.bytes)}, "
            f"{gib(max(0, room))} are left beside the weights."
        )
        found.append(finding(code, cause, confidence="likely"))
    pool = rank.trial_pool + rank.persistent.bytes
    if rank.trial_pool and pool > room:
        cause = (
            f"{card}: the profiler of CUDA graphs allocates a temporary cache of {gib(rank.trial_pool)} "
            f"({_pool_words(plan)}), {gib(max(0, room - rank.persistent.bytes))} are left beside the weights."
        )
        found.append(finding("oom-cudagraph-profile-pool", cause, confidence="likely"))
    return found + _serving_findings(plan, rank, load)


def _root_first(plan: Plan, found: list[Finding]) -> list[Finding]:
    """Without what can only follow from the first cause: a server without a cache captures and serves nothing.

    Where the weights alone pass the budget, the parts of the profile that fail before the cache is asked for are
    evidence of that finding, not findings beside it.
    """
    empty = next((item for item in found if item.code == "no-kv-memory"), None)
    if empty is None:
        return found
    cache = plan.kv_cache
    if cache is not None and (cache.available_high_bytes or 0) <= 0:
        found = [item for item in found if item.code not in _AFTER_THE_CACHE]
    if plan.tightest is None or not _weights_pass_budget(plan.ranks[plan.tightest]):
        return found
    evidence = tuple(Evidence("plan", item.cause) for item in found if item.code in _BEFORE_THE_CACHE)
    rest = [item for item in found if item is not empty and item.code not in _BEFORE_THE_CACHE]
    return [structs.replace(empty, evidence=(*empty.evidence, *evidence)), *rest]


def _weights_pass_budget(rank: RankMemory) -> bool:
    return rank.weight_bytes > rank.requested


def _pool_words(plan: Plan) -> str:
    sizes = plan.settings.cudagraph_capture_sizes
    return f"one block for each of {max(sizes):,} tokens" if sizes else "one block"


def _serving_findings(plan: Plan, rank: RankMemory, load: GpuLoad) -> list[Finding]:
    total, found = load.total_bytes, []
    steady, serving = load.peak_bytes["steady"], load.peak_bytes["serving"]
    if rank.graphs is not None and steady > total >= steady - rank.graphs.bytes:
        cause = (
            f"GPU {load.index}: graphs take {gib(rank.graphs.bytes)} on top of a full budget; "
            f"{gib(steady - total)} are missing when they are captured."
        )
        found.append(finding("oom-cudagraph-capture", cause, confidence="likely"))
    high, low = load.peak_high_bytes["serving"], load.peak_low_bytes["serving"]
    if high <= total:
        return found
    over = serving - total
    picture = _picture_words(plan)
    vision = rank.vision.bytes if rank.vision is not None else 0
    if over > 0:
        what = f"The first {picture} picture" if vision and picture else "The heaviest request"
        cause = (
            f"{what} overshoots GPU {load.index} by {gib(over)}: the serving peak is {gib(serving)} of {gib(total)} "
            f"(between {gib(low)} and {gib(high)})."
        )
        if vision and picture:
            cause += f" It makes the allocator reserve {gib(vision)} on top of {gib(steady)} at rest."
        severity = "error" if low > total else "warning"
    else:
        cause = f"GPU {load.index}: the serving peak is {gib(serving)} of {gib(total)}, but may reach {gib(high)}" + (
            f" with a {picture} picture." if vision and picture else "."
        )
        severity = "warning"
    sure = "certain" if low > total else "likely" if over > 0 else "possible"
    evidence = [_evidence(load, ("kv_cache", "weights.", "activations.", "workspace", "context"))]
    found.append(finding("oom-runtime", cause, evidence=evidence, severity=severity, confidence=sure))  # type: ignore[arg-type]
    return found


def _picture_words(plan: Plan) -> str | None:
    size = plan.images.largest_size if plan.images is not None else None
    return f"{size[0]}x{size[1]}" if size is not None else None


def _cache_findings(plan: Plan) -> list[Finding]:
    cache, tight = plan.kv_cache, plan.tightest
    if cache is None or tight is None or cache.available_bytes is None:
        return []
    rank = plan.ranks[tight]
    settings = plan.settings
    if rank.context.bytes + rank.other_processes + rank.weight_bytes > rank.gpu.total_bytes:
        return []  # oom-weights says it
    if cache.available_bytes <= 0:
        if _weights_pass_budget(rank):
            share = f"{settings.gpu_memory_utilization:g} x {gib(rank.gpu.total_bytes)}"
            start = (
                f"The weights take {gib(rank.weight_bytes)} of a budget of {gib(rank.requested)} ({share}): "
                f"{gib(rank.weight_bytes - rank.requested)} too much before anything else. With the"
            )
        else:
            start = f"The budget of {gib(rank.requested)} is used up: weights {gib(rank.weight_bytes)}, the"
        cause = (
            f"{start} profile's peak {gib(rank.profile.bytes)} (in its {rank.profile_phase} phase), "
            f"libraries {gib(rank.growth.bytes)}, graphs {gib(rank.estimate.bytes)}; "
            f"{gib(-cache.available_bytes)} are missing before the first block."
        )
        return [finding("no-kv-memory", cause)]
    wanted, length = plan.request_bytes, settings.max_model_len
    if wanted is not None and length is not None and _request_fits(plan) is not True:
        return [_request_finding(plan, rank, wanted, length)]
    if not _state_blocks_fit(plan) and cache.blocks is not None:
        cause = (
            f"The cache has {cache.blocks:,} blocks of state, --max-num-seqs is {settings.max_num_seqs}: "
            "each sequence needs one."
        )
        return [
            finding("mamba-blocks", cause, fixes=[Fix("one block each", argv=("--max-num-seqs", str(cache.blocks)))])
        ]
    return []


def _request_finding(plan: Plan, rank: RankMemory, wanted: int, length: int) -> Finding:
    """One request of the whole context that does not, or may not, have room: by the bound that decides."""
    settings, cache = plan.settings, plan.kv_cache
    layout = plan.layouts[rank.pipeline_rank]
    held, low, high = (
        cached_bytes(layout, settings, side) for side in (rank.left.bytes, rank.left.low, rank.left.high)
    )
    blocks = settings.num_gpu_blocks_override
    cause = f"One request of {length:,} tokens needs {gib(wanted)} of cache on each rank; "
    if blocks is not None:
        cause += f"--num-gpu-blocks-override leaves it {gib(held)} ({blocks:,} blocks)."
    elif wanted > held:
        cause += f"{gib(max(0, held))} are planned" + (f", {gib(high)} at most." if high > held else ".")
    else:
        cause += f"{gib(held)} are planned, and it may be as little as {gib(max(0, low))}."
    surely = largest_context(layout, settings, max(0, low))
    longest = min(filter(None, (surely, length, model_context(plan.model))), default=0) if surely else 0
    fixes = []
    if longest:
        cause += f" {longest:,} tokens fit for certain."
        fixes.append(Fix("the longest that fits for certain", argv=("--max-model-len", str(longest))))
    elif wanted > held and cache is not None and cache.largest_model_len:
        cause += f" {min(cache.largest_model_len, length):,} tokens fit by the expected figures."
    severity: Severity = "error" if wanted > held else "warning"
    sure: Confidence = "certain" if _request_fits(plan) is False else "likely" if severity == "error" else "possible"
    return finding("seq-too-long-for-memory", cause, fixes=fixes, severity=severity, confidence=sure)


def _picture_findings(plan: Plan) -> list[Finding]:
    images = plan.images
    if images is None:
        return []
    found = []
    if images.refused:
        largest = _picture_words(plan)
        served = (
            f" The largest that is served is {largest} ({images.largest_tokens:,} tokens)."
            if largest
            else " No picture is served."
        )
        cause = "; ".join(images.refused) + "." + served
        found.append(finding("image-tokens-exceed-context", cause[0].upper() + cause[1:], severity="warning"))
    profiled, real = images.profiled_tokens, images.largest_tokens
    if plan.settings.dummy_image_size is not None and profiled is not None and real is not None and real > profiled:
        cause = (
            f"The profile runs on a picture of {profiled:,} tokens, but pictures of up to {real:,} tokens are served: "
            "--limit-mm-per-prompt with width and height shrinks the dummy only."
        )
        found.append(finding("profile-below-images", cause))
    return found


def _evidence(load: GpuLoad, names: tuple[str, ...]) -> Evidence:
    parts = [
        f"{part.name} {gib(part.bytes)}"
        for part in load.components
        if any(part.name == name or (name.endswith(".") and part.name.startswith(name)) for name in names)
    ]
    return Evidence("plan", f"GPU {load.index}: " + ", ".join(parts))


def gib(size: int) -> str:
    """Bytes for a sentence: two decimals of GiB, MiB below a hundredth."""
    if abs(size) < GIB // 100:
        return f"{size / MIB:.0f} MiB"
    return f"{size / GIB:.2f} GiB"
