"""Live readings of cards through a stand-in for the driver's library: all of it, parts of it, and none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core.observation import CardReading, ProcessReading
from loadmaster.edge.cardreadings import CardSampler
from loadmaster.edge.process import Identity
from loadmaster.edge.runmembers import RunMembers
from tests.simulated_nvml import GIB, SimulatedCard, SimulatedNvml


def test_all_that_a_card_tells() -> None:
    card = SimulatedCard(0, ecc=2, links=[0, 1], processes=[(11, GIB), (12, None)], reasons=0x1 | 0x4 | 0x20)
    library = SimulatedNvml(card)
    library.names = {11: "VLLM::Worker"}
    sampler = CardSampler(library, {})
    found = sampler.read()
    assert found is not None
    received, sent = found[0].pcie_rx_bytes_per_s, found[0].pcie_tx_bytes_per_s
    assert received == pytest.approx(80e6, rel=0.2)
    assert sent == pytest.approx(40e6, rel=0.2)
    assert found == (
        CardReading(
            index=0,
            uuid="GPU-00000000",
            name="NVIDIA GeForce RTX 4090",
            total_bytes=24 * GIB,
            used_bytes=20 * GIB,
            free_bytes=24 * GIB - 20 * GIB - GIB // 2,
            reserved_bytes=GIB // 2,
            utilization=0.8,
            memory_utilization=0.5,
            power_w=310.0,
            power_limit_w=450.0,
            temperature_c=66,
            sm_clock_hz=2_520_000_000,
            memory_clock_hz=10_501_000_000,
            throttle_reasons=("power-cap", "software-thermal"),  # that it is idle holds nothing back
            ecc_uncorrected=2,
            xid=(),
            pcie_rx_bytes_per_s=received,
            pcie_tx_bytes_per_s=sent,
            nvlink=True,
            processes=(ProcessReading(11, "VLLM::Worker", GIB), ProcessReading(12, None, None)),
        ),
    )
    assert sampler.problem is None


CAN_BE_MISSING = ("total", "gpu", "power", "limit", "temperature", "sm_clock", "memory_clock", "reasons", "ecc", "tx",
                  "throughput", "links", "events", "processes")  # fmt: skip


@settings(deadline=None, max_examples=30)
@given(st.sets(st.sampled_from(CAN_BE_MISSING)))
def test_what_is_not_supported_is_unknown_and_not_asked_again(missing: set[str]) -> None:
    library = SimulatedNvml(SimulatedCard(0, **dict.fromkeys(missing)))
    sampler = CardSampler(library, {})
    sampler.read()
    sampler.read()
    before = dict(library.calls)
    found = sampler.read()
    assert found is not None
    (card,) = found
    assert (card.used_bytes is None) == ("total" in missing)
    assert (card.utilization is None) == ("gpu" in missing)
    assert (card.power_w is None) == ("power" in missing)
    assert (card.throttle_reasons is None) == ("reasons" in missing)
    assert (card.xid is None) == ("events" in missing)
    assert (card.processes is None) == ("processes" in missing)
    if {"tx", "throughput"} <= missing:
        assert card.pcie_rx_bytes_per_s is None
    for name, call in (("power", "nvmlDeviceGetPowerUsage"), ("processes", "nvmlDeviceGetComputeRunningProcesses")):
        asked = library.calls[call] - before.get(call, 0)
        assert asked == (0 if name in missing else 1)


def test_counters_of_pcie_that_overflow_many_times_a_second() -> None:
    library = SimulatedNvml(SimulatedCard(0, rx=55e9, tx=5e9))
    cards = CardSampler(library, {}).read()
    assert cards is not None
    assert cards[0].pcie_rx_bytes_per_s == pytest.approx(55e9, rel=0.2)
    assert cards[0].pcie_tx_bytes_per_s == pytest.approx(5e9, rel=0.2)


def test_without_counters_of_pcie_the_cards_take_turns_to_be_measured() -> None:
    library = SimulatedNvml(*(SimulatedCard(index, tx=None) for index in range(4)))
    sampler = CardSampler(library, {})
    sampler.read()
    before = library.calls["nvmlDeviceGetPcieThroughput"]
    for _ in range(4):
        cards = sampler.read()
    assert library.calls["nvmlDeviceGetPcieThroughput"] - before == 8  # two ways, one card a second
    assert cards is not None
    assert [card.pcie_rx_bytes_per_s for card in cards] == [80_000 * 1024] * 4


def test_errors_of_the_driver_are_counted_by_card() -> None:
    library = SimulatedNvml(SimulatedCard(0), SimulatedCard(1))
    sampler = CardSampler(library, {})
    sampler.read()
    events = library.cards[1].events
    assert events is not None
    events += [43, 79]
    cards = sampler.read()
    assert cards is not None
    assert [card.xid for card in cards] == [(), (43, 79)]


def test_a_lost_card_is_said_and_comes_back() -> None:
    library = SimulatedNvml(SimulatedCard(0), SimulatedCard(1))
    sampler = CardSampler(library, {})
    sampler.read()
    library.cards[1].lost = True
    cards = sampler.read()
    assert cards is not None
    assert cards[1].used_bytes is None
    assert cards[0].used_bytes == 20 * GIB
    assert sampler.problem == "card 1 does not answer: the driver has lost it"
    library.cards[1].lost = False
    cards = sampler.read()
    assert cards is not None
    assert cards[1].used_bytes == 20 * GIB
    assert sampler.problem is None


def test_without_a_driver_there_is_a_reason() -> None:
    sampler = CardSampler(SimulatedNvml(driver=False), {})
    assert sampler.read() is None
    assert sampler.problem is not None
    assert "no NVIDIA driver answers" in sampler.problem


def test_cards_are_numbered_as_the_engine_numbers_them() -> None:
    library = SimulatedNvml(*(SimulatedCard(index) for index in range(3)))
    cards = CardSampler(library, {"CUDA_VISIBLE_DEVICES": "2,0"}).read()
    assert cards is not None
    assert [(card.index, card.uuid) for card in cards] == [(0, "GPU-00000002"), (1, "GPU-00000000")]


def on_card(*pids: int) -> CardReading:
    return CardReading(index=0, processes=tuple(ProcessReading(pid) for pid in pids))


def owners(members: RunMembers, *pids: int) -> list[bool | None]:
    (card,) = members.told([on_card(*pids)])
    return [process.own for process in card.processes or ()]


def test_whose_processes_are() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        members = RunMembers()
        assert owners(members, child.pid, os.getpid()) == [False, False]  # no engine runs
        members.follow(Identity(child.pid, None, "no-such-mark"))
        assert owners(members, child.pid, os.getpid()) == [True, False]
        # a number that does not exist here: the list is of another process table
        assert owners(members, child.pid, os.getpid(), (1 << 22) - 1) == [True, None, None]
        members.follow(None)
        assert owners(members, child.pid) == [False]
    finally:
        child.communicate(timeout=20)


def test_descendants_are_the_engines_too() -> None:
    code = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0, start_new_session=True); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        members = RunMembers()
        members.follow(Identity(parent.pid, None, "no-such-mark"))
        assert owners(members, grandchild) == [True]
    finally:
        parent.communicate(timeout=20)
