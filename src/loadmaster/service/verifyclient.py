"""The client side of an OpenAI API, for any service that speaks it: what it refuses is asked again more plainly."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from msgspec import Struct

from loadmaster.service.serviceaddress import parse_address
from loadmaster.service.verifystream import StreamReader, error_text, reasoning_of

Messages = Sequence[Mapping[str, Any]]

_MOST_ANSWER_BYTES = 16 << 20
_CONNECT_S = 10.0
_SHOWN = 300  # letters of a foreign error message
# What not every server knows. Each is left out, for all further requests, once a server refuses it by name.
_OPTIONAL = ("chat_template_kwargs", "temperature", "stream_options", "seed")


class ServiceError(Exception):
    """No usable answer. ``status``: HTTP's, None when there was none. The message is a phrase without full stop."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class Answer(Struct, frozen=True, kw_only=True):
    """``text`` without ``reasoning``. ``problems``: of a stream's form."""

    text: str
    reasoning: str
    finish_reason: str | None
    usage: dict[str, Any] | None
    seconds: float
    first_s: float | None = None
    events: int = 0
    problems: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int | None:
        return self._count("prompt_tokens")

    @property
    def completion_tokens(self) -> int | None:
        return self._count("completion_tokens")

    def _count(self, key: str) -> int | None:
        value = (self.usage or {}).get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


