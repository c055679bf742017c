"""The engine's effective settings: what the flags say, else the model, else the version's default."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from loadmaster.core import graphs
from loadmaster.core.enginerules import (
    EngineRules,
    batch_defaults,
    is_prefix_language_model,
    rules_for,
    uses_second_runner,
)
from loadmaster.core.facts import GIB, EngineFacts, GpuFacts, LaunchArgs, ModelFacts, Origin, Setting, Settings
from loadmaster.core.pictures import largest_picture_tokens

_SHORT_DTYPES = {"half": "float16", "float": "float32"}
_MODES = {"0": "NONE", "1": "PIECEWISE", "2": "FULL", "none": "NONE"}
_LEAST_SHARE = 1e-6  # above nothing: the engine refuses 0
_ROPE_WITHOUT_FACTOR = ("su", "longrope", "llama3", "default", "mrope")


class _Origins:
    """Collects where each effective value comes from while the settings are worked out."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self.flags = flags
        self.seen: dict[str, Setting] = {}

    def note(self, name: str, value: Any, origin: Origin, note: str | None = None) -> Any:
        self.seen[name] = Setting(value, origin, note)
        return value

    def number(
        self, name: str, flag: str, default: Any, kind: type = int, least: float = 0, most: float = math.inf
    ) -> Any:
        """A numeric flag; no number, or one outside ``least`` to ``most``, counts as not given and is said."""
        given = self.flags.get(flag)
        if given is None:
            return self.note(name, default, "engine-default")
        try:
            value = kind(given) if isinstance(given, int | float) else kind(float(str(given)))
            usable = not isinstance(given, bool) and math.isfinite(value) and least <= value <= most
        except (ValueError, OverflowError):
            usable = False
        if not usable:
            return self.note(name, default, "engine-default", f"{flag} {given!r} cannot be used")
        return self.note(name, value, "given")

    def text(self, name: str, flag: str, default: str | None) -> str | None:
        given = self.flags.get(flag)
        if given is None or isinstance(given, bool | dict | list):
            return self.note(name, default, "engine-default")  # type: ignore[no-any-return]
        return self.note(name, str(given), "given")  # type: ignore[no-any-return]

    def switch(self, name: str, flag: str, default: bool, origin: Origin = "engine-default") -> bool:
        given = self.flags.get(flag)
        if isinstance(given, str):
            given = given.strip().lower() not in ("false", "0", "no", "none")
        if given is None:
            return bool(self.note(name, default, origin))
        return bool(self.note(name, bool(given), "given"))


