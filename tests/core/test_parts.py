"""Names into parts, and the scheme of a weight from what is stored beside it."""

from __future__ import annotations

from typing import Any

import pytest

from loadmaster.core.facts import Quantization, TensorGroup
from loadmaster.core.parts import Module, find_modules, part_of, sum_classes, sum_parts
from loadmaster.core.quantization import quantization
from loadmaster.core.tensorheaders import DTYPE_BITS


def group(name: str, dtype: str, *shape: int, count: int = 1, layers: dict[int, int] | None = None) -> TensorGroup:
    elements = 1
    for side in shape:
        elements *= side
    return TensorGroup(name, dtype, shape, (elements * DTYPE_BITS[dtype] + 7) // 8, count, layers)


def one(declared: Quantization, *groups: TensorGroup) -> Module:
    (module,) = find_modules(groups, declared)
    return module


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "language.embeddings"),
        ("model.language_model.layers.{l}.mlp.gate_proj.weight", "language.mlp"),
        ("model.layers.{l}.mlp.gate.weight", "language.router"),
        ("model.layers.{l}.mlp.gate.e_score_correction_bias", "language.router"),
        ("model.layers.{l}.mlp.router.bias", "language.router"),
        ("model.layers.{l}.block_sparse_moe.gate.weight", "language.router"),
        ("model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight", "language.experts"),
        ("model.layers.{l}.mlp.experts.gate_up_proj_blocks", "language.experts"),
        ("model.layers.{l}.mlp.shared_experts.up_proj.weight", "language.shared_experts"),
        ("model.layers.{l}.mlp.shared_expert_gate.weight", "language.shared_experts"),
        ("model.layers.{l}.self_attn.q_norm.weight", "language.attention"),
        ("model.layers.{l}.self_attn.kv_a_layernorm.weight", "language.attention"),
        ("model.layers.{l}.linear_attn.A_log", "language.linear_attention"),
        ("model.layers.{l}.linear_attn.norm.weight", "language.linear_attention"),
        ("model.layers.{l}.post_feedforward_layernorm.weight", "language.norms"),
        ("language_model.model.norm.weight", "language.norms"),
        ("lm_head.weight", "language.lm_head"),
        ("language_model.lm_head.weight", "language.lm_head"),
        ("visual.blocks.{l}.attn.qkv.weight", "vision"),
        ("visual.blocks.{l}.mlp.gate_proj.weight", "vision"),
        ("vision_tower.vision_model.encoder.layers.{l}.self_attn.q_proj.bias", "vision"),
        ("model.vision_tower.patch_conv.weight", "vision"),
        ("model.visual.merger.linear_fc1.weight", "projector"),
        ("model.visual.deepstack_merger_list.0.norm.weight", "projector"),
        ("multi_modal_projector.linear_1.weight", "projector"),
        ("mtp.layers.{l}.mlp.experts.{e}.up_proj.weight", "mtp"),
        ("model.layers.{l}.eh_proj.weight", "mtp"),
        ("something.else", "other"),
    ],
)
def test_parts(name: str, part: str) -> None:
    assert part_of(name) == part


def compressed(**weights: Any) -> Quantization:
    groups = {"group_0": {"weights": weights}}
    return quantization({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})


P = "model.layers.{l}.mlp.up_proj"


