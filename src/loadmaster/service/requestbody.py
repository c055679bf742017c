"""The body of a request: read within bounds of size, time and memory, and parsed into one object.

What is judged is what is sent on: the engine gets the parsed object written anew, never the client's bytes, so that
two readers cannot understand one body differently (the last of equal keys counts, here and there).
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web

from loadmaster.service.errors import ApiError, invalid
from loadmaster.service.gatewaysettings import LimitSettings

MOST_CONTAINERS = 200_000  # objects and arrays; each takes some 200 bytes as a Python object
MOST_VALUES = 1_000_000  # each takes some 60 bytes
_MOST_INTEGER = 1 << 64


class BodyBudget:
    """Bytes of request bodies that are held at the same time, over all visitors."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0


class Body:
    """One body as it comes in. A context manager: its bytes leave the budget when it is left."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._counted = 0
        self.content = bytearray()

    def count(self, size: int) -> None:
        """Say how many bytes are held now. Raises :class:`ApiError` when they are too many together."""
        if self._budget.held + size - self._counted > self._budget.most:
            raise ApiError(
                429,
                "too_many_bytes",
                "the gateway holds as many bytes of requests as it may, try again soon",
                retry_after=2,
            )
        self._budget.held += size - self._counted
        self._counted = size

    def __enter__(self) -> Body:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.held -= self._counted
        self._counted = 0


def check_head(request: web.BaseRequest, limits: LimitSettings) -> None:
    """Refuse by the headers alone what the body need not be read for. Raises :class:`ApiError`."""
    if request.content_type != "application/json":
        raise ApiError(415, "content_type", "the body has to be JSON, with Content-Type: application/json")
    if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "content_encoding", "the body has to come uncompressed, without Content-Encoding")
    length = request.content_length
    if length is not None and length > limits.max_body_bytes:
        raise _too_large(limits)
    if not request.can_read_body:
        raise invalid("body_missing", "the request has no body")


def _too_large(limits: LimitSettings) -> ApiError:
    return ApiError(413, "body_too_large", f"the body may have {limits.max_body_bytes:,} bytes at most")


async def read_body(request: web.BaseRequest, body: Body, limits: LimitSettings) -> None:
    """Read the body into ``body.content``. Raises :class:`ApiError`: too large, too slow, broken off."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limits.body_timeout_s
    content = body.content
    try:
        async with asyncio.timeout_at(min(end, loop.time() + limits.body_idle_timeout_s)) as patience:
            while chunk := await request.content.readany():
                if len(content) + len(chunk) > limits.max_body_bytes:
                    raise _too_large(limits)
                body.count(len(content) + len(chunk))
                content += chunk
                patience.reschedule(min(end, loop.time() + limits.body_idle_timeout_s))
    except TimeoutError:
        raise ApiError(408, "body_too_slow", "the body did not arrive in time") from None
    except (web.RequestPayloadError, ValueError) as error:
        raise invalid("body_broken", "the body is not framed as its headers say") from error


def parse_object(content: bytes | bytearray, max_depth: int) -> dict[str, Any]:
    """The JSON object that a body holds. Raises :class:`ApiError` when it holds anything else."""
    if content.count(b"{") + content.count(b"[") > MOST_CONTAINERS:
        raise invalid("body_too_complex", f"the body has more than {MOST_CONTAINERS:,} brackets")
    if content.count(b",") > MOST_VALUES:
        raise invalid("body_too_complex", f"the body has more than {MOST_VALUES:,} commas")
    try:
        value = msgspec.json.decode(content)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise invalid("body_not_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid("body_not_object", "the body has to be a JSON object")
    _check_values(value, max_depth)
    return value


def _too_deep(max_depth: int) -> ApiError:
    return invalid("body_too_deep", f"the body is nested deeper than {max_depth} levels")


def _check_values(value: dict[str, Any], max_depth: int) -> None:
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise _too_deep(max_depth)
        below: list[Any] = []
        for container in level:
            for item in container.values() if isinstance(container, dict) else container:
                kind = type(item)
                if kind is dict or kind is list:
                    below.append(item)
                elif kind is int and not -_MOST_INTEGER < item < _MOST_INTEGER:
                    raise invalid("number_too_large", "a number is beyond 64 bits")
        level = below
