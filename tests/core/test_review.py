"""Damaged files and refused flags decide a load sheet, whatever the bytes say."""

from __future__ import annotations

import pytest
from msgspec import structs

from loadmaster.core.check import checked_launch
from loadmaster.core.facts import EngineFacts, Evidence, Finding, ModelFacts, ModelFile
from loadmaster.core.review import weights_are_whole
from tests.core.launches import ARTICLE, DENSE_9B, GEMMA_27B, MOE_35B, VL_7B, cards, launch, plan

ROOM = "--tensor-parallel-size 2 --max-model-len 8192 --max-num-seqs 4 --gpu-memory-utilization 0.85"
MEMORY = ("no-kv-memory", "oom-runtime", "oom-weights", "seq-too-long-for-memory", "free-memory-below-request")


def damaged(code: str, status: str, severity: str = "error") -> ModelFacts:
    found = Finding(code, severity, "damaged", "in a test", (Evidence("file", "a shard"),))  # type: ignore[arg-type]
    file = ModelFile(name="model-00001-of-00002.safetensors", bytes=1, kind="weights", status=status)
    return structs.replace(MOE_35B, findings=(found,), files=(file,))


def test_a_whole_checkpoint_with_good_flags_fits() -> None:
    sheet = plan(MOE_35B, cards(24, 24), ROOM)
    assert sheet.fits is True
    assert not [item for item in sheet.findings if item.severity == "error"]


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("weights-truncated", "truncated", "is damaged"),
        ("weights-missing-shard", "missing", "is damaged"),
        ("weights-lfs-pointer", "lfs-pointer", "is damaged"),
        ("header-invalid", "header-invalid", "is damaged"),
        ("config-invalid", "ok", "is not complete"),
        ("processor-missing", "ok", "is not complete"),
    ],
)
def test_damaged_files_come_first_and_nothing_fits_for_sure(code: str, status: str, words: str) -> None:
    model = damaged(code, status)
    assert weights_are_whole(model) is (status == "ok")
    sheet = plan(model, cards(24, 24), ROOM)
    assert sheet.fits is None
    assert sheet.findings[0].code == code
    assert words in sheet.notes[0]
    assert plan(model, cards(12), "").fits is False  # what is there is too much already


def test_a_file_that_lacks_bytes_decides_even_when_it_is_only_a_warning() -> None:
    assert plan(damaged("weights-truncated", "truncated", "warning"), cards(24, 24), ROOM).fits is None
    assert plan(damaged("chat-template-missing", "ok", "warning"), cards(24, 24), ROOM).fits is True


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--gpu-memory-utilization 95", "util-out-of-range"),
        ("--gpu-memory-utilization 0", "util-out-of-range"),
        ("--max-num-seqs 0", "flag-value-invalid"),
        ("--max-model-len abc", "flag-value-invalid"),
        ("--dtype bfloat61", "flag-value-invalid"),
        ("--max-model-len 500000", "context-beyond-model"),
        ("--max-num-seqs", "flag-value-invalid"),
    ],
)
def test_a_refused_value_is_said_and_nothing_about_memory_follows_from_it(flags: str, code: str) -> None:
    sheet = plan(MOE_35B, cards(24, 24), f"--tensor-parallel-size 2 {flags}")
    assert sheet.fits is False
    codes = [item.code for item in sheet.findings]
    assert codes[0] == code
    assert not set(codes) & set(MEMORY)


def test_the_budget_of_a_share_that_cannot_be_had_is_the_usual_one() -> None:
    usual = plan(MOE_35B, cards(24, 24), "--tensor-parallel-size 2")
    odd = plan(MOE_35B, cards(24, 24), "--tensor-parallel-size 2 --gpu-memory-utilization 95")
    assert odd.gpus[0].budget_bytes == usual.gpus[0].budget_bytes
    assert "--gpu-memory-utilization 95.0 cannot be used; planned with 0.92" in odd.notes


def test_an_unknown_flag_is_refused_and_what_memory_says_stays() -> None:
    sheet = plan(MOE_35B, cards(24), "--max-modle-len 4096")
    assert [item.code for item in sheet.findings][:2] == ["unknown-flag", "no-kv-memory"]
    good = plan(MOE_35B, cards(24, 24), ROOM + " --swap-spaces 4")
    assert good.fits is False
    assert [item.code for item in good.findings if item.severity == "error"] == ["unknown-flag"]


def test_heads_that_do_not_divide_are_said_as_by_the_check() -> None:
    sheet = plan(MOE_35B, cards(24, 24, 24), "--tensor-parallel-size 3")
    found = next(item for item in sheet.findings if item.code == "heads-vs-tp")
    assert sheet.fits is False
    assert "16 heads of linear attention" in found.cause


SAME = [
    *(f"--tensor-parallel-size {ranks} --max-model-len {length} --max-num-seqs {sequences}"
      for ranks in (1, 2) for length in (64, 4096, 262144) for sequences in (16, 256)),
    *(f"--tensor-parallel-size 2 {more}" for more in (
        "--gpu-memory-utilization 0.98", "--gpu-memory-utilization 95", "--max-num-seqs 0", "--max-modle-len 5",
        "--kv-cache-memory-bytes 20G", "--max-model-len -1", "--max-num-batched-tokens 65536",
    )),
    ARTICLE,
    "--tensor-parallel-size 3",
]  # fmt: skip


@pytest.mark.parametrize("model", [MOE_35B, DENSE_9B, VL_7B, GEMMA_27B], ids=lambda model: model.architecture)
@pytest.mark.parametrize("flags", SAME)
def test_plan_and_check_judge_a_launch_alike(model: ModelFacts, flags: str) -> None:
    """One severity for a code, and neither lets pass what the other doubts."""
    sheet = plan(model, cards(24, 24), flags)
    checked = checked_launch(
        launch(flags), model=model, gpus=cards(24, 24), engine=EngineFacts("vllm", "0.24.0"), host=None
    )
    severities = {item.code: item.severity for item in checked.findings}
    for item in sheet.findings:
        assert severities.get(item.code, item.severity) == item.severity, item.code
    error = any(item.severity == "error" for item in checked.findings)
    if sheet.fits is False:
        assert error
    if sheet.fits is None:
        assert error or checked.undecided
    if sheet.fits is True:
        assert not checked.undecided
