"""A GGUF file's metadata as the configuration types, and its tensors as groups and parts.

Metadata is a mapping from key to scalar, or to a tuple for an array that was kept; keys of an architecture
start with its name ("qwen3.block_count"). Source of the keys: docs/gguf.md of ggml and gguf-py/gguf/constants.py of
llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

from loadmaster.core.facts import (
    ClassQuantization,
    Part,
    Processor,
    Quantization,
    TensorGroup,
    TextConfig,
    VisionConfig,
)
from loadmaster.core.tables import load_toml

Metadata = Mapping[str, Any]

_LAYER = re.compile(r"\b((?:dec\.|enc\.|v\.|a\.)?blk)\.(\d+)\.")
_EXPERT = re.compile(r"\b(ffn_(?:gate|up|down))\.(\d+)\.")
_LIMIT = 1 << 31  # no dimension, count or length of a real model is larger

ROPE_NAMES = {"yarn": "yarn", "linear": "linear", "longrope": "longrope", "none": None}


@cache
def ggml_types() -> dict[int, dict[str, Any]]:
    """Number format by its id in the file: name, weights per block, bytes per block."""
    return {entry["id"]: entry for entry in load_toml("ggml-types.toml")["type"]}


@cache
def ggml_types_by_name() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in load_toml("ggml-types.toml")["type"]}


@cache
def _parts() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((entry["name"], re.compile(entry["pattern"])) for entry in load_toml("gguf-names.toml")["part"])


def template(name: str) -> tuple[str, int | None]:
    """Tensor name with its numbers replaced by ``{l}`` and ``{e}``, and the layer number."""
    match = _LAYER.search(name)
    layer = None
    if match is not None:
        layer = int(match.group(2))
        name = f"{name[: match.start()]}{match.group(1)}.{{l}}.{name[match.end() :]}"
    return _EXPERT.sub(r"\1.{e}.", name), layer


@lru_cache(maxsize=4096)
def part_of(name: str) -> str:
    """Part that a tensor of this template belongs to ("language.experts", "vision", ...)."""
    for part, pattern in _parts():
        if pattern.match(name):
            return part
    return "language.other"


def classified(groups: Iterable[TensorGroup]) -> list[tuple[str, TensorGroup]]:
    """Every group with its part. One fused matrix serves both kinds of attention under one name, so it
    belongs to the linear kind when the model has both."""
    known = list(groups)
    hybrid = any(".ssm_" in group.name for group in known)
    found = []
    for group in known:
        part = part_of(group.name)
        if hybrid and part == "language.attention" and ".attn_qkv." in group.name:
            part = "language.linear_attention"
        found.append((part, group))
    return found


def is_projector_part(part: str) -> bool:
    """Whether llama.cpp loads this part from the projector file and not from the model."""
    return part in ("vision", "projector", "audio")


# ------------------------------------------------------------------------------------------ values


def _number(metadata: Metadata, key: str) -> int | None:
    """A count or length. Of an array with one value per layer, the largest; nonsense is unknown."""
    value = metadata.get(key)
    if isinstance(value, tuple):
        numbers = [item for item in value if isinstance(item, int) and not isinstance(item, bool)]
        value = max(numbers) if numbers else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _LIMIT else None


def _real(metadata: Metadata, key: str) -> float | None:
    value = metadata.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def per_layer(metadata: Metadata, key: str, layers: int) -> tuple[int, ...] | None:
    """One number per layer, from an array or a scalar; None when the key is missing or too short."""
    value = metadata.get(key)
    if isinstance(value, tuple):
        if len(value) < layers or not all(isinstance(item, int) and 0 <= item < _LIMIT for item in value[:layers]):
            return None
        return tuple(int(item) for item in value[:layers])
    number = _number(metadata, key)
    return None if number is None else (number,) * layers


def layer_types(metadata: Metadata, architecture: str, layers: int) -> tuple[str, ...]:
    """What each layer attends with: "full_attention", "sliding_attention" or "linear_attention"."""
    table = load_toml("llamacpp.toml")
    interval = _number(metadata, f"{architecture}.full_attention_interval")
    if interval is None and architecture in table["recurrent"]["architectures"]:
        interval = table["recurrent"]["full_attention_interval"]
    if interval is not None and interval > 0:
        return tuple("full_attention" if (at + 1) % interval == 0 else "linear_attention" for at in range(layers))
    if _number(metadata, f"{architecture}.attention.sliding_window"):
        pattern = metadata.get(f"{architecture}.attention.sliding_window_pattern")
        if isinstance(pattern, tuple) and pattern:
            # shorter than the model: it repeats
            slides = [bool(pattern[at % len(pattern)]) for at in range(layers)]
            return tuple("sliding_attention" if slide else "full_attention" for slide in slides)
        period = table["sliding"]["period"].get(architecture)
        if isinstance(pattern, int) and not isinstance(pattern, bool):
            period = pattern
        if period is not None and 0 <= period < _LIMIT:
            return tuple(
                "sliding_attention" if period == 0 or at % period < period - 1 else "full_attention"
                for at in range(layers)
            )
    return ("full_attention",) * layers


def text_config(metadata: Metadata, *, vocab_size: int | None, tied: bool | None) -> TextConfig:
    """The language model's configuration. ``vocab_size`` is the length of the token list."""
    a = architecture(metadata)
    if a is None:
        return TextConfig(vocab_size=vocab_size)

    def number(key: str) -> int | None:
        return _number(metadata, f"{a}.{key}")

    blocks, extra = number("block_count"), number("nextn_predict_layers")
    layers = blocks - (extra or 0) if blocks is not None and blocks >= (extra or 0) else blocks
    heads, width = number("attention.head_count"), number("embedding_length")
    head_size = number("attention.key_length")
    if head_size is None and heads and width:
        head_size = width // heads
    value_size = number("attention.value_length")
    rope = number("rope.dimension_count")
    mla_key, mla_value = number("attention.key_length_mla"), number("attention.value_length_mla")
    rank = number("attention.kv_lora_rank")
    state, inner, groups = number("ssm.state_size"), number("ssm.inner_size"), number("ssm.group_count")
    value_heads = number("ssm.time_step_rank")
    types = layer_types(metadata, a, layers) if layers is not None and layers <= 4096 else ()
    hybrid = "linear_attention" in types
    scaling = metadata.get(f"{a}.rope.scaling.type")
    rope_scaling: dict[str, Any] | None = None
    if isinstance(scaling, str) and ROPE_NAMES.get(scaling, scaling):
        rope_scaling = {"rope_type": ROPE_NAMES.get(scaling, scaling)}
        if (factor := _real(metadata, f"{a}.rope.scaling.factor")) is not None:
            rope_scaling["factor"] = factor
        if (original := number("rope.scaling.original_context_length")) is not None:
            rope_scaling["original_max_position_embeddings"] = original
    return TextConfig(
        model_type=a,
        vocab_size=vocab_size if vocab_size is not None else number("vocab_size"),
        hidden_size=width,
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=number("attention.head_count_kv")
        if number("attention.head_count_kv") is not None
        else heads,
        head_dim=mla_key if mla_key is not None else head_size,
        max_position_embeddings=number("context_length"),
        tie_word_embeddings=tied,
        attn_output_gate=hybrid,
        layer_types=types,
        sliding_window=number("attention.sliding_window") or None,
        rope_theta=_real(metadata, f"{a}.rope.freq_base"),
        rope_scaling=rope_scaling,
        rotary_dim=rope,
        uses_mrope=isinstance(metadata.get(f"{a}.rope.dimension_sections"), tuple),
        num_experts=number("expert_count") or None,
        num_experts_per_tok=number("expert_used_count"),
        moe_intermediate_size=number("expert_feed_forward_length"),
        shared_expert_intermediate_size=number("expert_shared_feed_forward_length"),
        first_k_dense_replace=number("leading_dense_block_count"),
        linear_num_key_heads=groups if hybrid else None,
        linear_num_value_heads=value_heads if hybrid else None,
        linear_key_head_dim=state if hybrid else None,
        linear_value_head_dim=inner // value_heads if hybrid and inner and value_heads else None,
        linear_conv_kernel_dim=number("ssm.conv_kernel") if hybrid else None,
        kv_lora_rank=rank,
        q_lora_rank=number("attention.q_lora_rank"),
        qk_rope_head_dim=rope if rank is not None else None,
        qk_nope_head_dim=mla_key - rope if mla_key is not None and rope is not None and mla_key >= rope else None,
        v_head_dim=mla_value if mla_value is not None else (value_size if value_size != head_size else None),
        num_mtp_layers=extra,
    )


