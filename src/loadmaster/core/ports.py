"""Ports of deployments side by side: which of them collide, and which are still free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loadmaster.core.deployment import Deployment


def port_collisions(deployments: Sequence[Deployment]) -> tuple[str, ...]:
    """A sentence for each gateway port that several listen on. An engine whose port is taken picks the next."""
    users: dict[int, list[str]] = {}
    for one in deployments:
        users.setdefault(one.gateway.port, []).append(one.name)
    return tuple(
        f"port {port}: the gateways of {_and(names)} cannot run at the same time"
        for port, names in sorted(users.items())
        if len(names) > 1
    )


def free_port(first: int, taken: Iterable[int]) -> int:
    """The first port from ``first`` on that none of ``taken`` is."""
    used = set(taken)
    return next((port for port in range(first, 65536) if port not in used), first)


def used_ports(deployments: Iterable[Deployment]) -> set[int]:
    return {port for one in deployments for port in (one.gateway.port, one.engine.port)}


def _and(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]))
