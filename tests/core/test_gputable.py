"""The card table is sound, and card specifications mean what people mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.facts import GIB, MIB
from loadmaster.core.gputable import (
    GpuSpecError,
    cards,
    find_card,
    parse_gpu_spec,
    plain_name,
    typical_driver_reserve,
)


def names(spec: str) -> list[str | None]:
    return [gpu.name for gpu in parse_gpu_spec(spec)]


def refusal(spec: str) -> GpuSpecError:
    with pytest.raises(GpuSpecError) as caught:
        parse_gpu_spec(spec)
    return caught.value


# ---------------------------------------------------------------------------------------------- the table


def test_the_table_has_sixty_cards_and_more() -> None:
    assert len(cards()) >= 60
    assert len({card.name for card in cards()}) == len(cards())


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_every_card_is_plausible(card) -> None:  # type: ignore[no-untyped-def]
    assert card.source and all(source.startswith("https://") for source in card.source)
    if card.driver_total_mib is not None:
        assert 0.93 * card.memory_gib <= card.driver_total_mib / 1024 <= 1.03 * card.memory_gib
        if card.cuda_total_mib is not None:
            assert 0 < card.driver_total_mib - card.cuda_total_mib < 1024
    if card.cuda_total_mib_range is not None:
        low, high = card.cuda_total_mib_range
        assert low <= card.cuda_total_mib <= high
    if card.vendor != "NVIDIA":
        assert card.compute_capability is None
    # one card behind its full name, unless NVML's name is shared
    assert names(card.name) == [card.name]


@pytest.mark.parametrize(
    ("name", "capability", "driver_mib"),
    [
        ("RTX4090", (8, 9), 24564),
        ("RTX3090", (8, 6), 24576),
        ("RTX5090", (12, 0), 32607),
        ("H200", (9, 0), 143771),
        ("A100-80GB", (8, 0), 81920),
        ("T4", (7, 5), 15360),
        ("B200", (10, 0), 183359),
    ],
)
def test_known_figures(name: str, capability: tuple[int, int], driver_mib: int) -> None:
    (gpu,) = parse_gpu_spec(name)
    assert gpu.compute_capability == capability
    assert gpu.driver_total_bytes == driver_mib * MIB
    assert gpu.source == "table"
    assert gpu.total_bytes < driver_mib * MIB


def test_cuda_total_of_a_4090_is_what_vllm_logs() -> None:
    (gpu,) = parse_gpu_spec("RTX4090")
    assert f"{gpu.total_bytes / GIB:.2f}" == "23.52"


def test_an_unknown_cuda_total_is_assumed_and_said() -> None:
    card = find_card("RTX A6000")
    assert card is not None and card.cuda_total_mib is None
    (gpu,) = parse_gpu_spec("RTX A6000")
    assert gpu.driver_total_bytes is not None
    assert gpu.total_bytes == gpu.driver_total_bytes - typical_driver_reserve()
    assert gpu.note is not None and "assumed" in gpu.note


def test_the_usual_reserve_is_a_few_hundred_mebibytes() -> None:
    assert 300 * MIB < typical_driver_reserve() < 800 * MIB


@pytest.mark.parametrize(
    "spelling",
    ["4090", "RTX4090", "rtx 4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090", "NVIDIA-GeForce-RTX-4090",
     "RTX_4090", "RTX4090-24GB", "RTX 4090 24G"],
)  # fmt: skip
def test_spellings_of_one_card(spelling: str) -> None:
    assert names(spelling) == ["NVIDIA GeForce RTX 4090"]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("A100-80G", "NVIDIA A100-SXM4-80GB"),
        ("A100 80GB PCIe", "NVIDIA A100 80GB PCIe"),
        ("H100-80GB-HBM3", "NVIDIA H100 80GB HBM3"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("A6000", "NVIDIA RTX A6000"),
        ("RTX 3060", "NVIDIA GeForce RTX 3060"),
        ("RTX4060Ti-16GB", "NVIDIA GeForce RTX 4060 Ti 16GB"),
        ("2080Ti-22G", "NVIDIA GeForce RTX 2080 Ti 22GB"),
        ("RTX 4060 Laptop GPU", "NVIDIA GeForce RTX 4060 Laptop GPU"),
        ("V100-32GB", "Tesla V100-SXM2-32GB"),
        ("MI300X", "AMD Instinct MI300X"),
        ("DGX Spark", "NVIDIA GB10"),
    ],
)
def test_other_spellings(spelling: str, name: str) -> None:
    assert names(spelling) == [name]


def test_memory_tells_cards_of_one_driver_name_apart() -> None:
    assert find_card("NVIDIA GeForce RTX 4060 Ti") is None
    small, large = (find_card("NVIDIA GeForce RTX 4060 Ti", mib * MIB) for mib in (8188, 16380))
    assert small is not None and small.name.endswith("8GB")
    assert large is not None and large.name.endswith("16GB")
    modified = find_card("NVIDIA GeForce RTX 4090", 49140 * MIB)
    assert modified is not None and modified.memory_gib == 48
    assert find_card("NVIDIA GeForce RTX 4090", 36 * GIB) is None


def test_plain_name_drops_makers_and_punctuation() -> None:
    assert plain_name("NVIDIA GeForce RTX 4090") == plain_name("rtx-4090") == "RTX4090"


# ---------------------------------------------------------------------------------------------- specifications


def test_sizes_are_what_cuda_sees() -> None:
    gpus = parse_gpu_spec("2x24GiB")
    assert [gpu.index for gpu in gpus] == [0, 1]
    assert {gpu.total_bytes for gpu in gpus} == {24 * GIB}
    assert {gpu.driver_total_bytes for gpu in gpus} == {None}
    assert {gpu.source for gpu in gpus} == {"spec"}


def test_unequal_sizes_and_mixed_names() -> None:
    assert [gpu.total_bytes for gpu in parse_gpu_spec("24GiB, 16384MiB")] == [24 * GIB, 16 * GIB]
    assert names("RTX4090,RTX3090") == ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"]
    assert [gpu.index for gpu in parse_gpu_spec("2xRTX4090,24GiB")] == [0, 1, 2]


def test_fractions_round_down_to_bytes() -> None:
    assert parse_gpu_spec("1x139.8GiB")[0].total_bytes == int(139.8 * GIB)


@pytest.mark.parametrize("spec", ["4 x RTX3090", "4xRTX3090", "4*RTX3090", "4×RTX3090", "RTX 3090 x 4", "RTX3090:4"])
def test_spellings_of_a_count(spec: str) -> None:
    assert names(spec) == ["NVIDIA GeForce RTX 3090"] * 4


def test_no_cards() -> None:
    assert parse_gpu_spec("cpu") == ()


def test_decimal_gigabytes_are_refused_with_both_readings() -> None:
    error = refusal("2x24GB")
    assert "ambiguous" in error.message
    assert error.hint is not None
    assert "2x24GiB" in error.hint and "2x22.35GiB" in error.hint
    assert parse_gpu_spec("2x22.35GiB")


def test_unclear_names_ask_with_names_that_work() -> None:
    error = refusal("2xA100")
    assert error.hint == "write 2xA100-40GB or 2xA100-80GB"
    assert names("A100-40GB") == ["NVIDIA A100-SXM4-40GB"]


def test_unknown_names_get_a_suggestion() -> None:
    assert "RTX4090" in (refusal("rtx4091").hint or "")
    assert "2xRTX5090" in (refusal("2xRTX5O90").hint or "")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "no cards"),
        ("24", "no unit"),
        ("24GiB,", "empty place"),
        ("0x24GiB", "names no card"),
        ("1025x24GiB", "more than 1024"),
        ("1000x24GiB,25x24GiB", "more than 1024"),
        ("9" * 9999 + "x24GiB", "more than 1024"),
        ("9" * 9999 + "GiB", "no size"),
        ("1MiB", "no size"),
        ("99999GiB", "no size"),
        ("24PiB", "unknown unit"),
        ("-24GiB", "neither"),
        ("24GiB" * 9999, "20,000 characters"),
    ],
)
def test_refusals(spec: str, message: str) -> None:
    error = refusal(spec)
    assert message in error.message
    assert error.hint
    assert len(error.message) < 200


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 400)), min_size=1, max_size=20))
def test_counts_and_sizes_survive(parts: list[tuple[int, int]]) -> None:
    gpus = parse_gpu_spec(",".join(f"{count}x{size}GiB" for count, size in parts))
    assert [gpu.total_bytes for gpu in gpus] == [size * GIB for count, size in parts for _ in range(count)]
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        gpus = parse_gpu_spec(text)
    except GpuSpecError as error:
        assert error.message
    else:
        assert all(gpu.total_bytes > 0 for gpu in gpus)


def test_cards_before_volta_are_known() -> None:
    for name, gib in (("GTX1080Ti", 11), ("GTX 1080", 8), ("GTX1070", 8), ("GTX 1060", 6)):
        (card,) = parse_gpu_spec(name)
        assert card.compute_capability == (6, 1) and card.total_bytes < gib * GIB
