"""Checkpoints that cannot be cut, and experts where there are none."""

import pytest
from msgspec import structs

from loadmaster.core.facts import EngineFacts, Quantization
from loadmaster.core.plan import plan_alone
from loadmaster.core.recommend import recommend
from loadmaster.core.replanning import divides
from tests.core.launches import TEXT_8B, cards, launch
from tests.launchcases import cards as ranked_cards
from tests.launchcases import dense, found, moe, of

NF4 = Quantization(method="bitsandbytes", format="nf4", bits=4, group_size=64, label="bitsandbytes nf4")
MODEL = structs.replace(TEXT_8B, quantization=NF4)


@pytest.mark.parametrize("version", ["0.17.0", "0.24.0", "0.27.0"])
def test_bitsandbytes_checkpoints_are_not_cut(version: str) -> None:
    model = dense(quantization=NF4)
    item = of(found("vllm serve m -tp 2", model, ranked_cards(2, 48), version=version), "quant-format-unsupported")
    assert item.severity == "error"
    assert item.fixes[0].argv == ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "1")
    assert not any(
        one.code == "quant-format-unsupported"
        for one in found("vllm serve m -pp 2", model, ranked_cards(2, 48), version=version)
    )
    sheet = plan_alone(MODEL, cards(48, 48), launch("-tp 2", version), EngineFacts("vllm", version))
    assert sheet.fits is False


def test_quantised_while_loading_is_cut() -> None:
    line = "vllm serve m -tp 2 --quantization bitsandbytes"
    items = found(line, dense(), ranked_cards(2, 48), version="0.24.0")
    assert "quant-format-unsupported" not in {item.code for item in items}


def test_tensor_parallelism_is_never_recommended_for_them() -> None:
    assert divides(MODEL, 1) and not divides(MODEL, 2)
    sheet = recommend(MODEL, cards(24, 24), launch("", "0.24.0"), EngineFacts("vllm", "0.24.0"))
    assert sheet.settings is not None and sheet.settings.tensor_parallel_size == 1
    idle = of(found("vllm serve m", dense(quantization=NF4), ranked_cards(2, 48), version="0.24.0"), "one-gpu-idle")
    assert not any("--tensor-parallel-size" in fix.argv for fix in idle.fixes)


def test_expert_parallelism_wants_experts() -> None:
    line = "vllm serve m --enable-expert-parallel"
    item = of(found(line, dense(), ranked_cards(1, 80), version="0.24.0"), "flag-conflict")
    assert item.fixes[0].remove == ("--enable-expert-parallel",)
    assert "flag-conflict" not in {one.code for one in found(line, moe(), ranked_cards(1, 80), version="0.24.0")}
    odd = dense(config={"ffn_config": {"moe_num_experts": 16}})
    assert "flag-conflict" not in {one.code for one in found(line, odd, ranked_cards(1, 80), version="0.24.0")}
