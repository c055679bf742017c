"""``engine.json``: what run-engine says of its engine, and whether the one who said it still lives."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from loadmaster.core.facts import Finding
from loadmaster.edge.process import Identity, read_process
from loadmaster.edge.statehome import StateError, write_file

State = Literal[
    "checking",
    "waiting-for-memory",
    "loading",
    "warming-up",
    "ready",
    "stuck",
    "stopping",
    "exited",
    "failed",
]
FINAL: frozenset[str] = frozenset({"exited", "failed"})


class Pid(Struct, frozen=True):
    """A process. ``started``: clock ticks after boot, None where the kernel does not tell."""

    pid: int
    started: int | None = None

    @classmethod
    def of(cls, pid: int) -> Pid:
        process = read_process(pid)
        return cls(pid, process.started if process else None)

    @property
    def alive(self) -> bool:
        process = read_process(self.pid)
        if process is not None:
            return process.state not in "ZX" and self.started in (None, process.started)
        if Path("/proc/self/stat").exists():
            return False
        with contextlib.suppress(OSError):
            os.kill(self.pid, 0)
            return True
        return False


class ExitFacts(Struct, frozen=True):
    """How the engine ended: with a code, or by a signal; both None when nobody saw it."""

    code: int | None = None
    signal: int | None = None


class EngineState(Struct, frozen=True, kw_only=True):
    """``pid``, ``port``, ``model``: of the engine. ``since``: seconds of the epoch at which ``state`` began.

    ``phase``: the last phase of the start that the log showed. ``runner``: the run-engine that says all this.
    ``supervisor``: the process that has to look after it, None when it was started by hand. ``restarts``: starts
    after a crash since ``up``; ``failures``: crashes in a row. ``timings``: seconds of parts of the start.
    ``notes``: what is contradictory or not known of why it ended.
    ``retry_at``: when a crashed engine is started again, seconds of the epoch. ``run``: the number of this start in
    the store.
    """

    state: State
    schema: int = 1
    pid: int | None = None
    port: int | None = None
    since: float = 0.0
    phase: str | None = None
    message: str = ""
    restarts: int = 0
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    exit: ExitFacts | None = None
    model: str | None = None
    runner: Pid | None = None
    supervisor: int | None = None
    process: Pid | None = None
    failures: int = 0
    retry_at: float | None = None
    timings: dict[str, float] = {}
    version: str | None = None
    run: int | None = None


class EngineRun(Struct, frozen=True, kw_only=True):
    """What finds the processes of an engine again after run-engine was killed."""

    pid: int = -1
    started: int | None = None
    marker: str
    cleanup: tuple[str, ...] = ()

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.started, self.marker)


def read_state(path: Path) -> EngineState | None:
    """The state as written, None when there is none or the file is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineState)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


def write_state(path: Path, state: EngineState) -> None:
    """Raises :class:`StateError`; then the old state is removed, because it is true no more.

    On a full disk the old file is written over, which needs no new room.
    """
    content = msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n"
    try:
        write_file(path, content)
    except StateError:
        if _write_over(path, content):
            return
        with contextlib.suppress(OSError):
            path.unlink()
        write_file(path, content)  # the old one may have made room


def _write_over(path: Path, content: bytes) -> bool:
    try:
        with path.open("r+b", buffering=0) as file:
            written = file.write(content)
            file.truncate(written)
            return written == len(content)
    except OSError:
        return False


def read_run(path: Path) -> EngineRun | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineRun)
    except (OSError, msgspec.MsgspecError):
        return None


def write_run(path: Path, run: EngineRun) -> None:
    """Raises :class:`StateError`. On a full disk the old file is written over."""
    content = msgspec.json.encode(run)
    try:
        write_file(path, content)
    except StateError:
        if not _write_over(path, content):
            raise


def next_state(old: EngineState, state: State, **changes: object) -> EngineState:
    """The state that follows; ``since`` begins anew when the name changes."""
    since = old.since if state == old.state and old.since else time.time()
    return msgspec.structs.replace(old, state=state, since=since, **changes)


def refused_state(message: str) -> EngineState:
    """The state when run-engine could not even begin."""
    return EngineState(state="failed", since=time.time(), message=message, runner=Pid.of(os.getpid()))
