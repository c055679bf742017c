"""Rounds of SIGKILL: any process of a deployment, in any state. Within ten seconds no orphan is left, the status is true,
and ``up`` works.

    python -m tests.service.killrounds --rounds 100 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from subprocess import Popen

from loadmaster.service.enginestate import read_state
from loadmaster.service.status import Status
from tests.service.served import Served, served

LIMIT_S = 10.0
VICTIMS = (
    "engine",
    "run-engine",
    "supervisord",
    "gateway",
    "guard",
    "run-engine and supervisord",
    "engine and gateway",
)
MOMENTS = ("ready", "asked", "starting", "loading", "warming-up", "backing-off", "stopping", "anywhere")


class Rounds:
    """One deployment that is hit again and again. ``said`` gets a line for each round."""

    def __init__(self, one: Served, seed: int) -> None:
        self.one = one
        self.random = random.Random(seed)
        self.up: Popen[str] | None = None

    def round(self, moment: str, victims: str) -> str:
        """Bring the deployment to the moment, kill, and check. What happened, in a line."""
        one = self.one
        try:
            self._reach(moment)
            hit = self._kill(victims)
            begin = time.monotonic()
            settled = self._settle(begin)
            self._finish_up()
            one.up()
            assert one.ask(), "no answer through the gateway"
            assert one.status().state == "ready"
            assert not one.orphans(), f"orphans after up: {one.orphans()}\n{one.log()}"
        finally:
            self._finish_up()
        return f"{moment:12} {victims:28} hit {hit or 'nobody'}: settled after {settled:.1f} s"

    # ------------------------------------------------------------------------------------------ before

    def _reach(self, moment: str) -> None:
        one, chance = self.one, self.random
        options = ["--load", f"{chance.uniform(0.2, 1.5):.2f}", "--workers", str(chance.randrange(3)), "--tps", "40"]
        options += ["--stray"] if chance.random() < 0.5 else []
        options += ["--ignore-term"] if chance.random() < 0.2 else []
        if moment in ("ready", "asked", "stopping"):
            one.up()
            if moment == "stopping":
                self.up = one.start("down", one.name)
                time.sleep(chance.uniform(0.0, 0.8))
            return
        one.run("down", one.name)
        if moment == "warming-up":
            options += ["--delay", "0.7"]
        if moment == "backing-off":
            starts = one.home / f"starts-{time.monotonic_ns()}"
            options += ["--crash-at", "load", "--starts", str(starts), "--only-first", "1"]
        one.configure(*options)
        self.up = one.start("up", one.name)
        if moment == "anywhere":
            time.sleep(chance.uniform(0.0, 4.0))
        elif moment == "starting":
            self._wait(lambda now: now.supervisor.pid is not None)
        else:
            self._wait(lambda now: now.state in (moment, "ready"))

    def _wait(self, condition: object) -> None:
        deadline = time.monotonic() + LIMIT_S * 2
        while time.monotonic() < deadline:
            if callable(condition) and condition(self.one.status()):
                return
            time.sleep(0.01)

    def _kill(self, victims: str) -> str:
        hit = []
        for victim in victims.split(" and "):
            pid = self._pid(victim)
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                hit.append(f"{victim} {pid}")
        return ", ".join(hit)

    def _pid(self, victim: str) -> int | None:
        now = self.one.status()
        if victim == "engine":
            return now.backend.pid
        if victim == "supervisord":
            return now.supervisor.pid
        if victim == "run-engine":
            state = read_state(self.one.places.engine)
            if now.run_engine is not None and state is not None:
                return now.run_engine
        words = {"gateway": "run-web", "guard": "loadmaster.service.guard", "run-engine": "run-engine"}[victim]
        for process in self.one.processes():
            try:
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if words in command:
                return process.pid
        return None

    # ------------------------------------------------------------------------------------------ after

    def _settle(self, begin: float) -> float:
        """Seconds until there is no orphan and the status is true, and both stay so for a moment."""
        good_since: float | None = None
        problem = ""
        while True:
            now = time.monotonic()
            problem = self._untrue() or (f"orphans: {found}" if (found := self.one.orphans()) else "")
            good_since = None if problem else good_since or now
            if good_since is not None and now - good_since >= 0.3:
                return good_since - begin
            assert now - begin < LIMIT_S + 0.5, f"after {LIMIT_S:.0f} s: {problem}\n{self.one.log()}"
            time.sleep(0.05)

    def _untrue(self) -> str:
        """What the status says that is not so."""
        one = self.one
        now: Status = one.status()
        running = one.processes()
        if now.supervisor.pid is None:
            if running:
                return f"no supervisor, but {running}"
            return "" if now.state in ("down", "dead", "exited", "failed") else f"{now.state}, but nothing runs"
        if now.state == "ready":
            return "" if now.backend.answers else "ready, but it does not answer"
        if now.state in ("down", "failed", "dead"):
            return f"{now.state} ({now.message}), but the supervisor lives"
        if now.state in ("loading", "warming-up") and now.backend.pid is None and one.status().state == now.state:
            return f"{now.state}, but there is no engine"
        return ""

    def _finish_up(self) -> None:
        if self.up is not None:
            self.up.terminate()
            try:
                self.up.communicate(timeout=90)
            except Exception:
                self.up.kill()
                self.up.communicate()
            self.up = None


def cases(rounds: int, seed: int) -> list[tuple[str, str]]:
    """Which moment and victims each round has: all pairs in a random order, over and over."""
    chance = random.Random(seed)
    chosen: list[tuple[str, str]] = []
    while len(chosen) < rounds:
        pairs = [(moment, victim) for moment in MOMENTS for victim in VICTIMS]
        chance.shuffle(pairs)
        chosen += pairs
    return chosen[:rounds]


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak kill", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="loadmaster-soak-") as folder, served(Path(folder)) as one:
        one.configure("--load", "0.5")
        rounds = Rounds(one, options.seed)
        for number, (moment, victims) in enumerate(cases(options.rounds, options.seed), start=1):
            try:
                text = rounds.round(moment, victims)
            except AssertionError as error:
                failed += 1
                text = f"FAILED {moment} {victims}: {error}"
                one.end()
            sys.stdout.write(f"{number:4}/{options.rounds} {text}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{options.rounds} rounds, {failed} failed (seed {options.seed})\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
