"""What the machine around the cards has: memory, shared memory, processors, listening ports.

Read from the kernel's own files; nothing is connected to and nothing is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadmaster.core.facts import HostFacts

_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


def read_host(
    proc: Path = Path("/proc"),
    shm: Path = Path("/dev/shm"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    *,
    statvfs: Callable[[Path], Any] | None = None,
    cpu_count: Callable[[], int | None] | None = None,
) -> HostFacts:
    """The host's facts; what cannot be read is None (ports: none listed).

    Memory is what this process may use: a container's limit caps what the machine has.

    ``proc``, ``shm`` and ``cgroup`` are where the kernel mounts them; ``statvfs`` and ``cpu_count`` answer for the
    system.
    """
    memory = _memory(proc / "meminfo")
    limit, left = _memory_limit(cgroup)
    shm_total, shm_free = _shared_memory(shm, statvfs or _statvfs)
    return HostFacts(
        memory_total_bytes=_least(memory.get("MemTotal"), limit),
        memory_available_bytes=_least(memory.get("MemAvailable"), left),
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
        cpu_count=_cpu_count(cpu_count or _usable_cpus),
        ports_in_use=_listening_ports(proc / "net"),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except (OSError, ValueError):
        return None


def _memory(path: Path) -> dict[str, int]:
    """Bytes by the kernel's name; ``kB`` there is KiB."""
    sizes: dict[str, int] = {}
    for line in (_read(path) or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            sizes[name.strip()] = int(words[0]) * 1024
    return sizes


def _memory_limit(cgroup: Path) -> tuple[int | None, int | None]:
    """Bytes that the control group allows, and what is left of them; None without a limit.

    Pages of files that were not used lately can be given back, so they count as left.
    """
    for folder, limit_name, used_name, reclaimable in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _whole(folder / limit_name)
        if limit is None:
            continue
        used = _whole(folder / used_name)
        if used is None:
            return limit, limit
        given_back = 0
        for line in (_read(folder / "memory.stat") or "").splitlines():
            name, _, size = line.partition(" ")
            if name == reclaimable and size.strip().isdecimal():
                given_back = int(size)
        return limit, max(0, limit - max(0, used - given_back))
    return None, None


def _whole(path: Path) -> int | None:
    """The number in a file; None for "max" and for what cannot be read."""
    text = (_read(path) or "").strip()
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _least(*sizes: int | None) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def _statvfs(path: Path) -> Any:
    return os.statvfs(path)


def _shared_memory(path: Path, statvfs: Callable[[Path], Any]) -> tuple[int | None, int | None]:
    try:
        answer = statvfs(path)
        return answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize
    except (OSError, ValueError, AttributeError):
        return None, None


def _usable_cpus() -> int | None:
    """The processors that this process may use, which is what the engine gets too."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def _cpu_count(count: Callable[[], int | None]) -> int | None:
    try:
        return count() or None
    except OSError:
        return None


def _listening_ports(folder: Path) -> tuple[int, ...]:
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        for line in (_read(folder / name) or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == _LISTEN:
                _, _, port = words[1].rpartition(":")
                try:
                    ports.add(int(port, 16))
                except ValueError:
                    continue
    return tuple(sorted(ports))
