"""The machine under the launch: memory that is free, ports, shared memory, the allocator, peer access."""

from __future__ import annotations

import re
from collections.abc import Iterator

from loadmaster.core.calibration import constant
from loadmaster.core.checks.case import LaunchCase, is_placeholder
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import GIB, MIB, Confidence, Evidence, Finding, Fix, GpuFacts, Severity

_DOCKER_SHM = 64 * MIB  # what docker gives when nobody asks
_QUEUE = 160 * MIB  # 10 chunks of 16 MiB: vLLM shm_broadcast.py with VLLM_MQ_MAX_CHUNK_BYTES_MB's default
_ENOUGH_SHM = GIB
_DESKTOP = (3 * GIB) // 2  # what a desktop takes of a card: 0.3 to 1.5 GiB
_DESKTOP_NAMES = re.compile(r"xorg|xwayland|gnome|kwin|plasma|mutter|compiz|firefox|chrome|explorer|dwm", re.IGNORECASE)
_HIGH_SHARE = 0.97  # on 24 GiB this leaves 0.7 GiB, what one of several ranks takes
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_CUSTOM_SIZES = (2, 4, 6, 8, 16)  # ranks that the custom all-reduce is made for
_WIDE_LEVELS = ("SYS", "PHB", "PXB", "5", "4", "3")  # NCCL_P2P_LEVEL beyond NVLink
_SLEEP_REFUSES_UNTIL, _CONNECTOR_REFUSES_SINCE = "0.21", "0.21"


def check_machine(case: LaunchCase) -> Iterator[Finding]:
    """Everything around the engine."""
    yield from check_utilisation(case)
    yield from _held(case)
    yield from _port(case)
    yield from _shared_memory(case)
    yield from _allocator(case)
    yield from _peer(case)
    yield from _host_memory(case)


# ------------------------------------------------------------------------------------------ utilisation


def _context_bounds(case: LaunchCase, gpu: GpuFacts) -> tuple[int, int]:
    """What a rank takes before the engine looks at free memory, lowest and highest."""
    group = "group" if case.world > 1 else "single"
    datacenter = gpu.compute_capability in ((8, 0), (9, 0), (10, 0), (10, 3)) or gpu.total_bytes > 70 * GIB
    found = constant(f"context_{group}_{'datacenter' if datacenter else 'consumer'}")
    return int(found.low), int(found.high)


def check_utilisation(case: LaunchCase) -> Iterator[Finding]:
    """The share of a card that is asked for, against its range and what the card has left."""
    share = case.number("--gpu-memory-utilization")
    if share is None:
        return
    evidence = case.evidence("--gpu-memory-utilization")
    if not 0 < share <= 1:
        fixes = []
        if 2 <= share <= 100:
            fixes = [Fix("A share, not a percentage.", ("--gpu-memory-utilization", f"{min(share / 100, 0.95):g}"))]
        elif share > 1:
            fixes = [Fix("What most cards can give.", ("--gpu-memory-utilization", "0.92"))]
        elif share <= 0:
            fixes = [Fix("The default.", remove=("--gpu-memory-utilization",))]
        yield finding(
            "util-out-of-range",
            f"The share of the card's memory must be above 0 and at most 1, not {share:g}.",
            evidence=evidence,
            fixes=fixes,
        )
        return
    if case.used_gpus is None:
        if share == 1:
            yield finding(
                "util-out-of-range",
                "All of a card is never free: the CUDA context of the engine itself takes 0.3 to 1.5 GiB first.",
                evidence=evidence,
                fixes=[Fix("What most cards can give.", ("--gpu-memory-utilization", "0.92"))],
            )
        elif share > _HIGH_SHARE:
            yield finding(
                "util-out-of-range",
                f"{share:g} leaves {1 - share:.0%} of the card to CUDA and NCCL, which take 0.3 to 1.5 GiB before the "
                "engine looks at what is free: too little on a card of 24 GiB, enough on one of 80 GiB.",
                evidence=evidence,
                fixes=[Fix("What most cards can give.", ("--gpu-memory-utilization", "0.95"))],
                severity="note",
                confidence="possible",
            )
        return
    yield from _share_of(case, share, evidence)


