#!/usr/bin/env python3
"""Draw docs/load-sheet.svg: the recommended launch of the reference case; --check only compares."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from loadmaster.core.argv import parse_argv
from loadmaster.core.facts import EngineFacts
from loadmaster.core.gputable import parse_gpu_spec
from loadmaster.core.recommend import recommend
from loadmaster.edge.modeldir import read_model
from loadmaster.edge.sample import write_sample
from loadmaster.render.svg import sheet_svg

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "load-sheet.svg"
VERSION = "0.24.0"


def picture() -> str:
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "model"
        write_sample("Qwen3.5-35B-A3B", "ct-w4-g32", target)
        model = read_model(str(target))
    launch = parse_argv(["vllm", "serve", "model"], engine_version=VERSION)
    return sheet_svg(recommend(model, parse_gpu_spec("2x24GiB"), launch, EngineFacts("vllm", VERSION)))


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PICTURE.read_text() == picture() else 1
    PICTURE.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
