"""How the cards of this machine hang together: driver, CUDA version, the path between each two, peer access."""

from __future__ import annotations

import importlib
from typing import Any

from msgspec import Struct

from loadmaster.core.machinereport import Link

# NVML's topology levels; the binding's numbers are those of nvml.h (nvmlGpuTopologyLevel_t)
_PATHS = {
    0: "the same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "the processors' own link",
}
_READ, _WRITE, _NVLINK, _OK = 0, 1, 2, 0  # nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t
_MOST_CARDS = 16


class Topology(Struct, frozen=True):
    driver: str | None = None
    cuda: str | None = None
    links: tuple[Link, ...] = ()
    unread: str | None = None


def read_topology(library: Any = None) -> Topology:
    """What NVML says; ``library``: an object with pynvml's functions. Without a driver all is unknown, and said."""
    try:
        nvml: Any = library if library is not None else importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:
        return Topology(unread=f"the NVIDIA driver's library does not answer ({error})")
    try:
        version = _call(nvml.nvmlSystemGetCudaDriverVersion_v2)
        cuda = f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) and version > 0 else None
        driver = _call(nvml.nvmlSystemGetDriverVersion)
        text = driver.decode("ascii", "replace") if isinstance(driver, bytes) else driver
        count = _call(nvml.nvmlDeviceGetCount)
        handles = [_call(nvml.nvmlDeviceGetHandleByIndex, place) for place in range(min(count or 0, _MOST_CARDS))]
        links = tuple(
            _link(nvml, first, second, handles[first], handles[second])
            for first in range(len(handles))
            for second in range(first + 1, len(handles))
            if handles[first] is not None and handles[second] is not None
        )
        return Topology(text if isinstance(text, str) else None, cuda, links)
    finally:
        _call(nvml.nvmlShutdown)


def _link(nvml: Any, first: int, second: int, here: Any, there: Any) -> Link:
    level = _call(nvml.nvmlDeviceGetTopologyCommonAncestor, here, there)
    return Link(
        first=first,
        second=second,
        path=_PATHS.get(level) if isinstance(level, int) else None,
        nvlink=_peer(nvml, here, there, _NVLINK),
        read=_peer(nvml, here, there, _READ),
        write=_peer(nvml, here, there, _WRITE),
    )


def _peer(nvml: Any, here: Any, there: Any, kind: int) -> bool | None:
    state = _call(nvml.nvmlDeviceGetP2PStatus, here, there, kind)
    return None if not isinstance(state, int) else state == _OK


def _call(function: Any, *arguments: Any) -> Any:
    """The answer, or None: any call may be unsupported on a card, a driver or in a container."""
    try:
        return function(*arguments)
    except Exception:
        return None
