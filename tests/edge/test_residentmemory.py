"""Resident memory of processes: from a written /proc, and of this very process."""

from __future__ import annotations

import os
from pathlib import Path

from loadmaster.edge.residentmemory import resident_bytes


def test_it_adds_up_what_is_told(tmp_path: Path) -> None:
    for pid, text in ((1, "Name:\tone\nVmRSS:\t   2048 kB\n"), (2, "VmRSS:\t1024 kB\n"), (3, "Name:\tkernel thread\n")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(text)
    assert resident_bytes((1, 2, 3, 4), tmp_path) == 3072 << 10
    assert resident_bytes((3, 4), tmp_path) is None
    assert resident_bytes((), tmp_path) is None


def test_of_this_process() -> None:
    if Path("/proc/self/status").exists():
        held = resident_bytes([os.getpid()])
        assert held is not None
        assert held > 8 << 20
