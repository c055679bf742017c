"""Load sheets, findings and models as text and SVG: complete without colour, within 80 columns, in a pipe."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadmaster.core.facts import (
    GIB,
    Change,
    Component,
    EngineFacts,
    Evidence,
    Finding,
    Fix,
    GpuLoad,
    KvCache,
    LaunchPlan,
    LoadSheet,
    ModelSummary,
    Settings,
    Severity,
)
from loadmaster.render import units
from loadmaster.render.findings import finding_text, findings_text, paste, summary
from loadmaster.render.launch import flag_text, is_secret
from loadmaster.render.paint import ansi
from loadmaster.render.sheet import COMPONENTS, bar, sheet_text
from loadmaster.render.svg import sheet_svg

sizes = st.integers(min_value=0, max_value=40 * GIB)


@st.composite
def loads(draw: st.DrawFn) -> GpuLoad:
    names = draw(st.lists(st.sampled_from([n for n in COMPONENTS if n != "headroom"]), unique=True, min_size=1))
    parts = []
    for name in names:
        low, middle, high = sorted(draw(st.tuples(sizes, sizes, sizes)))
        parts.append(Component(name, middle, low, high, "assumed"))
    serving = sum(part.bytes for part in parts)
    return GpuLoad(
        index=draw(st.integers(0, 7)),
        total_bytes=draw(st.integers(min_value=GIB, max_value=141 * GIB)),
        budget_bytes=20 * GIB,
        components=tuple(parts),
        peak_bytes={"start": serving, "steady": serving, "serving": serving},
        peak_low_bytes={"serving": sum(part.low for part in parts)},
        peak_high_bytes={"serving": sum(part.high for part in parts)},
    )


def a_sheet(*gpus: GpuLoad, fits: bool | None = True, findings: tuple[Finding, ...] = ()) -> LoadSheet:
    return LoadSheet(
        fits=fits,
        engine=EngineFacts("vllm", "0.24.0"),
        model=ModelSummary(
            architecture="Qwen3_5MoeForConditionalGeneration", quantization="w4 g32", parameters=35_107_000_000
        ),
        gpus=gpus,
        kv_cache=KvCache(
            available_bytes=8 * GIB,
            block_tokens=1056,
            blocks=799,
            tokens=831_162,
            max_concurrency=3.17,
            bytes_per_request_at_max_len=2_724_986_880,
            max_model_len=262_144,
        ),
        launch=LaunchPlan(argv=("vllm", "serve", "a model", "--max-num-seqs", "16")),
        settings=Settings(version="0.24", max_model_len=262_144, max_num_seqs=16),
        findings=findings,
    )


@given(st.lists(loads(), min_size=1, max_size=4))
def test_a_sheet_says_the_same_with_and_without_colour(gpus: list[GpuLoad]) -> None:
    sheet = a_sheet(*gpus)
    assert re.sub(r"\x1b\[[0-9;]*m", "", sheet_text(sheet, paint=ansi)) == sheet_text(sheet)


@given(loads(), st.integers(20, 200))
def test_a_bar_has_its_width_and_shows_every_component(gpu: GpuLoad, cells: int) -> None:
    drawn = bar(gpu, cells)
    assert len(drawn) == cells
    shown = {c.name for c in gpu.components if c.bytes > 0}
    if gpu.peak_bytes["serving"] <= gpu.total_bytes:
        assert {COMPONENTS[name][0] for name in shown} <= {letter for letter, _ in drawn}
        assert not any(letter == "!" for letter, _ in drawn)


@given(loads())
def test_every_line_of_a_table_fits_80_columns(gpu: GpuLoad) -> None:
    lines = sheet_text(a_sheet(gpu)).splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("launch:")] == []


@given(st.lists(loads(), min_size=1, max_size=3), st.sampled_from([True, False, None]))
def test_the_picture_is_well_formed_and_names_every_component(gpus: list[GpuLoad], fits: bool | None) -> None:
    picture = sheet_svg(a_sheet(*gpus, fits=fits))
    ElementTree.fromstring(picture)
    assert all(c.name in picture for gpu in gpus for c in gpu.components if c.bytes > 0)


def test_equal_cards_share_one_table() -> None:
    gpu = GpuLoad(
        index=0,
        total_bytes=24 * GIB,
        budget_bytes=22 * GIB,
        components=(Component("kv_cache", GIB, GIB, GIB, "computed"),),
        peak_bytes={"serving": GIB},
        peak_low_bytes={"serving": GIB},
        peak_high_bytes={"serving": GIB},
    )
    twin = GpuLoad(**{name: getattr(gpu, name) for name in gpu.__struct_fields__} | {"index": 1})
    text = sheet_text(a_sheet(gpu, twin))
    assert "GPU 0, 1  24.00 GiB each" in text
    assert text.count("kv_cache") == 1


def one_card(part: Component, total: int = 24 * GIB) -> GpuLoad:
    return GpuLoad(
        index=0,
        total_bytes=total,
        budget_bytes=22 * GIB,
        components=(part,),
        peak_bytes={"serving": part.bytes},
        peak_low_bytes={"serving": part.low},
        peak_high_bytes={"serving": part.high},
    )


def test_the_mark_beyond_the_card_is_explained_where_it_stands() -> None:
    part = Component("kv_cache", 30 * GIB, 30 * GIB, 30 * GIB, "computed")
    assert "  ! beyond the card's end\n" in sheet_text(a_sheet(one_card(part)))
    assert "beyond the card's end" not in sheet_text(a_sheet(one_card(part, 40 * GIB)))


def test_a_wide_assumption_says_what_it_holds() -> None:
    wide = Component("context", GIB, 0, 14 * GIB, "assumed", "prompts that are kept")
    assert "      prompts that are kept\n" in sheet_text(a_sheet(one_card(wide)))
    narrow = Component("context", GIB, GIB, GIB + GIB // 2, "assumed", "prompts that are kept")
    assert "prompts that are kept" not in sheet_text(a_sheet(one_card(narrow)))


def test_three_numbers_of_a_cache_are_explained_where_they_differ() -> None:
    part = Component("kv_cache", GIB, GIB, GIB, "computed")
    sheet = a_sheet(one_card(part))
    assert "each kind of layer takes blocks of its own" in sheet_text(sheet)
    cache = structs.replace(sheet.kv_cache, tokens=799 * 1056)  # type: ignore[type-var]
    assert "each kind of layer" not in sheet_text(structs.replace(sheet, kv_cache=cache))


def test_the_last_lines_say_what_kind_of_no_it_is() -> None:
    part = Component("kv_cache", GIB, GIB, GIB, "computed")
    sheet = a_sheet(one_card(part), fits=False)
    assert sheet_text(sheet).splitlines()[-2:] == [
        "DOES NOT FIT",
        "does not fit: vllm serve 'a model' --max-num-seqs 16",
    ]
    refused = structs.replace(sheet, findings=(Finding("unknown-flag", "error", "t", "c"),))
    assert sheet_text(refused).splitlines()[-2] == "DOES NOT START"
    wished = structs.replace(sheet, unmet=("8 requests were asked for, 4 are reached",))
    assert sheet_text(wished).splitlines()[-2:] == [
        "DOES NOT FIT AS WISHED",
        "launch: vllm serve 'a model' --max-num-seqs 16",
    ]


def test_a_change_of_a_default_names_it() -> None:
    changed = (
        Change("--gpu-memory-utilization", 0.85, "why", default=0.92),
        Change("--enforce-eager", False, "w", True),
    )
    sheet = structs.replace(a_sheet(), launch=LaunchPlan(argv=(), changed=changed))
    text = sheet_text(sheet)
    assert "--gpu-memory-utilization: default 0.92 -> 0.85" in text
    assert "--enforce-eager: given -> dropped" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (GIB, "1.00 GiB"),
        (1300 * GIB, "1,300.00 GiB"),
    ],
)
def test_sizes(value: int | None, text: str) -> None:
    assert units.size(value) == text


def test_unknown_is_said_never_zero() -> None:
    assert units.gib(None) == units.count(None) == units.parameters(None) == "unknown"


def test_a_finding_has_what_why_evidence_and_a_pasteable_fix() -> None:
    finding = Finding(
        code="oom-weights",
        severity="error",
        title="the weights do not fit on GPU 0",
        cause="22.59 GiB of weights against 24.00 GiB less 0.80 GiB of context.",
        evidence=(Evidence("plan", "weights.language 22.10 GiB", line=3),),
        fixes=(
            Fix(why="then each card needs 11.30 GiB", argv=("--tensor-parallel-size", "2"), replanned=True),
            Fix(why="not planned", command="hf download org/model", env={"HF_HOME": "/a b"}),
        ),
    )
    assert finding_text(finding).splitlines() == [
        "error[oom-weights]: the weights do not fit on GPU 0",
        "  22.59 GiB of weights against 24.00 GiB less 0.80 GiB of context.",
        "  | plan line 3: weights.language 22.10 GiB",
        "  fix: --tensor-parallel-size 2",
        "       then each card needs 11.30 GiB",
        "  try: HF_HOME='/a b' hf download org/model",
        "       not planned",
    ]


def test_a_json_value_in_a_fix_can_be_pasted() -> None:
    fix = Fix(why="", argv=("--mm-processor-kwargs", '{"max_pixels": 1048576}'), remove=("--enforce-eager",))
    assert paste(fix) == """--mm-processor-kwargs '{"max_pixels": 1048576}'   (drop --enforce-eager)"""


def test_a_summary_counts_each_severity() -> None:
    severities: list[Severity] = ["error", "note", "error"]
    findings = [Finding(code="c", severity=severity, title="t", cause="") for severity in severities]
    assert summary(findings) == "2 errors, 1 note"
    assert summary([]) == "no findings"
    assert findings_text([]) == ""


def test_secrets_are_not_shown() -> None:
    assert flag_text("--api-key", "sk-1") == "--api-key '***'"
    assert flag_text("--max-model-len", 4096) == "--max-model-len 4096"
    assert all(is_secret(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "--api-key"))
    assert not any(is_secret(name) for name in ("--tokenizer", "--max-num-batched-tokens", "CUDA_VISIBLE_DEVICES"))
