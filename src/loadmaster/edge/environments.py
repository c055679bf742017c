"""vLLM in environments of its own: ``<state>/engines/vllm-VERSION``, made by venv and pip.

An environment is built under another name and gets its own when the engine in it has told its version. So what
is listed is whole, and a failed or interrupted installation leaves nothing. pip's own configuration decides where
packages come from. Nothing of an environment is ever imported here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from loadmaster.core.engineversion import version_key
from loadmaster.edge.process import Child, ProcessError
from loadmaster.edge.statehome import StateError, WriteError, make_folder, write_problem

Report = Callable[[str], None]  # one line of what pip says

PREFIX = "vllm-"
_BUILDING, _REMOVED = ".building-", ".removed-"
_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)+[0-9A-Za-z.+]*")
# Variables that would lead the environment's Python to other packages.
_OTHERS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PIP_TARGET", "PIP_USER", "PIP_PREFIX")
_ASK_VERSION = "import vllm; print('version', vllm.__version__)"
_ASK_TIMEOUT_S = 300.0  # importing torch from a cold disk takes minutes at worst
_INSTALL_TIMEOUT_S = 3 * 3600.0  # some 10 GB over a slow line
_LAST_LINES = 12
_KEPT_LINES = 200
_END_S = 10.0  # between the end of the output and that of the process


class EngineEnvironmentError(StateError):
    """An environment that could not be made, found or removed."""


class Environment(Struct, frozen=True):
    """An environment that is whole."""

    version: str
    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"


def installed(state: Path) -> tuple[Environment, ...]:
    """The environments that are there, newest release first."""
    try:
        names = [entry.name for entry in (state / "engines").iterdir()]
    except OSError:
        return ()
    found = [
        Environment(name.removeprefix(PREFIX), state / "engines" / name)
        for name in names
        if name.startswith(PREFIX) and _VERSION.fullmatch(name.removeprefix(PREFIX))
    ]
    whole = [environment for environment in found if environment.python.exists()]
    return tuple(sorted(whole, key=lambda environment: version_key(environment.version), reverse=True))


def python_for(state: Path, version: str | None = None) -> Path | None:
    """The interpreter of the environment with this release, or of the newest one; None when there is none."""
    for environment in installed(state):
        if version is None or environment.version == version:
            return environment.python
    return None


def install(
    state: Path, version: str, *, python: str = sys.executable, pip: Sequence[str] = (), report: Report | None = None
) -> Environment:
    """Installs one release. ``pip``: further arguments for ``pip install``. ``report`` gets what it prints.

    Raises :class:`EngineEnvironmentError`, and :class:`WriteError` for a full disk; nothing is left then.
    """
    if not _VERSION.fullmatch(version):
        raise EngineEnvironmentError(f"{version!r} is no release of vLLM", "for example 0.33.0")
    engines = state / "engines"
    final = engines / f"{PREFIX}{version}"
    make_folder(engines)
    with _alone(engines):
        if final.exists():
            raise EngineEnvironmentError(
                f"vLLM {version} is installed already, in {final}", f"loadmaster engine remove {version} takes it away"
            )
        building = engines / f"{_BUILDING}{version}-{uuid.uuid4().hex[:8]}"
        try:
            _build(building, version, python, pip, report or (lambda line: None))
            _move_scripts(building, final)
            building.rename(final)
        except OSError as error:
            raise WriteError(*write_problem(error, final)) from None
        finally:
            shutil.rmtree(building, ignore_errors=True)
            if not final.exists():
                _tidy(engines)
    return Environment(version, final)


def remove(state: Path, version: str) -> Path:
    """Removes an environment from which nothing runs. Raises :class:`EngineEnvironmentError`."""
    found = next((one for one in installed(state) if one.version == version), None)
    if found is None:
        there = ", ".join(one.version for one in installed(state))
        raise EngineEnvironmentError(f"vLLM {version} is not installed", f"there is {there}" if there else None)
    users = _users(found.path)
    if users:
        raise EngineEnvironmentError(f"{found.path} is in use by process {', '.join(map(str, users))}", "stop it first")
    with _alone(state / "engines"):
        doomed = found.path.with_name(f"{_REMOVED}{version}-{uuid.uuid4().hex[:8]}")
        try:
            found.path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise WriteError(*write_problem(error, found.path, "remove")) from None
    _tidy(state / "engines")
    return found.path


def _tidy(engines: Path) -> None:
    """The folder and its lock go with the last environment."""
    with contextlib.suppress(OSError):
        if [entry.name for entry in engines.iterdir()] == [".lock"]:
            (engines / ".lock").unlink()
        engines.rmdir()


def size_bytes(environment: Environment) -> int:
    """What an environment takes on the disk."""
    total = 0
    for folder, _, files in os.walk(environment.path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118 - a hundred thousand files
    return total


# ---------------------------------------------------------------------------------------------- building


@contextlib.contextmanager
def _alone(engines: Path) -> Iterator[None]:
    """One change of the environments at a time; what an earlier one left when it was killed is cleared away."""
    try:
        descriptor = os.open(engines / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise WriteError(*write_problem(error, engines)) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EngineEnvironmentError("another installation is at work", f"it holds {engines / '.lock'}") from None
        for entry in engines.iterdir():
            if entry.name.startswith((_BUILDING, _REMOVED)):
                shutil.rmtree(entry, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


class _Command(Struct, frozen=True):
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str | None = None
    drop: tuple[str, ...] = _OTHERS
    cleanup: tuple[str, ...] = ()


def _build(building: Path, version: str, python: str, pip: Sequence[str], report: Report) -> None:
    report(f"making an environment with {python}")
    _run(
        (python, "-m", "venv", "--prompt", f"{PREFIX}{version}", str(building)),
        report,
        "the environment could not be made",
        300.0,
    )
    own = str(building / "bin" / "python")
    flags = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off", *pip)
    _run(
        (own, "-m", "pip", "install", *flags, f"vllm=={version}"),
        report,
        f"vLLM {version} could not be installed",
        _INSTALL_TIMEOUT_S,
    )
    report("asking the engine for its version")
    # isolated: the working folder may hold something of the name
    lines = _run((own, "-I", "-c", _ASK_VERSION), report, f"vLLM {version} does not start", _ASK_TIMEOUT_S)
    told = next((line.split(" ", 1)[1] for line in reversed(lines) if line.startswith("version ")), None)
    if told is None or told.split("+")[0] != version.split("+")[0]:
        raise EngineEnvironmentError(f"vLLM {version} was asked for, but the engine says {told or 'no version'}")


def _run(argv: tuple[str, ...], report: Report, failed: str, timeout_s: float) -> list[str]:
    """Runs a command to its end; every line goes to ``report``. An interruption ends all that it started."""
    lines: list[str] = []
    reader, writer = os.pipe()
    with os.fdopen(reader, "r", encoding="utf-8", errors="replace", newline=None) as output:
        try:
            child = Child.start(_Command(argv), writer)
        except ProcessError as error:
            raise EngineEnvironmentError(f"{failed}: {error.message}", error.hint) from None
        finally:
            os.close(writer)
        late = threading.Event()

        def expire() -> None:
            late.set()
            child.stop(2.0)  # ends the output, also that of a hanging download

        watch = threading.Timer(timeout_s, expire)
        watch.daemon = True
        watch.start()
        try:
            for line in output:
                lines.append(line.rstrip())
                report(lines[-1])
                del lines[:-_KEPT_LINES]
            watch.cancel()
            watch.join()
            ended = child.wait(_END_S)
        finally:
            watch.cancel()
            watch.join()
            child.stop(2.0)
    if ended is None or late.is_set():
        raise EngineEnvironmentError(f"{failed}: no end after {timeout_s / 60:.0f} minutes")
    if ended.code != 0:
        raise _failed(failed, lines)
    return lines


def _failed(failed: str, lines: Sequence[str]) -> StateError:
    """pip's own reason: its error lines, else the last ones."""
    text = "\n".join(lines)
    if "No space left on device" in text or "Errno 28" in text:
        return WriteError(f"{failed}: the disk is full", "vLLM and its packages take some 10 GiB")
    if "No matching distribution found" in text:
        return EngineEnvironmentError(
            f"{failed}: the package index has no such release for this Python and machine",
            "pip config list shows which index is asked; PIP_INDEX_URL and PIP_FIND_LINKS are honoured",
        )
    errors = [line for line in lines if line.startswith("ERROR:")] or [line for line in lines if line][-_LAST_LINES:]
    said = "\n       ".join(errors[-_LAST_LINES:])
    return EngineEnvironmentError(f"{failed}\n       {said}" if said else failed)


def _move_scripts(building: Path, final: Path) -> None:
    """Scripts name their interpreter by its absolute path, which is about to change."""
    before, after = os.fsencode(building), os.fsencode(final)
    for script in [*(building / "bin").iterdir(), building / "pyvenv.cfg"]:
        if script.is_file() and not script.is_symlink():
            content = script.read_bytes()
            if before in content and b"\0" not in content[:1024]:
                script.write_bytes(content.replace(before, after))


def _users(path: Path) -> list[int]:
    """Processes whose interpreter or arguments lie in the environment."""
    found = []
    mark = os.fsencode(path) + b"/"
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):
            if any(word.startswith(mark) for word in (folder / "cmdline").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return sorted(found)


def python_version(python: str) -> tuple[int, int] | None:
    """(3, 11) of another interpreter, asked of it."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=True,
        )
        major, minor = done.stdout.split()
        return int(major), int(minor)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