def _share_of(case: LaunchCase, share: float, evidence: tuple[Evidence, ...]) -> Iterator[Finding]:
    assert case.used_gpus is not None
    worst: tuple[float, float, GpuFacts] | None = None
    for gpu in case.used_gpus:
        low, high = _context_bounds(case, gpu)
        free = gpu.free_bytes if gpu.free_bytes is not None else gpu.total_bytes
        best, safe = (free - low) / gpu.total_bytes, (free - high) / gpu.total_bytes
        if worst is None or best < worst[0]:
            worst = best, safe, gpu
    assert worst is not None
    best, safe, gpu = worst
    low, high = _context_bounds(case, gpu)
    if share <= safe:
        return
    if share > best:
        severity: Severity = "error"
        sure: Confidence = (
            "certain" if share == 1 or share * gpu.total_bytes > (gpu.free_bytes or gpu.total_bytes) else "likely"
        )
    else:
        severity, sure = "note", "possible"
    usable = max(int(safe * 100) / 100, 0.0)
    free_words = f"{(gpu.free_bytes or gpu.total_bytes) / GIB:.2f} GiB"
    yield finding(
        "util-out-of-range",
        f"{share:g} of card {gpu.index} is {share * gpu.total_bytes / GIB:.2f} GiB; {free_words} "
        + ("are free" if gpu.free_bytes is not None else "is its total")
        + f" before CUDA and NCCL take {low / GIB:.1f} to {high / GIB:.1f} GiB"
        + (", so it may just not be enough." if severity == "note" else "."),
        evidence=[
            *evidence,
            Evidence("gpu", f"card {gpu.index}: {gpu.total_bytes / GIB:.2f} GiB, {_use_words(gpu)}"),
        ],
        fixes=[Fix("What is left for sure.", ("--gpu-memory-utilization", f"{usable:g}"))] if usable > 0.1 else [],
        severity=severity,
        confidence=sure,
    )


def _use_words(gpu: GpuFacts) -> str:
    if gpu.free_bytes is None:
        return "how much of it is free is not known"
    return f"{(gpu.total_bytes - gpu.free_bytes) / GIB:.2f} GiB in use"


# ------------------------------------------------------------------------------------------ other processes


def _held(case: LaunchCase) -> Iterator[Finding]:
    if case.used_gpus is None:
        return
    for gpu in case.used_gpus:
        if gpu.free_bytes is None:
            continue
        held = gpu.total_bytes - gpu.free_bytes
        others = [p for p in gpu.processes or () if not _DESKTOP_NAMES.search(p.name or "")]
        if held <= _DESKTOP and not any((p.used_bytes or 0) > _DESKTOP for p in others):
            continue
        share = case.number("--gpu-memory-utilization")
        if share is None and case.settings is not None:
            share = case.settings.gpu_memory_utilization
        blocks = share is not None and share * gpu.total_bytes > gpu.free_bytes
        evidence = [Evidence("gpu", f"card {gpu.index}: {held / GIB:.2f} of {gpu.total_bytes / GIB:.2f} GiB in use")]
        for process in gpu.processes or ():
            used = f", {process.used_bytes / GIB:.2f} GiB" if process.used_bytes is not None else ""
            evidence.append(Evidence("gpu", f"process {process.pid} {process.name or '(name unknown)'}{used}"))
        fixes = [Fix("See who it is, and end it if it is yours.", command=f"nvidia-smi -i {gpu.index}")]
        room = (gpu.free_bytes - _context_bounds(case, gpu)[1]) / gpu.total_bytes
        if room > 0.1:
            fixes.append(Fix("Or leave it its share.", ("--gpu-memory-utilization", f"{int(room * 100) / 100:g}")))
        yield finding(
            "gpu-held-by-other-process",
            f"{held / GIB:.2f} GiB of card {gpu.index} are taken"
            + (f", and {share:g} of its total must be free." if blocks else "; what is asked for is still free."),
            evidence=evidence,
            fixes=fixes,
            severity="error" if blocks else "warning",
        )


# ------------------------------------------------------------------------------------------ ports and host memory


def _port(case: LaunchCase) -> Iterator[Finding]:
    if case.host is None or case.in_container:
        return
    port = case.integer("--port") if case.has("--port") else 8000
    if port is None or port not in case.host.ports_in_use:
        return
    free = next(number for number in range(port + 1, port + 1000) if number not in case.host.ports_in_use)
    cause = f"Something listens on port {port}{_here(case)}" + (
        "." if case.has("--port") else ", the engine's default."
    )
    yield finding(
        "port-in-use",
        cause + _elsewhere(case),
        evidence=[*case.evidence("--port"), Evidence("host", f"port {port} is in use")],
        severity=None if case.host.holds_cards else "note",
        confidence="certain" if case.host.holds_cards else "possible",
        fixes=[
            Fix("See who it is.", command=f"ss -ltnp 'sport = :{port}'"),
            Fix("Or another port.", ("--port", str(free))),
        ],
    )


