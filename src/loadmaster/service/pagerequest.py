"""What the handlers of the page share: who asks, what the body says, and how answers are written."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from loadmaster.service.errors import ApiError, invalid
from loadmaster.service.gatewaysettings import LimitSettings, PageSettings
from loadmaster.service.pagesessions import Sessions, Visitor, check_own_page, cookie_name
from loadmaster.service.requestbody import Body, check_head, parse_object, read_body
from loadmaster.service.shelf import Shelf

if TYPE_CHECKING:
    from loadmaster.service.gateway import Gateway

MOST_JSON_BYTES = 8 << 20  # a message of a million letters, escaped
T = TypeVar("T")


class Desk:
    """Where the page's requests arrive."""

    def __init__(self, gateway: Gateway, settings: PageSettings) -> None:
        self.gateway = gateway
        self.settings = settings
        self.sessions = Sessions(gateway.keys) if gateway.keys is not None else None
        retention = settings.retention_s
        self.shelf = Shelf(_path(settings.database), settings.quota_bytes, retention)

    def visitor(self, request: web.Request) -> Visitor:
        """Who asks. Raises :class:`ApiError` 401, and 403 for a change that does not come from our own page."""
        found = self.known(request)
        if found is None:
            raise ApiError(401, "login_required", "log in with a key")
        return found

    def known(self, request: web.Request) -> Visitor | None:
        """Who asks; None: nobody that is known, where keys are asked for."""
        if self.sessions is None:
            return Visitor("")
        if "Authorization" in request.headers:
            key = self.gateway.key_of(request)
            return Visitor(key.name, key) if key is not None else None
        cookie = request.cookies.get(cookie_name(request))
        key = self.sessions.find(cookie) if cookie else None
        if key is None:
            return None
        if request.method not in ("GET", "HEAD"):
            check_own_page(request)
        return Visitor(key.name, key)

    def welcome(self, request: web.Request) -> bool:
        """Whether the visitor of a stream that goes on still has a key."""
        with contextlib.suppress(ApiError):
            return self.known(request) is not None
        return False

    async def read(self, request: web.Request, kind: type[T], most: int = MOST_JSON_BYTES) -> T:
        """The JSON object of the body. Raises :class:`ApiError`."""
        limits = msgspec.structs.replace(self.gateway.limits, max_body_bytes=most)
        check_head(request, limits)
        async with self.content(request, limits) as content:
            return convert(parse_object(content, limits.max_depth), kind)

    @contextlib.asynccontextmanager
    async def content(self, request: web.Request, limits: LimitSettings) -> AsyncIterator[bytes]:
        """The body as it is, counted as long as it is held. Raises :class:`ApiError`: too large, too slow, too much."""
        length = request.content_length
        if length is not None and length > limits.max_body_bytes:
            raise ApiError(413, "body_too_large", f"the body may have {limits.max_body_bytes:,} bytes at most")
        with Body(self.gateway.budget) as body:
            await read_body(request, body, limits)
            self.gateway.metrics.bytes_in.inc(len(body.content))
            content, body.content = bytes(body.content), bytearray()
            yield content


def _path(database: str | None) -> Path | None:
    return None if database is None else Path(database)


def convert(value: Any, kind: type[T]) -> T:
    """A JSON value as a Struct. Raises :class:`ApiError` that names the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise invalid("body_invalid", f"the body is not as it should be: {error}") from None


def reply(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'"},
    )


def event(name: str, data: Any) -> bytes:
    """One server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def whole_number(request: web.Request, name: str, otherwise: int, least: int, most: int) -> int:
    """A number of the query. Raises :class:`ApiError`."""
    text = request.query.get(name, "")
    if not text:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise invalid("query_invalid", f"{name} has to be a whole number", name)
    return min(most, max(least, int(text)))
