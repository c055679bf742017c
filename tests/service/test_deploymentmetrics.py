"""Plan, actual and findings as Prometheus metrics, and the dashboard and the alerts that stand on them."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import GIB, EngineFacts
from loadmaster.core.observation import CardReading, EngineReading, EngineStateName, ProcessReading, Snapshot
from loadmaster.core.reconcile import Point, reconcile
from loadmaster.service.backends import Backends
from loadmaster.service.deploymentmetrics import DeploymentMetrics
from loadmaster.service.gatewaymetrics import GatewayMetrics
from loadmaster.service.gatewaysettings import BackendSettings, LimitSettings, ProbeSettings
from tests.gateways import gateway, soon
from tests.keptruns import LONG, sheet_of
from tests.promlint import lint
from tests.recordedruns import planned, readings_of

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "loadmaster.rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "loadmaster.json"
PROMTOOL = shutil.which("promtool")
OUTSIDE = {"up"}  # what Prometheus itself makes


def _snapshot() -> Snapshot:
    cards = tuple(
        CardReading(
            index=index,
            name="NVIDIA H200",
            total_bytes=140 * GIB,
            used_bytes=23 * GIB,
            free_bytes=116 * GIB,
            reserved_bytes=GIB,
            utilization=0.9,
            memory_utilization=0.4,
            power_w=500.0,
            power_limit_w=700.0,
            temperature_c=60.0,
            sm_clock_hz=1_980_000_000,
            memory_clock_hz=3_201_000_000,
            throttle_reasons=("power-cap",) if index else (),
            ecc_uncorrected=0,
            xid=(31,) if index else (),
            pcie_rx_bytes_per_s=1000,
            pcie_tx_bytes_per_s=2000,
            processes=(ProcessReading(10 + index, "VLLM::Worker", 22 * GIB, True), ProcessReading(1, "x", GIB, False)),
        )
        for index in (0, 1)
    )
    engine = EngineReading(
        state="ready",
        running=3,
        waiting=1,
        kv_cache_usage=0.5,
        preemptions=2,
        prompt_tokens=1000,
        generation_tokens=500,
        requests=7,
        errors=1,
        time_to_first_token_s=0.2,
        inter_token_latency_s=0.01,
    )
    return Snapshot(at=1_790_000_000.0, cards=cards, engine=engine)


def _full() -> DeploymentMetrics:
    sheet, replays = sheet_of(LONG), planned(LONG)[1]
    points: tuple[Point, ...] = ("ready", "serving")
    found = [reconcile(sheet, readings_of(LONG), point, replays) for point in points]
    findings = [finding("one-gpu-idle", "GPU 1 does nothing."), finding("card-near-limit", "GPU 0 is nearly full.")]
    return DeploymentMetrics(sheet, _snapshot, lambda: findings, lambda: found)


def _gateway() -> GatewayMetrics:
    backends = Backends((BackendSettings(model="fake", url="http://127.0.0.1:9"),), LimitSettings(), ProbeSettings())
    metrics = GatewayMetrics(backends)
    metrics.requests.labels("/v1/chat/completions", "fake", "200").inc()
    metrics.refusals.labels("queue_full").inc()
    for counter in (metrics.left, metrics.broken, metrics.bytes_out):
        counter.labels("/v1/chat/completions", "fake").inc()
    for histogram in (metrics.seconds, metrics.first_byte):
        histogram.labels("/v1/chat/completions", "fake").observe(0.5)
    metrics.queued.labels("fake").observe(0.1)
    metrics.changed.labels("fake").inc()
    return metrics


def all_metrics() -> CollectorRegistry:
    metrics = _gateway()
    metrics.registry.register(_full())
    return metrics.registry


def _values(collector: Collector) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


def test_plan_and_actual_stand_beside_each_other() -> None:
    sheet, values = sheet_of(LONG), _values(_full())
    for load in sheet.gpus:
        gpu = ("gpu", str(load.index))
        for part in load.components:
            assert values["loadmaster_plan_component_bytes", (("component", part.name), gpu)] == part.bytes
        peak = (("bound", "high"), gpu, ("stage", "serving"))
        assert values["loadmaster_plan_peak_bytes", peak] == load.peak_high_bytes["serving"]
        assert values["loadmaster_gpu_memory_used_bytes", (gpu,)] == 23 * GIB
        assert values["loadmaster_gpu_memory_held_bytes", (("by", "others"), gpu)] == GIB
        assert values["loadmaster_actual_component_bytes", (("component", "weights"), gpu)] == round(11.3 * GIB)
        assert abs(values["loadmaster_unexplained_bytes", (gpu, ("point", "serving"))]) < 0.3 * GIB
    assert values["loadmaster_finding_active", (("code", "one-gpu-idle"), ("severity", "warning"))] == 1
    assert values["loadmaster_engine_generation_tokens_total", ()] == 500
    states = {labels[0][1]: value for (name, labels), value in values.items() if name == "loadmaster_engine_state"}
    assert set(states) == set(get_args(EngineStateName))
    assert [state for state, value in states.items() if value] == ["ready"]


def test_what_is_not_known_is_absent_not_zero() -> None:
    values = _values(DeploymentMetrics(None, lambda: Snapshot(at=5.0, cards=(CardReading(index=0),))))
    assert {name for name, _ in values} == {"loadmaster_build_info", "loadmaster_last_reading_timestamp_seconds"}
    assert {name for name, _ in _values(DeploymentMetrics(None))} == {"loadmaster_build_info"}


def test_the_memory_of_a_host_is_no_card() -> None:
    plan = structs.replace(sheet_of(LONG), engine=EngineFacts("llamacpp", "b9000"))
    plan = structs.replace(plan, gpus=plan.gpus[:1])
    cards = {dict(labels).get("gpu") for _, labels in _values(DeploymentMetrics(plan))}
    assert cards == {"host", None}


def test_labels_come_from_short_lists() -> None:
    series = [labels for (_, labels) in _values(_full())]
    assert len(series) < 120
    named = {name for labels in series for name, _ in labels}
    assert named <= {"gpu", "component", "stage", "bound", "state", "by", "code", "severity", "version", "point"}


def test_the_conventions_of_prometheus_hold() -> None:
    assert lint(all_metrics().collect(), "loadmaster_") == []


def _bad() -> Iterator[tuple[Metric, str]]:
    yield GaugeMetricFamily("loadmaster_wait_ms", "x"), "abbreviation"
    yield GaugeMetricFamily("loadmaster_wait_milliseconds", "x"), "no base unit"
    yield GaugeMetricFamily("loadmaster_things_total", "x"), "no counter"
    yield GaugeMetricFamily("loadmaster_things_count", "x"), "parts of histograms"
    yield GaugeMetricFamily("loadmaster_gauge_things", "x"), "type is in its name"
    yield GaugeMetricFamily("loadmaster_things", " "), "no help"
    yield CounterMetricFamily("things", "x"), "does not begin"
    yield GaugeMetricFamily("loadmaster_Things", "x"), "small letters"


@pytest.mark.parametrize(("metric", "words"), list(_bad()), ids=lambda value: value if isinstance(value, str) else "")
def test_the_linter_finds_each_breach(metric: Metric, words: str) -> None:
    assert any(words in text for text in lint([metric], "loadmaster_"))


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_finds_nothing() -> None:
    assert PROMTOOL is not None
    text = generate_latest(all_metrics())
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_takes_the_rules() -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "9 rules found" in done.stdout


# ---------------------------------------------------------------------------------------------- rules, dashboard


def _expressions() -> dict[str, str]:
    rules = yaml.safe_load(RULES.read_text())
    found = {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found[f"variable {variable['name']}"] = variable["query"]
    return found


@functools.cache
def _labels() -> dict[str, set[str]]:
    """The labels of each series that /metrics can have."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(all_metrics()).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("where", sorted(_expressions()))
