"""Fixes for a program of one's own are planned with the model and the cards that its configuration names."""

from __future__ import annotations

from typing import Any

from loadmaster.core.deployment import Deployment, EngineSection
from loadmaster.service.causes import explained
from loadmaster.service.preparation import Prepared
from tests.core.test_logfixes import FULL_CARD, WEIGHTS, shown

OWN = EngineSection(kind="command", command=["serve", "{port}"], port=8123)
PROFILE: dict[str, Any] = {"tried_to_allocate_bytes": 1310 << 20, "model_loading_bytes": WEIGHTS}
# "fake": what the log's own name for the model can be
LOG = shown("oom-profile-vision", command="vllm serve fake --tensor-parallel-size 2", **PROFILE)
TOLD = shown("oom-profile-vision", command="vllm serve fake --tensor-parallel-size 2", **PROFILE, **FULL_CARD)


def test_the_configuration_names_model_and_cards() -> None:
    named = Deployment(name="x", model="cyankiwi/Qwen3.5-35B-A3B-AWQ-4bit", gpus="2x24GiB", engine=OWN)
    found = explained(TOLD, named, Prepared())
    first = found.findings[0].fixes[0]
    assert first.replanned
    assert "--mm-processor-kwargs" in first.argv or "--limit-mm-per-prompt" in first.argv
    assert "of 24.00 GiB" in first.why
    assert not any("--model DIR" in note or "--gpus" in note for note in found.notes)
    assert not any("P}" in word for fix in found.findings[0].fixes for word in (fix.why, *fix.argv))


def test_the_cards_of_the_configuration_do_for_a_model_that_is_not_here() -> None:
    named = Deployment(name="x", model="somebody/home-made", gpus="2x24GiB", engine=OWN)
    found = explained(LOG, named, Prepared())
    assert not any(fix.replanned for fix in found.findings[0].fixes)
    (note,) = found.notes
    assert "--model DIR says where it is" in note
    assert "--gpus" not in note


def test_a_log_that_says_how_large_its_cards_were_is_believed() -> None:
    named = Deployment(name="x", model="cyankiwi/Qwen3.5-35B-A3B-AWQ-4bit", gpus="2x48GiB", engine=OWN)
    found = explained(TOLD, named, Prepared())
    assert "of 23.52 GiB" in found.findings[0].fixes[0].why
    assert any("the cards that were named have 48.00 GiB" in note for note in found.notes)
