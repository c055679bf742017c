"""Processes that carry a variable of a given value in the environment that they were started with."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

from loadmaster.edge.process import Member, read_process, read_processes

_LOOK_EVERY_S = 0.05
_KILL_S = 10.0


def marked(variable: str, value: str) -> tuple[Member, ...]:
    """The living processes with ``variable=value``; this process and its parents are left out."""
    table = read_processes()
    own, pid = set[int](), os.getpid()
    while pid > 0 and pid not in own:
        own.add(pid)
        pid = table[pid].parent if pid in table else 0
    wanted = os.fsencode(f"{variable}={value}")
    return tuple(
        process
        for process in table.values()
        if process.pid not in own and process.state not in "ZX" and wanted in _environment(process.pid)
    )


def end_marked(variable: str, value: str, *, term_s: float) -> tuple[Member, ...]:
    """SIGTERM to all of them, SIGKILL after ``term_s`` seconds. Returns what could not be ended."""
    left = marked(variable, value)
    send(left, signal.SIGTERM)
    deadline = time.monotonic() + term_s
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        left = marked(variable, value)
    deadline = time.monotonic() + _KILL_S
    while left and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(_LOOK_EVERY_S)
        left = marked(variable, value)
    return left


def send(members: Iterable[Member], number: int) -> None:
    """Signal each process, unless its number belongs to another one by now."""
    for member in members:
        try:
            descriptor = os.pidfd_open(member.pid)
        except (AttributeError, OSError):  # gone, or a system without process descriptors
            continue
        with contextlib.suppress(OSError):
            now = read_process(member.pid)
            if now is not None and now.started == member.started:
                signal.pidfd_send_signal(descriptor, number)
        os.close(descriptor)


def _environment(pid: int) -> frozenset[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - read many times a second
            return frozenset(file.read().split(b"\0"))
    except OSError:
        return frozenset()
