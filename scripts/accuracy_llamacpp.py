#!/usr/bin/env python3
"""Compare host plans with the real llama.cpp and write docs/accuracy-llamacpp.md.

Run by hand, with xllamacpp installed. It writes GGUF files whose shapes are those of real models with few layers (the
data are holes, so they take no disk space), loads each in a child process and reads the sizes that the engine prints.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from loadmaster.core import hostmemory  # noqa: E402
from loadmaster.core.facts import Amount, EngineFacts, HostFacts, LaunchArgs  # noqa: E402
from loadmaster.core.hostplan import make_host_plan  # noqa: E402
from loadmaster.core.hostsettings import host_settings, parse_flags  # noqa: E402
from loadmaster.edge.gguf import read_gguf  # noqa: E402
from tests.gguf_writer import (  # noqa: E402
    BF16,
    F32,
    IQ4_NL,
    MXFP4,
    Q2_K,
    Q4_0,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    projector,
    text_model,
    write_gguf,
)
from tests.llamacpp_engine import load, parameters, serve_pictures, sizes  # noqa: E402

DOCUMENT = ROOT / "docs" / "accuracy-llamacpp.md"
MIB = 1 << 20

BIG: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "architecture": "qwen3",
        "width": 4096,
        "feed_forward": 12288,
        "layers": 2,
        "heads": 32,
        "kv_heads": 8,
        "head_size": 128,
        "vocab": 151936,
        "context": 40960,
        "kind": Q8_0,
    },
    "Llama-3.1-8B": {
        "architecture": "llama",
        "width": 4096,
        "feed_forward": 14336,
        "layers": 2,
        "heads": 32,
        "kv_heads": 8,
        "head_size": 128,
        "vocab": 128256,
        "context": 131072,
        "kind": Q8_0,
    },
    "Qwen2.5-VL-7B": {
        "architecture": "qwen2vl",
        "width": 3584,
        "feed_forward": 18944,
        "layers": 2,
        "heads": 28,
        "kv_heads": 4,
        "head_size": 128,
        "vocab": 152064,
        "context": 128000,
        "kind": Q8_0,
    },
    "Qwen3-30B-A3B": {
        "architecture": "qwen3moe",
        "width": 2048,
        "feed_forward": 6144,
        "layers": 2,
        "heads": 32,
        "kv_heads": 4,
        "head_size": 128,
        "vocab": 151936,
        "context": 40960,
        "experts": 128,
        "experts_used": 8,
        "expert_feed_forward": 768,
        "kind": Q8_0,
    },
    "Qwen3.5-9B": {
        "architecture": "qwen35",
        "width": 4096,
        "feed_forward": 12288,
        "layers": 4,
        "heads": 16,
        "kv_heads": 4,
        "head_size": 256,
        "vocab": 248320,
        "context": 262144,
        "key_heads": 16,
        "value_heads": 32,
        "state": 128,
        "kind": Q8_0,
    },
    "Qwen3.5-35B-A3B": {
        "architecture": "qwen35moe",
        "width": 2048,
        "feed_forward": 6144,
        "layers": 4,
        "heads": 16,
        "kv_heads": 2,
        "head_size": 256,
        "vocab": 248320,
        "context": 262144,
        "experts": 256,
        "experts_used": 8,
        "expert_feed_forward": 512,
        "shared_expert_feed_forward": 512,
        "key_heads": 16,
        "value_heads": 32,
        "state": 128,
        "kind": Q8_0,
    },
    "Gemma-3-27B": {
        "architecture": "gemma3",
        "width": 5376,
        "feed_forward": 21504,
        "layers": 7,
        "heads": 32,
        "kv_heads": 16,
        "head_size": 128,
        "vocab": 151936,
        "context": 131072,
        "window": 1024,
        "kind": Q8_0,
    },
    "DeepSeek-V3 (dense)": {
        "architecture": "deepseek2",
        "width": 7168,
        "feed_forward": 18432,
        "layers": 2,
        "heads": 128,
        "head_size": 192,
        "latent": 512,
        "rope": 64,
        "vocab": 129280,
        "context": 163840,
        "kind": Q8_0,
    },
}
SMALL: dict[str, Any] = {"width": 256, "feed_forward": 512, "layers": 4, "heads": 4, "kv_heads": 2, "head_size": 64}

DEEPSEEK: dict[str, Any] = {"architecture": "deepseek2", **SMALL, "latent": 512, "rope": 64, "head_size": 192}
KINDS = (
    ("F32", F32),
    ("BF16", BF16),
    ("Q4_0", Q4_0),
    ("Q8_0", Q8_0),
    ("Q2_K", Q2_K),
    ("Q4_K", Q4_K),
    ("Q5_K", Q5_K),
    ("Q6_K", Q6_K),
    ("IQ4_NL", IQ4_NL),
    ("MXFP4", MXFP4),
)
CASES: list[tuple[str, dict[str, Any], str]] = [
    *((name, shape, "-c 4096 -np 1") for name, shape in BIG.items()),
    ("Qwen3-8B", BIG["Qwen3-8B"], "-c 32768 -np 1"),
    ("Qwen3-8B", BIG["Qwen3-8B"], "-c 16384 -np 4"),
    ("Qwen3-8B", BIG["Qwen3-8B"], "-c 16384"),
    ("Qwen3-8B", BIG["Qwen3-8B"], "-c 4096 -np 1 -ub 128"),
    ("Qwen3-8B", BIG["Qwen3-8B"], "-c 4096 -np 1 -ub 2048"),
    ("Qwen3-8B", BIG["Qwen3-8B"], "-c 4096 -np 1 -ctk q8_0 -ctv q8_0"),
    ("Qwen3-8B", BIG["Qwen3-8B"], "-c 8192 -np 1 -fa off"),
    ("Qwen3-8B, 4096 wide network", BIG["Qwen3-8B"] | {"feed_forward": 4096}, "-c 4096 -np 1"),
    ("Qwen3-8B, 300,032 tokens", BIG["Qwen3-8B"] | {"vocab": 300032}, "-c 4096 -np 1"),
    ("Qwen3-30B-A3B, 4 experts used", BIG["Qwen3-30B-A3B"] | {"experts_used": 4}, "-c 4096 -np 1"),
    ("Qwen3-30B-A3B", BIG["Qwen3-30B-A3B"], "-c 8192 -np 2 -ub 256"),
    ("Qwen3.5-35B-A3B", BIG["Qwen3.5-35B-A3B"], "-c 16384 -np 4"),
    ("Qwen3.5-35B-A3B", BIG["Qwen3.5-35B-A3B"], "-c 16384"),
    ("Qwen3.5-9B", BIG["Qwen3.5-9B"], "-c 8192 -np 1 -ub 1024"),
    ("Gemma-3-27B", BIG["Gemma-3-27B"], "-c 16384 -np 2"),
    ("Gemma-3-27B", BIG["Gemma-3-27B"], "-c 16384 -np 2 -kvu"),
    ("Gemma-3-27B", BIG["Gemma-3-27B"], "-c 8192 -np 1 --swa-full"),
    ("small Qwen3", {"architecture": "qwen3", **SMALL}, "-c 1000 -np 3"),
    ("small Qwen3", {"architecture": "qwen3", **SMALL}, "-c 100 -np 1"),
    ("small Qwen3.5", {"architecture": "qwen35", **SMALL}, "-np 5"),
    ("small Qwen3.5", {"architecture": "qwen35", **SMALL}, ""),
    ("small Qwen3", {"architecture": "qwen3", **SMALL}, "-c 6000 -np 1"),
    ("small Mistral", {"architecture": "mistral3", **SMALL}, "-c 2048 -np 2"),
    ("small Qwen3-VL", {"architecture": "qwen3vl", **SMALL}, "-c 2048 -np 2"),
    ("small Qwen3-VL MoE", {"architecture": "qwen3vlmoe", "experts": 4, **SMALL}, "-c 2048 -np 2"),
    ("small DeepSeek", DEEPSEEK, "-c 4096 -np 2"),
    ("small DeepSeek", {"architecture": "deepseek2", **SMALL}, "-c 4096 -np 1"),
    (
        "small Qwen3.5 with a prediction layer",
        {"architecture": "qwen35", "predict_layers": 1, **SMALL},
        "-c 2048 -np 2",
    ),
    *(
        (f"small Qwen3 {label}", {"architecture": "qwen3", "kind": kind, **SMALL}, "-c 512 -np 1")
        for label, kind in KINDS
    ),
]
TOWER: dict[str, Any] = {"width": 1152, "feed_forward": 4304, "heads": 16, "layers": 1, "image_size": 768}
TOWERS: list[tuple[str, dict[str, Any], str]] = [
    ("small tower", {}, ""),
    ("128 wide", {"width": 128}, ""),
    ("256 wide, 1024 hidden", {"width": 256, "feed_forward": 1024}, ""),
    ("256 wide, 1024 hidden", {"width": 256, "feed_forward": 1024}, "--image-max-tokens 256"),
    ("Qwen3-VL, 1 layer", TOWER, "--image-max-tokens 256"),
    ("Qwen3-VL, 1 layer", TOWER, "--image-max-tokens 1024"),
    ("Qwen3-VL 4B, 2 layers", TOWER | {"width": 1024, "feed_forward": 4096, "layers": 2}, "--image-max-tokens 512"),
    ("small tower", {}, "--image-max-tokens 256 -fa off"),
]


def mib(value: float) -> str:
    return f"{value / MIB:,.2f}"


def bounds(amount: Amount) -> str:
    return f"{mib(amount.bytes)} ({mib(amount.low)} - {mib(amount.high)})"


def model_rows(folder: Path) -> tuple[list[str], list[str]]:
    rows, faults = [], []
    for label, shape, flags in CASES:
        metadata, tensors = text_model(**shape)
        path = write_gguf(folder / "model.gguf", metadata, tensors)
        log, _ = load(path, None, parameters(flags))
        facts = read_gguf(path)
        settings = host_settings(parse_flags(flags.split()), facts)
        assert settings is not None
        cache, buffer = hostmemory.cache(facts, settings), hostmemory.compute_buffer(facts, settings)
        assert cache is not None
        assert buffer is not None
        logits = hostmemory.logits(facts, settings)
        assert logits is not None
        cells, streams = re.findall(r"\( *(\d+) cells, +\d+ layers, +\d+/(\d+) seqs", log)[0]
        read = {
            "kv": sizes(log, r"KV buffer size"),
            "state": sizes(log, r"RS buffer size"),
            "compute": sizes(log, r"sched_reserve: +CPU compute buffer size"),
            "logits": sizes(log, r"output buffer size"),
            "repack": sizes(log, r"CPU_REPACK model buffer size"),
        }
        kv = cache.full_bytes + cache.window_bytes
        planned = {"kv": kv, "state": cache.state_bytes, "logits": logits[0]}
        # each printed figure is rounded to 0.01 MiB, and a cache with a window is printed in two
        rounding = 0.0101 if cache.window_bytes else 0.0051
        exact = all(abs(read[name] - value / MIB) <= rounding for name, value in planned.items())
        inside = buffer.low <= read["compute"] * MIB <= buffer.high
        if not exact or not inside or settings.context != int(cells) * int(streams):
            faults.append(f"{label} {flags}: {planned} {read} {buffer} {settings.context}")
        miss = buffer.bytes / MIB / read["compute"] - 1
        figures = [
            label,
            f"`{flags}`",
            f"{mib(kv)} / {read['kv']:,.2f}",
            f"{mib(cache.state_bytes)} / {read['state']:,.2f}",
            f"{mib(logits[0])} / {read['logits']:,.2f}",
            f"{bounds(buffer)} / {read['compute']:,.2f}",
            f"{miss:+.0%}{'' if inside else ' outside'}",
            f"{mib(hostmemory.repacked_weights(facts))} / {read['repack']:,.2f}",
        ]
        rows.append("| " + " | ".join(figures) + " |")
        print(rows[-1], flush=True)
    return rows, faults


def tower_rows(folder: Path) -> tuple[list[str], list[str]]:
    rows, faults = [], []
    for label, shape, flags in TOWERS:
        model = write_gguf(folder / "model.gguf", *text_model("qwen3vl"))
        tower = write_gguf(folder / "mmproj.gguf", *projector(**shape))
        log, _ = load(model, tower, parameters(f"-c 8192 -np 1 {flags}") | {"warmup": True})
        facts = read_gguf(model, tower)
        settings = host_settings(parse_flags(f"-c 8192 -np 1 {flags}".split()), facts)
        edge = int(re.findall(r"warmup with image size = (\d+)", log)[0])
        assert settings is not None
        assert facts.vision is not None
        amount = hostmemory.projector_buffer(facts, settings, (edge // 32) ** 2)
        assert amount is not None
        read = sizes(log, r"reserve_compute_meta: +CPU compute buffer size")
        inside = amount.low <= read * MIB <= amount.high
        if not inside:
            faults.append(f"{label} {flags}: {amount} {read}")
        miss = f"{amount.bytes / MIB / read - 1:+.0%}{'' if inside else ' outside'}"
        rows.append(f"| {label} | `{flags}` | {edge} x {edge} | {bounds(amount)} / {read:,.2f} | {miss} |")
        print(rows[-1], flush=True)
    tower.unlink()
    return rows, faults


def process_rows(folder: Path) -> tuple[list[str], list[str]]:
    """Resident memory of the whole process against the plan, for models whose weights are really read."""
    rows, faults = [], []
    shapes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("512 tokens", {"vocab": 512}),
        ("151,936 tokens", {"vocab": 151936}),
        ("300,032 tokens", {"vocab": 300032}),
        ("300,032 tokens, recurrent", {"vocab": 300032, "architecture": "qwen35"}),
    )
    for label, shape in shapes:
        path = write_gguf(folder / "model.gguf", *text_model(**{"architecture": "qwen3", **shape}))
        _, resident = load(path, None, parameters("-c 4096 -np 1") | {"warmup": True})
        facts = read_gguf(path)
        launch = LaunchArgs(argv=("-c", "4096", "-np", "1"))
        sheet = make_host_plan(facts, HostFacts(memory_total_bytes=8 << 30), launch, EngineFacts("llamacpp"))
        sums = sheet.gpus[0]
        steady = Amount(
            sums.peak_bytes["steady"], sums.peak_low_bytes["steady"], sums.peak_high_bytes["steady"], "assumed"
        )
        inside = steady.low <= resident <= steady.high
        if not inside:
            faults.append(f"{label}: {steady} {resident}")
        rows.append(f"| {label} | {bounds(steady)} / {mib(resident)} | {'yes' if inside else 'no'} |")
        print(rows[-1], flush=True)
    return rows, faults


def picture_rows(folder: Path) -> tuple[list[str], list[str]]:
    """Peak of the whole process after pictures were asked about, against the serving peak of the plan."""
    rows, faults = [], []
    model = write_gguf(folder / "model.gguf", *text_model("qwen35", context=32768))
    tower = write_gguf(folder / "mmproj.gguf", *projector())
    facts = read_gguf(model, tower)
    for edges in ((1024,), (2048,), (4096,), (1024,) * 6, (2048,) * 3):
        # the plan is for the largest picture that is served, so its size is made the limit
        limit = min(max(edges), 2048) ** 2 // 32**2
        flags = f"-c 8192 -np 1 --image-max-tokens {limit}"
        peak = serve_pictures(model, tower, parameters(flags) | {"warmup": True}, edges)
        sheet = make_host_plan(
            facts, HostFacts(memory_total_bytes=8 << 30), LaunchArgs(argv=tuple(flags.split())), EngineFacts("llamacpp")
        )
        sums = sheet.gpus[0]
        kept = 8 << 30  # the limit of kept prompts, far from reached here
        serving = Amount(
            sums.peak_bytes["serving"],
            sums.peak_low_bytes["serving"],
            sums.peak_high_bytes["serving"] - kept,
            "assumed",
        )
        inside = serving.low <= peak <= serving.high
        if not inside:
            faults.append(f"pictures {edges}: {serving} {peak}")
        label = f"{len(edges)} of {edges[0]} x {edges[0]}"
        rows.append(f"| {label} | `{flags}` | {bounds(serving)} / {mib(peak)} | {'yes' if inside else 'no'} |")
        print(rows[-1], flush=True)
    return rows, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when a result lies outside its bounds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models, faults = model_rows(folder)
        towers, more = tower_rows(folder)
        processes, last = process_rows(folder)
        pictures, other = picture_rows(folder)
    faults += more + last + other
    counts = (
        f"{len(models)} loads of language models and {len(towers)} of projectors, {len(pictures)} runs with pictures"
    )
    summary = f"{counts}; outside their bounds: {len(faults)}."
    text = f"""# Host plans against llama.cpp

