"""What is learnt on one machine: only from runs that agree, never narrower than what was seen, and it can be undone."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadmaster.core.argv import parse_argv
from loadmaster.core.facts import GIB, MIB, EngineFacts, GpuFacts, LoadSheet
from loadmaster.core.gputable import parse_gpu_spec
from loadmaster.core.learning import Sample, learn, samples_of
from loadmaster.core.localcalibration import COMPONENTS, Learnt, LearntGpu, key_of, learnt_for, with_learnt
from loadmaster.core.reconcile import reconcile
from loadmaster.core.runrecord import RunRecord
from loadmaster.core.sheet import load_sheet, plan_of
from tests.recordedruns import RECORDS, model_of, planned, readings_of

_CARD = "NVIDIA H200"
_ENGINE = EngineFacts("vllm", "0.24.0")
_ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"
_RUN = "h200-tp2-graph-4096-s256"


def _sample(run: int, difference: int, component: str = "cuda_graphs", **changes: object) -> Sample:
    made = Sample(
        run=run,
        at=1000.0 + run,
        card=_CARD,
        cards=2,
        engine="vllm",
        version="0.24.0",
        architecture=_ARCHITECTURE,
        component=component,
        planned=GIB,
        difference=difference,
    )
    return structs.replace(made, **changes)


_DIFFERENCES = st.lists(st.integers(-GIB // 2, GIB), min_size=1, max_size=12)


@given(_DIFFERENCES)
def test_only_three_runs_that_agree_teach(differences: list[int]) -> None:
    learnt = learn([_sample(run, difference) for run, difference in enumerate(differences)])
    spread = max(differences) - min(differences)
    assert bool(learnt) == (len(differences) >= 3 and spread <= 64 * MIB)


@given(st.integers(-GIB // 2, GIB), st.lists(st.integers(0, 64 * MIB), min_size=3, max_size=12))
def test_bounds_are_never_narrower_than_what_was_seen(base: int, off: list[int]) -> None:
    differences = [base + one for one in off]
    [learnt] = learn([_sample(run, difference) for run, difference in enumerate(differences)])
    assert learnt.low < min(differences) <= learnt.difference <= max(differences) < learnt.high
    assert learnt.difference in differences


def test_several_cards_of_one_run_are_one_run() -> None:
    assert learn([_sample(1, 0), _sample(1, 5), _sample(1, 7), _sample(2, 3)]) == ()


def test_other_cards_versions_and_models_teach_nothing() -> None:
    samples = [_sample(1, 0), _sample(2, 0)]
    for changes in ({"card": "NVIDIA L40S"}, {"cards": 1}, {"version": "0.25.0"}, {"architecture": "Other"}):
        assert learn([*samples, _sample(3, 0, **changes)]) == ()
    assert len(learn([*samples, _sample(3, 0)])) == 1


def test_one_run_that_disagrees_undoes_it() -> None:
    agreeing = [_sample(run, 0) for run in range(5)]
    assert learn(agreeing)
    assert learn([*agreeing, _sample(6, 65 * MIB)]) == ()


def test_what_is_forgotten_is_learnt_only_from_later_runs() -> None:
    samples = [_sample(run, 0) for run in range(5)]
    key = samples[0].key
    assert learn(samples, {key: 1004.0}) == ()
    assert learn(samples, {key: 1001.0})[0].runs == (2, 3, 4)
    assert learn(samples, {"other": 9999.0}) == learn(samples)


def _sheet(gpus: Sequence[GpuFacts], engine: EngineFacts = _ENGINE) -> LoadSheet:
    record = RECORDS[_RUN]
    model = model_of(record["sample"]["name"], record["sample"]["quantization"])
    launch = parse_argv(["vllm", "serve", model.name, *record["flags"]], engine_version=engine.version)
    return load_sheet(plan_of(model, gpus, launch, engine))


def _cards(name: str | None = _CARD) -> tuple[GpuFacts, ...]:
    return tuple(structs.replace(gpu, name=name) for gpu in parse_gpu_spec(RECORDS[_RUN]["gpus"]))


def _learnt(component: str, difference: int, low: int, high: int) -> Learnt:
    key = key_of(2, _CARD, "vllm", "0.24.0", _ARCHITECTURE, component)
    return Learnt(
        key=key, component=component, difference=difference, low=low, high=high, runs=(1, 2, 3), last="2026-11-30"
    )


@given(
    component=st.sampled_from(COMPONENTS),
    difference=st.integers(-100 * MIB, GIB),
    below=st.integers(16 * MIB, 100 * MIB),
    above=st.integers(16 * MIB, 100 * MIB),
)
def test_a_plan_uses_what_was_learnt_and_says_so(component: str, difference: int, below: int, above: int) -> None:
    plain = _sheet(_cards())
    learnt = _learnt(component, difference, difference - below, difference + above)
    sheet = _sheet(with_learnt(_cards(), [learnt]))
    for before, after in zip(plain.gpus, sheet.gpus):
        parts = {part.name: part for part in after.components}
        for part in before.components:
            if part.name == component:
                assert parts[component].bytes == max(0, part.bytes + difference)
                assert parts[component].basis == "measured"
                assert parts[component].high - parts[component].low >= min(below + above, parts[component].high)
            elif part.name not in ("headroom", "kv_cache"):
                assert parts[part.name] == part
        assert sum(part.bytes for part in after.components if part.name != "headroom") == after.peak_bytes["serving"]
    said = [note for note in sheet.notes if note.startswith("local calibration")]
    assert said == [
        f"local calibration, {component} of {_CARD}: learnt from 3 runs on this machine, the last on 2026-11-30"
    ]


def test_dropping_it_brings_the_plan_back_exactly() -> None:
    cards = _cards()
    learnt = [_learnt(component, 100 * MIB, 0, 200 * MIB) for component in COMPONENTS]
    assert _sheet(with_learnt(cards, learnt)) != _sheet(cards)
    assert with_learnt(cards, []) == cards
    assert _sheet(with_learnt(cards, [])) == _sheet(cards)


def test_it_is_used_for_nothing_else() -> None:
    learnt = [_learnt(component, 100 * MIB, 0, 200 * MIB) for component in COMPONENTS]
    assert with_learnt(_cards("NVIDIA H100"), learnt) == _cards("NVIDIA H100")
    assert with_learnt(_cards(None), learnt) == _cards(None)
    own = with_learnt(_cards(), learnt)
    assert all(isinstance(card, LearntGpu) for card in own)
    assert set(learnt_for(own[0], 2, _ENGINE, _ARCHITECTURE)) == set(COMPONENTS)
    assert learnt_for(own[0], 1, _ENGINE, _ARCHITECTURE) == {}
    assert learnt_for(own[0], 2, EngineFacts("vllm", "0.25.0"), _ARCHITECTURE) == {}
    assert learnt_for(own[0], 2, _ENGINE, "Other") == {}
    other = EngineFacts("vllm", "0.25.0")
    assert _sheet(own, other) == _sheet(_cards(), other)


def _record(corrections: dict[str, int] | None = None) -> RunRecord:
    return RunRecord(
        deployment="demo",
        started=1000.0,
        engine=_ENGINE,
        architecture=_ARCHITECTURE,
        cards=_cards(),
        corrections=corrections or {},
    )


def test_a_run_teaches_what_its_readings_name() -> None:
    sheet, replays = planned(_RUN)
    sheet = structs.replace(sheet, gpus=tuple(structs.replace(load, name=_CARD) for load in sheet.gpus))
    actual = structs.replace(readings_of(_RUN), context_bytes=round(1.94 * GIB))
    found = reconcile(sheet, actual, "ready", replays)
    samples = {sample.component: sample for sample in samples_of(7, _record(), [found])}
    assert set(samples) == set(COMPONENTS)
    card = found.cards[0]
    lines = {line.name: line for line in card.lines}
    assert samples["cuda_graphs"].difference == lines["cuda_graphs"].difference
    assert abs(samples["workspace"].difference) < 0.3 * GIB
    # of a run whose plan had a correction in it, the difference to the plan's own figure
    again = {one.component: one for one in samples_of(8, _record({"cuda_graphs": 10 * MIB}), [found])}
    assert again["cuda_graphs"].difference == samples["cuda_graphs"].difference + 10 * MIB
    assert again["context"] == structs.replace(samples["context"], run=8)
    # no context in the log, as in most: what it is off by counts as the workspace's
    unread = reconcile(sheet, structs.replace(actual, context_bytes=None), "ready", replays)
    fewer = {sample.component: sample for sample in samples_of(7, _record(), [unread])}
    assert set(fewer) == {"cuda_graphs", "workspace"}
    assert fewer["workspace"].difference == samples["workspace"].difference + samples["context"].difference
    # something else unread: what is left over belongs to nobody
    log = structs.replace(actual.log, kv_available_bytes=None)
    vague = reconcile(sheet, structs.replace(actual, log=log), "ready", replays)
    assert {sample.component for sample in samples_of(7, _record(), [vague])} == {"context", "cuda_graphs"}
    # at the highest point of serving nothing is learnt
    assert samples_of(7, _record(), [reconcile(sheet, actual, "serving", replays)]) == []
