"""What the plan adds to the checklist, the order of findings, and that no launch breaks it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.check import check_launch
from loadmaster.core.checks.catalogue import codes as all_codes
from loadmaster.core.checks.catalogue import order
from loadmaster.core.facts import EngineFacts, Finding, LaunchArgs
from loadmaster.core.flagtable import known_flags
from tests.launchcases import cards, codes, dense, found, hybrid, moe, of, vision


def test_eager_mode_that_is_not_needed() -> None:
    item = of(found("vllm serve m --enforce-eager", dense(), cards(1, 48, (8, 9)), version="0.24.0"), "eager-mode-cost")
    assert (item.severity, item.confidence) == ("warning", "certain")
    assert item.fixes[0].remove == ("--enforce-eager",) and item.fixes[0].replanned
    assert "GiB a card" in item.cause


def test_eager_mode_without_a_plan_is_only_possible() -> None:
    assert of(found("vllm serve /nowhere/m --enforce-eager"), "eager-mode-cost").confidence == "possible"
    assert "eager-mode-cost" not in codes(found("vllm serve /nowhere/m"))
    assert "eager-mode-cost" not in codes(found("vllm serve /nowhere/m --no-enforce-eager"))


def test_weights_that_do_not_fit() -> None:
    item = of(found("vllm serve m", dense(), cards(1, 8), version="0.24.0"), "oom-weights")
    assert item.fixes[0].argv[:2] == ("--tensor-parallel-size", "4")
    assert item.fixes[0].replanned
    assert any("fewer bits" in fix.why and not fix.argv for fix in item.fixes)
    assert "oom-weights" not in codes(found("vllm serve m", dense(), cards(1, 24), version="0.24.0"))


def test_context_that_the_cache_cannot_hold_carries_a_planned_fix() -> None:
    line = "vllm serve m --max-model-len 40960 --max-num-seqs 4"
    item = of(found(line, dense(), cards(1, 20), version="0.24.0"), "seq-too-long-for-memory")
    assert any(fix.replanned for fix in item.fixes)
    assert "seq-too-long-for-memory" not in codes(found(line, dense(), cards(1, 48), version="0.24.0"))


def test_the_most_severe_and_earliest_first() -> None:
    findings = found("vllm serve m --tp 2 -tp 3 --trust-remote-code --enforce-eager", dense(), cards(3))
    assert findings[0].code == "unknown-flag"
    ranks = [{"error": 0, "warning": 1, "note": 2}[item.severity] for item in findings]
    assert ranks == sorted(ranks)


def test_order_puts_what_is_sure_first_within_a_stage() -> None:
    unsure = Finding("tp-exceeds-gpus", "error", "t", "a", confidence="possible")
    sure = Finding("heads-vs-tp", "error", "t", "b")
    assert order([unsure, sure]) == (sure, unsure)


def test_a_cause_is_said_once() -> None:
    for model, line in ((vision(), "vllm serve m --max-model-len 4096"), (dense(), "vllm serve m -tp 3")):
        findings = found(line, model, cards(3, 48), version="0.24.0")
        seen = [(item.code, item.cause) for item in findings]
        assert len(seen) == len(set(seen))
        assert sum(item.code == "image-tokens-exceed-context" for item in findings) <= 1


def test_every_finding_is_in_the_catalogue() -> None:
    known = set(all_codes())
    for model in (dense(), moe(), vision(), hybrid()):
        assert codes(found("vllm serve m -tp 3 --max-model-len 9999999 --enforce-eager", model, cards(2))) <= known


INNER = st.dictionaries(
    st.sampled_from(["count", "width", "height", "rope_parameters", "factor"]), st.integers(-2, 9999), max_size=3
)
OBJECTS = st.dictionaries(
    st.sampled_from(["image", "video", "max_pixels", "method", "rope_type", "rope_scaling", "factor", "text_config"]),
    st.one_of(st.integers(-5, 1 << 40), st.text(max_size=5), st.none(), INNER),
    max_size=4,
)
VALUES = st.one_of(
    st.booleans(),
    st.none(),
    st.integers(min_value=-(1 << 70), max_value=1 << 70),
    st.floats(allow_nan=True),
    st.text(max_size=12),
    st.lists(st.text(max_size=4), max_size=3),
    OBJECTS,
)
LAUNCHES = st.builds(
    LaunchArgs,
    model=st.one_of(st.none(), st.text(max_size=20)),
    flags=st.dictionaries(st.sampled_from(known_flags("0.24.0")), VALUES, max_size=8),
    env=st.dictionaries(
        st.sampled_from(["CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_P2P_LEVEL", "HF_HUB_OFFLINE"]),
        st.text(max_size=12),
        max_size=3,
    ),
    unknown_flags=st.lists(st.text(max_size=12), max_size=2).map(tuple),
    raw=st.lists(st.text(max_size=8), max_size=4).map(tuple),
)


@given(
    LAUNCHES, st.sampled_from([None, dense(), moe(), vision(), hybrid()]), st.sampled_from([None, "0.6.6", "0.24.0"])
)
def test_no_launch_breaks_the_checklist(launch: LaunchArgs, model: Any, version: str | None) -> None:
    check_launch(launch, model=model, gpus=None, engine=EngineFacts("vllm", version))
