"""Around the engine: free memory, ports, shared memory, allocator, peer access."""

from __future__ import annotations

import pytest

from loadmaster.core.facts import GIB, MIB, HostFacts
from tests.launchcases import GpuProcess, cards, codes, dense, found, launch_of, of


@pytest.mark.parametrize("share", ["1", "1.0", "1.2", "90", "0", "-0.5"])
def test_utilisation_that_no_card_can_give(share: str) -> None:
    assert of(found(f"vllm serve m --gpu-memory-utilization={share}"), "util-out-of-range").severity == "error"


@pytest.mark.parametrize("share", ["0.95", "0.9", "0.1"])
def test_utilisation_of_unknown_cards_may_be_had(share: str) -> None:
    assert "util-out-of-range" not in codes(found(f"vllm serve m --gpu-memory-utilization {share}"))


def test_high_utilisation_of_unknown_cards_is_a_note() -> None:
    item = of(found("vllm serve m --gpu-memory-utilization 0.99"), "util-out-of-range")
    assert (item.severity, item.confidence) == ("note", "possible")


def test_percentage() -> None:
    item = of(found("vllm serve m --gpu-memory-utilization 90"), "util-out-of-range")
    assert item.fixes[0].argv == ("--gpu-memory-utilization", "0.9")


def test_utilisation_of_a_card() -> None:
    line = "vllm serve m --gpu-memory-utilization 0.99"
    assert of(found(line, None, cards(1, 24)), "util-out-of-range").severity == "error"
    tight = line.replace("0.99", "0.98")
    assert of(found(tight, None, cards(1, 22)), "util-out-of-range").severity == "note"
    assert "util-out-of-range" not in codes(found(line.replace("0.99", "0.95"), None, cards(1, 24)))
    busy = cards(1, 24, free_bytes=20 * GIB)
    item = of(found(line.replace("0.99", "0.9"), None, busy), "util-out-of-range")
    assert item.confidence == "certain" and item.fixes[0].argv == ("--gpu-memory-utilization", "0.8")


def test_card_held_by_another_process() -> None:
    worker = GpuProcess(4711, "VLLM::EngineCore", 20 * GIB)
    held = cards(1, 24, free_bytes=4 * GIB, processes=(worker,))
    item = of(found("vllm serve m --gpu-memory-utilization 0.9", None, held), "gpu-held-by-other-process")
    assert item.severity == "error"
    assert any("4711" in evidence.text for evidence in item.evidence)
    small = "vllm serve m --gpu-memory-utilization 0.1"
    assert of(found(small, None, held), "gpu-held-by-other-process").severity == "warning"


def test_a_desktop_is_no_stranger() -> None:
    desktop = cards(1, 24, free_bytes=23 * GIB, processes=(GpuProcess(1, "/usr/lib/xorg/Xorg", GIB),))
    assert "gpu-held-by-other-process" not in codes(found("vllm serve m", None, desktop))
    assert "gpu-held-by-other-process" not in codes(found("vllm serve m", None, cards(1, 24)))


def test_port() -> None:
    host = HostFacts(ports_in_use=(22, 8000, 8001))
    item = of(found("vllm serve m", host=host), "port-in-use")
    assert item.fixes[1].argv == ("--port", "8002")
    assert "port-in-use" in codes(found("vllm serve m --port 8001", host=host))
    assert "port-in-use" not in codes(found("vllm serve m --port 9000", host=host))
    assert "port-in-use" not in codes(found(launch_of("vllm serve m", kind="docker-run"), host=host))
    assert "port-in-use" not in codes(found("vllm serve m"))


def test_shared_memory_of_a_container() -> None:
    plain = launch_of("vllm serve m -tp 2", kind="docker-run")
    assert of(found(plain), "shm-too-small").severity == "error"
    assert "shm-too-small" not in codes(found(launch_of("vllm serve m -tp 2", kind="docker-run", ipc_host=True)))
    small = launch_of("vllm serve m -tp 2", kind="compose", shm_bytes=512 * MIB)
    assert of(found(small), "shm-too-small").severity == "warning"
    large = launch_of("vllm serve m -tp 2", kind="compose", shm_bytes=8 * GIB)
    assert "shm-too-small" not in codes(found(large))
    assert "shm-too-small" not in codes(found(launch_of("vllm serve m", kind="docker-run")))
    assert "shm-too-small" not in codes(found(launch_of("vllm serve m -tp 2", kind="kubernetes")))


