"""A snapshot as named numbers, for what keeps and draws readings over time.

Names are ``card0.used_bytes``, ``engine.running``: a fixed list for each card and for the engine. Totals become rates a
second over the time since the snapshot before, None across a restart of the engine or a gap, and None while the
engine works on requests whose tokens it counts only at their end.
"""

from __future__ import annotations

from loadmaster.core.observation import CardReading, EngineReading, Snapshot

OF_CARD = (
    "used_bytes",
    "own_bytes",
    "utilization",
    "memory_utilization",
    "power_w",
    "temperature_c",
    "sm_clock_hz",
    "memory_clock_hz",
    "throttled",
    "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s",
)
OF_ENGINE = (
    "running",
    "waiting",
    "kv_cache_usage",
    "time_to_first_token_s",
    "inter_token_latency_s",
    "queue_s",
    "host_cores",
)
RATES = ("preemptions", "prompt_tokens", "generation_tokens", "requests", "errors")
_LONGEST_GAP_S = 30.0


def values_of(snapshot: Snapshot, before: Snapshot | None = None) -> dict[str, float | None]:
    """All series of one snapshot; ``before``: the one that rates are counted from."""
    values: dict[str, float | None] = {}
    for card in snapshot.cards or ():
        for name in OF_CARD:
            values[f"card{card.index}.{name}"] = _of_card(card, name)
    engine = snapshot.engine
    if engine is not None:
        for name in OF_ENGINE:
            values[f"engine.{name}"] = getattr(engine, name)
        passed = None if before is None else snapshot.at - before.at
        for name in RATES:
            earlier = None if before is None else before.engine
            values[f"engine.{name}_per_s"] = _rate(engine, earlier, name, passed)
    return values


def _of_card(card: CardReading, name: str) -> float | None:
    if name == "throttled":
        return None if card.throttle_reasons is None else float(bool(card.throttle_reasons))
    if name == "own_bytes":
        return own_bytes(card)
    value: float | None = getattr(card, name)
    return value


def own_bytes(card: CardReading) -> int | None:
    """What the engine's own processes hold on a card; None: the driver does not tell, or not whose they are."""
    if card.processes is None:
        return None
    own = [process.used_bytes for process in card.processes if process.own]
    if any(process.own is None for process in card.processes) or None in own:
        return None
    return sum(used for used in own if used is not None)


def other_bytes(card: CardReading) -> int | None:
    """What processes hold that are not the engine's; None: not known."""
    if card.processes is None or any(process.own is None for process in card.processes):
        return None
    used = [process.used_bytes for process in card.processes if process.own is False]
    return None if None in used else sum(one for one in used if one is not None)


def _rate(now: EngineReading, before: EngineReading | None, name: str, passed: float | None) -> float | None:
    if before is None or passed is None or not 0 < passed <= _LONGEST_GAP_S or now.pid != before.pid:
        return None
    if name in now.late_totals and (now.running or before.running):
        return None
    last, first = getattr(now, name), getattr(before, name)
    if last is None or first is None or last < first:
        return None
    return float(last - first) / passed
