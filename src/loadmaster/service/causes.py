"""Why an engine ended, from its log, its exit and the kernel's count of processes killed for memory."""

from __future__ import annotations

import contextlib
import re
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
_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*)?")


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
    if len(first) > 1:
        first.pop(_MASK, None)  # it only says that something died
    found = [
        finding(code, f"It said: {_message(line)}", evidence=[Evidence("log", line[:_MOST_EVIDENCE], line=number)])
        for code, (number, line) in sorted(first.items(), key=lambda item: item[1][0])
    ]
    if ended.signal == signal.SIGKILL and kills > 0:
        cause = f"the engine was killed by SIGKILL, and the kernel killed {kills} for lack of memory meanwhile"
        found.insert(
            0, finding("host-ram-killed", cause, evidence=[Evidence("host", "oom_kill grew")], confidence="likely")
        )
    return tuple(found)


def _message(line: str) -> str:
    """The line without who wrote it when, up to the end of its first sentence."""
    text = _PREFIX.sub("", line).strip()
    end = text.find(". ")
    return (text[: end + 1] if 0 < end < _MOST_EVIDENCE else text)[:_MOST_EVIDENCE]


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
