"""Popular remedies that do not help: named beside a cause where the launch has them, and nowhere else."""

from __future__ import annotations

import pytest

from loadmaster.core.argv import parse_argv
from loadmaster.core.checks.catalogue import codes, finding
from loadmaster.core.diagnosis import Diagnosis
from loadmaster.core.facts import EngineFacts, Finding
from loadmaster.core.logfacts import LogFacts
from loadmaster.core.logfixes import with_fixes
from loadmaster.core.wrongadvice import Advice, advice, wrong_advice


def beside(cause: str, flags: str, quantised: bool | None = None, **env: str) -> tuple[Finding, ...]:
    launch = parse_argv(["vllm", "serve", "m", *flags.split()], engine_version="0.11.0", env=env)
    return wrong_advice(launch, cause, quantised, ())


@pytest.mark.parametrize(
    ("cause", "flags", "quantised", "code", "severity", "words"),
    [
        (
            "oom-weights",
            "--enforce-eager",
            True,
            "eager-mode-cost",
            "warning",
            "takes the same memory with CUDA graphs",
        ),
        ("oom-weights", "--enforce-eager", False, "eager-mode-cost", "warning", "does not touch what failed here"),
        ("no-kv-memory", "--quantization awq", True, "slow-awq-kernel", "warning", "--quantization awq pins"),
        (
            "oom-cudagraph-capture",
            "--gpu-memory-utilization 0.98",
            None,
            "advice-without-effect",
            "warning",
            "0.98 is above the default and works against",
        ),
        ("oom-weights", "--max-model-len 4096", None, "advice-without-effect", "note", "--max-model-len 4096 does not"),
        ("oom-weights", "--swap-space 16", None, "advice-without-effect", "note", "memory of the host"),
        ("oom-profile-vision", "--limit-mm-per-prompt.image 1", None, "advice-without-effect", "note", "max_pixels"),
        ("no-kv-memory", "--gpu-memory-utilization 0.5", None, "advice-without-effect", "note", "a small share"),
    ],
)
def test_it_is_named_beside_the_cause_that_it_does_not_cure(
    cause: str, flags: str, quantised: bool | None, code: str, severity: str, words: str
) -> None:
    (found,) = beside(cause, flags, quantised)
    assert (found.code, found.severity) == (code, severity)
    assert words in found.cause
    assert found.evidence[0].text.startswith(flags.split()[0].split(".")[0])


@pytest.mark.parametrize(
    ("cause", "flags", "quantised"),
    [
        ("oom-cudagraph-capture", "--enforce-eager", True),
        ("custom-allreduce", "--enforce-eager", None),
        ("eager-mode-cost", "--enforce-eager", True),
        ("oom-cudagraph-capture", "--gpu-memory-utilization 0.9", None),
        ("context-exceeds-kv", "--max-model-len 4096", None),
        ("no-kv-memory", "--gpu-memory-utilization 0.92", None),
        ("oom-weights", "--quantization fp8", True),
        ("oom-weights", "--no-enforce-eager", True),
        ("oom-weights", "", None),
    ],
)
def test_what_helps_or_is_not_there_is_not_named(cause: str, flags: str, quantised: bool | None) -> None:
    assert beside(cause, flags, quantised) == ()


def test_variables_count_as_well() -> None:
    (found,) = beside("custom-allreduce", "", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert (found.code, found.severity) == ("allocator-config", "warning")
    assert found.fixes[0].remove == ("PYTORCH_CUDA_ALLOC_CONF",)
    assert beside("custom-allreduce", "", PYTORCH_CUDA_ALLOC_CONF="backend:native") == ()


def test_what_the_log_says_itself_is_not_said_twice() -> None:
    launch = parse_argv(["vllm", "serve", "m", "--enforce-eager"])
    assert wrong_advice(launch, "oom-weights", True, ["eager-mode-cost"]) == ()


def test_it_stands_after_the_root_cause_and_only_where_something_failed() -> None:
    launch = parse_argv(["vllm", "serve", "x/y-AWQ", "--enforce-eager", "--quantization", "awq"])
    facts = LogFacts(engine=EngineFacts("vllm", "0.11.0"), launch=launch, quantization="awq")
    failed = with_fixes(Diagnosis(False, facts, (finding("oom-weights", "x"),)), None, None)
    assert [item.code for item in failed.findings] == ["oom-weights", "eager-mode-cost", "slow-awq-kernel"]
    assert [item.severity for item in failed.findings[1:]] == ["warning", "warning"]
    for nothing in ((), (finding("worker-not-answering", "x"),)):
        found = with_fixes(Diagnosis(True, facts, nothing), None, None).findings
        assert [item.code for item in found] == [item.code for item in nothing]


@pytest.mark.parametrize("entry", advice(), ids=lambda entry: entry.says[:30])
def test_every_entry_is_whole(entry: Advice) -> None:
    assert entry.severity != "error"
    assert entry.code in codes()
    assert set(entry.causes) | set(entry.not_causes) <= set(codes())
    assert (entry.flag is None) != (entry.environment is None)
    assert entry.source
    assert entry.says.endswith(".")
