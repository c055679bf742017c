#!/usr/bin/env python3
"""Cost of the gateway's picture rules, beside bare Pillow in one run.

A 12-megapixel JPEG as a data: URL in a chat message is scaled to 1 megapixel by `apply` through a worker process,
with the cache off; against it the same draft-mode decode, filter and encode of the same bytes in bare Pillow in this
process. Interleaved pairs. At most LIMIT_RATIO times, as the median of the pairs, in time on the clock and in
processor time (this process and the worker).

    bench/images.py [--repeats N] [--check] [--json]

The picture is drawn: soft shapes and grain, at JPEG quality 92. --check exits 1 when the limit is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from PIL import Image, ImageChops  # noqa: E402

from loadmaster.service.imagecodec import DRAFT_GAP, JPEG_QUALITY, REDUCING_GAP, fit_size  # noqa: E402
from loadmaster.service.images import ImagePool, ImageRules, apply  # noqa: E402

LIMIT_RATIO = 1.5
WIDTH, HEIGHT = 4000, 3000
MAX_PIXELS = 1_000_000


def photograph() -> bytes:
    """A picture whose JPEG is as large as a camera's: large soft shapes under fine grain."""
    bands = []
    for seed in range(3):
        shapes = Image.effect_noise((40 + seed, 30), 120).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        grain = Image.effect_noise((WIDTH, HEIGHT), 16)
        bands.append(ImageChops.add(shapes, grain, scale=1, offset=-128))
    buffer = io.BytesIO()
    Image.merge("RGB", bands).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def bare(data: bytes) -> bytes:
    """The same draft scale, filter and encoder in as few calls as Pillow has."""
    image: Image.Image = Image.open(io.BytesIO(data))
    size = fit_size(*image.size, MAX_PIXELS)
    image.draft(None, (int(size[0] * DRAFT_GAP), int(size[1] * DRAFT_GAP)))
    image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=REDUCING_GAP)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def worker_seconds(pool: ImagePool) -> float | None:
    """Processor seconds of the pool's processes so far; None where the system does not tell."""
    ticks = 0
    for pid in pool.processes():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


async def measure(repeats: int) -> dict[str, Any]:
    data = photograph()
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode("ascii")
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    rules = ImageRules(max_pixels=MAX_PIXELS)
    pool = ImagePool(cache_bytes=0)
    pooled, plain = [], []
    try:
        await apply(messages, rules, pool)
        bare(data)
        before, ours, theirs = worker_seconds(pool), 0.0, 0.0
        for _ in range(repeats):
            clock, used = time.perf_counter(), time.process_time()
            changed, _ = await apply(messages, rules, pool)
            pooled.append(time.perf_counter() - clock)
            ours += time.process_time() - used

            clock, used = time.perf_counter(), time.process_time()
            expected = bare(data)
            plain.append(time.perf_counter() - clock)
            theirs += time.process_time() - used
        after = worker_seconds(pool)
    finally:
        await pool.stop()
    result = base64.b64decode(changed[0]["content"][0]["image_url"]["url"].partition(",")[2])
    if result != expected:
        raise SystemExit("the two ways do not give the same picture: the comparison would be void")
    ours_all = None if before is None or after is None else ours + after - before
    return {
        "schema": 1,
        "processor": processor(),
        "processors": os.cpu_count(),
        "source_bytes": len(data),
        "result_bytes": len(result),
        "pool_seconds": statistics.median(pooled),
        "bare_seconds": statistics.median(plain),
        "clock_ratio": statistics.median(a / b for a, b in zip(pooled, plain, strict=True)),
        "pool_processor_seconds": None if ours_all is None else ours_all / repeats,
        "bare_processor_seconds": theirs / repeats,
        "processor_ratio": None if ours_all is None else ours_all / theirs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--check", action="store_true", help="exit 1 when a ratio is above the limit")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.repeats))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"processor            {found['processor']}, {found['processors']} cores")
        print(
            f"picture              {WIDTH}x{HEIGHT}, {found['source_bytes']:,} bytes -> {found['result_bytes']:,} bytes"
        )
        print(f"through the pool     {found['pool_seconds'] * 1000:8.1f} ms (median)")
        print(f"bare Pillow          {found['bare_seconds'] * 1000:8.1f} ms (median)")
        print(f"ratio on the clock   {found['clock_ratio']:8.2f}    (limit {LIMIT_RATIO})")
        if found["processor_ratio"] is not None:
            print(f"ratio in CPU time    {found['processor_ratio']:8.2f}    (limit {LIMIT_RATIO})")
    worst = max(found["clock_ratio"], found["processor_ratio"] or 0.0)
    return 1 if arguments.check and worst > LIMIT_RATIO else 0


if __name__ == "__main__":
    sys.exit(main())
