"""The page's conversations and pictures over HTTP; each visitor sees their own."""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from loadmaster.core.conversation import MOST_TEXT, MOST_TITLE, Conversation, Message
from loadmaster.edge.conversations import ConversationStore, Picture
from loadmaster.service.conversationfiles import FileError, as_json, as_markdown, read_file
from loadmaster.service.errors import ApiError, ImageError, invalid
from loadmaster.service.modelfacts import tokens_of_picture
from loadmaster.service.pagequestion import Questions
from loadmaster.service.pagerequest import Desk, reply, whole_number
from loadmaster.service.pictureshown import Given, is_hash, picture_refs
from loadmaster.service.requestbody import Body
from loadmaster.service.shelf import not_found

MOST_PICTURE_BYTES = 24 << 20
MOST_IMPORT_BYTES = 64 << 20
_FILES_AT_ONCE = 2
_SLICE = 256 << 10
_SHOWABLE = ("image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp", "image/avif")

_HEADS = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n", "image/png"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


class _New(Struct, forbid_unknown_fields=True):
    title: str = ""


class _Change(Struct, forbid_unknown_fields=True):
    title: str | None = None
    settings: dict[str, Any] | None = None


class _Edit(Struct, forbid_unknown_fields=True):
    text: str
    pictures: list[Given] | None = None
    truncate: bool = False


