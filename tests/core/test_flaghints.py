"""Fixes of flags that have another name: the version in question takes every one of them."""

from __future__ import annotations

import shlex

import pytest

from loadmaster.core.argv import parse_argv
from loadmaster.core.tables import load_toml
from tests.launchcases import found

HINTS = load_toml("flag-hints.toml")["flags"]
VALUES = ["", "4", "16", "0.5", "4096", "xgrammar", "generate", "embed", "ray", "org/model", '{"a":1}', "true"]
VERSIONS = ["0.17.0", "0.20.0", "0.24.0", "0.28.0", "0.33.0"]


@pytest.mark.parametrize("flag", [name for name, hint in HINTS.items() if "use" in hint])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_fix_is_taken(flag: str, version: str) -> None:
    for value in VALUES:
        line = f"vllm serve m {flag} '{value}'" if value else f"vllm serve m {flag}"
        fixes = [fix for item in found(line, version=version) if item.code == "unknown-flag" for fix in item.fixes]
        for fix in fixes:
            if not fix.argv:
                continue
            launch = parse_argv(["vllm", "serve", "m", *fix.argv], engine_version=version)
            assert launch.unknown_flags == () and launch.refused == (), (value, fix.argv)
            after = found("vllm serve m " + shlex.join(fix.argv), version=version)
            bad = {"unknown-flag", "flag-value-invalid", "util-out-of-range"} & {item.code for item in after}
            assert not bad, (value, fix.argv, bad)


@pytest.mark.parametrize(
    ("written", "argv"),
    [
        ("--guided-decoding-backend xgrammar", ("--structured-outputs-config", '{"backend": "xgrammar"}')),
        ("--guided-decoding-backend=xgrammar", ("--structured-outputs-config", '{"backend": "xgrammar"}')),
        ("--worker-use-ray", ("--distributed-executor-backend", "ray")),
        ("--context-length 32768", ("--max-model-len", "32768")),
        ("--mem-fraction-static 0.8", ("--gpu-memory-utilization", "0.8")),
        ("--mem-fraction-static 16", ()),
        ("--ep-size 2", ("--enable-expert-parallel",)),
        ("--rope-theta 10000", ()),
    ],
)
def test_the_value_takes_its_new_form(written: str, argv: tuple[str, ...]) -> None:
    items = [item for item in found(f"vllm serve m {written}", version="0.33.0") if item.code == "unknown-flag"]
    assert items[0].fixes[0].argv == argv
