"""The plan of a deployment, as ``up`` wrote it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadmaster.core.facts import LoadSheet


def read_plan(path: Path) -> LoadSheet | None:
    """The plan of the last ``up``; None when there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LoadSheet)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
