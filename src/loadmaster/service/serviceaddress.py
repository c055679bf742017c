"""The address of a service as a user writes it: what is asked, what may be shown, and what must not be."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

_HOST = re.compile(r"[\w.-]{1,253}|[0-9A-Fa-f:.]{2,45}(%[\w.-]{1,40})?")


class AddressError(Exception):
    """No address of a service. The message names it without its credentials; ``hint`` says what is wrong."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ServiceAddress(Struct, frozen=True):
    """``url``: without credentials, and without ``/v1`` or a slash at its end. ``user``, ``password``: those given."""

    url: str
    user: str | None = None
    password: str = ""


def parse_address(text: str) -> ServiceAddress:
    """Raises :class:`AddressError`."""
    hint = _wrong(text)
    if hint is not None:
        raise AddressError(f"{without_credentials(text)!r} is no address of a service", hint)
    parts = urlsplit(text)
    url = SplitResult(parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "").geturl()
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    if "@" not in parts.netloc:
        return ServiceAddress(url)
    return ServiceAddress(url, unquote(parts.username or ""), unquote(parts.password or ""))


def without_credentials(text: str) -> str:
    """The text as it may be shown, whatever it is: nothing before the last ``@``, no query, no fragment."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        scheme, rest = "", text
    if "@" in rest:
        rest = "***@" + rest.rpartition("@")[2]
    for sign in "?#":
        head, found, _ = rest.partition(sign)
        rest = f"{head}{sign}***" if found else head
    return (f"{scheme}://{rest}" if mark else rest)[:200]


def _wrong(text: str) -> str | None:
    """What is wrong with it, None when nothing is."""
    if not text.lower().startswith(("http://", "https://")):
        return "it begins with http:// or https://"
    if any(letter.isspace() or not letter.isprintable() for letter in text):
        return "it has a space or a letter that cannot be shown"
    try:
        parts = urlsplit(text)
        host = parts.hostname
    except ValueError:
        return "its host is neither a name nor an address"
    if not host:
        return "it names no host, such as http://127.0.0.1:8000"
    if not _HOST.fullmatch(host) or (":" in host) != ("[" in parts.netloc):
        return "its host is neither a name nor an address"
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        return "its port is no number from 1 to 65535"
    if "?" in text or "#" in text:
        return "it has no query and no fragment; a key comes with --api-key-file"
    return None
