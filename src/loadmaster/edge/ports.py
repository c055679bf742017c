"""TCP ports of this machine: which are free, and who holds one that is not."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from pathlib import Path

from loadmaster.edge.process import read_process

_LISTEN = "0A"
_LAST = 65535
FOLDER_VARIABLE = "LOADMASTER_FOLDER"  # in the environment of every process of a deployment


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError:
        return False
    with socket.socket(address[0], socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address[4])
        except OSError:
            return False
    return True


def next_free(host: str, first: int, avoid: Collection[int] = ()) -> int | None:
    """The first port from ``first`` upwards that is free and not to be avoided; None when there is none."""
    return next((port for port in range(first, _LAST + 1) if port not in avoid and is_free(host, port)), None)


def holder(port: int) -> tuple[int, str] | None:
    """Process number and name of who listens on ``port``; None when that cannot be seen."""
    inodes = _inodes(port)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError), os.scandir(entry / "fd") as descriptors:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor.path) in wanted:  # noqa: PTH115 - not a path of the file system
                        process = read_process(int(entry.name))
                        return int(entry.name), process.name if process else "?"
    return None


def holder_words(port: int) -> str | None:
    """``process 123 python (deployment shop)``; None when it cannot be seen who listens there."""
    found = holder(port)
    if found is None:
        return None
    pid, name = found
    folder = ""
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        wanted = f"{FOLDER_VARIABLE}=".encode()
        folder = next((os.fsdecode(entry[len(wanted) :]) for entry in entries if entry.startswith(wanted)), "")
    return f"process {pid} {name}" + (f" (deployment {Path(folder).name})" if folder else "")


def _inodes(port: int) -> set[str]:
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (Path("/proc/net") / name).read_text().splitlines()[1:]:
                words = line.split()
                if len(words) > 9 and words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return found
