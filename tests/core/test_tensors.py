"""Tensors computed from a configuration against the published numbers of parameters and file sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec import structs

from loadmaster.core.facts import GIB, ModelFacts, Quantization, Settings
from loadmaster.core.quantization import quantization
from loadmaster.core.shards import shard_weights
from loadmaster.core.storedlinear import Exclusions, stored_linear
from loadmaster.core.tensors import synthesise
from tests.core import published
from tests.core.published import facts


def parameters(model: ModelFacts, prefix: str = "") -> float:
    return sum(math.prod(g.shape) * g.count for g in synthesise(model) if g.name.startswith(prefix)) / 1e9


# Billions of parameters: model cards, and the totals that the hub shows for the safetensors files.
@pytest.mark.parametrize(
    ("config", "prefix", "billions"),
    [
        (published.LLAMA_3_8B, "", 8.030),  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
        (published.QWEN_2_5_3B, "", 3.086),  # https://huggingface.co/Qwen/Qwen2.5-3B
        (published.QWEN_2_5_32B, "", 32.764),  # https://huggingface.co/Qwen/Qwen2.5-32B-Instruct
        (published.QWEN_3_30B_A3B, "", 30.532),  # https://huggingface.co/Qwen/Qwen3-30B-A3B
        (published.QWEN_3_VL_2B, "", 2.128),  # https://huggingface.co/Qwen/Qwen3-VL-2B-Instruct
        (published.QWEN_2_5_VL_3B, "", 3.755),  # https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct
        (published.QWEN_2_5_VL_7B, "", 8.292),  # https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct
        (published.GEMMA_3_27B, "", 27.432),  # https://huggingface.co/google/gemma-3-27b-it
        (published.QWEN_3_5_35B_A3B, "mtp.", 0.845),
        (published.QWEN_3_5_35B_A3B, "model.visual.", 0.447),
    ],
)
def test_numbers_of_parameters(config: published.Config, prefix: str, billions: float) -> None:
    assert parameters(facts(config), prefix) == pytest.approx(billions, abs=0.0006)


def test_deepseek_with_and_without_its_prediction_head() -> None:
    # https://huggingface.co/deepseek-ai/DeepSeek-V3: 685B on the hub, 671B of them the main model
    plain = {key: value for key, value in published.DEEPSEEK_V3.items() if key != "quantization_config"}
    assert parameters(facts(plain)) == pytest.approx(684.5, abs=0.2)
    assert parameters(facts({**plain, "num_nextn_predict_layers": 0})) == pytest.approx(671.0, abs=0.2)


def test_gptq_build_leaves_all_but_the_experts_plain() -> None:
    # https://huggingface.co/Qwen/Qwen3.5-35B-A3B-GPTQ-Int4: 22.7 GiB of weights, vision and prediction head in 16 bits
    size = sum(group.total_bytes for group in synthesise(facts(published.QWEN_3_5_35B_GPTQ)))
    assert size / GIB == pytest.approx(22.73, abs=0.01)


def test_compressed_tensors_build() -> None:
    size = sum(group.total_bytes for group in synthesise(facts(published.QWEN_3_5_35B_W4)))
    assert size / GIB == pytest.approx(22.76, abs=0.01)


def test_what_cannot_be_told_is_not_made_up() -> None:
    assert synthesise(ModelFacts(name="x", architecture="NobodysForCausalLM")) == ()
    assert synthesise(ModelFacts(name="x", architecture="LlamaForCausalLM")) == ()
    odd = structs.replace(facts(published.LLAMA_3_8B), quantization=Quantization(method="unheard-of"))
    assert synthesise(odd) == ()


# ------------------------------------------------------------------------------------------ formats

OUT, INTO = 1024, 2048
FORMATS: list[tuple[dict[str, Any] | None, float]] = [
    # bytes per parameter in the file
    (None, 2),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 0.5 + 2 / 128 + 0.5 / 128),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 0.5 + 2 / 128 + 0.5 / 128 + 4 / OUT),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 16384),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 1 + 4 / (OUT * INTO)),
]


def compressed(format_: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": format_}},
        "ignore": [],
    }


FORMATS += [
    (
        compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
        0.5 + 2 / 32,
    ),
    (
        compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
        0.5 + 2 / 32 + 0.5 / 32,
    ),
    (compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"), 1 + 2 / INTO),
    (compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"), 1 + 2 / INTO),
    (compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"), 1 + 2 / INTO),
    (
        compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16
        ),
        0.5 + 1 / 16,
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, 0.5 + 1 / 16),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 0.5 + 1 / 64),
]


def stored_bytes(declared: dict[str, Any] | None) -> float:
    sizes = {"I32": 4, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1}
    stored = stored_linear(quantization({"quantization_config": declared} if declared else {}), OUT, INTO, "BF16")
    assert stored is not None
    return sum(math.prod(shape) * sizes[dtype] for _, dtype, shape in stored)


@pytest.mark.parametrize(("declared", "per_parameter"), FORMATS, ids=str)
def test_bytes_of_a_stored_layer(declared: dict[str, Any] | None, per_parameter: float) -> None:
    assert stored_bytes(declared) == pytest.approx(per_parameter * OUT * INTO, abs=32)


@pytest.mark.parametrize(("declared", "per_parameter"), FORMATS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_of_a_loaded_model(declared: dict[str, Any] | None, per_parameter: float, ranks: int) -> None:
    """Two ranks hold the bytes of one: weights, scales and zero points all divide with the layer."""
    config = {**published.LLAMA_3_8B, "num_hidden_layers": 2}
    if declared:
        config["quantization_config"] = declared
    model = facts(config)
    weights = shard_weights(model, Settings(version="0.33", tensor_parallel_size=ranks))[0]
    loaded = weights.detail["mlp"] * ranks
    linear = 2 * 3 * 4096 * 14336
    method = (declared or {}).get("quant_method")
    if method == "gptq":  # zero points and activation order are freed
        per_parameter = 0.5 + 2 / 128
    if method == "bitsandbytes":  # scales expanded
        per_parameter = 0.5 + 4 / 64
    assert loaded == pytest.approx(per_parameter * linear, rel=0.001)


def test_names_left_out_of_quantisation() -> None:
    left = Exclusions(
        Quantization(
            ignore=("lm_head", "re:.*attn.*", "visual", "model.layers.3.mlp.gate_proj", "-:.*mtp.*"),
            declared={"dynamic": {"-:.*shared.*": {}, "lm_head": {}}},
        )
    )
    for name in (
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.visual.blocks.0.attn.qkv",
        "mtp.layers.0.mlp.up_proj",
    ):
        assert name in left
    assert "model.layers.3.mlp.gate_proj" in left
    assert "model.layers.4.mlp.gate_proj" not in left
    assert "model.layers.3.mlp.shared_expert.up_proj" in left


def test_a_broken_pattern_excludes_nothing() -> None:
    assert "model.layers.0.mlp.up_proj" not in Exclusions(Quantization(ignore=("re:(", "re:[")))
