#!/usr/bin/env python3
"""Write docs/accuracy.md: every recorded launch, plan against actual, misses too.

accuracy.py [--check]    with --check nothing is written, and the exit code is 1 if the page is out of date.

A record (tests/data/runs/NAME.json) has the launch, the cards, and the numbers that a log or NVML showed.
For each, a checkpoint of the same architecture and format is written (sparse), planned with the
record's own cards, version and flags, and compared. Comparisons:

- weights: the sum of the weights.* components of a card against "Model loading took".
- KV available: the plan's figure against "Available KV cache memory".
- KV tokens: the cache is forced to the logged size, which the log rounds to 0.01 GiB; the logged count must
  lie between the answers for half a digit less and half a digit more.
- peak: the highest NVML reading against the serving peak, with what the machine had in use before the
  engine's first allocation in place of the planned context (it belongs to machine and driver), and with what
  the driver reserves, which NVML counts and CUDA does not. A run that did not send full concurrency, or
  pictures of every size, may stay below its plan. The plan does not know which pictures will come: it expects one of
  half the largest area, then the largest.
- peak range: whether that reading lies within the plan's low and high, to 0.05 GiB.
- peak, its pictures: the same peak with the allocator replayed on the pictures that the run sent, in their order.
- unexplained, ready and unexplained, peak: what the driver counts on the card that is farthest off, against its
  reserve and each component as the log says it, or else as the plan expects it for what the run did. What is left
  is what no reading and no plan names; `loadmaster runs show` remarks on it beyond the limit.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadmaster.core.activations import growth_after
from loadmaster.core.argv import parse_argv
from loadmaster.core.facts import GIB, EngineFacts, GpuLoad, LaunchArgs, LoadSheet, ModelFacts
from loadmaster.core.gputable import parse_gpu_spec
from loadmaster.core.logfacts import LogReadings
from loadmaster.core.pictures import picture_rules
from loadmaster.core.plan import make_plan
from loadmaster.core.reconcile import CardActual, Point, RunActual, reconcile
from loadmaster.core.served import ServedLoad, rank_replays
from loadmaster.core.sheet import load_sheet, plan_of
from loadmaster.edge.modeldir import read_model
from loadmaster.edge.sample import write_sample

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "tests" / "data" / "runs"
PAGE = ROOT / "docs" / "accuracy.md"
HALF_DIGIT = 0.006 * GIB
# What the page promises; a miss is marked, not hidden.
LIMITS = {
    "weights": "1.5 %",
    "KV available": "0.35 GiB",
    "KV tokens": "exact",
    "peak": "0.5 GiB",
    "peak range": "inside",
    "peak, its pictures": "0.5 GiB",
    "unexplained, ready": "0.3 GiB",
    "unexplained, peak": "0.3 GiB",
}
UNEXPLAINED_GIB = 0.3

PICTURE = re.compile(r"(\d+)x(\d+)x1")

Row = tuple[str, str, str, str, str, bool]


def records() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"))]


def sheet_of(record: dict[str, Any], model: ModelFacts, extra: tuple[str, ...] = ()) -> LoadSheet:
    return make_plan(model, parse_gpu_spec(record["gpus"]), launch_of(record, model, extra), engine_of(record))


def launch_of(record: dict[str, Any], model: ModelFacts, extra: tuple[str, ...] = ()) -> LaunchArgs:
    argv = ["vllm", "serve", model.name, *record["flags"], *extra]
    return parse_argv(argv, engine_version=record["engine_version"], env=record["env"])


def engine_of(record: dict[str, Any]) -> EngineFacts:
    return EngineFacts("vllm", record["engine_version"])


def compare(record: dict[str, Any], model: ModelFacts) -> Iterator[Row]:
    """(run, what, planned, measured, miss, within the limit) for each number that the record has."""
    name, measured, sheet = record["name"], record["measured"], sheet_of(record, model)
    if measured.get("weights_gib") is not None:
        planned = max(sum(c.bytes for c in gpu.components if c.name.startswith("weights.")) for gpu in sheet.gpus) / GIB
        miss = planned / measured["weights_gib"] - 1
        yield (
            name,
            "weights",
            f"{planned:.2f} GiB",
            f"{measured['weights_gib']:.2f} GiB",
            f"{miss:+.2%}",
            abs(miss) <= 0.015,
        )
    available = measured.get("kv_available_gib")
    if available is not None and not measured.get("kv_available_is_forced"):
        assert sheet.kv_cache is not None and sheet.kv_cache.available_bytes is not None
        planned = sheet.kv_cache.available_bytes / GIB
        miss = planned - available
        yield name, "KV available", f"{planned:.2f} GiB", f"{available:.2f} GiB", f"{miss:+.2f} GiB", abs(miss) <= 0.35
    if measured.get("kv_tokens") is not None:
        low, high = (forced_tokens(record, model, available * GIB + delta) for delta in (-HALF_DIGIT, HALF_DIGIT))
        inside = low <= measured["kv_tokens"] <= high
        yield (
            name,
            "KV tokens",
            f"{low:,} to {high:,}",
            f"{measured['kv_tokens']:,}",
            "0" if inside else "outside",
            inside,
        )
    if measured.get("largest_image_sent") and measured.get("nvml_peak_gib"):
        highest = max(value for values in measured["nvml_peak_gib"].values() for value in values)
        # NVML counts what the driver reserves; CUDA, the engine and the plan do not
        before = (measured["context_gib"] or CONTEXT_GIB) + measured["driver_reserved_gib"]
        without = max(range(len(sheet.gpus)), key=lambda at: beside_context(sheet.gpus[at], "peak_bytes"))
        planned, low, high = (
            beside_context(sheet.gpus[without], side) / GIB + before
            for side in ("peak_bytes", "peak_low_bytes", "peak_high_bytes")
        )
        miss = planned - highest
        yield name, "peak", f"{planned:.2f} GiB", f"{highest:.2f} GiB", f"{miss:+.2f} GiB", abs(miss) <= 0.5
        inside = low - 0.05 <= highest <= high + 0.05
        span = f"{low:.2f} to {high:.2f} GiB"
        yield name, "peak range", span, f"{highest:.2f} GiB", "0" if inside else "outside", inside
        growth = growth_with_own_pictures(record, model, without)
        if growth is not None:
            planned += (growth - vision_of(sheet.gpus[without])) / GIB
            miss = planned - highest
            yield (
                name,
                "peak, its pictures",
                f"{planned:.2f} GiB",
                f"{highest:.2f} GiB",
                f"{miss:+.2f} GiB",
                (abs(miss) <= 0.5),
            )


def unexplained(record: dict[str, Any], model: ModelFacts) -> Iterator[Row]:
    """The card farthest off, when the run was ready and at its highest point; nothing without readings of both."""
    if not record["measured"].get("nvml_ready_gib"):
        return
    plan = plan_of(model, parse_gpu_spec(record["gpus"]), launch_of(record, model), engine_of(record))
    sheet, replays, read = load_sheet(plan), rank_replays(plan), readings_of(record)
    points: tuple[tuple[Point, str], ...] = (("ready", "ready"), ("serving", "peak"))
    for point, label in points:
        found = reconcile(sheet, read, point, replays)
        card = max(found.cards, key=lambda card: abs(card.unexplained_bytes or 0))
        assert card.actual_bytes is not None and card.unexplained_bytes is not None, record["name"]
        held, miss = card.actual_bytes / GIB, card.unexplained_bytes / GIB
        yield (
            record["name"],
            f"unexplained, {label}",
            f"{held - miss:.2f} GiB",
            f"{held:.2f} GiB",
            f"{-miss:+.2f} GiB",
            round(abs(miss), 2) <= UNEXPLAINED_GIB,
        )


def readings_of(record: dict[str, Any]) -> RunActual:
    """What the log and NVML said of a recorded launch, and what it was asked."""
    measured: dict[str, Any] = record["measured"]
    peaks: dict[str, list[float]] = measured["nvml_peak_gib"]
    cards = len(next(iter(peaks.values())))
    sizes = tuple((int(found[1]), int(found[2])) for found in map(PICTURE.fullmatch, peaks) if found)
    return RunActual(
        cards=tuple(
            CardActual(
                index=index,
                driver_reserved_bytes=_bytes(measured["driver_reserved_gib"]),
                ready_bytes=_bytes(measured["nvml_ready_gib"][index]) if measured["nvml_ready_gib"] else None,
                serving_bytes=_bytes(max(values[index] for values in peaks.values())),
            )
            for index in range(cards)
        ),
        log=LogReadings(
            model_loading_bytes=(_bytes(measured["weights_gib"]),),
            kv_available_bytes=_bytes(measured["kv_available_gib"]),
            kv_tokens=measured["kv_tokens"],
            graph_bytes=_bytes(measured["graphs_gib"]),
            profile_peak_bytes=_bytes(measured["torch_peak_increase_gib"]),
            non_torch_bytes=_bytes(measured["non_torch_increase_gib"]),
        ),
        context_bytes=_bytes(measured["context_gib"]),
        served=ServedLoad(
            pictures=sizes,
            requests=16 if "text16" in peaks else 1,
            prompt_tokens=None if "long" in peaks else 64,
            log_probabilities=False,
        ),
    )


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else round(gib * GIB)


def beside_context(gpu: GpuLoad, side: str) -> int:
    """Bytes of a serving peak without the planned context."""
    peaks: dict[str, int] = getattr(gpu, side)
    return peaks["serving"] - sum(c.bytes for c in gpu.components if c.name == "context")


def vision_of(gpu: GpuLoad) -> int:
    return sum(c.bytes for c in gpu.components if c.name == "activations.vision")


def growth_with_own_pictures(record: dict[str, Any], model: ModelFacts, at: int) -> int | None:
    """Bytes that the allocator reserves for the very pictures that the run sent, in their order; None: not known."""
    sent = [PICTURE.fullmatch(label) for label in record["measured"]["nvml_peak_gib"]]
    sizes = [(int(found[1]), int(found[2])) for found in sent if found is not None]
    plan = plan_of(model, parse_gpu_spec(record["gpus"]), launch_of(record, model), engine_of(record))
    settings = plan.settings
    rules = picture_rules(model, settings.max_pixels, settings.min_pixels)
    if rules is None or not sizes or settings.expandable_segments:
        return None
    return growth_after(plan.ranks[at].load, [rules.patches(rules.tokens(*size)) for size in sizes])


# In use on each of two H200 before the engine's first allocation, as CUDA counts (context, NCCL, custom all-reduce),
# for runs whose log did not show it; 1.92 and 1.94 GiB were logged.
CONTEXT_GIB = 1.94


def forced_tokens(record: dict[str, Any], model: ModelFacts, size: float) -> int:
    cache = sheet_of(record, model, ("--kv-cache-memory-bytes", str(int(size)))).kv_cache
    assert cache is not None and cache.tokens is not None
    return cache.tokens


def page(rows: list[Row], runs: list[dict[str, Any]]) -> str:
    kinds = list(LIMITS)
    lines = [
        "# Accuracy: plan against actual",
        "",
        "Generated by `scripts/accuracy.py` from `tests/data/runs`; a test fails when this page is out of date.",
        "Each run is planned with its own cards, version and flags. What is read or computed (weights, tokens, shapes",
        "of activations) stands for itself; the measured constants in `core/data/calibration.toml` draw on several of",
        "these runs together, so for them the page shows consistency, not prediction.",
        "",
        "How far the allocator grows depends on the pictures that come before the largest. `peak` is the plan's",
        "figure, which expects one of half the area first; `peak range` asks whether the reading lies within",
        "its low and high; `peak, its pictures` replays the pictures that the run sent, in their order.",
        "",
        "`unexplained` is what `loadmaster runs show` calls so, on the card that is farthest off: what the driver",
        "counts, less its own reserve, less each component as the log says it, or else as the plan expects it for what",
        "the run did. Its `planned` is that sum, and its `miss` the sum less the driver's count. A run without",
        "readings of the driver has no peak and nothing unexplained: h200-tp2-eager-32768-s16-awq was stopped in its",
        "memory profile, before any was taken.",
        "",
        "| comparison | limit | within |",
        "| --- | --- | --- |",
    ]
    for kind in kinds:
        of_kind = [row for row in rows if row[1] == kind]
        lines.append(f"| {kind} | {LIMITS[kind]} | {sum(row[5] for row in of_kind)} of {len(of_kind)} |")
    lines += ["", "| run | comparison | planned | measured | miss | |", "| --- | --- | ---: | ---: | ---: | --- |"]
    lines += [f"| {n} | {k} | {p} | {m} | {e} | {'' if ok else '**outside**'} |" for n, k, p, m, e, ok in rows]
    lines += ["", "## The runs", ""]
    for record in runs:
        sample = record["sample"]
        lines += [
            f"### {record['name']}",
            "",
            f"{sample['name']}, {sample['quantization']}; vLLM {record['engine_version']}; {record['hardware']}. "
            f"Source: {record['source']}.",
            "",
            "```",
            " ".join(record["flags"]),
            "```",
            "",
            *(f"Note: {note}." for note in record["notes"]),
            *([""] if record["notes"] else []),
        ]
    return "\n".join(lines).rstrip() + "\n"


def build() -> tuple[str, list[Row]]:
    rows: list[Row] = []
    runs = records()
    models: dict[tuple[str, str], ModelFacts] = {}
    with tempfile.TemporaryDirectory() as directory:
        for record in runs:
            key = (record["sample"]["name"], record["sample"]["quantization"])
            if key not in models:
                target = Path(directory) / f"{key[0]}-{key[1]}"
                write_sample(*key, target)
                models[key] = read_model(str(target))
            rows += [*compare(record, models[key]), *unexplained(record, models[key])]
    return page(rows, runs), rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    text, rows = build()
    for name, kind, planned, measured, miss, ok in rows:
        print(f"{name:48} {kind:13} {planned:>20} {measured:>12} {miss:>10}  {'' if ok else 'OUTSIDE'}")
    if options.check:
        return 0 if PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
