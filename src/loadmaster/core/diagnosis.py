"""Why an engine failed, from its whole log: facts of the launch, causes in their order, the root cause first."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import Evidence, Finding
from loadmaster.core.logfacts import LogFacts
from loadmaster.core.logsieve import Sieve
from loadmaster.core.logtext import ASKED, RequestText, read_line
from loadmaster.core.rootcause import findings_of
from loadmaster.core.signatures import matcher
from loadmaster.core.startlog import SERVING, Seen, StartLog, marks

_SIGKILL = 9
_KILLED, _MASK = "host-ram-killed", "engine-dead-masked"
_FREE, _HELD = "free-memory-below-request", "gpu-held-by-other-process"
_LONGEST_PART = 64_000
_MOST_SUSPICIOUS = 5
_MOST_EARLIER = 5
_ASKED = tuple(text.encode() for text in ASKED)
_LINES_ASKED = 100  # of a question that are looked through for its beginning


class ExitSeen(Struct, frozen=True):
    """How the engine's process ended, where that is known.

    ``oom_kills``: how many processes the kernel killed for lack of host memory meanwhile.
    """

    code: int | None = None
    signal: int | None = None
    oom_kills: int | None = None


class Diagnosis(Struct, frozen=True):
    """``healthy`` None: could not tell. ``findings``: the root cause first. ``notes``: what is contradictory or open.

    Where nothing is known of a failure, ``suspicious`` has the first lines that look like one. ``messages``: the whole
    message that showed a finding, by its code; fixes are computed from its numbers.
    """

    healthy: bool | None
    facts: LogFacts
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    suspicious: tuple[Evidence, ...] = ()
    messages: dict[str, str] = {}


class Diagnoser:
    """Reads a log line by line, in constant memory.

    ``engine``: whose log it is; None: found out. ``phase``: the latest phase of the start.
    """

    def __init__(self, engine: str | None = None) -> None:
        self._matcher = matcher(engine)
        self._start = StartLog(self._matcher)
        self._ended: list[Seen] = []  # the root causes of the starts before, as far as known
        self._starts = 0
        self._number = 0
        self._lines = 0
        self._path: str | None = None
        self._part = ""
        self._asked = RequestText()
        self._damage: list[str] = []
        self._sieve = Sieve(self._matcher.wordings, marks())

    @property
    def phase(self) -> str | None:
        return self._start.phase

    def begin_file(self, path: str | None) -> None:
        """What comes now is from another file: lines count from 1 again, and evidence names ``path``."""
        self._path, self._number = path, 0

    def read(self, block: bytes) -> None:
        """Whole lines of UTF-8, each ended by a newline; broken bytes are replaced."""
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        last = -1
        for batch in self._sieve.sift(block, lines):
            for place in batch:
                if place - 1 > last:
                    self._start.pass_over(read_line(lines[place - 1].decode("utf-8", "replace")))
                if not self._asked.open:
                    self._open_question(lines[max(last + 1, place - _LINES_ASKED) : place])
                last = place
                if not self._take(lines[place].decode("utf-8", "replace"), self._number + place + 1):
                    self._sieve.pass_over(lines[place])
            self._sieve.go_on = bool(self._part) or self._asked.open or self._start.expects_more
        self._lines += len(lines)
        self._number += len(lines)

    def feed(self, line: str, number: int) -> None:
        """``number``: of the line in its file, from 1."""
        self._lines += 1
        self._number = number
        self._take(line, number)

    def lacks(self, why: str) -> None:
        """A part of the log could not be read: what stood there may be a failure. ``why``: a sentence for people."""
        if len(self._damage) < _MOST_EARLIER:
            self._damage.append(why if self._path is None else f"{self._path}: {why}")

    def close(self, exit: ExitSeen | None = None) -> Diagnosis:
        """What the last start in the log came to."""
        facts = replace(self._start.facts(), lines=self._lines, starts=self._starts)
        seen, findings, notes = findings_of(self._start, facts.readings)
        ended_for = _after_exit(findings, exit)
        findings = [*ended_for, *findings]
        notes[:0] = self._damage
        notes += _earlier(self._starts, self._ended) + _contradictions(facts, findings, exit)
        healthy = self._healthy(findings, exit)
        messages: dict[str, str] = {}
        for item in seen:
            messages.setdefault(item.code, item.message)
        for code in {_FREE, _HELD} - set(messages):
            if other := messages.get(_FREE):
                messages[code] = other
        unexplained = (*self._start.suspicious, *self._start.errors) if not healthy and not _root(findings) else ()
        return Diagnosis(healthy, facts, tuple(findings), tuple(notes), tuple(unexplained[:_MOST_SUSPICIOUS]), messages)

    def _open_question(self, passed: Sequence[bytes]) -> None:
        """Whether what was passed over ends within what somebody asked."""
        for place in range(len(passed) - 1, -1, -1):
            if any(text in passed[place] for text in _ASKED):
                for line in passed[place:]:
                    self._asked.take_out(read_line(line.decode("utf-8", "replace")))
                return

    def _take(self, line: str, number: int) -> bool:
        """Whether the line said anything. A progress bar is written over itself: each state is a line."""
        told = False
        for state in line.split("\r") if "\r" in line else (line,):
            read = read_line(state)
            if read.partial:
                self._part = (self._part + read.text)[-_LONGEST_PART:]
                told = True
                continue
            if self._part:
                read.text, self._part = self._part + read.text, ""
            self._asked.take_out(read)
            told |= self._asked.open
            if self._start.begins_anew(read.text):
                self._next_start()
            told |= self._start.take(read, number, self._path)
        if not self._starts and told:
            self._starts = 1
        return told

    def _next_start(self) -> None:
        seen, findings, _ = findings_of(self._start, self._start.facts().readings)
        root = findings[0].code if findings and findings[0].severity == "error" else None
        if len(self._ended) < _MOST_EARLIER:
            self._ended += [item for item in seen if item.code == root][:1]
        self._starts += 1
        self._start = StartLog(self._matcher)
        self._sieve.clear()

    def _healthy(self, findings: Sequence[Finding], exit: ExitSeen | None) -> bool | None:
        if any(item.severity == "error" for item in findings):
            return False
        if exit is not None and (exit.code or exit.signal):
            return False
        if self._start.phase == SERVING:
            return None if self._start.suspicious or self._damage else True
        return None


def _root(findings: Sequence[Finding]) -> Finding | None:
    """The finding that says why; None where none does."""
    first = findings[0] if findings else None
    return first if first is not None and first.severity == "error" and first.code != _MASK else None


def _after_exit(findings: Sequence[Finding], exit: ExitSeen | None) -> list[Finding]:
    if exit is None or exit.signal != _SIGKILL or not exit.oom_kills or any(f.code == _KILLED for f in findings):
        return []
    cause = f"The engine was killed by SIGKILL, and the kernel killed {exit.oom_kills} for lack of memory meanwhile."
    return [finding(_KILLED, cause, evidence=[Evidence("host", "oom_kill grew")], confidence="likely")]


def _earlier(starts: int, ended: Sequence[Seen]) -> list[str]:
    if starts < 2:
        return []
    notes = [f"the log holds {starts} starts; the last one is meant"]
    notes += [f"an earlier start ended with {item.code}, line {item.line}" for item in ended]
    return notes


def _contradictions(facts: LogFacts, findings: Sequence[Finding], exit: ExitSeen | None) -> list[str]:
    """Where the log does not agree with itself or with how the process ended."""
    notes: list[str] = []
    readings = facts.readings
    if readings.kv_tokens and readings.max_model_len and readings.max_concurrency:
        told = readings.kv_tokens / readings.max_model_len
        if abs(told - readings.max_concurrency) > 0.05 * max(told, readings.max_concurrency) + 0.01:
            notes.append(
                f"{readings.kv_tokens:,} tokens of cache are {told:.2f} requests of {readings.max_model_len:,} tokens, "
                f"and the log says {readings.max_concurrency:.2f}: tokens of a hybrid model do not all cost the same"
            )
    if exit is not None and exit.code == 0 and not exit.signal and _root(findings) is not None:
        notes.append("the process ended with exit code 0 although the log names a cause")
    if exit is not None and exit.signal:
        notes.append(f"the process was ended by signal {exit.signal}")
    asked = facts.launch.flags.get("--max-model-len") if facts.launch is not None else None
    if isinstance(asked, int) and readings.max_model_len and 0 < asked != readings.max_model_len:
        notes.append(f"--max-model-len {asked} was given, and the engine ran with {readings.max_model_len}")
    return notes
