"""Weights whose size nobody knows: bounds from what is declared, and never a plan that fits."""

import pytest

from loadmaster.core.argv import parse_argv
from loadmaster.core.check import check_launch
from loadmaster.core.declaredweights import declared_weights
from loadmaster.core.facts import GIB, EngineFacts, GpuFacts, ModelFacts, Quantization, TextConfig
from loadmaster.core.gputable import parse_gpu_spec
from loadmaster.core.knownmodels import entries, known_model
from loadmaster.core.plan import plan_alone
from loadmaster.core.tensors import synthesise

ENGINE = EngineFacts("vllm", "0.24.0")
HUGE = (GpuFacts(index=0, total_bytes=20_000 * GIB, compute_capability=(9, 0)),)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", 70),
        ("a/Qwen2.5-0.5b", 0.5),
        ("a/Mixtral-8x7B-v0.1", 56),
        ("inclusionAI/Ling-1T", 1000),
        ("a/SmolVLM-450M.gguf", 0.45),
        ("a/Qwen3-30B-A3B", 30),
    ],
)
def test_the_name_tells_the_parameters(name: str, billions: float) -> None:
    amount = declared_weights(ModelFacts(name=name, text=TextConfig(dtype="bfloat16")))
    assert amount is not None and amount.bytes == pytest.approx(billions * 2e9)
    assert amount.low < amount.bytes < amount.high and amount.basis == "assumed"


@pytest.mark.parametrize("name", ["zai-org/GLM-5", "a/Llama-4-Scout-17B-16E", "google/gemma-3n-E4B-it", "a/Next-A3B"])
def test_active_and_effective_sizes_are_not_the_parameters(name: str) -> None:
    assert declared_weights(ModelFacts(name=name)) is None


def test_declared_parameters_come_first_and_bits_count() -> None:
    facts = ModelFacts(
        name="a/b-70B", parameters=10**9, text=TextConfig(dtype="bfloat16"),
        quantization=Quantization(method="awq", bits=4),
    )  # fmt: skip
    amount = declared_weights(facts)
    assert amount is not None
    assert (amount.low, amount.bytes, amount.high) == (5 * 10**8, 5 * 10**8, 2 * 10**9)


def test_no_known_model_of_unknown_weights_fits() -> None:
    """Over the whole table, on a card on which everything fits."""
    unknown = 0
    for entry in entries():
        model = known_model(entry.names[0])
        if model is None:
            continue
        launch = parse_argv(["vllm", "serve", model.name, "--max-model-len", "1024"], engine_version="0.24.0")
        sheet = plan_alone(model, HUGE, launch, ENGINE)
        weights = [part for gpu in sheet.gpus for part in gpu.components if part.name.startswith("weights.")]
        if synthesise(model):
            assert sum(part.bytes for part in weights) > 0, model.name
        else:
            unknown += 1
            assert sheet.fits is not True, model.name
            assert "weights-unknown" in {item.code for item in sheet.findings}, model.name
            assert all(part.basis == "assumed" and part.low < part.high for part in weights), model.name
    assert unknown > 100


def test_what_is_known_already_may_not_fit() -> None:
    model = known_model("zai-org/GLM-5")
    assert model is not None
    launch = parse_argv(["vllm", "serve", model.name, "--max-model-len", "4096"], engine_version="0.24.0")
    sheet = plan_alone(model, parse_gpu_spec("24GiB"), launch, ENGINE)
    assert sheet.fits is False
    assert any(item.code == "oom-weights" for item in sheet.findings)


def test_a_check_says_that_weights_are_unknown() -> None:
    launch = parse_argv(["vllm", "serve", "openai/gpt-oss-20b", "--max-model-len", "4096"], engine_version="0.24.0")
    found = check_launch(launch, model=None, gpus=parse_gpu_spec("24GiB"), engine=ENGINE)
    assert "weights-unknown" in {item.code for item in found}
