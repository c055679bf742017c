"""Architectures and quantisation methods by release."""

from __future__ import annotations

import pytest

from loadmaster.core.releasetable import (
    architecture_runs,
    method_capability,
    method_dtypes,
    releases,
    scheme_capability,
)
from loadmaster.core.tables import load_toml


def test_runs_have_holes_and_ends() -> None:
    assert architecture_runs("ChatGLMForConditionalGeneration")[0][1] == "0.6.6"
    assert architecture_runs("AquilaForCausalLM")[-1][1] == "0.24.0"
    assert architecture_runs("LlamaForCausalLM")[-1][1] == releases()[-1]
    assert architecture_runs("NoSuchForCausalLM") == architecture_runs(None) == ()


@pytest.mark.parametrize(
    ("method", "version", "capability"),
    [
        ("awq_marlin", "0.12.0", 80),
        ("awq_marlin", "0.14.0", 75),
        ("awq_marlin", None, 75),
        ("gptq_marlin", "0.22.0", 60),
        ("hqq", "0.33.0", None),
        ("bitsandbytes", "0.9.0", 70),
        ("no-such-method", None, None),
    ],
)
def test_method_capability(method: str, version: str | None, capability: int | None) -> None:
    assert method_capability(method, version) == capability


def test_the_mildest_scheme_decides() -> None:
    formats = load_toml("quantization-methods.toml")["formats"]
    assert scheme_capability(formats["pack-quantized"], "0.11.2") == 80
    assert scheme_capability(formats["pack-quantized"], "0.12.0") == 75
    assert scheme_capability(formats["float-quantized"], "0.33.0") == 75
    assert scheme_capability((), "0.33.0") is None


def test_types_that_kernels_take() -> None:
    assert method_dtypes("awq", "0.23.0") == ("float16",)
    assert set(method_dtypes("awq", "0.24.0")) == {"float16", "bfloat16"}
    assert method_dtypes("mxfp4", None) == ("bfloat16",)
