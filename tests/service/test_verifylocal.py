"""Cards and memory of this machine against the plan, with readings given."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import pytest

from loadmaster.core.deployment import Deployment, EngineSection
from loadmaster.core.facts import (
    GIB,
    Component,
    EngineFacts,
    GpuFacts,
    GpuLoad,
    LaunchPlan,
    LoadSheet,
    ModelSummary,
)
from loadmaster.edge.cardactivity import CardActivity
from loadmaster.edge.gpus import GpuSpecError
from loadmaster.service import verifylocal
from loadmaster.service.verifylocal import Installation, Watch, cards, memory, watching


def load(index: int, total: int = 24 * GIB) -> GpuLoad:
    return GpuLoad(
        index=index,
        total_bytes=total,
        budget_bytes=22 * GIB,
        components=(Component("context", GIB, GIB, GIB, "assumed"),),
        peak_bytes={"steady": 21 * GIB, "serving": 22 * GIB},
        peak_low_bytes={"steady": 20 * GIB, "serving": 21 * GIB},
        peak_high_bytes={"steady": 22 * GIB, "serving": 23 * GIB},
    )


def planned(count: int = 2, engine: str = "vllm", total: int = 24 * GIB) -> Installation:
    sheet = LoadSheet(
        fits=True,
        engine=EngineFacts(engine),  # type: ignore[arg-type]
        model=ModelSummary(architecture=None, quantization=None, parameters=None),
        gpus=tuple(load(index, total) for index in range(count)),
        kv_cache=None,
        launch=LaunchPlan(argv=()),
    )
    kind = EngineSection(kind=engine)  # type: ignore[arg-type]
    return Installation(deployment=Deployment(name="d", model="m", engine=kind), plan=sheet, engine_pid=os.getpid())


@pytest.fixture(autouse=True)
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuple(GpuFacts(index=index, total_bytes=24 * GIB, uuid=f"GPU-{index}", source="nvml") for index in range(2))
    monkeypatch.setattr(verifylocal, "read_nvml", lambda: found)


def seen(busy: Sequence[int | None], used: Sequence[float | None]) -> Watch:
    watch = Watch()
    watch.add(
        tuple(
            CardActivity(f"GPU-{index}", None if one is None else int(one * GIB), busy[index])
            for index, one in enumerate(used)
        )
    )
    return watch


@pytest.mark.parametrize(
    ("busy", "used", "status", "words"),
    [
        ((90, 85), (21.0, 21.2), "passed", "GPU 1: at most 85 % busy, 21.20 GiB"),
        ((90, 0), (21.0, 21.2), "failed", "GPU 1 did nothing"),
        ((90, 85), (21.0, 12.0), "failed", "unevenly"),
        ((90, None), (21.0, 21.2), "not_applicable", "does not tell"),
        ((90, 85), (21.0, None), "passed", "unknown"),
    ],
)
def test_both_cards_have_to_work(
    busy: Sequence[int | None], used: Sequence[float | None], status: str, words: str
) -> None:
    outcome = cards(planned(), seen(busy, used))
    assert (outcome.status, words in outcome.detail) == (status, True), outcome.detail


@pytest.mark.parametrize(
    ("used", "status"),
    [((21.0, 22.9), "passed"), ((21.0, 23.5), "failed"), ((19.0, 21.0), "failed"), ((21.0, None), "not_applicable")],
)
def test_memory_lies_between_idle_and_serving(used: Sequence[float | None], status: str) -> None:
    assert memory(planned(), seen((1, 1), used)).status == status


def test_the_busiest_reading_counts() -> None:
    watch = seen((0, 0), (21, 21))
    watch.add((CardActivity("GPU-0", 1, 50), CardActivity("GPU-1", 1, 60)))
    watch.add((CardActivity("GPU-0", 1, 0), CardActivity("GPU-1", 1, 0)))
    assert cards(planned(), watch).status == "passed"


def test_a_plan_for_other_cards_says_nothing_of_these() -> None:
    for other in (planned(total=80 * GIB), planned(count=3)):
        outcome = cards(other, seen((9, 9), (21, 21)))
        assert outcome.status == "not_applicable"
        assert "other cards" in outcome.detail


def test_no_driver_and_no_plan_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> tuple[GpuFacts, ...]:
        raise GpuSpecError("no NVIDIA driver", None)

    monkeypatch.setattr(verifylocal, "read_nvml", nothing)
    assert "no NVIDIA driver" in cards(planned(), Watch()).detail
    unplanned = Installation(deployment=Deployment(name="d", model="m"))
    assert cards(unplanned, Watch()).detail == "the service has no plan"
    assert memory(unplanned, Watch()).status == "not_applicable"


def test_host_memory_is_that_of_the_engines_process() -> None:
    assert memory(planned(1, "llamacpp"), Watch()).status == "passed"
    assert "resident" in memory(planned(1, "llamacpp"), Watch()).detail
    assert cards(planned(1, "llamacpp"), Watch()).status == "not_applicable"


def test_watching_ends_with_the_block() -> None:
    async def run() -> int:
        async with watching():
            await asyncio.sleep(0.01)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
