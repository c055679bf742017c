#!/usr/bin/env python3
"""Speed and memory of planning, measured side by side in one run.

* A whole plan (`read_model` and `make_plan`) of a checkpoint with 93,000 tensors, against a bare typed msgspec parse
  of the same headers, already in memory: interleaved, garbage collection off in both.
  At most LIMIT_RATIO times in processor time (median of the pairs); the clock is printed beside it.
* `loadmaster --help`: modules from outside the standard library, at most LIMIT_MODULES, and the time of a process.
* Peak memory of a process that plans once: at most LIMIT_PEAK bytes.

    bench/plan.py [--repeats N] [--directory DIR] [--check] [--json]

The checkpoint is sparse: real names, shapes and sizes, holes for weights. --check exits 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from loadmaster.core.argv import parse_argv  # noqa: E402
from loadmaster.core.facts import EngineFacts, GpuFacts, LoadSheet  # noqa: E402
from loadmaster.core.gputable import parse_gpu_spec  # noqa: E402
from loadmaster.core.plan import make_plan  # noqa: E402
from loadmaster.edge.modeldir import read_model  # noqa: E402
from loadmaster.edge.sample import write_sample  # noqa: E402

LIMIT_RATIO = 4.0
LIMIT_MODULES = 59
LIMIT_PEAK = 200 << 20

MODEL, QUANTIZATION = "Qwen3.5-35B-A3B", "ct-w4-g32"
GPUS = "2x24GiB"
ENGINE = EngineFacts("vllm", "0.24.0")
FLAGS = ["--tensor-parallel-size", "2", "--max-model-len", "4096", "--enforce-eager", "--gpu-memory-utilization", "0.9"]

HELP = """
import sys
before = set(sys.modules)
sys.argv = ["loadmaster", "--help"]
from loadmaster.cli import main
try:
    main()
except SystemExit:
    pass
outside = sorted(
    name for name in set(sys.modules) - before
    if name.partition(".")[0] not in sys.stdlib_module_names and name != "__main__"
)
print("\\n" + " ".join(outside), file=sys.stderr)
"""

# the peak of the process itself: getrusage would carry over that of the process that started it
PEAK = """
import sys
sys.path.insert(0, sys.argv[2])
import plan
plan.plan_once(sys.argv[1])
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]) << 10)
"""


class Tensor(msgspec.Struct):
    """One entry of a safetensors header, as a bare parse needs it; ``__metadata__`` leaves the defaults."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


_DECODER = msgspec.json.Decoder(dict[str, Tensor])


def read_headers(directory: Path) -> list[bytes]:
    """The JSON of every header, read whole."""
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            found.append(file.read(length))
    return found


def parse_headers(headers: list[bytes]) -> int:
    """The bare parse: number of entries."""
    return sum(len(_DECODER.decode(raw)) for raw in headers)


