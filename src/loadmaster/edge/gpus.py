"""The cards of this machine through NVML, of a recording, or of a specification.

NVML counts memory that CUDA never sees. vLLM works with CUDA's total, so it is estimated here as NVML's total
less what NVML calls reserved; both are kept.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadmaster.core.facts import MIB, GpuFacts, GpuProcess
from loadmaster.core.gputable import (
    MAX_CARDS,
    GpuSpecError,
    card_facts,
    find_card,
    parse_gpu_spec,
    typical_driver_reserve,
)
from loadmaster.edge.regularfile import open_to_read

__all__ = ["GpuSpecError", "open_devices", "read_nvml", "read_recording", "record", "resolve_gpus"]

RECORDING_LIMIT_BYTES = 4 * MIB
_GIVE_A_SPEC = "name the cards instead, for example --gpus 2xRTX4090 or --gpus 2x24GiB"
# NVML's own numbers; the Python binding spells the first one as a tuple, so they are written out here
_P2P_READ, _P2P_WRITE, _P2P_OK = 0, 1, 0
_CLOCK_MEMORY = 2
_ENABLED = 1


def resolve_gpus(spec: str) -> tuple[GpuFacts, ...]:
    """The cards that ``--gpus SPEC`` means: ``auto`` (NVML), a recorded JSON file, or names and sizes.

    Raises :class:`GpuSpecError` with a hint when there are none or they cannot be understood.
    """
    text = spec.strip()
    if text.lower() == "auto":
        return read_nvml()
    if text.lower().endswith(".json") or "/" in text:
        return read_recording(Path(text).expanduser())
    try:
        return parse_gpu_spec(text)
    except GpuSpecError:
        if text and _is_file(Path(text)):
            return read_recording(Path(text))
        raise


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


# ---------------------------------------------------------------------------------------------- recordings


def record(gpus: Sequence[GpuFacts]) -> dict[str, Any]:
    """What ``loadmaster gpus --json`` prints: an object that :func:`read_recording` gives back unchanged."""
    return {"schema": 1, "gpus": msgspec.to_builtins(list(gpus))}


class _Recording(msgspec.Struct):
    gpus: tuple[GpuFacts, ...]
    schema: int = 1


def read_recording(path: Path) -> tuple[GpuFacts, ...]:
    """The cards of a file that holds :func:`record`'s object, each with source ``recording``.

    Raises :class:`GpuSpecError` when the file is missing, too large, not such an object, or has no usable card.
    """
    hint = "make one with: loadmaster gpus --json > cards.json"
    try:
        with open_to_read(path) as file:
            raw = file.read(RECORDING_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise GpuSpecError(f"cannot read the recorded cards in {str(path)!r}: {reason}", hint) from error
    if len(raw) > RECORDING_LIMIT_BYTES:
        raise GpuSpecError(f"{str(path)!r} is over {RECORDING_LIMIT_BYTES // MIB} MiB, not a recording of cards", hint)
    try:
        recording = msgspec.json.decode(raw, type=_Recording)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GpuSpecError(f"{str(path)!r} is not a recording of cards: {error}", hint) from error
    if recording.schema != 1:
        raise GpuSpecError(f"{str(path)!r} has schema {recording.schema}, only 1 is known", hint)
    if not recording.gpus or len(recording.gpus) > MAX_CARDS:
        raise GpuSpecError(f"{str(path)!r} has {len(recording.gpus)} cards, 1 to {MAX_CARDS} can be planned", hint)
    for gpu in recording.gpus:
        if gpu.total_bytes <= 0:
            raise GpuSpecError(f"card {gpu.index} in {str(path)!r} has no memory (total_bytes {gpu.total_bytes})", hint)
    return tuple(msgspec.structs.replace(gpu, index=n, source="recording") for n, gpu in enumerate(recording.gpus))


# ---------------------------------------------------------------------------------------------- NVML


def read_nvml(library: Any = None, environ: Mapping[str, str] | None = None) -> tuple[GpuFacts, ...]:
    """The cards that a CUDA program started here would see, with free memory and processes.

    ``library``: an object with pynvml's functions, by default pynvml. ``environ``: where CUDA_VISIBLE_DEVICES and
    CUDA_DEVICE_ORDER are looked up, by default the process's. Cards are numbered as the engine numbers them.
    Raises :class:`GpuSpecError` when no driver answers, no card is visible, or a card's memory stays unknown.
    """
    environ = os.environ if environ is None else environ
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError as error:
            raise GpuSpecError("the package nvidia-ml-py is not installed", _GIVE_A_SPEC) from error
    try:
        library.nvmlInit()
    except Exception as error:  # NVMLError, or OSError from a broken library file
        raise GpuSpecError(f"no NVIDIA driver answers here (NVML: {error})", _GIVE_A_SPEC) from error
    try:
        return _Reader(library, environ).cards()
    finally:
        _try(library.nvmlShutdown)


def open_devices(library: Any, environ: Mapping[str, str]) -> list[Any]:
    """The library's handles of the cards that a CUDA program with this environment would see, in its order.

    ``library``: initialised. A card in MIG mode stands for its first instance. Raises :class:`GpuSpecError` when
    there are none.
    """
    return _Reader(library, environ).devices()


def _try(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The call's answer, or None: any NVML call may be unsupported on a card, a driver or a container."""
    try:
        return call(*arguments, **named)
    except Exception:
        return None


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    """A non-negative integer, or None (NVML's "not available" is all ones, over 2^63)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


class _Reader:
    """One pass over the cards of an initialised library."""

    def __init__(self, library: Any, environ: Mapping[str, str]) -> None:
        self.library = library
        self.environ = environ

    def cards(self) -> tuple[GpuFacts, ...]:
        chosen = self._chosen()
        facts = [self._card(place, number, handle) for place, (number, handle) in enumerate(chosen)]
        facts = self._with_peers(facts, [handle for _, handle in chosen])
        return self._with_order_note(facts)

    def devices(self) -> list[Any]:
        found = []
        for number, handle in self._chosen():
            instances = self._mig_instances(handle) if number >= 0 and self._mig_enabled(handle) else []
            found.append(instances[0] if instances else handle)
        return found

    def _chosen(self) -> list[tuple[int, Any]]:
        count = _count(_try(self.library.nvmlDeviceGetCount))
        if not count:
            raise GpuSpecError("the NVIDIA driver reports no card", _GIVE_A_SPEC)
        handles = {n: handle for n in range(count) if (handle := self._handle(n)) is not None}
        chosen = self._visible(handles)
        if not chosen:
            shown = self.environ.get("CUDA_VISIBLE_DEVICES")
            if shown is not None:
                raise GpuSpecError(
                    f"CUDA_VISIBLE_DEVICES={shown!r} leaves none of the {count} cards visible",
                    "unset CUDA_VISIBLE_DEVICES, or " + _GIVE_A_SPEC,
                )
            raise GpuSpecError(f"the NVIDIA driver reports {count} cards, but none can be opened", _GIVE_A_SPEC)
        return chosen

    def _handle(self, number: int) -> Any:
        return _try(self.library.nvmlDeviceGetHandleByIndex, number)

    def _visible(self, handles: dict[int, Any]) -> list[tuple[int, Any]]:
        """Number and handle of the cards that CUDA_VISIBLE_DEVICES leaves, in its order.

        As CUDA reads it: numbers or the beginnings of UUIDs; whatever stands after the first invalid entry
        is ignored. A MIG instance is opened by its full UUID.
        """
        setting = self.environ.get("CUDA_VISIBLE_DEVICES")
        if setting is None:
            return list(handles.items())
        uuids = {number: _text(_try(self.library.nvmlDeviceGetUUID, handle)) for number, handle in handles.items()}
        chosen: list[tuple[int, Any]] = []
        for entry in (part.strip() for part in setting.split(",")):
            found: tuple[int, Any] | None = None
            if entry.isascii() and entry.isdigit() and len(entry) < 6 and int(entry) in handles:
                found = (int(entry), handles[int(entry)])
            elif entry.startswith("MIG-"):
                instance = _try(self.library.nvmlDeviceGetHandleByUUID, entry)
                found = None if instance is None else (-1, instance)
            elif entry.startswith("GPU-") and len(entry) > 4:
                matching = [number for number, uuid in uuids.items() if uuid and uuid.startswith(entry)]
                found = (matching[0], handles[matching[0]]) if len(matching) == 1 else None
            if found is None:
                break
            chosen.append(found)
        return chosen

    def _card(self, place: int, number: int, handle: Any) -> GpuFacts:
        notes: list[str] = []
        name = _text(_try(self.library.nvmlDeviceGetName, handle))
        if number < 0:
            notes.append("a MIG instance")
        elif self._mig_enabled(handle):
            instances = self._mig_instances(handle)
            if not instances:
                raise GpuSpecError(
                    f"card {number} ({name or 'unnamed'}) is in MIG mode and has no MIG instance",
                    "create one with nvidia-smi mig -cgi, or " + _GIVE_A_SPEC,
                )
            notes.append(
                f"the first of {len(instances)} MIG instances of card {number}; a CUDA process can use one of them"
            )
            handle, number = instances[0], -1
            name = _text(_try(self.library.nvmlDeviceGetName, handle)) or name
        elif number != place:
            notes.append(f"card {number} of the driver")
        capability = _try(self.library.nvmlDeviceGetCudaComputeCapability, handle)
        driver_total: int | None
        memory = self._memory(handle)
        total_by_driver = None if memory is None else memory[0]
        card = find_card(name, total_by_driver) if name and number >= 0 else None
        if memory is not None:
            driver_total, free, reserved = memory
            if reserved is None:
                total = driver_total - typical_driver_reserve()
                notes.append(
                    f"what CUDA sees is assumed: NVML's total less {typical_driver_reserve() // MIB} MiB, "
                    "since this driver does not say what it reserves"
                )
            else:
                total = driver_total - reserved
        else:
            known = find_card(name) if name else None
            if known is None:
                raise GpuSpecError(f"the driver does not tell the memory of card {place} ({name})", _GIVE_A_SPEC)
            from_table = card_facts(known, place)
            total, driver_total, free, card = from_table.total_bytes, from_table.driver_total_bytes, None, known
            notes.append("the driver does not tell its memory; the total is the table's")
        bandwidth = None if card is None else card.bandwidth_gb_per_s
        return GpuFacts(
            index=place,
            name=name,
            total_bytes=total,
            driver_total_bytes=driver_total,
            free_bytes=None if free is None else min(free, total),
            compute_capability=_pair(capability) or (card.compute_capability if card else None),
            bandwidth_bytes_per_s=self._bandwidth(handle) if bandwidth is None else round(bandwidth * 1e9),
            sm_count=card.sm_count if card else None,
            nvlink=self._nvlink(handle),
            uuid=_text(_try(self.library.nvmlDeviceGetUUID, handle)),
            processes=self._processes(handle),
            source="nvml",
            note="; ".join(notes) or None,
        )

    def _memory(self, handle: Any) -> tuple[int, int | None, int | None] | None:
        """Total, free and reserved bytes; reserved None from drivers before the second version of the call."""
        version = getattr(self.library, "nvmlMemory_v2", None)
        answer = None
        if version is not None:
            answer = _try(self.library.nvmlDeviceGetMemoryInfo, handle, version=version)
        reserved = None if answer is None else _count(getattr(answer, "reserved", None))
        if answer is None:
            answer = _try(self.library.nvmlDeviceGetMemoryInfo, handle)
        total = None if answer is None else _count(getattr(answer, "total", None))
        if not total:
            return None
        if reserved is not None and reserved >= total:
            reserved = None
        return total, _count(getattr(answer, "free", None)), reserved

    def _bandwidth(self, handle: Any) -> int | None:
        """Bytes a second: two transfers a clock over the memory bus, as NVML tells clock (MHz) and width (bits)."""
        width = _count(_try(self.library.nvmlDeviceGetMemoryBusWidth, handle))
        clock = _count(_try(self.library.nvmlDeviceGetMaxClockInfo, handle, _CLOCK_MEMORY))
        return clock * 1_000_000 * 2 * width // 8 if width and clock else None

    def _nvlink(self, handle: Any) -> bool | None:
        """Whether a link is up: True, False when the card has none or none is up, None when NVML cannot tell."""
        not_supported = getattr(self.library, "NVML_ERROR_NOT_SUPPORTED", 3)
        answered = False
        for link in range(getattr(self.library, "NVML_NVLINK_MAX_LINKS", 18)):
            try:
                state = self.library.nvmlDeviceGetNvLinkState(handle, link)
            except Exception as error:
                if not answered and getattr(error, "value", None) != not_supported:
                    return None
                return False
            answered = True
            if state == _ENABLED:
                return True
        return False if answered else None

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        found: dict[int, GpuProcess] = {}
        answered = False
        for call in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            answer = _try(getattr(self.library, call), handle) if hasattr(self.library, call) else None
            if answer is None:
                continue
            answered = True
            for process in answer:
                pid = _count(getattr(process, "pid", None))
                if pid is None or pid in found:
                    continue
                name = _text(_try(self.library.nvmlSystemGetProcessName, pid))
                found[pid] = GpuProcess(pid, name, _count(getattr(process, "usedGpuMemory", None)))
        return tuple(found.values()) if answered else None

    def _mig_enabled(self, handle: Any) -> bool:
        mode = _try(self.library.nvmlDeviceGetMigMode, handle)
        return bool(mode) and mode[0] == _ENABLED

    def _mig_instances(self, handle: Any) -> list[Any]:
        most = _count(_try(self.library.nvmlDeviceGetMaxMigDeviceCount, handle)) or 0
        opened = (_try(self.library.nvmlDeviceGetMigDeviceHandleByIndex, handle, n) for n in range(min(most, 64)))
        return [instance for instance in opened if instance is not None]

    def _with_peers(self, facts: list[GpuFacts], handles: list[Any]) -> list[GpuFacts]:
        """Peer access of each card: True when it can read and write every other one, None when nobody can tell."""
        if len(facts) < 2:
            return facts
        out = []
        for here, fact in enumerate(facts):
            states = [
                _try(self.library.nvmlDeviceGetP2PStatus, handles[here], handles[there], kind)
                for there in range(len(facts))
                if there != here
                for kind in (_P2P_READ, _P2P_WRITE)
            ]
            refused = any(state is not None and state != _P2P_OK for state in states)
            peer = False if refused else (None if None in states else True)
            out.append(msgspec.structs.replace(fact, peer_access=peer))
        return out

    def _with_order_note(self, facts: list[GpuFacts]) -> tuple[GpuFacts, ...]:
        """CUDA numbers the fastest card first unless told otherwise, NVML by PCI address: with unequal cards
        the two can disagree."""
        unequal = len({(fact.name, fact.total_bytes) for fact in facts}) > 1
        setting = self.environ.get("CUDA_VISIBLE_DEVICES", "")
        by_number = any(part.strip().isdigit() for part in setting.split(",")) if setting else True
        if not unequal or not by_number or self.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            return tuple(facts)
        text = "CUDA may number these unequal cards in another order; CUDA_DEVICE_ORDER=PCI_BUS_ID fixes it"
        return tuple(
            msgspec.structs.replace(fact, note=text if fact.note is None else f"{fact.note}; {text}") for fact in facts
        )


def _pair(value: Any) -> tuple[int, int] | None:
    try:
        major, minor = value
    except (TypeError, ValueError):
        return None
    return (major, minor) if isinstance(major, int) and isinstance(minor, int) and major > 0 else None
