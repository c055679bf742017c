"""Live readings of all cards through NVML, second after second, as cheaply as they can be had.

Every call may be unsupported: by a card, a driver, a container. What a card does not support is not asked again; what
fails for another reason is asked again next time. Nothing here raises for what a driver does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from loadmaster.core.observation import CardReading, ProcessReading
from loadmaster.core.tables import load_toml
from loadmaster.edge.gpus import GpuSpecError, open_devices

# NVML's own numbers, which no release has changed
_NOT_SUPPORTED = (3, 13)  # by the device; by this driver's library
_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0
_UNCORRECTED, _SINCE_BOOT = 1, 0
_PCIE_TX, _PCIE_RX = 197, 198  # fields: bytes so far
_MHZ = 1_000_000
_SAMPLE_S = 0.04  # full counters only beyond 100 GB/s
_MOST_LINKS = 18
_MOST_EVENTS = 64
_MOST_XIDS = 256
_LOST = 15


@cache
def _throttle_reasons() -> tuple[tuple[int, str], ...]:
    return tuple((row["bit"], row["name"]) for row in load_toml("throttle-reasons.toml")["reason"])


class CardSampler:
    """Keeps the driver's library open. Not for several threads at once.

    ``library``: an object with pynvml's functions; ``environ``: which cards are seen and how they are numbered.
    ``problem``: a sentence, why there are no readings; None while there are.
    """

    def __init__(self, library: Any = None, environ: Mapping[str, str] | None = None) -> None:
        self._library = library
        self._environ = os.environ if environ is None else environ
        self._cards: list[_Card] | None = None
        self._events: Any = None
        self._names: dict[int, str | None] = {}
        self._turn = 0
        self.problem: str | None = "the cards were not looked at yet"

    def read(self) -> tuple[CardReading, ...] | None:
        """All cards; None when there is no driver or no card. Whose a process is, is not told here."""
        if self._cards is None and not self._open():
            return None
        self._take_events()
        cards = self._cards or []
        self._turn += 1
        readings = tuple(card.read(self._name, measure=self._turn % len(cards) == card.index) for card in cards)
        self._names = {pid: name for pid, name in self._names.items() if any(pid in card.pids for card in cards)}
        lost = [card.index for card in cards if card.lost]
        self.problem = f"card {lost[0]} does not answer: the driver has lost it" if lost else None
        return readings

    def close(self) -> None:
        if self._cards is None:
            return
        self._cards = None
        with contextlib.suppress(Exception):
            self._library.nvmlShutdown()

    def _open(self) -> bool:
        if self._library is None:
            try:
                self._library = importlib.import_module("pynvml")
            except ImportError:
                self.problem = "the package nvidia-ml-py is not installed"
                return False
        try:
            self._library.nvmlInit()
        except Exception as error:  # NVMLError, or OSError from a broken library file
            self.problem = f"no NVIDIA driver answers here ({error})"
            return False
        try:
            handles = open_devices(self._library, self._environ)
        except GpuSpecError as error:
            self.problem = str(error)
            with contextlib.suppress(Exception):
                self._library.nvmlShutdown()
            return False
        self._cards = [_Card(self._library, index, handle) for index, handle in enumerate(handles)]
        self._register()
        return True

    def _register(self) -> None:
        """Ask the driver for its error events; cards that have none keep ``xid`` None."""
        library = self._library
        try:
            self._events = library.nvmlEventSetCreate()
        except Exception:
            return
        for card in self._cards or ():
            with contextlib.suppress(Exception):
                library.nvmlDeviceRegisterEvents(card.handle, library.nvmlEventTypeXidCriticalError, self._events)
                card.xid = ()

    def _take_events(self) -> None:
        if self._events is None or all(card.xid is None for card in self._cards or ()):
            return
        for _ in range(_MOST_EVENTS):
            try:
                event = self._library.nvmlEventSetWait_v2(self._events, 0)
                uuid = _text(self._library.nvmlDeviceGetUUID(event.device))
                number = int(event.eventData)
            except Exception:  # the time is up: there is none
                return
            for card in self._cards or ():
                if card.uuid == uuid and card.xid is not None:
                    card.xid = (*card.xid, number)[-_MOST_XIDS:]

    def _name(self, pid: int) -> str | None:
        if pid not in self._names:
            name = None
            with contextlib.suppress(Exception):
                name = _text(self._library.nvmlSystemGetProcessName(pid))
            self._names[pid] = name
        return self._names[pid]


class _Card:
    """One card: what never changes, and what it does not support."""

    def __init__(self, library: Any, index: int, handle: Any) -> None:
        self.library = library
        self.index = index
        self.handle = handle
        self.xid: tuple[int, ...] | None = None
        self.pids: set[int] = set()
        self.lost = False
        self._unsupported: set[str] = set()
        self._throughput: tuple[int | None, int | None] = (None, None)
        self._has_fields = hasattr(library, "nvmlDeviceGetFieldValues")
        self.uuid = _text(self._ask("nvmlDeviceGetUUID"))
        self.name = _text(self._ask("nvmlDeviceGetName"))
        self._reasons = next(
            (
                name
                for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
                if self._ask(name) is not None
            ),
            None,
        )
        self._memory_version = getattr(library, "nvmlMemory_v2", None)
        self.nvlink = self._nvlink()

    def read(self, name_of: Callable[[int], str | None], *, measure: bool) -> CardReading:
        """``measure``: it is this card's turn for what takes the driver a while."""
        ask = self._ask
        self.lost = False
        total, used, free, reserved = self._memory()
        rates = ask("nvmlDeviceGetUtilizationRates")
        power, limit = _count(ask("nvmlDeviceGetPowerUsage")), _count(ask("nvmlDeviceGetEnforcedPowerLimit"))
        sm = _count(ask("nvmlDeviceGetClockInfo", _CLOCK_SM))
        memory = _count(ask("nvmlDeviceGetClockInfo", _CLOCK_MEMORY))
        received, sent = self._traffic(measure)
        return CardReading(
            index=self.index,
            uuid=self.uuid,
            name=self.name,
            total_bytes=total,
            used_bytes=used,
            free_bytes=free,
            reserved_bytes=reserved,
            utilization=_share(getattr(rates, "gpu", None)),
            memory_utilization=_share(getattr(rates, "memory", None)),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            temperature_c=_count(ask("nvmlDeviceGetTemperature", _TEMPERATURE_GPU)),
            sm_clock_hz=None if sm is None else sm * _MHZ,
            memory_clock_hz=None if memory is None else memory * _MHZ,
            throttle_reasons=self._throttling(),
            ecc_uncorrected=_count(ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_BOOT)),
            xid=self.xid,
            pcie_rx_bytes_per_s=received,
            pcie_tx_bytes_per_s=sent,
            nvlink=self.nvlink,
            processes=self._processes(name_of),
        )

    def _ask(self, call: str, *arguments: Any, **named: Any) -> Any:
        """The call's answer, None when there is none."""
        key = f"{call}{arguments}" if arguments else call
        if key in self._unsupported:
            return None
        try:
            return getattr(self.library, call)(self.handle, *arguments, **named)
        except Exception as error:
            number = getattr(error, "value", None)
            if number in _NOT_SUPPORTED or isinstance(error, AttributeError):
                self._unsupported.add(key)
            elif number == _LOST:
                self.lost = True
            return None

    def _memory(self) -> tuple[int | None, int | None, int | None, int | None]:
        answer = None
        if self._memory_version is not None:
            answer = self._ask("nvmlDeviceGetMemoryInfo", version=self._memory_version)
            if answer is None and "nvmlDeviceGetMemoryInfo" in self._unsupported:
                self._memory_version = None
                self._unsupported.discard("nvmlDeviceGetMemoryInfo")
        if answer is None:
            answer = self._ask("nvmlDeviceGetMemoryInfo")
        total, used, free, reserved = (
            _count(getattr(answer, name, None)) for name in ("total", "used", "free", "reserved")
        )
        return total or None, used, free, reserved

    def _throttling(self) -> tuple[str, ...] | None:
        bits = None if self._reasons is None else _count(self._ask(self._reasons))
        return None if bits is None else tuple(name for bit, name in _throttle_reasons() if bits & bit)

    def _traffic(self, measure: bool) -> tuple[int | None, int | None]:
        """Bytes a second received and sent over PCIe, in a sample of some milliseconds when it was measured last.

        The card's counters have 32 bits: they are full after a fraction of a second of heavy traffic, so the growth
        over a whole second says nothing. Where there are none the driver's own call samples for 20 ms each way.
        """
        if not measure:
            return self._throughput
        if self._has_fields:
            first = self._counters()
            if first is not None:
                time.sleep(_SAMPLE_S)
                last = self._counters()
                self._throughput = (None, None) if last is None else _rates(first, last)
                return self._throughput
        sent, received = (_count(self._ask("nvmlDeviceGetPcieThroughput", way)) for way in (0, 1))
        self._throughput = (_kib(received), _kib(sent))
        return self._throughput

    def _counters(self) -> tuple[float, int, int] | None:
        """When, bytes received and bytes sent so far, modulo 2^32."""
        fields = self._ask("nvmlDeviceGetFieldValues", [_PCIE_TX, _PCIE_RX])
        now = time.monotonic()
        try:
            sent, received = fields
            if sent.nvmlReturn or received.nvmlReturn:
                self._has_fields = sent.nvmlReturn not in _NOT_SUPPORTED
                return None
            return now, int(received.value.ullVal), int(sent.value.ullVal)
        except (TypeError, ValueError, AttributeError):
            self._has_fields = False
            return None

    def _processes(self, name_of: Callable[[int], str | None]) -> tuple[ProcessReading, ...] | None:
        found: dict[int, ProcessReading] = {}
        answered = False
        for call in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            answer = self._ask(call)
            if answer is None:
                continue
            answered = True
            for process in answer:
                pid = _count(getattr(process, "pid", None))
                if pid is not None and pid not in found:
                    used = _count(getattr(process, "usedGpuMemory", None))
                    found[pid] = ProcessReading(pid, name_of(pid), used)
        self.pids = set(found)
        return tuple(found.values()) if answered else None

    def _nvlink(self) -> bool | None:
        """Whether a link is up; False when there is none; None when the driver cannot tell."""
        states = []
        for link in range(_MOST_LINKS):
            state = self._ask("nvmlDeviceGetNvLinkState", link)
            if state is None:
                break
            if state == 1:
                return True
            states.append(state)
        if states or any(key.startswith("nvmlDeviceGetNvLinkState") for key in self._unsupported):
            return False
        return None


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    """A non-negative integer, or None (NVML's "not available" is all ones)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _rates(first: tuple[float, int, int], last: tuple[float, int, int]) -> tuple[int, int]:
    passed = max(1e-3, last[0] - first[0])
    received, sent = ((after - before) % (1 << 32) for before, after in zip(first[1:], last[1:]))
    return round(received / passed), round(sent / passed)


def _kib(count: int | None) -> int | None:
    return None if count is None else count * 1024


def _share(percent: Any) -> float | None:
    count = _count(percent)
    return None if count is None else min(count, 100) / 100