def test_shared_memory_of_this_machine() -> None:
    tiny = HostFacts(shm_total_bytes=64 * MIB)
    assert "shm-too-small" in codes(found("vllm serve m -tp 2", host=tiny))
    assert "shm-too-small" not in codes(found("vllm serve m -tp 2", host=HostFacts(shm_total_bytes=32 * GIB)))
    assert "shm-too-small" not in codes(found("vllm serve m -tp 2"))


def test_expandable_segments_with_custom_all_reduce() -> None:
    line = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True vllm serve m -tp 2"
    linked = cards(2, 80, (9, 0), nvlink=True, peer_access=True)
    assert of(found(line, None, linked), "allocator-config").severity == "warning"
    assert of(found(line), "allocator-config").severity == "note"
    apart = cards(2, 24, (8, 9), nvlink=False, peer_access=False)
    assert "allocator-config" not in codes(found(line, None, apart))
    assert "allocator-config" not in codes(found(line + " --disable-custom-all-reduce", None, linked))
    assert "allocator-config" not in codes(found(line + " --enforce-eager", None, linked))
    assert "allocator-config" not in codes(found(line.replace("-tp 2", ""), None, linked))
    assert "allocator-config" not in codes(found(line.replace("True", "False"), None, linked))


def test_expandable_segments_with_sleep_mode_and_connectors() -> None:
    sleep = "PYTORCH_ALLOC_CONF=expandable_segments:True vllm serve m --enable-sleep-mode"
    assert of(found(sleep, version="0.17.0"), "allocator-config").severity == "error"
    assert "allocator-config" not in codes(found(sleep, version="0.24.0"))
    connector = (
        """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True vllm serve m --kv-transfer-config '{"kv_connector": "N"}'"""
    )
    assert of(found(connector, version="0.24.0"), "allocator-config").severity == "error"
    assert "allocator-config" not in codes(found(connector, version="0.17.0"))


def test_peer_access_that_is_not_there() -> None:
    apart = cards(2, 24, (8, 9), nvlink=False, peer_access=False)
    assert "nccl-p2p-hang" in codes(found("NCCL_P2P_LEVEL=SYS vllm serve m -tp 2", None, apart))
    assert "nccl-p2p-hang" not in codes(found("NCCL_P2P_LEVEL=NVL vllm serve m -tp 2", None, apart))
    assert "nccl-p2p-hang" not in codes(found("NCCL_P2P_LEVEL=SYS vllm serve m", None, apart))


def test_peer_access_switched_off_for_nccl_only() -> None:
    line = "NCCL_P2P_DISABLE=1 vllm serve m -tp 2"
    there = cards(2, 24, (8, 6), nvlink=False, peer_access=True)
    assert of(found(line, None, there), "custom-allreduce").severity == "warning"
    apart = cards(2, 24, (8, 9), nvlink=False, peer_access=False)
    assert "custom-allreduce" not in codes(found(line, None, apart))
    assert "custom-allreduce" not in codes(found(line + " --disable-custom-all-reduce", None, there))


def test_host_memory() -> None:
    host = HostFacts(memory_total_bytes=32 * GIB)
    assert of(found("vllm serve m --cpu-offload-gb 64", host=host), "host-ram-killed").severity == "error"
    assert "host-ram-killed" not in codes(found("vllm serve m --cpu-offload-gb 8", host=host))
    assert "host-ram-killed" not in codes(found("vllm serve m --cpu-offload-gb 64"))


def test_a_quiet_launch() -> None:
    findings = found("vllm serve m --max-model-len 8192", dense(), cards(1, 48, (8, 9)), version="0.24.0")
    assert [item.code for item in findings if item.severity != "note"] == []