class PageConversations:
    """The handlers. ``running``: whether an answer is being written in a conversation."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.running: dict[str, Any] = {}
        self._files = asyncio.Semaphore(_FILES_AT_ONCE)

    def attach(self, app: web.Application) -> None:
        router = app.router
        router.add_get("/api/conversations", self.list)
        router.add_post("/api/conversations", self.create)
        router.add_post("/api/conversations/import", self.take_in)
        router.add_get("/api/conversations/{id}", self.get)
        router.add_patch("/api/conversations/{id}", self.change)
        router.add_delete("/api/conversations/{id}", self.delete)
        router.add_get("/api/conversations/{id}/export", self.export, allow_head=False)
        router.add_put("/api/conversations/{id}/messages/{message}", self.edit)
        router.add_put("/api/pictures/{sha256}", self.put_picture)
        router.add_get("/api/pictures/{sha256}", self.picture)

    async def list(self, request: web.Request) -> web.StreamResponse:
        visitor = self._desk.visitor(request)
        before = request.query.get("before", "")
        try:
            newest = float(before) if before else None
        except ValueError:
            newest = math.nan
        if newest is not None and not math.isfinite(newest):
            raise invalid("query_invalid", "before has to be a time in seconds", "before")
        search = request.query.get("search", "").strip()[:200]
        if "\0" in search:  # SQLite would search for what stands before it
            raise invalid("query_invalid", "search cannot have the letter U+0000", "search")
        found = await self._desk.shelf.ask(
            ConversationStore.summaries,
            visitor.owner,
            search,
            whole_number(request, "limit", 50, 1, 200),
            newest,
        )
        return reply({"schema": 1, "conversations": found})

    async def create(self, request: web.Request) -> web.StreamResponse:
        visitor = self._desk.visitor(request)
        asked = await self._desk.read(request, _New)
        conversation = _new(asked.title)
        await self._desk.shelf.ask(ConversationStore.create, visitor.owner, conversation)
        return reply(conversation, 201)

    async def get(self, request: web.Request) -> web.StreamResponse:
        visitor = self._desk.visitor(request)
        found = await self._found(request)
        return reply(msgspec.structs.asdict(found) | {"context": await Questions(self._desk).use(visitor, found)})

    async def change(self, request: web.Request) -> web.StreamResponse:
        visitor = self._desk.visitor(request)
        asked = await self._desk.read(request, _Change)
        if asked.settings is not None and len(msgspec.json.encode(asked.settings)) > MOST_TEXT:
            raise invalid("body_invalid", "the settings are too long", "settings")
        title = None if asked.title is None else " ".join(asked.title.split())
        if title is not None and len(title) > MOST_TITLE:
            raise invalid("text_too_long", f"a title may have {MOST_TITLE} letters at most", "title")
        there = await self._desk.shelf.ask(
            ConversationStore.change, visitor.owner, request.match_info["id"], title=title, settings=asked.settings
        )
        if not there:
            raise not_found()
        return reply({"id": request.match_info["id"], "title": title})

    async def delete(self, request: web.Request) -> web.StreamResponse:
        visitor = self._desk.visitor(request)
        number = request.match_info["id"]
        there = await self._desk.shelf.ask(ConversationStore.delete, visitor.owner, number)
        if not there:
            raise not_found()
        generation = self.running.get(number)
        if generation is not None:
            generation.stop()
        return web.Response(status=204)

    async def edit(self, request: web.Request) -> web.StreamResponse:
        visitor = self._desk.visitor(request)
        asked = await self._desk.read(request, _Edit)
        check_text(asked.text)
        conversation = await self._found(request)
        if conversation.id in self.running:
            raise ApiError(409, "answer_running", "an answer is being written, stop it first")
        name = request.match_info["message"]
        message = next((one for one in conversation.messages if one.id == name), None)
        if message is None:
            raise not_found()
        pictures = message.pictures
        if asked.pictures is not None:
            pictures = await picture_refs(self._desk.shelf, visitor.owner, asked.pictures, pictures)
        changed = msgspec.structs.replace(message, text=asked.text, pictures=pictures)
        await self._desk.shelf.ask(
            ConversationStore.edit,
            visitor.owner,
            conversation.id,
            changed,
            truncate=asked.truncate,
            at=time.time(),
        )
        return reply(await self._found(request))

    async def _found(self, request: web.Request) -> Conversation:
        visitor = self._desk.visitor(request)
        found = await self._desk.shelf.ask(ConversationStore.get, visitor.owner, request.match_info["id"])
        if found is None:
            raise not_found()
        return found

    # ------------------------------------------------------------------------------------------ files

    async def export(self, request: web.Request) -> web.StreamResponse:
        async with self._files:  # each holds its pictures several times over
            return await self._export(request)

    async def _export(self, request: web.Request) -> web.StreamResponse:
        visitor = self._desk.visitor(request)
        conversation = await self._found(request)
        form = request.query.get("format", "json")
        if form not in ("json", "markdown"):
            raise invalid("query_invalid", "format has to be json or markdown", "format")
        pictures: dict[str, tuple[str, bytes]] = {}
        held = 0
        hashes = {picture.sha256 for message in conversation.messages for picture in message.pictures}
        for sha256, picture in (await self._desk.shelf.pictures(visitor.owner, hashes)).items():
            content = await self._desk.shelf.picture_bytes(visitor.owner, sha256)
            held += len(content or b"")
            if held > MOST_IMPORT_BYTES:
                raise ApiError(413, "export_too_large", f"its pictures have more than {MOST_IMPORT_BYTES:,} bytes")
            if content is not None:
                pictures[sha256] = (picture.media_type, content)
        if form == "json":
            body, kind, ending = await asyncio.to_thread(as_json, conversation, pictures), "application/json", "json"
        else:
            body, kind, ending = await asyncio.to_thread(as_markdown, conversation, pictures), "application/zip", "zip"
        return web.Response(
            body=body,
            content_type=kind,
            headers={
                "Cache-Control": "no-store",
                "Content-Disposition": f'attachment; filename="conversation-{conversation.id}.{ending}"',
            },
        )

    async def take_in(self, request: web.Request) -> web.StreamResponse:
        """A file that was exported, JSON or Markdown in a zip, becomes a new conversation."""
        async with self._files:
            return await self._take_in(request)

    async def _take_in(self, request: web.Request) -> web.StreamResponse:
        visitor = self._desk.visitor(request)
        limits = msgspec.structs.replace(self._desk.gateway.limits, max_body_bytes=MOST_IMPORT_BYTES)
        async with self._desk.content(request, limits) as content:
            try:
                source, files = await asyncio.to_thread(read_file, content)
            except FileError as error:
                raise invalid("import_invalid", str(error)) from None
        pictures = [(await self._look_at(sha256, data), data) for sha256, data in files.items()]
        known = await self._desk.shelf.pictures(
            visitor.owner, {one.sha256 for message in source.messages for one in message.pictures}
        )
        there = known.keys() | files.keys()
        now = time.time()
        messages = tuple(
            Message(
                id=new_id(),
                role=message.role,
                text=message.text,
                thinking=message.thinking,
                pictures=tuple(picture for picture in message.pictures if picture.sha256 in there),
                state="stopped" if message.state == "streaming" else message.state,
                numbers=message.numbers,
                created=message.created or now,
                model=message.model,
            )
            for message in source.messages
        )
        conversation = msgspec.structs.replace(_new(source.title), messages=messages)
        await self._desk.shelf.ask(ConversationStore.create, visitor.owner, conversation, pictures)
        return reply(conversation, 201)

    # ------------------------------------------------------------------------------------------ pictures

    async def put_picture(self, request: web.Request) -> web.StreamResponse:
        visitor = self._desk.visitor(request)
        sha256 = _hash(request)
        most = min(MOST_PICTURE_BYTES, self._desk.gateway.limits.max_body_bytes)
        if request.content_type not in ("application/octet-stream", "image/jpg", *_SHOWABLE, "image/tiff"):
            raise ApiError(415, "content_type", "the body has to be a picture, with its Content-Type")
        length = request.content_length
        if length is not None and length > most:
            raise _too_many_bytes(most)
        limits = msgspec.structs.replace(self._desk.gateway.limits, max_body_bytes=most)
        try:
            async with self._desk.content(request, limits) as content:
                picture = await self._look_at(sha256, content)
                await self._desk.shelf.put_picture(visitor.owner, picture, content)
        except ApiError as error:
            raise (_too_many_bytes(most) if error.code == "body_too_large" else error) from None
        return reply(self._told(picture), 201)

    async def _look_at(self, sha256: str, content: bytes) -> Picture:
        """What a picture is, once its hash is right and a worker has decoded it. Raises :class:`ApiError`."""
        if await asyncio.to_thread(_digest, content) != sha256:
            raise invalid("picture_hash_wrong", "the picture is not the one that its SHA-256 names")
        look_at = self._desk.settings.look_at
        if look_at is None:
            raise ApiError(503, "images_unavailable", "this gateway takes no pictures")
        try:
            outcome = await look_at(content)
        except ImageError as error:
            wait = 2 if getattr(error, "status", 400) == 429 else None
            raise ApiError(getattr(error, "status", 400), error.code, error.message, retry_after=wait) from None
        width, height = outcome.source_size or (0, 0)
        sent_width, sent_height = outcome.size or (width, height)
        return Picture(
            sha256=sha256,
            media_type=media_type(content),
            size=len(content),
            width=width,
            height=height,
            sent_width=sent_width,
            sent_height=sent_height,
        )

    def _told(self, picture: Picture) -> dict[str, Any]:
        return {
            "sha256": picture.sha256,
            "width": picture.width,
            "height": picture.height,
            "sent_width": picture.sent_width,
            "sent_height": picture.sent_height,
            "bytes": picture.size,
            "tokens": tokens_of_picture(self._desk.settings.plan, picture.sent_width, picture.sent_height),
        }

    async def picture(self, request: web.Request) -> web.StreamResponse:
        """A picture to look at: as it was sent, under headers that let nothing in it run."""
        visitor = self._desk.visitor(request)
        sha256 = _hash(request)
        found = (await self._desk.shelf.pictures(visitor.owner, [sha256])).get(sha256)
        if found is None:
            raise ApiError(404, "picture_not_found", "there is no such picture, send it again")
        headers = {
            "Cache-Control": "private, max-age=31536000, immutable",
            "ETag": f'"{sha256}"',
            "Content-Security-Policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Content-Type": found.media_type,
        }
        if f'"{sha256}"' in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        if request.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(found.size)})
        with Body(self._desk.gateway.budget) as body:  # a reader that stands still holds the picture
            body.count(found.size)
            content = await self._desk.shelf.picture_bytes(visitor.owner, sha256)
            if content is None:
                raise ApiError(404, "picture_not_found", "there is no such picture, send it again")
            response = web.StreamResponse(headers=headers | {"Content-Length": str(len(content))})
            await response.prepare(request)
            try:
                async with asyncio.timeout(self._desk.gateway.limits.client_timeout_s):
                    for place in range(0, len(content), _SLICE):
                        await response.write(content[place : place + _SLICE])
                    await response.write_eof()
            except TimeoutError:
                raise ConnectionResetError("the browser did not read its picture") from None
        return response


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _new(title: str) -> Conversation:
    now = time.time()
    return Conversation(id=new_id(), title=_title(title), created=now, changed=now)


def new_id() -> str:
    return secrets.token_hex(12)


def _title(text: str) -> str:
    return " ".join(text.split())[:MOST_TITLE]


def check_text(text: str) -> None:
    if len(text) > MOST_TEXT:
        raise invalid("text_too_long", f"a message may have {MOST_TEXT:,} letters at most", "text")


def _hash(request: web.Request) -> str:
    sha256 = request.match_info["sha256"]
    if not is_hash(sha256):
        raise invalid("picture_invalid", "a picture is named by its SHA-256, 64 small hexadecimal digits")
    return sha256


def _too_many_bytes(most: int) -> ApiError:
    return ApiError(413, "image_file_too_large", f"the picture has more than {most:,} bytes, which is the most taken")


def media_type(content: bytes) -> str:
    """By the first bytes, of the kinds that a browser shows; others are downloaded."""
    for head, kind in _HEADS:
        if content.startswith(head):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    if content[4:12] in (b"ftypavif", b"ftypavis"):
        return "image/avif"
    return "application/octet-stream"
