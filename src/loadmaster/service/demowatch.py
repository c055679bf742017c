"""Ends a demonstration whose ``loadmaster demo`` was killed: ``python -m loadmaster.service.demowatch FOLDER PID``.

It waits for the end of its input, which comes when the demonstration has ended, however it did. What is left of it
then, processes and folder, is taken away. Should this be killed as well, the next ``loadmaster demo`` does it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from loadmaster.service.enginestate import Pid

PREFIX = "loadmaster-demo-"
NAME = "demo"
_OWNER = "owner.json"
_END_S = 10.0


class Owner(Struct, frozen=True):
    """Whose demonstration a folder is. ``keep``: the folder stays, its processes do not."""

    process: Pid
    keep: bool


def own(folder: Path, keep: bool) -> None:
    """Write into a new folder whose it is. Raises OSError."""
    (folder / _OWNER).write_bytes(msgspec.json.encode(Owner(Pid.of(os.getpid()), keep)))


def take_away(folder: Path) -> bool:
    """End and remove what a demonstration left whose process has gone. Whether there was anything to end."""
    try:
        owner = msgspec.json.decode((folder / _OWNER).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return False
    if owner.process.alive:
        return False
    from loadmaster.edge.statehome import StateError
    from loadmaster.service.places import Places
    from loadmaster.service.refusal import SuperviseError
    from loadmaster.service.takedown import take_down

    ran = False
    places = Places(folder / "state" / "deployments" / NAME)
    if places.folder.is_dir():
        with contextlib.suppress(StateError, SuperviseError):
            ran, left = take_down(None, places, lambda text: None)
            if left:
                return ran
    if not owner.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return ran or not owner.keep


def earlier() -> tuple[Path, ...]:
    """The folders of demonstrations in the temporary folder that belong to this user."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        found.append(Path(entry.path))
    return tuple(sorted(found))


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """A watcher of this process, in a session of its own, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "loadmaster.service.demowatch", str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.write(b"ended\n")
                process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read(1):
        return  # it has ended as it should
    owner = Pid(int(sys.argv[2]))
    deadline = time.monotonic() + _END_S
    while owner.alive and time.monotonic() < deadline:  # its files are closed a moment before it is gone
        time.sleep(0.05)
    take_away(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
