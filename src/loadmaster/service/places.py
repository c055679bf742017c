"""Where the files of one deployment are, and how a change of its state is kept from another one at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loadmaster.edge.statehome import WriteError, deployment_folder, make_folder, write_file, write_problem

# Every process of a deployment has it in its environment: the deployment's folder.
FOLDER_VARIABLE = "LOADMASTER_FOLDER"

# The kernel takes 107 bytes. supervisord first binds the name with "." and its process number behind it.
_LONGEST_SOCKET = 96


class Places:
    """The files of a deployment. Nothing is made until it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = folder / "plan.json"
        self.engine = folder / "engine.json"
        self.conversations = folder / "conversations.db"
        self.run = folder / "run"
        self.logs = folder / "logs"
        self.configuration = self.run / "supervisord.conf"
        self.supervisor_pid = self.run / "supervisord.pid"
        self.backend_port = self.run / "backend.port"
        self.started = self.run / "started.json"  # hashes of the settings of the last start
        self.engine_run = self.run / "engine.run"
        self.web = self.run / "web.json"
        self.web_key = self.run / "web.key"  # for loadmaster's own questions to a gateway that asks for keys
        self.web_problem = self.run / "web.problem"  # why the gateway is not open
        self.change_lock = self.run / "change.lock"
        self.engine_lock = self.run / "engine.lock"
        self.backend_log = self.logs / "backend.log"
        self.web_log = self.logs / "web.log"
        self.supervisor_log = self.logs / "supervisord.log"

    @classmethod
    def of(cls, name: str) -> Places:
        """Raises :class:`StateError` when ``name`` cannot be the name of a deployment."""
        return cls(deployment_folder(name))

    @property
    def name(self) -> str:
        return self.folder.name

    def make(self) -> None:
        """Make the folders. Raises :class:`StateError`, also when they may not be written or the disk is full."""
        for folder in (self.folder, self.run, self.logs):
            make_folder(folder)
        trial = self.run / "writable"
        write_file(trial, b"x" * 4096)  # a full disk still makes empty files
        with contextlib.suppress(OSError):
            trial.unlink()

    # ------------------------------------------------------------------------------ the supervisor's socket

    @property
    def socket(self) -> Path:
        """The supervisor's socket: in ``run``, or in a short folder that ``run/sockets`` names."""
        folder = self._socket_folder()
        return (folder or self.run) / "supervisor.sock"

    def prepare_socket(self) -> Path:
        """As :attr:`socket`; makes the short folder when the kernel or the file system needs it."""
        if self._socket_folder() is None and (
            len(os.fsencode(self.run / "supervisor.sock")) > _LONGEST_SOCKET or not _links(self.run)
        ):
            base = os.environ.get("XDG_RUNTIME_DIR", "")
            if not (Path(base).is_absolute() and os.access(base, os.W_OK) and len(base) < 60):
                base = tempfile.gettempdir() if len(tempfile.gettempdir()) < 60 else "/tmp"
            try:
                folder = tempfile.mkdtemp(prefix="loadmaster-", dir=base)
            except OSError as error:
                raise WriteError(*write_problem(error, Path(base))) from None
            write_file(self.run / "sockets", os.fsencode(folder))
        return self.socket

    def remove_socket_folder(self) -> None:
        folder = self._socket_folder()
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.rmdir()
            with contextlib.suppress(OSError):
                (self.run / "sockets").unlink()

    def _socket_folder(self) -> Path | None:
        """The remembered folder, if it is there and nobody else's."""
        try:
            folder = Path(os.fsdecode((self.run / "sockets").read_bytes()))
            seen = folder.lstat()
        except (OSError, ValueError):
            return None
        own = stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid() and not seen.st_mode & 0o077
        return folder if own else None


def _links(folder: Path) -> bool:
    """Whether hard links can be made here, which supervisord cannot do without."""
    first, second = folder / f".link.{os.getpid()}", folder / f".linked.{os.getpid()}"
    try:
        first.touch(mode=0o600)
        second.hardlink_to(first)
    except OSError:
        return False
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                path.unlink()
    return True


class Busy(Exception):
    """Another process holds the lock. ``holder``: its number, if it wrote it."""

    def __init__(self, holder: int | None) -> None:
        super().__init__(f"locked by process {holder}" if holder else "locked by another process")
        self.holder = holder


@contextlib.contextmanager
def locked(path: Path, wait_s: float, waiting: Callable[[int | None], None] = lambda holder: None) -> Iterator[None]:
    """Hold the lock file, which the kernel gives free when this process ends, however it ends.

    ``waiting`` is called once when another process holds it. Raises :class:`Busy` after ``wait_s`` seconds, and
    :class:`StateError` when the file cannot be opened.
    """
    make_folder(path.parent)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise WriteError(*write_problem(error, path)) from None
    try:
        deadline = time.monotonic() + wait_s
        said = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = _holder(descriptor)
                if not said:
                    waiting(holder)
                    said = True
                if time.monotonic() >= deadline:
                    raise Busy(holder) from None
                time.sleep(0.05)
        with contextlib.suppress(OSError):  # the number is for people; a full disk takes nothing from the lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(os.pread(descriptor, 20, 0))
    return None
