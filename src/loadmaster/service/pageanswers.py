"""Answers of the page: written by the server whether or not a browser watches, kept as they grow, followed by anyone.

A question goes the way of every request, through the same rules, queue and limits; only where the answer goes differs.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct, field

from loadmaster.core.contextuse import corrected, first_kept, guessed_tokens
from loadmaster.core.conversation import Conversation, Message, PictureRef, Role, title_of
from loadmaster.edge.conversations import ConversationStore, Picture
from loadmaster.service.admission import FullError
from loadmaster.service.answerstream import GrowingAnswer, units
from loadmaster.service.backends import Group, current_state
from loadmaster.service.errors import ApiError, invalid
from loadmaster.service.gatewaysettings import CHAT_ROUTE
from loadmaster.service.modelfacts import context_tokens, tokens_of_picture
from loadmaster.service.pageconversations import PageConversations, check_text, new_id
from loadmaster.service.pagerequest import Desk, event, reply, whole_number
from loadmaster.service.pagesessions import Visitor
from loadmaster.service.passage import full, stopping
from loadmaster.service.pictureshown import Given, picture_refs
from loadmaster.service.requestbody import Body
from loadmaster.service.requestrules import MOST_MESSAGES, Asked, judge
from loadmaster.service.shelf import not_found

_SAVE_S = 0.5
_KEEP_ALIVE_S = 15.0
_MOST_SYSTEM = 65_536
_MOST_FOLLOWERS = 64  # of one answer
_LEFT_OUT_PICTURE = "data:,"  # the picture rules put a word in its place without looking at it


class Parameters(Struct, frozen=True, forbid_unknown_fields=True):
    """What a question is asked with; None: as the model has it."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    system: str | None = None
    thinking: bool | None = None


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


class Question(Struct, kw_only=True):
    """What goes to the engine. ``held``: the bytes of its pictures, counted until it is sent."""

    body: dict[str, Any]
    asked: Asked
    group: Group
    held: Body
    image_tokens: int | None
    forgotten: int


class Generation:
    """One answer that is being written. ``number``: of its conversation, None when the browser keeps it."""

    def __init__(self, answers: PageAnswers, visitor: Visitor, number: str | None, growing: GrowingAnswer) -> None:
        self._answers = answers
        self.visitor = visitor
        self.number = number
        self.growing = growing
        self.followers = 0
        self.stored = number is not None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self, question: Question) -> None:
        self._task = asyncio.create_task(self._run(question))

    def stop(self) -> None:
        if self._task is not None and not self._task.done() and not self._stopping:
            self._stopping = True
            self._task.cancel()

    async def over(self) -> None:
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _run(self, question: Question) -> None:
        saving = asyncio.create_task(self._save_often())
        try:
            await self._ask(question)
            self.growing.end("done")
        except asyncio.CancelledError:
            if not self._stopping:
                self.growing.fail("gateway_stopping", "the gateway stopped before the answer was whole")
            self.growing.end("stopped" if self._stopping else "failed")
        except ApiError as error:
            self.growing.fail(error.code, error.message, self._answers.findings(question.group))
            self.growing.end("failed")
        except Exception:
            self.growing.fail("internal_error", "the gateway failed; its log says where")
            self.growing.end("failed")
            raise
        finally:
            saving.cancel()
            question.held.__exit__(None, None, None)
            await self._save()
            self._answers.done(self)

    async def _ask(self, question: Question) -> None:
        """Through the gateway to the engine. Raises :class:`ApiError`."""
        gateway = self._answers.desk.gateway
        began = asyncio.get_running_loop().time()
        model = question.group.model
        with (
            gateway.use_of(self.visitor.key),
            gateway.passage.flight(self.growing, new_id(), CHAT_ROUTE, model) as flight,
        ):
            whole = await gateway.passage.answer(
                CHAT_ROUTE, question.body, question.asked, self.visitor.owner, flight, began, self.growing.told
            )
        if whole is not None:
            raise _refusal(whole)
        if self.growing.error is not None and self.growing.error.code.startswith("engine"):
            problem = self.growing.error
            self.growing.error = None
            self.growing.fail(problem.code, problem.message, self._answers.findings(question.group))

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
            await self._answers.desk.shelf.ask(ConversationStore.grow, self.number, self.growing.message())
        except ApiError:
            self.stored = False
        else:
            self.stored = True