def effective_settings(
    launch: LaunchArgs, model: ModelFacts, gpus: Sequence[GpuFacts], engine: EngineFacts
) -> Settings:
    """Settings of ``vllm serve`` for this launch, model, cards and version.

    ``origins`` names for every value whether it was given, comes from the model, is the version's default or
    was derived. Flags with unusable values count as not given; their origin says so. Never raises.
    """
    rules = rules_for(engine)
    flags = launch.flags
    o = _Origins(flags)
    tensor = o.number("tensor_parallel_size", "--tensor-parallel-size", 1, least=1)
    pipeline = o.number("pipeline_parallel_size", "--pipeline-parallel-size", 1, least=1)
    data = o.number("data_parallel_size", "--data-parallel-size", 1, least=1)
    used = list(gpus[: tensor * pipeline * data]) or list(gpus)
    capability = min((g.compute_capability for g in used if g.compute_capability), default=None)
    total = min((g.total_bytes for g in used), default=0)
    name = used[0].name if used else None

    dtype = _dtype(o, model, capability)
    chunked = o.switch("enable_chunked_prefill", "--enable-chunked-prefill", True)
    max_model_len, auto = _max_model_len(o, model)
    hybrid = "linear_attention" in model.text.layer_types
    caching = o.switch("enable_prefix_caching", "--enable-prefix-caching", rules.hybrid_prefix_caching or not hybrid)
    max_pixels, min_pixels = _pixel_limits(o)
    limits = _limits(flags.get("--limit-mm-per-prompt"))
    image_limit, dummy = limits.get("image", (None, None))
    video_limit, _ = limits.get("video", (None, None))
    language_only = o.switch("language_model_only", "--language-model-only", False)
    tokens, seqs = _batch(o, rules, model, total, name, chunked, max_model_len, max_pixels)
    method, speculative = _speculative(o)
    eager = o.switch("enforce_eager", "--enforce-eager", False)
    compilation = _object(flags.get("--compilation-config"))
    mode = _cudagraph_mode(o, rules, compilation, eager)
    blackwell = capability is not None and capability[0] == 10
    sizes = graphs.capture_sizes(
        rules,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        query_len=1 + speculative,
        blackwell=blackwell,
        given=_sizes(flags.get("--cudagraph-capture-sizes", compilation.get("cudagraph_capture_sizes"))),
        largest=_whole(flags.get("--max-cudagraph-capture-size", compilation.get("max_cudagraph_capture_size"))),
        mode=mode,
    )
    o.note("cudagraph_capture_sizes", sizes, "derived")
    kv_dtype, kv_bytes = _kv_dtype(o, model, dtype)
    offload = o.number("cpu_offload_bytes", "--cpu-offload-gb", 0.0, float)
    lora = o.switch("enable_lora", "--enable-lora", False)
    return Settings(
        version=rules.version,
        version_note=rules.note,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        data_parallel_size=data,
        expert_parallel=o.switch("expert_parallel", "--enable-expert-parallel", False),
        max_model_len=max_model_len,
        max_model_len_auto=auto,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        enable_chunked_prefill=chunked,
        gpu_memory_utilization=o.number(
            "gpu_memory_utilization", "--gpu-memory-utilization", rules.gpu_memory_utilization, float, _LEAST_SHARE, 1
        ),
        kv_cache_memory_bytes=o.number("kv_cache_memory_bytes", "--kv-cache-memory-bytes", None),
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        kv_cache_dtype_bytes=kv_bytes,
        block_size=o.number("block_size", "--block-size", None, least=1),
        enable_prefix_caching=caching,
        mamba_cache_mode=_mamba_mode(o, rules, hybrid, caching),
        mamba_ssm_cache_dtype=_state_dtype(o, model),
        enforce_eager=eager,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=sizes,
        quantization=o.text("quantization", "--quantization", model.quantization.method),
        language_model_only=language_only,
        mm_encoder_tp_mode=o.text("mm_encoder_tp_mode", "--mm-encoder-tp-mode", "weights") or "weights",
        skip_mm_profiling=o.switch("skip_mm_profiling", "--skip-mm-profiling", False),
        image_limit=image_limit,
        video_limit=video_limit,
        dummy_image_size=dummy,
        max_pixels=max_pixels,
        min_pixels=min_pixels,
        speculative_method=method,
        num_speculative_tokens=speculative,
        cpu_offload_bytes=int(offload * GIB),
        disable_custom_all_reduce=o.switch("disable_custom_all_reduce", "--disable-custom-all-reduce", False),
        enable_lora=lora,
        max_loras=o.number("max_loras", "--max-loras", 1),
        max_lora_rank=o.number("max_lora_rank", "--max-lora-rank", 16),
        compute_capability=capability,
        decode_context_parallel_size=o.number(
            "decode_context_parallel_size", "--decode-context-parallel-size", 1, least=1
        ),
        disable_hybrid_kv_cache_manager=o.switch(
            "disable_hybrid_kv_cache_manager", "--disable-hybrid-kv-cache-manager", False
        ),
        async_scheduling=None if "--async-scheduling" not in flags else bool(flags["--async-scheduling"]),
        num_gpu_blocks_override=o.number("num_gpu_blocks_override", "--num-gpu-blocks-override", None),
        pipeline_layer_partition=_partition(launch.env.get("VLLM_PP_LAYER_PARTITION")),
        attention_backend=_attention_backend(launch),
        gdn_prefill_backend=o.text("gdn_prefill_backend", "--gdn-prefill-backend", "auto") or "auto",
        video_pruning=float(o.number("video_pruning_rate", "--video-pruning-rate", 0.0, float)) > 0,
        second_model_runner=uses_second_runner(rules, model, launch.env),
        expandable_segments=_expandable(launch.env),
        origins=o.seen,
    )


# ------------------------------------------------------------------------------------------------ context and batch


def model_context(model: ModelFacts) -> int | None:
    """Positions that the model declares, scaled as vLLM scales them; None: config.json does not say.

    A ``factor`` of linear, dynamic or yarn scaling multiplies; yarn starts from the original positions;
    Gemma 3 and llama3 scaling are already counted in; longrope starts with the original positions.
    Source: vllm/config/model.py, _get_and_verify_max_len.
    """
    text = model.text
    positions = text.max_position_embeddings
    if positions is None:
        return None
    scaling = text.rope_scaling or {}
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    original = scaling.get("original_max_position_embeddings")
    if kind == "longrope":
        listed = model.config.get("original_max_position_embeddings", original)
        return int(listed) if isinstance(listed, int) else positions
    if "gemma3" in (text.model_type or model.model_type or "") or kind in _ROPE_WITHOUT_FACTOR:
        return positions
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        return positions
    if kind == "yarn" and isinstance(original, int):
        positions = original
    return int(positions * factor)


