"""The view of cards and engine as a terminal shows it, its lines, and its JSON."""

from __future__ import annotations

import re
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot

from loadmaster.core.facts import GIB, MIB
from loadmaster.core.observation import CardReading, EngineReading, ProcessReading, Snapshot
from loadmaster.core.watchlimits import CardLimits, WatchLimits
from loadmaster.core.watchview import WatchView
from loadmaster.render.paint import ansi
from loadmaster.render.watch import change_line, snapshot_line, watch_document, watch_text
from tests.watchcases import BEGAN, CASES, PLAN, TOTAL, card, shot

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def viewed(*shots: Snapshot, limits: WatchLimits = PLAN, name: str | None = "vision") -> WatchView:
    view = WatchView(limits, name)
    for one in shots:
        view.take(one)
    return view


def busy() -> WatchView:
    own = ProcessReading(4001, "VLLM::Worker", 20 * GIB, own=True)
    other = ProcessReading(4711, "/usr/bin/python3", 1536 * MIB, own=False)
    return viewed(
        shot(0, (card(0, int(22.3 * GIB)), card(1))),
        shot(10, (card(0), card(1, int(22.4 * GIB), processes=(own, other), throttle_reasons=("power-cap",)))),
    )


def test_at_80_columns() -> None:
    assert watch_text(busy(), 80) == snapshot("""\
vision  ready for 10 min 10 s                                           14:13:30

GPU 0  NVIDIA GeForce RTX 4090                    66 °C  310 of 450 W  2,520 MHz
  memory   ██████████████████████████████····  21.00 of 24.00 GiB, 3.00 GiB left
                                       ╎│▴┃
  plan     ╎ at rest 21.00   │ serving 22.00   ┃ at most 22.50   ▴ reached 22.30
  busy     ██████████··  80%   memory bus 50%   PCIe in 80.0 MB/s, out 40.0 MB/s

GPU 1  NVIDIA GeForce RTX 4090                    66 °C  310 of 450 W  2,520 MHz
           it is at its power limit
  memory   ██████████████████████████████▓▓··  22.40 of 24.00 GiB, 1.60 GiB left
                                       ╎│▴┃
  plan     ╎ at rest 21.00   │ serving 22.00   ┃ at most 22.50   ▴ reached 22.40
           ▓ other processes 1.50 GiB
  busy     ██████████··  80%   memory bus 50%   PCIe in 80.0 MB/s, out 40.0 MB/s

engine
  requests 2 running of 16   0 waiting   0 waiting in the gateway
  cache    ████········  31%   257,660 of 831,162 tokens
  tokens   150 generated a second   900 read a second
  latency  first token after 310 ms   then one each 11 ms   10 ms in the queue\
""")


def test_at_140_columns() -> None:
    assert watch_text(busy(), 140) == snapshot("""\
vision  ready for 10 min 10 s                                                                                                       14:13:30

GPU 0  NVIDIA GeForce RTX 4090                                                                                66 °C  310 of 450 W  2,520 MHz
  memory   ██████████████████████████████████████████████████████████████████████████████████············  21.00 of 24.00 GiB, 3.00 GiB left
                                                                                            ╎   │▴┃
  plan     ╎ at rest 21.00   │ serving 22.00   ┃ at most 22.50   ▴ reached 22.30
  busy     ██████████··  80%   memory bus 50%   PCIe in 80.0 MB/s, out 40.0 MB/s

GPU 1  NVIDIA GeForce RTX 4090                                                                                66 °C  310 of 450 W  2,520 MHz
           it is at its power limit
  memory   ██████████████████████████████████████████████████████████████████████████████████▓▓▓▓▓▓······  22.40 of 24.00 GiB, 1.60 GiB left
                                                                                            ╎   │▴┃
  plan     ╎ at rest 21.00   │ serving 22.00   ┃ at most 22.50   ▴ reached 22.40
           ▓ other processes 1.50 GiB
  busy     ██████████··  80%   memory bus 50%   PCIe in 80.0 MB/s, out 40.0 MB/s

engine
  requests 2 running of 16   0 waiting   0 waiting in the gateway
  cache    ████········  31%   257,660 of 831,162 tokens
  tokens   150 generated a second   900 read a second
  latency  first token after 310 ms   then one each 11 ms   10 ms in the queue\
""")


