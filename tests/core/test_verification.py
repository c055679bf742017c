"""What steps add up to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.verification import Status, Step, counts, verdict

STATUSES: tuple[Status, ...] = ("passed", "failed", "not_applicable")


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    return [
        Step(
            name=f"step-{number}",
            kind=draw(st.sampled_from(["transport", "answer"])),
            status=draw(st.sampled_from(STATUSES)),
            seconds=0.0,
            detail="seen",
            control=draw(st.booleans()),
            undecided=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 6)))
    ]


@given(steps())
def test_a_failure_that_is_no_control_decides(done: list[Step]) -> None:
    broken = any(step.status == "failed" and not step.control for step in done)
    assert (verdict(done) is False) == broken


@given(steps())
def test_passed_means_that_nothing_failed_and_nothing_is_open(done: list[Step]) -> None:
    clean = all(step.status != "failed" and not step.undecided for step in done)
    assert (verdict(done) is True) == clean


@given(steps())
def test_a_step_that_passes_never_makes_it_worse(done: list[Step]) -> None:
    more = Step(name="more", kind="transport", status="passed", seconds=0.0, detail="seen")
    assert verdict([*done, more]) is verdict(done)


@given(steps())
def test_every_step_is_counted_once(done: list[Step]) -> None:
    assert sum(counts(done).values()) == len(done)
