"""Configuration files of every supported family, flat and nested, and hostile ones."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.facts import Processor, TextConfig, VisionConfig
from loadmaster.core.modelconfig import config_findings, processor, quantization, text_config, vision_config
from loadmaster.edge.sample import sample_config, sample_names


def test_qwen3_5_mixture() -> None:
    config = sample_config("Qwen3.5-35B-A3B")
    text = text_config(config)
    assert (text.hidden_size, text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads) == (
        2048,
        40,
        16,
        2,
    )
    assert (text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size) == (256, 8, 512)
    assert (text.head_dim, text.rotary_dim, text.rope_theta) == (256, 64, 10_000_000)
    assert text.uses_mrope
    assert text.attn_output_gate
    assert text.dtype == "bfloat16"
    assert text.tie_word_embeddings is False
    assert text.num_mtp_layers == 1
    assert Counter(text.layer_types) == {"linear_attention": 30, "full_attention": 10}
    assert text.layer_types[3] == "full_attention"
    assert text.mamba_ssm_dtype == "float32"
    assert vision_config(config) == VisionConfig(
        model_type="qwen3_5_moe_vision",
        depth=27,
        hidden_size=1152,
        intermediate_size=4304,
        num_heads=16,
        in_channels=3,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=2048,
        num_position_embeddings=2304,
    )
    assert config_findings(config) == ()


def test_gemma_3_takes_class_defaults() -> None:
    config = sample_config("Gemma-3-12B")
    text = text_config(config)
    assert (text.vocab_size, text.head_dim, text.max_position_embeddings) == (262208, 256, 131072)
    assert text.tie_word_embeddings is True
    assert text.sliding_window == 1024
    assert Counter(text.layer_types) == {"sliding_attention": 40, "full_attention": 8}
    assert text.layer_types[5] == "full_attention"
    vision = vision_config(config)
    assert vision is not None
    assert (vision.image_size, vision.patch_size, vision.tokens_per_image, vision.depth) == (896, 14, 256, 27)
    limits = processor(None, None, config)
    assert limits is not None
    assert limits.min_pixels == limits.max_pixels == 896 * 896


def test_deepseek_v3() -> None:
    text = text_config(sample_config("DeepSeek-V3"))
    assert (text.kv_lora_rank, text.q_lora_rank, text.qk_rope_head_dim, text.qk_nope_head_dim, text.v_head_dim) == (
        512, 1536, 64, 128, 128,
    )  # fmt: skip
    assert (text.num_experts, text.first_k_dense_replace, text.shared_expert_intermediate_size) == (256, 3, 2048)
    assert text.rotary_dim == 64
    assert text.num_mtp_layers == 1


def test_flat_and_nested_files_say_the_same() -> None:
    nested = sample_config("Qwen2.5-VL-7B")
    flat = {**nested.pop("text_config"), **nested}
    assert flat["model_type"] == "qwen2_5_vl"
    first, second = text_config(sample_config("Qwen2.5-VL-7B")), text_config(flat)
    assert {f: getattr(first, f) for f in TextConfig.__struct_fields__ if f != "model_type"} == {
        f: getattr(second, f) for f in TextConfig.__struct_fields__ if f != "model_type"
    }


def test_qwen2_vl_names_the_tower_otherwise() -> None:
    config = {
        "model_type": "qwen2_vl",
        "hidden_size": 3584,
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "mlp_ratio": 4,
            "spatial_patch_size": 14,
        },
    }
    vision = vision_config(config)
    assert vision is not None
    assert (vision.hidden_size, vision.out_hidden_size, vision.intermediate_size, vision.patch_size) == (
        1280,
        3584,
        5120,
        14,
    )


@pytest.mark.parametrize(
    ("config", "kinds", "window"),
    [
        ({"model_type": "mistral", "num_hidden_layers": 2}, {"sliding_attention": 2}, 4096),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}, {"full_attention": 2}, None),
        ({"model_type": "qwen3", "num_hidden_layers": 2, "sliding_window": 4096}, {"full_attention": 2}, None),
        (
            {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 1},
            {"full_attention": 1, "sliding_attention": 3},
            4096,
        ),
        (
            {"num_hidden_layers": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            {"sliding_attention": 1, "full_attention": 1},
            8,
        ),
        ({"model_type": "llama", "num_hidden_layers": 3}, {"full_attention": 3}, None),
        ({"model_type": "phi3", "num_hidden_layers": 3, "sliding_window": 2047}, {"sliding_attention": 3}, 2047),
    ],
)
def test_layer_kinds(config: dict[str, Any], kinds: dict[str, int], window: int | None) -> None:
    text = text_config(config)
    assert Counter(text.layer_types) == kinds
    assert text.sliding_window == window


def test_spellings_and_derived_heads() -> None:
    text = text_config(
        {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "torch_dtype": "torch.float16"}
    )
    assert (text.hidden_size, text.num_hidden_layers, text.head_dim, text.num_key_value_heads) == (768, 12, 64, 12)
    assert (text.max_position_embeddings, text.dtype) == (1024, "float16")
    mixtral = text_config({"model_type": "mixtral", "intermediate_size": 14336, "num_local_experts": 8})
    assert (mixtral.num_experts, mixtral.moe_intermediate_size) == (8, 14336)


def test_rope_parameters_of_transformers_5() -> None:
    text = text_config({"head_dim": 128, "rope_parameters": {"rope_theta": 5e6, "rope_type": "yarn", "factor": 4.0}})
    assert text.rope_theta == 5e6
    assert text.rope_scaling == {"rope_theta": 5e6, "rope_type": "yarn", "factor": 4.0}
    kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert text_config({"rope_parameters": kinds}).rope_theta == 1e6


# ------------------------------------------------------------------------------------------------------ processor


def test_processor_limits_and_their_source() -> None:
    config = sample_config("Qwen3.5-9B")
    file = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    }
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"longest_edge": 25165824, "shortest_edge": 4096}}
    expected = Processor(
        image_processor_type="Qwen2VLImageProcessorFast",
        min_pixels=65536,
        max_pixels=16777216,
        video_max_pixels=25165824,
        source="preprocessor_config.json",
    )
    assert processor(file, video, config) == expected
    nested = processor({"image_processor": file, "video_processor": video}, None, config)
    assert nested is not None
    assert (nested.max_pixels, nested.video_max_pixels, nested.source) == (16777216, 25165824, "processor_config.json")
    both = processor({**file, "min_pixels": 3136, "max_pixels": 1003520}, None, config)
    assert both is not None
    assert (both.min_pixels, both.max_pixels) == (3136, 1003520)
    bare = processor({"image_processor_type": "Qwen2VLImageProcessor"}, None, config)
    assert bare is not None
    assert (bare.max_pixels, bare.source) == (1003520, "class default")
    absent = processor(None, None, config)
    assert absent is not None
    assert (absent.max_pixels, absent.source) == (16777216, "published with this model_type")
    assert processor(None, None, sample_config("Llama-3.1-8B")) is None


def test_edges_of_other_processors_are_no_areas() -> None:
    clip = processor({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}}, None, {})
    assert clip is not None
    assert (clip.min_pixels, clip.max_pixels) == (None, None)


# --------------------------------------------------------------------------------------------------- quantisation


@pytest.mark.parametrize(
    ("declared", "label", "fields"),
    [
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True}}
                },
                "ignore": ["lm_head"],
            },
            "compressed-tensors w4 g32",
            {"bits": 4, "group_size": 32, "zero_point": False, "format": "pack-quantized", "ignore": ("lm_head",)},
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {
                    "g": {
                        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
                    }
                },
            },
            "compressed-tensors fp8 block 128x128",
            {"bits": 8, "block_shape": (128, 128), "group_size": None},
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {
                    "g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}}
                },
            },
            "compressed-tensors nvfp4 g16",
            {"bits": 4, "group_size": 16},
        ),
        (
            {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 128,
                "zero_point": True,
                "modules_to_not_convert": ["visual"],
            },
            "awq w4 g128",
            {"zero_point": True, "symmetric": False, "ignore": ("visual",)},
        ),
        (
            {
                "quant_method": "gptq",
                "bits": 8,
                "group_size": -1,
                "sym": True,
                "desc_act": True,
                "dynamic": {"-:.*attn.*": {}},
            },
            "gptq w8 per channel act-order",
            {"group_size": None, "desc_act": True, "ignore": (".*attn.*",)},
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 block 128x128", {"block_shape": (128, 128)}),
        ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, "fp8 per tensor", {"ignore": ("lm_head",)}),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt nvfp4 g16", {"bits": 4, "group_size": 16}),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "modelopt fp8", {"bits": 8}),
        ({"quant_method": "mxfp4"}, "mxfp4 g32", {"bits": 4, "group_size": 32}),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "bitsandbytes nf4",
            {"method": "bitsandbytes", "bits": 4},
        ),
        (
            {
                "quant_method": "intel/auto-round",
                "bits": 4,
                "group_size": 64,
                "sym": True,
                "packing_format": "auto_round:auto_gptq",
            },
            "auto-round w4 g64",
            {"method": "auto-round"},
        ),
        ({"quant_method": "torchao", "quant_type": "int4wo"}, "torchao int4wo", {"method": "torchao"}),
    ],
)
def test_declared_quantisation(declared: dict[str, Any], label: str, fields: dict[str, Any]) -> None:
    found = quantization({"quantization_config": declared})
    assert found.label == label
    assert found.declared is not None
    assert {name: getattr(found, name) for name in fields} == fields


def test_quantisation_elsewhere() -> None:
    assert quantization({}).label is None
    own_file = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    modelopt = quantization({}, own_file)
    assert (modelopt.label, modelopt.ignore, modelopt.kv_cache_scheme) == (
        "modelopt nvfp4 g16", ("lm_head",), {"algorithm": "FP8"},
    )  # fmt: skip
    assert quantization({"text_config": {"quantization_config": {"quant_method": "awq", "bits": 4}}}).method == "awq"
    assert quantization({"compression_config": {"config_groups": {}}}).method == "compressed-tensors"


# --------------------------------------------------------------------------------------------------------- hostile


@pytest.mark.parametrize(
    "value",
    ["48", -1, 0, 1 << 70, 10**5000, math.nan, math.inf, 1.5, True, [], {}, [[[]]], "x" * 10_000],
    ids=lambda v: type(v).__name__,
)
def test_hostile_value_is_unknown_and_named(value: Any) -> None:
    config = sample_config("Qwen3.5-35B-A3B")
    config["text_config"]["hidden_size"] = value
    text = text_config(config)
    assert text.hidden_size is None
    assert text.num_hidden_layers == 40
    (finding,) = config_findings(config)
    assert finding.code == "config-invalid"
    assert any("text_config.hidden_size" in (item.text or "") for item in finding.evidence)
    assert all(len(item.text) < 200 for item in finding.evidence)


def test_a_null_is_as_good_as_absent() -> None:
    config = sample_config("Qwen3-8B") | {"sliding_window": None, "head_dim": None}
    assert config_findings(config) == ()
    assert text_config(config).head_dim == 4096 // 32


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.data())
def test_nothing_raises_whatever_stands_in_a_field(data: st.DataObject) -> None:
    config = sample_config(data.draw(st.sampled_from(sample_names())))
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {}}}}
    sections = [
        config,
        config["quantization_config"],
        *(config[key] for key in ("text_config", "vision_config") if key in config),
    ]
    for _ in range(data.draw(st.integers(1, 6))):
        section = data.draw(st.sampled_from(sections))
        section[data.draw(st.sampled_from(sorted(section)))] = data.draw(_json)
    other = data.draw(_json)
    extra = other if isinstance(other, dict) else None
    text_config(config)
    vision_config(config)
    processor(extra, extra, config)
    quantization(config, extra)
    config_findings(config, extra, extra)


@pytest.mark.parametrize("kind", ["llama4_text", "minimax_m2", "phimoe", "olmoe", "jamba"])
def test_an_experts_width_that_is_stated_as_the_layers(kind: str) -> None:
    config = {"model_type": kind, "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 16}
    text = text_config(config)
    assert text.moe_intermediate_size == 1024
    assert text.shared_expert_intermediate_size == (1024 if kind == "llama4_text" else None)
    assert text_config({**config, "num_experts": 0}).moe_intermediate_size is None


def test_a_null_number_of_kv_heads_is_only_known_where_the_class_says() -> None:
    config = {"hidden_size": 2048, "num_attention_heads": 16}
    assert text_config({**config, "model_type": "foo"}).num_key_value_heads == 16
    assert text_config({**config, "model_type": "foo", "num_key_value_heads": None}).num_key_value_heads is None
    assert text_config({**config, "model_type": "llama", "num_key_value_heads": None}).num_key_value_heads == 16


def test_the_letters_of_nemotron_h() -> None:
    config = {"model_type": "nemotron_h", "num_hidden_layers": 6, "hybrid_override_pattern": "M-M*ME"}
    assert text_config(config).layer_types == ("mamba", "mlp", "mamba", "full_attention", "mamba", "moe")
    odd = {**config, "hybrid_override_pattern": "M?"}
    assert text_config(odd).layer_types == ()
    assert "hybrid_override_pattern" in config_findings(odd)[0].evidence[0].text
