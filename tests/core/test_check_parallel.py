"""Ranks against cards and heads; context against positions and blocks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from loadmaster.core.checks.case import device_count
from tests.launchcases import cards, codes, dense, found, hybrid, launch_of, of, vision


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("0,1", 2),
        ("2,34,5", 3),
        ("", 0),
        ("0", 1),
        ("all", None),
        ("0,-1,2", 1),
        ("GPU-1a2b,GPU-3c4d", 2),
        ("a b", None),
    ],
)
def test_device_count(value: str, count: int | None) -> None:
    assert device_count(value) == count


def test_more_ranks_than_visible_cards() -> None:
    item = of(found("CUDA_VISIBLE_DEVICES=2,34,5 vllm serve m -tp 4"), "tp-exceeds-gpus")
    assert (item.severity, item.confidence) == ("error", "certain")
    assert item.fixes[0].env == {"CUDA_VISIBLE_DEVICES": "2,3,4,5"}
    assert "tp-exceeds-gpus" not in codes(found("CUDA_VISIBLE_DEVICES=2,3,4,5 vllm serve m -tp 4"))
    assert "tp-exceeds-gpus" not in codes(found("vllm serve m -tp 4"))


def test_more_ranks_than_cards() -> None:
    item = of(found("vllm serve m -tp 4", dense(), cards(2)), "tp-exceeds-gpus")
    assert item.fixes[0].argv == ("--tensor-parallel-size", "2")
    assert "tp-exceeds-gpus" in codes(found("vllm serve m -tp 2 -dp 2", dense(), cards(2)))
    assert "tp-exceeds-gpus" not in codes(found("vllm serve m -tp 2", dense(), cards(2)))


def test_other_nodes_may_bring_the_rest() -> None:
    launch = launch_of("vllm serve m -tp 8 -pp 4", visible_gpus=8)
    assert of(found(launch), "tp-exceeds-gpus").severity == "note"
    assert of(found(launch_of("vllm serve m -tp 4 -pp 2 -dp 2", visible_gpus=8)), "tp-exceeds-gpus").severity == "error"
    ray = launch_of("vllm serve m -tp 16 --distributed-executor-backend ray", visible_gpus=8)
    assert of(found(ray), "tp-exceeds-gpus").severity == "note"
    nodes = launch_of("vllm serve m -tp 16 --nnodes 2", visible_gpus=8)
    assert "tp-exceeds-gpus" not in codes(found(nodes))


def test_heads() -> None:
    item = of(found("vllm serve m -tp 3", dense()), "heads-vs-tp")
    assert "32 attention heads" in item.cause
    assert item.fixes[0].argv == ("--tensor-parallel-size", "2")
    assert ("--pipeline-parallel-size", "3", "--tensor-parallel-size", "1") in [fix.argv for fix in item.fixes]
    assert "heads-vs-tp" not in codes(found("vllm serve m -tp 4", dense()))
    assert "heads-vs-tp" not in codes(found("vllm serve /nowhere -tp 3"))


def test_key_value_heads() -> None:
    assert "heads-vs-tp" in codes(found("vllm serve m -tp 4", dense(num_attention_heads=40, num_key_value_heads=10)))
    assert "heads-vs-tp" not in codes(found("vllm serve m -tp 8", dense(num_attention_heads=32, num_key_value_heads=4)))


def test_heads_of_the_tower() -> None:
    item = of(found("vllm serve m -tp 7", vision()), "heads-vs-tp")
    assert "vision tower" in item.cause
    model = vision(num_key_value_heads=7)
    assert of(found("vllm serve m -tp 7", model), "heads-vs-tp").fixes[0].argv == ("--mm-encoder-tp-mode", "data")
    assert "heads-vs-tp" not in codes(found("vllm serve m -tp 7 --mm-encoder-tp-mode data", model))
    assert "heads-vs-tp" not in codes(found("vllm serve m -tp 7 --language-model-only", model))


def test_linear_attention_heads() -> None:
    assert "heads-vs-tp" in codes(found("vllm serve m -tp 3", hybrid(num_key_value_heads=3)))
    assert "heads-vs-tp" not in codes(found("vllm serve m -tp 2", hybrid()))


def test_unequal_cards() -> None:
    mixed = [*cards(1, 24), *(replace(gpu, index=1) for gpu in cards(1, 16))]
    item = of(found("vllm serve m -tp 2", dense(), mixed), "gpus-unequal")
    assert "16.00 GiB" in item.cause
    assert "gpus-unequal" not in codes(found("vllm serve m -tp 2", dense(), cards(2)))
    assert "gpus-unequal" not in codes(found("vllm serve m", dense(), mixed))


def test_idle_card() -> None:
    item = of(found("CUDA_VISIBLE_DEVICES=0,1 vllm serve m"), "one-gpu-idle")
    assert item.fixes[0].argv == ("--tensor-parallel-size", "2")
    assert "one-gpu-idle" in codes(found("vllm serve m", dense(), cards(2)))
    assert "one-gpu-idle" not in codes(found("vllm serve m -tp 2", dense(), cards(2)))
    assert "one-gpu-idle" not in codes(found("CUDA_VISIBLE_DEVICES=1 vllm serve m", dense(), cards(2)))
    assert of(found("vllm serve m -tp 2", dense(), cards(3)), "one-gpu-idle").severity == "note"


def test_the_plan_uses_the_cards_that_are_visible() -> None:
    mixed = [*cards(1, 8), *(replace(gpu, index=1) for gpu in cards(1, 48))]
    line = "vllm serve m --max-model-len 8192"
    assert "oom-weights" in codes(found(f"CUDA_VISIBLE_DEVICES=0 {line}", dense(), mixed, version="0.24.0"))
    assert "oom-weights" not in codes(found(f"CUDA_VISIBLE_DEVICES=1 {line}", dense(), mixed, version="0.24.0"))


# ------------------------------------------------------------------------------------------ context


def test_context_beyond_the_model() -> None:
    item = of(found("vllm serve m --max-model-len 131072", dense()), "context-beyond-model")
    assert (item.severity, item.confidence) == ("error", "certain")
    assert item.fixes[0].argv == ("--max-model-len", "40960")
    assert "yarn" in item.fixes[1].argv[1]
    assert "context-beyond-model" not in codes(found("vllm serve m --max-model-len 40960", dense()))
    assert "context-beyond-model" not in codes(found("vllm serve m --max-model-len -1", dense()))


def test_rope_scaling_stretches_the_context() -> None:
    yarn = """'{"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}}'"""
    line = f"vllm serve m --max-model-len 131072 --hf-overrides {yarn}"
    assert "context-beyond-model" not in codes(found(line, dense(), version="0.24.0"))
    assert "context-beyond-model" not in codes(found(line, dense()))
    assert "context-beyond-model" in codes(found(line, dense(), version="0.33.0"))  # yarn keeps the positions there
    forced = f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {line}"
    assert "context-beyond-model" not in codes(found(forced, dense(), version="0.33.0"))
    linear = dense(rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert "context-beyond-model" not in codes(found("vllm serve m --max-model-len 131072", linear))
    llama = dense(rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert "context-beyond-model" in codes(found("vllm serve m --max-model-len 131072", llama))


def test_forced_context_is_a_warning() -> None:
    line = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve m --max-model-len 131072"
    assert of(found(line, dense()), "context-beyond-model").severity == "warning"


def test_batched_tokens_below_the_block_of_a_hybrid_model() -> None:
    line = "vllm serve m --enable-prefix-caching --max-num-batched-tokens 512 --max-num-seqs 8"
    big = cards(1, 141, (9, 0))
    item = of(found(line, hybrid(), big, version="0.24.0"), "batched-tokens-below-block")
    assert item.fixes[0].argv[0] == "--max-num-batched-tokens"
    better = line.replace("512", item.fixes[0].argv[1])
    assert "batched-tokens-below-block" not in codes(found(better, hybrid(), big, version="0.24.0"))
    assert "batched-tokens-below-block" not in codes(found(line, hybrid(), big, version="0.27.0"))
    without = line.replace("--enable-prefix-caching ", "")
    assert "batched-tokens-below-block" not in codes(found(without, hybrid(), big, version="0.24.0"))