def plan_once(directory: str) -> LoadSheet:
    """The whole plan, from the directory to the load sheet."""
    gpus: tuple[GpuFacts, ...] = parse_gpu_spec(GPUS)
    model = read_model(directory)
    return make_plan(model, gpus, parse_argv(["vllm", "serve", directory, *FLAGS], engine_version="0.24.0"), ENGINE)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Processor time, which other programs do not disturb, and time on the clock."""
    gc.collect()
    begin, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - begin, time.perf_counter() - clock


def side_by_side(directory: Path, repeats: int) -> dict[str, Any]:
    headers = read_headers(directory)
    entries = parse_headers(headers)
    sheet = plan_once(str(directory))
    bare, planned = [], []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            bare.append(seconds(lambda: parse_headers(headers)))
            planned.append(seconds(lambda: plan_once(str(directory))))
    finally:
        if enabled:
            gc.enable()
    ratios = [b / a for (a, _), (b, _) in zip(bare, planned, strict=True)]
    return {
        "tensors": entries - sum(b'"__metadata__"' in raw for raw in headers),
        "header_bytes": sum(len(raw) for raw in headers),
        "parameters": sheet.model.parameters,
        "repeats": repeats,
        "parse_seconds": statistics.median(cost for cost, _ in bare),
        "plan_seconds": statistics.median(cost for cost, _ in planned),
        "parse_clock_seconds": statistics.median(clock for _, clock in bare),
        "plan_clock_seconds": statistics.median(clock for _, clock in planned),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
    }


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "0", "COLUMNS": "80"}


def help_command(repeats: int) -> dict[str, Any]:
    times = []
    modules: list[str] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "-c", HELP], capture_output=True, text=True, check=True, env=environment(), timeout=60
        )
        times.append(time.perf_counter() - begin)
        modules = run.stderr.strip().split()
        if "Usage" not in run.stdout:
            raise RuntimeError(f"loadmaster --help printed no usage: {run.stdout[:200]!r} {run.stderr[-500:]}")
    return {"seconds": statistics.median(times), "modules": len(modules), "names": modules}


def peak_memory(directory: Path) -> int:
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(directory), str(Path(__file__).resolve().parent)],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
        timeout=120,
    )
    return int(run.stdout)


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def measure(directory: Path, repeats: int) -> dict[str, Any]:
    results: dict[str, Any] = {
        "processor": processor_name(),
        "python": platform.python_version(),
        "msgspec": msgspec.__version__,
        "plan": side_by_side(directory, repeats),
        "help": help_command(5),
        "peak_bytes": peak_memory(directory),
    }
    results["limits"] = {"ratio": LIMIT_RATIO, "modules": LIMIT_MODULES, "peak_bytes": LIMIT_PEAK}
    results["broken"] = [
        name
        for name, value, limit in (
            ("ratio", results["plan"]["ratio"], LIMIT_RATIO),
            ("modules", results["help"]["modules"], LIMIT_MODULES),
            ("peak_bytes", results["peak_bytes"], LIMIT_PEAK),
        )
        if value > limit
    ]
    return results


def text(results: dict[str, Any]) -> str:
    plan, help_, broken = results["plan"], results["help"], results["broken"]

    def verdict(name: str) -> str:
        return "BROKEN" if name in broken else "holds"

    return "\n".join(
        [
            f"{results['processor']}, Python {results['python']}, msgspec {results['msgspec']}",
            f"{plan['tensors']:,} tensors, {plan['header_bytes'] / (1 << 20):.1f} MiB of headers, "
            f"{plan['repeats']} interleaved repeats, garbage collection off in both",
            f"bare typed parse      {plan['parse_seconds'] * 1000:8.1f} ms of processor time, "
            f"{plan['parse_clock_seconds'] * 1000:.1f} ms on the clock",
            f"whole plan            {plan['plan_seconds'] * 1000:8.1f} ms of processor time, "
            f"{plan['plan_clock_seconds'] * 1000:.1f} ms on the clock",
            f"ratio                 {plan['ratio']:8.2f}     (limit {LIMIT_RATIO:.0f}, {verdict('ratio')}; "
            f"{plan['ratio_lowest']:.2f} - {plan['ratio_highest']:.2f})",
            f"loadmaster --help     {help_['seconds'] * 1000:8.1f} ms  {help_['modules']} modules outside the standard "
            f"library (under {LIMIT_MODULES + 1}, {verdict('modules')})",
            f"peak memory of a plan {results['peak_bytes'] / (1 << 20):8.1f} MiB (limit {LIMIT_PEAK >> 20}, "
            f"{verdict('peak_bytes')})",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of planning.")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved pairs (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="a checkpoint that exists; written anew if left out")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is broken")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the results as JSON")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats wants at least 1")
    with tempfile.TemporaryDirectory() as folder:
        directory = options.directory or Path(folder) / f"{MODEL}-{QUANTIZATION}"
        if options.directory is None:
            write_sample(MODEL, QUANTIZATION, directory)
        results = measure(directory, options.repeats)
    print(json.dumps(results, indent=1) if options.as_json else text(results))
    return 1 if options.check and results["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