@pytest.mark.parametrize(
    ("declared", "stored", "scheme", "parameters", "layout"),
    [
        (Quantization(), [("weight", "BF16", 64, 256)], "bfloat16", 64 * 256, "plain"),
        (
            compressed(num_bits=4, group_size=32, strategy="group"),
            [("weight_packed", "I32", 64, 32), ("weight_scale", "BF16", 64, 8), ("weight_shape", "I64", 2)],
            "w4 g32", 64 * 256, "packed-integer",
        ),
        (
            compressed(num_bits=8, group_size=32, strategy="group"),
            [("weight_packed", "I32", 64, 64), ("weight_scale", "BF16", 64, 8), ("weight_zero_point", "I32", 16, 8)],
            "w8 g32 zero points", 64 * 256, "packed-integer",
        ),
        (
            compressed(num_bits=8, strategy="channel"),
            [("weight_packed", "I32", 64, 64), ("weight_scale", "BF16", 64, 1)],
            "w8 per channel", 64 * 256, "packed-integer",
        ),
        (
            Quantization(method="awq"),
            [("qweight", "I32", 256, 8), ("qzeros", "I32", 2, 8), ("scales", "F16", 2, 64)],
            "w4 g128 zero points", 64 * 256, "awq",
        ),
        (
            Quantization(method="gptq"),
            [("qweight", "I32", 32, 64), ("qzeros", "I32", 8, 8), ("scales", "F16", 8, 64), ("g_idx", "I32", 256)],
            "w4 g32", 64 * 256, "gptq",
        ),
        (
            Quantization(method="gptq"),
            [("qweight", "I32", 64, 64), ("qzeros", "I32", 8, 16), ("scales", "F16", 8, 64)],
            "w8 g32", 64 * 256, "gptq",
        ),
        (
            Quantization(method="fp8"),
            [("weight", "F8_E4M3", 320, 256), ("weight_scale_inv", "BF16", 3, 2)],
            "fp8 block 128x128", 320 * 256, "fp8",
        ),
        (Quantization(), [("weight", "F8_E4M3", 64, 256), ("weight_scale", "F32")], "fp8 per tensor", 64 * 256, "fp8"),
        (
            Quantization(),
            [("weight", "F8_E4M3", 64, 256), ("weight_scale", "F32", 64, 1)],
            "fp8 per channel", 64 * 256, "fp8",
        ),
        (
            Quantization(),
            [("weight", "I8", 64, 256), ("weight_scale", "BF16", 64, 1)],
            "int8 per channel", 64 * 256, "int8",
        ),
        (
            compressed(num_bits=4, type="float", group_size=16),
            [("weight_packed", "U8", 64, 128), ("weight_scale", "F8_E4M3", 64, 16), ("weight_global_scale", "F32", 1)],
            "nvfp4 g16", 64 * 256, "packed-float",
        ),
        (
            Quantization(method="modelopt"),
            [("weight", "U8", 64, 128), ("weight_scale", "F8_E4M3", 64, 16), ("weight_scale_2", "F32")],
            "nvfp4 g16", 64 * 256, "float4",
        ),
        (
            Quantization(method="bitsandbytes"),
            [("weight", "U8", 8192, 1), ("weight.absmax", "F32", 256), ("weight.quant_map", "F32", 16)],
            "4 bits, blocks of 64", 64 * 256, "bitsandbytes",
        ),
        (Quantization(), [("weight", "F8_E4M3", 64, 256)], "fp8 without scales", 64 * 256, "fp8"),
    ],
)  # fmt: skip
def test_schemes(
    declared: Quantization, stored: list[tuple[Any, ...]], scheme: str, parameters: int, layout: str
) -> None:
    groups = [group(f"{P}.{suffix}", dtype, *shape) for suffix, dtype, *shape in stored]
    module = one(declared, *groups)
    assert (module.scheme, module.parameters, module.layout) == (scheme, parameters, layout)
    assert module.bytes == sum(stored.total_bytes for stored in groups)


def test_mxfp4_experts() -> None:
    stem = "model.layers.{l}.mlp.experts.gate_up_proj"
    blocks, scales = group(f"{stem}_blocks", "U8", 32, 64, 4, 16), group(f"{stem}_scales", "U8", 32, 64, 4)
    module = one(Quantization(method="mxfp4"), blocks, scales)
    assert (module.scheme, module.parameters) == ("mxfp4 g32", 32 * 64 * 128)


def test_two_widths_in_one_checkpoint_are_told_apart_by_their_scales() -> None:
    groups = {
        "a": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}},
        "b": {"weights": {"num_bits": 8, "group_size": 128, "strategy": "group"}},
    }
    declared = quantization({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})
    four, eight = find_modules(
        [
            group("model.layers.{l}.mlp.up_proj.weight_packed", "I32", 64, 32),
            group("model.layers.{l}.mlp.up_proj.weight_scale", "BF16", 64, 8),
            group("model.layers.{l}.self_attn.q_proj.weight_packed", "I32", 64, 64),
            group("model.layers.{l}.self_attn.q_proj.weight_scale", "BF16", 64, 2),
        ],
        declared,
    )
    assert (four.scheme, eight.scheme) == ("w4 g32", "w8 g128")
    assert four.parameters == eight.parameters == 64 * 256


def test_layers_behind_the_decoder_are_the_prediction_head() -> None:
    groups = [group(f"{P}.weight", "BF16", 4, 4, count=5, layers=dict.fromkeys(range(5), 1))]
    sizes = {part.name: part.tensors for part in sum_parts(find_modules(groups, Quantization(), 4))}
    assert sizes == {"language.mlp": 4, "mtp": 1}


def test_sums_hold_every_byte_once() -> None:
    groups = [
        group(f"{P}.weight", "F8_E4M3", 64, 256, count=3),
        group(f"{P}.weight", "BF16", 64, 256, count=1),
        group(f"{P}.weight_scale", "F32", 64, 1, count=3),
        group("model.layers.{l}.self_attn.k_scale", "F32", count=4),
        group("model.norm.weight", "BF16", 256),
    ]
    modules = find_modules(groups, Quantization(method="fp8"))
    total = sum(stored.total_bytes for stored in groups)
    assert sum(part.bytes for part in sum_parts(modules)) == total
    assert sum(entry.bytes for entry in sum_classes(modules)) == total
    assert sum(part.tensors for part in sum_parts(modules)) == 12
    assert {(entry.module_class, entry.scheme) for entry in sum_classes(modules)} == {
        ("mlp", "fp8 per channel"),
        ("mlp", "bfloat16"),
        ("attention", "scales without a weight"),
        ("norms", "bfloat16"),
    }
