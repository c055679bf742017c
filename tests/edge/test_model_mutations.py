"""Two hundred damaged checkpoints: no traceback, no hang, little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from loadmaster.core.facts import MIB
from loadmaster.edge.sample import write_sample

COUNT = 200


def test_no_mutation_raises_hangs_or_takes_memory(tmp_path: Path) -> None:
    pristine = write_sample("Qwen3.5-35B-A3B", "ct-w4-g32", tmp_path / "pristine", layers=1, shard_bytes=1 << 30)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("model_mutations.py")), str(pristine), str(COUNT)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["raised"] == []
    assert result["slowest"] < 10
    assert result["peak"] < 200 * MIB
    assert result["found"] > COUNT * 0.7  # most mutations break something that is checked
    assert {"header-invalid", "weights-truncated", "config-invalid", "tensor-overlap"} <= set(result["codes"])
