#!/usr/bin/env python3
"""What the gateway costs a stream of tokens, measured side by side in one run on loopback.

* STREAMS streams at once, each paced by the engine at RATE tokens a second, one event a token, straight from the engine
  and through the gateway, by turns. Every token has to arrive, in order and unchanged. At least LIMIT_RATE of the
  direct rate; the processor time of each program is printed beside it.
* One stream alone: at most LIMIT_FIRST_BYTE_S more to the median first byte.
* The same through nginx (plain proxy, one worker, no buffering) and through LiteLLM's proxy, where they are installed:
  `nginx` and `litellm` on the path, or named by --nginx and --litellm.

    bench/gateway.py [--streams N] [--rate R] [--seconds S] [--rounds N] [--nginx FILE] [--litellm FILE]
                     [--check] [--json]

The engine is tests/fake_engine.py in a process of its own; so are gateway and proxies. The client is this process: it
keeps what arrives and judges it afterwards. --check exits 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
LIMIT_RATE = 0.9
LIMIT_FIRST_BYTE_S = 0.002
STREAMS, RATE, SECONDS, ROUNDS = 128, 40.0, 4.0, 2
SINGLE = 200  # requests, one after the other, for the first byte
START_S = 20.0
MODEL = "fake"
TICKS = os.sysconf("SC_CLK_TCK")

GATEWAY = """
import sys
from loadmaster.service.gateway import serve
from loadmaster.service.gatewaysettings import BackendSettings, GatewaySettings
backends = (BackendSettings(model="fake", url=sys.argv[1], concurrency=4096),)
serve(GatewaySettings(backends=backends, port=int(sys.argv[2])))
"""

NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass {engine}; proxy_http_version 1.1; proxy_buffering off; proxy_read_timeout 600s; }}
  }}
}}
"""

LITELLM = """
model_list:
  - model_name: fake
    litellm_params: {{model: openai/fake, api_base: {engine}/v1, api_key: none}}
litellm_settings: {{telemetry: false}}
"""


