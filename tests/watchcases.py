"""Series of readings that show one thing each, made by rule and without chance: the same every time.

``python -m tests.watchcases`` writes them into tests/data/recordings, where the tests replay them from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from loadmaster.core.facts import GIB, MIB
from loadmaster.core.observation import CardReading, EngineReading, ProcessReading, Snapshot
from loadmaster.core.watchlimits import CardLimits, WatchLimits
from loadmaster.edge.recording import Header

FOLDER = Path(__file__).parent / "data" / "recordings"
BEGAN = 1_790_000_000.0
TOTAL = 24 * GIB
HELD = 21 * GIB

PLAN = WatchLimits(
    cards=tuple(
        CardLimits(
            index=index,
            total_bytes=TOTAL,
            budget_bytes=int(21.6 * GIB),
            start_bytes=21 * GIB,
            steady_bytes=HELD,
            serving_bytes=22 * GIB,
            serving_high_bytes=int(22.5 * GIB),
            spread_bytes=2 * GIB,
        )
        for index in (0, 1)
    ),
    eager=False,
    tensor_parallel_size=2,
    places=16,
    kv_tokens=831_162,
    stuck_after_s=60.0,
)
EAGER = msgspec.structs.replace(PLAN, eager=True)


def card(index: int, used: int = HELD, **changes: Any) -> CardReading:
    """A card that serves, with the engine's process on it."""
    values: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA GeForce RTX 4090",
        "total_bytes": TOTAL,
        "used_bytes": used,
        "free_bytes": TOTAL - used,
        "utilization": 0.8,
        "memory_utilization": 0.5,
        "power_w": 310.0,
        "power_limit_w": 450.0,
        "temperature_c": 66.0,
        "sm_clock_hz": 2_520_000_000,
        "memory_clock_hz": 10_501_000_000,
        "throttle_reasons": (),
        "ecc_uncorrected": 0,
        "xid": (),
        "pcie_rx_bytes_per_s": 80_000_000,
        "pcie_tx_bytes_per_s": 40_000_000,
        "nvlink": False,
        "processes": (ProcessReading(4000 + index, "VLLM::Worker", used - 300 * MIB, own=True),),
    }
    return CardReading(**{**values, **changes})


def engine(second: float, **changes: Any) -> EngineReading:
    """An engine that serves two requests at once, well and fast, for ``second`` seconds."""
    values: dict[str, Any] = {
        "state": "ready",
        "since": BEGAN - 600,
        "pid": 3999,
        "running": 2,
        "waiting": 0,
        "held": 0,
        "kv_cache_usage": 0.31,
        "steps": 1000 + 80 * second,
        "preemptions": 0,
        "prompt_tokens": int(5000 + 900 * second),
        "generation_tokens": int(2000 + 150 * second),
        "thinking_tokens": 0,
        "requests": int(10 + second / 4),
        "errors": 0,
        "pictures": int(second / 8),
        "time_to_first_token_s": 0.31,
        "inter_token_latency_s": 0.011,
        "queue_s": 0.01,
        "request_s": 3.2,
        "host_cores": 0.3,
        "events": {},
    }
    return EngineReading(**{**values, **changes})


def shot(second: float, cards: tuple[CardReading, ...] | None = None, **of_engine: Any) -> Snapshot:
    return Snapshot(
        at=BEGAN + second,
        cards=(card(0), card(1)) if cards is None else cards,
        engine=engine(second, **of_engine),
    )


def alone(second: float, **of_engine: Any) -> Snapshot:
    """With one card, where the cards do not matter."""
    return shot(second, (card(0),), **of_engine)


def seconds(count: int, step: int = 1) -> Iterator[int]:
    yield from range(0, count, step)


Case = tuple[WatchLimits, float, Callable[[], Iterator[Snapshot]]]


def near_limit() -> Iterator[Snapshot]:
    for at in seconds(240, 5):
        used = TOTAL - 120 * MIB if 30 <= at < 120 else HELD
        yield shot(at, (card(0, used, processes=None), card(1)))


def over_plan() -> Iterator[Snapshot]:
    for at in seconds(360, 5):
        used = 23 * GIB if 40 <= at < 160 else HELD
        yield shot(at, (card(0), card(1, used)))


def unbalanced() -> Iterator[Snapshot]:
    for at in seconds(360, 5):
        # within the upper bound of either card's plan, and too far apart
        used = 18 * GIB if 40 <= at < 160 else HELD
        yield shot(at, (card(0, int(22.4 * GIB) if 40 <= at < 160 else HELD), card(1, used)))


def one_idle() -> Iterator[Snapshot]:
    for at in seconds(240, 5):
        yield shot(at, (card(0, utilization=0.97), card(1, utilization=0.0 if at < 120 else 0.96)))


