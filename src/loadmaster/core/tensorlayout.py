"""Bytes of one stored tensor on one rank, after loading.

Every format is handled by shape: the dimension that the layer divides is known from the leaf, so packed
weights, scales and zero points divide by the same rule, whatever they pack.
"""

from __future__ import annotations

import math

from msgspec import Struct

from loadmaster.core.architectures import Placement
from loadmaster.core.facts import TensorGroup

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
MODEL_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
VOCABULARY_PADDING = 64  # rows; vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE


class Sharding(Struct, frozen=True, kw_only=True):
    """What the split of a tensor depends on, for one tensor rank.

    ``expert_ranks``: tensor x data ranks, over which routed experts are divided either way.
    ``local_experts``: whole experts of this rank with expert parallelism, else None.
    ``scale_dtype_bytes``: bytes of a ``weight_scale`` that is stored as a float.
    ``activation_order``: groups are not contiguous: their order is kept twice (sorted, and the sorting), and a
    row-parallel layer has the scales of all groups on every rank.
    ``weight_only_fp8``: the card has no FP8 units; the block scales are repeated for each row.
    """

    tensor_parallel: int
    expert_ranks: int
    local_experts: int | None
    experts: int | None
    kv_heads: int | None
    model_bytes: int
    scale_dtype_bytes: int
    online_bytes: float | None = None
    online_experts_only: bool = False
    weight_only_fp8: bool = False
    swizzled_scales: bool = False
    fp8_block_rows: int = 128
    activation_order: bool = False


def up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def tensor_bytes(group: TensorGroup, placement: Placement, sharding: Sharding) -> float:
    """Bytes that one tensor of ``group`` takes on the rank; 0 when it is not kept there.

    A fraction of a tensor for a stack of whole experts (``{e}`` names): count x fraction is exact.
    """
    leaf = placement.leaf
    ordered = leaf.kind == "order" and sharding.activation_order
    kept = leaf.keep == "always" or ordered or (leaf.keep == "experts" and placement.split == "experts")
    if placement.split == "skip" or not kept:
        return 0
    shape = group.shape
    total = _loaded_bytes(group, placement, sharding) * (2 if ordered else 1)
    if placement.split == "replicated" or not shape:
        return total if placement.split != "experts" else total * _expert_fraction(sharding)
    axes = leaf.axes
    if placement.fused and len(shape) > 1:
        shape = shape[1:]
    if placement.split == "experts":
        return _expert_bytes(total, shape, axes, placement, sharding)
    divided = _divided(shape, axes, placement.split, sharding)
    if divided is None or (placement.split == "columns" and _unordered_scale(placement, sharding)):
        return total
    dimension, local = divided
    loaded = total * local // dimension if (total * local) % dimension == 0 else up(total * local, dimension)
    if sharding.swizzled_scales and leaf.kind == "scale" and group.dtype == "F8_E4M3":
        return loaded * _swizzle_padding(shape, divided, placement.split)
    return loaded


def _loaded_bytes(group: TensorGroup, placement: Placement, sharding: Sharding) -> int:
    """Bytes of the whole tensor in the dtype that its parameter has after loading."""
    leaf = placement.leaf
    elements = math.prod(group.shape)
    stored_float = group.dtype in FLOAT_BYTES
    if placement.dtype == "float32":
        return elements * 4
    if leaf.kind == "block_scale":
        if sharding.weight_only_fp8:
            return elements * sharding.fp8_block_rows * sharding.model_bytes
        return elements * 4
    if leaf.dtype == "float32":
        return elements * 4
    if leaf.dtype == "scheme" and stored_float:
        return elements * sharding.scale_dtype_bytes
    if leaf.dtype == "model" and (stored_float or leaf.kind == "zero_point"):
        online = sharding.online_bytes
        applies = placement.linear and (placement.split == "experts" or not sharding.online_experts_only)
        if online is not None and applies and leaf.kind == "data" and len(group.shape) > 1:
            return math.ceil(elements * online)
        return elements * sharding.model_bytes
    return group.nbytes


def _divided(shape: tuple[int, ...], axes: str, split: str, sharding: Sharding) -> tuple[int, int] | None:
    """``(stored size of the divided dimension, this rank's size)``, or None when the tensor stays whole."""
    ranks = sharding.tensor_parallel
    if split == "vector" or axes == "f":
        return shape[0], up(shape[0], ranks)
    if split == "columns" and len(shape) == 2 and shape[1] == 1 and shape[0] > 1 and axes == "oi":
        # one column: a scale per output channel, whole; but a flat packed weight is divided
        return (shape[0], up(shape[0], ranks)) if _flat(shape) else None
    at = axes.find("i" if split == "columns" else "o")
    if at < 0 or at >= len(shape):
        return None
    size = shape[at]
    if size <= 1:
        return None
    if split == "vocabulary":
        return size, up(up(size, VOCABULARY_PADDING) * VOCABULARY_PADDING, ranks) if axes[0] == "o" else up(size, ranks)
    if split == "kv_rows" and sharding.kv_heads and sharding.kv_heads < ranks:
        return size, up(size, sharding.kv_heads)
    return size, up(size, ranks)


def _unordered_scale(placement: Placement, sharding: Sharding) -> bool:
    return sharding.activation_order and placement.leaf.kind in ("scale", "zero_point")


def _flat(shape: tuple[int, ...]) -> bool:
    """A bitsandbytes weight: all codes in one column, far longer than any output dimension."""
    return len(shape) == 2 and shape[1] == 1 and shape[0] >= 1 << 20


def _expert_fraction(sharding: Sharding) -> float:
    if sharding.local_experts is None or not sharding.experts:
        return 1.0
    return sharding.local_experts / sharding.experts


def _expert_bytes(total: int, shape: tuple[int, ...], axes: str, placement: Placement, sharding: Sharding) -> float:
    if sharding.local_experts is not None:
        return total * _expert_fraction(sharding)
    ranks = sharding.expert_ranks
    down = placement.module.endswith(("down_proj", ".w2"))
    at = axes.find("i" if down else "o")
    if at < 0 or at >= len(shape) or shape[at] <= 1 or (down and _unordered_scale(placement, sharding)):
        return total
    if placement.fused:
        return up(total, ranks)  # the stored order of the last two dimensions differs between builds
    return total * up(shape[at], ranks) / shape[at]


def _swizzle_padding(shape: tuple[int, ...], divided: tuple[int, int], split: str) -> float:
    """Block scales of NVFP4 are laid out in tiles of 128 rows and 4 columns on cards with FP4 units."""
    rows, columns = (shape[0], divided[1]) if split == "columns" else (divided[1], shape[-1])
    return (up(rows, 128) * 128 * up(columns, 4) * 4) / (rows * columns)
