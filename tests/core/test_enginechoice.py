"""Which release fits which machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot

from loadmaster.core.enginechoice import Machine, choose_release, known_releases, objections, refusal_words
from loadmaster.core.engineversion import version_key
from loadmaster.core.tables import load_toml

NEW = Machine(
    driver="580.95.05", compute_capability=(8, 9), python=(3, 12), glibc="2.39", machine="x86_64", system="Linux"
)


def machine(**changes: object) -> Machine:
    import msgspec

    return msgspec.structs.replace(NEW, **changes)


@pytest.mark.parametrize(
    ("changes", "architecture", "expected"),
    [
        ({}, None, "0.33.0"),
        ({}, "Qwen3_5MoeForConditionalGeneration", "0.33.0"),
        ({"driver": "570.86.10"}, None, "0.19.1"),
        ({"driver": "580.65.06"}, None, "0.33.0"),
        ({"driver": "580.65.05"}, None, "0.19.1"),
        ({"compute_capability": (7, 0)}, None, "0.19.1"),
        ({"python": (3, 10)}, None, "0.31.0"),
        ({"glibc": "2.17", "driver": "550.54.14"}, None, "0.11.2"),
        ({"glibc": None, "python": None, "compute_capability": None, "machine": None}, None, "0.33.0"),
        ({}, "AquilaForCausalLM", "0.24.0"),
        ({}, "NoSuchArchitecture", "0.33.0"),
    ],
)
def test_the_newest_that_fits(changes: dict[str, object], architecture: str | None, expected: str) -> None:
    assert choose_release(machine(**changes), architecture).version == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"driver": "470.199.02"},
        {"compute_capability": (6, 1)},
        {"python": (3, 8)},
        {"machine": "riscv64"},
        {"system": "Darwin"},
    ],
)
def test_nothing_fits_and_why(changes: dict[str, object]) -> None:
    choice = choose_release(machine(**changes))
    assert choice.version is None
    assert len(choice.refused) == len(known_releases())


def test_the_reasons_are_said_once_each() -> None:
    assert refusal_words(choose_release(machine(driver="470.199.02"))) == snapshot(
        "0.20.0 to 0.33.0: it is built for CUDA 13.0, which needs driver 580.65.06; this one is 470.199.02; 0.12.0 to 0.19.1: it is built for CUDA 12.9, which needs driver 525.60.13; this one is 470.199.02; 0.10.2 to 0.11.2: it is built for CUDA 12.8, which needs driver 525.60.13; this one is 470.199.02"
    )
    new_model_old_driver = choose_release(machine(driver="550.54.14"), "AliceAIForCausalLM")
    assert new_model_old_driver.version is None
    assert refusal_words(new_model_old_driver) == snapshot(
        "0.20.0 to 0.33.0: it is built for CUDA 13.0, which needs driver 580.65.06; this one is 550.54.14; 0.10.2 to 0.19.1: AliceAIForCausalLM is there from 0.33.0 on"
    )


@given(st.tuples(st.integers(400, 700), st.integers(0, 200)), st.tuples(st.integers(400, 700), st.integers(0, 200)))
def test_a_newer_driver_never_gets_an_older_release(one: tuple[int, int], other: tuple[int, int]) -> None:
    older, newer = sorted([one, other])
    chosen = [choose_release(machine(driver=f"{major}.{minor}")).version for major, minor in (older, newer)]
    keys = [version_key(version) if version is not None else (0, 0, 0) for version in chosen]
    assert keys[0] <= keys[1]


def test_unknown_releases_are_not_refused_for_what_nobody_knows() -> None:
    assert list(objections("0.9.0", machine(driver="100.0"))) == []
    assert list(objections("0.99.0", NEW)) == []


def test_every_release_has_its_row_and_every_row_its_source() -> None:
    data = load_toml("engine-requirements.toml")
    starts = [version_key(row["since"]) for row in data["vllm"]["rows"]]
    assert starts == sorted(starts)
    assert starts[0] == version_key(data["vllm"]["oldest"])
    for row in data["vllm"]["rows"]:
        assert data["cuda"][row["cuda"].split(".")[0]]["source"]
