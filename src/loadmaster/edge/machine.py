"""What decides which engine release can be installed here: driver, cards, Python, C library, processor."""

from __future__ import annotations

import contextlib
import importlib
import platform
import sys
from typing import Any

from loadmaster.core.enginechoice import Machine
from loadmaster.edge.environments import python_version
from loadmaster.edge.gpus import GpuSpecError, read_nvml


def read_machine(python: str = sys.executable) -> Machine:
    """This machine with the interpreter that an environment would be made with; what cannot be read is None."""
    capabilities: list[tuple[int, int]] = []
    with contextlib.suppress(GpuSpecError):
        capabilities = [card.compute_capability for card in read_nvml() if card.compute_capability is not None]
    library, version = platform.libc_ver()
    return Machine(
        driver=_driver(),
        compute_capability=min(capabilities, default=None),
        python=sys.version_info[:2] if python == sys.executable else python_version(python),
        glibc=version if library == "glibc" and version else None,
        machine=platform.machine() or None,
        system=platform.system(),
    )


def _driver() -> str | None:
    """The NVIDIA driver's version, such as ``580.95.05``; None without one."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return None
    try:
        version = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return version.decode("ascii", "replace") if isinstance(version, bytes) else str(version)
