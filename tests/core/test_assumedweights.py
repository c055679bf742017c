"""Builds that are known by name alone: what they leave at 16 bits is bounded and said."""

from __future__ import annotations

import pytest

from loadmaster.core.assumedweights import rank_weights
from loadmaster.core.facts import GIB, EngineFacts, RankWeights
from loadmaster.core.knownmodels import known_model
from loadmaster.core.plan import make_plan
from loadmaster.core.settings import effective_settings
from loadmaster.core.shards import shard_weights
from tests.core.launches import cards, launch


def ranks(name: str, size: int) -> tuple[RankWeights, ...]:
    model = known_model(name)
    assert model is not None
    settings = effective_settings(
        launch(f"--tensor-parallel-size {size}"), model, cards(*[24] * size), EngineFacts("vllm", "0.24.0")
    )
    return rank_weights(model, settings)


# GiB of weights per rank at tensor parallel 2: logged by engines, else predicted from the published file's headers
@pytest.mark.parametrize(
    ("name", "size", "published", "within"),
    [
        ("cyankiwi/Qwen3.5-35B-A3B-AWQ-4bit", 2, 11.28, 0.05),
        ("cyankiwi/Qwen3.6-35B-A3B-AWQ-4bit", 2, 11.52, 0.25),
        ("Qwen/Qwen3.5-35B-A3B-GPTQ-Int4", 2, 10.64, 0.05),
        ("QuantTrio/Qwen3.5-35B-A3B-AWQ", 2, 11.62, 1.0),
        ("QuantTrio/Qwen3.5-35B-A3B-AWQ", 2, 11.19, 0.6),
        ("Qwen/Qwen3.5-27B-GPTQ-Int4", 2, 14.1, 0.2),
    ],
)
def test_bounds_hold_what_is_published(name: str, size: int, published: float, within: float) -> None:
    rank = ranks(name, size)[0]
    low, high = (sum(getattr(part, side) for part in rank.components.values()) / GIB for side in ("low", "high"))
    assert low <= published <= high
    assert abs(rank.total / GIB - published) <= within
    language = rank.components["weights.language"]
    assert language.basis == "assumed"
    assert language.low < language.high
    assert language.low <= language.bytes <= language.high


def test_a_build_of_whole_numbers_keeps_its_exact_weights() -> None:
    model = known_model("Qwen/Qwen3.5-35B-A3B")
    assert model is not None
    settings = effective_settings(launch(), model, cards(80), EngineFacts("vllm", "0.24.0"))
    assert rank_weights(model, settings) == shard_weights(model, settings)
    assert all(part.basis == "computed" for part in ranks("Qwen/Qwen3.5-35B-A3B", 2)[0].components.values())


def test_the_guess_is_a_note_of_the_sheet() -> None:
    model = known_model("cyankiwi/Qwen3.5-35B-A3B-AWQ-4bit")
    assert model is not None
    sheet = make_plan(model, cards(24, 24), launch("--tensor-parallel-size 2"), EngineFacts("vllm", "0.24.0"))
    assert any(note.startswith("quantisation assumed from the name") for note in sheet.notes)
    assert any("taken to leave all but the routed experts at 16 bits" in note for note in sheet.notes)
    weights = next(part for part in sheet.gpus[0].components if part.name == "weights.language")
    assert (weights.basis, weights.note) == ("assumed", "which layers the build leaves at 16 bits is assumed")
