"""Models, cards and launches for the tests of the checklist."""

from __future__ import annotations

import shlex
from typing import Any

from msgspec.structs import replace

from loadmaster.core.argv import parse_argv
from loadmaster.core.check import check_launch
from loadmaster.core.facts import (
    GIB,
    EngineFacts,
    Finding,
    GpuFacts,
    GpuProcess,
    HostFacts,
    LaunchArgs,
    ModelFacts,
    Processor,
    Quantization,
    TextConfig,
    VisionConfig,
)

__all__ = ["GpuProcess", "cards", "codes", "dense", "found", "hybrid", "launch_of", "moe", "of", "vision"]


def dense(**changes: Any) -> ModelFacts:
    """A plain decoder like Qwen3-8B, configuration only."""
    text = TextConfig(
        model_type="qwen3",
        dtype="bfloat16",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        layer_types=("full_attention",) * 36,
        rope_theta=1000000.0,
    )
    facts = ModelFacts(
        name="Qwen/Qwen3-8B",
        format="config",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        text=text,
        has_chat_template=True,
        config={"model_type": "qwen3"},
    )
    return _changed(facts, changes)


def moe(**changes: Any) -> ModelFacts:
    """Experts 640 wide in FP8 blocks of 128."""
    facts = dense(
        architecture="Qwen3MoeForCausalLM",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=640,
        num_attention_heads=32,
        num_key_value_heads=4,
        hidden_size=2048,
        quantization=Quantization(method="fp8", bits=8, block_shape=(128, 128), label="fp8 block 128x128"),
    )
    return _changed(facts, changes)


def vision(**changes: Any) -> ModelFacts:
    """A vision-language model like Qwen2.5-VL-7B: a token is 28 x 28 pixels, pictures up to 12.8 megapixels."""
    facts = dense(
        name="Qwen/Qwen2.5-VL-7B-Instruct",
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=128000,
        layer_types=("full_attention",) * 28,
        uses_mrope=True,
        vision=VisionConfig(
            model_type="qwen2_5_vl",
            depth=32,
            hidden_size=1280,
            intermediate_size=3420,
            num_heads=16,
            in_channels=3,
            patch_size=14,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=3584,
            window_size=112,
            fullatt_block_indexes=(7, 15, 23, 31),
        ),
        processor=Processor(
            image_processor_type="Qwen2VLImageProcessor",
            min_pixels=3136,
            max_pixels=12845056,
            source="preprocessor_config.json",
        ),
        config={"model_type": "qwen2_5_vl"},
    )
    return _changed(facts, changes)


def hybrid(**changes: Any) -> ModelFacts:
    """Three layers of linear attention to one of full attention, like Qwen3.5-27B without its tower."""
    facts = dense(
        architecture="Qwen3_5ForConditionalGeneration",
        model_type="qwen3_5",
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=248320,
        max_position_embeddings=262144,
        layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 16,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        mamba_ssm_dtype="float32",
        rotary_dim=64,
        attn_output_gate=True,
    )
    return _changed(facts, changes)


def _changed(facts: ModelFacts, changes: dict[str, Any]) -> ModelFacts:
    """``changes`` name fields of the model or, if it has none of that name, of its text configuration."""
    of_model = {name: value for name, value in changes.items() if name in ModelFacts.__struct_fields__}
    of_text = {name: value for name, value in changes.items() if name not in ModelFacts.__struct_fields__}
    return replace(facts, text=replace(facts.text, **of_text), **of_model)


def cards(count: int = 1, gib: float = 24, capability: tuple[int, int] | None = (8, 6), **more: Any) -> list[GpuFacts]:
    return [
        GpuFacts(index=index, total_bytes=int(gib * GIB), compute_capability=capability, **more)
        for index in range(count)
    ]


def launch_of(command: str, version: str | None = None, **around: Any) -> LaunchArgs:
    """A launch from a line with variables in front; ``around`` sets what a container line says."""
    words = shlex.split(command)
    env = {}
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    return replace(parse_argv(words, engine_version=version, env=env), **around)


def found(
    command: str | LaunchArgs,
    model: ModelFacts | None = None,
    gpus: list[GpuFacts] | None = None,
    version: str | None = None,
    host: HostFacts | None = None,
) -> tuple[Finding, ...]:
    launch = command if isinstance(command, LaunchArgs) else launch_of(command, version)
    return check_launch(launch, model=model, gpus=gpus, engine=EngineFacts("vllm", version), host=host)


def codes(findings: tuple[Finding, ...]) -> set[str]:
    return {item.code for item in findings}


def of(findings: tuple[Finding, ...], code: str) -> Finding:
    """The first finding of a code; fails the test with what there is instead."""
    for item in findings:
        if item.code == code:
            return item
    raise AssertionError(f"no {code} among {[(item.code, item.cause) for item in findings]}")
