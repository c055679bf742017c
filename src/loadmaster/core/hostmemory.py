"""Bytes that llama.cpp takes on a host, one rule per function.

Sources and measured builds: llamacpp.toml; results against the engine: docs/accuracy-llamacpp.md.
"""

from __future__ import annotations

from msgspec import Struct

from loadmaster.core.facts import Amount, ModelFacts, TensorGroup
from loadmaster.core.ggufconfig import classified, ggml_types_by_name, is_projector_part, layer_types, per_layer
from loadmaster.core.hostsettings import HostSettings, pad
from loadmaster.core.tables import load_toml

_FLOAT = 4


class Cache(Struct, frozen=True, kw_only=True):
    """Bytes of the KV cache and of the recurrent state; ``exact`` False: no rule is checked for the architecture."""

    full_bytes: int
    window_bytes: int
    state_bytes: int
    state_bytes_per_slot: int
    window_bytes_per_slot: int
    exact: bool
    note: str | None = None

    @property
    def total(self) -> int:
        return self.full_bytes + self.window_bytes + self.state_bytes


def row_bytes(kind: str, length: int) -> int:
    """Bytes of a row of ``length`` numbers in a ggml format; a last block that is not full counts whole."""
    entry = ggml_types_by_name()[kind]
    size: int = -(-length // entry["block"]) * entry["bytes"]
    return size


# ------------------------------------------------------------------------------------------ weights


def language_weights(model: ModelFacts) -> tuple[int, int]:
    """Bytes of the language model that are loaded, and bytes of prediction layers that are not."""
    layers = model.text.num_hidden_layers
    loaded = skipped = 0
    for part, group in classified(model.tensors):
        if is_projector_part(part):
            continue
        behind = 0
        if layers is not None and group.layers is not None and model.text.num_mtp_layers:
            behind = sum(count for layer, count in group.layers.items() if layer >= layers)
        loaded += group.nbytes * (group.count - behind)
        skipped += group.nbytes * behind
    return loaded, skipped


def projector_weights(model: ModelFacts) -> int:
    return sum(group.total_bytes for part, group in classified(model.tensors) if is_projector_part(part))


def repacked_weights(model: ModelFacts) -> int:
    """Bytes of the matrices that some CPU has rearranged copies of: at least two dimensions, rows in eights."""
    kinds = ggml_types_by_name()
    total = 0
    for part, group in classified(model.tensors):
        if is_projector_part(part) or len(group.shape) < 2 or _looked_up(group):
            continue
        if kinds.get(group.dtype, {}).get("repack") and group.shape[-2] % 8 == 0:
            total += group.total_bytes
    return total


def _looked_up(group: TensorGroup) -> bool:
    """Embeddings are read row by row, so they are never rearranged."""
    return group.name.startswith(("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types."))


def largest_tensor(model: ModelFacts) -> int:
    return max((group.nbytes for group in model.tensors), default=0)


# ------------------------------------------------------------------------------------------ caches


def cache(model: ModelFacts, settings: HostSettings) -> Cache | None:
    """KV cache and recurrent state; None when a dimension that decides is unknown."""
    text, table = model.text, load_toml("llamacpp.toml")
    metadata = model.config.get("gguf", {})
    a = model.architecture or ""
    layers = text.num_hidden_layers
    if layers is None or not 0 < layers <= 4096 or not metadata:
        return None
    kinds = text.layer_types or layer_types(metadata, a, layers)
    heads = per_layer(metadata, f"{a}.attention.head_count_kv", layers)
    if heads is None and text.num_key_value_heads is not None:
        heads = (text.num_key_value_heads,) * layers
    key, value = _head_sizes(model)
    if heads is None or key is None or value is None:
        return None
    latent = f"{a}.attention.key_length_mla" in metadata and f"{a}.attention.value_length_mla" in metadata
    holds, state = _holders(model, kinds), _state(model)
    exact, note = True, None
    window_cells = _window_cells(settings, text.sliding_window or 0)
    full = window = state_per_slot = 0
    for layer in range(layers):
        kind = kinds[layer] if layer < len(kinds) else "full_attention"
        if layer in holds.state:
            state_per_slot += state or 0
        if layer not in holds.keys:
            continue
        row = row_bytes(settings.cache_type_k, key * heads[layer])
        if not latent:
            row += row_bytes(settings.cache_type_v, value * heads[layer])
        if kind == "sliding_attention":
            window += row * window_cells * settings.streams
        else:
            full += row * settings.context_per_slot * settings.streams
    if holds.state and state is None:
        exact, note = False, "the recurrent state of this architecture has no rule"
    if a not in table["exact"]["architectures"]:
        exact, note = False, note or f"no rule is checked for {a or 'an unknown architecture'}"
    return Cache(
        full_bytes=full,
        window_bytes=window,
        state_bytes=state_per_slot * settings.slots,
        state_bytes_per_slot=state_per_slot,
        window_bytes_per_slot=window // settings.slots,
        exact=exact,
        note=note,
    )


class _Holders(Struct, frozen=True):
    keys: frozenset[int]
    state: frozenset[int]


def _holders(model: ModelFacts, kinds: tuple[str, ...]) -> _Holders:
    """Layers with keys and values, and layers with a state, from the tensors; from the kinds without tensors."""
    layers = model.text.num_hidden_layers or 0
    keys: set[int] = set()
    state: set[int] = set()
    for group in model.tensors:
        if group.layers is None or not group.name.startswith("blk.{l}."):
            continue
        name = group.name.removeprefix("blk.{l}.").split(".")[0]
        if name in ("ssm_conv1d", "time_mix_key", "shortconv"):
            state.update(group.layers)
        elif name in ("attn_k", "attn_qkv", "attn_kv_a_mqa"):
            keys.update(group.layers)
    if not keys and not state:
        keys = {at for at, kind in enumerate(kinds) if kind != "linear_attention"}
        state = set(range(layers)) - keys
    elif "linear_attention" in kinds:
        keys -= state  # the fused matrix of a recurrent layer is no attention
    inside = range(layers)
    return _Holders(frozenset(keys.intersection(inside)), frozenset(state.intersection(inside)))


def _head_sizes(model: ModelFacts) -> tuple[int | None, int | None]:
    """Length of a cached key and of a cached value, per KV head."""
    metadata, a = model.config.get("gguf", {}), model.architecture or ""
    text = model.text
    default = None
    if text.hidden_size and text.num_attention_heads:
        default = text.hidden_size // text.num_attention_heads
    sizes = []
    for key in ("key_length", "value_length"):
        value = metadata.get(f"{a}.attention.{key}", default)
        sizes.append(value if isinstance(value, int) and 0 < value < 1 << 20 else None)
    return sizes[0], sizes[1]


def _window_cells(settings: HostSettings, window: int) -> int:
    if settings.full_window_cache:
        return settings.context_per_slot
    cells = window * (settings.slots if settings.unified else 1) + settings.micro_batch
    return pad(min(settings.context_per_slot, cells), load_toml("llamacpp.toml")["sliding"]["cells"])


def _state(model: ModelFacts) -> int | None:
    """Bytes of one layer's convolution and recurrent state for one sequence."""
    metadata, a = model.config.get("gguf", {}), model.architecture or ""
    sizes = [metadata.get(f"{a}.ssm.{key}") for key in ("conv_kernel", "inner_size", "group_count", "state_size")]
    if not all(isinstance(size, int) and 0 <= size < 1 << 24 for size in sizes):
        return None
    kernel, inner, groups, state = sizes
    each: int = load_toml("llamacpp.toml")["recurrent"]["state_bytes"]
    total: int = (max(0, kernel - 1) * (inner + 2 * groups * state) + state * inner) * each
    return total


# ------------------------------------------------------------------------------------------ buffers


def compute_buffer(model: ModelFacts, settings: HostSettings, *, logits_per_token: bool = False) -> Amount | None:
    """The graph's buffer for one micro-batch; None when the model's width is unknown."""
    text, rule = model.text, load_toml("llamacpp.toml")["compute"]
    width = text.hidden_size
    if not width:
        return None
    rows = settings.micro_batch * _FLOAT
    network, (attention_low, attention) = _feed_forward(model), _attention(model)
    alive_low, alive = max(network, attention_low), max(network, attention)
    mask = _masks(model, settings) * settings.micro_batch
    if settings.flash_attention:
        fixed, plain = mask * rule["mask_bytes"], 0
    else:
        cells = settings.context_per_slot
        fixed, plain = mask * rule["mask_bytes_plain"], (text.num_attention_heads or 0) * cells * rows
        if plain > alive * rows:
            alive_low, alive = attention_low, attention
    logits = settings.slots * (text.vocab_size or 0) * _FLOAT
    amounts = [
        fixed + max(plain + (numbers + rule[key] * width) * rows, logits)
        for numbers, key in ((alive_low, "rows_low"), (alive, "rows"), (alive, "rows_high"))
    ]
    if logits_per_token:
        # an older build: between the rule of today and logits for every token of the micro-batch
        amounts[2] += rows * (text.vocab_size or 0)
    return Amount(amounts[1], amounts[0], amounts[2], "assumed", "placement in the graph's buffer is estimated")


def _feed_forward(model: ModelFacts) -> int:
    """Numbers per token that are alive in the widest feed-forward network."""
    text = model.text
    dense = 3 * (text.intermediate_size or 0)
    if not text.num_experts:
        return dense
    used, width = text.num_experts_per_tok or 1, text.hidden_size or 0
    inner = text.moe_intermediate_size or text.intermediate_size or 0
    experts = max(3 * used * inner, used * (inner + width), 2 * used * width)
    return max(experts, dense if text.first_k_dense_replace else 0)


def _attention(model: ModelFacts) -> tuple[int, int]:
    """Numbers per token that are alive in attention, at least and expected.

    Queries, result, keys and values; or the inputs of a recurrent layer.
    """
    text = model.text
    key, value = _head_sizes(model)
    heads, groups = text.num_attention_heads or 0, text.num_key_value_heads or 0
    if text.kv_lora_rank and key and value:
        return heads * (key + value), heads * (key + 2 * value)
    alive = heads * ((key or 0) + (value or 0)) + groups * ((key or 0) + (value or 0))
    if text.linear_num_value_heads:
        state = text.linear_key_head_dim or 0
        inner = text.linear_num_value_heads * (text.linear_value_head_dim or state)
        alive = max(alive, 2 * (2 * (text.linear_num_key_heads or 0) * state + inner) + inner)
    return alive, alive


def _masks(model: ModelFacts, settings: HostSettings) -> int:
    """Cells that the attention masks of one token cover."""
    kinds = set(model.text.layer_types) or {"full_attention"}
    cells = settings.context_per_slot
    if "sliding_attention" in kinds:
        cells += _window_cells(settings, model.text.sliding_window or 0)
    return cells


def logits(model: ModelFacts, settings: HostSettings) -> tuple[int, int] | None:
    """Bytes of the logits that the engine keeps, and of the candidates that its samplers sort."""
    if not model.text.vocab_size:
        return None
    rule = load_toml("llamacpp.toml")["output"]
    rows = settings.slots * model.text.vocab_size
    return rows * rule["logit_bytes"], rows * rule["candidate_bytes"]


def process(model: ModelFacts) -> Amount:
    """The engine's process with the vocabulary, without weights, caches and buffers."""
    rule = load_toml("llamacpp.toml")["process"]
    tokens = model.text.vocab_size or 0
    values = [rule[f"bytes{end}"] + tokens * rule[f"bytes_per_token{end}"] for end in ("", "_low", "_high")]
    return Amount(values[0], values[1], values[2], "assumed")


def projector_buffer(model: ModelFacts, settings: HostSettings, tokens: int) -> Amount | None:
    """The projector's graph for one image of so many tokens; None when a dimension is unknown."""
    vision, rule = model.vision, load_toml("llamacpp.toml")["projector_compute"]
    if vision is None or not (vision.hidden_size and vision.patch_size and vision.spatial_merge_size):
        return None
    width = vision.hidden_size
    patches = tokens * vision.spatial_merge_size**2
    pixels = rule["channels"] * vision.patch_size**2
    alive = max(
        pixels + pixels // 2 + width,
        rule["attention_rows"] * width,
        (vision.intermediate_size or 4 * width) + rule["feed_forward_rows"] * width,
    )
    plain = 0 if settings.flash_attention else (vision.num_heads or 1) * patches * patches * _FLOAT
    expected = patches * alive * _FLOAT + plain
    hole = patches * (pixels + rule["hole_rows"] * width) * _FLOAT
    low = patches * max(pixels + width, alive * 3 // 4) * _FLOAT if not plain else patches * width * _FLOAT + plain
    return Amount(expected, min(low, expected), expected + hole, "assumed", f"an image of {tokens:,} tokens")


def picture_preparation(settings: HostSettings, pixels: int) -> Amount:
    """Host buffers for the largest picture before it enters the graph; at most, every HTTP thread has kept its own."""
    rule = load_toml("llamacpp.toml")["picture"]
    threads = settings.slots + rule["threads_beside_slots"]
    original = rule["bytes_per_original_pixel"] * rule["original_times"]
    return Amount(
        rule["bytes_per_pixel"] * pixels,
        rule["bytes_per_pixel_low"] * pixels,
        (rule["bytes_per_pixel_kept"] * threads + original) * pixels,
        "assumed",
    )
