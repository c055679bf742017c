#!/usr/bin/env python3
"""How fast a healthy log is read, on one core, and in how much memory.

The log is written first: a start of vLLM, then what a busy server prints: a line a request, a line of throughput every
ten seconds, and of some requests the prompt, as with --enable-log-requests. Beside it, in the same run: a loop over
the lines that looks for one word in each, which is what `grep` in Python costs.

    bench/diagnose.py [--size MB] [--rounds N] [--check] [--json]

At least LIMIT_RATE MB a second of processor time on an idle machine, and at most LIMIT_MEMORY_MIB. --check exits 1 when
the reading takes more than LIMIT_RATIO times as long as the loop, which holds on busy machines too, or more memory.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from loadmaster.edge.logstream import blocks

LIMIT_RATE = 60.0
LIMIT_RATIO = 8.0
LIMIT_MEMORY_MIB = 100
START = """\
(APIServer pid=7) INFO 11-30 09:31:25 [api_utils.py:339]  version 0.24.0
(APIServer pid=7) INFO 11-30 09:31:25 [api_utils.py:273] non-default args: {'model_tag': '/models/m', 'tensor_parallel_size': 2}
(APIServer pid=7) INFO 11-30 09:31:25 [model.py:598] Resolved architecture: Qwen3_5MoeForConditionalGeneration
(EngineCore pid=8) INFO 11-30 09:31:46 [core.py:114] Initializing a V1 LLM engine (v0.24.0) with config: model='/models/m', tensor_parallel_size=2
(Worker_TP0 pid=9) INFO 11-30 09:32:08 [gpu_model_runner.py:5160] Starting to load model /models/m...
(Worker_TP0 pid=9) INFO 11-30 09:32:13 [gpu_model_runner.py:5255] Model loading took 11.3 GiB memory and 2.981296 seconds
(Worker_TP0 pid=9) INFO 11-30 09:35:02 [gpu_worker.py:508] Available KV cache memory: 8.05 GiB
(EngineCore pid=8) INFO 11-30 09:35:02 [kv_cache_utils.py:2146] GPU KV cache size: 831,162 tokens
(Worker_TP0 pid=9) INFO 11-30 09:35:06 [gpu_model_runner.py:6656] Graph capturing finished in 4 secs, took 0.12 GiB
(EngineCore pid=8) INFO 11-30 09:35:07 [core.py:337] init engine (profile, create kv cache, warmup model) took 173.74 s
(APIServer pid=7) INFO:     Application startup complete.
"""  # noqa: E501
WORDS = """
what colour is the cat on table describe this picture in one sentence please read total from receipt and write it as
number which of two roads goes to station count people boats windows left right behind front red green blue yellow
translate sign into english german french chinese summarise page list names dates amounts there are no other animals
"""
READ = """
import json, resource, sys, time
from pathlib import Path
from loadmaster.core.diagnosis import Diagnoser
from loadmaster.edge.logstream import blocks
diagnoser = Diagnoser()
began = time.process_time()
for block in blocks(Path(sys.argv[1])):
    diagnoser.read(block)
found = diagnoser.close()
seconds = time.process_time() - began
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([seconds, memory, found.healthy, found.facts.lines]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=120, metavar="MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.log"
        lines = write(path, chosen.size * 1_000_000)
        reading = [read(path, lines) for _ in range(chosen.rounds)]
        looping = min(seconds_to_loop(path) for _ in range(chosen.rounds))
        size = path.stat().st_size
    seconds, memory = min(seconds for seconds, _ in reading), max(memory for _, memory in reading) / 2**20
    rate, ratio = size / 1e6 / seconds, seconds / looping
    if chosen.json:
        figures = {"mb_per_s": round(rate, 1), "ratio": round(ratio, 2), "memory_mib": round(memory, 1)}
        print(json.dumps({"mb": chosen.size, **figures}))
    else:
        print(f"{rate:.0f} MB a second of processor time (asked for: {LIMIT_RATE:.0f})")
        print(f"{ratio:.1f} times what a loop over the lines takes (limit: {LIMIT_RATIO:.0f})")
        print(f"{memory:.0f} MiB of memory (limit: {LIMIT_MEMORY_MIB})")
    return 1 if chosen.check and (ratio > LIMIT_RATIO or memory > LIMIT_MEMORY_MIB) else 0


def write(path: Path, size: int) -> int:
    """The log: the same one each time. How many lines it has."""
    lines = 0
    with path.open("w") as log:
        for text in written(size):
            log.write(text)
            lines += text.count("\n")
    return lines


def written(size: int) -> Iterator[str]:
    chance = random.Random(7)
    words = WORDS.split()
    yield START
    done, second = len(START), 0
    while done < size:
        second += 1
        clock = f"11-30 {10 + second // 36000 % 12}:{second // 600 % 60:02}:{second // 10 % 60:02}"
        kind = chance.random()
        if kind < 0.8:
            port = chance.randint(30000, 60000)
            line = f'(APIServer pid=7) INFO:     127.0.0.1:{port} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        elif kind < 0.98:
            line = (
                f"(APIServer pid=7) INFO {clock} [loggers.py:273] Engine 000: "
                f"Avg prompt throughput: {chance.random() * 2000:.1f} tokens/s, "
                f"Avg generation throughput: {chance.random() * 500:.1f} tokens/s, "
                f"Running: {chance.randint(0, 64)} reqs, Waiting: {chance.randint(0, 9)} reqs, "
                f"GPU KV cache usage: {chance.random() * 100:.1f}%, "
                f"Prefix cache hit rate: {chance.random() * 100:.1f}%\n"
            )
        else:
            prompt = " ".join(chance.choices(words, k=40))
            line = (
                f"(APIServer pid=7) INFO {clock} [logger.py:39] "
                f"Received request chatcmpl-{chance.getrandbits(128):032x}: prompt: {prompt!r}, "
                f"params: SamplingParams(n=1, temperature=0.7, max_tokens=512), prompt_token_ids: None.\n"
            )
        done += len(line)
        yield line


def read(path: Path, lines: int) -> tuple[float, int]:
    """Seconds and bytes of memory, of a process of its own."""
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    seconds, memory, healthy, counted = json.loads(done.stdout)
    if healthy is not True or counted != lines:
        sys.exit(f"the log was not read right: {done.stdout}")
    return seconds, memory


def seconds_to_loop(path: Path) -> float:
    began = time.process_time()
    found = 0
    for block in blocks(path):
        for line in block.split(b"\n"):
            if b"Traceback" in line:
                found += 1
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
