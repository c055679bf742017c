"""How busy the cards of this machine are right now, through NVML."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from msgspec import Struct


class CardActivity(Struct, frozen=True):
    """``used_bytes``: by all processes, without what the driver reserves. ``busy_percent``: of NVML's last sample."""

    uuid: str
    used_bytes: int | None
    busy_percent: int | None


@contextlib.contextmanager
def open_cards(library: Any = None) -> Iterator[CardReader | None]:
    """A reader of the cards; None where there is no driver. ``library``: an object with pynvml's functions."""
    try:
        nvml = library if library is not None else importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, no card: each is "no reading"
        yield None
        return
    try:
        yield CardReader(nvml)
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


class CardReader:
    """Reads all cards; one that cannot be read is left out, a value that cannot be read is None."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def read(self) -> tuple[CardActivity, ...]:
        nvml = self._nvml
        found = []
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(place) for place in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError:
            return ()
        for handle in handles:
            try:
                uuid = nvml.nvmlDeviceGetUUID(handle)
            except nvml.NVMLError:
                continue
            used = busy = None
            with contextlib.suppress(nvml.NVMLError):
                used = int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
            with contextlib.suppress(nvml.NVMLError):
                busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            found.append(CardActivity(uuid.decode() if isinstance(uuid, bytes) else str(uuid), used, busy))
        return tuple(found)