def _max_model_len(o: _Origins, model: ModelFacts) -> tuple[int | None, bool]:
    given = o.flags.get("--max-model-len")
    declared = model_context(model)
    auto = given == -1 or (isinstance(given, str) and given.strip().lower() in ("auto", "-1"))
    if given is not None and not auto:
        value = o.number("max_model_len", "--max-model-len", declared, least=1)
        return value, False
    note = "the longest that fits, at most the model's" if auto else None
    if declared is None:
        note = "config.json names no positions"
    o.note("max_model_len", declared, "model", note)
    return declared, auto


def _batch(
    o: _Origins,
    rules: EngineRules,
    model: ModelFacts,
    total_bytes: int,
    card: str | None,
    chunked: bool,
    max_model_len: int | None,
    max_pixels: int | None,
) -> tuple[int, int]:
    """``max_num_batched_tokens`` and ``max_num_seqs``. Source: arg_utils.py, _set_default_max_num_seqs_…"""
    default_tokens, default_seqs = batch_defaults(rules, total_bytes, card)
    if o.flags.get("--performance-mode") == "throughput":
        default_tokens, default_seqs = default_tokens * 2, default_seqs * 2
    seqs = o.number("max_num_seqs", "--max-num-seqs", default_seqs, least=1)
    if o.flags.get("--max-num-batched-tokens") is not None:
        tokens = o.number("max_num_batched_tokens", "--max-num-batched-tokens", default_tokens, least=1)
    else:
        tokens = default_tokens
        if max_model_len is not None:
            if not chunked:
                tokens = max(tokens, max_model_len)
            if is_prefix_language_model(model.model_type):
                tokens = max(tokens, largest_picture_tokens(model, max_pixels) or 0)
            tokens = min(tokens, seqs * max_model_len)
        o.note("max_num_batched_tokens", tokens, "engine-default")
    if o.flags.get("--max-num-seqs") is None and seqs > tokens:
        seqs = o.note("max_num_seqs", tokens, "derived", "not above max_num_batched_tokens")
    return tokens, seqs


# ------------------------------------------------------------------------------------------------ formats


def _dtype(o: _Origins, model: ModelFacts, capability: tuple[int, int] | None) -> str:
    given = o.text("dtype", "--dtype", None)
    if given is not None and given.lower() != "auto":
        given = given.lower()
        return str(o.note("dtype", _SHORT_DTYPES.get(given, given), "given"))
    declared = (model.text.dtype or "bfloat16").removeprefix("torch.")
    if declared in ("float32", "auto"):
        declared = "bfloat16"
    if declared == "bfloat16" and capability is not None and capability < (8, 0):
        return str(o.note("dtype", "float16", "derived", "bfloat16 needs compute capability 8.0"))
    return str(o.note("dtype", declared, "model"))


def _kv_dtype(o: _Origins, model: ModelFacts, dtype: str) -> tuple[str, float]:
    """Type and bytes of one cached number. A ``kv_cache_scheme`` in the checkpoint decides when the flag does not."""
    given = o.text("kv_cache_dtype", "--kv-cache-dtype", None)
    scheme = model.quantization.kv_cache_scheme
    value = (given or "auto").lower()
    if value == "auto" and isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        value = str(o.note("kv_cache_dtype", "fp8", "model", "the checkpoint's kv_cache_scheme"))
    width = 4.0 if dtype == "float32" else 2.0
    if value.startswith(("fp8", "int8")):
        width = 1.0
    elif value in ("bfloat16", "float16", "half"):
        width = 2.0
    elif value.startswith(("nvfp4", "int4", "fp4")):
        width = 0.5
    elif value == "float32":
        width = 4.0
    return value, width


def _mamba_mode(o: _Origins, rules: EngineRules, hybrid: bool, caching: bool) -> str:
    if not hybrid or not caching:
        return str(o.note("mamba_cache_mode", "none", "derived"))
    given = o.text("mamba_cache_mode", "--mamba-cache-mode", None)
    note = "state is kept at block boundaries when prefix caching is on"
    if given in ("align", "all"):
        # Models with gated delta nets do not support "all"; the engine falls back.
        return str(o.note("mamba_cache_mode", "align", "given" if given == "align" else "derived"))
    return str(o.note("mamba_cache_mode", "align", "derived", note))


