"""Launches without a fault get neither error nor warning; well-known faulty ones get theirs, by name alone."""

from __future__ import annotations

import pytest

from tests.launchcases import cards, codes, found

H200 = {"count": 1, "gib": 139.8, "capability": (9, 0)}

HEALTHY = [
    (
        "vllm serve Qwen/Qwen2.5-VL-7B-Instruct --max-model-len 32768",
        {"count": 1, "gib": 80, "capability": (8, 0)},
        "0.24.0",
    ),
    ("vllm serve Qwen/Qwen3-8B --max-model-len 16384 --gpu-memory-utilization 0.9", {"count": 1, "gib": 48}, "0.24.0"),
    ("vllm serve Qwen/Qwen3.5-35B-A3B -tp 2 --max-model-len 131072", {**H200, "count": 2}, "0.24.0"),
    (
        "vllm serve Qwen/Qwen3-VL-30B-A3B-Instruct -tp 2 --enable-expert-parallel --limit-mm-per-prompt.video 0",
        {**H200, "count": 2},
        "0.33.0",
    ),
    (
        "vllm serve Qwen/Qwen3-32B --tool-call-parser hermes --enable-auto-tool-choice --reasoning-parser qwen3",
        H200,
        "0.24.0",
    ),
    (
        "vllm serve Qwen/Qwen2.5-VL-7B-Instruct-AWQ --max-model-len 20480 --max-num-seqs 32",
        {"count": 1, "gib": 48},
        "0.24.0",
    ),
    (
        "vllm serve Qwen/Qwen3-8B-FP8 --kv-cache-dtype fp8 --max-model-len 32K",
        {"count": 1, "gib": 48, "capability": (8, 9)},
        "0.24.0",
    ),
    ("CUDA_VISIBLE_DEVICES=0 vllm serve Qwen/Qwen3-8B --max-model-len 8192", {"count": 2, "gib": 48}, "0.33.0"),
    ("vllm serve Qwen/Qwen2.5-7B-Instruct", None, "0.9.2"),
    ("vllm serve /models/nobody-knows -tp 4 --dtype auto --max-model-len 65536 --async-scheduling", None, "0.24.0"),
    ("vllm serve /models/nobody-knows", None, None),
    (
        "NCCL_P2P_DISABLE=1 OMP_NUM_THREADS=1 vllm serve /models/x -tp 2 --host 0.0.0.0 --port 8000 --api-key k",
        None,
        None,
    ),
]

FAULTY = [
    ("CUDA_VISIBLE_DEVICES=0,1 vllm serve Qwen/Qwen3-32B -tp 4", "tp-exceeds-gpus"),
    ("vllm serve Qwen/Qwen3-8B --max-model-len 131072", "context-beyond-model"),
    ("vllm serve Qwen/Qwen2.5-VL-72B-Instruct -tp 6", "heads-vs-tp"),
    ("vllm serve Qwen/Qwen3-VL-8B-Instruct --trust-remote-code", "trust-remote-code-unneeded"),
    ("vllm serve Qwen/Qwen3-14B-AWQ --quantization awq", "slow-awq-kernel"),
    ("vllm serve cyankiwi/Qwen3.5-35B-A3B-AWQ-4bit --quantization awq", "quant-method-mismatch"),
    ("vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 1.0", "util-out-of-range"),
    ("vllm serve Qwen/Qwen3-8B --quantization int8", "quant-format-unsupported"),
    ("vllm serve Qwen/Qwen3-8B --enforce-eager", "eager-mode-cost"),
    ("vllm serve Qwen/Qwen3-8B --max-model-len 40k", "unit-4k-vs-4K"),
]


@pytest.mark.parametrize(("line", "gpus", "version"), HEALTHY, ids=[case[0][:60] for case in HEALTHY])
def test_healthy(line: str, gpus: dict[str, object] | None, version: str | None) -> None:
    findings = found(line, gpus=cards(**gpus) if gpus else None, version=version)  # type: ignore[arg-type]
    assert [(item.code, item.cause) for item in findings if item.severity != "note"] == []


@pytest.mark.parametrize(("line", "code"), FAULTY, ids=[case[1] for case in FAULTY])
def test_faulty(line: str, code: str) -> None:
    assert code in codes(found(line))
