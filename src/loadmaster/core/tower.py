"""The tensors that a vision tower holds while one picture goes through it, in order.

Each function returns allocator steps for the blocks of a tower as the engine runs them: what is alive at the same
time decides the peak, and which sizes meet decides what the allocator reserves. Names of tensors are local.
Sources: vllm/model_executor/models/{qwen3_vl,qwen2_5_vl,siglip}.py and vision.py, 0.17.0-0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from loadmaster.core.allocator import Step
from loadmaster.core.facts import VisionConfig

_BLOCKS = 2  # after two equal blocks every tensor finds the segment of its predecessor; deepstack adds blocks


class Tower(Struct, frozen=True, kw_only=True):
    """Shape of a tower on one rank. ``split``: ranks that share its matrices (1 in ``data`` mode)."""

    hidden: int
    intermediate: int
    features: int  # numbers in one patch of pixels
    merge: int  # patches of a token
    output: int
    split: int = 1
    copies_pixels: bool = False  # data mode: each rank cuts its own pictures out first
    gated: bool = False
    fused_norm: bool = False  # the attention's output stays alive beside its sum with the input
    adds_positions: bool = True
    rotary: bool = True
    deepstack: int = 0
    element_bytes: int = 2
    known: bool = True


def tower_of(vision: VisionConfig, split: int, data_mode: bool, element_bytes: int) -> Tower | None:
    """The tower's shape from its configuration; None when sizes are missing. ``split``: tensor-parallel ranks."""
    if vision.hidden_size is None or vision.patch_size is None:
        return None
    kind = vision.model_type or ""
    merge = (vision.spatial_merge_size or 1) ** 2
    temporal = vision.temporal_patch_size or 1
    qwen = "qwen" in kind
    return Tower(
        hidden=vision.hidden_size,
        intermediate=vision.intermediate_size or 4 * vision.hidden_size,
        features=(vision.in_channels or 3) * temporal * vision.patch_size**2,
        merge=merge,
        output=vision.out_hidden_size or vision.hidden_size,
        split=1 if data_mode else split,
        copies_pixels=data_mode and split > 1,
        gated=kind.startswith("qwen2_5"),
        fused_norm=kind.startswith("qwen2_5"),
        adds_positions=not kind.startswith("qwen2"),
        rotary=qwen,
        deepstack=len(vision.deepstack_layers),
        element_bytes=element_bytes,
        known=qwen or "siglip" in kind,
    )


def encode(tower: Tower, patches: int, prefix: str) -> tuple[list[Step], str, int]:
    """Steps of encoding one picture of ``patches`` patches; the name and bytes of the output, which stays alive."""
    output = f"{prefix}output"
    size = patches // tower.merge * tower.output * (1 + tower.deepstack) * tower.element_bytes
    return list(_encode(tower, patches, prefix, output, size)), output, size


def _encode(tower: Tower, patches: int, p: str, output: str, output_size: int) -> Iterator[Step]:
    e, s = tower.element_bytes, patches
    wide = s * tower.hidden * e
    narrow = wide // tower.split
    fixed = ["pixels", "x"]
    yield f"{p}pixels", s * tower.features * e
    if tower.copies_pixels:
        yield f"{p}local pixels", s * tower.features * e
        fixed.append("local pixels")
    yield f"{p}embedded", wide
    if tower.rotary:
        yield f"{p}rotary", s * 80 * e  # cosines and sines of half a head
        fixed.append("rotary")
    if tower.adds_positions:
        yield f"{p}position parts", wide
        yield f"{p}positions", wide
        yield f"{p}position parts", None
        yield f"{p}x", wide
        yield f"{p}embedded", None
        fixed.append("positions")
    else:
        yield f"{p}x", wide
        yield f"{p}embedded", None
    kept: list[str] = []
    for block in range(_BLOCKS + tower.deepstack):
        yield from _attention(tower, p, wide, narrow)
        yield from _mlp(tower, p, wide, s * tower.intermediate * e // tower.split)
        for name in ("x", "middle", "reduced of attention", "projected of attention"):
            yield f"{p}{name}", None
        # The result takes over the name of the block's input.
        yield f"{p}next", wide
        yield f"{p}sum", None
        yield f"{p}x", wide
        yield f"{p}next", None
        if block < tower.deepstack:
            kept.append(f"{p}deep{block}")
            yield from _merger(tower, p, s, kept[-1])
    yield from _merger(tower, p, s, f"{p}merged")
    yield output, output_size
    for name in (f"{p}merged", *kept, *(f"{p}{name}" for name in fixed)):
        yield name, None


def _attention(tower: Tower, p: str, wide: int, narrow: int) -> Iterator[Step]:
    """Norm, qkv, rotated copies of q and k, attention, projection (and its sum over the ranks), residual."""
    yield f"{p}normed", wide
    yield f"{p}qkv", 3 * narrow
    if tower.rotary:
        yield f"{p}qk", 2 * narrow
        yield f"{p}rotated", 2 * narrow
    yield f"{p}context", narrow
    yield f"{p}projected of attention", wide
    result = "projected of attention"
    if tower.split > 1:
        yield f"{p}reduced of attention", wide
        result = "reduced of attention"
    for name in ("qkv", "qk", "rotated", "context"):
        yield f"{p}{name}", None
    if tower.split > 1:
        yield f"{p}projected of attention", None
    yield f"{p}normed", None
    yield f"{p}middle", wide
    if not tower.fused_norm:
        yield f"{p}{result}", None


def _mlp(tower: Tower, p: str, wide: int, inner: int) -> Iterator[Step]:
    """Norm, first projection, activation, second projection (and its sum over the ranks), residual."""
    yield f"{p}normed", wide
    yield f"{p}inner", inner * (2 if tower.gated else 1)
    yield f"{p}activated", inner
    if not tower.gated:
        yield f"{p}inner", None
    yield f"{p}down", wide
    if tower.split > 1:
        yield f"{p}reduced", wide
        yield f"{p}down", None
    for name in ("inner", "activated", "normed"):
        yield f"{p}{name}", None
    yield f"{p}sum", wide
    yield f"{p}{'reduced' if tower.split > 1 else 'down'}", None


def _merger(tower: Tower, p: str, patches: int, output: str) -> Iterator[Step]:
    """Norm over the patches of a token, two projections to the language model's width."""
    e = tower.element_bytes
    wide = patches * tower.hidden * e
    out = patches // tower.merge * tower.output * e
    yield f"{p}normed", wide
    yield f"{p}inner", wide // tower.split
    yield f"{p}activated", wide // tower.split
    yield f"{p}inner", None
    if tower.split > 1:
        yield f"{p}down", out
        yield output, out
        yield f"{p}down", None
    else:
        yield output, out
    yield f"{p}activated", None
    yield f"{p}normed", None
