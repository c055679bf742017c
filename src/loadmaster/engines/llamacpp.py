"""llama.cpp in a child process, through xllamacpp; the child is :mod:`loadmaster.engines.llamacpp_server`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loadmaster.core.deployment import Deployment
from loadmaster.core.enginelog import LogReader
from loadmaster.core.facts import LoadSheet
from loadmaster.core.hostsettings import parse_flags
from loadmaster.core.tables import load_toml
from loadmaster.engines.base import EngineCommand, EngineError, Progress
from loadmaster.engines.metrics import progress

_SERVER = "loadmaster.engines.llamacpp_server"
_VERSION_TIMEOUT_S = 60


class LlamaCppEngine:
    """``python``: interpreter of an environment with xllamacpp; None: the one that runs loadmaster."""

    name = "llamacpp"
    grammar = "llamacpp-log.toml"

    def __init__(self, python: str | None = None) -> None:
        self._python = python
        self._log = LogReader(self.grammar)

    def command(self, deployment: Deployment, plan: LoadSheet | None, port: int) -> EngineCommand:
        """The child program with llama-server's flags translated. Raises :class:`EngineError`."""
        model = Path(deployment.model).expanduser()
        if not model.is_file():
            raise EngineError(f"there is no GGUF file at {deployment.model!r}", "give the model as the path of a file")
        words = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--alias", deployment.name]
        if deployment.projector is not None:
            projector = Path(deployment.projector).expanduser()
            if not projector.is_file():
                raise EngineError(f"there is no projector at {deployment.projector!r}", "give the path of a GGUF file")
            words += ["--mmproj", str(projector)]
        words += parameters(deployment.engine.flags)
        if self._python is None and find_spec("xllamacpp") is None:
            raise EngineError("the engine llama.cpp is not installed", "install it with: pip install 'loadmaster[cpu]'")
        program = [sys.executable, "-m", _SERVER] if self._python is None else [self._python, _file()]
        # idle threads that spin take the processors from those that work
        environment = {"OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1", **deployment.engine.env}
        return EngineCommand(argv=(*program, *words), env=environment)

    def served_model(self, deployment: Deployment) -> str:
        given = parse_flags(deployment.engine.flags).values.get("--alias")
        return str(given) if given else deployment.name

    def api_key(self, deployment: Deployment) -> str | None:
        given = parse_flags(deployment.engine.flags).values.get("--api-key")
        return str(given) if given else None

    def fixed_port(self, deployment: Deployment) -> int | None:
        return None

    def phase(self, line: str) -> str | None:
        return self._log.phase(line)

    def detect_version(self) -> str | None:
        code = "import importlib.metadata as m; print(m.version('xllamacpp'))"
        try:
            done = subprocess.run(
                [self._python or sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_VERSION_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() or None if done.returncode == 0 else None

    def running_waiting_tokens(self, metrics: str) -> Progress | None:
        return progress(metrics)


def _file() -> str:
    """The child program as a file, for an interpreter that has no loadmaster."""
    return str(Path(__file__).with_name("llamacpp_server.py"))


def parameters(flags: list[str]) -> list[str]:
    """llama-server's flags as ``--set NAME=VALUE`` of the engine's parameters. Raises :class:`EngineError`."""
    parsed = parse_flags(flags)
    if parsed.unknown:
        raise EngineError(
            f"{', '.join(parsed.unknown)}: not known to the embedded engine", "take it out of engine.flags"
        )
    if parsed.bad:
        flag, value, wanted = parsed.bad[0]
        raise EngineError(f"{flag} {value}: it has to be {wanted}")
    words: list[str] = []
    for flag, value in parsed.values.items():
        entry = load_toml("llamacpp-parameters.toml")["flag"].get(flag)
        if entry is None:
            raise EngineError(f"{flag} has no parameter in the embedded engine", "take it out of engine.flags")
        if "refused" in entry:
            raise EngineError(f"{flag} is not for engine.flags", entry["refused"])
        if not entry.get("ignored"):
            chosen = _parameter(flag, value, entry)
            words += [word for name in entry["parameter"] for word in ("--set", f"{name}={chosen}")]
    return words


def _parameter(flag: str, value: Any, entry: Mapping[str, Any]) -> Any:
    """The parameter's value for the flag's."""
    if "prefix" in entry:
        return f"{entry['prefix']}{str(value).upper()}"
    if "values" in entry:
        return entry["values"].get(str(value).lower(), value)
    if entry.get("invert"):
        return not value
    if entry.get("file"):
        try:
            return Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise EngineError(f"{flag} {value}: cannot be read: {reason}") from error
    return value
