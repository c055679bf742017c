"""The system under the engine: distribution, container, limits, disks, IOMMU. Read from the kernel's own files."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadmaster.core.machinereport import Disk, Limit

# Variables that change what an engine does; others are nobody's business.
_TELLING = (
    "CUDA_", "NVIDIA_", "NCCL_", "VLLM_", "SGLANG_", "PYTORCH_", "TORCH", "TRITON_", "HF_", "HUGGINGFACE_",
    "TRANSFORMERS_", "OMP_", "MKL_", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOADMASTER_", "GLOO_", "UCX_", "RAY_",
    "FLASHINFER_", "TOKENIZERS_", "SLURM_", "XDG_CACHE_HOME", "XDG_STATE_HOME", "TMPDIR", "CC", "CXX",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
_WHOLE_NAMES = frozenset(("LD_LIBRARY_PATH", "LD_PRELOAD", "XDG_CACHE_HOME", "XDG_STATE_HOME", "TMPDIR", "CC", "CXX"))
_LIMITS = (
    ("open files", resource.RLIMIT_NOFILE),
    ("locked memory, bytes", resource.RLIMIT_MEMLOCK),
    ("processes", resource.RLIMIT_NPROC),
    ("address space, bytes", resource.RLIMIT_AS),
    ("file size, bytes", resource.RLIMIT_FSIZE),
)
_LONGEST = 64 * 1024


def distribution(root: Path = Path("/")) -> str | None:
    """``Debian GNU/Linux 12 (bookworm)``; None where the system does not say."""
    for line in (_read(root / "etc/os-release") or "").splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip().strip('"') or None
    return None


def container(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> str | None:
    """The kind of container in which this process runs; None outside of one."""
    environment = os.environ if environment is None else environment
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if (root / ".dockerenv").exists():
        return "docker"
    named = environment.get("container") or ("podman" if (root / "run/.containerenv").exists() else None)
    if named:
        return named
    groups = _read(root / "proc/1/cgroup") or ""
    for mark, name in (("kubepods", "Kubernetes"), ("docker", "docker"), ("lxc", "lxc"), ("machine.slice", "podman")):
        if mark in groups:
            return name
    return None


def processor(root: Path = Path("/")) -> str | None:
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Hardware", "Model"):
            return value.strip() or None
    return platform.processor() or None


def numa_nodes(root: Path = Path("/")) -> int | None:
    with contextlib.suppress(OSError):
        found = [
            entry.name
            for entry in (root / "sys/devices/system/node").iterdir()
            if entry.name.startswith("node") and entry.name[4:].isdigit()
        ]
        return len(found) or None
    return None


def iommu(root: Path = Path("/")) -> str | None:
    """``off``, ``pass-through`` or ``translating``, by the groups' types; None when they cannot be seen."""
    groups = root / "sys/kernel/iommu_groups"
    try:
        entries = sorted(groups.iterdir())
    except OSError:
        return None
    if not entries:
        return "off"
    kinds = {(_read(entry / "type") or "").strip() for entry in entries[:64]}
    if not kinds - {""}:
        return None
    return "pass-through" if kinds - {""} == {"identity"} else "translating"


def device_files(root: Path = Path("/")) -> tuple[str, ...]:
    """The device files of NVIDIA's driver."""
    with contextlib.suppress(OSError):
        return tuple(
            sorted(f"/dev/{entry.name}" for entry in (root / "dev").iterdir() if entry.name.startswith("nvidia"))
        )
    return ()


def limits() -> tuple[Limit, ...]:
    """The limits of this process, which its children inherit."""
    found = []
    for name, number in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            soft, hard = resource.getrlimit(number)
            found.append(Limit(name, _bounded(soft), _bounded(hard)))
    return tuple(found)


def disks(folders: Mapping[str, Path]) -> tuple[Disk, ...]:
    """One entry a purpose, of the nearest folder that exists."""
    found = []
    mounts = _mounts()
    for purpose, folder in folders.items():
        place = next((one for one in (folder, *folder.parents) if one.exists()), None)
        if place is None:
            continue
        with contextlib.suppress(OSError):
            seen = os.statvfs(place)
            total, free = seen.f_blocks * seen.f_frsize, seen.f_bavail * seen.f_frsize
            found.append(Disk(purpose, total, free, _filesystem(place.resolve(), mounts)))
    return tuple(found)


def telling_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that change what an engine does, sorted by name; their values as they are."""
    environment = os.environ if environment is None else environment
    return {
        name: environment[name]
        for name in sorted(environment)
        if name in _WHOLE_NAMES or name.startswith(tuple(word for word in _TELLING if word not in _WHOLE_NAMES))
    }


def _mounts() -> Sequence[tuple[str, str]]:
    """(folder, kind of file system), the deepest folder first."""
    found = []
    for line in (_read(Path("/proc/self/mounts")) or "").splitlines():
        words = line.split()
        if len(words) > 2:
            found.append((words[1].replace("\\040", " "), words[2]))
    return sorted(found, key=lambda mount: len(mount[0]), reverse=True)


def _filesystem(place: Path, mounts: Sequence[tuple[str, str]]) -> str | None:
    return next((kind for folder, kind in mounts if place.is_relative_to(folder)), None)


def _bounded(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST).decode("utf-8", "replace")
    except OSError:
        return None
