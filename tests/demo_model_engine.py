"""Serves the demonstration's model with the real llama.cpp, embedded in loadmaster's own process, as ``demo`` does."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadmaster.edge.demomodel import write_demo_model

MODEL = "demo"


@contextmanager
def demo_engine(folder: Path) -> Iterator[str]:
    """The engine's address; it ends with the block."""
    model, projector = write_demo_model(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "engine.log"
    argv = [sys.executable, "-m", "loadmaster.engines.llamacpp_server", "--model", str(model)]
    argv += [
        "--mmproj",
        str(projector),
        "--alias",
        MODEL,
        "--port",
        str(port),
        "--set",
        "n_ctx=4096",
        "--set",
        "n_parallel=2",
        "--set",
        "image_min_tokens=70",
    ]
    with log.open("wb") as output:
        engine = subprocess.Popen(argv, stdout=output, stderr=output, start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            while True:
                assert engine.poll() is None, log.read_text(errors="replace")[-2000:]
                assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                        break
                except OSError:
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            engine.kill()
            engine.wait(10)
