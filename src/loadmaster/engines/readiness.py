"""When an engine truly answers, and its warm-up, over the OpenAI API.

A process that lives, a port that listens and ``/health`` prove nothing: an engine that is stuck has all three. Ready
is one that lists the model and gives a token.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from msgspec import Struct

from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import LoadSheet
from loadmaster.engines.png import data_url, gradient

_ASK_EVERY_S = (0.1, 1.0)  # at first, and at most
_LIST_TIMEOUT_S = 10.0
_MOST_ANSWER_BYTES = 4 * 1024 * 1024
_WARM_UP_TOKENS = 16
_WARM_UP_SIDE = 512  # of the picture where nobody says how large one may be
_TEXT = "Say hello."

Alive = Callable[[], bool]
Report = Callable[[str], None]


class NotReady(Exception):
    """The engine did not become ready. ``final``: waiting longer would not help."""

    def __init__(self, message: str, hint: str | None = None, *, final: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.final = final


class Ready(Struct, frozen=True, kw_only=True):
    """``listed_s`` and ``answered_s``: seconds from the call until the model was listed, and until a token came."""

    model: str
    listed_s: float
    answered_s: float
    chat: bool  # False: the model has no chat template and answers completions alone


class WarmUp(Struct, frozen=True, kw_only=True):
    """Seconds of the first text and of the first picture of the largest size; None: not asked, or it failed."""

    text_s: float | None
    picture_s: float | None = None
    picture_size: tuple[int, int] | None = None
    problems: tuple[str, ...] = ()


class _Answer(Struct, frozen=True):
    status: int
    document: Any
    text: str

    @property
    def message(self) -> str:
        """What the engine says of an error, in one line."""
        document = self.document
        if isinstance(document, Mapping):
            error = document.get("error", document)
            found = error.get("message") if isinstance(error, Mapping) else error
            if isinstance(found, str):
                return " ".join(found.split())[:300]
        return " ".join(self.text.split())[:300]


async def wait_ready(
    url: str, model: str, api_key: str | None, deadline: float, alive: Alive, report: Report = lambda text: None
) -> Ready:
    """Wait until ``url`` lists ``model`` and answers with a token.

    ``deadline``: on time.monotonic()'s clock. ``alive``: whether the process still runs. ``report``: is told, in a few
    words, whenever what is waited for changes. Raises :class:`NotReady`.
    """
    begin = time.monotonic()
    waits = _Waits(deadline, alive, report)
    async with _session(api_key) as session:
        while True:
            try:
                await _listed(session, url, model)
                break
            except NotReady as reason:
                await waits.again(reason)
        listed = time.monotonic()
        report("the model is listed, waiting for its first answer")
        chat = True
        while True:
            try:
                await waits.guarded(_one_token(session, url, model, chat, deadline - time.monotonic()))
                break
            except NotReady as reason:
                if chat and reason.final and "template" in reason.message:
                    chat = False
                    continue
                await waits.again(reason)
    return Ready(model=model, listed_s=listed - begin, answered_s=time.monotonic() - begin, chat=chat)


async def probe(url: str, model: str, api_key: str | None, timeout_s: float, *, chat: bool = True) -> str | None:
    """Ask for one token: None when it came in time, else why not."""
    try:
        async with _session(api_key) as session:
            await _one_token(session, url, model, chat, timeout_s)
    except NotReady as reason:
        return reason.message
    return None


async def warm_up(
    url: str,
    model: str,
    api_key: str | None,
    *,
    picture: tuple[int, int] | None,
    timeout_s: float = 600.0,
    chat: bool = True,
    report: Report = lambda text: None,
) -> WarmUp:
    """A text and a picture of the size given (None: no pictures), so that what happens once happens before users come.

    Kernels are compiled, variants measured, and the allocator grows to the largest picture. A refused picture is a
    problem to report; it is not an error of the start.
    """
    problems: list[str] = []
    picture_s: float | None = None
    async with _session(api_key) as session:
        report("warming up with a text")
        text_s, said = await _timed(_ask(session, url, _question(model, _TEXT, chat, _WARM_UP_TOKENS), chat, timeout_s))
        if said is not None:
            problems.append(f"the warm-up text failed: {said}")
        if picture is not None and chat:
            width, height = picture
            report(f"warming up with a picture of {width} x {height} pixels")
            image = data_url(await asyncio.to_thread(gradient, width, height))
            parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "Which colours?"}]
            picture_s, said = await _timed(
                _ask(session, url, _question(model, parts, chat, _WARM_UP_TOKENS), chat, timeout_s)
            )
            if said is not None:
                problems.append(f"the warm-up picture of {width} x {height} pixels failed: {said}")
    return WarmUp(text_s=text_s, picture_s=picture_s, picture_size=picture, problems=tuple(problems))


def warm_up_picture(deployment: Deployment, plan: LoadSheet | None) -> tuple[int, int] | None:
    """Width and height of the largest picture that may reach the engine; None when none may.

    The plan's largest, within ``limits.max_image_pixels``; where neither is known, a small one.
    """
    limits = deployment.limits
    if limits.max_images == 0:
        return None
    if deployment.engine.kind == "llamacpp" and deployment.projector is None:
        return None
    if plan is not None and plan.images is None and deployment.engine.kind == "vllm":
        return None  # a model of text
    size = plan.images.largest_size if plan is not None and plan.images is not None else None
    cap = limits.max_image_pixels
    if size is None:
        side = _WARM_UP_SIDE if cap is None else math.isqrt(cap)
        return side, side
    if cap is not None and size[0] * size[1] > cap:
        scale = math.sqrt(cap / (size[0] * size[1]))
        return max(1, math.floor(size[0] * scale)), max(1, math.floor(size[1] * scale))
    return size


class _Waits:
    """Decides after each failed attempt: wait and try again, or give up."""

    def __init__(self, deadline: float, alive: Alive, report: Report) -> None:
        self._deadline = deadline
        self._alive = alive
        self._report = report
        self._pause = _ASK_EVERY_S[0]
        self._said: str | None = None

    async def again(self, reason: NotReady) -> None:
        if reason.final:
            raise reason
        self._check_alive()
        if time.monotonic() >= self._deadline:
            raise NotReady(
                f"not ready in time: {reason.message}", "give engine.start_timeout_s more seconds, or see the log"
            ) from reason
        if reason.message != self._said:
            self._said = reason.message
            self._report(reason.message)
        await asyncio.sleep(min(self._pause, max(0.0, self._deadline - time.monotonic())))
        self._pause = min(self._pause * 1.5, _ASK_EVERY_S[1])

    async def guarded(self, work: Any) -> None:
        """Do the work, but stop it when the process ends: its first answer may take minutes."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_ASK_EVERY_S[1])
                if not task.done():
                    self._check_alive()
            task.result()
        finally:
            task.cancel()

    def _check_alive(self) -> None:
        if not self._alive():
            raise NotReady("the engine has ended", final=True) from None


