"""Known remedies: each has a source, is for a code that exists, and is not offered to who has it already."""

from __future__ import annotations

import pytest

from loadmaster.core.argv import parse_argv
from loadmaster.core.checks.catalogue import codes
from loadmaster.core.facts import EngineFacts, LaunchArgs
from loadmaster.core.flagtable import flag_table
from loadmaster.core.knownremedies import KnownRemedy, entries, known_remedies

NEWEST = EngineFacts("vllm", "0.33.0")


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.code)
def test_every_entry_is_whole(entry: KnownRemedy) -> None:
    assert entry.code in codes()
    assert entry.source
    assert entry.why.endswith(".")
    for flag in (*entry.argv[:1], *entry.remove):
        assert flag in flag_table(None).options


@pytest.mark.parametrize("code", codes())
def test_every_cause_has_at_least_one(code: str) -> None:
    fixes = known_remedies(code, LaunchArgs(), NEWEST)
    assert fixes
    assert all("known from: " in fix.why and not fix.replanned for fix in fixes)


def test_it_is_pasted_only_where_the_launch_has_not_got_it() -> None:
    launch = parse_argv(["vllm", "serve", "m"])
    (fix,) = known_remedies("custom-allreduce", launch, NEWEST)
    assert fix.argv == ("--disable-custom-all-reduce",)
    given = parse_argv(["vllm", "serve", "m", "--disable-custom-all-reduce"])
    assert known_remedies("custom-allreduce", given, NEWEST)[0].argv == ()
    assert known_remedies("custom-allreduce", launch, EngineFacts("llamacpp"))[0].argv == ()


def test_a_flag_is_dropped_only_where_it_is_given() -> None:
    with_it = parse_argv(["vllm", "serve", "m", "--quantization", "awq"])
    assert known_remedies("quant-method-mismatch", with_it, NEWEST)[0].remove == ("--quantization",)
    assert known_remedies("quant-method-mismatch", LaunchArgs(), NEWEST)[0].remove == ()


def test_a_flag_that_the_version_has_not_is_not_offered() -> None:
    assert known_remedies("host-ram-killed", LaunchArgs(), NEWEST)[0].argv == ("--mm-processor-cache-gb", "0")
    assert known_remedies("host-ram-killed", LaunchArgs(), EngineFacts("vllm", "0.6.0"))[0].argv == ()
    assert known_remedies("no-such-code", LaunchArgs(), NEWEST) == ()