def test_an_alert_stands_under_the_view() -> None:
    limits, _, make = CASES["card-near-limit"]
    view = WatchView(limits, None)
    for one in make():
        view.take(one)
        if view.findings and one.at >= BEGAN + 100:
            break
    assert watch_text(view, 80).split("\n\n")[-1] == snapshot("""\
warning[card-near-limit]: A card is nearly full (for 1 min 5 s)
  card 0 has 120 MiB left of 24.00 GiB\
""")


def test_nothing_but_reasons() -> None:
    seen = Snapshot(at=BEGAN, missing=("the cards: no NVIDIA driver answers here", "the engine: it was not started"))
    assert watch_text(viewed(seen, limits=WatchLimits(), name=None), 80) == snapshot("""\
cards of this machine                                                   14:13:20

not read: the cards: no NVIDIA driver answers here
not read: the engine: it was not started\
""")


def test_an_engine_that_loads_and_a_card_that_tells_little() -> None:
    engine = EngineReading(state="loading", phase="weights", since=BEGAN - 75)
    seen = Snapshot(at=BEGAN, cards=(CardReading(index=0, name="NVIDIA \x1b[31mGPU"),), engine=engine)
    assert watch_text(viewed(seen, limits=WatchLimits()), 80) == snapshot("""\
vision  loading (weights) for 1 min 15 s                                14:13:20

GPU 0  NVIDIA \\x1b[31mGPU
  memory   unknown
  busy     unknown

engine
  requests unknown\
""")


def test_a_line_a_card_where_the_terminal_is_low() -> None:
    cards = tuple(card(index) for index in range(8))
    text = watch_text(viewed(shot(0, cards), shot(1, cards)), 80, height=24)
    assert text.count("\n") < 24
    assert text == snapshot("""\
vision  ready for 10 min 1 s                                            14:13:21

  GPU 0    ███████████████████████████████╎│┃··   21.0 of 24.0 GiB   80%   66 °C
  GPU 1    ███████████████████████████████╎│┃··   21.0 of 24.0 GiB   80%   66 °C
  GPU 2    ████████████████████████████████····   21.0 of 24.0 GiB   80%   66 °C
  GPU 3    ████████████████████████████████····   21.0 of 24.0 GiB   80%   66 °C
  GPU 4    ████████████████████████████████····   21.0 of 24.0 GiB   80%   66 °C
  GPU 5    ████████████████████████████████····   21.0 of 24.0 GiB   80%   66 °C
  GPU 6    ████████████████████████████████····   21.0 of 24.0 GiB   80%   66 °C
  GPU 7    ████████████████████████████████····   21.0 of 24.0 GiB   80%   66 °C
  plan     ╎ at rest   │ serving   ┃ at most   ▴ reached

engine
  requests 2 running of 16   0 waiting   0 waiting in the gateway
  cache    ████········  31%   257,660 of 831,162 tokens
  tokens   150 generated a second   900 read a second
  latency  first token after 310 ms   then one each 11 ms   10 ms in the queue\
""")


def test_lines_for_a_log() -> None:
    view = busy()
    assert snapshot_line(view) == snapshot(
        "14:13:30  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 22.40 of 24.00 GiB 80% 66 °C"
    )
    limits, _, make = CASES["xid-error"]
    view = WatchView(limits, None)
    lines = [change_line(change) for one in make() for change in view.take(one)]
    assert lines == snapshot(
        [
            "14:14:00  error[xid-error] began: The driver reports an error of a card: card 1: Xid 79, the card has fallen off the bus"
        ]
    )


