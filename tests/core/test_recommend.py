"""Recommendations: what they promise holds when it is planned again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from loadmaster.core import replanning
from loadmaster.core import sheet as sheet_module
from loadmaster.core.argv import parse_argv
from loadmaster.core.facts import GIB, EngineFacts, GpuFacts, LoadSheet, ModelFacts, Processor
from loadmaster.core.plan import make_plan
from loadmaster.core.recommend import recommend
from loadmaster.core.remedy import more_cards, smallest_fix
from loadmaster.core.replanning import divides
from tests.core.launches import ARTICLE, DENSE_9B, GEMMA_27B, MOE_35B, TEXT_8B, UNKNOWN, VL_7B, cards, launch, plan


def best(
    model: ModelFacts, gpus: tuple[GpuFacts, ...], flags: str = "", version: str | None = "0.24.0", **wishes: Any
) -> LoadSheet:
    return recommend(model, gpus, launch(flags, version), EngineFacts("vllm", version), **wishes)


def again(sheet: LoadSheet, model: ModelFacts, gpus: tuple[GpuFacts, ...]) -> LoadSheet:
    parsed = parse_argv(sheet.launch.argv, engine_version=sheet.engine.version)
    return make_plan(model, gpus, parsed, sheet.engine)


@pytest.mark.parametrize("version", [None, "0.20.2", "0.24.0", "0.33.0"])
def test_the_first_case_gets_the_whole_context_with_graphs_and_a_pixel_cap(version: str | None) -> None:
    sheet = best(MOE_35B, cards(24, 24), ARTICLE, version)
    assert sheet.fits is True
    assert sheet.settings is not None
    assert sheet.settings.max_model_len == 262144
    assert sheet.settings.cudagraph_mode == "FULL_AND_PIECEWISE"
    assert sheet.settings.max_pixels is not None and sheet.settings.max_pixels >= 2048**2
    assert "--enforce-eager" not in sheet.launch.argv
    changed = {change.flag: change for change in sheet.launch.changed}
    assert changed["--max-model-len"].from_ == 4096
    assert changed["--enforce-eager"].to is False
    assert changed["--trust-remote-code"].why.startswith("not needed: ")
    assert changed["--max-model-len"].default is None  # it was given
    for change in sheet.launch.changed:
        assert change.flag == "--trust-remote-code" or "GiB" in change.why or "MiB" in change.why
    assert max(sheet.gpus[0].peak_high_bytes.values()) <= 24 * GIB


cases = st.tuples(
    st.sampled_from(["moe", "dense", "vl", "text", "gemma", "unknown"]),
    st.sampled_from([None, "0.17.1", "0.24.0", "0.33.0"]),
    st.sampled_from([(12.0,), (24.0,), (24.0, 24.0), (16.0, 24.0), (79.2,), (24.0, 24.0, 24.0)]),
    st.sampled_from([None, 4096, 65536]),
    st.sampled_from([None, 1, 64]),
    st.sampled_from([None, 1024**2, 4096**2]),
)
MODELS = {"moe": MOE_35B, "dense": DENSE_9B, "vl": VL_7B, "text": TEXT_8B, "gemma": GEMMA_27B, "unknown": UNKNOWN}


@settings(max_examples=25)
@given(cases)
def test_a_recommendation_holds_when_it_is_planned_again(
    case: tuple[str, str | None, tuple[float, ...], int | None, int | None, int | None],
) -> None:
    name, version, sizes, context, concurrency, pixels = case
    model, gpus = MODELS[name], cards(*sizes)
    sheet = best(model, gpus, "", version, context=context, concurrency=concurrency, max_image_pixels=pixels)
    replanned = again(sheet, model, gpus)
    assert replanned.fits == sheet.fits or (sheet.unmet and replanned.fits is True and sheet.fits is False)
    assert [load.peak_bytes for load in replanned.gpus] == [load.peak_bytes for load in sheet.gpus]
    assert replanned.kv_cache == sheet.kv_cache
    if sheet.fits is True and sheet.settings is not None:
        if context is not None:
            assert (sheet.settings.max_model_len or 0) <= context
        if concurrency is not None:
            assert sheet.settings.max_num_seqs == concurrency


def test_wishes_are_kept() -> None:
    sheet = best(MOE_35B, cards(24, 24), context=32768, concurrency=8, max_image_pixels=4096**2)
    assert sheet.fits is True
    assert sheet.settings is not None and sheet.kv_cache is not None and sheet.images is not None
    assert sheet.settings.max_model_len == 32768
    assert (sheet.kv_cache.max_concurrency or 0) >= 8
    assert sheet.images.largest_size == (4096, 4096)


def test_a_wish_without_room_is_said() -> None:
    sheet = best(MOE_35B, cards(24, 24), context=262144, concurrency=16)
    assert sheet.fits is False  # the launch fits, and is not what was asked for
    assert again(sheet, MOE_35B, cards(24, 24)).fits is True
    assert [note for note in sheet.unmet if "16 requests of 262,144 tokens have no room at once" in note]
    assert set(sheet.unmet) <= set(sheet.notes)


def test_a_context_beyond_the_model_is_refused_in_words() -> None:
    sheet = best(MOE_35B, cards(24, 24), context=500000)
    assert sheet.fits is False
    assert sheet.settings is not None and sheet.settings.max_model_len == 262144
    assert sheet.unmet == ("a context of 500,000 tokens was asked for, 262,144 are reached",)
    assert "context-beyond-model" in {item.code for item in sheet.findings}


def test_a_picture_beyond_the_processor_is_said() -> None:
    sheet = best(MOE_35B, cards(24, 24), max_image_pixels=20_000_000)
    assert sheet.fits is True
    assert any("20,000,000 pixels was asked for" in note and "16,777,216" in note for note in sheet.notes)


def test_a_picture_raises_the_context_unless_that_is_fixed_by_a_wish() -> None:
    whole = best(MOE_35B, cards(24, 24), "--max-model-len 4096", max_image_pixels=4096**2)
    assert whole.fits is True and whole.settings is not None and whole.images is not None
    assert (whole.settings.max_model_len or 0) >= 16384 + 32
    assert whole.images.largest_size == (4096, 4096)
    fixed = best(MOE_35B, cards(24, 24), context=4096, max_image_pixels=4096**2)
    assert fixed.fits is False
    assert fixed.unmet[0].startswith("a picture of 16,777,216 pixels was asked for: it is 16,384 tokens")


def test_requests_that_are_asked_for_cost_no_picture() -> None:
    few = best(MOE_35B, cards(24, 24), concurrency=4)
    many = best(MOE_35B, cards(24, 24))
    assert few.settings is not None and many.settings is not None
    assert few.settings.max_num_seqs == 4
    most = 4096**2
    assert (few.settings.max_pixels or most) >= (many.settings.max_pixels or most)


def test_a_change_of_a_default_names_it() -> None:
    changed = {change.flag: change for change in best(MOE_35B, cards(24, 24)).launch.changed}
    assert (changed["--gpu-memory-utilization"].from_, changed["--gpu-memory-utilization"].default) == (None, 0.92)
    assert (changed["--tensor-parallel-size"].from_, changed["--tensor-parallel-size"].default) == (None, 1)


def test_refused_flags_are_dropped_with_the_reason() -> None:
    flags = "--gpu-memory-utilization 95 --max-modle-len 5 --max-num-seqs 0"
    sheet = best(MOE_35B, cards(24, 24), flags)
    assert sheet.fits is True
    dropped = {change.flag: change for change in sheet.launch.changed if change.to is False}
    assert set(dropped) >= {"--gpu-memory-utilization", "--max-modle-len", "--max-num-seqs"}
    assert "must be above 0" in dropped["--gpu-memory-utilization"].why
    assert "--max-modle-len" not in sheet.launch.argv
    assert again(sheet, MOE_35B, cards(24, 24)).fits is True


def test_what_cannot_succeed_says_so_with_numbers_and_what_would_do() -> None:
    one = best(MOE_35B, cards(24))
    assert one.fits is False
    assert "no settings make this launch fit on 1 card of 24.00 GiB: weights take 22.40 GiB" in one.notes[0]
    assert "what would do: 2 cards of 24 GiB" in one.notes[0]
    fixed = best(MOE_35B, cards(24, 24), "--tensor-parallel-size 1")
    assert fixed.fits is False
    assert "what would do: 2 of the 2 cards, where 1 is given" in fixed.notes[0]


def test_nothing_fits_one_card() -> None:
    sheet = best(MOE_35B, cards(24), ARTICLE)
    assert sheet.fits is False
    assert [change.flag for change in sheet.launch.changed] == ["--trust-remote-code", "--tensor-parallel-size"]
    assert "no-kv-memory" in {item.code for item in sheet.findings}


def test_ranks_divide_heads_and_groups() -> None:
    assert [size for size in range(1, 9) if divides(MOE_35B, size)] == [1, 2, 4, 8]
    assert [size for size in range(1, 9) if divides(VL_7B, size)] == [1, 2, 4]
    sheet = best(VL_7B, cards(24, 24, 24))
    assert "--tensor-parallel-size 2" in " ".join(sheet.launch.argv)


def test_the_search_is_short_and_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    original = sheet_module.plan_of

    def counting(*values: Any) -> Any:
        nonlocal count
        count += 1
        return original(*values)

    monkeypatch.setattr(replanning, "plan_of", counting)
    first = best(DENSE_9B, cards(24))
    assert count <= 60
    assert best(DENSE_9B, cards(24)).launch == first.launch


@pytest.mark.parametrize(
    ("flags", "sizes", "flag"),
    [
        (
            "--tensor-parallel-size 2 --max-model-len 262144 --max-num-seqs 16 --gpu-memory-utilization 0.9",
            (24, 24),
            "--mm-processor-kwargs",
        ),
        (
            "--tensor-parallel-size 2 --gpu-memory-utilization 0.99 --language-model-only",
            (24, 24),
            "--gpu-memory-utilization",
        ),
        ("--max-model-len 4096", (24, 24), "--tensor-parallel-size"),
        (
            "--tensor-parallel-size 2 --max-model-len 262144 --max-num-seqs 16 --language-model-only",
            (15, 15),
            "--max-model-len",
        ),
    ],
)
def test_the_smallest_change(flags: str, sizes: tuple[float, ...], flag: str) -> None:
    gpus = cards(*sizes)
    sheet = plan(MOE_35B, gpus, flags)
    assert sheet.fits is not True
    (fix,) = smallest_fix(MOE_35B, gpus, launch(flags), EngineFacts("vllm", "0.24.0"), sheet)
    assert flag in fix.argv
    assert fix.replanned
    assert plan(MOE_35B, gpus, f"{flags} " + " ".join(word.replace(" ", "") for word in fix.argv)).fits is True


def test_what_fits_needs_no_fix() -> None:
    sheet = plan(MOE_35B, cards(24, 24), ARTICLE)
    assert smallest_fix(MOE_35B, cards(24, 24), launch(ARTICLE), EngineFacts("vllm", "0.24.0"), sheet) == ()


def test_where_no_flag_helps_more_cards_are_named_by_the_plan_itself() -> None:
    sheet = plan(MOE_35B, cards(24), "")
    assert sheet.fits is False
    (fix,) = sheet.findings[0].fixes
    assert fix.argv[:2] == ("--tensor-parallel-size", "2")
    assert fix.why.startswith("2 cards of 24 GiB; planned with so many: serving ")
    words = " ".join(word.replace(" ", "") for word in fix.argv)
    assert plan(MOE_35B, cards(24, 24), words).fits is True


def test_a_number_of_cards_that_only_holds_weights_and_cache_is_not_called_planned() -> None:
    (holding,) = more_cards(MOE_35B, cards(24), launch("--kv-cache-memory-bytes 40G"), EngineFacts("vllm", "0.24.0"))
    assert not holding.replanned
    assert "not all fits" in holding.why


def test_full_width_weights_name_what_fewer_bits_take() -> None:
    fixes = plan(DENSE_9B, cards(12), "").findings[0].fixes
    assert any("in 8 bits or" in fix.why for fix in fixes)
    assert not any("bits" in fix.why for fix in plan(MOE_35B, cards(24), "").findings[0].fixes)


VIDEO = structs.replace(VL_7B, processor=Processor(min_pixels=3136, max_pixels=12845056))


def test_a_profile_on_a_video_is_cured_before_pictures_are_shrunk() -> None:
    sheet = plan(VIDEO, cards(26), '--limit-mm-per-prompt {"image":4} --max-model-len 65536')
    assert sheet.images is not None and sheet.images.profiled_modality == "video"
    assert sheet.fits is False
    fix = sheet.findings[0].fixes[0]
    assert json.loads(fix.argv[fix.argv.index("--limit-mm-per-prompt") + 1]) == {"image": 4, "video": 0}


def test_videos_that_were_asked_for_stay() -> None:
    sheet = plan(VIDEO, cards(24), '--limit-mm-per-prompt {"video":1} --max-model-len 65536')
    assert sheet.fits is False
    assert all("--limit-mm-per-prompt" not in fix.argv for fix in sheet.findings[0].fixes)
    kept = best(VIDEO, cards(24), '--limit-mm-per-prompt {"video":1}')
    assert "--limit-mm-per-prompt" not in {change.flag for change in kept.launch.changed}


def test_a_recommendation_gives_up_videos_with_the_reason_in_bytes() -> None:
    sheet = best(VIDEO, cards(24))
    assert sheet.fits is True
    change = next(change for change in sheet.launch.changed if change.flag == "--limit-mm-per-prompt")
    assert change.to == {"video": 0}
    assert "GiB more for the cache" in change.why
    assert sheet.images is not None and sheet.images.profiled_modality == "image"
