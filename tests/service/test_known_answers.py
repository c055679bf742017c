"""From pixel to answer: verify's questions about pictures, through gateway and engine, to a model that truly sees.

Everything that handles pictures wrongly has to be found out. The four faults stand between the client and the
gateway, where a service's own code would have them.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from PIL import Image, ImageOps

from loadmaster.core.verification import Limits
from loadmaster.service import verifysteps
from loadmaster.service.gatewaysettings import BackendSettings
from loadmaster.service.images import ImagePool, ImageRules, apply
from loadmaster.service.verifyclient import Service
from loadmaster.service.verifysteps import Outcome, Proof
from tests import gateways
from tests.demo_model_engine import MODEL, demo_engine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")

EXAMPLES = Path(verifysteps.__file__).parent / "static" / "examples"
STEPS: dict[str, Callable[[Proof], Awaitable[Outcome]]] = {
    "control-colour": verifysteps.control_colour,
    "control-number": verifysteps.control_number,
    "conversation": verifysteps.conversation,
    "image-colour": verifysteps.image_colour,
    "image-second-turn": verifysteps.image_second_turn,
    "image-number": verifysteps.image_number,
    "image-huge": verifysteps.image_huge,
    "image-exif": verifysteps.image_exif,
    "image-order": verifysteps.image_order,
}
PIXELS = 250_000  # the gateway scales larger pictures down, so the huge one is scaled twice


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo_engine(tmp_path_factory.mktemp("demo")) as address:
        yield address


# ------------------------------------------------------------------------------------------------ faults

Handler = Callable[[list[Image.Image]], list[Image.Image]]


def blue_first(pictures: list[Image.Image]) -> list[Image.Image]:
    """BGR taken for RGB."""
    return [Image.merge("RGB", upright(picture).split()[::-1]) for picture in pictures]


def as_stored(pictures: list[Image.Image]) -> list[Image.Image]:
    """Pixels as they lie in the file, the note on how to turn them lost."""
    return [picture.convert("RGB") for picture in pictures]


def over_shrunk(pictures: list[Image.Image]) -> list[Image.Image]:
    """Scaled down until nothing can be read."""
    return [upright(picture).resize((12, 12)) for picture in pictures]


def wrong_order(pictures: list[Image.Image]) -> list[Image.Image]:
    return [upright(picture) for picture in pictures][::-1]


def upright(picture: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(picture).convert("RGB")


@asynccontextmanager
async def mishandling(url: str, handle: Handler | None) -> AsyncIterator[str]:
    """A service in front of another one that handles pictures in its own way; without ``handle``, that one itself."""
    if handle is None:
        yield url
        return

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        for message in body["messages"]:
            if isinstance(message["content"], list):
                _handled(message["content"], handle)
        sent = io.BytesIO(json.dumps(body).encode())
        async with session.post(url + request.path, data=sent, headers={"content-type": "application/json"}) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _handled(parts: list[dict[str, Any]], handle: Handler) -> None:
    shown = [part for part in parts if part["type"] == "image_url"]
    pictures: list[Image.Image] = [
        Image.open(io.BytesIO(base64.b64decode(one["image_url"]["url"].partition(",")[2]))) for one in shown
    ]
    for part, picture in zip(shown, handle(pictures), strict=True):
        file = io.BytesIO()
        picture.convert("RGB").save(file, "PNG", compress_level=1)
        part["image_url"]["url"] = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# ------------------------------------------------------------------------------------------------ proofs


@asynccontextmanager
async def asked(engine: str, handle: Handler | None = None) -> AsyncIterator[Service]:
    pool, rules = ImagePool(workers=1), ImageRules(max_pixels=PIXELS)

    async def scaled(messages: list[Any]) -> tuple[list[Any], list[str]]:
        return await apply(messages, rules, pool)

    backends = (BackendSettings(model=MODEL, url=engine),)
    async with (
        gateways.gateway(backends, image_rules=scaled, closing=pool.stop) as opened,
        mishandling(opened.url, handle) as url,
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
    ):
        service = Service(session, url, timeout_s=120)
        service.model = MODEL
        yield service


def outcomes(engine: str, seeds: range, handle: Handler | None = None) -> dict[str, list[Outcome]]:
    """What every step says, once for each seed."""

    async def run() -> dict[str, list[Outcome]]:
        found: dict[str, list[Outcome]] = {name: [] for name in STEPS}
        async with asked(engine, handle) as service:
            for seed in seeds:
                proof = Proof(service, Limits(), Random(seed))
                for name, step in STEPS.items():
                    found[name].append(await step(proof))
        return found

    return asyncio.run(run())


def failing(found: dict[str, list[Outcome]]) -> set[str]:
    return {name for name, seen in found.items() if any(one.status == "failed" for one in seen)}


def test_every_question_of_verify_is_answered_rightly(engine: str) -> None:
    found = outcomes(engine, range(100, 104))
    wrong = [one.detail for seen in found.values() for one in seen if one.status != "passed"]
    assert wrong == []


@pytest.mark.parametrize(
    ("handle", "caught"),
    [
        (blue_first, {"image-colour", "image-order"}),
        (as_stored, {"image-exif"}),
        (over_shrunk, {"image-number", "image-huge"}),
        (wrong_order, {"image-order"}),
    ],
)
def test_pictures_that_are_handled_wrongly_are_found_out(engine: str, handle: Handler, caught: set[str]) -> None:
    found = failing(outcomes(engine, range(100, 102), handle))
    assert caught <= found
    # what has nothing to do with the fault still holds
    assert not found & {"control-colour", "control-number", "conversation"}
    if handle in (as_stored, wrong_order):
        assert found == caught


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_pages_examples_are_answered_rightly(engine: str, language: str) -> None:
    """A place, a count and four digits."""
    wanted = {
        "en": ["The cat is on the table.", "There are two red circles.", "The number is 4821."],
        "zh": ["猫在桌子上。", "有两个红色的圆形。", "数字是4821。"],
    }

    async def run() -> list[str]:
        found = []
        async with asked(engine) as service:
            for example in json.loads((EXAMPLES / "examples.json").read_text("utf-8")):
                data = base64.b64encode((EXAMPLES / example["file"]).read_bytes()).decode()
                picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
                parts = [picture, {"type": "text", "text": example[f"question_{language}"]}]
                answer = await service.chat([{"role": "user", "content": parts}], max_tokens=32)
                found.append(answer.text)
        return found

    assert asyncio.run(run()) == wanted[language]
