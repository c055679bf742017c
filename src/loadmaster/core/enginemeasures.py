"""Figures of the engine that alerts are judged by: standing still, queue, cache, and why requests are slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loadmaster.core.alertrules import MeasureMaker, Seen, Subject
from loadmaster.core.cardmeasures import is_ready
from loadmaster.core.observation import EngineReading, Snapshot
from loadmaster.core.watchlimits import WatchLimits
from loadmaster.core.windows import GrowthWindow, MeanWindow

_UNKNOWN: Mapping[Subject, Seen] = {None: Seen(None)}
_FINE: Mapping[Subject, Seen] = {None: Seen(0.0)}
_MINUTE_S = 60.0


def _one(value: float | None, words: Callable[[], str]) -> Mapping[Subject, Seen]:
    return {None: Seen(value, words)}


class StandingStill:
    """For how long the engine has had work and has not moved, over what run-engine lets pass.

    run-engine also sends probes; an engine that answers one has moved its counter, so both come to the same, this one
    a probe earlier. What run-engine calls stuck is.
    """

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._after_s = limits.stuck_after_s
        self._steps: float | None = None
        self._moved_at: float | None = None

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        engine = snapshot.engine
        if engine is None or engine.state is None:
            return _UNKNOWN
        if engine.state == "stuck":
            return _one(1.0, lambda: "it has work, its counter stands still, and it answers no probe")
        if engine.state != "ready":
            self._moved_at = None
            return _FINE
        if engine.running is None or engine.steps is None:
            return _UNKNOWN
        busy = engine.running + (engine.waiting or 0) > 0
        if not busy or engine.steps != self._steps or self._moved_at is None or snapshot.at < self._moved_at:
            self._moved_at, self._steps = snapshot.at, engine.steps
            return _FINE
        still = snapshot.at - self._moved_at
        asked = engine.running + (engine.waiting or 0)
        return _one(still / self._after_s, lambda: f"{asked} requests wait and nothing has moved for {still:.0f} s")


class QueueGrowth:
    """Requests more that wait than a minute before."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._half_s = settings["window_s"] / 2
        self._least = settings["least"]
        self._now = MeanWindow(self._half_s)
        self._lagging: list[tuple[float, float]] = []
        self._before = MeanWindow(self._half_s)

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        engine = snapshot.engine
        if engine is None or engine.state is None:
            return _UNKNOWN
        if engine.state != "ready":
            self._now.clear()
            self._before.clear()
            self._lagging.clear()
            return _FINE
        waiting = _waiting(engine)
        at = snapshot.at
        self._now.add(at, waiting)
        if waiting is not None:
            self._lagging.append((at, waiting))
        while self._lagging and self._lagging[0][0] <= at - self._half_s:
            self._before.add(*self._lagging.pop(0))
        self._before.add(at - self._half_s, None)
        now, before = self._now.mean, self._before.mean
        if waiting is None or now is None or before is None:
            return _UNKNOWN
        growth = now - before if waiting >= self._least else 0.0
        return _one(
            max(0.0, growth), lambda: f"{waiting:.0f} requests wait, {growth:.0f} more than half a minute before"
        )


def _waiting(engine: EngineReading) -> float | None:
    """Requests that wait in the gateway and in the engine."""
    if engine.waiting is None and engine.held is None:
        return None
    return float((engine.waiting or 0) + (engine.held or 0))


