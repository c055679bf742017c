"""Snapshots as named numbers."""

from __future__ import annotations

from loadmaster.core.observation import CardReading, EngineReading, ProcessReading, Snapshot
from loadmaster.core.series import other_bytes, own_bytes, values_of


def _engine(at: float, pid: int = 1, **totals: int) -> Snapshot:
    return Snapshot(at=at, engine=EngineReading(pid=pid, running=2, **totals))  # type: ignore[arg-type]


def test_totals_become_rates() -> None:
    values = values_of(_engine(12, generation_tokens=500), _engine(10, generation_tokens=100))
    assert values["engine.generation_tokens_per_s"] == 200
    assert values["engine.errors_per_s"] is None
    assert values["engine.running"] == 2


def test_a_restart_a_gap_and_a_clock_set_back_have_no_rate() -> None:
    first = _engine(10, generation_tokens=100)
    for later in (
        _engine(12, pid=2, generation_tokens=500),
        _engine(12, generation_tokens=5),
        _engine(100, generation_tokens=500),
        _engine(9, generation_tokens=500),
    ):
        assert values_of(later, first)["engine.generation_tokens_per_s"] is None
    assert values_of(first)["engine.generation_tokens_per_s"] is None


def test_what_is_not_read_stays_unknown() -> None:
    card = CardReading(index=3, used_bytes=5, throttle_reasons=("power-cap",))
    values = values_of(Snapshot(at=1, cards=(card,)))
    assert values["card3.used_bytes"] == 5
    assert values["card3.throttled"] == 1
    assert values["card3.power_w"] is None
    assert values["card3.own_bytes"] is None
    assert not any(name.startswith("engine.") for name in values)


def test_memory_of_a_process_counts_for_whom_it_belongs_to() -> None:
    own, other, nobody = (
        ProcessReading(number, used_bytes=number, own=of) for number, of in ((7, True), (9, False), (11, None))
    )
    both = CardReading(index=0, processes=(own, other))
    assert (own_bytes(both), other_bytes(both)) == (7, 9)
    unsure = CardReading(index=0, processes=(own, nobody))
    assert (own_bytes(unsure), other_bytes(unsure)) == (None, None)
    hidden = CardReading(index=0, processes=(ProcessReading(7, own=True),))
    assert (own_bytes(hidden), other_bytes(hidden)) == (None, 0)


def test_what_is_counted_at_a_requests_end_has_no_rate_while_requests_run() -> None:
    late = ("generation_tokens",)

    def at(second: float, running: int, tokens: int) -> Snapshot:
        reading = EngineReading(
            pid=1, running=running, generation_tokens=tokens, prompt_tokens=tokens, late_totals=late
        )
        return Snapshot(at=second, engine=reading)

    for before, after in ((1, 1), (0, 1), (1, 0)):
        values = values_of(at(12, after, 300), at(10, before, 100))
        assert values["engine.generation_tokens_per_s"] is None
        assert values["engine.prompt_tokens_per_s"] == 100
    assert values_of(at(12, 0, 300), at(10, 0, 100))["engine.generation_tokens_per_s"] == 100