class Program:
    """A process that the measurement runs, with all its children."""

    def __init__(self, name: str, version: str, words: list[str], port: int, log: Path, **env: str) -> None:
        self.name, self.version, self.port = name, version, port
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | env,
            )

    def wait(self, path: str, patience_s: float) -> bool:
        """Whether it answers 200 at ``path`` in time."""
        end = time.monotonic() + patience_s
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(request)
                if b" 200 " in connection.recv(64):
                    return True
            time.sleep(0.05)
        return False

    def cpu_s(self) -> float:
        """Seconds of processor time of it and its children so far."""
        return sum(_cpu(pid) for pid in _family(self.process.pid))

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            try:
                self.process.wait(5)
                return
            except subprocess.TimeoutExpired:
                continue


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def _family(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            found += [int(word) for word in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ------------------------------------------------------------------------------------------------- the client


class Stream(asyncio.Protocol):
    """One request and its answer: all bytes, and when the first and last of them came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parts: list[bytes] = []
        self.sent = self.first = self.last = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.last = time.perf_counter()
        if not self.parts:
            self.first = self.last
        self.parts.append(data)
        if data.endswith(b"0\r\n\r\n") and self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def leave(self) -> None:
        if not self.done.done() and self._transport is not None:
            self._transport.abort()

    def words(self) -> list[str]:
        """The tokens of the answer. Raises ValueError when it is not whole."""
        head, _, rest = b"".join(self.parts).partition(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise ValueError(f"answered {head[:60]!r}: {rest[:300]!r}")
        events = _unchunked(rest).split(b"\n\n")
        if events[-2:] != [b"data: [DONE]", b""]:
            raise ValueError("the stream has no end")
        found = []
        for event in events[:-2]:
            choices = msgspec.json.decode(event.removeprefix(b"data: "))["choices"]
            word = choices[0]["delta"].get("content") if choices else None
            if word:
                found.append(word)
        return found


def _unchunked(rest: bytes) -> bytes:
    whole = bytearray()
    place = 0
    while True:
        end = rest.index(b"\r\n", place)
        size = int(rest[place:end], 16)
        if size == 0:
            return bytes(whole)
        whole += rest[end + 2 : end + 2 + size]
        place = end + size + 4


def question(port: int, tokens: int) -> bytes:
    body = {"model": MODEL, "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "Go"}]}
    content = msgspec.json.encode(body)
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    ).encode() + content


async def ask(port: int, streams: int, tokens: int, patience_s: float) -> list[Stream]:
    loop = asyncio.get_running_loop()
    request = question(port, tokens)
    made = [loop.create_connection(lambda: Stream(request), "127.0.0.1", port) for _ in range(streams)]
    found = [protocol for _, protocol in await asyncio.gather(*made)]
    await asyncio.wait([stream.done for stream in found], timeout=patience_s)
    for stream in found:
        stream.leave()
    return found


class Round(msgspec.Struct):
    """``rate``: tokens a second over all streams. ``cpu_s``: processor time by program. Seconds."""

    rate: float
    first_byte_s: float
    late_s: float
    intact: bool
    cpu_s: dict[str, float]
    fault: str = ""


def measure(target: Program, programs: list[Program], streams: int, rate: float, seconds: float) -> Round:
    """All streams at once, within bounds; ``late_s``: by how much the slowest stream ended after the pace."""
    tokens = int(rate * seconds)
    before = {program.name: program.cpu_s() for program in programs}
    own = time.process_time()
    found = asyncio.run(ask(target.port, streams, tokens, seconds * 4 + 10))
    cpu = {program.name: round(program.cpu_s() - before[program.name], 3) for program in programs}
    cpu["client"] = round(time.process_time() - own, 3)
    expected: list[str] | None = None
    fault, arrived = "", 0
    for stream in found:
        try:
            words = stream.words()
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            fault = str(error)
            arrived += sum(part.count(b"data: ") for part in stream.parts)
            continue
        arrived += len(words)
        expected = expected or words
        if len(words) != tokens or words != expected:
            fault = f"{len(words)} tokens of {tokens}, or others than the rest got"
    began, ended = min(stream.sent for stream in found), max(stream.last for stream in found)
    return Round(
        rate=arrived / (ended - began),
        first_byte_s=statistics.median(stream.first - stream.sent for stream in found),
        late_s=ended - began - tokens / rate,
        intact=not fault,
        cpu_s=cpu,
        fault=fault,
    )


def first_bytes(targets: list[Program], count: int) -> dict[str, float]:
    """Median seconds to the first byte of one stream alone, one after the other, the targets by turns.

    Of answers without a token: the pace of tokens would only put pauses between them.
    """
    times: dict[str, list[float]] = {target.name: [] for target in targets}

    async def turns() -> None:
        for _ in range(count):
            for target in targets:
                (stream,) = await ask(target.port, 1, 0, 30)
                times[target.name].append(stream.first - stream.sent)

    asyncio.run(turns())
    return {name: statistics.median(values[len(values) // 10 :]) for name, values in times.items()}


# ----------------------------------------------------------------------------------------------- the programs


@contextlib.contextmanager
def running(options: argparse.Namespace, folder: Path) -> Iterator[tuple[list[Program], list[str]]]:
    """The engine, the gateway and what else there is to compare with; the engine first. Also what is missing."""
    programs: list[Program] = []
    missing: list[str] = []
    python = [sys.executable]
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    try:
        ports = [free_port() for _ in range(4)]
        engine_words = [str(ROOT / "tests" / "fake_engine.py"), "--port", str(ports[0]), "--tps", str(options.rate)]
        tokens = ["--tokens", str(int(options.rate * options.seconds))]
        programs.append(Program("engine", "fake", python + engine_words + tokens, ports[0], folder / "engine.log"))
        if not programs[0].wait("/v1/models", START_S):
            raise SystemExit(f"the fake engine did not start: {programs[0].log.read_text()[-500:]}")
        engine = f"http://127.0.0.1:{ports[0]}"
        words = [*python, "-c", GATEWAY, engine, str(ports[1])]
        programs.append(Program("gateway", "this", words, ports[1], folder / "gateway.log", PYTHONPATH=path))
        if not programs[1].wait("/ready", START_S):
            raise SystemExit(f"the gateway did not start: {programs[1].log.read_text()[-500:]}")
        for name, make in (("nginx", _nginx), ("litellm", _litellm)):
            found = getattr(options, name) or shutil.which(name)
            if found is None:
                missing.append(f"{name}: not installed, not compared")
                continue
            program = make(str(found), engine, ports[len(programs)], folder)
            programs.append(program)
            if not program.wait("/v1/models" if name == "nginx" else "/health/liveliness", 4 * START_S):
                missing.append(f"{name}: did not start: {' '.join(program.log.read_text()[-300:].split())}")
                programs.remove(program)
                program.stop()
        yield programs, missing
    finally:
        for program in programs:
            program.stop()


def _nginx(found: str, engine: str, port: int, folder: Path) -> Program:
    told = subprocess.run([found, "-v"], capture_output=True, text=True, check=False)
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX.format(folder=folder, port=port, engine=engine))
    words = [found, "-c", str(configuration), "-e", str(folder / "error.log"), "-p", str(folder)]
    return Program("nginx", told.stderr.strip().rpartition("/")[2], words, port, folder / "nginx.log")


def _litellm(found: str, engine: str, port: int, folder: Path) -> Program:
    python = Path(found).resolve().parent / "python"
    ask_version = "import importlib.metadata as m; print(m.version('litellm'))"
    told = subprocess.run([str(python), "-c", ask_version], capture_output=True, text=True, check=False)
    configuration = folder / "litellm.yaml"
    configuration.write_text(LITELLM.format(engine=engine))
    words = [found, "--config", str(configuration), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    # It asks for a key of its own; on loopback, for half a minute, it can do without.
    quiet = {"LITELLM_LOG": "ERROR", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    return Program("litellm", told.stdout.strip(), words, port, folder / "litellm.log", **quiet)


# ------------------------------------------------------------------------------------------------- the report


def compare(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="loadmaster-bench-") as name, running(options, Path(name)) as started:
        programs, missing = started
        rounds: dict[str, list[Round]] = {program.name: [] for program in programs}
        for program in programs:
            asyncio.run(ask(program.port, 4, 2, 30))  # first use: imports, code paths
        for _ in range(options.rounds):
            for program in programs:
                involved = programs[:1] if program is programs[0] else [programs[0], program]
                rounds[program.name].append(measure(program, involved, options.streams, options.rate, options.seconds))
        first = first_bytes(programs, SINGLE)
        versions = {program.name: program.version for program in programs}
    direct = statistics.median(one.rate for one in rounds["engine"])
    rows = {}
    for target, those in rounds.items():
        tokens = options.streams * int(options.rate * options.seconds)
        cpu = statistics.median(one.cpu_s.get(target, 0.0) for one in those)
        rows[target] = {
            "version": versions[target],
            "tokens_per_s": round(statistics.median(one.rate for one in those), 1),
            "share_of_direct": round(statistics.median(one.rate for one in those) / direct, 4),
            "first_byte_at_once_s": round(statistics.median(one.first_byte_s for one in those), 5),
            "late_s": round(statistics.median(one.late_s for one in those), 4),
            "intact": all(one.intact for one in those),
            "faults": [one.fault for one in those if one.fault],
            "cpu_s": cpu,
            "cpu_us_per_token": round(1e6 * cpu / tokens, 1),
            "first_byte_alone_s": round(first[target], 6),
            "more_to_first_byte_s": round(first[target] - first["engine"], 6),
        }
    gateway = rows["gateway"]
    broken = []
    if not gateway["intact"]:
        broken.append(f"tokens were lost or changed: {gateway['faults']}")
    if gateway["share_of_direct"] < LIMIT_RATE:
        broken.append(f"{gateway['share_of_direct']:.1%} of the direct rate, at least {LIMIT_RATE:.0%} is asked")
    if gateway["more_to_first_byte_s"] > LIMIT_FIRST_BYTE_S:
        broken.append(
            f"{gateway['more_to_first_byte_s'] * 1e3:.2f} ms more to the first byte, at most "
            f"{LIMIT_FIRST_BYTE_S * 1e3:.0f} ms are allowed"
        )
    return {
        "schema": 1,
        "streams": options.streams,
        "tokens_per_s_and_stream": options.rate,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "machine": {"python": platform.python_version(), "processors": os.cpu_count(), "kernel": platform.release()},
        "aiohttp": importlib.metadata.version("aiohttp"),
        "targets": rows,
        "missing": missing,
        "broken": broken,
    }


def text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['streams']} streams at {result['tokens_per_s_and_stream']:g} tokens/s each, {result['seconds']:g} s, "
        f"median of {result['rounds']} rounds; Python {result['machine']['python']}, aiohttp {result['aiohttp']}, "
        f"{result['machine']['processors']} processors",
        "",
        f"{'':<18}{'tokens/s':>10}{'of direct':>11}{'intact':>8}{'CPU s':>8}{'us/token':>10}"
        f"{'first byte':>12}{'alone':>10}{'more':>10}",
    ]
    for name, row in result["targets"].items():
        label = "direct" if name == "engine" else f"{name} {row['version']}" if row["version"] != "this" else name
        lines.append(
            f"{label:<18}{row['tokens_per_s']:>10,.0f}{row['share_of_direct']:>11.1%}"
            f"{'yes' if row['intact'] else 'NO':>8}{row['cpu_s']:>8.2f}{row['cpu_us_per_token']:>10.1f}"
            f"{row['first_byte_at_once_s'] * 1e3:>9.1f} ms{row['first_byte_alone_s'] * 1e3:>7.2f} ms"
            f"{row['more_to_first_byte_s'] * 1e3:>7.2f} ms"
        )
        lines += [f"  {fault}" for fault in row["faults"]]
    lines += ["", *result["missing"], *(f"broken: {sentence}" for sentence in result["broken"])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--rate", type=float, default=RATE, help="tokens a second and stream")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a stream")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--nginx", type=Path, help="the program, if it is not on the path")
    parser.add_argument("--litellm", type=Path, help="the program, if it is not on the path")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is broken")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = compare(options)
    sys.stdout.write(json.dumps(result, indent=1) + "\n" if options.json else text(result))
    return 1 if options.check and result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
