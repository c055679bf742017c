"""docs/watch.md names every metric that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.service.test_deploymentmetrics import all_metrics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "watch.md"


def test_the_tables_of_metrics_are_whole() -> None:
    named = {
        found[1]: (set(re.findall(r"`(\w+)`", found[2])), found[3])
        for found in re.finditer(r"^\| `(loadmaster_\w+)` \| (.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    }
    there = {}
    for metric in all_metrics().collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
        there[name] = (labels, metric.documentation)
    assert named == there
