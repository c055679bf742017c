"""The rules of promtool's linter for metrics, in their own words, so that they hold where promtool is not installed.

Rules after Prometheus's documentation "Metric and label naming" and the checks of ``promtool check metrics`` 2.42.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

_BASE = {
    "milliseconds": "seconds",
    "microseconds": "seconds",
    "minutes": "seconds",
    "hours": "seconds",
    "days": "seconds",
    "bits": "bytes",
    "kilobytes": "bytes",
    "megabytes": "bytes",
    "gigabytes": "bytes",
    "kibibytes": "bytes",
    "mebibytes": "bytes",
    "gibibytes": "bytes",
    "milliwatts": "watts",
    "megahertz": "hertz",
    "gigahertz": "hertz",
    "fahrenheit": "celsius",
    "percent": "ratio",
}
_SHORT = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d", "gib", "mib", "mhz", "w"}
_TYPES = ("counter", "gauge", "histogram", "summary", "untyped")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def lint(metrics: Iterable[Metric], prefix: str) -> list[str]:
    """A sentence for each breach, none when all is well."""
    found: list[str] = []
    seen: set[str] = set()
    for metric in metrics:
        # the library leaves a counter's _total to its samples
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        if name in seen:
            found.append(f"{name}: there are two of it")
        seen.add(name)
        if not metric.documentation.strip():
            found.append(f"{name}: no help text")
        if not name.startswith(prefix):
            found.append(f"{name}: does not begin with {prefix}")
        if _NAME.fullmatch(name) is None:
            found.append(f"{name}: not in small letters and underscores")
        words = name.split("_")
        found += [f"{name}: {word} is no base unit, {_BASE[word]} is" for word in words if word in _BASE]
        found += [f"{name}: {word} is an abbreviation of a unit" for word in words if word in _SHORT]
        found += [f"{name}: its type is in its name" for word in words if word in _TYPES]
        if metric.type != "counter" and name.endswith("_total"):
            found.append(f"{name}: ends in _total and is no counter")
        if metric.type != "histogram" and name.endswith(("_bucket", "_count", "_sum")):
            found.append(f"{name}: ends as parts of histograms do")
        labels = {label for sample in metric.samples for label in sample.labels}
        found += [f"{name}: label {label} is not in small letters" for label in labels if not _NAME.fullmatch(label)]
        if metric.type != "histogram":
            found += [f"{name}: label {label} is for histograms" for label in labels & {"le", "quantile"}]
    return found
