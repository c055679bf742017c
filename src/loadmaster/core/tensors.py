"""Tensors of a checkpoint computed from its configuration, for models whose files are not at hand.

Names and shapes are those of the published checkpoints of each architecture that has exact sharding rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from loadmaster.core.architectures import family_of
from loadmaster.core.facts import ModelFacts, TensorGroup, VisionConfig
from loadmaster.core.storedlinear import Exclusions, item_bytes, stored_linear

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "half": "F16"}


class _IncompleteError(Exception):
    """A size that the computation needs is not in the configuration."""


def synthesise(model: ModelFacts) -> tuple[TensorGroup, ...]:
    """The tensors that a checkpoint with this configuration has; empty when it cannot be told.

    It cannot for architectures without exact rules, formats without a known layout and missing sizes.
    """
    family = family_of(model.architecture)
    if not family.exact or family.name not in _FAMILIES:
        return ()
    try:
        build = _Builder(model)
        _language(build, family.name)
        if model.vision is not None and family.vision is not None:
            _TOWERS[family.name](build, model.vision)
        return build.groups()
    except _IncompleteError:
        return ()


class _Builder:
    def __init__(self, model: ModelFacts) -> None:
        self.model, self.text = model, model.text
        self.dtype = _DTYPES.get(model.text.dtype or "bfloat16", "BF16")
        self._excluded = Exclusions(model.quantization)
        self._count: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._layers: dict[tuple[str, str, tuple[int, ...]], dict[int, int] | None] = {}

    def add(
        self, name: str, *shape: int, dtype: str | None = None, layers: Iterable[int] | None = None, each: int = 1
    ) -> None:
        key = (name, dtype or self.dtype, shape)
        if layers is None:
            self._count[key] = self._count.get(key, 0) + each
            self._layers.setdefault(key, None)
            return
        held = self._layers.setdefault(key, {})
        assert held is not None
        for layer in layers:
            held[layer] = held.get(layer, 0) + each
            self._count[key] = self._count.get(key, 0) + each

    def linear(
        self, name: str, out: int, into: int, *, layers: Sequence[int] | None = None, each: int = 1,
        quantised: bool = True, bias: bool = False,
    ) -> None:  # fmt: skip
        """A linear layer; ``quantised``: of a kind that builds of this family quantise."""
        plain, packed = self._split(name, layers, quantised)
        if packed is None or packed:
            stored = stored_linear(self.model.quantization, out, into, self.dtype)
            if stored is None:
                raise _IncompleteError(f"no layout known for {self.model.quantization.method}")
            for leaf, dtype, shape in stored:
                self.add(f"{name}.{leaf}", *shape, dtype=dtype, layers=packed, each=each)
        if plain is None or plain:
            self.add(f"{name}.weight", out, into, layers=plain, each=each)
        if bias:
            self.add(f"{name}.bias", out, layers=layers, each=each)

    def _split(
        self, name: str, layers: Sequence[int] | None, quantised: bool
    ) -> tuple[list[int] | None, list[int] | None]:
        """Layers in which the module stays plain, and those in which it is packed; ``None``: it has no layers."""
        if self.model.quantization.method is None or not quantised:
            return (None, []) if layers is None else (list(layers), [])
        module = name.replace("{e}", "0")
        if layers is None:
            return ([], None) if module not in self._excluded else (None, [])
        packed = [layer for layer in layers if module.replace("{l}", str(layer)) not in self._excluded]
        kept = set(packed)
        return [layer for layer in layers if layer not in kept], packed

    def groups(self) -> tuple[TensorGroup, ...]:
        return tuple(
            TensorGroup(
                name, dtype, shape, math.prod(shape) * item_bytes(dtype), count, self._layers[name, dtype, shape]
            )
            for (name, dtype, shape), count in self._count.items()
        )


def _need(value: int | None) -> int:
    if value is None:
        raise _IncompleteError("a size is missing")
    return value


# ---------------------------------------------------------------------------------------------- language model

_PREFIX = {
    "qwen3_5": "model.language_model.",
    "qwen3_vl": "model.language_model.",
    "qwen3_vl_moe": "model.language_model.",
    "gemma3": "language_model.model.",
    "mistral3": "language_model.model.",
}


def _language(build: _Builder, family: str) -> None:
    text, model = build.text, build.model
    multimodal = model.vision is not None
    prefix = _PREFIX.get(family, "model.") if multimodal else "model."
    hidden, vocabulary, layers = _need(text.hidden_size), _need(text.vocab_size), _need(text.num_hidden_layers)
    build.add(prefix + "embed_tokens.weight", vocabulary, hidden)
    build.add(prefix + "norm.weight", hidden)
    if not text.tie_word_embeddings:
        head = "language_model.lm_head" if family == "mistral3" and multimodal else "lm_head"
        build.linear(head, vocabulary, hidden, quantised=False)
    _decoder(build, family, prefix + "layers.{l}.", list(range(layers)))
    heads = text.num_mtp_layers or 0
    if heads and family in ("qwen3_5", "qwen3_next"):
        build.linear("mtp.fc", hidden, 2 * hidden, quantised=False)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            build.add(f"mtp.{name}.weight", hidden)
        # a build that lists what it leaves plain also says whether the head is among it
        quantised = bool(model.quantization.ignore or (model.quantization.declared or {}).get("dynamic"))
        _attention(build, family, "mtp.layers.{l}.", list(range(heads)), quantised=quantised)
        _feed_forward(build, family, "mtp.layers.{l}.", list(range(heads)), quantised=quantised)
        _norms(build, family, "mtp.layers.{l}.", list(range(heads)))
    elif heads and family == "deepseek_v3":
        extra = list(range(layers, layers + heads))
        _decoder(build, family, prefix + "layers.{l}.", extra)
        build.linear(prefix + "layers.{l}.eh_proj", hidden, 2 * hidden, layers=extra, quantised=False)
        build.add(prefix + "layers.{l}.embed_tokens.weight", vocabulary, hidden, layers=extra)
        build.add(prefix + "layers.{l}.shared_head.head.weight", vocabulary, hidden, layers=extra)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            build.add(f"{prefix}layers.{{l}}.{name}.weight", hidden, layers=extra)


def _decoder(build: _Builder, family: str, prefix: str, layers: list[int]) -> None:
    types = build.text.layer_types
    recurrent = [layer for layer in layers if layer < len(types) and types[layer] == "linear_attention"]
    others = sorted(set(layers) - set(recurrent))
    if recurrent:
        _delta_net(build, family, prefix + "linear_attn.", recurrent)
    if family == "deepseek_v3":
        _latent_attention(build, prefix, others)
    else:
        _attention(build, family, prefix, others)
    _feed_forward(build, family, prefix, layers)
    _norms(build, family, prefix, layers)


def _norms(build: _Builder, family: str, prefix: str, layers: list[int]) -> None:
    names = ["input_layernorm", "post_attention_layernorm"]
    if family == "gemma3":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in names:
        build.add(f"{prefix}{name}.weight", _need(build.text.hidden_size), layers=layers)


def _attention(build: _Builder, family: str, prefix: str, layers: list[int], quantised: bool = True) -> None:
    text, p = build.text, prefix + "self_attn."
    hidden, heads, kv = _need(text.hidden_size), _need(text.num_attention_heads), _need(text.num_key_value_heads)
    dim = _need(text.head_dim)
    bias = (build.model.architecture or "").startswith("Qwen2") or bool(build.model.config.get("attention_bias"))
    gate = 2 if text.attn_output_gate else 1
    build.linear(p + "q_proj", heads * dim * gate, hidden, layers=layers, bias=bias, quantised=quantised)
    for name in ("k_proj", "v_proj"):
        build.linear(p + name, kv * dim, hidden, layers=layers, bias=bias, quantised=quantised)
    build.linear(p + "o_proj", hidden, heads * dim, layers=layers, quantised=quantised)
    if family in ("qwen3_5", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "gemma3") or (
        build.model.architecture or ""
    ).startswith("Qwen3"):
        for name in ("q_norm", "k_norm"):
            build.add(f"{p}{name}.weight", dim, layers=layers)


def _latent_attention(build: _Builder, prefix: str, layers: list[int]) -> None:
    text, p = build.text, prefix + "self_attn."
    hidden, heads = _need(text.hidden_size), _need(text.num_attention_heads)
    rank, rope, nope, value = (
        _need(text.kv_lora_rank), _need(text.qk_rope_head_dim), _need(text.qk_nope_head_dim), _need(text.v_head_dim),
    )  # fmt: skip
    if text.q_lora_rank:
        build.linear(p + "q_a_proj", text.q_lora_rank, hidden, layers=layers)
        build.add(p + "q_a_layernorm.weight", text.q_lora_rank, layers=layers)
        build.linear(p + "q_b_proj", heads * (nope + rope), text.q_lora_rank, layers=layers)
    else:
        build.linear(p + "q_proj", heads * (nope + rope), hidden, layers=layers)
    build.linear(p + "kv_a_proj_with_mqa", rank + rope, hidden, layers=layers)
    build.add(p + "kv_a_layernorm.weight", rank, layers=layers)
    build.linear(p + "kv_b_proj", heads * (nope + value), rank, layers=layers)
    build.linear(p + "o_proj", hidden, heads * value, layers=layers)


def _delta_net(build: _Builder, family: str, p: str, layers: list[int]) -> None:
    text = build.text
    hidden, value_heads = _need(text.hidden_size), _need(text.linear_num_value_heads)
    keys = _need(text.linear_num_key_heads) * _need(text.linear_key_head_dim)
    values = value_heads * _need(text.linear_value_head_dim)
    if family == "qwen3_next":
        build.linear(p + "in_proj_qkvz", 2 * keys + 2 * values, hidden, layers=layers)
        build.linear(p + "in_proj_ba", 2 * value_heads, hidden, layers=layers, quantised=False)
    else:
        build.linear(p + "in_proj_qkv", 2 * keys + values, hidden, layers=layers)
        build.linear(p + "in_proj_z", values, hidden, layers=layers)
        for name in ("in_proj_a", "in_proj_b"):
            build.linear(p + name, value_heads, hidden, layers=layers, quantised=False)
    build.linear(p + "out_proj", hidden, values, layers=layers)
    build.add(p + "conv1d.weight", 2 * keys + values, 1, _need(text.linear_conv_kernel_dim), layers=layers)
    build.add(p + "A_log", value_heads, dtype="F32", layers=layers)
    build.add(p + "dt_bias", value_heads, layers=layers)
    build.add(p + "norm.weight", _need(text.linear_value_head_dim), dtype="F32", layers=layers)


def _feed_forward(build: _Builder, family: str, prefix: str, layers: list[int], quantised: bool = True) -> None:
    text, p = build.text, prefix + "mlp."
    dense = set(range(text.first_k_dense_replace or 0)) if text.num_experts else set(layers)
    plain, sparse = [layer for layer in layers if layer in dense], [layer for layer in layers if layer not in dense]
    if plain:
        _gated(build, p, _need(text.intermediate_size), plain, quantised=quantised)
    if sparse:
        _experts(build, family, p, sparse, quantised)


def _gated(build: _Builder, p: str, width: int, layers: list[int], *, each: int = 1, quantised: bool = True) -> None:
    hidden = _need(build.text.hidden_size)
    for name in ("gate_proj", "up_proj"):
        build.linear(p + name, width, hidden, layers=layers, each=each, quantised=quantised)
    build.linear(p + "down_proj", hidden, width, layers=layers, each=each, quantised=quantised)


def _experts(build: _Builder, family: str, p: str, layers: list[int], quantised: bool) -> None:
    text = build.text
    hidden, experts, width = _need(text.hidden_size), _need(text.num_experts), _need(text.moe_intermediate_size)
    build.linear(p + "gate", experts, hidden, layers=layers, quantised=False)
    packed = build.model.quantization.method is not None and quantised
    if not packed and family in ("qwen3_5", "qwen3_vl_moe"):
        up_shape, down_shape = (2 * width, hidden), (hidden, width)
        if family == "qwen3_vl_moe":
            up_shape, down_shape = up_shape[::-1], down_shape[::-1]
        build.add(p + "experts.gate_up_proj", experts, *up_shape, layers=layers)
        build.add(p + "experts.down_proj", experts, *down_shape, layers=layers)
    else:
        _gated(build, p + "experts.{e}.", width, layers, each=experts, quantised=quantised)
    if family == "deepseek_v3":
        if build.model.config.get("topk_method") == "noaux_tc" or build.model.architecture == "DeepseekV3ForCausalLM":
            build.add(p + "gate.e_score_correction_bias", experts, dtype="F32", layers=layers)
        shared = build.model.config.get("n_shared_experts")
        shared_width = shared * width if isinstance(shared, int) else text.shared_expert_intermediate_size
        if shared_width:
            _gated(build, p + "shared_experts.", shared_width, layers, quantised=quantised)
    elif text.shared_expert_intermediate_size:
        build.linear(p + "shared_expert_gate", 1, hidden, layers=layers, quantised=False)
        _gated(build, p + "shared_expert.", text.shared_expert_intermediate_size, layers, quantised=quantised)


# ---------------------------------------------------------------------------------------------- vision towers


def _norm(build: _Builder, name: str, width: int, layers: list[int] | None = None, bias: bool = True) -> None:
    build.add(name + ".weight", width, layers=layers)
    if bias:
        build.add(name + ".bias", width, layers=layers)


def _plain_linear(
    build: _Builder, name: str, out: int, into: int, layers: list[int] | None = None, bias: bool = True
) -> None:
    build.linear(name, out, into, layers=layers, bias=bias, quantised=False)


def _qwen_tower(build: _Builder, vision: VisionConfig) -> None:
    old = (build.model.architecture or "").startswith("Qwen2")
    first = (build.model.architecture or "").startswith("Qwen2VL")
    p = "visual." if old else "model.visual."
    hidden, depth = _need(vision.hidden_size), list(range(_need(vision.depth)))
    patch, merge = _need(vision.patch_size), _need(vision.spatial_merge_size)
    out = vision.out_hidden_size or _need(build.text.hidden_size)
    wide = _need(vision.intermediate_size)
    merged = hidden * merge * merge
    build.add(
        p + "patch_embed.proj.weight", hidden, vision.in_channels or 3, vision.temporal_patch_size or 2, patch, patch
    )
    if not old:
        build.add(p + "patch_embed.proj.bias", hidden)
        build.add(p + "pos_embed.weight", _need(vision.num_position_embeddings), hidden)
    block = p + "blocks.{l}."
    biased = not old or first
    for name in ("norm1", "norm2"):
        _norm(build, block + name, hidden, depth, bias=biased)
    _plain_linear(build, block + "attn.qkv", 3 * hidden, hidden, depth)
    _plain_linear(build, block + "attn.proj", hidden, hidden, depth)
    if first or not old:
        for name, rows, columns in (
            (("fc1", "linear_fc1")[not old], wide, hidden),
            (("fc2", "linear_fc2")[not old], hidden, wide),
        ):
            _plain_linear(build, f"{block}mlp.{name}", rows, columns, depth)
    else:
        for name, rows, columns in (
            ("gate_proj", wide, hidden),
            ("up_proj", wide, hidden),
            ("down_proj", hidden, wide),
        ):
            _plain_linear(build, f"{block}mlp.{name}", rows, columns, depth)
    if old:
        _norm(build, p + "merger.ln_q", hidden, bias=first)
        _plain_linear(build, p + "merger.mlp.0", merged, merged)
        _plain_linear(build, p + "merger.mlp.2", out, merged)
        return
    mergers = [("merger.", hidden)] + [
        (f"deepstack_merger_list.{index}.", merged) for index in range(len(vision.deepstack_layers))
    ]
    for name, width in mergers:
        _norm(build, p + name + "norm", width)
        _plain_linear(build, p + name + "linear_fc1", merged, merged)
        _plain_linear(build, p + name + "linear_fc2", out, merged)


def _siglip_tower(build: _Builder, vision: VisionConfig) -> None:
    hidden, depth = _need(vision.hidden_size), list(range(_need(vision.depth)))
    patch, wide = _need(vision.patch_size), _need(vision.intermediate_size)
    p = "vision_tower.vision_model."
    build.add(p + "embeddings.patch_embedding.weight", hidden, vision.in_channels or 3, patch, patch)
    build.add(p + "embeddings.patch_embedding.bias", hidden)
    build.add(p + "embeddings.position_embedding.weight", (_need(vision.image_size) // patch) ** 2, hidden)
    _norm(build, p + "post_layernorm", hidden)
    block = p + "encoder.layers.{l}."
    for name in ("layer_norm1", "layer_norm2"):
        _norm(build, block + name, hidden, depth)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        _plain_linear(build, f"{block}self_attn.{name}", hidden, hidden, depth)
    _plain_linear(build, block + "mlp.fc1", wide, hidden, depth)
    _plain_linear(build, block + "mlp.fc2", hidden, wide, depth)
    build.add("multi_modal_projector.mm_input_projection_weight", hidden, _need(build.text.hidden_size))
    build.add("multi_modal_projector.mm_soft_emb_norm.weight", hidden)


def _pixtral_tower(build: _Builder, vision: VisionConfig) -> None:
    hidden, depth = _need(vision.hidden_size), list(range(_need(vision.depth)))
    patch, wide, text = _need(vision.patch_size), _need(vision.intermediate_size), _need(build.text.hidden_size)
    merge = vision.spatial_merge_size or build.model.config.get("spatial_merge_size") or 2
    p = "vision_tower."
    build.add(p + "patch_conv.weight", hidden, vision.in_channels or 3, patch, patch)
    build.add(p + "ln_pre.weight", hidden)
    block = p + "transformer.layers.{l}."
    for name in ("attention_norm", "ffn_norm"):
        _norm(build, block + name, hidden, depth, bias=False)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        _plain_linear(build, f"{block}attention.{name}", hidden, hidden, depth, bias=False)
    for name, rows, columns in (("gate_proj", wide, hidden), ("up_proj", wide, hidden), ("down_proj", hidden, wide)):
        _plain_linear(build, f"{block}feed_forward.{name}", rows, columns, depth, bias=False)
    q = "multi_modal_projector."
    build.add(q + "norm.weight", hidden)
    _plain_linear(build, q + "patch_merger.merging_layer", hidden, hidden * merge * merge, bias=False)
    _plain_linear(build, q + "linear_1", text, hidden, bias=False)
    _plain_linear(build, q + "linear_2", text, text, bias=False)


_FAMILIES = frozenset(
    (
        *("qwen3_5", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen2_vl", "qwen", "qwen_moe"),
        *("llama", "mistral3", "gemma3", "deepseek_v3"),
    )
)
_TOWERS: dict[str, Callable[[_Builder, VisionConfig], None]] = {
    "qwen3_5": _qwen_tower,
    "qwen3_vl": _qwen_tower,
    "qwen3_vl_moe": _qwen_tower,
    "qwen2_vl": _qwen_tower,
    "gemma3": _siglip_tower,
    "mistral3": _pixtral_tower,
}
