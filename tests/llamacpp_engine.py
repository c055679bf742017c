"""Loads a GGUF file with the real llama.cpp, in a child process, and reads what the engine prints.

Needs xllamacpp. The engine holds the interpreter's lock while it loads and reports errors on stderr alone,
therefore the child.
"""

from __future__ import annotations

import base64
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHILD = """
import json, os, sys, time
wanted = json.loads(sys.argv[1])
import xllamacpp
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS")}
params = xllamacpp.CommonParams()
params.model.path = wanted["model"]
if wanted["projector"]:
    params.mmproj.path = wanted["projector"]
params.verbosity, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 4, 1, 1
for name, value in wanted["set"].items():
    kind = xllamacpp.ggml_type if name.startswith("cache_type") else xllamacpp.llama_flash_attn_type
    setattr(params, name, getattr(kind, value) if isinstance(value, str) else value)
server = xllamacpp.Server(params)
print(json.dumps(resident() | {"address": server.listening_address}), flush=True)
if wanted["stay"]:
    sys.stdin.read()
else:
    # the engine logs from a thread of its own, which an exit would cut off: wait until the file stops growing
    size, since, began = -1, time.monotonic(), time.monotonic()
    while time.monotonic() - since < 0.5 and time.monotonic() - began < 20:
        now = os.fstat(2).st_size
        if now != size:
            size, since = now, time.monotonic()
        time.sleep(0.02)
os._exit(0)
"""

# what a flag is called in the engine's parameters
PARAMETERS = {
    "-c": "n_ctx", "-np": "n_parallel", "-b": "n_batch", "-ub": "n_ubatch", "--image-max-tokens": "image_max_tokens",
}  # fmt: skip


def parameters(flags: str) -> dict[str, Any]:
    """The engine's parameters for these flags."""
    values: dict[str, Any] = {"warmup": False, "n_parallel": -1}
    words = flags.split()
    for at, word in enumerate(words):
        if word in PARAMETERS:
            values[PARAMETERS[word]] = int(words[at + 1])
        elif word in ("-ctk", "-ctv"):
            values[f"cache_type_{word[-1]}"] = f"GGML_TYPE_{words[at + 1].upper()}"
        elif word == "-fa":
            values["flash_attn_type"] = {"off": "LLAMA_FLASH_ATTN_TYPE_DISABLED"}[words[at + 1]]
        elif word == "-kvu":
            values["kv_unified"] = True
        elif word == "--swa-full":
            values["swa_full"] = True
    return values


def load(model: Path, tower: Path | None, settings: dict[str, Any]) -> tuple[str, int]:
    """Load in a child process: the engine's log, and the resident bytes."""
    wanted = {"model": str(model), "projector": str(tower) if tower else "", "set": settings, "stay": False}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        run = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(wanted)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=300,
            check=False,
            env=os.environ | {"OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"},
        )
        log.seek(0)
        printed = log.read()
    if run.returncode:
        raise RuntimeError(f"the engine did not load {model}: {printed[-1500:]}")
    return printed, int(json.loads(run.stdout)["VmRSS"])


def sizes(log: str, pattern: str) -> float:
    """Sum of the MiB that the log prints after ``pattern``."""
    return sum(float(value) for value in re.findall(pattern + r" *= *([\d.]+)", log))


def picture(edge: int, seed: int) -> str:
    """A square picture as a data URL, each with colours of its own."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + bytes((x * 7 + seed * 31) % 256 for x in range(edge * 3))
    head = struct.pack(">IIBBBBB", edge, edge, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(row * edge)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()


def serve_pictures(model: Path, projector: Path, settings: dict[str, Any], edges: Sequence[int]) -> int:
    """Ask about pictures of these sizes, one after the other: the peak of resident bytes from loading to the end."""
    wanted = {"model": str(model), "projector": str(projector), "set": settings, "stay": True}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(wanted)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"},
    ) as engine:
        assert engine.stdout is not None
        try:
            address = json.loads(engine.stdout.readline())["address"]
            for seed, edge in enumerate(edges):
                content = [
                    {"type": "image_url", "image_url": {"url": picture(edge, seed)}},
                    {"type": "text", "text": f"picture {seed}"},
                ]
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
                request = urllib.request.Request(
                    f"{address}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=120) as answer:
                    json.load(answer)
            status = Path(f"/proc/{engine.pid}/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0]) << 10
        finally:
            engine.kill()
