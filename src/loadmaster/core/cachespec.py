"""What one decoder layer keeps in the KV cache: bytes of a token, or of a sequence's recurrent state.

Sources: vLLM v1/kv_cache_interface.py, platforms/interface.py (_align_hybrid_block_size), model_executor/layers/mamba.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from msgspec import Struct

from loadmaster.core.engineversion import at_least
from loadmaster.core.facts import ModelFacts, Settings, TextConfig
from loadmaster.core.tables import load_toml
from loadmaster.core.tensorlayout import MODEL_DTYPE_BYTES, up

_STATE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "fp8": 1, "float8_e4m3fn": 1}


class LayerSpec(Struct, frozen=True, kw_only=True):
    """Layers with equal specs share blocks. ``page_bytes``: one block of one layer, padding included."""

    kind: str  # "full", "mla", "sliding", "state"
    page_bytes: int
    bytes_per_token: int | None = None
    state_bytes: int | None = None
    window: int | None = None


@lru_cache(maxsize=256)
def rule(name: str, version: str) -> dict[str, Any]:
    """The entry of data/kv-cache.toml that holds for ``version``; an older version gets the first."""
    entries: list[dict[str, Any]] = load_toml("kv-cache.toml")[name]
    held = entries[0]
    for entry in entries:
        if at_least(version, entry["since"]):
            held = entry
    return held


def attention_token_bytes(model: ModelFacts, settings: Settings) -> int | None:
    """Bytes of one token in one attention layer of one rank; None when the configuration does not say."""
    text = model.text
    if text.kv_lora_rank:  # the latent vector is shared by all heads, so every rank keeps all of it
        return _latent_bytes(model, settings, text.kv_lora_rank + (text.qk_rope_head_dim or 0))
    heads, head_dim = text.num_key_value_heads or text.num_attention_heads, text.head_dim
    if not heads or not head_dim:
        return None
    local = max(1, heads // settings.tensor_parallel_size)
    if settings.kv_cache_dtype == "nvfp4":  # two codes a byte, and an 8-bit scale for 16 codes
        return 2 * local * (head_dim // 2 + head_dim // 16)
    scales = load_toml("kv-cache.toml")["token_scales"]
    extra = int(scales["bytes"]) * local if settings.kv_cache_dtype in scales["names"] else 0
    return int(2 * local * head_dim * settings.kv_cache_dtype_bytes) + extra


def _latent_bytes(model: ModelFacts, settings: Settings, width: int) -> int:
    table = load_toml("kv-cache.toml")
    index = 0
    packed = settings.kv_cache_dtype == "fp8_ds_mla"
    if is_sparse(model):
        head = model.config.get("index_head_dim")
        head = head if isinstance(head, int) else int(table["sparse_index"]["head_dim"])
        index = head + head // int(table["sparse_index"]["scale_block"]) * 4
        packed = settings.kv_cache_dtype.startswith("fp8")
    if packed:
        return int(table["fp8_ds_mla"]["bytes_per_token"]) + index
    return int(width * settings.kv_cache_dtype_bytes) + index


def is_sparse(model: ModelFacts) -> bool:
    """Latent attention with an index of tokens (DeepSeek V3.2), which has a cache of its own in every layer."""
    return bool(model.text.kv_lora_rank) and isinstance(model.config.get("index_topk"), int)


def state_bytes(text: TextConfig, settings: Settings) -> int | None:
    """Bytes of one sequence's state in one gated delta net layer of one rank: convolution and recurrent state."""
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    key_dim, value_dim = text.linear_key_head_dim, text.linear_value_head_dim
    kernel = text.linear_conv_kernel_dim
    if not (keys and values and key_dim and value_dim and kernel):
        return None
    ranks = settings.tensor_parallel_size
    model_bytes = MODEL_DTYPE_BYTES.get(settings.dtype, 2)
    recurrent = _STATE_BYTES.get(settings.mamba_ssm_cache_dtype or text.mamba_ssm_dtype or settings.dtype, model_bytes)
    channels = (2 * keys * key_dim + values * value_dim) // ranks
    convolution = channels * (kernel - 1 + settings.num_speculative_tokens) * model_bytes
    return convolution + values // ranks * value_dim * key_dim * recurrent


def block_tokens(model: ModelFacts, settings: Settings) -> int:
    """Tokens of a block: the flag, else what the version's attention backend prefers on the card; for models
    with recurrent state as many as make an attention page at least as large as the state."""
    text = model.text
    table = load_toml("kv-cache.toml")
    base = settings.block_size or _preferred_block(model, settings, table)
    token, state = attention_token_bytes(model, settings), state_bytes(text, settings)
    if "linear_attention" not in text.layer_types or not token or not state:
        return base
    step = _hybrid_step(text, settings, base)
    return max(base if settings.block_size else 0, step * up(state, step * token))


def _preferred_block(model: ModelFacts, settings: Settings, table: dict[str, Any]) -> int:
    text, default = model.text, int(table["default_block_tokens"])
    if is_sparse(model):
        return int(table["sparse_index"]["block_tokens"])
    if settings.attention_backend:
        return max(default, int(table["backend_block"].get(settings.attention_backend.upper(), default)))
    if not text.kv_lora_rank or settings.compute_capability is None:
        return default
    sizes = rule("latent_attention_block", settings.version)["capability"]
    major = str(settings.compute_capability[0])
    if settings.kv_cache_dtype_bytes < 2 and f"quantised_{major}" in sizes:
        return int(sizes[f"quantised_{major}"])
    return int(sizes.get(major, sizes["other"]))


def _hybrid_step(text: TextConfig, settings: Settings, base: int) -> int:
    version = settings.version
    step = int(load_toml("kv-cache.toml")["default_block_tokens"])
    blackwell = settings.compute_capability is not None and settings.compute_capability[0] == 10
    if blackwell and text.head_dim == 256 and settings.attention_backend in (None, "FLASHINFER"):
        step = int(rule("blackwell_hybrid_block", version)["tokens"])
    if settings.block_size and rule("hybrid_block_step", version)["from_block_size"]:
        step = max(step, base)
    grid, _ = gdn_checkpoint(text, settings)
    return step * grid // _gcd(step, grid)


def gdn_checkpoint(text: TextConfig, settings: Settings) -> tuple[int, int]:
    """``(grid in tokens, blocks a request)`` of prefill checkpoints; ``(1, 0)`` where the kernel takes none."""
    entry = rule("gdn_checkpoint", settings.version)
    capability = settings.compute_capability
    usable = capability is not None and (
        capability == (9, 0) or (capability[0] in (10, 12) and text.linear_key_head_dim == 128)
    )
    chosen = settings.gdn_prefill_backend in ("auto", "flashinfer") and usable
    if settings.mamba_cache_mode != "align" or not chosen:
        return 1, 0
    return int(entry["grid"]), int(entry["blocks"])


def gdn_checkpoint_doubt(text: TextConfig, settings: Settings) -> str | None:
    """What is not known of the prefill kernel and would change the blocks; None when nothing is."""
    grid = int(rule("gdn_checkpoint", settings.version)["grid"])
    capability = settings.compute_capability
    asked = settings.mamba_cache_mode == "align" and settings.gdn_prefill_backend in ("auto", "flashinfer")
    if grid == 1 or not asked or not state_bytes(text, settings):
        return None
    if capability is None:
        return f"On cards where FlashInfer computes the prefill, blocks are multiples of {grid} tokens."
    if capability[0] in (10, 12):
        return f"Blocks are multiples of {grid} tokens because FlashInfer computes the prefill; it takes CUDA 13."
    return None


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a
