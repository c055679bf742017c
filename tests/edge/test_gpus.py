"""Cards from NVML (a stand-in with the binding's functions), from recordings and from specifications."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loadmaster.core.facts import GIB, MIB, GpuFacts, GpuProcess
from loadmaster.core.gputable import typical_driver_reserve
from loadmaster.edge.gpus import GpuSpecError, read_nvml, read_recording, record, resolve_gpus


class NvmlError(Exception):
    def __init__(self, value: int, text: str = "error") -> None:
        super().__init__(text)
        self.value = value


NOT_SUPPORTED = 3


class FakeNvml:
    """The part of pynvml that is used. A card is a dict; what it lacks raises "Not Supported"."""

    nvmlMemory_v2 = 0x02000028  # noqa: N815
    NVML_NVLINK_MAX_LINKS = 18
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED

    def __init__(self, *cards: dict[str, Any], peers: bool | None = None, old: bool = False) -> None:
        self.all = list(cards)
        self.peers = peers
        self.old = old
        self.shut = 0

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.all)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        return self.all[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:  # noqa: N802
        for card in self.all:
            for instance in card.get("instances", ()):
                if instance["uuid"] == uuid:
                    return instance  # type: ignore[no-any-return]
        raise NvmlError(6, "Not Found")

    def _get(self, card: dict[str, Any], key: str) -> Any:
        if key not in card:
            raise NvmlError(NOT_SUPPORTED, "Not Supported")
        return card[key]

    def nvmlDeviceGetName(self, card: dict[str, Any]) -> Any:  # noqa: N802
        return self._get(card, "name")

    def nvmlDeviceGetUUID(self, card: dict[str, Any]) -> Any:  # noqa: N802
        return self._get(card, "uuid")

    def nvmlDeviceGetCudaComputeCapability(self, card: dict[str, Any]) -> Any:  # noqa: N802
        return self._get(card, "capability")

    def nvmlDeviceGetMemoryInfo(self, card: dict[str, Any], version: int | None = None) -> Any:  # noqa: N802
        total, reserved, used = self._get(card, "memory")
        if version is not None:
            if self.old:
                raise NvmlError(13, "Function Not Found")
            return SimpleNamespace(total=total, reserved=reserved, used=used, free=total - reserved - used)
        return SimpleNamespace(total=total, used=used + reserved, free=total - reserved - used)

    def nvmlDeviceGetNvLinkState(self, card: dict[str, Any], link: int) -> int:  # noqa: N802
        links = self._get(card, "links")
        if link >= len(links):
            raise NvmlError(2, "Invalid Argument")
        return int(links[link])

    def nvmlDeviceGetComputeRunningProcesses(self, card: dict[str, Any]) -> Any:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._get(card, "compute")]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: dict[str, Any]) -> Any:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._get(card, "graphics")]

    def nvmlSystemGetProcessName(self, pid: int) -> Any:  # noqa: N802
        if pid == 13:
            raise NvmlError(4, "Insufficient Permissions")
        return f"/usr/bin/program-{pid}".encode()

    def nvmlDeviceGetP2PStatus(self, here: Any, there: Any, kind: int) -> int:  # noqa: N802
        assert isinstance(kind, int)
        if self.peers is None:
            raise NvmlError(NOT_SUPPORTED, "Not Supported")
        return 0 if self.peers else 5

    def nvmlDeviceGetMemoryBusWidth(self, card: dict[str, Any]) -> int:  # noqa: N802
        return int(self._get(card, "bus"))

    def nvmlDeviceGetMaxClockInfo(self, card: dict[str, Any], kind: int) -> int:  # noqa: N802
        assert kind == 2
        return int(self._get(card, "clock"))

    def nvmlDeviceGetMigMode(self, card: dict[str, Any]) -> Any:  # noqa: N802
        return [int("instances" in card), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: dict[str, Any]) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: dict[str, Any], index: int) -> Any:  # noqa: N802
        if index >= len(card["instances"]):
            raise NvmlError(6, "Not Found")
        return card["instances"][index]


def card(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "name": "NVIDIA GeForce RTX 4090",
        "uuid": f"GPU-{number:08d}-aaaa",
        "capability": (8, 9),
        "memory": (24564 * MIB, 483 * MIB, 1000 * MIB),
        "compute": [],
        "graphics": [],
        **changes,
    }


def test_cuda_total_is_nvml_total_less_reserved() -> None:
    library = FakeNvml(card(0), card(1), peers=False)
    gpus = read_nvml(library, {})
    assert [gpu.index for gpu in gpus] == [0, 1]
    first = gpus[0]
    assert first.total_bytes == (24564 - 483) * MIB
    assert first.driver_total_bytes == 24564 * MIB
    assert first.free_bytes == (24564 - 483 - 1000) * MIB
    assert first.compute_capability == (8, 9)
    assert first.bandwidth_bytes_per_s == 1010 * 10**9
    assert first.sm_count == 128
    assert first.peer_access is False
    assert first.nvlink is False
    assert first.source == "nvml"
    assert first.note is None
    assert library.shut == 1


def test_old_driver_without_the_reserved_figure() -> None:
    (gpu,) = read_nvml(FakeNvml(card(), old=True), {})
    assert gpu.total_bytes == 24564 * MIB - typical_driver_reserve()
    assert gpu.note is not None and "assumed" in gpu.note


def test_everything_unsupported_but_memory() -> None:
    (gpu,) = read_nvml(FakeNvml({"memory": (8 * GIB, 300 * MIB, 0)}), {})
    assert gpu == GpuFacts(
        index=0,
        total_bytes=8 * GIB - 300 * MIB,
        driver_total_bytes=8 * GIB,
        free_bytes=8 * GIB - 300 * MIB,
        nvlink=False,
        source="nvml",
    )


def test_unknown_card_gets_its_bandwidth_from_bus_and_clock() -> None:
    (gpu,) = read_nvml(FakeNvml(card(name="NVIDIA Future 1", bus=384, clock=10501)), {})
    assert gpu.bandwidth_bytes_per_s == 10501 * 10**6 * 2 * 384 // 8
    assert gpu.sm_count is None


def test_memory_that_the_driver_does_not_tell_comes_from_the_table() -> None:
    shared = card(name="NVIDIA GB10", capability=(12, 1))
    del shared["memory"]
    (gpu,) = read_nvml(FakeNvml(shared), {})
    assert gpu.total_bytes == 124610 * MIB
    assert gpu.free_bytes is None
    assert gpu.note is not None and "table" in gpu.note
    unknown = card(name="NVIDIA Future 1")
    del unknown["memory"]
    with pytest.raises(GpuSpecError, match="memory of card 0"):
        read_nvml(FakeNvml(unknown), {})


def test_processes_with_names_and_unknown_use() -> None:
    busy = card(compute=[(7, 5 * GIB), (13, None)], graphics=[(7, 5 * GIB), (9, 1 << 64)])
    (gpu,) = read_nvml(FakeNvml(busy), {})
    assert gpu.processes == (
        GpuProcess(7, "/usr/bin/program-7", 5 * GIB),
        GpuProcess(13, None, None),
        GpuProcess(9, "/usr/bin/program-9", None),
    )


def test_processes_are_unknown_when_nvml_does_not_list_them() -> None:
    quiet = card()
    del quiet["compute"], quiet["graphics"]
    (gpu,) = read_nvml(FakeNvml(quiet), {})
    assert gpu.processes is None


@pytest.mark.parametrize(("peers", "expected"), [(True, True), (False, False), (None, None)])
def test_peer_access(peers: bool | None, expected: bool | None) -> None:
    gpus = read_nvml(FakeNvml(card(0), card(1), peers=peers), {})
    assert {gpu.peer_access for gpu in gpus} == {expected}


@pytest.mark.parametrize(("links", "expected"), [([1, 1], True), ([0, 1], True), ([0, 0], False)])
def test_nvlink(links: list[int], expected: bool) -> None:
    (gpu,) = read_nvml(FakeNvml(card(links=links)), {})
    assert gpu.nvlink is expected


@pytest.mark.parametrize(
    ("setting", "numbers"),
    [
        ("1,0", [1, 0]),
        ("2", [2]),
        ("GPU-00000001", [1]),
        ("0,7,1", [0]),  # CUDA ignores what follows the first invalid entry
        (" 0 , 2 ", [0, 2]),
    ],
)
def test_cuda_visible_devices(setting: str, numbers: list[int]) -> None:
    library = FakeNvml(card(0), card(1), card(2))
    gpus = read_nvml(library, {"CUDA_VISIBLE_DEVICES": setting})
    assert [gpu.uuid for gpu in gpus] == [f"GPU-{n:08d}-aaaa" for n in numbers]
    assert [gpu.index for gpu in gpus] == list(range(len(numbers)))
    for gpu, number in zip(gpus, numbers, strict=True):
        assert (gpu.note is None) == (gpu.index == number)


@pytest.mark.parametrize("setting", ["", "-1", "9", "NoDevFiles", "GPU-"])
def test_no_visible_device(setting: str) -> None:
    with pytest.raises(GpuSpecError, match="leaves none of the 1 cards") as caught:
        read_nvml(FakeNvml(card()), {"CUDA_VISIBLE_DEVICES": setting})
    assert "--gpus" in (caught.value.hint or "")


def test_unequal_cards_may_be_numbered_otherwise_by_cuda() -> None:
    unequal = card(1, name="NVIDIA GeForce RTX 3090", memory=(24576 * MIB, 453 * MIB, 0), capability=(8, 6))
    gpus = read_nvml(FakeNvml(card(0), unequal), {})
    assert all("CUDA_DEVICE_ORDER" in (gpu.note or "") for gpu in gpus)
    gpus = read_nvml(FakeNvml(card(0), unequal), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert all(gpu.note is None for gpu in gpus)


def mig_card() -> dict[str, Any]:
    instances = [
        {"name": "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "uuid": f"MIG-{n}", "memory": (40448 * MIB, 0, 0)} for n in (0, 1)
    ]
    return card(
        name="NVIDIA A100-SXM4-80GB", memory=(81920 * MIB, 769 * MIB, 0), capability=(8, 0), instances=instances
    )


def test_mig() -> None:
    (gpu,) = read_nvml(FakeNvml(mig_card()), {})
    assert gpu.total_bytes == 40448 * MIB
    assert gpu.note is not None and "2 MIG instances" in gpu.note
    (gpu,) = read_nvml(FakeNvml(mig_card()), {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert gpu.uuid == "MIG-1"
    empty = mig_card()
    empty["instances"] = []
    with pytest.raises(GpuSpecError, match="no MIG instance"):
        read_nvml(FakeNvml(empty), {})


def test_no_driver() -> None:
    class Missing(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise NvmlError(12, "NVML Shared Library Not Found")

    with pytest.raises(GpuSpecError, match="Shared Library Not Found") as caught:
        read_nvml(Missing(), {})
    assert "--gpus 2x24GiB" in (caught.value.hint or "")
    with pytest.raises(GpuSpecError, match="reports no card"):
        read_nvml(FakeNvml(), {})


# ---------------------------------------------------------------------------------------------- recordings


def test_a_recording_comes_back(tmp_path: Path) -> None:
    gpus = read_nvml(FakeNvml(card(0, compute=[(7, GIB)]), card(1), peers=True), {})
    file = tmp_path / "cards.json"
    file.write_text(json.dumps(record(gpus)))
    assert json.loads(file.read_text())["schema"] == 1
    replayed = resolve_gpus(str(file))
    assert replayed == tuple(msgspec.structs.replace(gpu, source="recording") for gpu in gpus)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"gpus": []}', '{"gpus": [{"index": 0}]}', '{"gpus": [{"index": 0, "total_bytes": 0}]}',
     '{"schema": 2, "gpus": [{"index": 0, "total_bytes": 1}]}', '{"gpus": [{"index": 0, "total_bytes": "24GiB"}]}',
     '{"gpus": ' + "[" * 100_000, "\x00\xff"],
)  # fmt: skip
def test_broken_recordings(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cards.json"
    file.write_text(text)
    with pytest.raises(GpuSpecError) as caught:
        read_recording(file)
    assert "loadmaster gpus --json" in (caught.value.hint or "")


def test_missing_recording() -> None:
    with pytest.raises(GpuSpecError, match="No such file"):
        resolve_gpus("/nonexistent/cards.json")


def test_specifications_pass_through() -> None:
    assert [gpu.total_bytes for gpu in resolve_gpus("2x24GiB")] == [24 * GIB] * 2
    with pytest.raises(GpuSpecError):
        resolve_gpus("no such card\x00")
