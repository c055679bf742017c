"""A question of the page as a request for the engine: judged as every other, its pictures taken from the shelf."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from loadmaster.core.contextuse import corrected, first_kept, guessed_tokens
from loadmaster.core.conversation import Conversation, Message, PictureRef
from loadmaster.edge.conversations import Picture
from loadmaster.service.admission import FullError
from loadmaster.service.backends import Group
from loadmaster.service.errors import ApiError, invalid
from loadmaster.service.gatewaysettings import CHAT_ROUTE
from loadmaster.service.modelfacts import context_tokens, tokens_of_picture
from loadmaster.service.pagerequest import Desk
from loadmaster.service.pagesessions import Visitor
from loadmaster.service.passage import full, stopping
from loadmaster.service.requestbody import Body
from loadmaster.service.requestrules import Asked, judge

_MOST_SYSTEM = 65_536  # letters
_LEFT_OUT_PICTURE = "data:,"  # the picture rules put a word in its place without looking at it


class Parameters(Struct, frozen=True, forbid_unknown_fields=True):
    """What a question is asked with; None: as the model has it."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    system: str | None = None
    thinking: bool | None = None


class Question(Struct, kw_only=True):
    """What goes to the engine. ``held``: the key's request and the bytes of the pictures, given back at the end."""

    body: dict[str, Any]
    asked: Asked
    group: Group
    held: contextlib.ExitStack
    image_tokens: int | None
    forgotten: int


class Questions:
    """Makes them. ``desk``: whose shelf, rules and limits hold."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def prepare(
        self,
        visitor: Visitor,
        messages: Sequence[Message],
        model: str | None,
        parameters: Parameters,
        continued: bool,
    ) -> Question:
        """The request for the engine, judged as every other. Raises :class:`ApiError` before anything is kept."""
        gateway = self._desk.gateway
        if gateway.stopping:
            raise stopping()
        group = gateway.backends.group(model)
        group.check_up()
        try:
            group.admission.check_room()
        except FullError as error:
            raise full(error) from None
        stored = await self._desk.shelf.pictures(
            visitor.owner, {picture.sha256 for message in messages for picture in message.pictures}
        )
        kept = self._kept_pictures(messages)
        start, image_tokens = self._fit(group, messages, stored, kept, parameters)
        held = contextlib.ExitStack()
        try:
            held.enter_context(gateway.use_of(visitor.key))
            pictures = held.enter_context(Body(gateway.budget))
            sent: list[dict[str, Any]] = []
            if parameters.system:
                if len(parameters.system) > _MOST_SYSTEM:
                    raise invalid("text_too_long", f"the system prompt may have {_MOST_SYSTEM:,} letters", "system")
                sent.append({"role": "system", "content": parameters.system})
            total = 0
            for place, message in enumerate(messages[start:], start=start):
                if message.role == "assistant" and not message.text and not (continued and message is messages[-1]):
                    continue  # an answer that failed before its first word
                content: list[dict[str, Any]] = []
                for index, picture in enumerate(message.pictures):
                    url = _LEFT_OUT_PICTURE
                    if (place, index) in kept:
                        url = await self._data_url(visitor, picture, stored)
                    total += len(url)
                    pictures.count(total)
                    content.append({"type": "image_url", "image_url": {"url": url}})
                if total > gateway.limits.max_body_bytes:
                    raise ApiError(413, "body_too_large", "the pictures of this conversation are too large together")
                if message.text:
                    content.append({"type": "text", "text": message.text})
                plain = not message.pictures
                sent.append({"role": message.role, "content": message.text if plain else content})
            body = _body(group, sent, parameters, continued=continued)
            return Question(
                body=body,
                asked=judge(CHAT_ROUTE, body),
                group=group,
                held=held,
                image_tokens=image_tokens,
                forgotten=start,
            )
        except BaseException:
            held.close()
            raise

    async def use(self, visitor: Visitor, conversation: Conversation) -> dict[str, Any]:
        """How much of the context the conversation takes, and what its next question would leave out."""
        groups = self._desk.gateway.backends.groups
        group = groups.get(str(conversation.settings.get("model"))) or next(iter(groups.values()))
        messages = conversation.messages
        shown = [picture.sha256 for message in messages for picture in message.pictures]
        stored = await self._desk.shelf.pictures(visitor.owner, shown)
        tokens, _ = self._tokens(messages, stored, self._kept_pictures(messages))
        context = context_tokens(group.backends[0].card, self._desk.settings.plan)
        asked = conversation.settings.get("max_tokens")
        start = first_kept(messages, tokens, context, asked if isinstance(asked, int) else None)
        most = self._desk.settings.max_images
        return {
            "tokens": sum(tokens[start:]),
            "limit_tokens": context,
            "basis": "measured" if any(one.numbers and one.numbers.prompt_tokens for one in messages) else "assumed",
            "forgotten": start,
            "pictures": len(shown),
            "max_pictures": most,
            "pictures_left_out": 0 if most is None else max(0, len(shown) - most),
        }

    def _kept_pictures(self, messages: Sequence[Message]) -> set[tuple[int, int]]:
        """Which pictures the rules will let through: the newest. (place of the message, place in it)."""
        every = [(place, index) for place, message in enumerate(messages) for index in range(len(message.pictures))]
        most = self._desk.settings.max_images
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
        tokens, pictures = self._tokens(messages, stored, kept)
        context = context_tokens(group.backends[0].card, self._desk.settings.plan)
        start = first_kept(messages, tokens, context, parameters.max_tokens)
        sent = pictures[start:]
        return start, None if None in sent else sum(one or 0 for one in sent)

    def _tokens(
        self, messages: Sequence[Message], stored: dict[str, Picture], kept: set[tuple[int, int]]
    ) -> tuple[list[int], list[int | None]]:
        """Tokens of each message, and of its pictures alone; the latter None when the plan does not say."""
        pictures: list[int | None] = []
        for place, message in enumerate(messages):
            tokens: int | None = 0
            for index, picture in enumerate(message.pictures):
                found = stored.get(picture.sha256)
                if (place, index) not in kept or found is None:
                    continue
                counted = tokens_of_picture(self._desk.settings.plan, found.sent_width, found.sent_height)
                tokens = None if tokens is None or counted is None else tokens + counted
            pictures.append(tokens)
        guesses = [guessed_tokens(message, tokens or 0) for message, tokens in zip(messages, pictures, strict=True)]
        return corrected(messages, guesses), pictures

    async def _data_url(self, visitor: Visitor, picture: PictureRef, stored: dict[str, Picture]) -> str:
        found = stored.get(picture.sha256)
        content = await self._desk.shelf.picture_bytes(visitor.owner, picture.sha256) if found is not None else None
        if found is None or content is None:
            raise ApiError(409, "picture_missing", f"send these pictures first: {picture.sha256}", param="pictures")
        kind = found.media_type if found.media_type.startswith("image/") else "image/unknown"
        return f"data:{kind};base64,{base64.b64encode(content).decode()}"


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
