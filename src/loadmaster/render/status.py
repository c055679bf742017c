"""The status of deployments as text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadmaster.render.visible import visible

if TYPE_CHECKING:
    from typing import Any

    Status = Any


def status_text(status: Status) -> str:
    """One deployment: a line for each part."""
    rows = [("state", _state(status)), ("engine", _engine(status)), ("gateway", _gateway(status))]
    rows.append(("supervisor", _supervisor(status)))
    if status.exit is not None and status.state not in ("ready", "down"):
        rows.append(("last exit", _exit(status)))
    if status.restarts:
        rows.append(("restarts", str(status.restarts)))
    if status.left_over:
        rows.append(("left over", ", ".join(str(pid) for pid in status.left_over)))
    width = max(len(label) for label, _ in rows) + 2
    return f"{status.name}\n" + "\n".join(f"  {label:{width}}{visible(text)}" for label, text in rows)


def status_table(statuses: Sequence[Status]) -> str:
    """All deployments, a line each."""
    rows = [("NAME", "STATE", "FOR", "GATEWAY", "MESSAGE")]
    for one in statuses:
        gateway = one.gateway.url or "-"
        rows.append((one.name, one.state, duration(one.seconds), gateway, visible(one.message)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip() for row in rows
    )


def duration(seconds: float | None) -> str:
    """``8 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _state(status: Status) -> str:
    lasting = f" for {duration(status.seconds)}" if status.seconds is not None else ""
    since = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(status.since))}" if status.since else ""
    return f"{status.state}{lasting}{since}" + (f": {status.message}" if status.message else "")


def _engine(status: Status) -> str:
    backend = status.backend
    if backend.pid is None:
        return "its process is not known" if status.state == "ready" else "no process"
    answers = {True: "answers", False: "does NOT answer", None: "not asked yet"}[backend.answers]
    return f"process {backend.pid}, {backend.url}, model {backend.model}, {answers}"


def _gateway(status: Status) -> str:
    gateway = status.gateway
    if gateway.pid is None:
        return f"not open: {gateway.problem}" if gateway.problem else "not open"
    return f"process {gateway.pid}, {gateway.url}, {'open' if gateway.answers else 'does NOT answer'}"


def _supervisor(status: Status) -> str:
    if status.supervisor.pid is None:
        return "no process"
    programs = ", ".join(f"{name} {state}" for name, state in sorted(status.supervisor.programs.items()))
    return f"process {status.supervisor.pid}, {programs or 'does NOT answer'}"


def _exit(status: Status) -> str:
    if status.exit.signal is not None:
        return f"signal {status.exit.signal}"
    return "unknown" if status.exit.code is None else f"code {status.exit.code}"
