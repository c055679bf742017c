"""The numbers of a message are found in every wording of it, wrapped or not, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from loadmaster.core.checks.catalogue import codes
from loadmaster.core.facts import GIB
from loadmaster.core.logfigures import Figures
from loadmaster.core.tables import load_toml

# code, message, what is read from it
MESSAGES: list[tuple[str, str, dict[str, Any]]] = [
    (
        "context-exceeds-kv",
        "ValueError: To serve at least one request with the models's max seq len (8192), (1.0 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (0.95 GiB). Based on the available memory, the estimated "
        "maximum model length is 7760. Try increasing",
        {"length": "8192", "needed": "1.0", "available": "0.95", "estimate": "7760"},
    ),
    (
        "context-exceeds-kv",
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in "
        "KV cache (19024). Try increasing",
        {"length": "32768", "tokens": "19024"},
    ),
    (
        "mamba-blocks",
        "max_num_seqs (256) exceeds available Mamba cache blocks (30). Each",
        {"sequences": "256", "blocks": "30"},
    ),
    (
        "free-memory-below-request",
        "Free memory on device (13.58/15.99 GiB) on startup is less than desired GPU memory utilization (0.85, 13.59 "
        "GiB).",
        {"free": "13.58", "total": "15.99", "share": "0.85", "requested": "13.59"},
    ),
    (
        "free-memory-below-request",
        "Free memory on device cuda:1 (0.22/30.3 GiB) on startup is less than desired GPU memory utilization (0.9, "
        "27.27 GiB).",
        {"free": "0.22", "total": "30.3"},
    ),
    ("oom-sampler-warmup", "occurred when warming up sampler with 1024 dummy requests.", {"sequences": "1024"}),
    (
        "heads-vs-tp",
        "Total number of attention heads (28) must be divisible by tensor parallel size (8).",
        {"heads": "28", "size": "8"},
    ),
    ("heads-vs-tp", "AssertionError: 64 is not divisible by 3", {"heads": "64", "size": "3"}),
    (
        "quant-group-vs-tp",
        "Weight input_size_per_partition = 7392 is not divisible by min_thread_k = 128. Consider reducing "
        "tensor_parallel_size",
        {"side": "input", "width": "7392", "unit": "128"},
    ),
    (
        "fp8-block-vs-tp",
        "Weight output_partition_size = 192 is not divisible by weight quantization block_n = 128.",
        {"width": "192", "unit": "128"},
    ),
    (
        "fp8-block-vs-tp",
        "The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128.",
        {"width": "192", "unit": "128"},
    ),
    (
        "arch-unknown-engine",
        "Model architectures ['Gemma2ForCausalLM'] are not supported for now. Supported",
        {"names": "'Gemma2ForCausalLM'"},
    ),
    (
        "arch-unknown-transformers",
        "The checkpoint you are trying to load has model type `qwen3_5` but Transformers does not recognize this",
        {"type": "qwen3_5"},
    ),
    (
        "transformers-fallback",
        "JambaVisionModel has no vLLM implementation, falling back to Transformers implementation.",
        {"names": "JambaVisionModel"},
    ),
    ("unknown-flag", "vllm: error: unrecognized arguments: --max-modle-len 4096", {"words": "--max-modle-len 4096"}),
    (
        "context-beyond-model",
        "User-specified max_model_len (65536) is greater than the derived max_model_len (max_position_embeddings=32768 "
        "or model_max_length=None in model's config.json).",
        {"length": "65536", "most": "32768"},
    ),
    (
        "batched-tokens-below-block",
        "In Mamba cache align mode, block_size (2096) must be <= max_num_batched_tokens (2048).",
        {"block": "2096", "tokens": "2048"},
    ),
    (
        "tp-exceeds-gpus",
        "World size (4) is larger than the number of available GPUs (2) in this node.",
        {"world": "4", "cards": "2"},
    ),
    (
        "image-limit-exceeded",
        "At most 1 image(s) may be provided in one request.",
        {"most": "1", "kind": "image", "given": None},
    ),
    (
        "image-limit-exceeded",
        "You set image=1 (or defaulted to 1) in `--limit-mm-per-prompt`, but passed 3 image items in the same prompt.",
        {"most": "1", "kind": "image", "given": "3"},
    ),
    (
        "image-tokens-exceed-context",
        "The decoder prompt (length 5210) is longer than the maximum model length of 4096.",
        {"length": "5210", "most": "4096"},
    ),
    (
        "image-tokens-exceed-context",
        "Prompt length of 5210 is longer than the maximum model length 4096.",
        {"length": "5210", "most": "4096"},
    ),
    (
        "encoder-cache-too-small",
        "contains a(n) image item with length 6042, which exceeds the pre-allocated encoder cache size 4800.",
        {"length": "6042", "most": "4800"},
    ),
    (
        "port-in-use",
        "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
        {"port": "8000"},
    ),
]


@pytest.mark.parametrize(
    ("code", "message", "expected"), MESSAGES, ids=[f"{c}-{n}" for n, (c, _, _) in enumerate(MESSAGES)]
)
def test_what_a_message_says(code: str, message: str, expected: dict[str, Any]) -> None:
    for text in (message, message.replace(" ", "\n  "), f"(Worker pid=1) ERROR 11-30 10:00:00 [x.py:1] {message}"):
        found = Figures(code, text)
        for name, value in expected.items():
            said = found.text(name)
            assert (said.split() if said else said) == (value.split() if value else value), (name, text)


def test_every_code_with_figures_exists_and_has_a_message_here() -> None:
    table = load_toml("log-figures.toml")
    assert set(table) <= set(codes())
    assert set(table) - {code for code, _, _ in MESSAGES} == {"gpu-held-by-other-process"}  # has the same message


def test_numbers() -> None:
    message = (
        "Free memory on device (13.58/15.99 GiB) on startup is less than desired GPU memory utilization (0.85, 13 GiB)"
    )
    found = Figures("free-memory-below-request", message)
    assert found.gib("free") == round(13.58 * GIB)
    assert found.whole("free") is None
    assert found.number("share") == 0.85
    assert found.gib("nothing") is None
    assert Figures("no-such-code", message).text("free") is None
    assert Figures("port-in-use", "no address at all").whole("port") is None
