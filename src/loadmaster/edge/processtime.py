"""How many processors a process uses, between two looks."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class ProcessorUse:
    """Of one process at a time; another number, or another start under the same one, begins anew."""

    def __init__(self) -> None:
        self._before: tuple[int, int, float, float] | None = None

    def cores(self, pid: int | None, now: float) -> float | None:
        """Processors used since the last look, 1.0 is one core; None at the first, and where nobody tells."""
        if pid is None:
            self._before = None
            return None
        try:
            text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
            words = text[text.rindex(")") + 2 :].split()
            spent, started = (int(words[11]) + int(words[12])) / _TICKS, int(words[19])
        except (OSError, ValueError, IndexError):
            self._before = None
            return None
        before, self._before = self._before, (pid, started, spent, now)
        if before is None or before[:2] != (pid, started) or now <= before[3]:
            return None
        return max(0.0, (spent - before[2]) / (now - before[3]))
