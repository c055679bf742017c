"""Where state and logs live: one folder for everything, one folder in it for each deployment.

``LOADMASTER_HOME``, else ``$XDG_STATE_HOME/loadmaster``, else ``~/.local/state/loadmaster``; on macOS
``~/Library/Application Support/loadmaster``. Folders are made with mode 0700, files with 0600. Only the standard
library is imported, so that shells can complete names quickly.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

CONFIGURATION = "loadmaster.toml"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")  # the rule of core.deployment.is_deployment_name
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class StateError(Exception):
    """The state folder cannot be used as it has to be. ``hint``: what to do about it."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class WriteError(StateError):
    """A file or folder could not be written or removed: the disk is full, or the system refuses."""


def state_home(environment: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """The absolute path of the state folder, which need not exist. Raises :class:`StateError` without any home."""
    environment = os.environ if environment is None else environment
    try:
        if stated := environment.get("LOADMASTER_HOME"):
            return Path(stated).expanduser().absolute()
        state = environment.get("XDG_STATE_HOME", "")
        if Path(state).is_absolute():  # the XDG specification has a relative one ignored
            return Path(state) / "loadmaster"
        home = Path(environment["HOME"]) if environment.get("HOME") else Path.home()
    except RuntimeError:
        raise StateError("no home folder is known", "set LOADMASTER_HOME to a folder for state and logs") from None
    if platform == "darwin":
        return home.absolute() / "Library" / "Application Support" / "loadmaster"
    return home.absolute() / ".local" / "state" / "loadmaster"


def deployment_folder(name: str) -> Path:
    """The folder of a deployment, which need not exist. Raises :class:`StateError` when ``name`` cannot be one."""
    if _NAME.fullmatch(name) is None:
        raise StateError(
            f"{name!r} cannot be the name of a deployment",
            "1 to 40 small letters, digits and hyphens, a letter or digit first",
        )
    return state_home() / "deployments" / name


def list_deployments() -> list[str]:
    """The names of the deployments that have a configuration, sorted."""
    try:
        entries = list(os.scandir(state_home() / "deployments"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateError(*write_problem(error, state_home() / "deployments", "read")) from None
    return sorted(
        entry.name for entry in entries if _NAME.fullmatch(entry.name) and Path(entry.path, CONFIGURATION).is_file()
    )


def make_folder(path: Path) -> None:
    """Makes a folder with mode 0700, and what is missing above it. Raises :class:`WriteError`."""
    try:
        for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise WriteError(*write_problem(error, path)) from None


def write_file(path: Path, content: bytes) -> None:
    """Writes a file with mode 0600 whole or not at all: a reader sees the old content or the new one.

    Raises :class:`WriteError` that says whether the disk is full or the folder may not be written.
    """
    make_folder(path.parent)
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise WriteError(*write_problem(error, path)) from None


def write_problem(error: OSError, path: Path, what: str = "write") -> tuple[str, str | None]:
    """An operating system's refusal in words, with a hint where there is one."""
    if error.errno in _FULL:
        return f"cannot {what} {path}: the disk is full", f"make room on the file system of {path.parent}"
    if error.errno in _REFUSED:
        return (
            f"cannot {what} {path}: {(error.strerror or 'refused').lower()}",
            f"{what} permission is needed, or set LOADMASTER_HOME to another folder",
        )
    return f"cannot {what} {path}: {(error.strerror or str(error)).lower()}", None
