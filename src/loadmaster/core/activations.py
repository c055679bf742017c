"""What passes through a rank besides weights and cache: pictures, a batch of tokens, rows of logits.

Everything is replayed on the allocator in the order of a start: the profile (pictures, language model, sampler),
the warm-up of the sampler, then requests. Sizes come from the model's shapes; the order from
vllm/v1/worker/gpu_model_runner.py (profile_run) and gpu_worker.py (compile_or_warm_up_model).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from msgspec import Struct, structs

from loadmaster.core.allocator import Allocator, Step
from loadmaster.core.calibration import constant
from loadmaster.core.facts import MIB, Settings, TextConfig
from loadmaster.core.pictures import TEXT_AROUND
from loadmaster.core.tower import Tower, encode

_SORT_BELOW = 8  # rows; from this many on a Triton kernel filters top-k and top-p (topk_topp_sampler.py)
_FLOAT32 = 4
_LIMITED_SPLIT = 20 * MIB  # what the engine sets while it profiles, where it limits splitting
_GDN_SCAN_PER_HEAD_WIDTH = 12  # bytes: h, u, w, v_new and A of the chunked scan, for each value head and its width


class Language(Struct, frozen=True, kw_only=True):
    """Widths of the language model on one rank, in elements of the activation type."""

    hidden: int
    split: int
    attention_in: int  # query (with gate), key and value
    attention_core: int
    state_in: int  # projections of a gated delta net, 0 without
    state_core: int
    state_heads: int
    state_width: int
    mlp: int
    shared: int
    experts: int
    experts_per_token: int
    expert_width: int
    vocabulary: int
    element_bytes: int = 2
    known: bool = True


def language_of(text: TextConfig, split: int, element_bytes: int, expert_parallel: bool = False) -> Language:
    """Widths from the configuration; what it leaves out counts as usual proportions and makes ``known`` false."""
    known = None not in (text.hidden_size, text.vocab_size, text.num_attention_heads)
    hidden = text.hidden_size or 4096
    heads = text.num_attention_heads or max(1, hidden // 128)
    head = text.head_dim or text.v_head_dim or max(1, hidden // heads)
    kv = max(text.num_key_value_heads or heads, split)
    core = heads * (text.v_head_dim or head)
    if text.kv_lora_rank is not None:  # latent attention expands keys and values for a prefill
        wide = heads * ((text.qk_nope_head_dim or head) + (text.qk_rope_head_dim or 0))
        entering = 2 * wide + core
    else:
        entering = heads * head * (2 if text.attn_output_gate else 1) + 2 * kv * head
    value_heads = text.linear_num_value_heads or 0
    keys = (text.linear_num_key_heads or 0) * (text.linear_key_head_dim or 0)
    values = value_heads * (text.linear_value_head_dim or 0)
    has_state = "linear_attention" in text.layer_types
    experts = text.num_experts or 0
    dense = text.intermediate_size or 4 * hidden
    if experts and text.first_k_dense_replace is None:
        dense = 0
    width = text.moe_intermediate_size or 0
    return Language(
        hidden=hidden,
        split=split,
        attention_in=entering // split,
        attention_core=core // split,
        state_in=(2 * keys + 2 * values) // split if has_state else 0,
        state_core=values // split if has_state else 0,
        state_heads=value_heads // split if has_state else 0,
        state_width=text.linear_value_head_dim or 0,
        mlp=dense // split,
        shared=(text.shared_expert_intermediate_size or 0) // split,
        experts=experts,
        experts_per_token=text.num_experts_per_tok or 0,
        expert_width=width if expert_parallel else width // split,
        vocabulary=text.vocab_size or 152_064,
        element_bytes=element_bytes,
        known=known,
    )


def expert_workspace(language: Language, tokens: int) -> int:
    """Bytes of the buffer that mixture-of-experts layers share; it stays allocated.

    tokens x experts per token x (max(N, K) + max(2N, K)), N: expert width of the rank, K: hidden size.
    Source: vllm/model_executor/layers/fused_moe/experts/{marlin_moe,triton_moe}.py: workspace_shapes.
    """
    if not language.experts:
        return 0
    n, k = language.expert_width, language.hidden
    return tokens * language.experts_per_token * (max(n, k) + max(2 * n, k)) * language.element_bytes


def matrix_workspace(capability: tuple[int, int] | None, large_card: bool) -> int:
    """cuBLAS's workspace in PyTorch: 32 MiB on compute capability 9.x and 10.x, 8.125 MiB elsewhere.

    A card of unknown capability counts as the former when it is large.

    Source: pytorch aten/src/ATen/cuda/CublasHandlePool.cpp, default of CUBLAS_WORKSPACE_CONFIG.
    """
    if capability[0] in (9, 10) if capability is not None else large_card:
        return 32 * MIB
    return 8320 * 1024


def token_counts(language: Language, sequences: int) -> int:
    """Bytes of the second model runner's counts of seen tokens: 32 bits and one bit for each row and token.

    Source: vllm/v1/worker/gpu/sample/penalties.py: PenaltiesState.
    """
    return sequences * (language.vocabulary * _FLOAT32 + -(-language.vocabulary // 32) * 4)


class Load(Struct, frozen=True, kw_only=True):
    """What one rank runs: the arguments of the replay, hashable so that equal ranks are replayed once."""

    language: Language
    tower: Tower | None
    profile_patches: int  # encoded at once in the profile, 0: none
    serving_patches: int  # encoded at once when the largest pictures arrive, 0: none
    tokens: int  # max_num_batched_tokens
    rows: int  # sequences sampled at once
    matrix_workspace: int
    multiprocessors: int
    samples: bool  # the last pipeline stage does
    second_runner: bool  # the second model runner samples and keeps counts of tokens
    expert_reduction: bool  # expert kernels add up partial sums in 32 bits
    limited_profile: bool  # blocks of 20 MiB and more are not split in the profile
    context: int = 0


class Replay(Struct, frozen=True, kw_only=True):
    """Bytes that the replay found on one rank."""

    profile_peak: int  # live at once in the profile, what the engine measures
    vision_peak: int  # live while the profile's pictures are encoded
    language_peak: int
    sampler_peak: int
    persistent: int  # still live after the profile: workspaces and buffers
    profile_reserved: int  # most that the allocator reserves in the profile
    stranded: int  # reserved for nothing after the profile
    idle: int  # reserved when the server is ready
    idle_free: int  # of that, in no use
    sampler: int  # of that, left by the sampler's warm-up
    vision_growth: int = 0  # reserved on top by the largest picture, after one of half its area
    vision_growth_alone: int = 0  # the same when no smaller picture came before
    vision_growth_ladder: int = 0  # the same after pictures of 1/64, 1/16, 1/4 and 1/2 of its area
    vision_live: int = 0  # live while the largest picture is encoded
    language_growth: int = 0
    language_live: int = 0


def growth_after(load: Load, patches: Sequence[int]) -> int:
    """Bytes that the allocator reserves beyond the idle state for pictures of these sizes, one after the other."""
    if load.tower is None:
        return 0
    ready = _idle(load)[0]
    start = ready.reserved
    for number, count in enumerate(patches):
        steps, output, _ = encode(load.tower, count, f"picture {number} ")
        ready.run(steps)
        ready.release(output)
    return ready.reserved - start


class Served(Struct, frozen=True, kw_only=True):
    """What a rank ran at most: patches of each picture in their order, tokens of a step, rows sampled at once.

    ``beside``: ranks that share out whole pictures, and this one gets none of them; 0: it encodes them.
    """

    patches: tuple[int, ...] = ()
    tokens: int = 1
    rows: int = 1
    log_probabilities: bool = False
    expandable: bool = False
    beside: int = 0


@lru_cache(maxsize=512)
def served_growth(load: Load, served: Served) -> tuple[int, int]:
    """Bytes that the allocator reserves beyond the idle state: for these pictures, and for the text after them.

    With expandable segments pieces join: a picture takes what is alive with it, less what was free when the server
    was ready, unless the largest comes first and finds only scattered pieces.
    """
    ready, found = _idle(load)
    ready = ready.copy()
    patches = served.patches if load.tower is not None else ()
    rows = max(1, min(served.rows, load.rows))
    text = [*_forward(load, max(1, min(served.tokens, load.tokens)), "served ", scan=True)]
    if load.samples:
        sampling = structs.replace(load, rows=rows)
        text += _sample(sampling, "served ", log_probabilities=served.log_probabilities)
    if served.expandable:
        pictures = [_alive(ready, _picture(load, count, served.beside)[0]) for count in patches]
        vision = max(pictures, default=0)
        if pictures and pictures[0] < vision:
            vision = max(pictures[0], vision - found.idle_free)
        return vision, max(0, _alive(ready, text) - found.idle_free - vision)
    start = ready.reserved
    for count in patches:
        steps, output = _picture(load, count, served.beside)
        ready.run(steps)
        ready.release(output)
    vision = ready.reserved - start
    ready.run(text)
    return vision, ready.reserved - start - vision


def _picture(load: Load, patches: int, beside: int) -> tuple[list[Step], str]:
    """Steps of one picture; of a rank beside those that encode: all pixels, and the gathered result.

    Source: vllm/model_executor/models/vision.py: run_dp_sharded_mrope_vision_model.
    """
    assert load.tower is not None
    steps, output, size = encode(load.tower, patches, "served ")
    if beside:
        pixels = patches * load.tower.features * load.tower.element_bytes
        names = ("pixels", "padded", "gathered")
        steps = [(f"served {name}", taken) for name, taken in zip(names, (pixels, size, beside * size))]
        steps += [(output, size), *((f"served {name}", None) for name in names)]
    return steps, output


def _alive(ready: Allocator, steps: Sequence[Step]) -> int:
    """Most bytes alive at once while these steps run, beyond what is alive before."""
    twin = ready.copy()
    twin.reset_peaks()
    twin.run(steps)
    return twin.live_peak - ready.live


@lru_cache(maxsize=512)
def replay(load: Load) -> Replay:
    """Replay profile, warm-up and the heaviest request of one rank."""
    ready, found = _idle(load)
    alone, after_half, after_all, live = _pictures(ready, load)
    ready.reset_peaks()
    start = ready.reserved
    floor = ready.live
    ready.run(_forward(load, min(load.tokens, load.context or load.tokens), "request ", scan=True))
    if load.samples:
        ready.run(_sample(load, "request ", log_probabilities=True))
    return structs.replace(
        found,
        vision_growth=after_half,
        vision_growth_alone=alone,
        vision_growth_ladder=after_all,
        vision_live=live,
        language_growth=max(0, ready.reserved - start),
        language_live=ready.live_peak - floor,
    )


def _idle(load: Load) -> tuple[Allocator, Replay]:
    """The allocator when the server is ready, after profile and warm-up; and what was found on the way."""
    profile = Allocator(_LIMITED_SPLIT if load.limited_profile else None)
    profile.take("matrix workspace", load.matrix_workspace)
    kept = 0
    if load.tower is not None and load.profile_patches:
        steps, _, kept = encode(load.tower, load.profile_patches, "profile ")
        profile.run(steps)
    vision_peak = profile.live_peak if kept else 0
    workspace = expert_workspace(load.language, load.tokens)
    profile.live_peak = profile.live
    if workspace:
        profile.empty_cache()
        profile.take("expert workspace", workspace)
    profile.run(_forward(load, load.tokens, "profile "))
    language_peak, sampler_peak = profile.live_peak, 0
    if load.samples:
        profile.live_peak = profile.live
        profile.run(_sample(load, "profile "))
        sampler_peak = profile.live_peak
    profile.run([("profile output", None), ("profile hidden", None)])
    profile_reserved = profile.reserved_peak
    profile.empty_cache()
    persistent = profile.live
    stranded = profile.reserved - _rounded(persistent)

    ready = profile
    ready.max_split = None
    before = ready.reserved
    if load.samples:
        ready.run(_forward(load, min(load.rows, load.tokens), "warm "))
        ready.run(_sample(load, "warm "))
    ready.run([("warm hidden", None)])
    idle = ready.reserved
    idle_free = idle - ready.live
    return ready, Replay(
        profile_peak=max(vision_peak, language_peak, sampler_peak),
        vision_peak=vision_peak,
        language_peak=language_peak,
        sampler_peak=sampler_peak,
        persistent=persistent,
        profile_reserved=profile_reserved,
        stranded=max(0, stranded),
        idle=idle,
        idle_free=idle_free,
        sampler=max(0, idle - before),
    )


def _pictures(ready: Allocator, load: Load) -> tuple[int, int, int, int]:
    """Growth for the largest picture alone, after one of half its area, after a ladder of sizes; and what is live.

    ``ready`` is left in the second state: a server has seen smaller pictures before the largest.
    """
    if load.tower is None or not load.serving_patches:
        return 0, 0, 0, 0
    start, floor = ready.reserved, ready.live
    alone, ladder = ready.copy(), ready.copy()
    alone.reset_peaks()
    for state, parts in ((alone, ()), (ladder, (64, 16, 4, 2)), (ready, (2,))):
        for part in (*parts, 1):
            patches = max(load.tower.merge, load.serving_patches // part)
            steps, output, _ = encode(load.tower, patches, f"picture {part} ")
            state.run(steps)
            state.release(output)
    return alone.reserved - start, ready.reserved - start, ladder.reserved - start, alone.live_peak - floor


def _rounded(size: int) -> int:
    return -(-size // (2 * MIB)) * 2 * MIB


def _forward(load: Load, tokens: int, p: str, scan: bool = False) -> Iterator[Step]:
    """One layer of each kind with everything that is alive beside it. ``scan``: with the recurrent scan."""
    language = load.language
    e = language.element_bytes
    wide = tokens * language.hidden * e
    yield f"{p}hidden", wide
    yield f"{p}residual", wide
    cores = [(language.attention_in, language.attention_core, 0)]
    if language.state_in:
        work = language.state_heads * language.state_width * _GDN_SCAN_PER_HEAD_WIDTH * tokens if scan else 0
        cores.append((language.state_in, language.state_core, work))
    for entering, core, work in cores:
        yield f"{p}attended", wide
        yield f"{p}entering", tokens * entering * e
        yield f"{p}prepared", tokens * entering * e // 2
        yield f"{p}core", tokens * core * e
        if work:
            yield f"{p}scan", work
            yield f"{p}scan", None
        yield f"{p}gated", tokens * core * e
        yield f"{p}projected", wide
        for name in ("entering", "prepared", "core", "gated", "projected", "attended"):
            yield f"{p}{name}", None
    yield f"{p}normed", wide
    for inner in (language.mlp, language.shared):
        if inner:
            yield f"{p}inner", 2 * tokens * inner * e
            yield f"{p}activated", tokens * inner * e
            yield f"{p}down", wide
            for name in ("inner", "activated", "down"):
                yield f"{p}{name}", None
    if language.experts:
        yield f"{p}router", tokens * language.experts * (e + _FLOAT32)
        if load.expert_reduction:  # marlin_moe.py: moe_wna16_marlin_gemm
            yield f"{p}partial sums", load.multiprocessors * 4 * min(64, max(8, tokens)) * 256 * _FLOAT32
            yield f"{p}partial sums", None
        yield f"{p}combined", wide
        yield f"{p}combined", None
        yield f"{p}router", None
    yield f"{p}normed", None
    yield f"{p}residual", None


def _sample(load: Load, p: str, log_probabilities: bool = False) -> Iterator[Step]:
    """Logits of a step and what the sampler makes of them, with top-k and top-p in use.

    ``log_probabilities``: requests ask for them, which the profile does not do: one more copy of the logits.
    """
    language, rows = load.language, load.rows
    vocabulary = language.vocabulary
    half, full = rows * vocabulary * 2, rows * vocabulary * _FLOAT32
    yield f"{p}picked", rows * language.hidden * language.element_bytes
    if language.split > 1:
        yield f"{p}local logits", half // language.split
        yield f"{p}gathered", half
        yield f"{p}logits", half
        yield f"{p}gathered", None
        yield f"{p}local logits", None
    else:
        yield f"{p}logits", half
    if log_probabilities and not load.second_runner:
        yield f"{p}log probabilities", full
    yield f"{p}float logits", full
    if load.second_runner:
        if p == "profile ":
            yield f"{p}sampling", int(constant("second_runner_sampling").value * rows * vocabulary)
            yield f"{p}sampling", None
        elif p == "warm " and rows >= _SORT_BELOW:  # kept for the life of the process
            yield "filter buffer", min(1 << (rows - 1).bit_length(), load.multiprocessors) * vocabulary * _FLOAT32
        # All else happens in the 32-bit copy itself, log probabilities of the picked tokens as well
        # (vllm/v1/worker/gpu/sample/sampler.py: apply_sampling_params, gumbel_sample).
        for name in ("float logits", "logits", "picked"):
            yield f"{p}{name}", None
        return
    if rows >= _SORT_BELOW:
        if p == "profile ":  # kept for the life of the process
            programs = min(1 << (rows - 1).bit_length(), load.multiprocessors)
            yield "filter buffer", programs * vocabulary * _FLOAT32
    else:
        yield f"{p}sorted", full
        yield f"{p}order", 2 * full
        yield f"{p}sums", 2 * full
        for name in ("sums", "order", "sorted"):
            yield f"{p}{name}", None
    yield f"{p}probabilities", full
    yield f"{p}noise", full
    for name in ("noise", "probabilities", "float logits", "log probabilities", "logits", "picked"):
        yield f"{p}{name}", None


def encoded_at_once(settings: Settings, largest_tokens: int, budget: int) -> int:
    """Tokens of pictures in one step when requests with the largest pictures meet.

    A picture is encoded in the step whose tokens reach it, so only as many meet as begin within one batch.
    """
    begin = -(-settings.max_num_batched_tokens // (largest_tokens + TEXT_AROUND))
    together = settings.max_num_seqs * (1 if settings.image_limit is None else max(1, settings.image_limit))
    return largest_tokens * max(1, min(begin, budget // largest_tokens, together))
