"""Arguments are found in logs as engines write them."""

from __future__ import annotations

from typing import Any

import pytest

from loadmaster.core.startarguments import Arguments, llamacpp_arguments, vllm_arguments

LINE = (
    "(APIServer pid=1) INFO 06-18 09:16:00 [utils.py:278] non-default args: {'model_tag': 'Qwen/Qwen3', 'host': "
    "'0.0.0.0', 'dtype': 'bfloat16', 'max_model_len': 8192, 'quantization': 'fp8', 'served_model_name': ['a', 'b'], "
    "'enable_prefix_caching': True, 'gpu_memory_utilization': 0.85, 'max_num_seqs': 64}"
)


@pytest.mark.parametrize(
    ("flag", "value", "field"),
    [
        ("--max-model-len", 8192, "shown"),
        ("--max-model-len", 4096, "other"),
        ("--max-num-seqs", 64, "shown"),
        ("--gpu-memory-utilization", 0.85, "shown"),
        ("--gpu-memory-utilization", 0.9, "other"),
        ("--dtype", "bfloat16", "shown"),
        ("--dtype", "float16", "other"),
        ("--enable-prefix-caching", True, "shown"),
        ("--enable-prefix-caching", False, "other"),
        ("--served-model-name", ["a", "b"], "shown"),
        ("--enforce-eager", True, "unnamed"),
        ("--max-model-len", "auto", "shown"),
    ],
)
def test_one_flag(flag: str, value: Any, field: str) -> None:
    found = vllm_arguments(["begin", LINE, "end"], {flag: value})
    assert found is not None
    assert [name for name in Arguments.__struct_fields__ if getattr(found, name)] == [field]


def test_keys_are_not_compared() -> None:
    assert vllm_arguments([LINE.replace("'fp8'", "'fp8', 'api_key': '***'")], {"--api-key": "x"}) == Arguments(
        (), (), ()
    )


def test_the_last_start_counts() -> None:
    older = LINE.replace("8192", "1024")
    found = vllm_arguments([older, LINE], {"--max-model-len": 8192})
    assert found is not None
    assert found.shown == ("--max-model-len",)


def test_no_line_is_no_answer() -> None:
    assert vllm_arguments(["begin"], {"--dtype": "auto"}) is None
    assert llamacpp_arguments(["begin"], 4, 4096) is None


def test_slots_of_the_embedded_engine() -> None:
    log = ["0.00.188.352 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = 'true'"]
    assert llamacpp_arguments(log, 4, 8192) == Arguments(("--parallel", "--ctx-size"), (), ())
    assert llamacpp_arguments(log, None, 4096) == Arguments((), (("--ctx-size", "4096", "8192"),), ())