def stuck() -> Iterator[Snapshot]:
    for at in seconds(240, 5):
        if at < 130:
            standing = {"steps": 3000.0, "running": 3, "inter_token_latency_s": None, "time_to_first_token_s": None}
            yield alone(at, **(standing if at >= 20 else {}))
        elif at < 140:
            yield alone(at, state="stuck", running=None, waiting=None, steps=None)
        else:
            yield alone(at, state="loading", pid=5000, running=None, waiting=None, steps=None)


def queue() -> Iterator[Snapshot]:
    for at in seconds(420, 5):
        held = max(0, at - 30) // 8 if at < 200 else max(0, 21 - (at - 200) // 4)
        # first tokens come late as well, but not for half a minute yet
        yield alone(at, running=16, held=held, time_to_first_token_s=0.9)


def thrashing() -> Iterator[Snapshot]:
    for at in seconds(360, 5):
        count = 0 if at < 30 else (at - 30) // 2 if at < 150 else 60
        yield alone(at, preemptions=count, kv_cache_usage=0.99 if 30 <= at < 150 else 0.4)


def throttled() -> Iterator[Snapshot]:
    for at in seconds(300, 5):
        hot = 40 <= at < 140
        changes: dict[str, Any] = {
            "throttle_reasons": ("software-thermal",),
            "temperature_c": 91.0,
            "sm_clock_hz": 885_000_000,
        }
        yield shot(at, (card(0, **(changes if hot else {})), card(1, throttle_reasons=("power-cap",))))


def creeping() -> Iterator[Snapshot]:
    noise = Random(5)
    for at in seconds(5400, 60):
        used = HELD + int(at / 60 * 9 * MIB) + noise.randrange(6) * MIB
        busy = at // 60 % 2
        yield shot(at, (card(0, used + busy * 200 * MIB), card(1)), running=2 * busy)


def stranger() -> Iterator[Snapshot]:
    desktop = ProcessReading(900, "/usr/lib/xorg/Xorg", 300 * MIB, own=False)
    other = ProcessReading(4711, "/usr/bin/python3", 2 * GIB, own=False)
    for at in seconds(150, 5):
        own = card(0).processes or ()
        yield shot(at, (card(0, processes=(*own, desktop, *((other,) if 40 <= at < 90 else ()))), card(1)))


def xid() -> Iterator[Snapshot]:
    for at in seconds(120, 5):
        yield shot(at, (card(0, xid=(43,) if at >= 20 else ()), card(1, xid=(43, 79) if at >= 40 else ())))


def ecc() -> Iterator[Snapshot]:
    for at in seconds(120, 5):
        yield shot(at, (card(0), card(1, ecc_uncorrected=3 if at < 40 else 4)))


def eager() -> Iterator[Snapshot]:
    for at in seconds(240, 5):
        yield shot(at, (card(0, utilization=0.4), card(1, utilization=0.4)), inter_token_latency_s=0.096, running=1)


def pictures() -> Iterator[Snapshot]:
    for at in seconds(240, 5):
        slow = at < 120
        cards = tuple(card(index, utilization=0.2 if slow else 0.8) for index in (0, 1))
        changes = {"host_cores": 1.02, "time_to_first_token_s": 4.2, "pictures": at} if slow else {}
        yield shot(at, cards, **changes)


def allreduce() -> Iterator[Snapshot]:
    for at in seconds(180, 5):
        cards = tuple(
            card(index, pcie_rx_bytes_per_s=5_600_000_000, pcie_tx_bytes_per_s=5_700_000_000) for index in (0, 1)
        )
        yield shot(at, cards, time_to_first_token_s=4.4, inter_token_latency_s=0.034)