def test_json_has_null_for_what_is_unknown_and_bytes() -> None:
    document = watch_document(busy())
    assert document["schema"] == 1
    assert document["cards"][1]["used_bytes"] == int(22.4 * GIB)
    assert document["cards"][0]["ecc_uncorrected"] == 0
    assert document["cards"][0]["reserved_bytes"] is None
    assert document["engine"]["phase"] is None
    assert document["reached_bytes"] == {"0": int(22.3 * GIB), "1": int(22.4 * GIB)}
    assert document["plan"]["cards"][0]["serving_bytes"] == 22 * GIB
    assert document["findings"] == []


SIZES = st.one_of(st.none(), st.integers(0, 2 * TOTAL))


@given(
    used=SIZES,
    total=SIZES,
    free=SIZES,
    reserved=st.one_of(st.none(), st.integers(0, GIB)),
    width=st.integers(60, 160),
    utilization=st.one_of(st.none(), st.floats(0, 1)),
    planned=st.booleans(),
    height=st.one_of(st.none(), st.integers(5, 60)),
)
def test_no_reading_breaks_the_view(
    used: int | None,
    total: int | None,
    free: int | None,
    reserved: int | None,
    width: int,
    utilization: float | None,
    planned: bool,
    height: int | None,
) -> None:
    one = CardReading(
        index=0, total_bytes=total, used_bytes=used, free_bytes=free, reserved_bytes=reserved, utilization=utilization
    )
    view = viewed(Snapshot(at=BEGAN, cards=(one,)), limits=PLAN if planned else WatchLimits())
    text = watch_text(view, width, height=height)
    assert max(len(line) for line in text.split("\n")) <= width + 30
    assert COLOUR.sub("", watch_text(view, width, ansi, height)) == text


@given(st.sampled_from(sorted(CASES)), st.integers(70, 160))
def test_recordings_fit_their_width(name: str, width: int) -> None:
    limits, _, make = CASES[name]
    view = WatchView(limits, name)
    for one, _ in zip(make(), range(12)):
        view.take(one)
    assert all(len(line) <= width for line in watch_text(view, width).split("\n"))


HOST = WatchLimits(
    host=CardLimits(
        index=0,
        total_bytes=16 * GIB,
        budget_bytes=16 * GIB,
        start_bytes=150 * MIB,
        steady_bytes=180 * MIB,
        serving_bytes=220 * MIB,
        serving_high_bytes=329 * MIB,
        spread_bytes=200 * MIB,
    ),
    places=2,
)


def in_host_memory(running: int) -> WatchView:
    """llama.cpp: no card, and totals of tokens that move only at a request's end."""
    reading = EngineReading(
        state="ready",
        since=BEGAN - 60,
        pid=7,
        running=running,
        waiting=0,
        prompt_tokens=100,
        generation_tokens=50,
        late_totals=("prompt_tokens", "generation_tokens"),
    )
    missing = ("the cards: no NVIDIA driver answers here (NVML Shared Library Not Found)",)
    held = ((0, 240), (1, 200))
    return viewed(
        *(
            Snapshot(
                at=BEGAN + second,
                engine=msgspec.structs.replace(reading, resident_bytes=amount * MIB),
                missing=missing,
            )
            for second, amount in held
        ),
        limits=HOST,
        name="demo",
    )


