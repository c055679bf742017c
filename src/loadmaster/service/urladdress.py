"""Which http(s) URLs may be fetched: one strict reading of a URL, and the addresses of the public internet.

A URL that two programs could read differently is refused, not repaired: that difference is the attack.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import quote

import msgspec

LONGEST_URL = 8192

# IANA special-purpose registries for IPv4 and IPv6 (RFC 6890 and its updates), multicast (RFC 5771), and addresses
# that a cloud host answers although they are in public ranges.
_REFUSED: tuple[tuple[IPv4Network | IPv6Network, str], ...] = tuple(
    (ip_network(network), what)
    for network, what in (
        ("0.0.0.0/8", "this network"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "carrier-grade NAT"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "protocol assignments"),
        ("192.0.2.0/24", "documentation"),
        ("192.31.196.0/24", "AS112"),
        ("192.52.193.0/24", "AMT"),
        ("192.88.99.0/24", "6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("192.175.48.0/24", "AS112"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("168.63.129.16/32", "Azure host"),
        ("2001::/23", "protocol assignments, Teredo"),
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "6to4"),
        ("2620:4f:8000::/48", "AS112"),
        ("3fff::/20", "documentation"),
    )
)
# The only part of IPv6 that is handed out to hosts: outside are loopback, mapped and translated IPv4 (NAT64), unique
# local, link-local, multicast and what is not assigned.
_GLOBAL_IPV6 = IPv6Network("2000::/3")
# ISATAP (RFC 5214): an interface identifier that holds an IPv4 address.
_ISATAP = re.compile(r"(0000|0200):5efe:[0-9a-f]{4}:[0-9a-f]{4}$")

_LOCAL_NAMES = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "home.arpa", "onion", "test")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_IPV4 = re.compile(r"(?:(?:0|[1-9][0-9]{0,2})\.){3}(?:0|[1-9][0-9]{0,2})", re.ASCII)
# A last label like this makes the whole host an IPv4 address to browsers and to many resolvers.
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+", re.ASCII)
_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.ASCII | re.IGNORECASE | re.DOTALL)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)


class RefusedError(Exception):
    """The URL or the address may not be fetched; the text says why."""


class Target(msgspec.Struct, frozen=True):
    """A URL in parts: ``host`` a lower-case ASCII name or an address, ``path`` with the query, percent-encoded."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The address when the host is one, and not a name."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def read_url(url: str, ports: frozenset[int]) -> Target:
    """Reads an http(s) URL strictly. An address as host is checked at once. Raises RefusedError."""
    if len(url) > LONGEST_URL:
        raise RefusedError(f"it is longer than {LONGEST_URL} characters")
    if any(letter <= " " or letter in "\\\x7f" or "\x80" <= letter <= "\x9f" for letter in url):
        raise RefusedError("it holds spaces, control characters or a backslash")
    match = _URL.fullmatch(url)
    if match is None:
        raise RefusedError("it is not an http(s) URL")
    scheme, authority, path = match[1].lower(), match[2], match[3]
    if "@" in authority:
        raise RefusedError("it holds a user name")
    if "%" in authority:
        raise RefusedError("its host is percent-encoded")
    port = 443 if scheme == "https" else 80
    if authority.startswith("["):
        host, bracket, rest = authority[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise RefusedError("its host is not well-formed")
        port_text = rest[1:] if rest else None
        host = _ipv6(host)
    else:
        host, colon, after = authority.partition(":")
        port_text = after if colon else None
        host = _name_or_ipv4(host)
    if port_text is not None:
        if not _PORT.fullmatch(port_text):
            raise RefusedError("its port is not well-formed")
        port = int(port_text)
    if port not in ports:
        raise RefusedError(f"its port is not one of {', '.join(str(port) for port in sorted(ports))}")
    if not path.startswith("/"):
        path = "/" + path
    return Target(scheme, host, port, quote(path, safe="/?%:@!$&'()*+,;=~-._[]|"))


def check_address(text: str) -> IPv4Address | IPv6Address:
    """The address, if it is one of the public internet. Raises RefusedError, also for what is no address."""
    try:
        address = ip_address(text)
    except ValueError:
        raise RefusedError("its address is not well-formed") from None
    if isinstance(address, IPv6Address):
        if address.scope_id is not None or address not in _GLOBAL_IPV6:
            raise RefusedError("its address is not a public one")
        if _ISATAP.search(address.exploded):
            raise RefusedError("its address is not a public one (ISATAP)")
    for network, what in _REFUSED:
        if address.version == network.version and address in network:
            raise RefusedError(f"its address is not a public one ({what})")
    if not address.is_global or address.is_multicast or address.is_reserved:
        raise RefusedError("its address is not a public one")
    return address


def _ipv6(text: str) -> str:
    try:
        address = IPv6Address(text)
    except ValueError:
        raise RefusedError("its host is not a well-formed IPv6 address") from None
    check_address(str(address))
    return address.compressed


def _name_or_ipv4(text: str) -> str:
    host = text.lower()
    if not host.isascii():
        host = _ascii_name(host)
    host = host.removesuffix(".")
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        if not _IPV4.fullmatch(host):
            raise RefusedError("its host is an address in an unusual spelling")
        return str(check_address(host))
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise RefusedError("its host is not well-formed")
    if len(labels) < 2 or any(host == name or host.endswith(f".{name}") for name in _LOCAL_NAMES):
        raise RefusedError("its host is a local name")
    return host


def _ascii_name(host: str) -> str:
    """The name in IDNA form. Letters that only look unusual, such as full-width digits, are refused, not translated."""
    if any(not label for label in host.removesuffix(".").split(".")):
        raise RefusedError("its host is not well-formed")
    try:
        labels = [(label, label.encode("idna").decode("ascii")) for label in host.removesuffix(".").split(".")]
    except UnicodeError:
        raise RefusedError("its host is not a well-formed international name") from None
    for label, encoded in labels:
        if not label.isascii() and not encoded.startswith("xn--"):
            raise RefusedError("its host is a plain name in unusual letters")
    return ".".join(encoded for _, encoded in labels)
