"""The KV cache and recurrent state of a rank: pages, groups, blocks, and how much context fits.

Exact for one kind of attention, for sliding windows beside full attention, for gated delta nets beside full
attention, and for multi-head latent attention. Sources: vLLM 0.17 to 0.33, v1/core/kv_cache_utils.py (from 0.33
also kv_cache_planning.py), v1/kv_cache_interface.py; what differs by version is in data/kv-cache.toml.
"""

from __future__ import annotations

from msgspec import Struct

from loadmaster.core.architectures import family_of
from loadmaster.core.cachespec import (
    LayerSpec,
    attention_token_bytes,
    block_tokens,
    gdn_checkpoint,
    gdn_checkpoint_doubt,
    rule,
    state_bytes,
)
from loadmaster.core.facts import CacheGroup, CacheLayout, KvCache, ModelFacts, Settings
from loadmaster.core.pipeline import stage_layers
from loadmaster.core.tensorlayout import up

_LONGEST = 1 << 26  # tokens; no model is asked for more
_NO_SPECULATION = ("ngram", "medusa", "suffix", "custom_class")


class _Group(Struct, frozen=True):
    spec: LayerSpec
    layers: tuple[int, ...]  # decoder layer numbers, prediction heads after the last


def cache_layout(model: ModelFacts, settings: Settings, pipeline_rank: int = 0) -> CacheLayout:
    """How the ranks of one pipeline stage page their cache.

    Raises ValueError when the configuration does not say how large a token is.
    """
    text = model.text
    token = attention_token_bytes(model, settings)
    layers = text.num_hidden_layers or len(text.layer_types)
    if not token or not layers:
        raise ValueError("the configuration does not say how large the cache of a token is (heads, head size, layers)")
    block = block_tokens(model, settings)
    notes: list[str] = []
    specs = _layer_specs(model, settings, block, token, layers, notes)
    groups, padding_layers = _groups(specs, settings)
    if padding_layers:
        notes.append(f"{padding_layers} padding layers make the groups equally long.")
    if doubt := gdn_checkpoint_doubt(text, settings):
        notes.append(doubt)
    last = pipeline_rank == settings.pipeline_parallel_size - 1
    here = set(stage_layers(layers, settings)[0][pipeline_rank])
    if last:
        here |= set(range(layers, len(specs)))
    counts = [sum(layer in here for layer in group.layers) for group in groups]
    state = next((spec for spec in specs if spec is not None and spec.kind == "state"), None)
    padding = None
    if state is not None and state.state_bytes:
        padding = 100 * (state.page_bytes - state.state_bytes) / state.state_bytes
    family = family_of(model.architecture)
    exact = family.exact and not any(kind not in (*_KINDS, *_WITHOUT_CACHE) for kind in text.layer_types)
    if not exact:
        notes.append(
            f"No cache rule for the architecture {model.architecture or '(not named)'}: "
            "layers without a known kind are taken as full attention."
        )
    return CacheLayout(
        block_tokens=block,
        pool_block_bytes=max(
            (count * group.spec.page_bytes for count, group in zip(counts, groups, strict=True)), default=0
        ),
        groups=tuple(
            _cache_group(group.spec, count, model, settings) for count, group in zip(counts, groups, strict=True)
        ),
        printed_rule=rule("printed_tokens", settings.version)["rule"],
        padding_percent=padding,
        exact=exact,
        notes=tuple(notes),
    )


_KINDS = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "state"}
_WITHOUT_CACHE = ("mlp", "moe")  # layers that only feed forward, as Nemotron-H has them


def _layer_specs(
    model: ModelFacts, settings: Settings, block: int, token: int, layers: int, notes: list[str]
) -> list[LayerSpec | None]:
    """One spec for each decoder layer (None: it caches nothing), then one for each prediction head that is loaded."""
    text = model.text
    page = block * token
    full = LayerSpec(kind="mla" if text.kv_lora_rank else "full", page_bytes=page, bytes_per_token=token)
    specs: dict[str, LayerSpec | None] = {"full_attention": full, **dict.fromkeys(_WITHOUT_CACHE)}
    if text.sliding_window:
        sliding = LayerSpec(kind="sliding", page_bytes=page, bytes_per_token=token, window=text.sliding_window)
        specs["sliding_attention"] = sliding
    state = state_bytes(text, settings)
    if state:
        specs["linear_attention"] = LayerSpec(kind="state", page_bytes=max(page, state), state_bytes=state)
    types = text.layer_types or (("sliding_attention",) if text.sliding_window else ("full_attention",)) * layers
    result = [specs.get(types[layer] if layer < len(types) else "full_attention", full) for layer in range(layers)]
    if settings.disable_hybrid_kv_cache_manager and full in result:
        result = [full if spec is not None and spec.kind == "sliding" else spec for spec in result]
    if settings.num_speculative_tokens:
        method = settings.speculative_method or ""
        if method.endswith("mtp"):
            result += [full] * (text.num_mtp_layers or 1)
        elif method and method not in _NO_SPECULATION:
            notes.append(f"The cache of the draft model ({method}) is not counted.")
    return result


