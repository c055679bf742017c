"""Where a path inside a container is on this machine, by the mounts that its text names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

_HOME = re.compile(r"\$(?:HOME\b|\{HOME\})")
_HERE = re.compile(r"\$(?:PWD\b|\{PWD\}|\(pwd\))|`pwd`")


def host_path(path: str, mounts: Sequence[tuple[str, str]], folder: Path) -> Path | None:
    """The path of the host that ``path`` of the container is; None if no mount covers it.

    ``mounts``: (path on the host as written, path in the container); the deepest that covers ``path`` counts.
    ``folder``: where relative paths of the text begin. A variable other than HOME and PWD is not filled in: None.
    """
    wanted = PurePosixPath(os.path.normpath(path))
    for source, target in sorted(mounts, key=lambda mount: len(mount[1]), reverse=True):
        inside = PurePosixPath(os.path.normpath(target))
        if wanted == inside or inside in wanted.parents:
            place = _filled_in(source, folder)
            return None if place is None else place / wanted.relative_to(inside)
    return None


def _filled_in(source: str, folder: Path) -> Path | None:
    home = str(Path.home())
    text = _HERE.sub(lambda _: str(folder), _HOME.sub(lambda _: home, source))
    if "$" in text:
        return None
    path = Path(text)
    if path.parts and path.parts[0] == "~":
        path = Path(home, *path.parts[1:])
    return folder / path
