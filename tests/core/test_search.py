"""What a recommendation gives up first, what it never touches, and how many cards it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from loadmaster.core.argv import parse_argv
from loadmaster.core.facts import GIB, EngineFacts, GpuFacts, LoadSheet, ModelFacts, Processor, Quantization
from loadmaster.core.plan import make_plan
from loadmaster.core.recommend import recommend
from loadmaster.core.search import policy
from tests.core.launches import DENSE_9B, GEMMA_27B, MOE_35B, TEXT_8B, UNKNOWN, VL_7B, cards, launch, plan

VIDEO = structs.replace(VL_7B, processor=Processor(min_pixels=3136, max_pixels=12845056))
VERSION = "0.24.0"


def best(model: ModelFacts, gpus: tuple[GpuFacts, ...], flags: str = "", **wishes: Any) -> LoadSheet:
    return recommend(model, gpus, launch(flags, VERSION), EngineFacts("vllm", VERSION), **wishes)


def length(sheet: LoadSheet) -> int:
    assert sheet.settings is not None and sheet.settings.max_model_len is not None
    return sheet.settings.max_model_len


def cap(sheet: LoadSheet) -> int:
    assert sheet.settings is not None
    return sheet.settings.max_pixels or 1 << 30


def test_each_step_asks_for_less_and_says_why() -> None:
    table = policy()
    assert table.step[0].context == 0 and table.step[0].few_cards
    for before, after in zip(table.step, table.step[1:], strict=False):
        less = (
            (before.context or 1 << 30) > (after.context or 1 << 30),
            before.sequences > after.sequences,
            before.pixels > after.pixels,
            before.video and not after.video,
            before.graphs and not after.graphs,
        )
        assert any(less)
        assert after.sequences <= before.sequences and after.pixels <= before.pixels
        assert len(after.source) > 20
    for step in table.step:
        if step.pixels < table.small_picture:
            assert 0 < step.context <= table.small_context and step.sequences <= 4


@pytest.mark.parametrize("sizes", [(12,), (16,), (20,), (24,), (24, 24), (24,) * 4, (79.2,)])
@pytest.mark.parametrize("model", [MOE_35B, DENSE_9B, VIDEO, GEMMA_27B], ids=["35b", "9b", "vl7b", "gemma"])
def test_pictures_stay_useful_while_the_context_is_long(model: ModelFacts, sizes: tuple[float, ...]) -> None:
    sheet = best(model, cards(*sizes))
    parsed = parse_argv(sheet.launch.argv, engine_version=VERSION)
    assert make_plan(model, cards(*sizes), parsed, sheet.engine).fits == sheet.fits
    if sheet.fits is not False and cap(sheet) < 1024**2:
        assert length(sheet) <= 16384


def test_what_was_given_up_last_comes_back_first() -> None:
    """Between pictures of 2048x2048 and of 1024x1024 the largest is taken before more than the step's context."""
    sizes = [best(DENSE_9B, cards(size)) for size in (21.5, 22, 22.5, 23)]
    assert any(1024**2 < cap(sheet) < 2048**2 for sheet in sizes if sheet.fits is True)
    for sheet in sizes:
        if sheet.fits is True and cap(sheet) < 2048**2:
            assert length(sheet) >= 16384


def test_a_context_given_as_a_flag_is_not_raised_for_a_wish() -> None:
    sheet = best(MOE_35B, cards(24, 24), "--max-model-len 32768", concurrency=8)
    assert sheet.fits is True and length(sheet) == 32768
    assert sheet.kv_cache is not None and (sheet.kv_cache.max_concurrency or 0) >= 8
    assert length(best(MOE_35B, cards(24, 24), "--max-model-len 4096 --max-num-seqs 8", concurrency=4)) == 4096
    for_a_picture = best(MOE_35B, cards(24, 24), "--max-model-len 4096", max_image_pixels=4096**2)
    assert 16384 + 32 <= length(for_a_picture) < 32768
    why = {change.flag: change.why for change in for_a_picture.launch.changed}["--max-model-len"]
    assert why.startswith("room for a picture")


def test_a_context_given_as_a_flag_is_not_raised_where_the_launch_does_not_fit() -> None:
    given = "--tensor-parallel-size 2 --max-model-len 131072 --max-num-seqs 64"
    assert plan(MOE_35B, cards(20, 20), given).fits is not True
    sheet = best(MOE_35B, cards(20, 20), given)
    assert sheet.fits is True and sheet.settings is not None
    assert length(sheet) == 131072
    assert sheet.settings.max_num_seqs == 64  # pictures are what does not fit
    assert cap(sheet) < 4096**2


def test_given_flags_are_changed_only_when_nothing_fits_with_them_and_then_said() -> None:
    given = "--max-model-len 262144 --max-num-seqs 64"
    sheet = best(DENSE_9B, cards(24), given)
    assert sheet.fits is True
    assert length(sheet) < 262144
    changed = {change.flag: change for change in sheet.launch.changed}
    assert changed["--max-model-len"].from_ == 262144


