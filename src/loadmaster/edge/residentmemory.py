"""How much of the host's memory processes hold now."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def resident_bytes(pids: Iterable[int], proc: Path = Path("/proc")) -> int | None:
    """The sum over the processes; one that has ended holds none. None: the system tells it of none of them.

    What several processes share is in it several times.
    """
    held = [size for pid in pids if (size := _resident(proc / str(pid) / "status")) is not None]
    return sum(held) if held else None


def _resident(status: Path) -> int | None:
    try:
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return None
    return None