Generated by `scripts/accuracy_llamacpp.py` with xllamacpp {version("xllamacpp")} on one processor core. Each file has
the shapes of the model named, few layers, and holes for data; the engine loads it in a process of its own and prints
its buffers. Figures are MiB, "planned / engine". KV cache, recurrent state and logits are exact rules; the graph's
buffer is an estimate with bounds; rearranged weights are what some processor rearranges, so the engine's figure, which
is of this one, may be smaller.

## Language models

| model | flags | KV cache | recurrent state | logits | graph buffer (low - high) | miss | rearranged weights |
|---|---|---|---|---|---|---|---|
{chr(10).join(models)}

## Projectors

Buffer of the projector's graph for the warm-up image.

| projector | flags | image | buffer (low - high) | miss |
|---|---|---|---|---|
{chr(10).join(towers)}

## The whole process

Resident memory after loading and warming up, against the steady peak of the plan. The engine's process is Python with
the library here.

| model | planned (low - high) / resident | within |
|---|---|---|
{chr(10).join(processes)}

## Pictures

Peak of the process from its start until it has answered about pictures of this size, against the serving peak of the
plan without what llama-server may keep of past prompts.

| pictures | flags | planned (low - high) / peak | within |
|---|---|---|---|
{chr(10).join(pictures)}

{summary}
"""
    DOCUMENT.write_text(text, encoding="utf-8")
    for fault in faults:
        print("FAULT", fault)
    return 1 if options.check and faults else 0


if __name__ == "__main__":
    sys.exit(main())
