"""How far a start has come and what went wrong, from an engine's log, line by line, while it is written.

Phases are data in ``vllm-log.toml`` and ``llamacpp-log.toml``, failures in ``signatures/``: a failure names a cause;
running out of memory is told apart by the phase and by the functions in the traceback above the message.
"""

from __future__ import annotations

from functools import cache

from msgspec import Struct, convert

from loadmaster.core.checks.catalogue import usual_severity
from loadmaster.core.logtext import RequestText, Tracebacks, Windows, read_line
from loadmaster.core.signatures import matcher, signatures
from loadmaster.core.tables import load_toml


class Phase(Struct, frozen=True, forbid_unknown_fields=True):
    """``texts``: any of them in a line begins the phase. ``after``: only once that phase was reached.

    In a log without its beginning, where no phase was seen yet, ``after`` does not hold one back.
    """

    name: str
    words: str
    texts: tuple[str, ...]
    source: str
    after: str | None = None


class Grammar(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``engine``: whose signatures the log is searched for. ``starts``: any of them in a line begins another start."""

    source: str
    engine: str
    starts: tuple[str, ...] = ()
    phase: tuple[Phase, ...] = ()


@cache
def grammar(name: str) -> Grammar:
    """The grammar of ``core/data/NAME``."""
    return convert(load_toml(name), Grammar)


class Phases:
    """The phases of one start, in order. ``name``: of the grammar. ``reached``: the latest."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._phases = grammar(name).phase
        self._order = {phase.name: place for place, phase in enumerate(self._phases)}
        self.reached: str | None = None

    def begun_by(self, text: str, before: str = "") -> str | None:
        """The phase that this line begins; workers that lag behind begin none again.

        ``before``: the line before, if this one is its rest.
        """
        joined = before + text
        here = -1 if self.reached is None else self._order[self.reached]
        for place in range(len(self._phases) - 1, here, -1):
            phase = self._phases[place]
            if phase.after is not None and 0 <= here < self._order[phase.after]:
                continue
            if any(part in text or (before and part in joined and part not in before) for part in phase.texts):
                self.reached = phase.name
                return phase.name
        return None

    def to_last(self) -> str:
        """The start has come to its end, as something else than a phase's line has shown."""
        self.reached = self._phases[-1].name
        return self.reached


class LogReader:
    """Reads one run's log.

    ``reached``: the latest phase. ``cause``: the first failure that names a cause; ``weak_cause``: the first that
    only says that something died. ``cause_line``: the line that showed the one or the other.
    """

    def __init__(self, name: str) -> None:
        self._phases = Phases(name)
        self._matcher = matcher(grammar(name).engine)
        self._tracebacks = Tracebacks()
        self._windows = Windows()
        self._asked = RequestText()
        self.cause: str | None = None
        self.weak_cause: str | None = None
        self.cause_line: str | None = None

    @property
    def reached(self) -> str | None:
        return self._phases.reached

    def phase(self, line: str) -> str | None:
        """The phase that this line begins; workers that lag behind begin none again."""
        return self._phases.begun_by(read_line(line).text)

    def failure(self, line: str) -> str | None:
        """The code that this line shows."""
        read = read_line(line)
        self._asked.take_out(read)
        frames = self._tracebacks.above(read)
        match = self._matcher.match(
            read.text,
            before=self._windows.before(read),
            rest=not read.headed,
            phase=self.reached,
            frames=frames,
            source=read.source,
        )
        for hit in match.hits:
            entry = hit.signature
            dead = entry.kind == "symptom" and (entry.severity or usual_severity(entry.code)) == "error"
            if dead or entry.kind == "cause":
                self._remember(entry.code, dead, read.whole)
                return entry.code
        return None

    def _remember(self, code: str, weak: bool, text: str) -> None:
        if weak and self.cause is None and self.weak_cause is None:
            self.weak_cause, self.cause_line = code, text.strip()
        elif not weak and self.cause is None:
            self.cause, self.cause_line = code, text.strip()


def repeats(name: str, code: str) -> bool | None:
    """Whether the same launch would fail with this code again; None for a code that the grammar does not have."""
    answers = {entry.code: entry.repeats for entry in signatures(grammar(name).engine)}
    return answers.get(code)


def phase_words(name: str, phase: str) -> str:
    """What happens in a phase, for people."""
    return next((known.words for known in grammar(name).phase if known.name == phase), phase)
