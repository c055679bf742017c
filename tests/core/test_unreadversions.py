"""Engine versions whose sources nobody read: wide bounds, and nothing is certain, on both sides."""

from __future__ import annotations

import pytest

from loadmaster.core.facts import LoadSheet
from tests.core.launches import TEXT_8B, VL_7B, cards, plan
from tests.launchcases import cards as ranked_cards
from tests.launchcases import codes, dense, found, of


def width(sheet: LoadSheet, name: str) -> float:
    (part,) = [one for one in sheet.gpus[0].components if one.name == name]
    return (part.high - part.low) / max(part.bytes, 1)


@pytest.mark.parametrize(("outside", "nearest"), [("0.5.0", "0.17.0"), ("0.16.0", "0.17.0"), ("0.34.0", "0.33.0"),
                                                  ("1.0.0", "0.33.0"), ("9.9.9", "0.33.0")])  # fmt: skip
def test_bounds_are_wide(outside: str, nearest: str) -> None:
    wide, narrow = (plan(VL_7B, cards(48), "--max-model-len 8192", version) for version in (outside, nearest))
    assert any(outside in note for note in wide.notes)
    for name in ("kv_cache", "cuda_graphs", "activations.vision", "sampler", "workspace"):
        assert width(wide, name) > 1.5 * width(narrow, name), name
    (graphs,) = [one for one in wide.gpus[0].components if one.name == "cuda_graphs"]
    assert graphs.basis == "assumed" and graphs.high >= 2 * graphs.bytes
    (cached,) = [one for one in wide.gpus[0].components if one.name == "kv_cache"]
    assert cached.basis == "assumed"
    cache = wide.kv_cache
    assert cache is not None and cache.available_bytes is not None
    assert (cache.available_high_bytes or 0) - (cache.available_low_bytes or 0) > 2 << 30


@pytest.mark.parametrize("version", ["0.5.0", "0.34.0"])
def test_no_memory_finding_is_certain(version: str) -> None:
    sheet = plan(TEXT_8B, cards(12), "--max-model-len 8192", version)
    assert sheet.fits is False
    memory = [item for item in sheet.findings if item.code in ("oom-weights", "no-kv-memory")]
    assert memory and all(item.confidence != "certain" for item in memory)


def test_flags_of_later_releases_are_not_errors() -> None:
    line = "vllm serve m --brand-new-flag 3 --kv-cache-dtype fp3 --max-model-len 4096"
    items = found(line, dense(), ranked_cards(1, 48), version="0.99.0")
    unknown = of(items, "unknown-flag")
    assert (unknown.severity, unknown.confidence) == ("warning", "possible")
    assert of(items, "flag-value-invalid").severity == "warning"
    assert not any(item.severity == "error" for item in items)
    known = of(found("vllm serve m --brand-new-flag 3", version="0.33.1"), "unknown-flag")
    assert (known.severity, known.confidence) == ("error", "certain")
    assert "flag-value-invalid" in codes(found("vllm serve m --port 70000", version="0.99.0"))
    assert of(found("vllm serve m --port 70000", version="0.99.0"), "flag-value-invalid").severity == "error"
