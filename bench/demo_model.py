#!/usr/bin/env python3
"""How long one question about a picture takes: through the gateway, and to the engine alone, in one run.

The demonstration is brought up as `loadmaster demo` does, and every question has a picture that was not sent before.
Interleaved pairs: the same question goes to the gateway and to the engine, which one first alternates. The median
through the gateway has to be under LIMIT_S.

    bench/demo_model.py [--questions N] [--check] [--json]

--check exits 1 when the limit is broken. It needs the extra "cpu".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from demo_model import questions, scenes  # noqa: E402
from demo_model.evaluate import Case, answers  # noqa: E402
from loadmaster.service.demo import demonstration  # noqa: E402

LIMIT_S = 1.0
WIDTH, HEIGHT = 640, 480  # scaled by the engine to at most 100 tokens


def question(n: int) -> Case:
    random = Random(f"bench {n}")
    while True:
        scene = scenes.any_scene(random, WIDTH, HEIGHT, False)
        turns = questions.ask(scene, random, "en")[:1]
        if turns:
            return Case("bench", "en", (scene,), ((turns[0].question, turns[0].answer),), False)


def seconds(address: str, one: Case) -> tuple[float, bool]:
    begun = time.perf_counter()
    said = answers(address, one)
    return time.perf_counter() - begun, said == [one.turns[0][1]]


def measured(count: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"gateway": [], "engine": []}
    right = 0
    with demonstration(None, False, lambda text: None) as running:
        engine = running.installation.engine_url
        assert engine is not None
        addresses = {"gateway": running.url, "engine": engine}
        for address in addresses.values():
            seconds(address, question(-1))
        for n in range(count):
            # the same picture twice would be answered from the engine's store of prompts
            for side, name in enumerate(("gateway", "engine") if n % 2 else ("engine", "gateway")):
                taken, good = seconds(addresses[name], question(2 * n + side))
                times[name].append(taken)
                right += good
    return {
        "schema": 1,
        "questions": count,
        "right": right,
        "asked": 2 * count,
        **{f"{name}_median_s": round(statistics.median(taken), 4) for name, taken in times.items()},
        **{f"{name}_p95_s": round(sorted(taken)[int(0.95 * (len(taken) - 1))], 4) for name, taken in times.items()},
        "limit_s": LIMIT_S,
        "processors": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=25)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measured(options.questions)
    if options.json:
        print(json.dumps(found))
    else:
        for name in ("gateway", "engine"):
            print(f"{name:8} median {found[f'{name}_median_s']:.3f} s, 95 % under {found[f'{name}_p95_s']:.3f} s")
        print(f"{found['right']} of {found['asked']} answers right; {found['processors']} processors,")
        print(f"load average {found['load_average']}; limit {LIMIT_S} s through the gateway")
    return int(options.check and found["gateway_median_s"] >= LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
