"""Recorded launches of tests/data/runs as plans and readings."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

from scripts.accuracy import records

from loadmaster.core.argv import parse_argv
from loadmaster.core.facts import GIB, EngineFacts, LoadSheet, ModelFacts
from loadmaster.core.gputable import parse_gpu_spec
from loadmaster.core.logfacts import LogReadings
from loadmaster.core.reconcile import CardActual, RunActual
from loadmaster.core.served import RankReplay, ServedLoad, rank_replays
from loadmaster.core.sheet import load_sheet, plan_of
from loadmaster.edge.modeldir import read_model
from loadmaster.edge.sample import write_sample

_PICTURE = re.compile(r"(\d+)x(\d+)x1")

RECORDS = {record["name"]: record for record in records()}
READY = [name for name, record in RECORDS.items() if record["measured"].get("nvml_ready_gib")]


@functools.cache
def model_of(name: str, quantization: str) -> ModelFacts:
    with tempfile.TemporaryDirectory() as directory:
        write_sample(name, quantization, Path(directory) / name)
        return read_model(str(Path(directory) / name))


@functools.cache
def planned(name: str) -> tuple[LoadSheet, tuple[RankReplay, ...]]:
    record = RECORDS[name]
    model = model_of(record["sample"]["name"], record["sample"]["quantization"])
    words = ["vllm", "serve", model.name, *record["flags"]]
    launch = parse_argv(words, engine_version=record["engine_version"], env=record["env"])
    plan = plan_of(model, parse_gpu_spec(record["gpus"]), launch, EngineFacts("vllm", record["engine_version"]))
    return load_sheet(plan), rank_replays(plan)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else round(gib * GIB)


def readings_of(name: str) -> RunActual:
    """What the log and NVML said of a recorded launch, and what it was asked."""
    measured: dict[str, Any] = RECORDS[name]["measured"]
    peaks: dict[str, list[float]] = measured["nvml_peak_gib"]
    cards = len(next(iter(peaks.values())))
    sizes = tuple((int(found[1]), int(found[2])) for found in map(_PICTURE.fullmatch, peaks) if found)
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