def _session(api_key: str | None) -> aiohttp.ClientSession:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    # a proxy of the environment is not asked, and a cookie is not kept
    return aiohttp.ClientSession(headers=headers, trust_env=False, cookie_jar=aiohttp.DummyCookieJar())


async def _request(
    session: aiohttp.ClientSession, url: str, timeout_s: float, body: Mapping[str, Any] | None = None
) -> _Answer:
    timeout = aiohttp.ClientTimeout(total=max(0.1, timeout_s))
    method = "GET" if body is None else "POST"
    try:
        async with session.request(method, url, json=body, timeout=timeout, allow_redirects=False) as response:
            data = await response.content.read(_MOST_ANSWER_BYTES)
            while chunk := await response.content.read(_MOST_ANSWER_BYTES):
                data += chunk
                if len(data) > _MOST_ANSWER_BYTES:
                    raise NotReady("its answer is endless")
            text = data.decode("utf-8", "replace")
    except TimeoutError as error:
        raise NotReady(f"no answer within {round(timeout_s, 1):g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise NotReady("it does not listen yet") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NotReady(f"its answer is no HTTP ({type(error).__name__})") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    return _Answer(response.status, document, text)


async def _listed(session: aiohttp.ClientSession, url: str, model: str) -> None:
    answer = await _request(session, f"{url}/v1/models", _LIST_TIMEOUT_S)
    if answer.status in (401, 403):
        raise NotReady("the engine asks for another API key", "check --api-key and VLLM_API_KEY", final=True)
    if answer.status != 200:
        raise NotReady(f"its list of models answers {answer.status}")
    try:
        names = [str(card["id"]) for card in answer.document["data"]]
    except (KeyError, TypeError) as error:
        raise NotReady("its list of models is none") from error
    if model not in names:
        listed = ", ".join(names) or "none"
        raise NotReady(
            f"the engine serves {listed}, not {model}", "check --served-model-name, or who listens there", final=True
        )


def _question(model: str, content: Any, chat: bool, tokens: int) -> dict[str, Any]:
    common = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": False}
    if chat:
        return {**common, "messages": [{"role": "user", "content": content}]}
    return {**common, "prompt": content}


async def _one_token(session: aiohttp.ClientSession, url: str, model: str, chat: bool, timeout_s: float) -> None:
    await _ask(session, url, _question(model, _TEXT, chat, 1), chat, timeout_s)


async def _ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], chat: bool, timeout_s: float) -> None:
    """Ask and insist on an answer with a token in it. Thinking counts: the text itself may be empty."""
    answer = await _request(session, f"{url}/v1/{'chat/' if chat else ''}completions", timeout_s, body)
    if answer.status != 200:
        final = 400 <= answer.status < 500 and answer.status not in (408, 425, 429)
        raise NotReady(f"the engine answers {answer.status}: {answer.message}", final=final)
    try:
        reason = answer.document["choices"][0]["finish_reason"]
        tokens = (answer.document.get("usage") or {}).get("completion_tokens", 1)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise NotReady("its answer is no completion") from error
    if not reason or not tokens:
        raise NotReady("its answer has no token")


async def _timed(work: Any) -> tuple[float | None, str | None]:
    begin = time.monotonic()
    try:
        await work
    except NotReady as reason:
        return None, reason.message
    return time.monotonic() - begin, None
