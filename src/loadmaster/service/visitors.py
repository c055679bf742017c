"""By which name a visitor called the gateway, and from which page: the two questions that protect a local service.

A page on the web can make a browser send requests to 127.0.0.1, under its own name (a cross-site request) or,
by answering DNS queries with 127.0.0.1, under a name of its own (rebinding). The first shows in ``Origin``, the
second in ``Host``. An address in ``Host`` cannot have been rebound, since no name was looked up.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from loadmaster.core.deployment import is_loopback
from loadmaster.service.errors import ApiError, invalid

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?")


def split_host(value: str) -> tuple[str, str | None] | None:
    """Name or address in small letters, without brackets, and the port; None when it is neither."""
    match = _HOST.fullmatch(value)
    if match is None:
        return None
    return match[1].strip("[]").rstrip(".").lower(), match[2]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class HostRules:
    """Names that count as ours: loopback names, the address listened on, those configured.

    A gateway that listens on every address accepts every address, and the machine's own name.
    """

    def __init__(self, bound: str, allowed: Iterable[str], machine: str = "") -> None:
        self._any_address = False
        names = {"localhost"}
        for host in (bound, *allowed):
            name = host.strip("[]").rstrip(".").lower()
            address = _address(name)
            if address is not None and address.is_unspecified:
                self._any_address = True
                names.add(machine.rstrip(".").lower())
            elif name:
                names.add(name)
        names.discard("")
        self._names = frozenset(names)

    def check(self, values: list[str]) -> None:
        """Judge the Host headers of a request. Raises :class:`ApiError`."""
        if len(values) != 1:
            raise invalid("host_missing", "a request needs one Host header")
        parts = split_host(values[0])
        if parts is None:
            raise invalid("host_invalid", "the Host header is no name and no address")
        name = parts[0]
        if name in self._names or (is_loopback(name) and _address(name) is not None):
            return
        if self._any_address and _address(name) is not None:
            return
        raise ApiError(
            403,
            "host_not_allowed",
            f"the gateway is not known by the name {name[:100]!r}; its operator can add it to the allowed hosts",
        )


class OriginRules:
    """Pages that may use the gateway: its own, and those of the configured origins."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self.allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)

    def check(self, origins: list[str], site: str | None, host: str, *, changes: bool) -> str | None:
        """Judge a request by its Origin headers, Sec-Fetch-Site and Host; ``changes``: it does more than read.

        Returns the configured origin that the answer has to name, None when it needs none. Raises
        :class:`ApiError`.
        """
        if len(origins) > 1:
            raise invalid("origin_invalid", "a request has at most one Origin header")
        if not origins:
            if changes and site in ("cross-site", "same-site"):
                raise self._refusal("another site")
            return None
        origin = origins[0].lower()
        if origin in self.allowed:
            return origins[0]
        scheme, _, rest = origin.partition("://")
        if scheme in ("http", "https") and rest and rest == host.lower():
            return None
        raise self._refusal(repr(origins[0][:100]))

    @staticmethod
    def _refusal(who: str) -> ApiError:
        return ApiError(
            403,
            "origin_not_allowed",
            f"pages of {who} may not use this gateway; its operator can add the origin to those allowed",
        )
