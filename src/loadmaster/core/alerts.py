"""Readings to alerts: one small state machine for each rule and subject, with hysteresis. Pure and replayable.

The same snapshots in the same order give the same findings at the same times, whoever feeds them.
"""

from __future__ import annotations

from shlex import quote

from msgspec import Struct

from loadmaster.core.alertrules import FixRule, Measure, Rule, Seen, Subject, longest_gap_s, rules
from loadmaster.core.cardmeasures import CARD_MEASURES
from loadmaster.core.checks.catalogue import finding, order
from loadmaster.core.enginemeasures import ENGINE_MEASURES
from loadmaster.core.facts import Evidence, Finding, Fix
from loadmaster.core.observation import Snapshot
from loadmaster.core.watchlimits import WatchLimits

MEASURES = {**CARD_MEASURES, **ENGINE_MEASURES}
_FINE = Seen(0.0)
_NAME = "NAME"  # in a rule's command, the deployment


class AlertChange(Struct, frozen=True):
    """An alert that began (also for one more card), or one that ended."""

    at: float
    began: bool
    finding: Finding


class Machine:
    """Quiet, rising, holding. ``holds``: the alert is raised. ``rising``: it may be soon."""

    def __init__(self, rule: Rule, gap_s: float) -> None:
        self._rule = rule
        self._gap_s = gap_s
        self._last: float | None = None
        self._counted_s = 0.0
        self.rising = False
        self.holds = False

    def step(self, at: float, value: float | None) -> None:
        """Take a figure; None changes nothing."""
        if value is None:
            return
        rule = self._rule
        passed = 0.0 if self._last is None else min(max(0.0, at - self._last), self._gap_s)
        self._last = at
        if self.holds:
            self._counted_s = self._counted_s + passed if value < rule.clear_at else 0.0
            if value < rule.clear_at and self._counted_s >= rule.clear_after_s:
                self.holds = self.rising = False
        elif not self.rising:
            if value >= rule.raise_at:
                self.rising, self._counted_s = True, 0.0
                self.holds = rule.raise_after_s <= 0
        elif value < rule.clear_at:
            self.rising = False
        else:
            self._counted_s += passed
            if value >= rule.raise_at and self._counted_s >= rule.raise_after_s:
                self.holds, self._counted_s = True, 0.0


class _Watched:
    """One rule with its figure, the machines of its subjects, and what each had to say when it was raised."""

    def __init__(self, rule: Rule, limits: WatchLimits, name: str | None, gap_s: float) -> None:
        self.rule = rule
        self._name = name
        self.measure: Measure = MEASURES[rule.measure](rule.settings, limits)
        self.machines: dict[Subject, Machine] = {}
        self.words: dict[Subject, str] = {}
        self._gap_s = gap_s

    def step(self, snapshot: Snapshot, *, hushed: bool) -> bool:
        """Whether what holds has changed."""
        changed = False
        for subject, seen in self.measure.look(snapshot).items():
            machine = self.machines.get(subject)
            if machine is None:
                machine = self.machines[subject] = Machine(self.rule, self._gap_s)
            if hushed and seen.value is not None:
                seen = _FINE
            machine.step(snapshot.at, seen.value)
            if machine.holds and subject not in self.words:
                self.words[subject] = seen.words()
                changed = True
            elif not machine.holds and self.words.pop(subject, None) is not None:
                changed = True
        return changed

    @property
    def active(self) -> bool:
        return any(machine.holds or machine.rising for machine in self.machines.values())

    def finding(self) -> Finding | None:
        """One finding for all subjects."""
        if not self.words:
            return None
        said = sorted(self.words.items(), key=lambda item: (item[0] is None, item[0] or 0))
        return finding(
            self.rule.code,
            "; ".join(words for _, words in said),
            evidence=[Evidence("engine" if subject is None else "gpu", words) for subject, words in said],
            fixes=[Fix(fix.why, fix.argv, fix.remove, command=self._command(fix)) for fix in self.rule.fix],
            confidence=self.rule.confidence,
        )

    def _command(self, fix: FixRule) -> str | None:
        """To be pasted: with the deployment's own name, where it is known."""
        if fix.command is None or self._name is None:
            return fix.command
        return " ".join(quote(self._name) if word == _NAME else word for word in fix.command.split(" "))


class Alerts:
    """All rules over one series of snapshots. ``findings``: the alerts that hold, the most severe first.

    ``name``: of the deployment, for the commands in their fixes.
    """

    def __init__(self, limits: WatchLimits, name: str | None = None) -> None:
        gap_s = longest_gap_s()
        # those that step back before others come last
        ordered = sorted(rules(), key=lambda rule: bool(rule.unless))
        self._watched = [_Watched(rule, limits, name, gap_s) for rule in ordered]
        self.findings: tuple[Finding, ...] = ()

    def step(self, snapshot: Snapshot) -> tuple[AlertChange, ...]:
        """Take the next snapshot; what began and what ended."""
        active: set[str] = set()
        changed = False
        for watched in self._watched:
            hushed = not active.isdisjoint(watched.rule.unless)
            changed = watched.step(snapshot, hushed=hushed) or changed
            if watched.active:
                active.add(watched.rule.code)
        if not changed:
            return ()
        before = {item.code: item for item in self.findings}
        self.findings = order(item for watched in self._watched if (item := watched.finding()) is not None)
        now = {item.code: item for item in self.findings}
        return (
            *(AlertChange(snapshot.at, False, item) for code, item in before.items() if code not in now),
            *(AlertChange(snapshot.at, True, item) for code, item in now.items() if _has_more(item, before.get(code))),
        )


def _has_more(item: Finding, before: Finding | None) -> bool:
    """Whether it is new, or holds for a subject more than before."""
    return before is None or not set(item.evidence) <= set(before.evidence)
