#!/usr/bin/env python3
"""What it costs to watch eight cards once a second: loadmaster's watch beside nvitop's exporter, in the same run.

* cards: the sampler of the cards with all alert rules, and nothing else: what nvitop's exporter does too.
* watch: the whole watch as it runs inside the gateway: cards, an engine whose /metrics has 150 kB, its state and its
  log, all alert rules, and the recording of every reading in SQLite.
* nvitop: PrometheusExporter of nvitop-exporter, its loop once a second, where an interpreter that has the package is
  given by --nvitop or the package is on this one's path; left out, and said so, where not.

    bench/watch.py [--seconds S] [--nvitop PYTHON] [--check] [--json]

All run at the same time, each in a process of its own, over the same simulated driver (tests/simulated_nvml.py: eight
cards, two processes on each), so the driver's own time is not in it. Processor time is counted after a start of three
seconds. --check exits 1 when the whole watch takes over LIMIT_CORE of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_CORE = 0.01
LIMIT_CHECKED = 0.03  # machines of continuous integration are slow and shared
SECONDS = 30.0
START_S = 3.0
CARDS, EACH = 8, 2
BUCKETS = 1200


# ------------------------------------------------------------------------------------------ the contenders


def cards(pids: list[int], folder: Path, port: int) -> Callable[[], None]:
    """One second of cards and alerts."""
    from loadmaster.core.alerts import Alerts
    from loadmaster.core.observation import Snapshot
    from loadmaster.core.watchlimits import WatchLimits
    from loadmaster.edge.cardreadings import CardSampler

    sampler, alerts = CardSampler(_library(pids), {}), Alerts(WatchLimits())

    def second() -> None:
        now = time.time()
        alerts.step(Snapshot(at=now, cards=sampler.read()))

    return second


def _library(pids: list[int]) -> Any:
    sys.path.insert(0, str(ROOT))
    from tests.simulated_nvml import eight_cards

    library = eight_cards(EACH)
    for place, card in enumerate(library.cards):
        card.processes = [(pid, 65 << 30) for pid in pids[place * EACH : (place + 1) * EACH]]
    library.names = dict.fromkeys(pids, "VLLM::Worker")
    return library


def run_cards(pids: list[int], folder: Path, port: int, seconds: float) -> dict[str, float]:
    second = cards(pids, folder, port)
    return measured(lambda: _paced(second, START_S), lambda: _paced(second, seconds), seconds)


def _paced(second: Callable[[], None], seconds: float) -> None:
    due = time.monotonic()
    end = due + seconds
    while due < end:
        second()
        due += 1.0
        time.sleep(max(0.0, due - time.monotonic()))


def run_watch(pids: list[int], folder: Path, port: int, seconds: float) -> dict[str, float]:
    from loadmaster.core.deployment import Deployment, EngineSection
    from loadmaster.edge.runstore import RunStore
    from loadmaster.service.enginestate import EngineState, Pid, write_state
    from loadmaster.service.places import Places
    from loadmaster.service.sampler import Sampler
    from loadmaster.service.watch import Watch

    places = Places(folder / "bench")
    places.make()
    deployment = Deployment(name="bench", model="m", engine=EngineSection(kind="vllm"))
    own = Pid.of(os.getpid())
    state = EngineState(state="ready", since=time.time(), pid=pids[0], port=port, runner=own, process=Pid.of(pids[0]))
    write_state(places.engine, state)
    log = places.backend_log.open("a", buffering=1, encoding="utf-8")
    store = RunStore(folder / "runs.db", "bench", print)
    found: dict[str, float] = {}

    async def main() -> None:
        sampler = Sampler(deployment, places, library=_library(pids))
        watch = Watch(deployment, places, None, sampler=sampler, store=store)
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(START_S)
        before = usage()
        for _ in range(round(seconds)):
            log.write("(APIServer pid=1) INFO 11-30 20:00:00 [loggers.py:259] Engine 000: Avg prompt throughput: 1.0\n")
            await asyncio.sleep(1.0)
        found.update(difference(before, usage(), seconds))
        assert watch.latest is not None
        assert watch.latest.cards is not None, watch.latest.missing
        assert watch.latest.engine is not None
        assert watch.latest.engine.running == 3, watch.latest.missing
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    store.close()
    return found


def run_nvitop(pids: list[int], folder: Path, port: int, seconds: float) -> dict[str, float]:
    """nvitop over the same simulated driver: pynvml's functions are replaced before nvitop takes them over."""
    import pynvml

    library = _library(pids)
    for name in dir(pynvml):
        if name.startswith(("nvmlDevice", "nvmlSystem", "nvmlUnit")) and callable(getattr(pynvml, name)):
            setattr(pynvml, name, _not_supported(pynvml))
    for name in dir(type(library)):
        if name.startswith("nvml") and callable(getattr(type(library), name)):
            setattr(pynvml, name, _translated(pynvml, library, name))
    pynvml.nvmlInitWithFlags = lambda flags=0: None
    pynvml.nvmlSystemGetDriverVersion = lambda: "580.00"
    pynvml.nvmlSystemGetCudaDriverVersion = lambda: 13000
    pynvml.nvmlDeviceGetIndex = lambda card: card.index
    from nvitop import Device
    from nvitop.api import libnvml
    from nvitop_exporter.exporter import PrometheusExporter
    from prometheus_client import CollectorRegistry

    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"):
        setattr(libnvml, name, getattr(pynvml, name))  # it has its own, for old drivers
    libnvml.nvmlDeviceGetGraphicsRunningProcesses = pynvml.nvmlDeviceGetGraphicsRunningProcesses
    devices = Device.all()
    assert len(devices) == CARDS, f"nvitop sees {len(devices)} cards"
    exporter = PrometheusExporter(devices, hostname="bench", registry=CollectorRegistry(), interval=1.0)

    def second() -> None:
        exporter.update_host()
        for device in exporter.devices:
            exporter.update_device(device)

    found = measured(lambda: _paced(second, START_S), lambda: _paced(second, seconds), seconds)
    used = [device.memory_used() for device in devices]
    assert all(len(device.processes()) == EACH for device in devices), [device.processes() for device in devices]
    assert all(isinstance(size, int) and size > 0 for size in used), used
    return found


