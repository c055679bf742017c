"""Recorded launches of tests/data/runs as plans and readings."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

from scripts.accuracy import readings_of as record_readings
from scripts.accuracy import records

from loadmaster.core.argv import parse_argv
from loadmaster.core.facts import EngineFacts, LoadSheet, ModelFacts
from loadmaster.core.gputable import parse_gpu_spec
from loadmaster.core.reconcile import RunActual
from loadmaster.core.served import RankReplay, rank_replays
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


def readings_of(name: str) -> RunActual:
    """What the log and NVML said of a recorded launch, and what it was asked."""
    return record_readings(RECORDS[name])