def compilation() -> Iterator[Snapshot]:
    for at in seconds(360, 5):
        count = 0 if at < 30 else min(7, (at - 30) // 5)
        late = {"time_to_first_token_s": 6.0} if 30 <= at < 90 else {}
        yield alone(at, events={"kernel-compiled": count}, **late)


def thinking() -> Iterator[Snapshot]:
    for at in seconds(240, 5):
        yield alone(at, thinking_tokens=int(130 * at), generation_tokens=int(150 * at), request_s=41.0)


def waiting() -> Iterator[Snapshot]:
    for at in seconds(240, 5):
        late = {"waiting": 12, "queue_s": 8.1, "time_to_first_token_s": 9.4} if at < 120 else {}
        yield alone(at, **late)


def unexplained() -> Iterator[Snapshot]:
    for at in seconds(360, 5):
        late = {"time_to_first_token_s": 14.0, "inter_token_latency_s": 0.2} if at < 160 else {}
        yield alone(at, **late)


def calm(length: int = 3600, step: int = 1, seed: int = 0) -> Iterator[Snapshot]:
    """An ordinary hour with everything that is ordinary: bursts, idle times, a power cap, one large picture that
    leaves the allocator larger for good, short queues, late first tokens once in a while, missing readings."""
    chance = Random(seed)
    grown = 0
    xids: tuple[int, ...] = ()
    preempted = thought = generated = prompted = steps = requests = seen = 0
    for at in range(0, length, step):
        burst = at // 300 % 3  # five minutes idle, light, heavy
        running = 0 if burst == 0 else chance.randrange(1, 4) if burst == 1 else chance.randrange(6, 17)
        waiting = chance.choice((0, 0, 0, 1, 3, 6)) if burst == 2 else 0
        if at > length // 3:
            grown = 700 * MIB  # within the plan's upper bound
        generated += running * 40 * step
        prompted += running * 300 * step
        thought += running * 12 * step
        steps += 60 * step if running else 0
        requests += chance.randrange(3) if running else 0
        seen += chance.randrange(2) if running else 0
        preempted += chance.random() < 0.004 * step  # one in four minutes
        busy = 0.0 if not running else min(1.0, chance.gauss(0.75, 0.2))
        cards = tuple(
            card(
                index,
                HELD + grown + chance.randrange(40) * MIB,
                utilization=max(0.0, min(1.0, busy + chance.gauss(0, 0.05))),
                power_w=90.0 if not running else chance.gauss(330, 60),
                temperature_c=chance.gauss(70, 4),
                throttle_reasons=(("power-cap",) if chance.random() < 0.5 else ())
                + (("software-thermal",) if chance.random() < 0.02 else ()),
                xid=xids,
                pcie_rx_bytes_per_s=int(abs(chance.gauss(6e8, 5e8))) if running else 0,
                pcie_tx_bytes_per_s=int(abs(chance.gauss(6e8, 5e8))) if running else 0,
            )
            for index in (0, 1)
        )
        if at == length // 2:
            xids = (43,)  # a client program was ended
        late = chance.random() < 0.02
        yield Snapshot(
            at=BEGAN + at,
            cards=None if chance.random() < 0.01 else cards,
            engine=engine(
                at,
                running=running,
                waiting=waiting,
                steps=float(steps),
                preemptions=preempted,
                prompt_tokens=prompted,
                generation_tokens=generated,
                thinking_tokens=thought,
                requests=requests,
                pictures=seen,
                kv_cache_usage=min(1.0, running * 0.055),
                time_to_first_token_s=None if not running else chance.gauss(9, 2) if late else chance.gauss(0.6, 0.2),
                inter_token_latency_s=None if not running else abs(chance.gauss(0.012 + running * 0.001, 0.004)),
                queue_s=None if not running else abs(chance.gauss(0.05, 0.05)),
                request_s=None if not running else abs(chance.gauss(4, 1.5)),
                host_cores=0.02 if not running else abs(chance.gauss(0.45, 0.2)),
            ),
            missing=(),
        )


# by the code of the alert that each shows
CASES: dict[str, Case] = {
    "card-near-limit": (WatchLimits(), 5.0, near_limit),
    "card-over-plan": (PLAN, 5.0, over_plan),
    "cards-unbalanced": (PLAN, 5.0, unbalanced),
    "one-gpu-idle": (PLAN, 5.0, one_idle),
    "engine-stuck": (PLAN, 5.0, stuck),
    "queue-growing": (PLAN, 5.0, queue),
    "cache-thrashing": (PLAN, 5.0, thrashing),
    "card-throttled": (PLAN, 5.0, throttled),
    "memory-creeping": (PLAN, 60.0, creeping),
    "foreign-process": (PLAN, 5.0, stranger),
    "xid-error": (PLAN, 5.0, xid),
    "ecc-error": (PLAN, 5.0, ecc),
    "eager-mode-cost": (EAGER, 5.0, eager),
    "slow-image-preprocessing": (PLAN, 5.0, pictures),
    "slow-allreduce": (PLAN, 5.0, allreduce),
    "slow-kernel-compilation": (PLAN, 5.0, compilation),
    "slow-thinking": (PLAN, 5.0, thinking),
    "slow-queue": (PLAN, 5.0, waiting),
    "slow-unexplained": (PLAN, 5.0, unexplained),
    "calm": (PLAN, 30.0, lambda: calm(3600, 30, seed=3)),
}


def recording(name: str) -> bytes:
    """The recording of a case as it stands in its file."""
    limits, interval_s, make = CASES[name]
    header = Header(deployment=name, began=BEGAN, interval_s=interval_s, limits=limits)
    return b"".join(msgspec.json.encode(line) + b"\n" for line in (header, *make()))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        (FOLDER / f"{name}.jsonl").write_bytes(recording(name))
