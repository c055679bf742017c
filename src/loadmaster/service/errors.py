"""What the gateway answers when it does not answer: OpenAI's error object, and who speaks.

``{"error": {"message", "type", "param", "code"}, "source": "loadmaster" | "engine"}``. The source tells a refusal of
the gateway from one of the engine behind it. Nothing here may hold a key or a request's text beyond a short quote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

OURS, ENGINE = "loadmaster", "engine"
MESSAGES_ROUTE, RESPONSES_ROUTE = "/v1/messages", "/v1/responses"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is not answered. ``retry_after``: whole seconds after which to ask again, None: do not."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
        source: str = OURS,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.headers = headers or {}
        self.source = source

    @property
    def type(self) -> str:
        return error_type(self.status)


class ImageError(Exception):
    """A picture that the rules refuse. ``code`` is stable, ``message`` says which picture and why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def places_of(failure: BaseException) -> str:
    """Where an exception came from, without what it says: its type, and the lines that it went through."""
    trace, places = failure.__traceback__, []
    while trace is not None:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(failure).__name__} at {' > '.join(places[-8:])}"


def invalid(code: str, message: str, param: str | None = None) -> ApiError:
    """A request that makes no sense, status 400."""
    return ApiError(400, code, message, param=param)


def error_type(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_object(error: ApiError, route: str = "") -> dict[str, Any]:
    """The answer's object; on Anthropic's route it carries the outer ``type`` that its clients look for."""
    inner = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    outer: dict[str, Any] = {"type": "error"} if route == MESSAGES_ROUTE else {}
    return outer | {"error": inner, "source": error.source}


def error_body(error: ApiError, route: str = "") -> bytes:
    return msgspec.json.encode(error_object(error, route))


def error_event(error: ApiError, route: str) -> bytes:
    """The event that ends a stream which cannot be finished, in the form that the route's clients raise on.

    No ``[DONE]`` follows: the answer is not whole.
    """
    if route == RESPONSES_ROUTE:
        flat = {"type": "error", "code": error.code, "message": error.message, "param": None, "source": error.source}
        return b"event: error\ndata: " + msgspec.json.encode(flat) + b"\n\n"
    head = b"event: error\n" if route == MESSAGES_ROUTE else b""
    return head + b"data: " + error_body(error, route) + b"\n\n"


def engine_error(status: int, body: bytes, content_type: str, route: str) -> bytes:
    """The engine's own error in our form: its object kept, its origin added; any other text quoted, shortened."""
    value: Any = None
    if "json" in content_type:
        try:
            value = msgspec.json.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            value = None
    if isinstance(value, dict):
        inner = value.get("error")
        if isinstance(inner, dict):
            return msgspec.json.encode(value | {"source": ENGINE})
        text = next((value[key] for key in ("message", "detail", "error") if isinstance(value.get(key), str)), None)
        if text is None and "detail" in value:
            text = msgspec.json.encode(value["detail"])[:2000].decode(errors="replace")
        code = value.get("code")
        if text is not None:
            return error_body(
                ApiError(status, str(code) if code is not None else "engine_error", text, source=ENGINE), route
            )
    text = " ".join(body[:2000].decode("utf-8", "replace").split())[:500]
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    message = f"the engine answered {status}" + (f": {text}" if text else " without a reason")
    return error_body(ApiError(status, "engine_error", message, source=ENGINE), route)