def _not_supported(pynvml: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    return call


def _translated(pynvml: Any, library: Any, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return getattr(library, name)(*arguments, **named)
        except library.NVMLError as error:
            raise pynvml.NVMLError(error.value) from None

    return call


CONTENDERS = {"cards": run_cards, "watch": run_watch, "nvitop": run_nvitop}


# ------------------------------------------------------------------------------------------ measuring


def usage() -> tuple[float, int]:
    """Processor seconds of this process, and bytes that it holds in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return time.process_time(), pages * os.sysconf("SC_PAGE_SIZE")


def difference(before: tuple[float, int], after: tuple[float, int], seconds: float) -> dict[str, float]:
    return {"core_share": (after[0] - before[0]) / seconds, "memory_bytes": after[1]}


def measured(start: Callable[[], None], work: Callable[[], None], seconds: float) -> dict[str, float]:
    start()
    before = usage()
    work()
    return difference(before, usage(), seconds)


# ------------------------------------------------------------------------------------------ the run


def metrics_text(second: int) -> str:
    """As a busy vLLM tells it: a thousand buckets around what is wanted."""
    labels = '{engine="0",model_name="Qwen/Qwen3.5-35B-A3B"}'
    rows = [
        f"vllm:num_requests_running{labels} 3.0",
        f"vllm:num_requests_waiting{labels} 0.0",
        f"vllm:kv_cache_usage_perc{labels} 0.31",
        f"vllm:num_preemptions_total{labels} 0.0",
        f"vllm:prompt_tokens_total{labels} {1000.0 * second}",
        f"vllm:generation_tokens_total{labels} {150.0 * second}",
        f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {second / 4}',
        f"vllm:iteration_tokens_total_sum{labels} {150.0 * second}",
        f"vllm:iteration_tokens_total_count{labels} {80.0 * second}",
        f"vllm:time_to_first_token_seconds_sum{labels} {0.3 * second}",
        f"vllm:time_to_first_token_seconds_count{labels} {1.0 * second}",
        f"vllm:inter_token_latency_seconds_sum{labels} {0.011 * 150 * second}",
        f"vllm:inter_token_latency_seconds_count{labels} {150.0 * second}",
    ]
    rows += [
        f'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{place}.0",model_name="Qwen/Qwen3.5-35B-A3B"}} 9.0'
        for place in range(BUCKETS)
    ]
    return "\n".join(rows) + "\n"


async def serve_metrics(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            body = metrics_text(int(time.time()) % 100_000).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def compare(seconds: float, pythons: dict[str, str]) -> dict[str, dict[str, float]]:
    sleepers = [subprocess.Popen(["sleep", "3600"]) for _ in range(CARDS * EACH)]
    server = await asyncio.start_server(serve_metrics, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = []
            for name, python in pythons.items():
                words = [name, ",".join(str(one.pid) for one in sleepers), f"{folder}/{name}", str(port), str(seconds)]
                (Path(folder) / name).mkdir()
                work.append(
                    await asyncio.create_subprocess_exec(
                        python, str(Path(__file__).resolve()), "--contender", *words, stdout=asyncio.subprocess.PIPE
                    )
                )
            found = {}
            for name, process in zip(pythons, work):
                out, _ = await process.communicate()
                if process.returncode != 0:
                    raise SystemExit(f"{name} ended with {process.returncode}")
                found[name] = json.loads(out.decode().splitlines()[-1])
            return found
    finally:
        server.close()
        for one in sleepers:
            one.kill()
            one.wait()


def nvitop_python(given: str | None) -> str | None:
    for python in filter(None, (given, sys.executable)):
        code = "import importlib.util as u, sys; sys.exit(u.find_spec('nvitop_exporter') is None)"
        if subprocess.run([python, "-c", code], check=False, stderr=subprocess.DEVNULL).returncode == 0:
            return python
    return None


def main() -> None:
    if sys.argv[1:2] == ["--contender"]:
        name, pids, folder, port, seconds = sys.argv[2:]
        numbers = [int(pid) for pid in pids.split(",")]
        print(json.dumps(CONTENDERS[name](numbers, Path(folder), int(port), float(seconds))))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--nvitop", help="an interpreter that has nvitop-exporter")
    parser.add_argument("--check", action="store_true", help="exit 1 when the watch costs too much")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pythons = {"cards": sys.executable, "watch": sys.executable}
    peer = nvitop_python(options.nvitop)
    if peer is not None:
        pythons["nvitop"] = peer
    found = asyncio.run(compare(options.seconds, pythons))
    if options.json:
        print(json.dumps({"schema": 1, "seconds": options.seconds, "python": platform.python_version(), **found}))
    else:
        print(f"eight simulated cards, {options.seconds:.0f} s, Python {platform.python_version()}")
        for name, row in found.items():
            print(f"  {name:8} {row['core_share']:7.2%} of one core   {row['memory_bytes'] / (1 << 20):6.1f} MiB")
        if peer is None:
            print("  nvitop   not measured: no interpreter here has nvitop-exporter (--nvitop PYTHON)")
        over = found["watch"]["core_share"] > LIMIT_CORE
        print(f"  the whole watch is {'over' if over else 'within'} {LIMIT_CORE:.0%} of one core")
    if options.check and found["watch"]["core_share"] > LIMIT_CHECKED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
