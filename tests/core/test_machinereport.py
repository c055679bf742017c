"""What is wrong with a machine, from a report of it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from loadmaster.core.facts import GIB, MIB, GpuFacts, GpuProcess, HostFacts
from loadmaster.core.machinereport import (
    Disk,
    Libraries,
    Limit,
    Link,
    MachineReport,
    PeerCopy,
    PortUse,
    machine_findings,
)

CARD = GpuFacts(
    index=0,
    name="NVIDIA GeForce RTX 4090",
    total_bytes=24 * GIB,
    free_bytes=24 * GIB - 400 * MIB,
    compute_capability=(8, 9),
)
SOUND = MachineReport(
    loadmaster="0",
    system="Linux",
    kernel="6.1",
    machine="x86_64",
    python="3.12.1",
    glibc="2.36",
    host=HostFacts(memory_total_bytes=64 * GIB, shm_total_bytes=32 * GIB),
    driver="580.95.05",
    cuda_driver="13.0",
    device_files=("/dev/nvidia0", "/dev/nvidiactl"),
    gpus=(CARD, replace(CARD, index=1)),
    links=(Link(first=0, second=1, path="one PCIe host bridge", nvlink=False, read=True, write=True),),
    iommu="off",
    limits=(Limit("open files", 65535, 65535),),
    disks=(Disk("the model", 900 * GIB, 500 * GIB, "ext4"),),
    libraries=(Libraries(where="here", python="3.12.1", versions={"vllm": "0.33.0"}, compilers={"C compiler": "gcc"}),),
    ports=(PortUse(8000, "the engine", None, own=False),),
)


def codes(report: MachineReport) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in machine_findings(report)]


def test_a_sound_machine_has_no_finding() -> None:
    assert codes(SOUND) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpus": None, "driver": None}, [("cuda-driver-mismatch", "error")]),
        ({"gpus": None, "driver": None, "device_files": ()}, []),
        ({"gpus": None, "driver": None, "device_files": (), "container": "docker"}, [("container-without-gpu", "warning")]),
        (
            {"gpus": (replace(CARD, free_bytes=2 * GIB, processes=(GpuProcess(7, "python", 22 * GIB),)),)},
            [("gpu-held-by-other-process", "warning")],
        ),
        ({"gpus": (CARD, replace(CARD, index=1, total_bytes=16 * GIB, free_bytes=16 * GIB))}, [("gpus-unequal", "warning")]),
        ({"driver": "535.54.03"}, [("cuda-driver-mismatch", "error")]),
        ({"gpus": (replace(CARD, compute_capability=(7, 0)),)}, [("sm-unsupported", "error")]),
        ({"peer_copy": PeerCopy("failed", "other values arrived from card 0 to card 1")}, [("nccl-p2p-hang", "error")]),
        ({"iommu": "translating"}, [("nccl-p2p-hang", "note")]),
        ({"iommu": "translating", "peer_copy": PeerCopy("passed", "2 copies")}, []),
        ({"iommu": "pass-through"}, []),
        ({"container": "docker", "host": HostFacts(shm_total_bytes=64 * MIB)}, [("shm-too-small", "error")]),
        ({"container": "docker", "host": HostFacts(shm_total_bytes=64 * MIB), "gpus": (CARD,)}, [("shm-too-small", "note")]),
        ({"host": HostFacts(shm_total_bytes=64 * MIB)}, []),
        ({"disks": (Disk("the model", 900 * GIB, GIB, "ext4"),)}, [("disk-low", "warning")]),
        ({"limits": (Limit("open files", 1024, None),)}, [("open-files-low", "note")]),
        ({"limits": (Limit("open files", None, None),)}, []),
        ({"ports": (PortUse(8000, "the engine", "process 9 python", own=False),)}, [("port-in-use", "warning")]),
        ({"ports": (PortUse(8000, "the engine", "process 9 python", own=True),)}, []),
        (
            {"libraries": (Libraries(where="x", python="3", versions={"vllm": "0.33.0"}, compilers={"C compiler": None}),)},
            [("jit-c-compiler-missing", "warning")],
        ),
        ({"libraries": (Libraries(where="x", python="3", versions={}, compilers={"C compiler": None}),)}, []),
    ],
)  # fmt: skip
def test_each_fault_is_found_alone(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert codes(replace(SOUND, **changes)) == expected


def test_nothing_known_is_nothing_wrong() -> None:
    assert codes(MachineReport(loadmaster="0", system="Linux", kernel="6", machine="x86_64", python="3.12")) == []
