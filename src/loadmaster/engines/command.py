"""Any program that speaks the OpenAI API, as configured. Its log and metrics are read as vLLM's."""

from __future__ import annotations

from loadmaster.core.deployment import Deployment
from loadmaster.core.enginelog import LogReader
from loadmaster.core.facts import LoadSheet
from loadmaster.engines.base import EngineCommand, EngineError, Progress
from loadmaster.engines.metrics import progress


class CommandEngine:
    """``engine.command`` with ``{port}`` and ``{model}`` filled in."""

    name = "command"
    grammar = "vllm-log.toml"

    def __init__(self) -> None:
        self._log = LogReader(self.grammar)

    def command(self, deployment: Deployment, plan: LoadSheet | None, port: int) -> EngineCommand:
        if not deployment.engine.command:
            raise EngineError("engine.command is empty", "name the program and its arguments in loadmaster.toml")
        values = {"{port}": str(port), "{model}": deployment.model}
        words = (*deployment.engine.command, *deployment.engine.flags)
        return EngineCommand(argv=tuple(_filled(word, values) for word in words), env=dict(deployment.engine.env))

    def served_model(self, deployment: Deployment) -> str:
        return deployment.model

    def api_key(self, deployment: Deployment) -> str | None:
        return None

    def fixed_port(self, deployment: Deployment) -> int | None:
        return None

    def phase(self, line: str) -> str | None:
        return self._log.phase(line)

    def detect_version(self) -> str | None:
        return None

    def running_waiting_tokens(self, metrics: str) -> Progress | None:
        return progress(metrics)


def _filled(word: str, values: dict[str, str]) -> str:
    for mark, value in values.items():
        word = word.replace(mark, value)
    return word
