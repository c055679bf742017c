"""Starts the fake engine for a test and ends it with all that it started, however the test ends."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadmaster.edge.process import Child
from loadmaster.engines.base import EngineCommand

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
PATIENCE_S = 20.0


@dataclass
class Running:
    """A fake engine. ``url`` has no slash at its end."""

    url: str
    child: Child
    log: Path

    def fake(self, **switches: Any) -> dict[str, Any]:
        """Change its switches; what it has seen so far."""
        body = json.dumps(switches).encode() if switches else None
        with urllib.request.urlopen(f"{self.url}/fake", body, timeout=PATIENCE_S) as answer:
            seen: dict[str, Any] = json.load(answer)
        return seen


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Wait until it holds; fails the test after twenty seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.02)


@contextmanager
def fake_engine(folder: Path, *options: str, wait: bool = True) -> Iterator[Running]:
    """A fake engine on a free port. ``wait`` False: it may still load, or fail; then the URL is not known."""
    port_file, log = folder / "fake.port", folder / "fake.log"
    port_file.unlink(missing_ok=True)
    argv = (sys.executable, str(FAKE_ENGINE), "--port-file", str(port_file), *options)
    child = Child.start(EngineCommand(argv=argv), log)
    try:
        url = ""
        if wait:
            until(lambda: port_file.exists() or child.poll() is not None, "the fake engine's port")
            assert port_file.exists(), log.read_text()
            url = f"http://127.0.0.1:{port_file.read_text()}"
        yield Running(url, child, log)
    finally:
        stopped = child.stop(term_s=1.0)
        assert not stopped.left