class Service:
    """One service at ``url`` (with or without ``/v1``). ``timeout_s`` holds for one request as a whole.

    Credentials in the address are sent as such, where no key is given, and never shown. Raises
    :class:`AddressError`.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str | None = None, timeout_s: float = 120.0
    ) -> None:
        address = parse_address(url)
        self.url = address.url
        self.model = ""
        self.timeout_s = timeout_s
        self.refused: list[str] = []
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if address.user is not None and not api_key:
            pair = base64.b64encode(f"{address.user}:{address.password}".encode()).decode()
            self._headers = {"Authorization": f"Basic {pair}"}
        self._limit_name = "max_tokens"

    async def get(self, path: str, *, base: str | None = None, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Status and body of a GET, from another address if ``base`` is one. Raises :class:`ServiceError`."""
        async with self._request("GET", path, None, timeout_s or self.timeout_s, base) as response:
            return response.status, await _body(response)

    async def chat(self, messages: Messages, *, max_tokens: int, timeout_s: float | None = None, **more: Any) -> Answer:
        """One whole answer. Raises :class:`ServiceError`."""
        begin = time.monotonic()
        async with self._chat(messages, max_tokens, False, more, timeout_s) as response:
            body = _decode(await _body(response))
        return _whole(body, time.monotonic() - begin)

    async def stream(
        self, messages: Messages, *, max_tokens: int, timeout_s: float | None = None, **more: Any
    ) -> Answer:
        """One streamed answer; what is wrong with its form is in ``problems``. Raises :class:`ServiceError`."""
        begin = time.monotonic()
        first_s: float | None = None
        asked = {"stream_options": {"include_usage": True}, **more}
        async with self._chat(messages, max_tokens, True, asked, timeout_s) as response:
            reader = StreamReader("stream_options" not in self.refused)
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                reader.problems.append(f"the content type is {kind[:60]!r}, not text/event-stream")
            received = 0
            try:
                async for chunk in response.content.iter_any():
                    received += len(chunk)
                    if received > _MOST_ANSWER_BYTES:
                        raise ServiceError("an answer of more than 16 MiB")
                    reader.feed(chunk)
                    if first_s is None and (reader.text or reader.reasoning):
                        first_s = time.monotonic() - begin
            except aiohttp.ClientPayloadError:
                reader.problems.append("the connection was cut before the end")
        if reader.error is not None:
            raise ServiceError(f"an error in the stream: {_short(reader.error)}")
        return Answer(
            text=reader.text,
            reasoning=reader.reasoning,
            finish_reason=reader.finish_reason,
            usage=reader.usage,
            seconds=time.monotonic() - begin,
            first_s=first_s,
            events=reader.events,
            problems=tuple(reader.end()),
        )

    @asynccontextmanager
    async def open_stream(self, messages: Messages, *, max_tokens: int) -> AsyncIterator[None]:
        """A stream whose first event has come and that is cut off when the block ends. Raises :class:`ServiceError`."""
        async with self._chat(messages, max_tokens, True, {}, None) as response:
            if not await response.content.readline():
                raise ServiceError("the stream ended before its first event")
            try:
                yield
            finally:
                response.close()

    @asynccontextmanager
    async def _chat(
        self, messages: Messages, max_tokens: int, stream: bool, more: Mapping[str, Any], timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200. What the server refuses to know is left out and asked again."""
        while True:
            body = self._chat_body(messages, max_tokens, stream, more)
            async with self._request("POST", "/v1/chat/completions", body, timeout_s or self.timeout_s) as response:
                if response.status == 200:
                    yield response
                    return
                said = await _body(response)
                if response.status in (400, 422) and self._learn(said, body):
                    continue
                raise ServiceError(f"HTTP {response.status}: {_said(said)}", response.status)

    def _chat_body(self, messages: Messages, max_tokens: int, stream: bool, more: Mapping[str, Any]) -> dict[str, Any]:
        optional = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}, **more}
        kept = {name: value for name, value in optional.items() if name not in self.refused}
        return {
            "model": self.model,
            "messages": list(messages),
            self._limit_name: max_tokens,
            "stream": stream,
            **kept,
        }

    def _learn(self, said: bytes, body: Mapping[str, Any]) -> bool:
        """Whether the refusal names something that can be left out or said otherwise, which it then is."""
        text = said.decode("utf-8", "replace")
        for name in _OPTIONAL:
            if name in body and name in text:
                self.refused.append(name)
                return True
        if self._limit_name == "max_tokens" and "max_completion_tokens" in text:
            self._limit_name = "max_completion_tokens"
            return True
        return False

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, base: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
        headers = self._headers if base in (None, self.url) else {}  # the key is for the service alone
        try:
            async with self._session.request(
                method, (base or self.url) + path, json=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                yield response
        except aiohttp.ConnectionTimeoutError as error:
            raise ServiceError(f"no connection to {self.url} in {min(_CONNECT_S, timeout_s):g} s") from error
        except TimeoutError as error:
            raise ServiceError(f"not answered within {timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            code = error.os_error.errno
            # resolvers number their errors below zero, and say in words what they mean
            known = os.strerror(code) if code is not None and code > 0 else error.os_error.strerror
            reason = _short(known or str(error.os_error)).lower()
            raise ServiceError(f"cannot connect to {self.url}: {reason}") from error
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: an address that is none
            raise ServiceError(f"the connection failed: {_short(str(error) or type(error).__name__)}") from error


async def _body(response: aiohttp.ClientResponse) -> bytes:
    content = b""
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _MOST_ANSWER_BYTES:
            raise ServiceError("an answer of more than 16 MiB", response.status)
    return content


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"the answer is not JSON: {_short(raw[:80].decode('utf-8', 'replace'))!r}", 200) from error


def _whole(body: Any, seconds: float) -> Answer:
    try:
        choice = body["choices"][0]
        message = choice["message"]
        text = message.get("content")
        finish_reason, usage = choice.get("finish_reason"), body.get("usage")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ServiceError("the answer has no choices with a message", 200) from None
    if text is not None and not isinstance(text, str):
        raise ServiceError("the message's content is no text", 200)
    return Answer(
        text=text or "",
        reasoning=reasoning_of(message),
        finish_reason=str(finish_reason) if finish_reason is not None else None,
        usage=usage if isinstance(usage, dict) else None,
        seconds=seconds,
    )


def _said(raw: bytes) -> str:
    """Why a server refused, in its own words."""
    try:
        found = error_text(json.loads(raw))
    except (ValueError, RecursionError):
        found = None
    return _short(found if found is not None else raw.decode("utf-8", "replace"))


def _short(text: str) -> str:
    """One printable line."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(line.split())
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "..."
