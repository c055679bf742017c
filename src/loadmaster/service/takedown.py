"""``down`` as a function, and the lock under which a deployment is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from loadmaster.core.deployment import Deployment, SupervisionSection
from loadmaster.edge.process import Member
from loadmaster.service.places import Busy, Places, locked
from loadmaster.service.refusal import SuperviseError
from loadmaster.service.supervise import leftovers, stop, supervisor_pid

_LOCK_SLACK_S = 120.0

Said = Callable[[str], None]


def take_down(deployment: Deployment | None, places: Places, said: Said) -> tuple[bool, tuple[Member, ...]]:
    """Stop everything of the deployment. Whether anything ran, and what could not be ended. Raises StateError.

    ``deployment`` None: its configuration cannot be read, which must not keep anybody from stopping it.
    """
    with alone(places, deployment, said):
        ran = supervisor_pid(places) is not None or bool(leftovers(places))
        return ran, stop(places, _stop_s(deployment), said)


@contextlib.contextmanager
def alone(places: Places, deployment: Deployment | None, said: Said) -> Iterator[None]:
    """One change of a deployment at a time. Raises :class:`SuperviseError` when another one does not end."""

    def waiting(pid: int | None) -> None:
        said(f"another loadmaster{f' (process {pid})' if pid else ''} changes {places.name}, waiting for it")

    try:
        with locked(places.change_lock, _stop_s(deployment) + _LOCK_SLACK_S, waiting):
            yield
    except Busy as busy:
        raise SuperviseError(f"{places.name} is {busy}, which does not come to an end") from None


def _stop_s(deployment: Deployment | None) -> float:
    return (deployment.supervision if deployment is not None else SupervisionSection()).stop_s
