"""What every engine offers to the rest of the program."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import LoadSheet


class EngineCommand(Struct, frozen=True, kw_only=True):
    """How an engine is started: ``env`` is added to the environment, ``drop`` is left out of it.

    ``cleanup``: a command that removes what the processes leave behind, run after a stop.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str | None = None
    drop: tuple[str, ...] = ()
    cleanup: tuple[str, ...] = ()


class Progress(Struct, frozen=True):
    """What an engine's metrics say of its work. ``steps``: a counter that grows with every step; None: not told."""

    running: int
    waiting: int
    steps: float | None = None

    @property
    def busy(self) -> bool:
        return self.running + self.waiting > 0


class EngineError(Exception):
    """An engine that cannot be started as configured. ``hint`` says what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Engine(Protocol):
    """One run of one engine: it remembers how far the log that it is shown has come.

    ``phase`` is shown every line of the log once, in order.
    """

    @property
    def name(self) -> str: ...

    @property
    def grammar(self) -> str:
        """The file of core/data that its log is read by."""
        ...

    def command(self, deployment: Deployment, plan: LoadSheet | None, port: int) -> EngineCommand:
        """The command that listens on 127.0.0.1 at ``port``. Raises :class:`EngineError`."""
        ...

    def served_model(self, deployment: Deployment) -> str:
        """The name under which requests ask for the model."""
        ...

    def api_key(self, deployment: Deployment) -> str | None:
        """The key that the engine itself asks for, if it was given one."""
        ...

    def fixed_port(self, deployment: Deployment) -> int | None:
        """The port that the deployment's flags insist on; None: any port will do."""
        ...

    def phase(self, line: str) -> str | None:
        """The phase that begins with this line of the log, None when none does."""
        ...

    def detect_version(self) -> str | None:
        """The version, asked of the engine in a process of its own; None when it does not tell."""
        ...

    def running_waiting_tokens(self, metrics: str) -> Progress | None:
        """Read the text of the engine's ``/metrics``; None when it does not hold what is needed."""
        ...


def engine_for(deployment: Deployment, *, python: str | None = None) -> Engine:
    """A new engine of the deployment's kind, for one run.

    ``python``: interpreter of the environment that the engine is installed in, when the deployment names none.
    """
    from loadmaster.engines.command import CommandEngine
    from loadmaster.engines.llamacpp import LlamaCppEngine
    from loadmaster.engines.vllm import VllmEngine

    section = deployment.engine
    if section.kind == "llamacpp":
        return LlamaCppEngine(section.python or python)
    if section.kind == "command":
        return CommandEngine()
    return VllmEngine(section.python or python, section.container)
