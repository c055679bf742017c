"""Alerts over recorded series: each is raised by what it is for, alone, ended, and never by an ordinary hour."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core.alertrules import Rule, events_of, rules
from loadmaster.core.alerts import MEASURES, AlertChange, Alerts, Machine
from loadmaster.core.checks.catalogue import codes
from loadmaster.core.observation import Snapshot
from loadmaster.core.trend import crept
from loadmaster.core.windows import GrowthWindow, MeanWindow
from loadmaster.edge.recording import open_recording
from tests.watchcases import BEGAN, CASES, FOLDER, HELD, PLAN, calm, card, recording, shot

LASTING = {
    "memory-creeping",
    "xid-error",
    "ecc-error",
    "eager-mode-cost",
    "slow-allreduce",
    "slow-thinking",
}  # fmt: skip - their cause is there until the end of the recording


def changes_of(alerts: Alerts, series: Sequence[Snapshot]) -> list[AlertChange]:
    return [change for snapshot in series for change in alerts.step(snapshot)]


@pytest.mark.parametrize("code", [name for name in CASES if name != "calm"])
def test_a_recording_raises_its_alert_alone_and_ends_it(code: str) -> None:
    header, series = open_recording(FOLDER / f"{code}.jsonl")
    alerts = Alerts(header.limits)
    found = changes_of(alerts, list(series))
    assert [(change.began, change.finding.code) for change in found] == [
        (True, code),
        *([] if code in LASTING else [(False, code)]),
    ]
    first = found[0].finding
    assert first.cause.strip()
    assert first.evidence
    assert first.fixes


@pytest.mark.parametrize("name", CASES)
def test_a_recording_is_what_its_rule_makes(name: str) -> None:
    assert (FOLDER / f"{name}.jsonl").read_bytes() == recording(name), "run python -m tests.watchcases"


def test_every_rule_has_a_recording_a_figure_and_a_place_in_the_catalogue() -> None:
    assert {rule.code for rule in rules()} == set(CASES) - {"calm"}
    assert {rule.measure for rule in rules()} == set(MEASURES)
    assert {rule.code for rule in rules()} <= set(codes())
    for rule in rules():
        assert 0 <= rule.clear_at < rule.raise_at, rule.code
        assert set(rule.unless) <= {other.code for other in rules()}, rule.code


def test_ordinary_hours_are_quiet() -> None:
    assert changes_of(Alerts(PLAN), list(calm(2 * 3600, 2, seed=11))) == []
    header, series = open_recording(FOLDER / "calm.jsonl")
    assert changes_of(Alerts(header.limits), list(series)) == []


def test_without_driver_engine_or_plan_nothing_is_raised() -> None:
    alerts = Alerts(PLAN)
    assert changes_of(alerts, [Snapshot(at=BEGAN + at, missing=("nothing",)) for at in range(300)]) == []


@settings(max_examples=60, deadline=None)
@given(
    code=st.sampled_from([name for name in CASES if name != "calm"]),
    gap=st.tuples(st.floats(0, 1), st.floats(0.02, 0.4)),
    data=st.data(),
)
def test_no_gap_loses_an_alert_that_holds(code: str, gap: tuple[float, float], data: st.DataObject) -> None:
    """Cut out a part of the series after the alert was raised: it holds all through the gap."""
    limits, _, make = CASES[code]
    series = list(make())
    alerts = Alerts(limits)
    raised = next(place for place, snapshot in enumerate(series) if alerts.step(snapshot))
    blind = [Snapshot(at=snapshot.at, missing=("no answer",)) for snapshot in series[raised + 1 :]]
    dropped = data.draw(st.booleans(), label="missing snapshots, not only missing readings")
    for snapshot in [] if dropped else blind:
        assert alerts.step(snapshot) == ()
    assert [item.code for item in alerts.findings] == [code]


def machine_rule(raise_after_s: float, clear_after_s: float) -> Rule:
    return Rule(
        code="xid-error", measure="new_xids", raise_at=1.0, clear_at=0.5, raise_after_s=raise_after_s,
        clear_after_s=clear_after_s,
    )  # fmt: skip


VALUES = st.one_of(st.none(), st.sampled_from((0.0, 0.49, 0.5, 0.9, 1.0, 2.0)), st.floats(0, 3))
SERIES = st.lists(st.tuples(st.floats(0.1, 40.0), VALUES), min_size=1, max_size=200)


@given(SERIES, st.floats(0, 30), st.floats(0, 60))
def test_an_alert_never_flaps(series: list[tuple[float, float | None]], raise_s: float, clear_s: float) -> None:
    """Between its end and its next beginning lies the time that it needs to rise, and the other way round."""
    machine = Machine(machine_rule(raise_s, clear_s), 10.0)
    at, held, turned = 0.0, False, None
    for passed, value in series:
        at += passed
        machine.step(at, value)
        if machine.holds != held:
            if value is None:
                raise AssertionError("a missing reading changed something")
            assert value >= 1.0 if machine.holds else value < 0.5
            if turned is not None:
                assert at - turned >= (raise_s if machine.holds else clear_s) - 1e-6
            held, turned = machine.holds, at


@given(st.lists(st.tuples(st.floats(0.5, 100.0), st.booleans()), min_size=1, max_size=150), st.floats(0, 30))
def test_what_holds_on_is_raised_whatever_is_missing(series: list[tuple[float, bool]], raise_s: float) -> None:
    """A figure that stays bad is raised as soon as enough of it was read, gaps counted for ten seconds at most."""
    machine = Machine(machine_rule(raise_s, 60.0), 10.0)
    at, last, seen_s = 0.0, None, 0.0
    for passed, read in series:
        at += passed
        machine.step(at, 1.5 if read else None)
        if read:
            seen_s += 0.0 if last is None else min(at - last, 10.0)
            last = at
            assert machine.holds == (seen_s >= raise_s)


@given(SERIES)
def test_a_replay_gives_the_same(series: list[tuple[float, float | None]]) -> None:
    one, other = (Machine(machine_rule(5.0, 20.0), 10.0) for _ in range(2))
    at, seen = 0.0, []
    for passed, value in series:
        at += passed
        one.step(at, value)
        seen.append((at, value, one.holds))
    for at, value, held in seen:
        other.step(at, value)
        assert other.holds is held


@given(st.lists(st.tuples(st.floats(0.1, 30), st.one_of(st.none(), st.floats(0, 1e6))), max_size=120))
def test_a_mean_is_that_of_the_readings_in_its_window(series: list[tuple[float, float | None]]) -> None:
    window, at, kept = MeanWindow(60.0), 0.0, []
    for passed, value in series:
        at += passed
        window.add(at, value)
        if value is not None:
            kept.append((at, value))
        inside = [value for when, value in kept if when > at - 60.0]
        if inside:
            assert window.mean == pytest.approx(sum(inside) / len(inside), rel=1e-6, abs=1e-3)
        else:
            assert window.mean is None


def test_a_total_that_begins_anew_has_grown_by_what_it_is() -> None:
    window = GrowthWindow(60.0)
    for at, total in ((0.0, 100.0), (10.0, 104.0), (20.0, None), (30.0, 3.0)):
        window.add(at, total)
    assert window.growth == 7.0
    window.add(600.0, 5.0)  # after a gap: over its whole length
    assert window.growth == 2.0
    assert window.a_minute() == pytest.approx(2.0 * 60 / 570)


@given(st.lists(st.floats(0, 50), min_size=6, max_size=12), st.integers(1, 5))
def test_noise_and_a_single_step_are_no_leak(noise: list[float], step_at: int) -> None:
    lows = [1000.0 + (500.0 if place >= step_at else 0.0) + extra for place, extra in enumerate(noise)]
    assert crept(lows) < 256.0


@given(st.floats(1, 100), st.integers(6, 12))
def test_a_steady_rise_is_a_leak(slope: float, count: int) -> None:
    assert crept([1000.0 + slope * place for place in range(count)]) > slope


def test_lines_of_the_log_that_are_events() -> None:
    line = (
        "(Worker_TP0 pid=9) WARNING [jit_monitor.py:106] Triton kernel JIT compilation during inference: _some_kernel."
    )
    assert events_of(line) == ("kernel-compiled",)
    assert events_of("INFO [jit_monitor.py:60] Kernel JIT monitor activated") == ()


def test_a_new_engine_is_not_held_to_what_the_last_one_did() -> None:
    alerts = Alerts(PLAN)
    series = [shot(at, running=3, steps=1.0) for at in range(50)]
    series += [shot(at, running=None, state="loading", steps=None) for at in range(50, 100)]
    series += [shot(at, pid=77, running=1, steps=1.0) for at in range(100, 130)]
    assert changes_of(alerts, series) == []


def test_one_card_more_begins_again_and_one_less_says_nothing() -> None:
    full = 24 * (1 << 30) - 100 * (1 << 20)
    alerts = Alerts(PLAN)
    said = []
    for at in range(0, 300, 5):
        cards = (card(0, full if at < 200 else HELD), card(1, full if 60 <= at < 100 else HELD))
        said += [(at, change.began, change.finding.cause) for change in alerts.step(shot(at, cards))]
    assert [(began, cause.count("card")) for _, began, cause in said if "left" in cause] == [
        (True, 1),
        (True, 2),
        (False, 1),
    ]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (None, "loadmaster logs NAME"),
        ("vision", "loadmaster logs vision"),
        ("$(odd) name", "loadmaster logs '$(odd) name'"),
    ],
)
def test_a_fix_names_the_deployment(name: str | None, command: str) -> None:
    header, series = open_recording(FOLDER / "engine-stuck.jsonl")
    began = changes_of(Alerts(header.limits, name), list(series))[0]
    assert [fix.command for fix in began.finding.fixes] == [command]