class Preemptions:
    """Requests a minute that were thrown out of the cache and begin anew."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self._window = GrowthWindow(settings["window_s"])

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        engine = snapshot.engine
        if engine is None or engine.state is None:
            return _UNKNOWN
        if engine.state != "ready":
            return _FINE
        self._window.add(snapshot.at, engine.preemptions)
        rate = None if engine.preemptions is None else self._window.a_minute()
        full = "" if engine.kv_cache_usage is None else f", the cache is {engine.kv_cache_usage:.0%} full"
        return _one(rate, lambda: f"{rate:.0f} requests a minute are thrown out of the cache and begin anew{full}")


class Slow:
    """What all causes of slowness share: latencies over a minute and how far they are over what counts as slow."""

    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        self.settings = settings
        self.limits = limits
        self._means = {
            name: MeanWindow(_MINUTE_S)
            for name in ("time_to_first_token_s", "inter_token_latency_s", "queue_s", "request_s", "host_cores")
        }
        self._running = MeanWindow(_MINUTE_S)

    def look(self, snapshot: Snapshot) -> Mapping[Subject, Seen]:
        engine = snapshot.engine
        if engine is None or engine.state is None:
            return _UNKNOWN
        if engine.state != "ready":
            return _FINE
        at = snapshot.at
        for name, window in self._means.items():
            window.add(at, getattr(engine, name))
        self._running.add(at, None if engine.running is None else float(engine.running))
        self.take(snapshot, engine)
        slowness = self._slowness()
        if slowness is None:
            # nothing was finished for a minute: fine when nothing was asked, else not known
            running = self._running.mean
            return _FINE if running is not None and running < 0.1 else _UNKNOWN
        cause = self.cause()
        if cause is None:
            return _FINE
        return _one(slowness, lambda: f"{self._latency()}; {cause}")

    def take(self, snapshot: Snapshot, engine: EngineReading) -> None:
        """Readings beyond the latencies."""

    def cause(self) -> str | None:
        """The cause in words, None while it is not there."""
        raise NotImplementedError

    def mean(self, name: str) -> float | None:
        return self._means[name].mean

    @property
    def running(self) -> float | None:
        return self._running.mean

    def _slowness(self) -> float | None:
        over = [
            mean / self.settings[limit]
            for name, limit in (
                ("time_to_first_token_s", "first_token_s"),
                ("inter_token_latency_s", "inter_token_s"),
                ("request_s", "request_s"),
            )
            if limit in self.settings and (mean := self._means[name].mean) is not None
        ]
        return max(over) if over else None

    def _latency(self) -> str:
        first, inter = self.mean("time_to_first_token_s"), self.mean("inter_token_latency_s")
        said = []
        if first is not None:
            said.append(f"the first token comes after {first:.1f} s")
        if inter is not None and inter > 0:
            said.append(f"{1 / inter:.1f} tokens a second follow")
        whole = self.mean("request_s")
        if "request_s" in self.settings and whole is not None:
            said.append(f"a request takes {whole:.0f} s")
        return ", ".join(said)


class SlowEager(Slow):
    def cause(self) -> str | None:
        few = self.running is None or self.running <= self.settings["most_running"]
        return "the engine runs with --enforce-eager" if self.limits.eager and few else None


class SlowPictures(Slow):
    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        super().__init__(settings, limits)
        self._busy = MeanWindow(_MINUTE_S)
        self._pictures = GrowthWindow(_MINUTE_S)
        self._told = False

    def take(self, snapshot: Snapshot, engine: EngineReading) -> None:
        self._busy.add(snapshot.at, _busiest(snapshot))
        self._pictures.add(snapshot.at, engine.pictures)
        self._told = engine.pictures is not None

    def cause(self) -> str | None:
        cores, busy = self.mean("host_cores"), self._busy.mean
        if cores is None or busy is None or (self._told and not self._pictures.growth):
            return None
        if cores < self.settings["host_cores"] or busy > self.settings["utilization"]:
            return None
        return f"pictures are prepared on {cores:.1f} processor cores while the cards are {busy:.0%} busy"


class SlowAllReduce(Slow):
    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        super().__init__(settings, limits)
        self._traffic = MeanWindow(_MINUTE_S)
        self._linked = True

    def take(self, snapshot: Snapshot, engine: EngineReading) -> None:
        cards = [card for card in snapshot.cards or () if self.limits.card(card.index) is not None]
        self._linked = not cards or any(card.nvlink is not False for card in cards)
        both = [
            card.pcie_rx_bytes_per_s + card.pcie_tx_bytes_per_s
            for card in cards
            if card.pcie_rx_bytes_per_s is not None and card.pcie_tx_bytes_per_s is not None
        ]
        self._traffic.add(snapshot.at, max(both) if both else None)

    def cause(self) -> str | None:
        traffic, ranks = self._traffic.mean, self.limits.tensor_parallel_size or 1
        if ranks < 2 or self._linked or traffic is None or traffic < self.settings["bytes_per_s"]:
            return None
        return f"{ranks} cards exchange {traffic / 1e9:.1f} GB/s over PCIe, for there is no NVLink between them"


class SlowCompilation(Slow):
    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        super().__init__(settings, limits)
        self._compiled = GrowthWindow(settings["window_s"])

    def take(self, snapshot: Snapshot, engine: EngineReading) -> None:
        count = None if engine.events is None else float(engine.events.get("kernel-compiled", 0))
        self._compiled.add(snapshot.at, count)

    def cause(self) -> str | None:
        growth = self._compiled.growth
        if not growth:
            return None
        return f"{growth:.0f} {'kernel was' if growth == 1 else 'kernels were'} compiled at first use"


class SlowThinking(Slow):
    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        super().__init__(settings, limits)
        self._thought = GrowthWindow(settings["window_s"])
        self._generated = GrowthWindow(settings["window_s"])

    def take(self, snapshot: Snapshot, engine: EngineReading) -> None:
        self._thought.add(snapshot.at, engine.thinking_tokens)
        self._generated.add(snapshot.at, engine.generation_tokens)

    def cause(self) -> str | None:
        thought, generated = self._thought.growth, self._generated.growth
        if not thought or not generated or thought / generated < self.settings["share"]:
            return None
        return f"{min(1.0, thought / generated):.0%} of the tokens are thoughts before the answer"


class SlowQueue(Slow):
    def __init__(self, settings: Mapping[str, float], limits: WatchLimits) -> None:
        super().__init__(settings, limits)
        self._waiting = MeanWindow(_MINUTE_S)

    def take(self, snapshot: Snapshot, engine: EngineReading) -> None:
        self._waiting.add(snapshot.at, _waiting(engine))

    def cause(self) -> str | None:
        first, queue, waiting = self.mean("time_to_first_token_s"), self.mean("queue_s"), self._waiting.mean
        if queue is not None and first and queue / first >= self.settings["share"]:
            return f"{queue:.1f} s of that is spent in the engine's queue"
        if waiting is not None and waiting >= self.settings["waiting"]:
            return f"{waiting:.0f} requests wait for their turn"
        return None


class SlowForNoKnownReason(Slow):
    def cause(self) -> str | None:
        return "none of the known causes is there"


def _busiest(snapshot: Snapshot) -> float | None:
    busy = [card.utilization for card in snapshot.cards or () if card.utilization is not None]
    return max(busy) if busy else None


ENGINE_MEASURES: dict[str, MeasureMaker] = {
    "standing_still": StandingStill,
    "queue_growth": QueueGrowth,
    "preemptions_a_minute": Preemptions,
    "slow_eager": SlowEager,
    "slow_pictures": SlowPictures,
    "slow_allreduce": SlowAllReduce,
    "slow_compilation": SlowCompilation,
    "slow_thinking": SlowThinking,
    "slow_queue": SlowQueue,
    "slow_for_no_known_reason": SlowForNoKnownReason,
}

__all__ = ["ENGINE_MEASURES", "Slow", "is_ready"]
