"""How far a start has come and what went wrong, from an engine's log, line by line.

The grammar is data: ``vllm-log.toml`` and ``llamacpp-log.toml``. A failure names a cause; running out of memory is told
apart by the phase and by the functions in the traceback above the message.
"""

from __future__ import annotations

import re
from collections import deque
from functools import cache

from msgspec import Struct, convert

from loadmaster.core.tables import load_toml

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SPEAKER = re.compile(r"^\(?(\S+ (?:rank=\d+|pid=\d+))\)")
_LONGEST_LINE = 4000
_FRAMES_KEPT = 200
_SPEAKERS_KEPT = 64


class Phase(Struct, frozen=True, forbid_unknown_fields=True):
    """``texts``: any of them in a line begins the phase. ``after``: only once that phase was reached."""

    name: str
    words: str
    texts: tuple[str, ...]
    source: str
    after: str | None = None


class Failure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``texts``: any of them in a line. ``repeats``: the same launch fails again. ``weak``: only says that it died."""

    code: str
    texts: tuple[str, ...]
    repeats: bool = True
    weak: bool = False
    source: str


class MemoryFailure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Out of memory: in one of ``phases`` (empty: in any), with one of ``frames`` and one of ``under`` above it."""

    code: str
    phases: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    repeats: bool = True
    source: str


class Grammar(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    out_of_memory: tuple[str, ...] = ()
    phase: tuple[Phase, ...] = ()
    failure: tuple[Failure, ...] = ()
    memory: tuple[MemoryFailure, ...] = ()


@cache
def grammar(name: str) -> Grammar:
    """The grammar of ``core/data/NAME``."""
    return convert(load_toml(name), Grammar)


class LogReader:
    """Reads one run's log.

    ``reached``: the latest phase. ``cause``: the first failure that names a cause; ``weak_cause``: the first that
    only says that something died. ``cause_line``: the line that showed the one or the other.
    """

    def __init__(self, name: str) -> None:
        self._grammar = grammar(name)
        self._order = {phase.name: place for place, phase in enumerate(self._grammar.phase)}
        self._frames: dict[str, deque[str]] = {}
        self.reached: str | None = None
        self.cause: str | None = None
        self.weak_cause: str | None = None
        self.cause_line: str | None = None

    def phase(self, line: str) -> str | None:
        """The phase that this line begins; workers that lag behind begin none again."""
        text = _plain(line)
        here = -1 if self.reached is None else self._order[self.reached]
        for place in range(len(self._order) - 1, here, -1):
            phase = self._grammar.phase[place]
            if phase.after is not None and here < self._order[phase.after]:
                continue
            if any(part in text for part in phase.texts):
                self.reached = phase.name
                return phase.name
        return None

    def failure(self, line: str) -> str | None:
        """The code that this line shows."""
        text = _plain(line)
        frames = self._traceback(text)
        code, weak = self._memory(text, frames), False
        if code is None:
            code, weak = self._known(text)
        if code is not None:
            self._remember(code, weak, text)
        return code

    def _remember(self, code: str, weak: bool, text: str) -> None:
        if weak and self.cause is None and self.weak_cause is None:
            self.weak_cause, self.cause_line = code, text.strip()
        elif not weak and self.cause is None:
            self.cause, self.cause_line = code, text.strip()

    def _known(self, text: str) -> tuple[str | None, bool]:
        for failure in self._grammar.failure:
            if any(part in text for part in failure.texts):
                return failure.code, failure.weak
        return None, False

    def _memory(self, text: str, frames: deque[str]) -> str | None:
        if not any(part in text for part in self._grammar.out_of_memory):
            return None
        for rule in self._grammar.memory:
            if rule.phases and (self.reached or "") not in rule.phases:
                continue
            if all(_any_in(parts, frames) for parts in (rule.frames, rule.under) if parts):
                return rule.code
        return None

    def _traceback(self, text: str) -> deque[str]:
        """The frames above this line that the same process wrote."""
        found = _SPEAKER.match(text)
        speaker = found.group(1) if found else ""
        if speaker not in self._frames and len(self._frames) >= _SPEAKERS_KEPT:
            self._frames.pop(next(iter(self._frames)))
        frames = self._frames.setdefault(speaker, deque(maxlen=_FRAMES_KEPT))
        if "Traceback (most recent call last)" in text:
            frames.clear()
        elif 'File "' in text or "    " in text:
            frames.append(text)
        return frames


def repeats(name: str, code: str) -> bool | None:
    """Whether the same launch would fail with this code again; None for a code that the grammar does not have."""
    known = grammar(name)
    answers = {failure.code: failure.repeats for failure in known.failure}
    answers |= {failure.code: failure.repeats for failure in known.memory}
    return answers.get(code)


def phase_words(name: str, phase: str) -> str:
    """What happens in a phase, for people."""
    return next((known.words for known in grammar(name).phase if known.name == phase), phase)


def _any_in(parts: tuple[str, ...], frames: deque[str]) -> bool:
    return any(part in frame for frame in frames for part in parts)


def _plain(line: str) -> str:
    return _COLOUR.sub("", line[:_LONGEST_LINE])
