"""Models, cards and launches for tests of settings, plans and recommendations."""

from __future__ import annotations

from msgspec import structs

from loadmaster.core import modelconfig
from loadmaster.core.argv import parse_argv
from loadmaster.core.facts import GIB, EngineFacts, GpuFacts, LaunchArgs, LoadSheet, ModelFacts
from loadmaster.core.plan import make_plan
from tests.core import published
from tests.core.published import Config


def model_of(config: Config) -> ModelFacts:
    """A model known by its configuration, with the limits that its processor class has."""
    return structs.replace(
        published.facts(config),
        model_type=config.get("model_type"),
        processor=modelconfig.processor(None, None, config),
    )


MOE_35B = model_of(published.QWEN_3_5_35B_W4)
DENSE_9B = model_of(published.QWEN_3_5_9B)
VL_7B = model_of(published.QWEN_2_5_VL_7B)
TEXT_8B = model_of(published.LLAMA_3_1_8B)
GEMMA_27B = model_of(published.GEMMA_3_27B_AWQ)
UNKNOWN = model_of({"architectures": ["FooForCausalLM"], "model_type": "foo", "hidden_size": 2048})

QWEN_3_8B: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

ARTICLE = (
    "--tensor-parallel-size 2 --max-model-len 4096 --enforce-eager --gpu-memory-utilization 0.9 --trust-remote-code"
)


def cards(*gib: float, **more: object) -> tuple[GpuFacts, ...]:
    return tuple(
        GpuFacts(index=index, total_bytes=int(size * GIB), **more)  # type: ignore[arg-type]
        for index, size in enumerate(gib)
    )


def launch(flags: str = "", version: str | None = "0.24.0") -> LaunchArgs:
    return parse_argv(["vllm", "serve", "model", *flags.split()], engine_version=version)


def plan(model: ModelFacts, gpus: tuple[GpuFacts, ...], flags: str = "", version: str | None = "0.24.0") -> LoadSheet:
    return make_plan(model, gpus, launch(flags, version), EngineFacts("vllm", version))


def part(sheet: LoadSheet, name: str, card: int = 0) -> int:
    return sum(line.bytes for line in sheet.gpus[card].components if line.name == name)