@pytest.mark.parametrize(
    ("model", "sizes", "used"),
    [
        (MOE_35B, (24,) * 2, 2),
        (MOE_35B, (24,) * 4, 2),
        (MOE_35B, (79.2,) * 8, 1),
        (TEXT_8B, (24,) * 2, 2),
        (TEXT_8B, (48,) * 2, 1),
        (GEMMA_27B, (24,) * 4, 2),
    ],
)
def test_no_more_cards_than_the_whole_context_and_large_pictures_need(
    model: ModelFacts, sizes: tuple[float, ...], used: int
) -> None:
    sheet = best(model, cards(*sizes))
    assert sheet.fits is True and sheet.settings is not None
    assert sheet.settings.tensor_parallel_size == used
    left = [note for note in sheet.notes if note.startswith("the launch needs ")]
    assert bool(left) == (used < len(sizes))
    if left:
        dense = model.text.num_experts is None
        assert ("--data-parallel-size" in left[0]) == dense
        assert not any("not used by this launch" in note for note in sheet.notes)
    given = best(model, cards(*sizes), f"--tensor-parallel-size {len(sizes)}")
    assert given.settings is not None and given.settings.tensor_parallel_size == len(sizes)


def test_what_may_fit_is_better_than_what_surely_does_not() -> None:
    gpus = cards(13, 13)
    sheet = best(MOE_35B, gpus)
    assert sheet.fits is None
    assert "no settings make this launch fit for certain" in sheet.notes[0]
    assert "the launch below fits by the expected figures" in sheet.notes[0]
    assert max(load.peak_bytes["serving"] for load in sheet.gpus) <= 13 * GIB
    fix = plan(MOE_35B, gpus, "").findings[0].fixes[0]
    assert fix.why.endswith("it may fit") and not fix.replanned


def test_nothing_is_made_up_for_weights_of_unknown_size() -> None:
    sheet = best(UNKNOWN, cards(24))
    assert sheet.fits is None
    assert sheet.launch.changed == ()


def test_a_context_that_is_no_use_is_called_that() -> None:
    for tenths in range(160, 175):
        sheet = best(TEXT_8B, cards(tenths / 10))
        if sheet.fits is True and length(sheet) < 4096:
            break
    else:
        pytest.fail("no card with so little room")
    words = next(note for note in sheet.notes if note.startswith("not useful: "))
    assert "a card with 24 GiB or a checkpoint of fewer bits" in words
    quantised = structs.replace(TEXT_8B, quantization=Quantization(method="gptq", bits=4, group_size=128))
    assert not any(note.startswith("not useful") for note in best(quantised, cards(24)).notes)
    asked = best(TEXT_8B, cards(24), context=2048)
    assert not any(note.startswith("not useful") for note in asked.notes)


def test_a_plan_offers_the_recommendation_where_no_two_flags_help() -> None:
    gpus = cards(16, 16)
    sheet = plan(MOE_35B, gpus, "")
    assert sheet.fits is False and sheet.findings[0].code == "oom-weights"
    fix = sheet.findings[0].fixes[0]
    assert fix.replanned and "the launch that --recommend finds" in fix.why
    assert {"--tensor-parallel-size", "--max-model-len"} <= set(fix.argv)
    kwargs = fix.argv[fix.argv.index("--mm-processor-kwargs") + 1]
    assert json.loads(kwargs)["max_pixels"] >= 1024**2
    words = " ".join(word.replace(" ", "") for word in fix.argv)
    assert plan(MOE_35B, gpus, words).fits is True


def test_cards_that_hold_the_weights_alone_are_named() -> None:
    sheet = plan(TEXT_8B, cards(9.4, 9.4), "--kv-cache-memory-bytes 8G")
    assert sheet.fits is False
    fix = sheet.findings[0].fixes[0]
    assert fix.argv[:2] == ("--tensor-parallel-size", "2") and not fix.replanned
    assert "the weights fit" in fix.why


def test_steps_of_many_tokens_are_given_up_before_context_pictures_and_graphs() -> None:
    small = (GpuFacts(index=0, total_bytes=round(15.99 * GIB)), GpuFacts(index=1, total_bytes=round(15.99 * GIB)))
    flags = "--tensor-parallel-size 2 --max-model-len 131072 --max-num-batched-tokens"
    many = best(MOE_35B, small, f"{flags} 16384").settings
    few = best(MOE_35B, small, f"{flags} 2048").settings
    assert many is not None and few is not None
    assert 2048 <= many.max_num_batched_tokens < 16384
    assert (
        (many.max_model_len, many.cudagraph_mode)
        == (few.max_model_len, few.cudagraph_mode)
        == (131072, "FULL_AND_PIECEWISE")
    )
    assert many.max_pixels == few.max_pixels


def test_steps_of_many_tokens_stay_where_they_fit() -> None:
    sheet = best(DENSE_9B, cards(79.2), "--max-num-batched-tokens 16384", concurrency=4)
    assert sheet.settings is not None
    assert sheet.fits is True
    assert sheet.settings.max_num_batched_tokens == 16384