def _groups(specs: list[LayerSpec | None], settings: Settings) -> tuple[list[_Group], int]:
    """Layers cut into groups of equal length, as many padding layers as that takes."""
    by_spec: dict[LayerSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec is not None:
            by_spec.setdefault(spec, []).append(layer)
    if len(by_spec) <= 1:
        return [_Group(spec, tuple(layers)) for spec, layers in by_spec.items()], 0
    sizes = [len(layers) for layers in by_spec.values()]
    size = min(sizes)
    if max(sizes) < size * rule("group_size_factor", settings.version)["factor"]:
        size = max(sizes)
    groups: list[_Group] = []
    padding = 0
    for spec, layers in by_spec.items():
        number = up(len(layers), size)
        padding += number * size - len(layers)
        groups += [_Group(spec, tuple(layers[start::number])) for start in range(number)]
    return groups, padding


def _cache_group(spec: LayerSpec, layers: int, model: ModelFacts, settings: Settings) -> CacheGroup:
    request_blocks: int | None = None
    grows = True
    if spec.kind == "state":
        speculative = settings.num_speculative_tokens
        if settings.mamba_cache_mode == "align":
            request_blocks, grows = 2 + speculative + gdn_checkpoint(model.text, settings)[1], False
        elif settings.mamba_cache_mode == "all":
            counted = rule("all_mode_speculative_blocks", settings.version)["counted"]
            request_blocks = speculative if counted else 0
        else:
            request_blocks, grows = 1 + speculative, False
    return CacheGroup(
        kind=spec.kind,
        layers=layers,
        page_bytes=spec.page_bytes,
        bytes_per_token=spec.bytes_per_token,
        state_bytes=spec.state_bytes,
        window=spec.window,
        request_blocks=request_blocks,
        request_blocks_grow=grows,
    )


# ---------------------------------------------------------------------------------------------- contexts


def request_blocks(layout: CacheLayout, settings: Settings, tokens: int) -> int:
    """Blocks that a request of ``tokens`` tokens takes from the pool, over all groups."""
    block = layout.block_tokens
    total = 0
    for group in layout.groups:
        if not group.request_blocks_grow:
            total += group.request_blocks or 0
        elif group.window is not None:
            held = min(group.window - 1 + _tokens_in_flight(settings), tokens)
            total += up(held, block) + 1
        else:
            own = up(tokens, settings.decode_context_parallel_size) if group.kind in ("full", "mla") else tokens
            total += up(own, block) + (group.request_blocks or 0)
    return total


def _tokens_in_flight(settings: Settings) -> int:
    if not rule("batches_in_flight", settings.version)["concurrent"]:
        return settings.max_num_batched_tokens
    stages = settings.pipeline_parallel_size
    asynchronous = settings.async_scheduling
    if asynchronous is None:
        asynchronous = (settings.speculative_method or "") not in _NO_SPECULATION
    batches = stages
    if asynchronous and (stages == 1 or rule("runner_v2", settings.version)["everywhere"]):
        batches = stages + 1
    return batches * settings.max_num_batched_tokens


def bytes_for_context(layout: CacheLayout, settings: Settings, tokens: int) -> int:
    """Bytes of cache that one request of ``tokens`` tokens needs on a rank, reserved blocks included."""
    reserved = int(rule("reserved_blocks", settings.version)["blocks"])
    return (request_blocks(layout, settings, tokens) + reserved) * layout.pool_block_bytes


def largest_context(layout: CacheLayout, settings: Settings, available_bytes: int) -> int:
    """Longest request in tokens that ``available_bytes`` of cache hold; 0 when not even one token fits."""
    low, high = 0, _LONGEST
    if layout.pool_block_bytes == 0:
        return _LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_for_context(layout, settings, middle) <= available_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def cached_bytes(layout: CacheLayout, settings: Settings, available_bytes: int) -> int:
    """Bytes of blocks that requests can have: what is left for the cache, and no more than a given number of blocks.

    From 0.20.1 on the given number alone decides, whatever is left.
    """
    if settings.num_gpu_blocks_override is None:
        return available_bytes
    given = settings.num_gpu_blocks_override * layout.pool_block_bytes
    return given if rule("override_admission", settings.version)["by_override"] else min(given, available_bytes)


def cache_capacity(layout: CacheLayout, settings: Settings, available_bytes: int) -> KvCache:
    """Blocks, printed tokens and concurrency of a cache of ``available_bytes`` on the rank that has least."""
    pool = layout.pool_block_bytes
    blocks = max(0, available_bytes) // pool if pool else 1
    if settings.num_gpu_blocks_override is not None:
        blocks = settings.num_gpu_blocks_override
    length = settings.max_model_len
    tokens: int | None = None
    concurrency: float | None = None
    per_request: int | None = None
    if length:
        need = request_blocks(layout, settings, length)
        concurrency = blocks / need
        per_request = need * pool
        tokens = int(concurrency * length)
    if layout.printed_rule == "blocks-per-group":
        block = layout.block_tokens
        if length and settings.mamba_cache_mode == "none" and any(group.kind == "state" for group in layout.groups):
            block = min(block, length)  # a block of state counts as the whole context; the smallest is taken
        tokens = blocks // max(1, len(layout.groups)) * block * settings.decode_context_parallel_size
    return KvCache(
        available_bytes=available_bytes,
        block_tokens=layout.block_tokens,
        blocks=blocks,
        tokens=tokens,
        max_concurrency=concurrency,
        bytes_per_request_at_max_len=per_request,
        max_model_len=length,
        largest_model_len=largest_context(layout, settings, cached_bytes(layout, settings, available_bytes)),
        notes=layout.notes,
    )
