"""How busy an engine is and whether it moves, from the text of its ``/metrics``."""

from __future__ import annotations

import math

from loadmaster.core.tables import load_toml
from loadmaster.engines.base import Progress


def progress(text: str) -> Progress | None:
    """Requests running and waiting, and the steps done, over all replicas; None when the text tells no requests."""
    sums = _sums(text)
    for engine in load_toml("engine-metrics.toml")["engine"]:
        if engine["running"] in sums:
            steps = [sums[name] for name in engine["steps"] if name in sums]
            return Progress(
                running=int(sums[engine["running"]]),
                waiting=int(sums.get(engine["waiting"], 0)),
                steps=sum(steps) if steps else None,
            )
    return None


def _sums(text: str) -> dict[str, float]:
    """Each sample's value by name, summed over its labels; what is no sample is passed over."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, value = _sample(line)
        if name and value is not None:
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _sample(line: str) -> tuple[str, float | None]:
    brace = line.find("{")
    if brace >= 0:
        name, rest = line[:brace], line[line.rfind("}") + 1 :]
    else:
        name, _, rest = line.partition(" ")
    words = rest.split()
    try:
        value = float(words[0])
    except (ValueError, IndexError):
        return name, None
    return name.strip(), value if math.isfinite(value) and value >= 0 else None