def _here(case: LaunchCase) -> str:
    """Words for a fact of this machine where the launch may be meant for another."""
    return "" if case.host is None or case.host.holds_cards else " on this machine"


def _elsewhere(case: LaunchCase) -> str:
    if case.host is None or case.host.holds_cards:
        return ""
    return " It matters only if the launch is meant for this machine: its cards were described, not found here."


def _shared_memory(case: LaunchCase) -> Iterator[Finding]:
    ranks = case.tensor_parallel * case.pipeline_parallel
    if ranks < 2:
        return
    size, source, words = None, "command", ""
    if case.launch.ipc_host:
        pass
    elif case.launch.shm_bytes is not None:
        size, words = case.launch.shm_bytes, f"/dev/shm of {case.launch.shm_bytes / MIB:,.0f} MiB"
    elif case.launch.kind in ("docker-run", "compose"):
        size, words = _DOCKER_SHM, "neither --ipc=host nor --shm-size: docker gives 64 MiB"
    if size is None and (not case.in_container or case.launch.ipc_host) and case.host is not None:
        size, source = case.host.shm_total_bytes, "host"
        words = f"/dev/shm of {(size or 0) / MIB:,.0f} MiB{_here(case)}"
    if size is None or size >= _ENOUGH_SHM:
        return
    docker = case.launch.kind in ("docker-run", "compose")
    fixes = [Fix("Give the container the host's shared memory.", command="--ipc=host  (compose: ipc: host)")]
    if docker:
        fixes.append(Fix("Or a size of its own.", command="--shm-size=8g  (compose: shm_size: 8g)"))
    elif case.launch.kind == "kubernetes":
        fixes = [Fix("Mount a volume emptyDir with medium: Memory and a sizeLimit at /dev/shm.")]
    else:
        fixes = [Fix("Enlarge it.", command="mount -o remount,size=8G /dev/shm")]
    cause = f"{ranks} ranks talk through shared memory: their queue alone maps {_QUEUE / MIB:.0f} MiB, NCCL more."
    described = source == "host" and case.host is not None and not case.host.holds_cards
    severity: Severity = "error" if size < _QUEUE else "warning"
    yield finding(
        "shm-too-small",
        cause + (_elsewhere(case) if described else ""),
        evidence=[Evidence(source, words), *case.evidence("--tensor-parallel-size", "--pipeline-parallel-size")],
        fixes=fixes,
        severity="note" if described else severity,
        confidence="possible" if described else "likely",
    )


def _host_memory(case: LaunchCase) -> Iterator[Finding]:
    if case.host is None or case.host.memory_total_bytes is None or case.in_container:
        return
    total = case.host.memory_total_bytes
    offload, swap = case.number("--cpu-offload-gb") or 0.0, case.number("--swap-space")
    wanted = int((offload + (swap if swap is not None else 0.0)) * case.world * GIB)
    if wanted <= 0 or wanted <= 0.9 * total:
        return
    room = int(0.6 * total / GIB / case.world - (swap or 0.0))
    fixes = []
    if swap:
        fixes.append(Fix("Newer engines do not swap to host memory at all.", remove=("--swap-space",)))
    if offload and room >= 1:
        fixes.append(Fix("What the machine has.", ("--cpu-offload-gb", f"{room}")))
    elif offload:
        fixes.append(Fix("Keep all weights on the cards.", remove=("--cpu-offload-gb",)))
    described = not case.host.holds_cards
    severity: Severity = "error" if wanted > total else "warning"
    yield finding(
        "host-ram-killed",
        f"{wanted / GIB:.0f} GiB of host memory are asked for by {case.world} rank{'s' if case.world > 1 else ''}, "
        f"{'this' if described else 'the'} machine has {total / GIB:.0f} GiB." + _elsewhere(case),
        evidence=[
            *case.evidence("--cpu-offload-gb", "--swap-space"),
            Evidence("host", f"memory: {total / GIB:.1f} GiB"),
        ],
        fixes=fixes,
        severity="note" if described else severity,
        confidence="possible" if described else "certain",
    )


# ------------------------------------------------------------------------------------------ allocator and peer access


def _graphs_on(case: LaunchCase) -> bool:
    if case.switch("--enforce-eager"):
        return False
    config = case.table("--compilation-config") or {}
    level = case.integer("--optimization-level")
    return str(config.get("cudagraph_mode", "")).upper() != "NONE" and level != 0


