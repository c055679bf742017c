"""Plays the driver's library: an object with pynvml's functions over cards that a test sets up and changes.

What a card lacks answers as a real one does, with NVML's error numbers. ``calls`` counts what was asked.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
NOT_SUPPORTED, TIMEOUT, LOST, NOT_FOUND = 3, 10, 15, 6


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 10: "Timeout", 15: "GPU is lost", 6: "Not Found"}.get(value, "Unknown"))
        self.value = value


class SimulatedCard:
    """One card; any attribute may be set to None, then it is not supported."""

    def __init__(self, index: int, **changes: Any) -> None:
        self.index = index
        self.uuid: str = f"GPU-{index:08d}"
        self.name: Any = "NVIDIA GeForce RTX 4090"
        self.total: int | None = 24 * GIB
        self.used: int = 20 * GIB
        self.reserved: int = GIB // 2
        self.gpu: int | None = 80
        self.memory: int = 50
        self.power: int | None = 310_000
        self.limit: int | None = 450_000
        self.temperature: int | None = 66
        self.sm_clock: int | None = 2520
        self.memory_clock: int | None = 10501
        self.reasons: int | None = 0
        self.ecc: int | None = None
        self.tx: float | None = 40e6  # bytes a second, as the counters grow
        self.rx: float = 80e6
        self.throughput: tuple[int, int] | None = (40_000, 80_000)  # KiB/s sent, received
        self.links: list[int] | None = None
        self.events: list[int] | None = []
        self.processes: list[tuple[int, int | None]] | None = []
        self.lost = False
        for name, value in changes.items():
            assert hasattr(self, name), name
            setattr(self, name, value)


class SimulatedNvml:
    """``cards``: what the driver sees. ``driver`` False: none answers. ``fields`` False: an old library."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028  # noqa: N815 - pynvml's names from here on
    nvmlEventTypeXidCriticalError = 8  # noqa: N815
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, *cards: SimulatedCard, driver: bool = True, fields: bool = True) -> None:
        self.cards = list(cards)
        self.driver = driver
        self.fields = fields
        self.calls: Counter[str] = Counter()
        self.names: dict[int, str] = {}
        self._listening: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("nvmlDevice", "nvmlSystem")):
            object.__getattribute__(self, "calls")[name] += 1
            if name == "nvmlDeviceGetFieldValues" and not object.__getattribute__(self, "fields"):
                raise AttributeError(name)
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise NVMLError(9)

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> SimulatedCard:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: SimulatedCard) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetName(self, card: SimulatedCard) -> Any:  # noqa: N802
        return card.name

    def nvmlDeviceGetMigMode(self, card: SimulatedCard) -> Any:  # noqa: N802
        raise NVMLError(NOT_SUPPORTED)

    def nvmlDeviceGetMemoryInfo(self, card: SimulatedCard, version: int | None = None) -> Any:  # noqa: N802
        total = _told(card, card.total)
        if version is None:
            used = card.used + card.reserved
            return SimpleNamespace(total=total, used=used, free=total - used)
        free = total - card.used - card.reserved
        return SimpleNamespace(total=total, used=card.used, free=free, reserved=card.reserved)

    def nvmlDeviceGetUtilizationRates(self, card: SimulatedCard) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=_told(card, card.gpu), memory=card.memory)

    def nvmlDeviceGetPowerUsage(self, card: SimulatedCard) -> Any:  # noqa: N802
        return _told(card, card.power)

    def nvmlDeviceGetEnforcedPowerLimit(self, card: SimulatedCard) -> Any:  # noqa: N802
        return _told(card, card.limit)

    def nvmlDeviceGetTemperature(self, card: SimulatedCard, sensor: int) -> Any:  # noqa: N802
        return _told(card, card.temperature)

    def nvmlDeviceGetClockInfo(self, card: SimulatedCard, kind: int) -> Any:  # noqa: N802
        return _told(card, card.sm_clock if kind == 1 else card.memory_clock)

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: SimulatedCard) -> Any:  # noqa: N802
        return _told(card, card.reasons)

    def nvmlDeviceGetTotalEccErrors(self, card: SimulatedCard, kind: int, counter: int) -> Any:  # noqa: N802
        return _told(card, card.ecc)

    def nvmlDeviceGetFieldValues(self, card: SimulatedCard, fields: list[int]) -> list[Any]:  # noqa: N802
        assert fields == [197, 198]
        if card.tx is None:
            return [SimpleNamespace(nvmlReturn=NOT_SUPPORTED) for _ in fields]
        now = time.monotonic()
        return [
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=int(_told(card, rate) * now) % (1 << 32)))
            for rate in (card.tx, card.rx)
        ]

    def nvmlDeviceGetPcieThroughput(self, card: SimulatedCard, way: int) -> Any:  # noqa: N802
        return _told(card, card.throughput)[way]

    def nvmlDeviceGetNvLinkState(self, card: SimulatedCard, link: int) -> Any:  # noqa: N802
        links = _told(card, card.links)
        if link >= len(links):
            raise NVMLError(2)
        return links[link]

    def nvmlDeviceGetComputeRunningProcesses(self, card: SimulatedCard) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in _told(card, card.processes)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: SimulatedCard) -> list[Any]:  # noqa: N802
        _told(card, card.processes)
        return []

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:  # noqa: N802
        if pid not in self.names:
            raise NVMLError(NOT_FOUND)
        return self.names[pid].encode()

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        return object()

    def nvmlDeviceRegisterEvents(self, card: SimulatedCard, kinds: int, events: object) -> None:  # noqa: N802
        _told(card, card.events)
        self._listening.add(card.index)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:  # noqa: N802
        assert timeout_ms == 0
        for card in self.cards:
            if card.index in self._listening and card.events:
                return SimpleNamespace(device=card, eventData=card.events.pop(0))
        raise NVMLError(TIMEOUT)


def _told(card: SimulatedCard, value: Any) -> Any:
    if card.lost:
        raise NVMLError(LOST)
    if value is None:
        raise NVMLError(NOT_SUPPORTED)
    return value


def eight_cards(processes_each: int = 2) -> SimulatedNvml:
    """A server of eight with everything that cards tell, and processes on each."""
    numbers = itertools.count(100_000)
    cards = [
        SimulatedCard(
            index,
            name="NVIDIA H200",
            total=141 * GIB,
            used=130 * GIB,
            ecc=0,
            links=[1] * 18,
            processes=[(next(numbers), 65 * GIB) for _ in range(processes_each)],
        )
        for index in range(8)
    ]
    library = SimulatedNvml(*cards)
    library.names = {pid: "VLLM::Worker" for card in cards for pid, _ in card.processes or ()}
    return library
