"""The table of public models is sound, and names of rebuilt checkpoints find the model that they come from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.facts import ModelFacts
from loadmaster.core.knownmodels import entries, known_model
from loadmaster.core.modelconfig import config_findings


def model(name: str) -> ModelFacts:
    found = known_model(name)
    assert found is not None, name
    return found


# ---------------------------------------------------------------------------------------------- the table


def test_the_table_knows_500_names_and_more() -> None:
    names = [name.lower() for entry in entries() for name in entry.names]
    assert len(names) >= 500
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.names[0])
def test_every_entry_is_plausible(entry) -> None:  # type: ignore[no-untyped-def]
    assert entry.source and all(source.startswith("https://") for source in entry.source)
    assert all(name.count("/") == 1 for name in entry.names)
    assert not config_findings(entry.config)
    for name in entry.names:
        facts = model(name)
        assert facts.config.get("architectures") == entry.config.get("architectures")
        assert facts.format == "known" and not facts.tensors
        text = facts.text
        if text.num_attention_heads and text.num_key_value_heads:
            assert text.num_attention_heads % text.num_key_value_heads == 0
        if text.layer_types:
            assert len(text.layer_types) == text.num_hidden_layers


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "kv_heads", "context"),
    [
        ("Qwen/Qwen3.5-35B-A3B", 40, 2048, 16, 2, 262144),
        ("Qwen/Qwen3-8B", 36, 4096, 32, 8, 40960),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", 94, 4096, 64, 4, 262144),
        ("Qwen/Qwen2.5-VL-72B-Instruct", 80, 8192, 64, 8, 128000),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 32, 4096, 32, 8, 8192),
        ("google/gemma-3-27b-it", 62, 5376, 32, 16, 131072),
        ("deepseek-ai/DeepSeek-R1", 61, 7168, 128, 128, 163840),
        ("OpenGVLab/InternVL3-78B", 80, 8192, 64, 8, 32768),
        ("openai/gpt-oss-120b", 36, 2880, 64, 8, 131072),
    ],
)
def test_known_shapes(name: str, layers: int, hidden: int, heads: int, kv_heads: int, context: int) -> None:
    text = model(name).text
    assert (text.num_hidden_layers, text.hidden_size) == (layers, hidden)
    assert (text.num_attention_heads, text.num_key_value_heads) == (heads, kv_heads)
    assert text.max_position_embeddings == context


def test_a_vision_model_has_its_tower_and_pixel_limits() -> None:
    facts = model("Qwen/Qwen2.5-VL-7B-Instruct")
    assert facts.architecture == "Qwen2_5_VLForConditionalGeneration"
    assert facts.vision is not None and facts.vision.depth == 32
    assert facts.processor is not None and facts.processor.max_pixels == 12845056
    assert not facts.auto_map


def test_remote_code_is_known() -> None:
    assert model("OpenGVLab/InternVL3-8B").auto_map
    assert not model("Qwen/Qwen3.5-35B-A3B").auto_map


def test_native_quantisation_stays() -> None:
    assert model("deepseek-ai/DeepSeek-V3").quantization.block_shape == (128, 128)
    assert model("openai/gpt-oss-20b").quantization.method == "mxfp4"
    assert model("Qwen/Qwen3-8B").quantization.method is None


# ---------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("spelling", "same_as"),
    [
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/data/models/Qwen2.5-VL-7B-Instruct/", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("/data/models/Qwen/Qwen2___5-VL-72B-Instruct", "Qwen/Qwen2.5-VL-72B-Instruct"),
        ("Qwen2___5-VL-72B", "Qwen/Qwen2.5-VL-72B-Instruct"),
        ("~/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0123456789abcdef", "Qwen/Qwen3-8B"),
        ("/models/qwen35-27b", "Qwen/Qwen3.5-27B"),
        ("D:\\models\\Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/srv/Qwen3-8B/snapshot/", "Qwen/Qwen3-8B"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("./models/internvl3_5-4b", "OpenGVLab/InternVL3_5-4B"),
        ("google/gemma-4-31b", "google/gemma-4-31B-it"),
        ("huihui-ai/Qwen3-8B-abliterated", "Qwen/Qwen3-8B"),
    ],
)
def test_spellings(spelling: str, same_as: str) -> None:
    assert model(spelling).config == model(same_as).config


@pytest.mark.parametrize(
    ("name", "base", "method", "bits"),
    [
        ("/data/models/Qwen2.5-VL-7B-Instruct-AWQ/", "Qwen/Qwen2.5-VL-7B-Instruct", "awq", 4),
        ("qwen35-27b-awq", "Qwen/Qwen3.5-27B", "awq", 4),
        ("/mnt/e/models/Qwen3-32B-awq-asym", "Qwen/Qwen3-32B", "awq", 4),
        ("cyankiwi/Qwen3.6-35B-A3B-AWQ-4bit", "Qwen/Qwen3.6-35B-A3B", "compressed-tensors", 4),
        ("Qwen/Qwen2.5-VL-72B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-VL-72B-Instruct", "gptq", 4),
        ("Qwen2.5-VL-7B-GPTQ-Int8", "Qwen/Qwen2.5-VL-7B-Instruct", "gptq", 8),
        ("Qwen/Qwen3-14B-FP8", "Qwen/Qwen3-14B", "fp8", 8),
        ("RedHatAI/Qwen3-32B-FP8-dynamic", "Qwen/Qwen3-32B", "compressed-tensors", 8),
        ("Qwen3.5-122B-A10B-NVFP4", "Qwen/Qwen3.5-122B-A10B", "modelopt", 4),
        ("RedHatAI/Qwen3.5-122B-A10B-NVFP4", "Qwen/Qwen3.5-122B-A10B", "compressed-tensors", 4),
        ("/models/gemma-4-26B-A4B-it-NVFP4-modelopt", "google/gemma-4-26B-A4B", "modelopt", 4),
        ("unsloth/QwQ-32B-unsloth-bnb-4bit", "Qwen/QwQ-32B", "bitsandbytes", 4),
        ("neuralmagic/Qwen2-72B-Instruct-quantized.w8a16", "Qwen/Qwen2-72B-Instruct", "compressed-tensors", 8),
        ("Qwen3-8B-w4a16", "Qwen/Qwen3-8B", "compressed-tensors", 4),
        ("gaunernst/gemma-3-27b-it-int4-awq", "google/gemma-3-27b-it", "awq", 4),
        ("/root/.cache/huggingface/gemma-4-31b-qat-awq-int4", "google/gemma-4-31B", "awq", 4),
    ],
)
def test_rebuilds(name: str, base: str, method: str, bits: int) -> None:
    facts, original = model(name), model(base)
    assert facts.text == original.text
    assert facts.vision == original.vision
    assert (facts.quantization.method, facts.quantization.bits) == (method, bits)
    assert facts.quantization.label is not None and facts.quantization.label.endswith("by its name")
    assert any("assumed from the name" in note for note in facts.notes)


@pytest.mark.parametrize(
    "name",
    [
        "nvidia/Qwen3.5-122B-A10B-NVFP4",
        "/models/nvidia/Qwen3.5-122B-A10B-NVFP4",
        "~/models--nvidia--Qwen3.5-122B-A10B-NVFP4/snapshots/0123456789",
    ],
)
def test_a_makers_own_build_has_its_published_quantisation(name: str) -> None:
    facts = model(name)
    assert facts.text == model("Qwen/Qwen3.5-122B-A10B").text
    assert facts.quantization.method == "modelopt" and facts.quantization.kv_cache_scheme
    assert "model.language_model.layers.0.linear_attn*" in facts.quantization.ignore
    assert not any("assumed" in note for note in facts.notes)


@pytest.mark.parametrize(
    ("name", "base", "label"),
    [
        ("unsloth/Qwen3.5-35B-A3B-GGUF", "Qwen/Qwen3.5-35B-A3B", "gguf, by its name"),
        ("unsloth/Qwen3.5-35B-A3B-GGUF:UD-Q4_K_XL", "Qwen/Qwen3.5-35B-A3B", "gguf Q4_K_XL, by its name"),
        ("/m/Qwen3.5-27B-GGUF/Qwen3.5-27B-UD-Q4_K_XL.gguf", "Qwen/Qwen3.5-27B", "gguf Q4_K_XL, by its name"),
        ("Qwen3-235B-A22B-Q4_K_M-00001-of-00003.gguf", "Qwen/Qwen3-235B-A22B", "gguf Q4_K_M, by its name"),
        ("llama-2-7b-chat.Q4_K_M.gguf", "meta-llama/Llama-2-7b-chat-hf", "gguf Q4_K_M, by its name"),
        ("Qwen3-8B-BF16.gguf", "Qwen/Qwen3-8B", "gguf BF16, by its name"),
        ("gpt-oss-20b-mxfp4.gguf", "openai/gpt-oss-20b", "gguf MXFP4, by its name"),
        ("Meta-Llama-3.1-8B-Instruct-IQ2_XXS.gguf", "meta-llama/Llama-3.1-8B-Instruct", "gguf IQ2_XXS, by its name"),
    ],
)
def test_gguf_builds(name: str, base: str, label: str) -> None:
    facts = model(name)
    assert facts.text == model(base).text
    assert (facts.quantization.method, facts.quantization.label) == ("gguf", label)
    assert facts.vision is None and not facts.auto_map and "quantization_config" not in facts.config


@pytest.mark.parametrize("name", ["mmproj-model-f16.gguf", "x.gguf", ".gguf", "gguf", "-GGUF", "Qwen3.5-27B-MLX-4bit"])
def test_unknown_gguf_names(name: str) -> None:
    assert known_model(name) is None


@pytest.mark.parametrize(
    ("name", "unverified"),
    [
        ("Qwen/Qwen3.8-27B", "linear_num_value_heads"),
        ("Qwen/Qwen3.5-4B", "max_position_embeddings"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "max_position_embeddings"),
        ("mistral-community/pixtral-12b", "sliding_window"),
        ("moonshotai/Moonlight-16B-A3B", "q_lora_rank"),
        ("deepseek-ai/deepseek-vl2-tiny", "kv_lora_rank"),
    ],
)
def test_a_class_default_does_not_stand_for_what_nobody_verified(name: str, unverified: str) -> None:
    assert getattr(model(name).text, unverified) is None


def test_a_rebuild_replaces_the_native_quantisation() -> None:
    assert model("cognitivecomputations/DeepSeek-R1-AWQ").quantization.method == "awq"
    plain = model("unsloth/DeepSeek-V3-bf16")
    assert plain.quantization.method is None
    assert plain.text.dtype == "bfloat16"


def test_the_name_is_kept_and_the_base_is_said() -> None:
    facts = model("/data/Qwen3-8B-AWQ")
    assert facts.name == "/data/Qwen3-8B-AWQ"
    assert any("Qwen/Qwen3-8B" in note for note in facts.notes)


@pytest.mark.parametrize(
    "name",
    ["", "/", "models", "/model", "/opt/models/chat", "mistral", "llama", "Qwen", "qwen2_vl_lora_sft", "awq", "8B",
     "someone/Qwen3-8B-Reranker", "./my-vision-model", "${MODEL}", "a" * 100_000, "___", "-_-"],
)  # fmt: skip
def test_unclear_names_are_unknown(name: str) -> None:
    assert known_model(name) is None


@given(st.text(max_size=60))
def test_any_text_is_answered(name: str) -> None:
    found = known_model(name)
    assert found is None or found.format == "known"
