"""A deployment of the fake engine under a real supervisord, in a state folder of its own, ended however a test ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from loadmaster.config import write_deployment
from loadmaster.core.deployment import RUN_VARIABLE, Deployment
from loadmaster.edge.marked import end_marked, marked
from loadmaster.edge.process import Member
from loadmaster.service.enginestate import EngineState, read_run, read_state
from loadmaster.service.places import FOLDER_VARIABLE, Places
from loadmaster.service.status import Status, status_of

FAKE_ENGINE = Path(__file__).parent.parent / "fake_engine.py"
PATIENCE_S = 30.0
QUICK = {"backoff_first_s": 0.2, "backoff_most_s": 1.0, "stuck_after_s": 3.0, "stop_s": 4.0, "memory_wait_s": 5.0}


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


class Served:
    """A deployment ``name`` in the state folder ``home``."""

    def __init__(self, home: Path, name: str = "one") -> None:
        self.home = home
        self.name = name
        self.places = Places(home / "deployments" / name)
        self.environment = {**os.environ, "LOADMASTER_HOME": str(home)}
        self.environment.pop(RUN_VARIABLE, None)
        self.gateway_port = free_port()
        self.engine_port = free_port()

    def configure(self, *fake_options: str, **changes: Any) -> Deployment:
        """Write loadmaster.toml with these options of the fake engine; ``changes`` of sections or keys."""
        words = ["--port", "{port}", "--model", "{model}", *fake_options]
        values: dict[str, Any] = {
            "name": self.name,
            "model": "fake",
            "engine": {
                "kind": "command",
                "port": self.engine_port,
                "command": [sys.executable, str(FAKE_ENGINE), *words],
                "start_timeout_s": 60.0,
            },
            "gateway": {"port": self.gateway_port},
            "supervision": dict(QUICK),
        }
        for key, value in changes.items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
        deployment = msgspec.convert(values, Deployment)
        write_deployment(deployment, overwrite=True, folder=self.places.folder)
        return deployment

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """``loadmaster`` with these arguments, not waited for."""
        return subprocess.Popen(
            [sys.executable, "-m", "loadmaster", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"loadmaster {arguments} did not end: {out}{err}\n{self.log()}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def up(self, *arguments: str) -> str:
        """Up with success; what it said."""
        done = self.run("up", self.name, *arguments)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.log()}"
        return done.stdout + done.stderr

    def status(self) -> Status:
        return status_of(self.places)

    def state(self) -> EngineState | None:
        return read_state(self.places.engine)

    def until(self, condition: Callable[[Status], bool], what: str, timeout_s: float = PATIENCE_S) -> Status:
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.status()
            if condition(now):
                return now
            assert time.monotonic() < deadline, f"{what} did not come about: {now}\n{self.log()}"
            time.sleep(0.05)

    def processes(self) -> tuple[Member, ...]:
        return marked(FOLDER_VARIABLE, str(self.places.folder))

    def orphans(self) -> list[Member]:
        """Processes of the deployment that neither descend from its supervisor nor belong to its engine of now."""
        supervisor = self.status().supervisor.pid
        everyone = {process.pid: process for process in self.processes()}
        run = read_run(self.places.engine_run)
        current = {process.pid for process in marked(RUN_VARIABLE, run.marker)} if run is not None else set()

        def looked_after(process: Member) -> bool:
            seen: set[int] = set()
            while process.pid not in seen:
                if process.pid == supervisor:
                    return True
                seen.add(process.pid)
                parent = everyone.get(process.parent)
                if parent is None:
                    return False
                process = parent
            return False

        engine = self.status().backend.pid
        return [
            process
            for process in everyone.values()
            if not looked_after(process) and not (engine is not None and supervisor and process.pid in current)
        ]

    def ask(self, prompt: str = "Say hello.", timeout_s: float = 10.0) -> str:
        """An answer through the gateway."""
        body = {"model": "fake", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.gateway_port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    def fake(self, **switches: Any) -> dict[str, Any]:
        """Change the fake engine's switches; what it has seen."""
        port = self.status().backend.port
        body = json.dumps(switches).encode() if switches else None
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/fake", body, timeout=10.0) as answer:
            seen: dict[str, Any] = json.load(answer)
        return seen

    def log(self) -> str:
        texts = []
        for path in (self.places.backend_log, self.places.web_log, self.places.supervisor_log):
            if path.exists():
                texts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}")
        return "\n".join(texts)

    def end(self) -> None:
        """End everything that belongs to the deployment, at once."""
        end_marked(FOLDER_VARIABLE, str(self.places.folder), term_s=0.0)
        end_marked("LOADMASTER_HOME", str(self.home), term_s=0.0)


@contextmanager
def served(home: Path, name: str = "one") -> Iterator[Served]:
    one = Served(home, name)
    try:
        yield one
    finally:
        one.end()
        assert not one.processes()
