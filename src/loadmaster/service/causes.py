"""Why an engine ended, from its log, its exit and the kernel's count of processes killed for memory."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path

from loadmaster.core.checks.catalogue import codes, finding
from loadmaster.core.enginelog import repeats
from loadmaster.core.facts import Evidence, Finding
from loadmaster.edge.process import Exit

CRASHED = 4
_MASK = "engine-dead-masked"
# What others hold may be gone at the next start, which waits for it.
_PASSES = frozenset({"gpu-held-by-other-process", "free-memory-below-request", "port-in-use"})
_MOST_EVIDENCE = 300


def failure_findings(failures: Sequence[tuple[str, int, str]], ended: Exit, kills: int) -> tuple[Finding, ...]:
    """A finding for each code that the log showed, the root cause first: the earliest that names one.

    ``failures``: (code, line number, line) in the order of the log. ``kills``: processes that the kernel killed for
    memory since the start.
    """
    known = frozenset(codes())
    first: dict[str, tuple[int, str]] = {}
    for code, number, line in failures:
        if code in known:
            first.setdefault(code, (number, line))
    ordered = sorted(first.items(), key=lambda item: (item[0] == _MASK, item[1][0]))
    found = [
        finding(code, line[:_MOST_EVIDENCE], evidence=[Evidence("log", line[:_MOST_EVIDENCE], line=number)])
        for code, (number, line) in ordered
    ]
    if ended.signal == signal.SIGKILL and kills > 0:
        cause = f"the engine was killed by SIGKILL, and the kernel killed {kills} for lack of memory meanwhile"
        found.insert(
            0, finding("host-ram-killed", cause, evidence=[Evidence("host", "oom_kill grew")], confidence="likely")
        )
    return tuple(found)


def exit_code_of(found: Sequence[Finding], grammar: str, *, served: bool) -> int:
    """1: the same launch would fail again; 4: another start is worth its while.

    An engine that served once is started again whatever it died of.
    """
    if served or not found or found[0].code in _PASSES or found[0].code == _MASK:
        return CRASHED
    return 1 if repeats(grammar, found[0].code) else CRASHED


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory, here or in all; 0 where it does not tell."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0
