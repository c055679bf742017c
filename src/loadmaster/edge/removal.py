"""Taking a deployment away: first what still runs of it, then every file that it left."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from loadmaster.edge.process import Identity, Member, leftovers, read_process, read_processes
from loadmaster.edge.statehome import StateError, WriteError, state_home, write_problem

_PROC = Path("/proc")
FOLDER_VARIABLE = "LOADMASTER_FOLDER"  # the deployment's folder, in the environment of all its processes
PORTS_LOCK = "ports.lock"  # under which deployments choose their engines' ports
_PROGRAMS = ("run-engine", "run-web")
_WRITES = os.O_WRONLY | os.O_RDWR


class Running(Struct, frozen=True):
    """A process of a deployment and the sign by which it was found."""

    pid: int
    name: str
    sign: str


def running(folder: Path, name: str) -> tuple[Running, ...]:
    """What runs of the deployment, itself and its parents left out.

    Signs: the folder in the environment, an argument under ``run/`` (the supervisor), our own programs with this
    name, or a file of the folder that is open for writing (an engine and its log). Where the system has no
    ``/proc``, the supervisor's own number is all there is.
    """
    table = read_processes()
    if not table:
        return _by_number(folder)
    own = _own_line(table)
    of_engine = {member.pid for member in _engine(folder)}
    found = []
    for pid, process in sorted(table.items()):
        if pid in own or process.state in "ZX":
            continue
        sign = _sign(pid, folder.absolute(), name) or ("left of its engine" if pid in of_engine else None)
        if sign is not None:
            found.append(Running(pid, process.name, sign))
    return tuple(found)


class _Run(Struct, frozen=True):
    """What finds the engine's processes, as run-engine wrote it."""

    marker: str
    pid: int = -1
    started: int | None = None


def _engine(folder: Path) -> tuple[Member, ...]:
    """The processes of the engine, also those that have written a title over their environment."""
    try:
        run = msgspec.json.decode((folder / "run" / "engine.run").read_bytes(), type=_Run)
    except (OSError, msgspec.MsgspecError):
        return ()
    return leftovers(Identity(run.pid, run.started, run.marker))


def _sign(pid: int, folder: Path, name: str) -> str | None:
    words = _words(pid, "cmdline")
    if any(word.startswith(f"{folder}/run/") for word in words):
        return "started from its run folder"
    if f"{FOLDER_VARIABLE}={folder}" in _words(pid, "environ"):
        return "belongs to it"
    for program, argument in itertools.pairwise(words):
        if program in _PROGRAMS and argument == name and _state_home_of(pid) == state_home():
            return program
    for path in _written(pid):
        if path.startswith(f"{folder}/"):
            return f"writes {path.removeprefix(f'{folder}/')}"
    return None


def _words(pid: int, what: str) -> list[str]:
    try:
        return (_PROC / str(pid) / what).read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def _state_home_of(pid: int) -> Path | None:
    pairs = (word.partition("=") for word in _words(pid, "environ") if "=" in word)
    try:
        return state_home({name: value for name, _, value in pairs})
    except StateError:
        return None


def _written(pid: int) -> Iterator[str]:
    """The files that a process has open for writing; none where the kernel does not show another user's."""
    try:
        descriptors = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        return
    for descriptor in descriptors:
        try:
            target = str(descriptor.readlink())
            details = (_PROC / str(pid) / "fdinfo" / descriptor.name).read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        flags = next((line.split()[1] for line in details.splitlines() if line.startswith("flags:")), "0")
        if target.startswith("/") and int(flags, 8) & _WRITES:
            yield target


def _own_line(table: dict[int, Member]) -> set[int]:
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        parent = table.get(pid)
        pid = parent.parent if parent is not None else 0
    return line


def _by_number(folder: Path) -> tuple[Running, ...]:
    try:
        pid = int((folder / "run" / "supervisord.pid").read_text(encoding="ascii"))
        os.kill(pid, 0)
    except (OSError, ValueError):
        return ()
    process = read_process(pid)
    return (Running(pid, process.name if process is not None else "supervisord", "its number is in run"),)


def remove_deployment(folder: Path) -> None:
    """Removes the folder, and the short folder of its sockets. Raises :class:`StateError`.

    The folder gets another name first: from then on the deployment does not exist, however long the rest takes.
    """
    sockets = socket_folder(folder)
    doomed = folder.with_name(f".removed-{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise WriteError(*write_problem(error, doomed if doomed.exists() else folder, "remove")) from None
    if sockets is not None:
        shutil.rmtree(sockets, ignore_errors=True)
    with contextlib.suppress(OSError):  # the last deployment takes the empty folders with it
        folder.parent.rmdir()
        (folder.parent.parent / PORTS_LOCK).unlink(missing_ok=True)
        folder.parent.parent.rmdir()


def socket_folder(folder: Path) -> Path | None:
    """The short folder that holds the sockets of a deployment whose own path is too long for them."""
    try:
        path = Path((folder / "run" / "sockets").read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return None
    # only what was made for this purpose, and by this user, is ever removed
    try:
        mine = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
    except OSError:
        return None
    return path if mine and path.is_absolute() and path.name.startswith("loadmaster-") else None
