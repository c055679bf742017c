"""Seeded mutations of a sound checkpoint's headers, index and configuration, and a run over them.

    python model_mutations.py DIRECTORY COUNT

reads each mutated checkpoint once and prints one JSON object: mutations that had findings, codes with counts,
seconds of the slowest read, peak memory of the process, and anything that was raised.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadmaster.edge.modeldir import read_model
from loadmaster.edge.source import ModelError

JSON_FILES = (
    "config.json",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 62, 1 << 80, 1e308, -0.0, "", "\u0000", "x" * 4096, [], {}, [[[[]]]], {"a": {"b": {}}},
    [1] * 1000, "NaN", -(1 << 63), "../../etc/passwd",
)  # fmt: skip
LENGTHS = (0, 1, 7, 8, 100_000_000, 100_000_001, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)


def copy_checkpoint(source: Path, target: Path) -> Path:
    """A copy of headers and small files; data areas stay holes."""
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb") as old, (target / path.name).open("wb") as new:
            new.write(old.read(1 << 20))
            new.truncate(path.stat().st_size)
    return target


def header_of(path: Path) -> bytes:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return file.read(length)


def put_header(path: Path, raw: bytes, length: int | None = None) -> None:
    """Writes another header over the old one, the data area kept at its size."""
    data = path.stat().st_size - 8 - len(header_of(path))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw) if length is None else length) + raw)
        file.truncate(8 + len(raw) + max(data, 0))


def shard_of(directory: Path, pick: random.Random) -> Path:
    return pick.choice(sorted(directory.glob("*.safetensors")))


def flip_bits(directory: Path, pick: random.Random) -> None:
    path = shard_of(directory, pick)
    raw = bytearray(header_of(path))
    for _ in range(pick.randint(1, 20)):
        raw[pick.randrange(len(raw))] ^= 1 << pick.randrange(8)
    put_header(path, bytes(raw))


def cut_file(directory: Path, pick: random.Random) -> None:
    path = pick.choice(sorted(directory.iterdir()))
    os.truncate(path, pick.randrange(path.stat().st_size))


def junk_length(directory: Path, pick: random.Random) -> None:
    with shard_of(directory, pick).open("r+b") as file:
        file.write(struct.pack("<Q", pick.choice((*LENGTHS, pick.getrandbits(64), pick.getrandbits(20)))))


def wrong_entry(directory: Path, pick: random.Random) -> None:
    path = shard_of(directory, pick)
    header = json.loads(header_of(path))
    name = pick.choice(sorted(header))
    value = pick.choice(HOSTILE)
    if pick.random() < 0.3 or name == "__metadata__":
        header[name] = value
    else:
        field = pick.choice(("dtype", "shape", "data_offsets"))
        part = pick.random() < 0.5 and isinstance(header[name][field], list) and header[name][field]
        if part:
            header[name][field][0] = value
        else:
            header[name][field] = value
    put_header(path, json.dumps(header).encode())


def repeat_key(directory: Path, pick: random.Random) -> None:
    path = shard_of(directory, pick)
    header = json.loads(header_of(path))
    name = pick.choice([name for name in header if name != "__metadata__"])
    entry = {**header[name], "data_offsets": [pick.randrange(1 << 20), pick.randrange(1 << 40)]}
    text = json.dumps(header)
    put_header(path, f"{text[:-1]}, {json.dumps(name)}: {json.dumps(entry)}}}".encode())


def deep_nesting(directory: Path, pick: random.Random) -> None:
    depth = pick.choice((100, 1000, 100_000))
    opening, closing = pick.choice((("[", "]"), ('{"a":', "}")))
    text = opening * depth + ("1" if opening != "[" else "") + closing * depth
    if pick.random() < 0.4:
        put_header(shard_of(directory, pick), f'{{"a": {text}}}'.encode())
    else:
        path = directory / pick.choice([name for name in JSON_FILES if (directory / name).exists()])
        whole = path.read_text()
        path.write_text(f'{whole.rstrip()[:-1]}, "deep": {text}}}' if pick.random() < 0.7 else text)


def spots(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place of a JSON value that can be replaced."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        spots(inner, found)
    return found


def wrong_value(directory: Path, pick: random.Random) -> None:
    path = directory / pick.choice([name for name in JSON_FILES if (directory / name).exists()])
    whole = json.loads(path.read_text())
    for _ in range(pick.randint(1, 5)):
        owner, key = pick.choice(spots(whole, []))
        owner[key] = copy.deepcopy(pick.choice(HOSTILE))
    path.write_text(json.dumps(whole))


def flip_text(directory: Path, pick: random.Random) -> None:
    path = directory / pick.choice([name for name in JSON_FILES if (directory / name).exists()])
    raw = bytearray(path.read_bytes())
    for _ in range(pick.randint(1, 10)):
        raw[pick.randrange(len(raw))] = pick.randrange(256)
    path.write_bytes(bytes(raw))


def repeat_config_key(directory: Path, pick: random.Random) -> None:
    path = directory / pick.choice([name for name in JSON_FILES if (directory / name).exists()])
    whole = path.read_text().rstrip()
    key = pick.choice(sorted(json.loads(whole)))
    path.write_text(f"{whole[:-1]}, {json.dumps(key)}: {json.dumps(pick.choice(HOSTILE))}}}")


MUTATIONS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_bits, cut_file, junk_length, wrong_entry, repeat_key, deep_nesting, wrong_value, flip_text, repeat_config_key,
)  # fmt: skip


def run(pristine: Path, count: int) -> dict[str, Any]:
    """Reads ``count`` mutated checkpoints; the seed of each is its number."""
    raised: list[str] = []
    codes: Counter[str] = Counter()
    found, slowest = 0, 0.0
    for seed in range(count):
        pick = random.Random(seed)
        mutate = MUTATIONS[seed % len(MUTATIONS)]
        directory = copy_checkpoint(pristine, pristine.with_name(f"mutated-{seed}"))
        mutate(directory, pick)
        start = time.monotonic()
        try:
            facts = read_model(str(directory))
            found += bool(facts.findings)
            codes.update(finding.code for finding in facts.findings)
        except ModelError as error:
            codes[str(error)[:40]] += 1
        except BaseException:
            raised.append(f"{mutate.__name__} seed {seed}: {traceback.format_exc(limit=-4)}")
        slowest = max(slowest, time.monotonic() - start)
        shutil.rmtree(directory)
    return {"found": found, "codes": dict(codes), "slowest": slowest, "peak": peak_bytes(), "raised": raised}


def peak_bytes() -> int:
    """Highest resident size of this process. Not ``ru_maxrss``, which begins with that of the parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    json.dump(run(Path(sys.argv[1]), int(sys.argv[2])), sys.stdout)
