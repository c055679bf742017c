"""A service on loopback that speaks the OpenAI API and really looks at pictures; its faults are chosen by name."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import queue
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any

from aiohttp import web
from PIL import Image, ImageDraw, ImageFont, ImageOps

from loadmaster.service.verifypictures import COLOURS

CONTEXT = 2048
PLACES = 4
PICTURE_TOKENS = 100
MODEL = "seeing"


class SeeingService:
    """``faults``: what it does wrongly or says differently; see where each is used."""

    def __init__(self, *faults: str) -> None:
        self.faults = frozenset(faults)
        self.running = 0
        self.most_running = 0
        self.places = asyncio.Semaphore(PLACES)
        self.bodies: list[dict[str, Any]] = []
        self.last_picture: Image.Image | None = None
        self.count: Callable[[], int] = lambda: self.running

    # ------------------------------------------------------------------------------------------ routes

    async def models(self, request: web.Request) -> web.Response:
        self._authorise(request)
        if "no-models" in self.faults:
            return web.json_response({"object": "list", "data": []})
        entry: dict[str, Any] = {"id": MODEL, "object": "model"}
        if "no-context" not in self.faults:
            entry["max_model_len"] = CONTEXT
        return web.json_response({"object": "list", "data": [entry]})

    async def metrics(self, request: web.Request) -> web.Response:
        if "no-metrics" in self.faults:
            raise web.HTTPNotFound
        return web.Response(text=f'vllm:num_requests_running{{engine="0"}} {self.count()}.0\n')

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self._authorise(request)
        body = await request.json()
        self.bodies.append(body)
        refusal = self._refusal(body)
        if refusal is not None:
            return web.json_response({"error": {"message": refusal, "type": "invalid_request_error"}}, status=400)
        if "full" in self.faults and self.running >= 2:
            return web.json_response({"error": {"message": "too many requests"}}, status=429)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await self.places.acquire()
        free = True
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            free = "goes-on" not in self.faults  # whoever goes on for a client that has left keeps its place
            raise
        finally:
            if free:
                self.places.release()
                self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        messages, most = body["messages"], int(body.get("max_tokens") or body["max_completion_tokens"])
        if "small-pictures" in self.faults and any(size > 1_000_000 for size in _sizes(messages)):
            return web.json_response({"error": {"message": "the picture is too large"}}, status=413)
        pictures = [] if "blind" in self.faults else await asyncio.to_thread(self._pictures, messages)
        if "mixes" in self.faults and pictures:
            mine, pictures = pictures, [self.last_picture or pictures[0]] if self.running > 1 else pictures
            self.last_picture = mine[0]
        text, reasoning = self._reply(body, pictures), ""
        if "thinks" in self.faults:
            reasoning = "hmm " * min(most, 200)
            text = text if most > 200 else ""
        shown = sum(part.get("type") == "image_url" for part in _parts(messages))
        counted = 0 if "drops" in self.faults else PICTURE_TOKENS * shown
        prompt_tokens = sum(len(part.split()) for part in _texts(messages)) + counted
        words = re.findall(r"\S+\s*", text)[:most]
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(words) or most}
        finish = "length" if not text or len(words) == most else "stop"
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(words) or None, "reasoning_content": reasoning or None}
            choice = {"index": 0, "message": message, "finish_reason": finish}
            answer: dict[str, Any] = {"object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response({"garbage": True} if "garbage" in self.faults else answer)
        return await self._stream(request, body, words, reasoning, finish, usage)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], words: list[str], reasoning: str, finish: str, usage: Any
    ) -> web.StreamResponse:
        kind = "application/json" if "stream-type" in self.faults else "text/event-stream; charset=utf-8"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)

        async def send(raw: str) -> None:
            await response.write(raw.encode())

        async def event(delta: dict[str, Any] | None, finish_reason: str | None = None, **more: Any) -> None:
            choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
            chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices, **more}
            await send(f"data: {json.dumps(chunk)}\n\n")

        await event({"role": "assistant", "content": ""})
        if reasoning:
            await event({"reasoning_content": reasoning})
        for place, word in enumerate(words):
            await event({"content": word})
            await asyncio.sleep(0.002)
            if place == 2:
                await self._spoil(request, response, send)
        if "stream-no-finish" not in self.faults:
            await event({}, finish)
        if "stream-late-text" in self.faults:
            await event({"content": "late"})
        if body.get("stream_options", {}).get("include_usage") and "stream-no-usage" not in self.faults:
            await event(None, usage=usage)
        if "stream-no-done" not in self.faults:
            await send("data: [DONE]\n\n")
        if "stream-after-done" in self.faults:
            await event({"content": "more"})
        await response.write_eof()
        return response

    async def _spoil(self, request: web.Request, response: web.StreamResponse, send: Any) -> None:
        """Something wrong in the middle of a stream."""
        if "stream-not-json" in self.faults:
            await send("data: {'content': nonsense}\n\n")
        if "stream-no-field" in self.faults:
            await send("Traceback (most recent call last):\n\n")
        if "stream-error" in self.faults:
            await send('data: {"error": {"message": "the engine died"}}\n\n')
        if "stream-cut" in self.faults:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError

    # ------------------------------------------------------------------------------------------ refusals

    def _authorise(self, request: web.Request) -> None:
        if "key" in self.faults and request.headers.get("Authorization") != "Bearer secret":
            raise web.HTTPUnauthorized(text='{"error": {"message": "no"}}', content_type="application/json")

    def _refusal(self, body: dict[str, Any]) -> str | None:
        pictures = sum(part.get("type") == "image_url" for part in _parts(body["messages"]))
        if "strict" in self.faults:
            for name in ("chat_template_kwargs", "temperature", "stream_options"):
                if name in body:
                    return f"Unknown parameter: '{name}'"
            if "max_tokens" in body:
                return "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        if "text-only" in self.faults and pictures:
            return f"{MODEL} is not a multimodal model"
        if "one-picture" in self.faults and pictures > 1:
            return "At most 1 image(s) may be provided in one prompt."
        if "no-schema" in self.faults and "response_format" in body:
            return "response_format is not supported"
        words = sum(len(text.split()) for text in _texts(body["messages"]))
        if words > (CONTEXT // 2 if "short-context" in self.faults else CONTEXT):
            return "This model's maximum context length is less than that"
        return None

    # ------------------------------------------------------------------------------------------ answers

    def _reply(self, body: dict[str, Any], pictures: list[Image.Image]) -> str:
        texts = list(_texts(body["messages"]))
        question = texts[-1]
        if "count" in question.lower():
            return " ".join(str(number) for number in range(1, 2001))
        if "response_format" in body:
            return "red, surely" if "schema-ignored" in self.faults else '{"colour": "red", "bright": true}'
        if "weak" in self.faults:
            return "The the of and cheese."
        if any(part.get("type") == "image_url" for part in _parts(body["messages"])):
            return self._seen(question, pictures)
        return self._in_words(texts)

    def _in_words(self, texts: list[str]) -> str:
        question = texts[-1]
        if found := re.search(r"shows a (\w+) (\w+) on the left and a (\w+) (\w+) on the right", question):
            return found.group(1).capitalize() + "."
        earlier = " ".join(texts[:-1]) if "forgets" not in self.faults else ""
        found = re.search(r"\d{4}", question + " " + earlier)
        return found.group() if found else "OK, hello."

    def _seen(self, question: str, pictures: list[Image.Image]) -> str:
        if not pictures:
            return "I see a white cat on a table."
        if "swaps" in self.faults:
            pictures.reverse()
        picture = pictures[-1]
        if "number" in question:
            return read_number(picture)
        if "corner" in question:
            return colour_at(picture, 0.95, 0.05)
        if "disc" in question:
            return ", ".join(self._word(colour_at(one, 0.5, 0.5)) for one in pictures)
        left, right = shape_in(picture, 0, 0.5), shape_in(picture, 0.5, 1)
        colours = {left: colour_at(picture, 0.275, 0.5), right: colour_at(picture, 0.725, 0.5)}
        if found := re.search(r"What colour is the (\w+) in this picture", question):
            return self._word(colours.get(found.group(1), "white"))
        found = re.search(r"the (\w+) thing", question)
        return next((shape for shape, colour in colours.items() if found and colour == found.group(1)), "star")

    def _word(self, colour: str) -> str:
        chinese = {"red": "红色", "green": "绿色", "blue": "蓝色", "yellow": "黄色", "black": "黑色"}
        return chinese[colour] if "chinese" in self.faults else f"It is {colour}."

    def _pictures(self, messages: list[dict[str, Any]]) -> list[Image.Image]:
        found = []
        for part in _parts(messages):
            if part.get("type") == "image_url":
                data = base64.b64decode(part["image_url"]["url"].partition("base64,")[2])
                image: Image.Image = Image.open(io.BytesIO(data))
                if "ignores-exif" not in self.faults:
                    image = ImageOps.exif_transpose(image)
                image = image.convert("RGB")
                image.thumbnail((640, 640))
                found.append(image)
        return found


@asynccontextmanager
async def serving(*faults: str) -> AsyncIterator[tuple[str, SeeingService]]:
    """The address of such a service and the service itself."""
    service = SeeingService(*faults)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/v1/models", service.models)
    app.router.add_get("/metrics", service.metrics)
    app.router.add_post("/v1/chat/completions", service.chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", service
    finally:
        await runner.cleanup()


@contextmanager
def serving_in_thread(*faults: str) -> Iterator[str]:
    """The address of such a service, for callers that have an event loop of their own."""
    opened: queue.Queue[str] = queue.Queue()
    ending = threading.Event()

    async def run() -> None:
        async with serving(*faults) as (url, _):
            opened.put(url)
            while not ending.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield opened.get(timeout=10)
    finally:
        ending.set()
        thread.join(10)


def _parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for one in messages if isinstance(one["content"], list) for part in one["content"]]


def _sizes(messages: list[dict[str, Any]]) -> Iterator[int]:
    """Pixels of every picture."""
    for part in _parts(messages):
        if part.get("type") == "image_url":
            with Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition("base64,")[2]))) as image:
                yield image.width * image.height


def _texts(messages: list[dict[str, Any]]) -> list[str]:
    """The text of every message, in order."""
    return [
        one["content"]
        if isinstance(one["content"], str)
        else " ".join(part["text"] for part in one["content"] if part.get("type") == "text")
        for one in messages
    ]


# ------------------------------------------------------------------------------------------------ eyes


def colour_at(image: Image.Image, x: float, y: float) -> str:
    """The name of the colour at a place, given as parts of width and height."""
    pixel = image.getpixel((int(x * image.width), int(y * image.height)))
    assert isinstance(pixel, tuple)
    return min(COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(pixel, COLOURS[name], strict=True)))


def shape_in(image: Image.Image, left: float, right: float) -> str:
    """The shape in a part of the width, by how much of its box it fills."""
    half = image.crop((int(left * image.width), 0, int(right * image.width), image.height))
    mask = half.convert("L").point(lambda value: 255 if value < 240 else 0)
    box = mask.getbbox()
    if box is None:
        return "nothing"
    filled = mask.crop(box).histogram()[255] / ((box[2] - box[0]) * (box[3] - box[1]))
    return min({"circle": 0.785, "square": 1.0, "triangle": 0.5}.items(), key=lambda item: abs(item[1] - filled))[0]


def read_number(image: Image.Image) -> str:
    """Dark digits on light, one after the other."""
    mask = image.convert("L").point(lambda value: 255 if value < 128 else 0)
    columns = [mask.crop((x, 0, x + 1, mask.height)).getbbox() is not None for x in range(mask.width)]
    digits, start = "", None
    for x, dark in enumerate([*columns, False]):
        if dark and start is None:
            start = x
        elif not dark and start is not None:
            glyph = mask.crop((start, 0, x, mask.height))
            digits += _digit(glyph.crop(glyph.getbbox()))
            start = None
    return digits


def _digit(glyph: Image.Image) -> str:
    narrow = glyph.width / glyph.height < 0.45
    shape = glyph.resize((20, 30))

    def difference(digit: str) -> float:
        return sum(abs(a - b) for a, b in zip(shape.tobytes(), _glyph(digit).tobytes(), strict=True))

    return "1" if narrow else min("23456789", key=difference)


@cache
def _glyph(digit: str) -> Image.Image:
    font = ImageFont.load_default(size=100)
    image = Image.new("L", (120, 160), 0)
    ImageDraw.Draw(image).text((20, 10), digit, fill=255, font=font)
    return image.crop(image.getbbox()).resize((20, 30))
