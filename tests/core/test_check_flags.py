"""Flags by themselves: names, values, units, contradictions."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from loadmaster.core.checks.spelling import nearest
from loadmaster.core.facts import Evidence
from tests.launchcases import codes, dense, found, launch_of, of

MODEL = dense()


def test_misspelt_flag_gets_the_right_one_with_its_value() -> None:
    item = of(found("vllm serve m --max-modle-len 4096", MODEL, version="0.24.0"), "unknown-flag")
    assert "did you mean --max-model-len?" in item.cause
    assert item.fixes[0].argv == ("--max-model-len", "4096")
    assert item.fixes[0].remove == ("--max-modle-len",)
    assert item.severity == "error"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--max-len", "--max-model-len"),
        ("--gpu-util", "--gpu-memory-utilization"),
        ("--served-name", "--served-model-name"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--max-num-sequences", "--max-num-seqs"),
        ("--enable-prefix-cache", "--enable-prefix-caching"),
    ],
)
def test_the_flag_that_was_meant(written: str, meant: str) -> None:
    assert nearest(written, "0.24.0") == meant


def test_nothing_near_is_nothing() -> None:
    assert nearest("--make-coffee", "0.24.0") is None


def test_tp_with_two_hyphens() -> None:
    item = of(found("vllm serve m --tp 4"), "unknown-flag")
    assert item.fixes[0].argv == ("--tensor-parallel-size", "4")


def test_flag_of_another_version_says_which() -> None:
    item = of(found("vllm serve m --enable-reasoning", version="0.10.0"), "unknown-flag")
    assert "0.9.2" in item.cause
    assert "unknown-flag" not in codes(found("vllm serve m --enable-reasoning", version="0.8.5"))


def test_known_spellings_are_known() -> None:
    line = "vllm serve m --max_model_len=4096 -tp 1 --gpu-memory-util 0.8 --no-enable-prefix-caching"
    assert "unknown-flag" not in codes(found(line, version="0.24.0"))


def test_flag_that_newer_releases_dropped_is_a_note_where_the_version_has_it() -> None:
    item = of(found("vllm serve m --disable-log-requests"), "unknown-flag")
    assert (item.severity, item.confidence) == ("warning", "likely")
    item = of(found("vllm serve m --swap-space 4"), "flag-deprecated")
    assert (item.severity, item.confidence) == ("warning", "possible")
    item = of(found("vllm serve m --disable-log-requests", version="0.10.0"), "flag-deprecated")
    assert (item.severity, item.confidence) == ("note", "certain")
    assert "flag-deprecated" not in codes(found("vllm serve m --enable-log-requests"))


@pytest.mark.parametrize(
    "flags",
    [
        "--max-model-len 0",
        "--port 70000",
        "--tensor-parallel-size 0",
        "--dtype float8",
        "--kv-cache-dtype fp4_e9",
        """--mm-processor-kwargs '{"max_pixels": 1000000'""",
        r"""--limit-mm-per-prompt '{\"image\":1}'""",
        "--max-num-seqs many",
    ],
)
def test_values_that_cannot_be(flags: str) -> None:
    item = of(found(f"vllm serve m {flags}", version="0.24.0"), "flag-value-invalid")
    assert item.severity == "error"
    assert item.evidence[0].text.startswith(flags.split()[0])


@pytest.mark.parametrize(
    "flags",
    [
        "--max-model-len -1",
        "--max-model-len auto",
        "--port 8000",
        "--dtype half",
        "--kv-cache-dtype fp8_e4m3",
        """--limit-mm-per-prompt '{"image":1}'""",
        "--limit-mm-per-prompt.image 2",
    ],
)
def test_values_that_can_be(flags: str) -> None:
    assert "flag-value-invalid" not in codes(found(f"vllm serve m {flags}", version="0.24.0"))


def test_escaped_json_is_given_back_without_backslashes() -> None:
    item = of(found(r"""vllm serve m --limit-mm-per-prompt '{\"image\":1}'""", version="0.24.0"), "flag-value-invalid")
    assert item.fixes[0].argv == ("--limit-mm-per-prompt", '{"image":1}')


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max-model-len", "--max-model-len has no value"),
        ("-q", "--quantization has no value"),
        ("again --port 80", "'again' belongs to no flag"),
        ("--enforce-eager=maybe", "--enforce-eager takes no value"),
    ],
)
def test_what_the_parser_refuses_is_as_sure_as_the_version(flags: str, words: str) -> None:
    item = of(found(f"vllm serve m {flags}", version="0.24.0"), "flag-value-invalid")
    assert words in item.cause
    assert (item.severity, item.confidence) == ("error", "certain")
    assert of(found(f"vllm serve m {flags}"), "flag-value-invalid").confidence == "likely"


def test_a_value_is_refused_once() -> None:
    findings = found("vllm serve m -tp two --max-num-seqs many", version="0.24.0")
    assert [item.code for item in findings].count("flag-value-invalid") == 2


def test_old_pairs_depend_on_the_version() -> None:
    line = "vllm serve m --limit-mm-per-prompt image=2,video=0"
    assert of(found(line, version="0.24.0"), "flag-value-invalid").severity == "error"
    assert of(found(line), "flag-value-invalid").severity == "warning"
    assert "flag-value-invalid" not in codes(found(line, version="0.8.4"))


def test_small_k() -> None:
    item = of(found("vllm serve m --max-model-len 32k", MODEL, version="0.24.0"), "unit-4k-vs-4K")
    assert "32,000" in item.cause and "32,768" in item.cause
    assert item.fixes[0].argv == ("--max-model-len", "32768")
    assert "unit-4k-vs-4K" not in codes(found("vllm serve m --max-model-len 32K", MODEL, version="0.24.0"))
    assert "unit-4k-vs-4K" not in codes(found("vllm serve m --max-model-len 30k", MODEL, version="0.24.0"))
    assert "unit-4k-vs-4K" not in codes(found("vllm serve m --max-model-len 32000", MODEL, version="0.24.0"))


def test_capital_k_beyond_the_model() -> None:
    item = of(found("vllm serve m --max-model-len 40K", dense(max_position_embeddings=40000)), "unit-4k-vs-4K")
    assert item.fixes[0].argv == ("--max-model-len", "40000")
    assert "unit-4k-vs-4K" not in codes(found("vllm serve m --max-model-len 40K", MODEL))


def test_steps_shorter_than_the_context_without_chunked_prefill() -> None:
    line = "vllm serve m --no-enable-chunked-prefill --max-num-batched-tokens 2048 --max-model-len 8192"
    assert of(found(line, version="0.24.0"), "flag-conflict").severity == "error"
    assert "flag-conflict" not in codes(found(line.replace("--no-enable", "--enable"), version="0.24.0"))
    old = "vllm serve m --max-num-batched-tokens 2048 --max-model-len 8192"
    assert "flag-conflict" in codes(found(old, version="0.6.6"))
    assert "flag-conflict" not in codes(found(old, version="0.24.0"))


def test_more_sequences_than_tokens() -> None:
    assert "flag-conflict" in codes(found("vllm serve m --max-num-seqs 256 --max-num-batched-tokens 128"))
    assert "flag-conflict" not in codes(found("vllm serve m --max-num-seqs 128 --max-num-batched-tokens 128"))


def test_tool_parser_and_tool_choice() -> None:
    assert of(found("vllm serve m --enable-auto-tool-choice"), "flag-conflict").severity == "error"
    assert of(found("vllm serve m --tool-call-parser hermes"), "flag-conflict").severity == "note"
    both = "vllm serve m --tool-call-parser hermes --enable-auto-tool-choice"
    assert "flag-conflict" not in codes(found(both))


def test_adapters_that_are_off() -> None:
    assert "flag-conflict" in codes(found("vllm serve m --lora-modules a=/x"))
    assert "flag-conflict" not in codes(found("vllm serve m --lora-modules a=/x --enable-lora"))


def test_copying_damage_is_told_with_its_line() -> None:
    launch = launch_of("vllm serve m")
    damaged = replace(launch, damage=(Evidence("command", "a comment after the backslash", line=2),))
    item = of(found(damaged), "command-damaged")
    assert item.evidence[0].line == 2
    assert item.fixes[0].command == "vllm serve m"
    assert "command-damaged" not in codes(found(launch))
