"""Host facts from stand-in /proc files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from loadmaster.core.facts import GIB, HostFacts
from loadmaster.edge.host import read_host

MEMINFO = """\
MemTotal:       131900000 kB
MemFree:         1000000 kB
MemAvailable:   65950000 kB
HugePages_Total:       0
"""
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 11 1
   1: 0100007F:A1B2 0100007F:1F40 01 00000000:00000000 00:00000000 00000000  1000        0 12 1
   2: broken
   3: 00000000:ZZZZ 00000000:0000 0A
"""
TCP6 = """\
  sl  local_address                         remote_address                        st
   0: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 0 0 0 0 0 0
   1: 00000000000000000000000000000000:1F40 00000000000000000000000000000000:0000 0A 0 0 0 0 0 0
"""


def test_reads_the_kernels_files(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TCP)
    (tmp_path / "net" / "tcp6").write_text(TCP6)

    def statvfs(path: Path) -> Any:
        assert path == Path("/shm")
        return SimpleNamespace(f_blocks=16384, f_bavail=8192, f_frsize=4096)

    facts = read_host(tmp_path, Path("/shm"), tmp_path / "cgroup", statvfs=statvfs, cpu_count=lambda: 12)
    assert facts == HostFacts(
        memory_total_bytes=131900000 * 1024,
        memory_available_bytes=65950000 * 1024,
        shm_total_bytes=16384 * 4096,
        shm_free_bytes=8192 * 4096,
        cpu_count=12,
        ports_in_use=(22, 8000),
    )


def test_nothing_readable_is_nothing_known(tmp_path: Path) -> None:
    def fail(*_: object) -> Any:
        raise PermissionError

    assert (
        read_host(tmp_path / "none", tmp_path / "none", tmp_path / "cgroup", statvfs=fail, cpu_count=fail)
        == HostFacts()
    )


def test_this_machine() -> None:
    facts = read_host()
    assert facts.memory_total_bytes is None or facts.memory_total_bytes > GIB // 8
    assert facts.cpu_count is None or facts.cpu_count >= 1


def _host(tmp_path: Path) -> HostFacts:
    (tmp_path / "meminfo").write_text(MEMINFO)
    return read_host(tmp_path, tmp_path / "none", tmp_path / "cgroup")


def test_a_containers_memory_limit_caps_the_machines(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "memory.max").write_text(f"{16 * GIB}\n")
    (group / "memory.current").write_text(f"{6 * GIB}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    facts = _host(tmp_path)
    assert (facts.memory_total_bytes, facts.memory_available_bytes) == (16 * GIB, 12 * GIB)


def test_the_limit_of_the_first_version_of_control_groups(tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{8 * GIB}")
    (group / "memory.usage_in_bytes").write_text(f"{3 * GIB}")
    facts = _host(tmp_path)
    assert (facts.memory_total_bytes, facts.memory_available_bytes) == (8 * GIB, 5 * GIB)


def test_no_limit_leaves_what_the_machine_has(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    for text in ("max", str((1 << 63) - 4096), "broken", ""):
        (group / "memory.max").write_text(text)
        assert _host(tmp_path).memory_total_bytes == 131900000 * 1024
        assert _host(tmp_path).memory_available_bytes == 65950000 * 1024
