"""A question of the page as a request for the engine: judged as every other, its pictures taken from the shelf."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from loadmaster.core.contextuse import corrected, first_kept, guessed_tokens
from loadmaster.core.conversation import Message, PictureRef
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
        plan = self._desk.settings.plan
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
