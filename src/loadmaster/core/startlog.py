"""One start of an engine as its log tells it: phases, facts, and the signatures that hold, in the order of time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from loadmaster.core.enginelog import Phases, grammar
from loadmaster.core.facts import Evidence
from loadmaster.core.logfacts import LogFacts, PhaseTime, Reached
from loadmaster.core.logreadings import FactsReader, texts_of_facts
from loadmaster.core.logtext import LogLine, Tracebacks, Windows, is_frame
from loadmaster.core.signatures import Hit, Matcher, Signature

SERVING = "serving"
_VLLM = "vllm-log.toml"
_GRAMMARS = {
    "vllm": _VLLM,
    "llamacpp": "llamacpp-log.toml",
    "sglang": "sglang-log.toml",
    "lmdeploy": "lmdeploy-log.toml",
}
_REACHED: dict[str, Reached] = {
    "profiling": "loaded",
    "profiling-graphs": "loaded",
    "cache": "profiled",
    "capturing": "profiled",
    "warming-up": "captured",
    SERVING: "ready",
}
_MOST_EVIDENCE = 300
_MOST_MESSAGE = 4_000
_MOST_SIGNATURES = 200
_MOST_SUSPICIOUS = 5
_LINES_TO_GO_ON = 6
_MOST_BELOW = 80
_DAY = 86400
_HALF_YEAR = 183 * 86400
_YEAR = 366 * 86400
_ANSWER = ' HTTP/1.1" 2'
_ANSWERED = re.compile(r'"(?:POST|GET) /(?:v1/(?!models)|generate|invocations|tokenize)\S* HTTP/[\d.]+" 2\d\d')
_EXCEPTION = re.compile(r"\s*(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Failure|Timeout)\b(?:: |:?$|\()")
_CRASHES = (
    "Segmentation fault",
    "core dumped",
    "Aborted",
    "terminate called",
    "Fatal Python error",
    "Killed",
    "panicked at",
    "SIGKILL",
    "SIGSEGV",
    "SIGBUS",
    "SIGABRT",
)
_ASKED_TO_STOP = ("KeyboardInterrupt", "CancelledError", "SystemExit: 0")


def marks() -> tuple[str, ...]:
    """Texts of which a line has one if it begins a phase or a start, or tells a fact."""
    known = [grammar(name) for name in _GRAMMARS.values()]
    phases = [text for one in known for phase in one.phase for text in phase.texts]
    return (*phases, *(text for one in known for text in one.starts), *texts_of_facts(), _ANSWER)


class Seen(Struct):
    """A signature that held: where first, in which message, how often. ``at``: seconds; None: no line has a time."""

    hit: Hit
    line: int
    path: str | None
    order: int
    at: float | None
    phase: str | None
    speaker: str
    text: str
    message: str
    times: int = 1
    below: list[str] = []  # frames that came after the message, of any process, for one that was seen without its own

    @property
    def code(self) -> str:
        return self.hit.signature.code

    @property
    def kind(self) -> str:
        return self.hit.signature.kind

    def evidence(self) -> Evidence:
        return Evidence("log", self.text[:_MOST_EVIDENCE], line=self.line, path=self.path)


def _before(one: Seen, other: Seen) -> bool:
    return one.at is not None and other.at is not None and 0 < other.at - one.at < _DAY


class StartLog:
    """Takes the lines of one start. ``seen``: the signatures that held, by when they did."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._phases = Phases(_VLLM)
        self._facts = FactsReader()
        self._tracebacks = Tracebacks()
        self._windows = Windows()
        self._seen: dict[tuple[int, str], Seen] = {}
        self._open: list[tuple[Seen | Signature, LogLine, int]] = []  # messages that may go on: with lines left
        self._unsure: list[Seen] = []
        self._phase_lines: list[tuple[str, int, float | None]] = []
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._own_clock = False
        self._source, self._source_lines = "", 0
        self._order = 0
        self._path: str | None = None
        self.lines = 0
        self.answered = False
        self.suspicious: list[Evidence] = []
        self.errors: list[Evidence] = []

    @property
    def phase(self) -> str | None:
        return self._phases.reached

    @property
    def failed(self) -> bool:
        return any(seen.kind in ("cause", "symptom") for seen in self._seen.values())

    def begins_anew(self, text: str) -> bool:
        """Whether the line begins another start than this one, which has come further than its first lines."""
        known = grammar(self._phases.name)
        if not any(part in text for part in known.starts):
            return False
        return self.failed or (self.phase is not None and self._place(self.phase) >= self._place("loading"))

    def take(self, line: LogLine, number: int, path: str | None) -> bool:
        """Whether the line said anything; lines like one that did not need not be taken again."""
        self._order += 1
        self._path = path
        self.lines += 1
        at = self._time(line)
        before = self._windows.before(line)
        told = self._facts.read(line, "" if line.headed else before)
        told |= self._phase(line, number, at, "" if line.headed else before.rpartition("\n")[2])
        frames = self._tracebacks.above(line)
        told |= self._go_on(line, number, at)
        match = self._matcher.match(
            line.text,
            before=before,
            rest=not line.headed,
            phase=self.phase,
            frames=frames,
            source=self._source_of(line),
        )
        for hit in match.hits if line.headed else self._not_open(match.hits):
            self._remember(hit, line, number, at, before)
        self._open += [(signature, line, _LINES_TO_GO_ON) for signature in match.waiting]
        told |= bool(match.hits or match.waiting)
        if is_frame(line.text):
            told = True
            self._below(line.text)
        return self._suspect(line, number, bool(match.hits)) or told

    def pass_over(self, line: LogLine) -> None:
        """A line that says nothing: its time, and where it ended, may count for the next one."""
        self._time(line)
        self._windows.before(line)

    @property
    def expects_more(self) -> bool:
        """Whether what was read last may go on in the next line."""
        return bool(self._open) or self._facts.expects_more

    def in_order(self) -> list[Seen]:
        """By time within a day, else as they came: clocks of several machines and logs put together differ by more."""
        found: list[Seen] = []
        for seen in sorted(self._seen.values(), key=lambda seen: seen.order):
            place = len(found)
            while place and _before(seen, found[place - 1]):
                place -= 1
            found.insert(place, seen)
        return found

    def settled(self) -> None:
        """Nothing more comes: what was told apart without a traceback above is looked at with that below."""
        for seen in self._unsure:
            if not seen.below:
                continue
            match = self._matcher.match(seen.message, phase=seen.phase, frames=seen.below)
            group = seen.hit.signature.group
            better = next((hit for hit in match.hits if hit.signature.group == group), None)
            if better is not None:
                seen.hit = better
        self._unsure.clear()

    def went_on_after(self, seen: Seen) -> bool:
        """Whether a phase of the start began after it."""
        return self.phase is not None and self._place(self.phase) > self._place(seen.phase)

    def _place(self, phase: str | None) -> int:
        """Of the phase among the engine's; -1 where it has none of that name."""
        names = [known.name for known in grammar(self._phases.name).phase]
        return names.index(phase) if phase in names else -1

    def facts(self) -> LogFacts:
        reached = _REACHED.get(self.phase or "", "nothing")
        if self.answered:
            reached = "served"
        return replace(self._facts.facts(), phases=tuple(self._phase_times()), reached=reached)

    def _phase(self, line: LogLine, number: int, at: float | None, before: str) -> bool:
        name = _GRAMMARS[self._facts.engine or "vllm"]
        if name != self._phases.name:
            self._phases = Phases(name)
        begun = self._phases.begun_by(line.text, before)
        if begun is None and not self.answered and _ANSWERED.search(f"{before}{line.text}"):
            self.answered = True
            begun = None if self.phase == SERVING else self._phases.to_last()
        if begun is not None:
            self._phase_lines.append((begun, number, at))
        return begun is not None

    def _source_of(self, line: LogLine) -> str:
        """The file that wrote the line, or the one that it may be the rest of."""
        if line.headed:
            self._source, self._source_lines = line.source, _LINES_TO_GO_ON
        elif self._source_lines:
            self._source_lines -= 1
        return self._source if self._source_lines else ""

    def _time(self, line: LogLine) -> float | None:
        """The line's time, else that of the line before; the engine's own clock where it has one."""
        at = line.at
        if line.own_clock and not self._own_clock:
            self._own_clock, self._last_at, self._first_at = True, None, None
        elif self._own_clock and not line.own_clock:
            at = None
        if at is not None:
            if self._last_at is not None and self._last_at - at > _HALF_YEAR:
                at += _YEAR
            self._last_at = at
            if self._first_at is None:
                self._first_at = at
        return at if at is not None else self._last_at

    def _not_open(self, hits: Iterable[Hit]) -> list[Hit]:
        """Without those of a message that goes on in this line and was told apart by its beginning."""
        groups = {item.hit.signature.group for item, _, _ in self._open if isinstance(item, Seen)} - {None}
        return [hit for hit in hits if hit.signature.group not in groups]

    def _remember(self, hit: Hit, line: LogLine, number: int, at: float | None, before: str) -> None:
        key = (id(hit.signature), line.speaker if hit.signature.kind == "cause" else "")
        known = self._seen.get(key)
        if known is not None:
            known.times += 1
            return
        if len(self._seen) >= _MOST_SIGNATURES:
            return
        message = line.text if line.headed or not before else f"{before[-_MOST_EVIDENCE:]}\n{line.text}"
        seen = Seen(
            hit,
            number,
            self._path,
            self._order,
            at,
            self.phase,
            line.speaker,
            line.whole.strip(),
            message.strip()[-_MOST_MESSAGE:],
        )
        self._seen[key] = seen
        entry = hit.signature
        unsure = entry.kind == "hint" or entry.confidence == "likely"
        if entry.group is not None and unsure and not entry.frames:
            self._unsure.append(seen)
        self._open.append((seen, line, _LINES_TO_GO_ON))

    def _go_on(self, line: LogLine, number: int, at: float | None) -> bool:
        """Hand the rest of a message to what was found in its beginning."""
        if not self._open:
            return False
        still: list[tuple[Seen | Signature, LogLine, int]] = []
        told = False
        for item, first, left in self._open:
            if line.headed or is_frame(line.text) or not line.text.strip():
                continue
            told = True
            if isinstance(item, Seen):
                if len(item.message) < _MOST_MESSAGE:
                    item.message = f"{item.message}\n{line.text}"
                    item.hit = self._matcher.completed(item.hit.signature, item.message) or item.hit
                if left > 1:
                    still.append((item, first, left - 1))
                continue
            joined = replace(first, text=f"{first.text}\n{line.text}")
            hit = self._matcher.completed(item, joined.text)
            if hit is not None:
                self._remember(hit, joined, number - 1, at, "")
            elif left > 1:
                still.append((item, joined, left - 1))
        self._open = still
        return told

    def _below(self, frame: str) -> None:
        for seen in self._unsure:
            if len(seen.below) < _MOST_BELOW:
                seen.below.append(frame[:_MOST_EVIDENCE])

    def _suspect(self, line: LogLine, number: int, explained: bool) -> bool:
        bad = line.level in ("ERROR", "CRITICAL")
        exception = _EXCEPTION.match(line.text) is not None or any(part in line.text for part in _CRASHES)
        if not (bad or exception) or explained:
            return bad or exception
        if self.phase == SERVING and any(part in line.text for part in _ASKED_TO_STOP):
            return False
        kept = self.suspicious if exception else self.errors
        if len(kept) < _MOST_SUSPICIOUS and line.text.strip() and not is_frame(line.text):
            kept.append(Evidence("log", line.whole.strip()[:_MOST_EVIDENCE], line=number, path=self._path))
        return len(self.suspicious) + len(self.errors) < 2 * _MOST_SUSPICIOUS

    def _phase_times(self) -> Iterator[PhaseTime]:
        for place, (name, number, at) in enumerate(self._phase_lines):
            following = self._phase_lines[place + 1][2] if place + 1 < len(self._phase_lines) else None
            since = None if at is None or self._first_at is None else at - self._first_at
            lasted = None if at is None or following is None else max(following - at, 0.0)
            yield PhaseTime(name, number, since, lasted)