def architecture(metadata: Metadata) -> str | None:
    value = metadata.get("general.architecture")
    return value if isinstance(value, str) and value else None


# ------------------------------------------------------------------------------------------ projector


def projector_type(metadata: Metadata) -> str | None:
    for key in ("clip.projector_type", "clip.vision.projector_type"):
        value = metadata.get(key)
        if isinstance(value, str) and value:
            return value
    return None


def vision_config(metadata: Metadata) -> VisionConfig | None:
    """The tower's configuration; None for a projector without one (audio only)."""
    if metadata.get("clip.has_vision_encoder") is False:
        return None

    def number(key: str) -> int | None:
        return _number(metadata, f"clip.vision.{key}")

    kind = projector_type(metadata)
    rules = _projector_rules(kind)
    merge = number("spatial_merge_size")
    if merge is None:
        merge = number("projector.scale_factor")
    if merge is None:
        merge = rules.get("merge")
    size, patch = number("image_size"), number("patch_size")
    deepstack = metadata.get("clip.vision.is_deepstack_layers")
    windows = metadata.get("clip.vision.wa_layer_indexes")
    fixed = bool(rules.get("fixed"))
    tokens = (size // patch // merge) ** 2 if fixed and size and patch and merge else None
    return VisionConfig(
        model_type=kind,
        depth=number("block_count"),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_heads=number("attention.head_count"),
        in_channels=3,
        patch_size=patch,
        spatial_merge_size=merge,
        out_hidden_size=number("projection_dim"),
        num_position_embeddings=(size // patch) ** 2 if size and patch else None,
        deepstack_layers=tuple(at for at, flag in enumerate(deepstack) if flag) if isinstance(deepstack, tuple) else (),
        window_size=number("window_size"),
        fullatt_block_indexes=tuple(int(at) for at in windows if isinstance(at, int))
        if isinstance(windows, tuple)
        else (),
        image_size=size if fixed else None,
        tokens_per_image=tokens,
    )


def _projector_rules(kind: str | None) -> dict[str, Any]:
    rules: dict[str, Any] = load_toml("llamacpp.toml")["projector"].get(kind or "", {})
    return rules


def processor(metadata: Metadata, vision: VisionConfig | None) -> Processor | None:
    """Pixel limits of the images: from the projector's keys, else llama.cpp's rule for its type."""
    if vision is None:
        return None
    low, high = _number(metadata, "clip.vision.image_min_pixels"), _number(metadata, "clip.vision.image_max_pixels")
    source = "projector" if high is not None else None
    rules = _projector_rules(vision.model_type)
    if vision.image_size is not None:
        low = high = vision.image_size**2
        source = "projector"
    elif vision.patch_size and vision.spatial_merge_size:
        token = (vision.patch_size * vision.spatial_merge_size) ** 2
        if low is None and "min_tokens" in rules:
            low = rules["min_tokens"] * token
        if high is None and "max_tokens" in rules:
            high, source = rules["max_tokens"] * token, "class default"
    return Processor(image_processor_type=vision.model_type, min_pixels=low, max_pixels=high, source=source)


# ------------------------------------------------------------------------------------------ tensors


def group_tensors(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[TensorGroup, ...]:
    """Group tensors given as (name, dtype, shape, bytes); shape has the rows first, as in a checkpoint."""
    counts: dict[tuple[str, str, tuple[int, ...], int], dict[int | None, int]] = {}
    for name, dtype, shape, size in tensors:
        pattern, layer = template(name)
        layers = counts.setdefault((pattern, dtype, shape, size), {})
        layers[layer] = layers.get(layer, 0) + 1
    groups = []
    for (pattern, dtype, shape, size), layers in counts.items():
        numbered = {layer: count for layer, count in layers.items() if layer is not None}
        groups.append(
            TensorGroup(
                name=pattern, dtype=dtype, shape=shape, nbytes=size, count=sum(layers.values()), layers=numbered or None
            )
        )
    return tuple(groups)


def elements(group: TensorGroup) -> int:
    """Weights in all tensors of a group."""
    count = group.count
    for length in group.shape:
        count *= length
    return count


def parts(groups: Iterable[TensorGroup]) -> tuple[Part, ...]:
    """Parameters, bytes and tensors per part, in the order of their first tensor."""
    sums: dict[str, list[int]] = {}
    for part, group in classified(groups):
        line = sums.setdefault(part, [0, 0, 0])
        line[0] += elements(group)
        line[1] += group.total_bytes
        line[2] += group.count
    return tuple(Part(name=name, parameters=p, bytes=b, tensors=t) for name, (p, b, t) in sums.items())


def quantization(metadata: Metadata, groups: Iterable[TensorGroup]) -> Quantization:
    """What ``general.file_type`` declares; without it, the format that holds most bytes."""
    kind = _number(metadata, "general.file_type")
    name = load_toml("ggml-types.toml")["file_types"].get(str(kind)) if kind is not None else None
    if name is None:
        sizes: dict[str, int] = {}
        for part, group in classified(groups):
            if not is_projector_part(part):
                sizes[group.dtype] = sizes.get(group.dtype, 0) + group.total_bytes
        name = max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None
    return Quantization(
        method="gguf",
        format=name,
        declared={"general.file_type": kind} if kind is not None else None,
        label=f"GGUF {name}" if name is not None else "GGUF",
    )


def quantization_by_class(groups: Iterable[TensorGroup]) -> tuple[ClassQuantization, ...]:
    """Number formats per part, the largest first within a part. Vectors (norms, biases) are left out."""
    sums: dict[tuple[str, str], list[int]] = {}
    for part, group in classified(groups):
        if len(group.shape) < 2:
            continue
        line = sums.setdefault((part, group.dtype), [0, 0, 0])
        line[0] += group.count
        line[1] += group.total_bytes
        line[2] += elements(group)
    ordered = sorted(sums.items(), key=lambda item: (item[0][0], -item[1][1]))
    return tuple(
        ClassQuantization(module_class=part, scheme=dtype, tensors=count, bytes=size, parameters=weights)
        for (part, dtype), (count, size, weights) in ordered
    )
