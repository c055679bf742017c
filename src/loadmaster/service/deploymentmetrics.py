"""The plan, what is really held, and the findings of a deployment as Prometheus metrics.

Base units, one meaning a name, labels from short lists: cards, components, stages, states, codes of findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loadmaster import __version__
from loadmaster.core.facts import Finding, LoadSheet
from loadmaster.core.observation import CardReading, EngineReading, EngineStateName, Snapshot
from loadmaster.core.reconcile import Reconciliation
from loadmaster.core.series import other_bytes, own_bytes

# name, attribute of a card's reading, help
_OF_CARD = (
    ("loadmaster_gpu_memory_used_bytes", "used_bytes", "Memory in use on the card, all processes together."),
    ("loadmaster_gpu_memory_total_bytes", "total_bytes", "Memory of the card, as the driver counts."),
    ("loadmaster_gpu_memory_reserved_bytes", "reserved_bytes", "Memory that the driver keeps for itself."),
    ("loadmaster_gpu_utilization_ratio", "utilization", "Share of time in which the card worked."),
    ("loadmaster_gpu_memory_busy_ratio", "memory_utilization", "Share of time in which its memory was busy."),
    ("loadmaster_gpu_power_watts", "power_w", "Power drawn."),
    ("loadmaster_gpu_power_limit_watts", "power_limit_w", "Power allowed."),
    ("loadmaster_gpu_temperature_celsius", "temperature_c", "Temperature of the card."),
    ("loadmaster_gpu_sm_clock_hertz", "sm_clock_hz", "Clock of the multiprocessors."),
    ("loadmaster_gpu_memory_clock_hertz", "memory_clock_hz", "Clock of the memory."),
    ("loadmaster_gpu_pcie_receive_bytes_per_second", "pcie_rx_bytes_per_s", "Traffic over PCIe to the card."),
    ("loadmaster_gpu_pcie_transmit_bytes_per_second", "pcie_tx_bytes_per_s", "Traffic over PCIe from the card."),
)
_OF_ENGINE = (
    ("loadmaster_engine_requests_running", "running", "Requests that the engine works on."),
    ("loadmaster_engine_requests_waiting", "waiting", "Requests in the engine's own queue."),
    ("loadmaster_engine_kv_cache_used_ratio", "kv_cache_usage", "Share of the KV cache in use."),
    ("loadmaster_engine_first_token_seconds", "time_to_first_token_s", "Mean time to the first token, last interval."),
    ("loadmaster_engine_token_interval_seconds", "inter_token_latency_s", "Mean time between tokens, last interval."),
)
_TOTALS = (
    ("loadmaster_engine_preemptions", "preemptions", "Requests put back for want of cache."),
    ("loadmaster_engine_prompt_tokens", "prompt_tokens", "Tokens of prompts."),
    ("loadmaster_engine_generation_tokens", "generation_tokens", "Tokens generated."),
    ("loadmaster_engine_requests_finished", "requests", "Requests finished by the engine."),
    ("loadmaster_engine_errors", "errors", "Requests that the engine ended with an error."),
)
HOST = "host"  # in place of a card's number, where the plan is of the machine's memory
_STATES: tuple[str, ...] = get_args(EngineStateName)


class DeploymentMetrics(Collector):
    """What is true at the moment of asking; what is not known is absent."""

    def __init__(
        self,
        plan: LoadSheet | None,
        latest: Callable[[], Snapshot | None] = lambda: None,
        findings: Callable[[], Sequence[Finding]] = lambda: (),
        reconciled: Callable[[], Sequence[Reconciliation]] = lambda: (),
    ) -> None:
        self._plan = plan
        self._latest = latest
        self._findings = findings
        self._reconciled = reconciled

    def collect(self) -> Iterable[Metric]:
        build = GaugeMetricFamily("loadmaster_build_info", "The version of loadmaster, always 1.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        if self._plan is not None:
            yield from _plan(self._plan)
        snapshot = self._latest()
        if snapshot is not None:
            read = GaugeMetricFamily("loadmaster_last_reading_timestamp_seconds", "When cards and engine were read.")
            read.add_metric([], snapshot.at)
            yield read
            yield from _cards(snapshot.cards or ())
            if snapshot.engine is not None:
                yield from _engine(snapshot.engine)
        yield from _reconciled(self._reconciled())
        yield from _active(self._findings())


def _plan(plan: LoadSheet) -> Iterator[Metric]:
    parts = GaugeMetricFamily(
        "loadmaster_plan_component_bytes", "Planned memory of one component on one card.", labels=["gpu", "component"]
    )
    peaks = GaugeMetricFamily(
        "loadmaster_plan_peak_bytes",
        "Planned highest memory of a card while starting, at rest, and serving; as CUDA counts.",
        labels=["gpu", "stage", "bound"],
    )
    totals = GaugeMetricFamily("loadmaster_plan_gpu_bytes", "Memory of the card, as CUDA counts.", labels=["gpu"])
    for load in plan.gpus:
        gpu = str(load.index) if plan.engine.name != "llamacpp" else HOST
        totals.add_metric([gpu], load.total_bytes)
        for part in load.components:
            parts.add_metric([gpu, part.name], part.bytes)
        sides = (("expected", load.peak_bytes), ("low", load.peak_low_bytes), ("high", load.peak_high_bytes))
        for bound, values in sides:
            for stage, value in values.items():
                peaks.add_metric([gpu, stage, bound], value)
    yield from (parts, peaks, totals)
    cache = plan.kv_cache
    if cache is not None and cache.tokens is not None:
        tokens = GaugeMetricFamily("loadmaster_plan_kv_cache_tokens", "Planned tokens of the KV cache.")
        tokens.add_metric([], cache.tokens)
        yield tokens


def _cards(cards: Sequence[CardReading]) -> Iterator[Metric]:
    for name, attribute, text in _OF_CARD:
        family = GaugeMetricFamily(name, text, labels=["gpu"])
        for card in cards:
            value = getattr(card, attribute)
            if value is not None:
                family.add_metric([str(card.index)], value)
        yield family
    held = GaugeMetricFamily(
        "loadmaster_gpu_memory_held_bytes", "Memory held on a card, by whose processes they are.", labels=["gpu", "by"]
    )
    throttled = GaugeMetricFamily("loadmaster_gpu_throttled", "1 while the card is held back.", labels=["gpu"])
    ecc = CounterMetricFamily("loadmaster_gpu_ecc_errors", "Memory errors that were not corrected.", labels=["gpu"])
    xid = CounterMetricFamily("loadmaster_gpu_xid_errors", "Errors that the driver has reported.", labels=["gpu"])
    for card in cards:
        gpu = [str(card.index)]
        for by, size in (("engine", own_bytes(card)), ("others", other_bytes(card))):
            if size is not None:
                held.add_metric([*gpu, by], size)
        if card.throttle_reasons is not None:
            throttled.add_metric(gpu, float(bool(card.throttle_reasons)))
        if card.ecc_uncorrected is not None:
            ecc.add_metric(gpu, card.ecc_uncorrected)
        if card.xid is not None:
            xid.add_metric(gpu, len(card.xid))
    yield from (held, throttled, ecc, xid)


def _engine(engine: EngineReading) -> Iterator[Metric]:
    state = GaugeMetricFamily("loadmaster_engine_state", "1 for the state that the engine is in.", labels=["state"])
    for name in _STATES:
        state.add_metric([name], float(engine.state == name))
    yield state
    for name, attribute, text in _OF_ENGINE:
        value = getattr(engine, attribute)
        if value is not None:
            family = GaugeMetricFamily(name, text)
            family.add_metric([], value)
            yield family
    for name, attribute, text in _TOTALS:
        value = getattr(engine, attribute)
        if value is not None:
            total = CounterMetricFamily(name, text)
            total.add_metric([], value)
            yield total


def _reconciled(found: Sequence[Reconciliation]) -> Iterator[Metric]:
    actual = GaugeMetricFamily(
        "loadmaster_actual_component_bytes",
        "What the engine's log says that a component took.",
        labels=["gpu", "component"],
    )
    unexplained = GaugeMetricFamily(
        "loadmaster_unexplained_bytes",
        "Memory held on a card that neither a reading nor the plan names; negative: less is held.",
        labels=["gpu", "point"],
    )
    for one in found:
        for card in one.cards:
            gpu = str(card.index)
            if card.unexplained_bytes is not None:
                unexplained.add_metric([gpu, one.point], card.unexplained_bytes)
            if one.point == "ready":
                for line in card.lines:
                    if line.actual is not None:
                        actual.add_metric([gpu, line.name], line.actual)
    yield from (actual, unexplained)


def _active(findings: Sequence[Finding]) -> Iterator[Metric]:
    active = GaugeMetricFamily(
        "loadmaster_finding_active", "1 for each finding that holds now.", labels=["code", "severity"]
    )
    for code, severity in sorted({(finding.code, finding.severity) for finding in findings}):
        active.add_metric([code, severity], 1)
    yield active