def test_every_metric_and_label_that_is_used_exists(where: str) -> None:
    expression, labels = _expressions()[where], _labels()
    names = set(re.findall(r"\bloadmaster_\w+|\bup\b", expression))
    assert names
    assert names - OUTSIDE <= set(labels)
    for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
        if name not in OUTSIDE:
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert used <= labels[name] | {"instance", "job"}
    for grouping in re.findall(r"(?:by|ignoring|on) ?\(([^)]*)\)", expression):
        known = set().union(*(labels.get(name, set()) for name in names)) | {"instance", "job"}
        assert {label.strip() for label in grouping.split(",")} <= known


def test_every_finding_of_the_gateway_reaches_a_rule() -> None:
    rules: Any = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    passed_on = [rule["expr"] for rule in rules if "loadmaster_finding_active" in rule["expr"]]
    assert {re.search(r'severity="(\w+)"', expression)[1] for expression in passed_on} == {"error", "warning"}  # type: ignore[index]
    for rule in rules:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"]
            assert all('instance="$instance"' in target["expr"] for target in panel["targets"])


def test_the_gateway_serves_them_beside_its_own_figures() -> None:
    async def ask() -> tuple[str, bool]:
        ran: list[bool] = []

        async def beside() -> None:
            ran.append(True)
            raise RuntimeError("what runs beside harms nobody")

        backends = (BackendSettings(model="fake", url="http://127.0.0.1:9"),)
        async with gateway(backends, collectors=(_full(),), beside=(beside,)) as opened:
            await soon(lambda: bool(ran), "the work beside")
            answer = await opened.ask("GET", "/metrics")
            assert answer.status == 200
            return answer.body.decode(), bool(ran)

    text, ran = asyncio.run(ask())
    assert ran
    assert 'loadmaster_plan_component_bytes{component="kv_cache",gpu="0"}' in text
    assert 'loadmaster_finding_active{code="one-gpu-idle",severity="warning"} 1.0' in text
    assert "loadmaster_requests_running" in text
