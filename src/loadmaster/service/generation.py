"""One answer that the server writes: asked for, kept as it grows, told to those who follow it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from aiohttp import web

from loadmaster.edge.conversations import ConversationStore
from loadmaster.service.answerstream import GrowingAnswer
from loadmaster.service.backends import Group
from loadmaster.service.errors import ApiError, places_of
from loadmaster.service.gatewaysettings import CHAT_ROUTE
from loadmaster.service.pageconversations import new_id
from loadmaster.service.pagequestion import Question
from loadmaster.service.pagerequest import Desk, event
from loadmaster.service.pagesessions import Visitor

_SAVE_S = 0.5

_log = logging.getLogger("loadmaster.gateway")


class Answers(Protocol):
    """Who looks after the answers of a page."""

    desk: Desk

    def done(self, generation: Generation) -> None: ...

    async def diagnosis(self, group: Group) -> tuple[dict[str, Any], ...]: ...


class Generation:
    """One answer that is being written. ``number``: of its conversation, None when the browser keeps it."""

    def __init__(self, answers: Answers, visitor: Visitor, number: str | None, growing: GrowingAnswer) -> None:
        self._answers = answers
        self.visitor = visitor
        self.number = number
        self.growing = growing
        self.followers = 0
        self.stored = number is not None
        self.replace: Callable[[], Awaitable[None]] | None = None  # puts it in an older one's place, once it begins
        self._replacing: asyncio.Future[None] | None = None
        self._begun = self._stopping = self._ending = False
        self._task: asyncio.Task[None] | None = None

    def start(self, question: Question) -> None:
        self._task = asyncio.create_task(self._run(question))

    def stop(self) -> None:
        """Somebody does not want more; what is there is kept."""
        if not self._stopping:
            self._stopping = True
            self._cancel()

    def end(self) -> None:
        """The gateway stops; what is there is kept."""
        self._ending = True
        self._cancel()

    def _cancel(self) -> None:
        """A task that is cancelled before its first step would not even tidy up."""
        if self._task is not None and self._begun:
            self._task.cancel()

    async def over(self) -> None:
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _run(self, question: Question) -> None:
        self._begun = True
        saving = asyncio.create_task(self._save_often())
        try:
            if self._stopping or self._ending:
                raise asyncio.CancelledError
            await self._ask(question)
            self.growing.end("done")
        except asyncio.CancelledError:
            if not self._stopping:
                self.growing.fail("gateway_stopping", "the gateway stopped before the answer was whole")
            self.growing.end("stopped" if self._stopping else "failed")
        except ApiError as error:
            engine = error.code.startswith("engine")
            findings = await self._answers.diagnosis(question.group) if engine else ()
            self.growing.fail(error.code, error.message, findings)
            self.growing.end("failed")
        except Exception as error:
            _log.error("an answer failed: %s", places_of(error))
            self.growing.fail("internal_error", "the gateway failed; its log says where")
            self.growing.end("failed")
        finally:
            saving.cancel()
            question.held.close()
            await self._save()
            self._answers.done(self)

    async def _ask(self, question: Question) -> None:
        """Through the gateway to the engine. Raises :class:`ApiError`."""
        gateway = self._answers.desk.gateway
        began = asyncio.get_running_loop().time()
        with gateway.passage.flight(self.growing, new_id()) as flight:
            whole = await gateway.passage.answer(
                CHAT_ROUTE, question.body, question.asked, self.visitor.owner, flight, began, self.growing.told
            )
        if whole is not None:
            raise _refusal(whole)
        problem = self.growing.error
        if problem is not None and problem.code.startswith("engine"):
            findings = await self._answers.diagnosis(question.group)
            self.growing.error = msgspec.structs.replace(problem, findings=findings)

    async def _save_often(self) -> None:
        seen = -1
        while True:
            await asyncio.sleep(_SAVE_S)
            if self.growing.version != seen:
                seen = self.growing.version
                await self._save()

    async def _save(self) -> None:
        """Keep what is there; a disk that refuses costs the answer nothing, it is told at the end."""
        if self.number is None:
            return
        try:
            if self.replace is not None:
                if not (self.growing.text.length or self.growing.thinking.length or self.growing.state == "done"):
                    return
                if self._replacing is None:
                    self._replacing = asyncio.ensure_future(self.replace())
                replacing, self._replacing = self._replacing, None
                try:
                    await asyncio.shield(replacing)
                except asyncio.CancelledError:
                    self._replacing = replacing  # the save at the end waits for it
                    raise
                self.replace = None
            await self._answers.desk.shelf.ask(ConversationStore.grow, self.number, self.growing.message())
        except ApiError:
            self.stored = False
        else:
            self.stored = True


class Follower:
    """One who follows an answer: what is news to them."""

    def __init__(self, growing: GrowingAnswer, begin: int, thought: int) -> None:
        self._growing = growing
        self._places = {"text": begin, "thinking": thought}
        self._turns = {"text": growing.text.turn, "thinking": growing.thinking.turn}
        self._place: int | None = None

    def news(self) -> bytes:
        growing, parts = self._growing, []
        if growing.place is not None and growing.place != self._place:
            parts.append(event("queue", {"place": growing.place}))
        self._place = growing.place
        for name, text in (("thinking", growing.thinking), ("text", growing.text)):
            if text.turn != self._turns[name]:
                self._turns[name], self._places[name] = text.turn, 0
                parts.append(event("delta", {name: "", "at": 0}))
            place = min(self._places[name], text.length)
            if text.length > place:
                parts.append(event("delta", {name: text.since(place), "at": place}))
            self._places[name] = text.length
        return b"".join(parts)


def last_events(generation: Generation) -> bytes:
    growing = generation.growing
    numbers = growing.numbers()
    told = event("numbers", numbers)
    if growing.error is not None:
        problem = growing.error
        return told + event(
            "error",
            {
                "code": problem.code,
                "message": problem.message,
                "findings": problem.findings,
                "numbers": numbers,
                "stored": generation.stored,
            },
        )
    return told + event(
        "done",
        {
            "state": growing.state,
            "numbers": numbers,
            "finish_reason": numbers.finish_reason,
            "stored": generation.stored,
        },
    )


def _refusal(whole: web.Response) -> ApiError:
    """An engine's answer that is no stream: it refused."""
    code, message = "engine_error", f"the engine answered {whole.status} instead of a stream"
    body = whole.body if isinstance(whole.body, (bytes, bytearray)) else b""
    with contextlib.suppress(msgspec.MsgspecError):
        value = msgspec.json.decode(body)
        inner = value.get("error") if isinstance(value, dict) else None
        if isinstance(inner, dict):
            message = str(inner.get("message") or message)
            code = str(inner.get("code") or code)
            if code.isdigit() or code == "engine_error":
                code = "engine_refused"
            if "context" in message.lower() and ("length" in message.lower() or "size" in message.lower()):
                code = "context_length_exceeded"
    return ApiError(whole.status, code, message)
