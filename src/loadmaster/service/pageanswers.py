"""Answers of the page: written by the server whether or not a browser watches, kept as they grow, followed by anyone.

A question goes the way of every request, through the same rules, queue and limits; only where the answer goes differs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct, field

from loadmaster.core.conversation import Conversation, Message, Role, title_of
from loadmaster.edge.conversations import ConversationStore
from loadmaster.service.answerstream import GrowingAnswer, units
from loadmaster.service.backends import Group, current_state
from loadmaster.service.errors import ApiError, invalid
from loadmaster.service.generation import Follower, Generation, last_events
from loadmaster.service.pageconversations import PageConversations, check_text, new_id
from loadmaster.service.pagequestion import Parameters, Question, Questions
from loadmaster.service.pagerequest import Desk, event, reply, whole_number
from loadmaster.service.pagesessions import Visitor
from loadmaster.service.pictureshown import Given, picture_refs
from loadmaster.service.requestrules import MOST_MESSAGES
from loadmaster.service.shelf import not_found

_KEEP_ALIVE_S = 15.0
_DIAGNOSIS_S, _LOOK_S = 2.0, 0.1
_MOST_FOLLOWERS = 64  # of one answer

_log = logging.getLogger("loadmaster.gateway")


class _Ask(Struct, forbid_unknown_fields=True):
    model: str | None = None
    text: str = ""
    pictures: list[Given] = []
    regenerate: str | None = None
    continue_: str | None = field(default=None, name="continue")
    parameters: Parameters = Parameters()


class _Said(Struct):
    role: Role
    text: str = ""
    pictures: list[Given] = []


class _AskOnce(Struct, forbid_unknown_fields=True):
    messages: list[_Said]
    model: str | None = None
    parameters: Parameters = Parameters()


class PageAnswers:
    """The handlers, and the answers that are being written."""

    def __init__(self, desk: Desk, conversations: PageConversations) -> None:
        self.desk = desk
        self._conversations = conversations
        self._questions = Questions(desk)
        self._loose: set[Generation] = set()
        self._accepting: set[asyncio.Task[None]] = set()

    def attach(self, app: web.Application) -> None:
        app.router.add_post("/api/conversations/{id}/answer", self.ask)
        app.router.add_get("/api/conversations/{id}/answer", self.follow, allow_head=False)
        app.router.add_post("/api/conversations/{id}/stop", self.stop)
        app.router.add_post("/api/answer", self.ask_once)

    async def close(self) -> None:
        """End what is still being written, and keep it."""
        running = [*self._conversations.running.values(), *self._loose]
        for generation in running:
            generation.end()
        await asyncio.gather(*(generation.over() for generation in running))

    def done(self, generation: Generation) -> None:
        self._loose.discard(generation)
        if generation.number is not None and self._conversations.running.get(generation.number) is generation:
            del self._conversations.running[generation.number]

    async def diagnosis(self, group: Group) -> tuple[dict[str, Any], ...]:
        """What was found of why the engine ended, waited for a moment: its exit has to be seen and its log read."""
        path = group.backends[0].settings.state_file
        if path is None:
            return ()
        before = current_state(path)
        for _ in range(round(_DIAGNOSIS_S / _LOOK_S)):
            state = current_state(path)
            if state is not None and state.findings:
                return tuple(msgspec.to_builtins(one) for one in state.findings)
            if state != before and state is not None and state.state in ("loading", "warming-up", "ready"):
                break  # it starts again, and nothing was found
            await asyncio.sleep(_LOOK_S)
        return ()

    # ------------------------------------------------------------------------------------------ asking

    async def ask(self, request: web.Request) -> web.StreamResponse:
        visitor = self.desk.visitor(request)
        asked = await self.desk.read(request, _Ask)
        check_text(asked.text)
        number = request.match_info["id"]
        if number in self._conversations.running:
            raise _answer_running()
        shelf = self.desk.shelf
        conversation = await shelf.ask(ConversationStore.get, visitor.owner, number)
        if conversation is None:
            raise not_found()
        question, begun = await self._turn(visitor, conversation, asked)
        prepared = await self._questions.prepare(
            visitor, question, asked.model, asked.parameters, asked.continue_ is not None
        )
        user = question[-1] if asked.regenerate is None and asked.continue_ is None else None
        again = asked.regenerate is not None
        later = again and (question[-1] != conversation.messages[-1])
        title = title_of(asked.text) if not conversation.title and user is not None else None
        generation = Generation(self, visitor, number, self._growing(begun, prepared))
        # kept and begun together, also when the browser leaves just now
        accepting = asyncio.create_task(self._accept(generation, prepared, asked, question, user, begun, title, later))
        self._accepting.add(accepting)
        accepting.add_done_callback(self._accepting.discard)
        await asyncio.shield(accepting)
        head = {
            "user": user,
            "assistant": begun,
            "title": title if title is not None else conversation.title,
            "forgotten": prepared.forgotten,
        }
        return await self._stream(request, generation, head, units(begun.text), units(begun.thinking or ""))

    async def _accept(
        self,
        generation: Generation,
        prepared: Question,
        asked: _Ask,
        question: Sequence[Message],
        user: Message | None,
        begun: Message,
        title: str | None,
        later: bool,
    ) -> None:
        """Keep the question and let the answer begin; neither, when it cannot be kept.

        ``later``: what the answer replaces stays until its first word is there.
        """
        shelf, owner, number = self.desk.shelf, generation.visitor.owner, generation.number or ""
        try:
            if number in self._conversations.running:
                raise _answer_running()
            self._conversations.running[number] = generation
            if asked.continue_ is not None:
                await shelf.ask(ConversationStore.edit, owner, number, begun, truncate=True, at=time.time())
            else:
                added = [begun] if user is None else [user, begun]
                after = question[-1] if user is None else None
                add = partial(shelf.ask, ConversationStore.add, owner, number, added, after=after, title=title)
                if later:
                    generation.replace = lambda: add(at=time.time())
                else:
                    await add(at=time.time())
            settings = msgspec.to_builtins(asked.parameters) | {"model": prepared.group.model}
            await shelf.ask(ConversationStore.change, owner, number, settings=settings)
        except BaseException:
            prepared.held.close()
            self.done(generation)
            raise
        generation.start(prepared)

    async def _turn(self, visitor: Visitor, conversation: Conversation, asked: _Ask) -> tuple[list[Message], Message]:
        """The messages that lead to the answer, and the answer as it begins."""
        now, messages = time.time(), list(conversation.messages)
        model = self.desk.gateway.backends.group(asked.model).model
        blank = Message(id=new_id(), role="assistant", state="streaming", created=now, model=model)
        again = asked.regenerate if asked.regenerate is not None else asked.continue_
        if asked.regenerate is not None and asked.continue_ is not None:
            raise invalid("body_invalid", "either regenerate or continue, not both")
        if again is not None and (asked.pictures or (asked.text and asked.continue_ is not None)):
            raise invalid("body_invalid", "an answer written again takes no pictures, a continued one no text")
        if again is None:
            if not asked.text.strip() and not asked.pictures:
                raise invalid("question_empty", "a question needs text or a picture")
            pictures = await picture_refs(self.desk.shelf, visitor.owner, asked.pictures)
            user = Message(id=new_id(), role="user", text=asked.text, pictures=pictures, created=now)
            return [*messages, user], blank
        place = next((place for place, message in enumerate(messages) if message.id == again), None)
        if place is None:
            raise not_found()
        if asked.continue_ is not None:
            if messages[place].role != "assistant" or not (messages[place].text or messages[place].thinking):
                raise invalid("body_invalid", "only an answer that was begun can be continued", "continue")
            begun = msgspec.structs.replace(messages[place], state="streaming", error=None, model=model)
            return messages[: place + 1], begun
        before = messages[:place] if messages[place].role == "assistant" else messages[: place + 1]
        if not before or before[-1].role != "user":
            raise invalid("body_invalid", "there is no question to answer again", "regenerate")
        if asked.text.strip():
            before[-1] = msgspec.structs.replace(before[-1], text=asked.text)
        return before, blank

    async def ask_once(self, request: web.Request) -> web.StreamResponse:
        """A conversation that the browser keeps: the same stream, ended when the browser leaves."""
        visitor = self.desk.visitor(request)
        asked = await self.desk.read(request, _AskOnce)
        if not 0 < len(asked.messages) <= MOST_MESSAGES:
            raise invalid("messages_invalid", f"messages has to hold 1 to {MOST_MESSAGES:,}", "messages")
        messages = []
        for said in asked.messages:
            check_text(said.text)
            pictures = await picture_refs(self.desk.shelf, visitor.owner, said.pictures)
            messages.append(Message(id=new_id(), role=said.role, text=said.text, pictures=pictures))
        begun = Message(id=new_id(), role="assistant", state="streaming", created=time.time())
        prepared = await self._questions.prepare(
            visitor, messages, asked.model, asked.parameters, messages[-1].role == "assistant"
        )
        generation = Generation(self, visitor, None, self._growing(begun, prepared))
        self._loose.add(generation)
        generation.start(prepared)
        try:
            head = {"user": None, "assistant": begun, "forgotten": prepared.forgotten}
            return await self._stream(request, generation, head, 0, 0)
        finally:
            generation.stop()

    def _growing(self, begun: Message, prepared: Question) -> GrowingAnswer:
        return GrowingAnswer(begun, image_tokens=prepared.image_tokens, forgotten=prepared.forgotten)

    # ------------------------------------------------------------------------------------------ following

    async def follow(self, request: web.Request) -> web.StreamResponse:
        """An answer that is under way, from a place of it on."""
        generation = await self._running(request)
        begin = whole_number(request, "from", 0, 0, 1 << 40)
        thought = whole_number(request, "thinking_from", 0, 0, 1 << 40)
        head = {"user": None, "assistant": {"id": generation.growing.message().id}}
        return await self._stream(request, generation, head, begin, thought)

    async def stop(self, request: web.Request) -> web.StreamResponse:
        generation = await self._running(request)
        generation.stop()
        await generation.over()
        return reply({"schema": 1, "state": generation.growing.state})

    async def _running(self, request: web.Request) -> Generation:
        visitor = self.desk.visitor(request)
        generation: Generation | None = self._conversations.running.get(request.match_info["id"])
        if generation is None or generation.visitor.owner != visitor.owner:
            raise ApiError(404, "answer_not_found", "no answer is being written there")
        return generation

    async def _stream(
        self, request: web.Request, generation: Generation, head: dict[str, Any], begin: int, thought: int
    ) -> web.StreamResponse:
        """Tell what comes until the answer is over. A browser that does not read is left alone after a while."""
        if generation.followers >= _MOST_FOLLOWERS:
            raise ApiError(429, "too_many_followers", "this answer has as many readers as it may have", retry_after=5)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        generation.followers += 1
        patience = self.desk.gateway.limits.client_timeout_s
        try:
            await response.prepare(request)
            await response.write(event("start", head))
            reader = Follower(generation.growing, begin, thought)
            while True:
                seen = generation.growing.version
                news = reader.news()
                if news:
                    async with asyncio.timeout(patience):
                        await response.write(news)
                if generation.growing.over:
                    break
                try:
                    async with asyncio.timeout(_KEEP_ALIVE_S):
                        await generation.growing.changed(seen)
                except TimeoutError:
                    async with asyncio.timeout(patience):
                        await response.write(b": still here\n\n")
            await generation.over()
            await response.write(last_events(generation))
            await response.write_eof()
        except TimeoutError:
            raise ConnectionResetError("the browser did not read its answer") from None
        finally:
            generation.followers -= 1
        return response


def _answer_running() -> ApiError:
    return ApiError(409, "answer_running", "an answer is being written in this conversation, stop it first")
