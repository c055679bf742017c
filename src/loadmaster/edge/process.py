"""One child process in a session of its own, and everything that it starts.

An engine's workers outlive a killed parent and go on holding GPU memory. So a run is more than its first process: it
is all processes of the session, all that carry the run's mark in their environment, and all descendants of
those. A program may overwrite its environment (to show a title), may leave the group and may leave the session;
each sign catches what another misses. Signals go through process descriptors after a look at the start time, so that a
number that was given to another process in the meantime is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from loadmaster.core.deployment import RUN_VARIABLE

_PROC = Path("/proc")
_LOOK_EVERY_S = 0.05
_LINGER_S = 2.0  # what the others of a run get to follow their first process
_KILL_S = 10.0  # how long the kernel may take to end killed processes
_CLEANUP_S = 30.0


class Command(Protocol):
    """What is started. ``env`` is added to this process's environment, ``drop`` names what is left out of it.

    ``cleanup`` is run after the stop: it removes what is no process of ours (a container).
    """

    @property
    def argv(self) -> Sequence[str]: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def cwd(self) -> str | None: ...
    @property
    def drop(self) -> Sequence[str]: ...
    @property
    def cleanup(self) -> Sequence[str]: ...


class ProcessError(Exception):
    """A program that could not be started. ``hint`` says what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Exit(Struct, frozen=True):
    """How a process ended: with a code, or by a signal."""

    code: int | None = None
    signal: int | None = None

    @property
    def words(self) -> str:
        if self.signal is not None:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(self.signal).name}"
            return f"killed by signal {self.signal}"
        if self.code is None:
            return "ended, its exit code is unknown"
        return f"exit code {self.code}"


class Member(Struct, frozen=True):
    """A process. ``started``: clock ticks after boot, which tells two users of one number apart."""

    pid: int
    parent: int
    session: int
    state: str
    started: int
    name: str


class Identity(Struct, frozen=True):
    """What finds a run again from another process, also after its first process has ended."""

    pid: int
    started: int | None
    marker: str


class Stopped(Struct, frozen=True, kw_only=True):
    """The end of a run. ``killed``: ended by SIGKILL. ``left``: could not be ended; empty is the proof.

    ``pids``: every process of the run that was ever seen, for a look at who holds GPU memory.
    """

    exit: Exit | None
    seconds: float
    pids: tuple[int, ...] = ()
    killed: tuple[int, ...] = ()
    left: tuple[Member, ...] = ()
    cleanup_failed: str | None = None


class Child:
    """A run that this process started. Not for several threads at once."""

    def __init__(self, process: subprocess.Popen[bytes], marker: str, cleanup: Sequence[str] = ()) -> None:
        self._process = process
        self._cleanup = tuple(cleanup)
        self._seen: dict[int, int] = {}
        self._ever = {process.pid}
        first = read_process(process.pid)
        self.identity = Identity(process.pid, first.started if first else None, marker)

    @classmethod
    def start(cls, command: Command, log: Path | int, *, marker: str | None = None) -> Child:
        """Start the command; both its outputs are appended to ``log`` (a path, or an open descriptor).

        ``marker`` is put into the environment as LOADMASTER_RUN, a fresh one by default. Raises
        :class:`ProcessError` when the program or the log cannot be opened.
        """
        marker = marker or uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name not in command.drop}
        environment |= {**command.env, RUN_VARIABLE: marker}
        argv = list(command.argv)
        if not argv:
            raise ProcessError("there is no program to start")
        with contextlib.ExitStack() as open_files:
            if isinstance(log, int):
                output = log
            else:
                try:
                    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                except OSError as error:
                    raise ProcessError(f"cannot write the log {str(log)!r}: {error.strerror}") from error
                open_files.callback(os.close, output)
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=command.cwd,
                    env=environment,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                what = getattr(error, "filename", None) or argv[0]
                raise ProcessError(f"cannot start {argv[0]!r}: {reason} ({what})") from error
        return cls(process, marker, command.cleanup)

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def marker(self) -> str:
        return self.identity.marker

    def poll(self) -> Exit | None:
        """How the first process ended, None while it runs."""
        code = self._process.poll()
        return None if code is None else _exit(code)

    def wait(self, timeout_s: float) -> Exit | None:
        """As :meth:`poll`, after at most ``timeout_s`` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.poll()

    def members(self) -> tuple[Member, ...]:
        """The living processes of the run, the first one among them."""
        running = self.poll() is None
        table = read_processes()
        if not table:
            # no /proc: only the first process is known; stop() ends its group
            return (Member(self.pid, os.getpid(), self.pid, "?", 0, ""),) if running else ()
        found = _closure(table, lambda process: process.session == self.pid or _has_mark(process.pid, self.marker))
        found |= {pid for pid, started in self._seen.items() if pid in table and table[pid].started == started}
        found -= _own_line(table)
        alive = tuple(table[pid] for pid in sorted(found) if table[pid].state not in "ZX")
        self._seen = {member.pid: member.started for member in alive}
        self._ever.update(self._seen)
        return alive

    def signal(self, number: int) -> None:
        """Send a signal to the first process, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self, term_s: float = 20.0) -> Stopped:
        """End the whole run: SIGTERM to the first process, time to leave, then SIGKILL to whatever is left.

        ``term_s``: seconds the first process has to end the others and itself. Returns when nothing is left, or
        with what even SIGKILL did not end within ten seconds (a process that waits for a device).
        """
        begin = time.monotonic()
        self.members()  # whoever is a descendant now is remembered when its parents are gone
        self.signal(signal.SIGTERM)
        self._until(begin + term_s, lambda: self.poll() is not None)
        others = self.members()
        if others and self.poll() is not None:
            _send(others, signal.SIGTERM)
            self._until(time.monotonic() + min(_LINGER_S, term_s), lambda: not self.members())
        killed: dict[int, None] = {}
        deadline = time.monotonic() + _KILL_S
        while (left := self.members()) and time.monotonic() < deadline:
            _send(left, signal.SIGKILL)
            killed.update(dict.fromkeys(member.pid for member in left))
            time.sleep(_LOOK_EVERY_S)
        if left and not read_processes():
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(_KILL_S)
            left = self.members()
        return Stopped(
            exit=self.poll(),
            seconds=time.monotonic() - begin,
            pids=tuple(sorted(self._ever)),
            killed=tuple(killed),
            left=left,
            cleanup_failed=_clean_up(self._cleanup),
        )

    def _until(self, deadline: float, done: _Condition) -> None:
        while not done() and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)