def test_the_hosts_memory_stands_against_its_plan() -> None:
    assert watch_text(in_host_memory(1), 80) == snapshot("""\
demo  ready for 1 min 1 s                                               14:13:21

host memory
  memory   ███████████████████████████······················  200.0 MiB resident
                                  ╎     │ ▴            ┃
  plan     ╎ at rest 180.0 MiB   │ serving 220.0 MiB   ┃ at most 329.0 MiB
           ▴ reached 240.0 MiB

engine
  requests 1 running of 2   0 waiting
  tokens   unknown while requests run
  latency  unknown until a request ends

not read: the cards: no NVIDIA driver answers here (NVML Shared Library Not
          Found)\
""")
    assert watch_text(in_host_memory(1), 60) == snapshot("""\
demo  ready for 1 min 1 s                           14:13:21

host memory
  memory   ████████████████·············  200.0 MiB resident
                        ╎   │▴      ┃
  plan     ╎ at rest 180.0 MiB   │ serving 220.0 MiB
           ┃ at most 329.0 MiB   ▴ reached 240.0 MiB

engine
  requests 1 running of 2   0 waiting
  tokens   unknown while requests run
  latency  unknown until a request ends

not read: the cards: no NVIDIA driver answers here (NVML
          Shared Library Not Found)\
""")
    assert snapshot_line(in_host_memory(1)) == snapshot(
        "14:13:21  ready, 1 running, 0 waiting, tokens/s unknown, 200.0 MiB of host memory"
    )
    assert snapshot_line(in_host_memory(0)) == snapshot(
        "14:13:21  ready, 0 running, 0 waiting, 0 tokens/s, 200.0 MiB of host memory"
    )
    found = watch_document(in_host_memory(1))
    assert found["reached_bytes"] == {"host": 240 * MIB}
    assert found["plan"]["host"]["steady_bytes"] == 180 * MIB
    assert found["plan"]["cards"] == []
    assert found["engine"]["resident_bytes"] == 200 * MIB


def test_the_hosts_memory_that_is_not_read_is_unknown() -> None:
    view = viewed(Snapshot(at=BEGAN, engine=EngineReading(state="ready")), limits=HOST)
    assert "host memory\n  memory   unknown\n  plan     ╎ at rest 180.0 MiB" in watch_text(view, 80)


def test_a_plan_of_the_host_is_not_held_against_card_0() -> None:
    view = viewed(shot(0), limits=HOST)
    assert watch_text(view, 80).count("at rest") == 1
    assert view.findings == ()


def test_at_60_columns() -> None:
    assert watch_text(busy(), 60) == snapshot("""\
vision  ready for 10 min 10 s                       14:13:30

GPU 0  NVIDIA GeForce RTX 4…  66 °C  310 of 450 W  2,520 MHz
  memory   ███████████████████████████████████████████······
                                                     ╎│▴┃
           21.00 of 24.00 GiB, 3.00 GiB left
  plan     ╎ at rest 21.00   │ serving 22.00
           ┃ at most 22.50   ▴ reached 22.30
  busy     ██████████··  80%   memory bus 50%
           PCIe in 80.0 MB/s, out 40.0 MB/s

GPU 1  NVIDIA GeForce RTX 4…  66 °C  310 of 450 W  2,520 MHz
           it is at its power limit
  memory   ███████████████████████████████████████████▓▓▓···
                                                     ╎│▴┃
           22.40 of 24.00 GiB, 1.60 GiB left
  plan     ╎ at rest 21.00   │ serving 22.00
           ┃ at most 22.50   ▴ reached 22.40
           ▓ other processes 1.50 GiB
  busy     ██████████··  80%   memory bus 50%
           PCIe in 80.0 MB/s, out 40.0 MB/s

engine
  requests 2 running of 16   0 waiting
           0 waiting in the gateway
  cache    ████········  31%   257,660 of 831,162 tokens
  tokens   150 generated a second   900 read a second
  latency  first token after 310 ms   then one each 11 ms
           10 ms in the queue\
""")


@pytest.mark.parametrize("width", [60, 72, 80, 140])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    views = [
        busy(),
        in_host_memory(1),
        viewed(shot(0), name="a-name-that-is-as-long-as-names-may-be-and-then-some-more"),
    ]
    for view in views:
        for height in (None, 3):
            lines = watch_text(view, width, height=height).splitlines()
            assert max(map(len, lines)) <= width, max(lines, key=len)
