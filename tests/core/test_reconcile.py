"""Plan against actual: recorded launches, and what holds for any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json, structs

from loadmaster.core.facts import GIB
from loadmaster.core.logfacts import LogReadings
from loadmaster.core.reconcile import CardActual, Point, Reconciliation, RunActual, reconcile
from loadmaster.core.served import ServedLoad, with_picture
from tests.recordedruns import READY, planned, readings_of

_POINTS: tuple[Point, ...] = ("ready", "serving")
_LIMIT = round(0.3 * GIB)


@pytest.mark.parametrize("point", _POINTS)
@pytest.mark.parametrize("name", READY)
def test_recorded_launches_reconcile(name: str, point: Point) -> None:
    sheet, replays = planned(name)
    found = reconcile(sheet, readings_of(name), point, replays)
    for card, load in zip(found.cards, sheet.gpus, strict=True):
        named = {part.name for line in card.lines for part in line.parts} | {line.name for line in card.lines}
        assert {part.name for part in load.components} - {"headroom"} <= named
        assert card.unexplained_bytes is not None
        assert abs(card.unexplained_bytes) <= _LIMIT, f"GPU {card.index}: {card.unexplained_bytes / GIB:+.3f} GiB"


def test_lines_add_up_and_what_is_read_is_taken_from_the_reading() -> None:
    name = "h200-tp2-graph-4096-s256"
    sheet, replays = planned(name)
    found = reconcile(sheet, readings_of(name), "ready", replays)
    card = found.cards[0]
    lines = {line.name: line for line in card.lines}
    assert lines["weights"].actual == round(11.3 * GIB)
    assert [part.name for part in lines["weights"].parts] == ["weights.language", "weights.other", "weights.vision"]
    assert lines["cuda_graphs"].difference == round(0.83 * GIB) - lines["cuda_graphs"].planned
    assert lines["sampler"].actual is None
    assert lines["activations"].expected == 0
    assert card.expected_bytes == sum(line.expected if line.actual is None else line.actual for line in card.lines)
    assert card.unexplained_bytes == round(24.467 * GIB) - round(0.601 * GIB) - card.expected_bytes


def test_who_is_off_is_named_with_a_reason() -> None:
    name = "h200-tp2-graph-262144-s16"
    sheet, replays = planned(name)
    actual = readings_of(name)
    heavier = structs.replace(
        actual,
        log=structs.replace(
            actual.log,
            model_loading_bytes=(14 * GIB, 14 * GIB),
            kv_available_bytes=4 * GIB,
            profile_peak_bytes=3 * GIB,
        ),
    )
    card = reconcile(sheet, heavier, "ready", replays).cards[0]
    assert card.off[:2] == ("kv_cache", "weights")
    reasons = {line.name: line.reason for line in card.lines}
    assert "rearranged in another way" in (reasons["weights"] or "")
    assert "memory profile measured" in (reasons["kv_cache"] or "")
    assert reasons["cuda_graphs"] is None


def test_without_readings_of_the_driver_it_says_so() -> None:
    sheet, replays = planned("h200-tp2-graph-262144-s16")
    found = reconcile(sheet, RunActual(log=LogReadings(kv_available_bytes=8 * GIB)), "serving", replays)
    assert all(card.unexplained_bytes is None and card.actual_bytes is None for card in found.cards)
    assert found.notes == (
        "the driver's readings are missing: what is unexplained is not known",
        "which pictures came is not known: the plan's largest are assumed",
    )


def test_the_pictures_that_came_decide_the_expected_peak() -> None:
    name = "h200-tp2-graph-262144-s16"
    sheet, replays = planned(name)
    actual = readings_of(name)

    def expected(*sizes: tuple[int, int]) -> int:
        served = structs.replace(actual.served, pictures=sizes)
        card = reconcile(sheet, structs.replace(actual, served=served), "serving", replays).cards[0]
        return next(line.expected for line in card.lines if line.name == "activations")

    assert expected() < 16 << 20  # text alone
    assert expected((512, 512)) <= expected((2000, 2000)) < expected((4096, 4096))


def test_a_rank_beside_a_whole_picture_keeps_only_pixels_and_result() -> None:
    _, replays = planned("h200-2026-11-30-tp2-35b-graph-262144-s16-encdata")
    assert [replay.beside for replay in replays] == [0, 2]


@given(
    weights=st.none() | st.integers(0, 40 * GIB),
    cache=st.none() | st.integers(0, 40 * GIB),
    graphs=st.none() | st.integers(0, GIB),
    context=st.none() | st.integers(0, 3 * GIB),
    ready=st.none() | st.integers(0, 80 * GIB),
    grown=st.integers(0, 8 * GIB),
)
def test_for_any_readings_the_sum_holds(
    weights: int | None, cache: int | None, graphs: int | None, context: int | None, ready: int | None, grown: int
) -> None:
    sheet, replays = planned("h200-tp2-graph-4096-s256")
    log = LogReadings(model_loading_bytes=(weights,), kv_available_bytes=cache, graph_bytes=graphs)
    used = None if ready is None else ready + grown
    cards = tuple(
        CardActual(index=index, driver_reserved_bytes=0, ready_bytes=ready, serving_bytes=used) for index in (0, 1)
    )
    actual = RunActual(cards=cards, log=log, context_bytes=context, served=ServedLoad(pictures=(), requests=1))
    for point in _POINTS:
        found = reconcile(sheet, actual, point, replays)
        for card in found.cards:
            shown = ready if point == "ready" else used
            assert card.actual_bytes == shown
            if shown is not None:
                assert card.unexplained_bytes == shown - card.expected_bytes
            for line in card.lines:
                assert line.low <= line.planned <= line.high or line.name == "kv_cache"
                assert sum(part.planned for part in line.parts) in (line.planned, 0)
        assert json.decode(json.encode(found), type=Reconciliation) == found


@given(st.lists(st.tuples(st.integers(1, 8192), st.integers(1, 8192)), max_size=200))
def test_pictures_are_remembered_in_order_bounded_with_the_largest(sizes: list[tuple[int, int]]) -> None:
    sent: tuple[tuple[int, int], ...] = ()
    for size in sizes:
        sent = with_picture(sent, size)
    assert len(sent) <= 64
    assert len(set(sent)) == len(sent)
    if sizes:
        assert max(w * h for w, h in sent) == max(w * h for w, h in sizes)
    if len(set(sizes)) <= 64:
        assert sent == tuple(dict.fromkeys(sizes))
