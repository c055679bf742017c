"""What is kept of a run: one start of an engine, from its plan to its end."""

from __future__ import annotations

from msgspec import Struct

from loadmaster.core.facts import EngineFacts, Finding, GpuFacts


class RunRecord(Struct, frozen=True, kw_only=True):
    """What is known when a run begins. ``argv`` and ``env`` without secrets; ``started``: seconds of the epoch."""

    deployment: str
    started: float
    engine: EngineFacts = EngineFacts()
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}
    model: str | None = None
    architecture: str | None = None
    quantization: str | None = None
    cards: tuple[GpuFacts, ...] = ()
    loadmaster: str | None = None  # the version that made the plan
    corrections: dict[str, int] = {}  # what the plan had learnt from earlier runs, bytes by component


class RunEnding(Struct, frozen=True, kw_only=True):
    """How a run ended. ``code``: the exit code of run-engine."""

    ended: float
    message: str
    code: int | None = None


class KeptFinding(Struct, frozen=True, kw_only=True):
    """A finding and the time in which it held; ``until`` None: it still does, or nobody saw its end."""

    finding: Finding
    since: float
    until: float | None = None