def _state_dtype(o: _Origins, model: ModelFacts) -> str | None:
    given = o.text("mamba_ssm_cache_dtype", "--mamba-ssm-cache-dtype", None)
    if given is not None and given != "auto":
        return given
    declared = model.text.mamba_ssm_dtype
    if declared is not None:
        o.note("mamba_ssm_cache_dtype", declared, "model")
    return declared


# ------------------------------------------------------------------------------------------------ graphs


def _cudagraph_mode(o: _Origins, rules: EngineRules, compilation: Mapping[str, Any], eager: bool) -> str:
    if eager:
        return str(o.note("cudagraph_mode", "NONE", "derived", "--enforce-eager"))
    given = o.flags.get("--cudagraph-mode", compilation.get("cudagraph_mode"))
    if given is not None:
        text = str(given)
        return str(o.note("cudagraph_mode", _MODES.get(text.lower(), text.upper()), "given"))
    if compilation.get("mode", compilation.get("level")) in (0, "0", "NONE", "none"):
        return str(o.note("cudagraph_mode", "NONE", "derived", "compilation is off"))
    level = _whole(o.flags.get("--optimization-level"))
    if level is None:
        level = rules.optimization_level
    mode = {0: "NONE", 1: "PIECEWISE"}.get(level, "FULL_AND_PIECEWISE")
    return str(o.note("cudagraph_mode", mode, "given" if "--optimization-level" in o.flags else "engine-default"))


def _speculative(o: _Origins) -> tuple[str | None, int]:
    config = _object(o.flags.get("--speculative-config"))
    method = config.get("method") or o.flags.get("--spec-method")
    count = _whole(config.get("num_speculative_tokens", o.flags.get("--spec-tokens")))
    if not config and method is None:
        return None, 0
    name = str(method) if method is not None else "draft_model"
    o.note("speculative_method", name, "given")
    return name, max(0, count if count is not None else 1)


# ------------------------------------------------------------------------------------------------ pictures


def _pixel_limits(o: _Origins) -> tuple[int | None, int | None]:
    kwargs = _object(o.flags.get("--mm-processor-kwargs"))
    size = _object(kwargs.get("size"))
    images = _object(kwargs.get("images_kwargs"))
    largest = _first(kwargs.get("max_pixels"), images.get("max_pixels"), size.get("longest_edge"))
    smallest = _first(kwargs.get("min_pixels"), images.get("min_pixels"), size.get("shortest_edge"))
    if largest is not None:
        o.note("max_pixels", largest, "given")
    if smallest is not None:
        o.note("min_pixels", smallest, "given")
    return largest, smallest


def _limits(value: Any) -> dict[str, tuple[int | None, tuple[int, int] | None]]:
    """``--limit-mm-per-prompt`` in its forms: a number, an object with count and size, or ``image=2,video=0``."""
    if isinstance(value, str) and "=" in value and not value.lstrip().startswith("{"):
        value = dict(part.split("=", 1) for part in value.split(",") if "=" in part)
    limits: dict[str, tuple[int | None, tuple[int, int] | None]] = {}
    for name, given in _object(value).items():
        if isinstance(given, dict):
            width, height = _whole(given.get("width")), _whole(given.get("height"))
            limits[name] = (_whole(given.get("count")), (width, height) if width and height else None)
        else:
            limits[name] = (_whole(given), None)
    return limits


# ------------------------------------------------------------------------------------------------ values as given


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _first(*values: Any) -> int | None:
    return next((number for number in map(_whole, values) if number is not None and number > 0), None)


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, str):
        value = value.replace(",", " ").split()
    elif isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple):
        return None
    numbers = [number for number in map(_whole, value) if number is not None and number > 0]
    return tuple(numbers) or None


def _partition(value: str | None) -> tuple[int, ...] | None:
    if not value:
        return None
    parts = [_whole(part) for part in value.split(",")]
    return tuple(part for part in parts if part is not None) if None not in parts else None


def _expandable(env: Mapping[str, str]) -> bool:
    """Whether the allocator may grow its segments, so that blocks of any size use the same memory."""
    text = env.get("PYTORCH_ALLOC_CONF", env.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable_segments:true" in text.lower().replace(" ", "")


def _attention_backend(launch: LaunchArgs) -> str | None:
    given = launch.flags.get("--attention-backend")
    if given is None:
        given = _object(launch.flags.get("--attention-config")).get("backend")
    if given is None:
        given = launch.env.get("VLLM_ATTENTION_BACKEND")
    return str(given).upper() if given is not None else None