class PageAnswers:
    """The handlers, and the answers that are being written."""

    def __init__(self, desk: Desk, conversations: PageConversations) -> None:
        self.desk = desk
        self._conversations = conversations
        self._loose: set[Generation] = set()

    def attach(self, app: web.Application) -> None:
        app.router.add_post("/api/conversations/{id}/answer", self.ask)
        app.router.add_get("/api/conversations/{id}/answer", self.follow)
        app.router.add_post("/api/conversations/{id}/stop", self.stop)
        app.router.add_post("/api/answer", self.ask_once)

    async def close(self) -> None:
        """End what is still being written, and keep it."""
        running = [*self._conversations.running.values(), *self._loose]
        for generation in running:
            if generation._task is not None:
                generation._task.cancel()
        await asyncio.gather(*(generation.over() for generation in running))

    def done(self, generation: Generation) -> None:
        self._loose.discard(generation)
        if generation.number is not None and self._conversations.running.get(generation.number) is generation:
            del self._conversations.running[generation.number]

    def findings(self, group: Group) -> tuple[dict[str, Any], ...]:
        """What the engine's own state says of why it does not answer."""
        state = current_state(group.backends[0].settings.state_file)
        return () if state is None else tuple(msgspec.to_builtins(one) for one in state.findings)

    # ------------------------------------------------------------------------------------------ asking

    async def ask(self, request: web.Request) -> web.StreamResponse:
        visitor = self.desk.visitor(request)
        asked = await self.desk.read(request, _Ask)
        check_text(asked.text)
        number = request.match_info["id"]
        if number in self._conversations.running:
            raise ApiError(409, "answer_running", "an answer is being written in this conversation, stop it first")
        shelf = self.desk.shelf
        conversation = await shelf.ask(ConversationStore.get, visitor.owner, number)
        if conversation is None:
            raise not_found()
        question, begun = await self._turn(visitor, conversation, asked)
        prepared = await self._prepare(visitor, [*question], asked, begun)
        user = question[-1] if asked.regenerate is None and asked.continue_ is None else None
        title = title_of(asked.text) if not conversation.title and user is not None else None
        try:
            if number in self._conversations.running:
                raise ApiError(409, "answer_running", "an answer is being written in this conversation, stop it first")
            generation = Generation(self, visitor, number, self._growing(begun, prepared))
            self._conversations.running[number] = generation
            try:
                if asked.continue_ is not None:
                    await shelf.ask(ConversationStore.edit, visitor.owner, number, begun, truncate=True, at=time.time())
                else:
                    added = [begun] if user is None else [user, begun]
                    after = question[-1].id if user is None else None
                    await shelf.ask(
                        ConversationStore.add, visitor.owner, number, added, after=after, title=title, at=time.time()
                    )
                settings = msgspec.to_builtins(asked.parameters) | {"model": prepared.group.model}
                await shelf.ask(ConversationStore.change, visitor.owner, number, settings=settings)
            except BaseException:
                self.done(generation)
                raise
        except BaseException:
            prepared.held.__exit__(None, None, None)
            raise
        generation.start(prepared)
        head = {
            "user": user,
            "assistant": begun,
            "title": title if title is not None else conversation.title,
            "forgotten": prepared.forgotten,
        }
        return await self._stream(request, generation, head, units(begun.text), units(begun.thinking or ""))

    async def _turn(self, visitor: Visitor, conversation: Conversation, asked: _Ask) -> tuple[list[Message], Message]:
        """The messages that lead to the answer, and the answer as it begins."""
        now, messages = time.time(), list(conversation.messages)
        model = self.desk.gateway.backends.group(asked.model).model
        blank = Message(id=new_id(), role="assistant", state="streaming", created=now, model=model)
        again = asked.regenerate if asked.regenerate is not None else asked.continue_
        if asked.regenerate is not None and asked.continue_ is not None:
            raise invalid("body_invalid", "either regenerate or continue, not both")
        if again is not None and (asked.text or asked.pictures):
            raise invalid("body_invalid", "an answer that is written again or continued takes no new text")
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
        return before, blank

    async def ask_once(self, request: web.Request) -> web.StreamResponse:
        """A conversation that the browser keeps: the same stream, ended when the browser leaves."""
        visitor = self.desk.visitor(request)
        asked = await self.desk.read(request, _AskOnce, self.desk.gateway.limits.max_body_bytes)
        if not 0 < len(asked.messages) <= MOST_MESSAGES:
            raise invalid("messages_invalid", f"messages has to hold 1 to {MOST_MESSAGES:,}", "messages")
        messages = []
        for said in asked.messages:
            check_text(said.text)
            pictures = await picture_refs(self.desk.shelf, visitor.owner, said.pictures)
            messages.append(Message(id=new_id(), role=said.role, text=said.text, pictures=pictures))
        begun = Message(id=new_id(), role="assistant", state="streaming", created=time.time())
        once = _Ask(model=asked.model, parameters=asked.parameters)
        if messages[-1].role == "assistant":
            once.continue_ = messages[-1].id
        prepared = await self._prepare(visitor, messages, once, begun)
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

    # ------------------------------------------------------------------------------------------ to the engine

    async def _prepare(self, visitor: Visitor, messages: list[Message], asked: _Ask, begun: Message) -> Question:
        """The request for the engine, judged as every other. Raises :class:`ApiError` before anything is kept."""
        gateway, parameters = self.desk.gateway, asked.parameters
        if gateway.stopping:
            raise stopping()
        group = gateway.backends.group(asked.model)
        group.check_up()
        try:
            group.admission.check_room()
        except FullError as error:
            raise full(error) from None
        stored = await self.desk.shelf.pictures(
            visitor.owner, {picture.sha256 for message in messages for picture in message.pictures}
        )
        kept = self._kept_pictures(messages)
        start, image_tokens = self._fit(group, messages, stored, kept, parameters)
        held = Body(gateway.budget)
        try:
            sent: list[dict[str, Any]] = []
            if parameters.system:
                if len(parameters.system) > _MOST_SYSTEM:
                    raise invalid("text_too_long", f"the system prompt may have {_MOST_SYSTEM:,} letters", "system")
                sent.append({"role": "system", "content": parameters.system})
            total = 0
            for place, message in enumerate(messages[start:], start=start):
                if message.role == "assistant" and not message.text and message.id != asked.continue_:
                    continue  # an answer that failed before its first word
                content: list[dict[str, Any]] = []
                for index, picture in enumerate(message.pictures):
                    url = _LEFT_OUT_PICTURE
                    if (place, index) in kept:
                        url = await self._data_url(visitor, picture, stored)
                    total += len(url)
                    held.count(total)
                    content.append({"type": "image_url", "image_url": {"url": url}})
                if total > gateway.limits.max_body_bytes:
                    raise ApiError(413, "body_too_large", "the pictures of this conversation are too large together")
                if message.text:
                    content.append({"type": "text", "text": message.text})
                plain = not message.pictures
                sent.append({"role": message.role, "content": message.text if plain else content})
            body = _body(group, sent, parameters, continued=asked.continue_ is not None)
            return Question(
                body=body,
                asked=judge(CHAT_ROUTE, body),
                group=group,
                held=held,
                image_tokens=image_tokens,
                forgotten=start,
            )
        except BaseException:
            held.__exit__(None, None, None)
            raise

    def _kept_pictures(self, messages: Sequence[Message]) -> set[tuple[int, int]]:
        """Which pictures the rules will let through: the newest. (place of the message, place in it)."""
        every = [(place, index) for place, message in enumerate(messages) for index in range(len(message.pictures))]
        most = self.desk.settings.max_images
        return set(every if most is None else every[-most:] if most else [])

    def _fit(
        self,
        group: Group,
        messages: Sequence[Message],
        stored: dict[str, Picture],
        kept: set[tuple[int, int]],
        parameters: Parameters,
    ) -> tuple[int, int | None]:
        """The first message that is sent, and the tokens of all pictures that are."""
        plan = self.desk.settings.plan
        each: list[int] = []
        unknown = False
        for place, message in enumerate(messages):
            tokens = 0
            for index, picture in enumerate(message.pictures):
                found = stored.get(picture.sha256)
                if (place, index) in kept and found is not None:
                    counted = tokens_of_picture(plan, found.sent_width, found.sent_height)
                    unknown |= counted is None
                    tokens += counted or 0
            each.append(tokens)
        guesses = corrected(messages, [guessed_tokens(one, tokens) for one, tokens in zip(messages, each)])
        context = context_tokens(group.backends[0].card, plan)
        start = first_kept(messages, guesses, context, parameters.max_tokens)
        return start, None if unknown else sum(each[start:])

    async def _data_url(self, visitor: Visitor, picture: PictureRef, stored: dict[str, Picture]) -> str:
        found = stored.get(picture.sha256)
        content = await self.desk.shelf.picture_bytes(visitor.owner, picture.sha256) if found is not None else None
        if found is None or content is None:
            raise ApiError(409, "picture_missing", f"send these pictures first: {picture.sha256}", param="pictures")
        kind = found.media_type if found.media_type.startswith("image/") else "image/unknown"
        return f"data:{kind};base64,{base64.b64encode(content).decode()}"

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
            reader = _Reader(generation.growing, begin, thought)
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
            await response.write(_last(generation))
            await response.write_eof()
        except TimeoutError:
            raise ConnectionResetError("the browser did not read its answer") from None
        finally:
            generation.followers -= 1
        return response


class _Reader:
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


def _last(generation: Generation) -> bytes:
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


def _body(group: Group, messages: list[dict[str, Any]], parameters: Parameters, *, continued: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": group.model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for name in ("temperature", "top_p", "max_tokens", "seed"):
        value = getattr(parameters, name)
        if value is not None:
            body[name] = value
    if parameters.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": parameters.thinking}
    if continued and not group.backends[0].settings.llamacpp:  # llama.cpp continues a last answer by itself
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    return body
