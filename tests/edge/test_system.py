"""The system under the engine, from files laid out as the kernel has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadmaster.edge.system import (
    container,
    device_files,
    disks,
    distribution,
    iommu,
    limits,
    numa_nodes,
    processor,
    telling_environment,
)


def lay(root: Path, name: str, text: str = "") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_distribution_and_processor(tmp_path: Path) -> None:
    lay(tmp_path, "etc/os-release", 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 13 (trixie)"\n')
    lay(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name\t: AMD Ryzen 9\n")
    assert distribution(tmp_path) == "Debian GNU/Linux 13 (trixie)"
    assert processor(tmp_path) == "AMD Ryzen 9"
    assert distribution(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("files", "environment", "expected"),
    [
        ({}, {}, None),
        ({".dockerenv": ""}, {}, "docker"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({"proc/1/cgroup": "0::/kubepods/besteffort/pod1\n"}, {}, "Kubernetes"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, {}, None),
        ({}, {"container": "systemd-nspawn"}, "systemd-nspawn"),
    ],
)
def test_container(tmp_path: Path, files: dict[str, str], environment: dict[str, str], expected: str | None) -> None:
    for name, text in files.items():
        lay(tmp_path, name, text)
    assert container(tmp_path, environment) == expected


def test_iommu(tmp_path: Path) -> None:
    assert iommu(tmp_path) is None
    groups = tmp_path / "sys/kernel/iommu_groups"
    groups.mkdir(parents=True)
    assert iommu(tmp_path) == "off"
    lay(groups, "0/type", "identity\n")
    assert iommu(tmp_path) == "pass-through"
    lay(groups, "1/type", "DMA-FQ\n")
    assert iommu(tmp_path) == "translating"


def test_nodes_and_devices(tmp_path: Path) -> None:
    for name in ("node0", "node1", "power"):
        (tmp_path / "sys/devices/system/node" / name).mkdir(parents=True)
    for name in ("dev/nvidia0", "dev/nvidiactl", "dev/null"):
        lay(tmp_path, name)
    assert numa_nodes(tmp_path) == 2
    assert device_files(tmp_path) == ("/dev/nvidia0", "/dev/nvidiactl")


def test_limits_and_disks(tmp_path: Path) -> None:
    names = [limit.name for limit in limits()]
    assert "open files" in names and "locked memory, bytes" in names
    (disk,) = disks({"the model": tmp_path / "not" / "there"})
    assert disk.purpose == "the model" and 0 <= disk.free_bytes <= disk.total_bytes and disk.filesystem


def test_only_variables_that_tell() -> None:
    given = {"NCCL_P2P_DISABLE": "1", "VLLM_USE_V1": "1", "PATH": "/bin", "HISTFILE": "x", "CC": "gcc", "CCACHE": "y"}
    assert telling_environment(given) == {"CC": "gcc", "NCCL_P2P_DISABLE": "1", "VLLM_USE_V1": "1"}
