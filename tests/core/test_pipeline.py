"""Pipeline stages, and versions that rules are chosen by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.engineversion import at_least, version_key
from loadmaster.core.facts import Settings
from loadmaster.core.pipeline import layer_ranges, stage_layers


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    # vLLM tests/distributed/test_pipeline_partition.py
    [
        (5, 1, [5]),
        (40, 4, [10, 10, 10, 10]),
        (5, 3, [2, 2, 1]),
        (3, 2, [2, 1]),
        (22, 4, [5, 6, 6, 5]),
        (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
    ],
)
def test_layers_left_over_go_before_the_last_stage(layers: int, stages: int, sizes: list[int]) -> None:
    assert [len(span) for span in layer_ranges(layers, stages)] == sizes


@given(st.integers(0, 200), st.integers(1, 12))
def test_every_layer_is_on_one_stage(layers: int, stages: int) -> None:
    assert [layer for span in layer_ranges(layers, stages) for layer in span] == list(range(layers))


def test_a_given_partition() -> None:
    assert [len(span) for span in layer_ranges(10, 3, (2, 3, 5))] == [2, 3, 5]
    with pytest.raises(ValueError, match="does not cut"):
        layer_ranges(10, 3, (2, 3))
    with pytest.raises(ValueError, match="at least one"):
        layer_ranges(10, 0)
    spans, note = stage_layers(10, Settings(version="0.33", pipeline_parallel_size=2, pipeline_layer_partition=(1, 1)))
    assert [len(span) for span in spans] == [5, 5]
    assert note is not None


def test_versions() -> None:
    assert version_key("v0.20.1rc2.dev9+g1") == (0, 20, 1)
    assert at_least("0.20", "0.20.1")
    assert not at_least("0.20.0", "0.20.1")
    assert at_least("0.20.0", "0.20")
    assert not at_least("0.9", "0.10")
    with pytest.raises(ValueError, match="not an engine version"):
        version_key("nightly")
