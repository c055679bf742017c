"""Which settings a running deployment does not have yet, because its file was changed after the start."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import secrets

import msgspec
from msgspec import Struct

from loadmaster.core.deployment import Deployment
from loadmaster.core.deploymentfile import setting_keys
from loadmaster.edge.statehome import StateError, write_file
from loadmaster.service.places import Places


class _Started(Struct, frozen=True):
    """Key of a setting → the salted hash of its value: values can be secrets."""

    salt: str
    settings: dict[str, str]


def remember(places: Places, deployment: Deployment) -> None:
    """What the deployment is started with. A full disk costs the comparison, not the start."""
    salt = secrets.token_hex(16)
    with contextlib.suppress(OSError):
        places.started.unlink()
    with contextlib.suppress(StateError):
        write_file(places.started, msgspec.json.encode(_Started(salt, _hashes(deployment, salt))))


def not_in_force(places: Places, deployment: Deployment) -> tuple[str, ...]:
    """The keys whose values are others than at the start; none where the start is not known."""
    try:
        started = msgspec.json.decode(places.started.read_bytes(), type=_Started)
    except (OSError, msgspec.MsgspecError):
        return ()
    now = _hashes(deployment, started.salt)
    return tuple(key for key, value in now.items() if started.settings.get(key, value) != value)


def _hashes(deployment: Deployment, salt: str) -> dict[str, str]:
    found = {}
    for key in setting_keys():
        value = functools.reduce(getattr, key.split("."), deployment)
        content = msgspec.json.encode(value, order="deterministic")
        found[key] = hmac.digest(salt.encode(), content, hashlib.sha256).hex()
    return found
