"""Configurations of public models, for tests that compare with public logs. Fields as in their config.json."""

from __future__ import annotations

from typing import Any

from loadmaster.core import modelconfig
from loadmaster.core.facts import ModelFacts
from loadmaster.core.quantization import quantization

Config = dict[str, Any]


def facts(config: Config) -> ModelFacts:
    """The model as it is known by its configuration alone."""
    return ModelFacts(
        name="public",
        format="config",
        architecture=config["architectures"][0],
        text=modelconfig.text_config(config),
        vision=modelconfig.vision_config(config),
        quantization=quantization(config),
        config=config,
    )


def _dense(architecture: str, hidden: int, wide: int, layers: int, heads: int, kv: int, vocabulary: int) -> Config:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


LLAMA_3_8B: Config = {
    **_dense("LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128256),
    "model_type": "llama",
    "max_position_embeddings": 8192,
}
LLAMA_3_1_8B: Config = {
    **LLAMA_3_8B,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN_2_5_3B: Config = {
    **_dense("Qwen2ForCausalLM", 2048, 11008, 36, 16, 2, 151936),
    "model_type": "qwen2",
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
QWEN_2_5_32B: Config = {
    **_dense("Qwen2ForCausalLM", 5120, 27648, 64, 40, 8, 152064),
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
}
QWEN_3_30B_A3B: Config = {
    **_dense("Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 151936),
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 262144,
}
QWEN_3_VL_2B: Config = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        **_dense("", 2048, 6144, 28, 16, 8, 151936),
        "model_type": "qwen3_vl_text",
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 262144,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
QWEN_3_VL_235B: Config = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "tie_word_embeddings": False,
    "text_config": {
        **_dense("", 4096, 12288, 94, 64, 4, 151936),
        "model_type": "qwen3_vl_moe_text",
        "head_dim": 128,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 262144,
    },
}


def _qwen_2_5_vl(text: Config, out: int) -> Config:
    return {
        **text,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "max_position_embeddings": 128000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": out,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }


QWEN_2_5_VL_3B = _qwen_2_5_vl(QWEN_2_5_3B, 2048)
QWEN_2_5_VL_7B = _qwen_2_5_vl(_dense("Qwen2ForCausalLM", 3584, 18944, 28, 28, 4, 152064), 3584)

GEMMA_3_27B: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        **_dense("", 5376, 21504, 62, 32, 16, 262208),
        "model_type": "gemma3_text",
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}
GEMMA_3_27B_AWQ: Config = {
    **GEMMA_3_27B,
    "quantization_config": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["vision_tower", "multi_modal_projector", "lm_head"],
    },
}

DEEPSEEK_V3: Config = {
    **_dense("DeepseekV3ForCausalLM", 7168, 18432, 61, 128, 128, 129280),
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}


def qwen_3_5(
    hidden: int, layers: int, heads: int, kv: int, value_heads: int, *, wide: int = 0, experts: int = 0, moe: int = 0
) -> Config:
    """Qwen3.5 and 3.6: three gated delta net layers before each full attention layer."""
    feed_forward: Config = {"intermediate_size": wide}
    if experts:
        feed_forward = {
            "num_experts": experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": moe,
            "shared_expert_intermediate_size": moe,
        }
    kind = "Moe" if experts else ""
    return {
        "architectures": [f"Qwen3_5{kind}ForConditionalGeneration"],
        "model_type": f"qwen3_5{'_moe' if experts else ''}",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": f"qwen3_5{'_moe' if experts else ''}_text",
            "dtype": "bfloat16",
            "vocab_size": 248320,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": 256,
            "attn_output_gate": True,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": value_heads,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
            },
            "mtp_num_hidden_layers": 1,
            "tie_word_embeddings": False,
            **feed_forward,
        },
        "vision_config": {
            "model_type": "qwen3_5_vision",
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [],
        },
    }


QWEN_3_5_9B = qwen_3_5(4096, 32, 16, 4, 32, wide=12288)
QWEN_3_5_27B = qwen_3_5(5120, 64, 24, 4, 48, wide=17408)
QWEN_3_5_35B_A3B = qwen_3_5(2048, 40, 16, 2, 32, experts=256, moe=512)
QWEN_3_5_35B_GPTQ: Config = {
    **QWEN_3_5_35B_A3B,
    "quantization_config": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "dynamic": {
            "lm_head": {},
            "-:.*attn.*": {},
            "-:.*mtp.*": {},
            "-:.*shared_expert.*": {},
            "-:.*visual.*": {},
        },
    },
}
QWEN_3_5_35B_W4: Config = {
    **QWEN_3_5_35B_A3B,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                    "dynamic": False, "actorder": None,
                },
            }
        },
        "ignore": ["lm_head", "re:.*attn.*", "re:.*shared_expert.*", "re:.*mlp.gate$", "re:.*visual.*", "re:mtp.fc"],
    },
}  # fmt: skip
