"""A deployment from one engine release to another: planned first, proved afterwards, and back if the proof fails.

The release is ``engine.version`` in ``loadmaster.toml``. While it is on trial the old file lies beside it, so an
upgrade that was killed in the middle is undone by the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

from msgspec import Struct, structs

from loadmaster.config import CONFIGURATION, Loaded, change_value, deployment_folder, load_deployment
from loadmaster.core.deployment import Deployment
from loadmaster.edge.statehome import write_file

BEFORE = "loadmaster.toml.before-upgrade"
Result = Literal["upgraded", "kept", "went back", "not proved"]


class Outcome(Struct, frozen=True):
    """``kept``: nothing was changed. ``not proved``: it does not run, so only the plan speaks for it."""

    name: str
    result: Result
    detail: str


class Steps(Struct, frozen=True):
    """What an upgrade is made of. Each gives None when all is well, else what is wrong, a sentence.

    ``plan``: for the deployment as it would be. ``restart``: stops the engine and waits until the new one answers.
    ``verify``: the proof from end to end.
    """

    plan: Callable[[Deployment], str | None]
    running: Callable[[str], bool]
    restart: Callable[[str], str | None]
    verify: Callable[[str], str | None]


def upgrade(name: str, version: str, steps: Steps) -> Outcome:
    """Raises :class:`~loadmaster.config.ConfigError` when the configuration cannot be read or written."""
    go_back_if_interrupted(name)
    loaded = load_deployment(name)
    against = _unsuitable(loaded, version) or steps.plan(_with(loaded.deployment, version))
    if against is not None:
        return Outcome(name, "kept", against)
    before = loaded.path.read_bytes()
    keep = loaded.path.with_name(BEFORE)
    write_file(keep, before)
    was = loaded.deployment.engine.version or "no release named"
    done = False
    try:
        change_value(loaded.path, "engine.version", version)
        if not steps.running(name):
            done = True
            return Outcome(name, "not proved", f"{was} -> {version}; it is not running, so nothing was tried")
        failed = steps.restart(name) or steps.verify(name)
        if failed is None:
            done = True
            return Outcome(name, "upgraded", f"{was} -> {version}, verified")
    finally:
        if not done:  # also for an interruption
            write_file(loaded.path, before)
        with contextlib.suppress(OSError):
            keep.unlink()
    again = steps.restart(name)
    state = "the old release serves again" if again is None else f"and the old release does not start: {again}"
    return Outcome(name, "went back", f"{version}: {failed}; {state}")


def go_back_if_interrupted(name: str) -> bool:
    """Undoes an upgrade that never came to its end; says whether there was one."""
    keep = deployment_folder(name) / BEFORE
    try:
        before = keep.read_bytes()
    except OSError:
        return False
    write_file(keep.with_name(CONFIGURATION), before)
    with contextlib.suppress(OSError):
        keep.unlink()
    return True


def _with(deployment: Deployment, version: str) -> Deployment:
    return structs.replace(deployment, engine=structs.replace(deployment.engine, version=version))


def _unsuitable(loaded: Loaded, version: str) -> str | None:
    engine, origin = loaded.deployment.engine, loaded.origins["engine.version"]
    if engine.kind != "vllm":
        return f"its engine is {engine.kind}"
    if engine.container is not None or engine.python is not None:
        return "it has an engine.python or engine.container of its own"
    if origin.startswith("environment "):
        return f"{origin} decides its release"
    return f"it has {version} already" if engine.version == version else None


def uses(deployment: Deployment, version: str) -> bool:
    """Whether the deployment names this release of our own environments."""
    return can_move(deployment) and deployment.engine.version == version


def can_move(deployment: Deployment) -> bool:
    """Whether the deployment runs from our own environments, whichever."""
    engine = deployment.engine
    return engine.kind == "vllm" and engine.python is None and engine.container is None
