"""Why an engine failed, from its whole log: facts of the launch, causes in their order, the root cause first."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.enginelog import Phases
from loadmaster.core.facts import Evidence, Finding
from loadmaster.core.logfacts import LogFacts
from loadmaster.core.logtext import Tracebacks, read_line
from loadmaster.core.signatures import Hit, Matcher

_MOST_EVIDENCE = 300


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
        self._matcher = Matcher(engine)
        self._phases = Phases("vllm-log.toml")
        self._tracebacks = Tracebacks()
        self._first: dict[str, tuple[int, str, Hit]] = {}
        self._lines = 0
        self._path: str | None = None

    @property
    def phase(self) -> str | None:
        return self._phases.reached

    def feed(self, line: str, number: int) -> None:
        """``number``: of the line in its file, from 1."""
        self._lines = number
        read = read_line(line)
        self._phases.begun_by(read.text)
        frames = self._tracebacks.above(read)
        for hit in self._matcher.hits(read.text, phase=self.phase, frames=frames):
            self._first.setdefault(hit.signature.code, (number, read.text.strip(), hit))

    def begin_file(self, path: str | None) -> None:
        """What comes now is from another file: lines count from 1 again, and evidence names ``path``."""
        self._path, self._lines = path, 0

    def read(self, block: bytes) -> None:
        """Whole lines of UTF-8; broken bytes are replaced."""
        for line in block.decode("utf-8", "replace").split("\n")[: block.count(b"\n")]:
            self.feed(line, self._lines + 1)

    def close(self, exit: ExitSeen | None = None) -> Diagnosis:
        found = sorted(self._first.items(), key=lambda item: (item[1][2].signature.kind == "symptom", item[1][0]))
        findings = tuple(_finding(*entry) for _, entry in found)
        bad = any(item.severity == "error" for item in findings)
        healthy = False if bad else True if self.phase == "serving" else None
        messages = {code: entry[1] for code, entry in found}
        return Diagnosis(healthy, replace(LogFacts(), lines=self._lines), findings, messages=messages)


def _finding(number: int, text: str, hit: Hit) -> Finding:
    entry = hit.signature
    return finding(
        entry.code,
        hit.sentence or f"It said: {text[:_MOST_EVIDENCE]}",
        evidence=[Evidence("log", text[:_MOST_EVIDENCE], line=number)],
        severity=entry.severity,
        confidence=entry.confidence or ("likely" if entry.kind == "hint" else "certain"),
    )
