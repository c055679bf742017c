"""What is read of the cards and of the engine at one moment. Frozen; None is what could not be read, never zero.

Sizes are bytes, times seconds, clocks hertz, shares 0 to 1, rates bytes a second. A recording is one header and then
one :class:`Snapshot` a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct

EngineStateName = Literal[
    "checking",
    "waiting-for-memory",
    "loading",
    "warming-up",
    "ready",
    "stuck",
    "stopping",
    "exited",
    "failed",
]


class ProcessReading(Struct, frozen=True, omit_defaults=True):
    """A process that holds memory of a card. ``own``: of the watched engine; None: nobody can tell."""

    pid: int
    name: str | None = None
    used_bytes: int | None = None
    own: bool | None = None


class CardReading(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One card. ``index``: as the engine numbers its cards.

    ``total_bytes``, ``used_bytes``: as the driver counts, all processes together and, in ``used_bytes``, without
    what the driver reserves for itself. ``xid``: the numbers of the errors that the driver has reported since the
    sampler began, in order. ``throttle_reasons``: names of ``core/data/throttle-reasons.toml``, () when it runs free.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    utilization: float | None = None
    memory_utilization: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    ecc_uncorrected: int | None = None
    xid: tuple[int, ...] | None = None
    pcie_rx_bytes_per_s: int | None = None
    pcie_tx_bytes_per_s: int | None = None
    nvlink: bool | None = None
    processes: tuple[ProcessReading, ...] | None = None


class EngineReading(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine. Requests, tokens, preemptions and errors are totals since it started, over all replicas.

    Latencies are means over what ended in the last interval: None when nothing did. ``kv_cache_usage``: of the
    fullest replica. ``queue_s``: time in the engine's queue. ``held``: requests that
    wait in the gateway, which ``waiting`` does not count. ``steps``: grows with each of its steps.
    ``thinking_tokens``: those of ``generation_tokens`` that the gateway saw as reasoning. ``pictures``: asked of
    its picture cache. ``host_cores``: processors that its first process used, which prepares the pictures; 1.0 is
    one core. ``events``: lines of its log by the names in ``core/data/alerts.toml``. ``resident_bytes``: of the
    host's memory, told of an engine that may compute there. ``late_totals``: the totals that this engine counts only
    when a request ends, so that they stand still while it works.
    """

    state: EngineStateName | None = None
    phase: str | None = None
    since: float | None = None
    pid: int | None = None
    running: int | None = None
    waiting: int | None = None
    held: int | None = None
    kv_cache_usage: float | None = None
    steps: float | None = None
    preemptions: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    thinking_tokens: int | None = None
    requests: int | None = None
    errors: int | None = None
    pictures: int | None = None
    time_to_first_token_s: float | None = None
    inter_token_latency_s: float | None = None
    queue_s: float | None = None
    request_s: float | None = None
    iteration_tokens: float | None = None
    host_cores: float | None = None
    events: dict[str, int] | None = None
    resident_bytes: int | None = None
    late_totals: tuple[str, ...] = ()


class Snapshot(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All of one moment. ``at``: seconds of the epoch. ``missing``: sentences, what could not be read and why."""

    at: float
    cards: tuple[CardReading, ...] | None = None
    engine: EngineReading | None = None
    missing: tuple[str, ...] = ()


_LARGEST = 1 << 63
_LATEST = 253_402_000_000.0  # seconds of the epoch: within the year 9999, the last one that clocks can show
_TIMES = ("at", "since", "began")
_COLDEST = -273.15


def impossible(reading: Struct) -> str | None:
    """What in a reading, or in what is kept beside readings, can be no figure of a machine; None: all of it may be."""
    return next(_impossible(reading, ""), None)


def _impossible(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Struct):
        for field in value.__struct_fields__:
            yield from _impossible(getattr(value, field), field)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _impossible(item, name)
        if name == "cards":
            numbers = [card.index for card in value]
            twice = next((number for number in numbers if numbers.count(number) > 1), None)
            if twice is not None:
                yield f"two cards have the index {twice}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _impossible(item, f"{name}.{key}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        least = _COLDEST if name == "temperature_c" else 0
        most = _LATEST if name in _TIMES else _LARGEST
        if value < least:
            yield f"{name} is under {least:g}"
        elif not value < most:  # also what is no number
            yield f"{name} is too large"