class _Condition(Protocol):
    def __call__(self) -> bool: ...


class _Belongs(Protocol):
    def __call__(self, process: Member, /) -> bool: ...


# ------------------------------------------------------------------------------------- runs of others


def leftovers(identity: Identity) -> tuple[Member, ...]:
    """The living processes of a run that another process started and did not end.

    The session's number alone proves nothing once its first process has gone: then a process counts that carries the
    mark, or that has overwritten its environment.
    """
    table = read_processes()
    first = table.get(identity.pid)
    same_first = first is not None and identity.started is not None and first.started == identity.started
    reused = first is not None and not same_first

    def belongs(process: Member) -> bool:
        mark = mark_of(process.pid)
        if mark is not None:
            return mark == identity.marker
        if process.session != identity.pid or reused:
            return False
        if identity.started is not None and process.started < identity.started:
            return False
        return same_first or _overwritten(process.pid)

    found = _closure(table, belongs) - _own_line(table)
    return tuple(table[pid] for pid in sorted(found) if table[pid].state not in "ZX")


def orphans(marker: str) -> tuple[Member, ...]:
    """The living processes with this mark, and their descendants; this process and its parents are left out."""
    return leftovers(Identity(-1, None, marker))


def end(identity: Identity, *, term_s: float = 5.0) -> tuple[Member, ...]:
    """End the leftovers of a run: SIGTERM, then SIGKILL. Returns what could not be ended."""
    left = leftovers(identity)
    _send(left, signal.SIGTERM)
    deadline = time.monotonic() + term_s
    while (left := leftovers(identity)) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    deadline = time.monotonic() + _KILL_S
    while (left := leftovers(identity)) and time.monotonic() < deadline:
        _send(left, signal.SIGKILL)
        time.sleep(_LOOK_EVERY_S)
    return left


# ------------------------------------------------------------------------------------- the kernel's table


def read_process(pid: int) -> Member | None:
    """One process as the kernel lists it, None when there is none (or the kernel lists none at all)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        name = text[text.index("(") + 1 : text.rindex(")")]
        rest = text[text.rindex(")") + 2 :].split()
        return Member(pid, int(rest[1]), int(rest[3]), rest[0], int(rest[19]), name)
    except (OSError, ValueError, IndexError):
        return None


def read_processes() -> dict[int, Member]:
    """All processes by number; empty on systems without ``/proc``."""
    try:
        names = [path.name for path in _PROC.iterdir()]
    except OSError:
        return {}
    processes = (read_process(int(name)) for name in names if name.isdigit())
    return {process.pid: process for process in processes if process is not None}


def _environment(pid: int) -> list[bytes]:
    """What is left of the environment that the process was started with, ``NAME=value`` each."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def mark_of(pid: int) -> str | None:
    """The run that a process was started in, as its environment says; None: of none, or it cannot be read."""
    beginning = f"{RUN_VARIABLE}=".encode()
    found = next((entry for entry in _environment(pid) if entry.startswith(beginning)), None)
    return None if found is None else found[len(beginning) :].decode("utf-8", "replace")


def _has_mark(pid: int, marker: str) -> bool:
    return f"{RUN_VARIABLE}={marker}".encode() in _environment(pid)


def _overwritten(pid: int) -> bool:
    """Whether a title has taken the environment's place: it begins in front of it, so the first entry is gone."""
    entries = _environment(pid)
    return not entries or b"=" not in entries[0]


def _closure(table: Mapping[int, Member], belongs: _Belongs) -> set[int]:
    """The processes that belong, and all their descendants."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = [process.pid for process in table.values() if belongs(process)]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, ())
    return found


def _own_line(table: Mapping[int, Member]) -> set[int]:
    """This process and its parents, which carry the same mark when they were started for the same run."""
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        parent = table.get(pid)
        pid = parent.parent if parent else 0
    return line


def _send(members: Iterable[Member], number: int) -> None:
    """Signal each of these processes, unless its number belongs to another one by now."""
    for member in members:
        try:
            descriptor = os.pidfd_open(member.pid)
        except ProcessLookupError:
            continue
        except (AttributeError, OSError):  # a system without process descriptors
            descriptor = -1
        with contextlib.suppress(OSError):
            now = read_process(member.pid)
            if now is not None and now.started == member.started:
                if descriptor >= 0:
                    signal.pidfd_send_signal(descriptor, number)
                else:
                    os.kill(member.pid, number)
        if descriptor >= 0:
            os.close(descriptor)


def _exit(code: int) -> Exit:
    return Exit(signal=-code) if code < 0 else Exit(code=code)


def _clean_up(argv: Sequence[str]) -> str | None:
    """Run the clean-up command; None when there is none or it succeeded, else what it said."""
    if not argv:
        return None
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=_CLEANUP_S, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{argv[0]}: {error}"
    if done.returncode == 0:
        return None
    return done.stderr.strip() or f"{argv[0]} ended with exit code {done.returncode}"