def _custom_all_reduce(case: LaunchCase) -> bool | None:
    """Whether the custom all-reduce will run; None when nobody knows (peer access unknown)."""
    size = case.tensor_parallel
    if size < 2 or size not in _CUSTOM_SIZES or case.switch("--disable-custom-all-reduce"):
        return False
    if case.used_gpus is None:
        return None
    if any(gpu.nvlink for gpu in case.used_gpus):
        return True
    if size > 2 and all(gpu.nvlink is False for gpu in case.used_gpus):
        return False  # more than two cards need NVLink among all
    access = [gpu.peer_access for gpu in case.used_gpus]
    if any(value is False for value in access):
        return False
    return True if all(access) else None


def _allocator(case: LaunchCase) -> Iterator[Finding]:
    for name in _ALLOCATOR:
        value = case.launch.env.get(name)
        if value is None or is_placeholder(value):
            continue
        expandable = re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE) is not None
        asynchronous = "cudamallocasync" in value.lower()
        evidence = case.env_evidence(name)
        drop = Fix(f"Start without {name}.", command=f"unset {name}")
        if expandable:
            yield from _expandable(case, evidence, drop)
        if asynchronous and case.tensor_parallel > 1:
            yield finding(
                "allocator-config",
                "Memory of the cudaMallocAsync backend cannot be opened by the other ranks, and the profile does "
                "not measure it.",
                evidence=evidence,
                fixes=[drop],
                confidence="likely",
            )


def _expandable(case: LaunchCase, evidence: tuple[Evidence, ...], drop: Fix) -> Iterator[Finding]:
    if case.switch("--enable-sleep-mode") and case.since(_SLEEP_REFUSES_UNTIL) is False:
        yield finding(
            "allocator-config",
            f"{case.version_words} refuses expandable segments with sleep mode.",
            evidence=[*evidence, *case.evidence("--enable-sleep-mode")],
            fixes=[drop],
            severity="error",
        )
    elif (
        case.has("--kv-transfer-config")
        and not case.switch("--enable-sleep-mode")
        and case.newest_or_since(_CONNECTOR_REFUSES_SINCE)
    ):
        known = case.version is not None
        yield finding(
            "allocator-config",
            "From 0.21 on the engine refuses expandable segments with a KV connector: registered memory could move.",
            evidence=[*evidence, *case.evidence("--kv-transfer-config")],
            fixes=[drop],
            severity="error" if known else "warning",
            confidence="certain" if known else "likely",
        )
    runs = _custom_all_reduce(case)
    if runs is False or not _graphs_on(case):
        return
    yield finding(
        "allocator-config",
        "The ranks share buffers of the custom all-reduce while graphs are captured, and memory from expandable "
        "segments cannot be shared that way.",
        evidence=[*evidence, *case.evidence("--tensor-parallel-size")],
        fixes=[drop, Fix("Or NCCL for all sums.", ("--disable-custom-all-reduce",))],
        severity="warning" if runs else "note",
        confidence="likely" if runs else "possible",
    )


def _peer(case: LaunchCase) -> Iterator[Finding]:
    if case.tensor_parallel < 2:
        return
    cards = case.used_gpus or ()
    env = case.launch.env
    without = [gpu for gpu in cards if gpu.peer_access is False]
    if without and env.get("NCCL_P2P_LEVEL", "").upper() in _WIDE_LEVELS and env.get("NCCL_P2P_DISABLE") != "1":
        names = sorted({gpu.name or "unnamed" for gpu in without})
        yield finding(
            "nccl-p2p-hang",
            "NCCL is told to use peer-to-peer, which these cards do not have.",
            evidence=[*case.env_evidence("NCCL_P2P_LEVEL"), Evidence("gpu", f"no peer access: {', '.join(names)}")],
            fixes=[Fix("Let NCCL go through the host.", env={"NCCL_P2P_DISABLE": "1"})],
            severity="warning",
            confidence="likely",
        )
    if env.get("NCCL_P2P_DISABLE") == "1" and not any(gpu.nvlink for gpu in cards):
        runs = _custom_all_reduce(case)
        if runs is False:
            return
        yield finding(
            "custom-allreduce",
            "NCCL_P2P_DISABLE speaks to NCCL only: the engine's own all-reduce still writes from card to card.",
            evidence=[*case.env_evidence("NCCL_P2P_DISABLE"), *case.evidence("--tensor-parallel-size")],
            fixes=[Fix("If peer access does not work here, switch it off for both.", ("--disable-custom-all-reduce",))],
            severity="warning" if runs else "note",
            confidence="likely" if runs else "possible",
        )
