"""What ``loadmaster doctor`` collects of a machine, and what is wrong with it.

Everything is optional: None or empty means that it could not be read, and ``unread`` says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from loadmaster.core.checks.catalogue import finding, order
from loadmaster.core.enginechoice import Machine, objections
from loadmaster.core.facts import GIB, MIB, Evidence, Finding, Fix, GpuFacts, HostFacts

_DESKTOP = (3 * GIB) // 2  # what a desktop takes of a card: 0.3 to 1.5 GiB
_ENOUGH_SHM = GIB
_ENOUGH_DISK = 2 * GIB  # logs, the compile cache and recordings of some weeks
_ENOUGH_FILES = 4096  # a server with some hundred clients and workers; the usual soft limit is 1024


class Link(Struct, frozen=True, kw_only=True):
    """Between two cards: the nearest thing that they share, and whether the driver offers peer access."""

    first: int
    second: int
    path: str | None = None
    nvlink: bool | None = None
    read: bool | None = None
    write: bool | None = None


class Limit(Struct, frozen=True):
    """A limit of this process. None: unlimited."""

    name: str
    soft: int | None
    hard: int | None


class Disk(Struct, frozen=True):
    """``purpose``: what lies on it."""

    purpose: str
    total_bytes: int
    free_bytes: int
    filesystem: str | None = None


class Libraries(Struct, frozen=True, kw_only=True):
    """An interpreter that could run the engine, and the packages that decide how it runs."""

    where: str
    python: str | None = None
    versions: dict[str, str] = {}
    compilers: dict[str, str | None] = {}


class PeerCopy(Struct, frozen=True):
    """Whether bytes that one card copies to another arrive as they were."""

    status: Literal["passed", "failed", "not run"]
    detail: str


class PortUse(Struct, frozen=True):
    port: int
    purpose: str
    holder: str | None
    own: bool


class MachineReport(Struct, frozen=True, kw_only=True):
    loadmaster: str
    system: str
    kernel: str
    machine: str
    distribution: str | None = None
    glibc: str | None = None
    python: str
    container: str | None = None
    cpu: str | None = None
    numa_nodes: int | None = None
    host: HostFacts = HostFacts()
    driver: str | None = None
    cuda_driver: str | None = None  # the newest CUDA that the driver speaks
    device_files: tuple[str, ...] = ()
    gpus: tuple[GpuFacts, ...] | None = None
    links: tuple[Link, ...] = ()
    iommu: str | None = None  # "off", "pass-through", "translating"
    limits: tuple[Limit, ...] = ()
    disks: tuple[Disk, ...] = ()
    libraries: tuple[Libraries, ...] = ()
    ports: tuple[PortUse, ...] = ()
    environment: dict[str, str] = {}
    peer_copy: PeerCopy = PeerCopy("not run", "not asked for")
    unread: tuple[str, ...] = ()


def machine_findings(report: MachineReport) -> tuple[Finding, ...]:
    """What is wrong, the most severe first."""
    found = [
        *_cards(report),
        *_driver(report),
        *_peers(report),
        *_shared_memory(report),
        *_room(report),
        *_ports(report),
        *_compilers(report),
    ]
    return order(found)


def _cards(report: MachineReport) -> Iterator[Finding]:
    if not report.gpus:
        if report.device_files and report.driver is None:
            yield finding(
                "cuda-driver-mismatch",
                "The cards' device files are there, but the driver's library does not answer: the kernel module and "
                "the library are of different versions, or the module is not loaded.",
                evidence=[Evidence("host", name) for name in report.device_files[:4]],
                fixes=[
                    Fix("Shows the mismatch, if it is one; a reboot after an update mends it.", command="nvidia-smi")
                ],
                confidence="likely",
            )
        elif report.container is not None and not report.device_files:
            yield finding(
                "container-without-gpu",
                f"This is a {report.container} container, and no card was given to it.",
                evidence=[Evidence("host", "no /dev/nvidia* in the container")],
                fixes=[Fix("Start the container with its cards.", command="docker run --gpus all ...")],
                severity="warning",
                confidence="possible",
            )
        return
    for gpu in report.gpus:
        if gpu.free_bytes is None:
            continue
        held = gpu.total_bytes - gpu.free_bytes
        if held <= _DESKTOP:
            continue
        who = [
            f"process {process.pid} {process.name or '(name unknown)'}"
            + (f", {process.used_bytes / GIB:.2f} GiB" if process.used_bytes is not None else "")
            for process in gpu.processes or ()
        ]
        unseen = [] if who else ["no process of this machine or container is seen to hold it"]
        yield finding(
            "gpu-held-by-other-process",
            f"{held / GIB:.2f} of {gpu.total_bytes / GIB:.2f} GiB of card {gpu.index} are taken.",
            evidence=[Evidence("gpu", text) for text in (*who, *unseen)],
            fixes=[Fix("See who it is, and end it if it is yours.", command=f"nvidia-smi -i {gpu.index}")],
            severity="warning",
        )
    sizes = {gpu.total_bytes // GIB for gpu in report.gpus}
    kinds = {gpu.compute_capability for gpu in report.gpus}
    if len(sizes) > 1 or len(kinds) > 1:
        yield finding(
            "gpus-unequal",
            "Every rank is planned for the smallest of these cards.",
            evidence=[
                Evidence("gpu", f"card {gpu.index}: {gpu.name or 'unnamed'}, {gpu.total_bytes / GIB:.2f} GiB")
                for gpu in report.gpus
            ],
        )


def _driver(report: MachineReport) -> Iterator[Finding]:
    """Each engine that is installed against the driver and the oldest card."""
    if report.driver is None:
        return
    known = (gpu.compute_capability for gpu in report.gpus or () if gpu.compute_capability is not None)
    capability = min(known, default=None)
    for libraries in report.libraries:
        version = libraries.versions.get("vllm")
        if version is None:
            continue
        machine = Machine(
            driver=report.driver, compute_capability=capability, glibc=report.glibc, machine=report.machine
        )
        for reason in objections(version, machine):
            code = "sm-unsupported" if "compute capability" in reason else "cuda-driver-mismatch"
            yield finding(
                code,
                f"vLLM {version} in {libraries.where}: {reason}.",
                evidence=[Evidence("host", f"driver {report.driver}")],
                fixes=[Fix("Installs the newest release that fits this machine.", command="loadmaster engine install")],
            )


def _peers(report: MachineReport) -> Iterator[Finding]:
    if report.peer_copy.status == "failed":
        yield finding(
            "nccl-p2p-hang",
            "What one card copies to another directly does not arrive as it was: " + report.peer_copy.detail,
            evidence=[Evidence("gpu", report.peer_copy.detail)],
            fixes=[
                Fix("Copies through the host's memory: slower, and right.", env={"NCCL_P2P_DISABLE": "1"}),
                Fix("Or let the IOMMU pass addresses through, in the kernel's command line.", command="iommu=pt"),
            ],
            severity="error",
        )
        return
    linked = any(link.nvlink for link in report.links)
    offered = [link for link in report.links if link.read and link.write]
    if report.iommu == "translating" and offered and not linked and report.peer_copy.status == "not run":
        yield finding(
            "nccl-p2p-hang",
            "The IOMMU translates addresses, and the driver offers peer copies over PCIe: on many boards they hang or "
            "arrive damaged. Whether they do here was not tried.",
            evidence=[
                Evidence("host", "IOMMU groups are in use"),
                *(Evidence("gpu", _link_words(one)) for one in offered[:4]),
            ],
            fixes=[
                Fix("Copies through the host's memory: slower, and right.", env={"NCCL_P2P_DISABLE": "1"}),
                Fix("Or in the kernel's command line.", command="iommu=pt"),
            ],
            severity="note",
            confidence="possible",
        )


def _link_words(link: Link) -> str:
    return f"cards {link.first} and {link.second}: {link.path or 'path unknown'}"


def _shared_memory(report: MachineReport) -> Iterator[Finding]:
    total = report.host.shm_total_bytes
    if total is None or total >= _ENOUGH_SHM or report.container is None:
        return
    several = report.gpus is not None and len(report.gpus) > 1
    yield finding(
        "shm-too-small",
        f"/dev/shm of this container has {total / MIB:,.0f} MiB; engines with several ranks exchange pictures and "
        "tensors there.",
        evidence=[Evidence("host", f"/dev/shm: {total / MIB:,.0f} MiB")],
        fixes=[Fix("Gives the container its share.", command="docker run --shm-size 8g ...")],
        severity="error" if several else "note",
        confidence="likely" if several else "possible",
    )


def _room(report: MachineReport) -> Iterator[Finding]:
    for disk in report.disks:
        if disk.free_bytes < _ENOUGH_DISK:
            yield finding(
                "disk-low",
                f"{disk.free_bytes / GIB:.2f} of {disk.total_bytes / GIB:.2f} GiB are free for {disk.purpose}.",
                evidence=[Evidence("host", f"{disk.purpose}: {disk.free_bytes / GIB:.2f} GiB free")],
            )
    for limit in report.limits:
        if limit.name == "open files" and limit.soft is not None and limit.soft < _ENOUGH_FILES:
            yield finding(
                "open-files-low",
                f"A process here may open {limit.soft:,} files and connections.",
                evidence=[Evidence("host", f"open files: {limit.soft:,}, at most {_amount(limit.hard)}")],
                fixes=[Fix("For this shell and what it starts.", command="ulimit -n 65535")],
            )


def _amount(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _ports(report: MachineReport) -> Iterator[Finding]:
    for use in report.ports:
        if use.holder is not None and not use.own:
            yield finding(
                "port-in-use",
                f"Port {use.port}, for {use.purpose}, is taken.",
                evidence=[Evidence("host", f"port {use.port}: {use.holder}")],
                fixes=[Fix("See who it is.", command=f"ss -ltnp 'sport = :{use.port}'")],
                severity="warning",
            )


def _compilers(report: MachineReport) -> Iterator[Finding]:
    for libraries in report.libraries:
        if "vllm" in libraries.versions and libraries.compilers and not libraries.compilers.get("C compiler"):
            yield finding(
                "jit-c-compiler-missing",
                f"vLLM in {libraries.where} compiles kernels when it starts, and there is no C compiler.",
                evidence=[Evidence("host", "neither gcc, clang nor cc is in PATH, and CC is not set")],
                severity="warning",
                confidence="likely",
                fixes=[Fix("On Debian and Ubuntu.", command="apt install gcc")],
            )
