"""When an engine counts as ready, against one that plays every state."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import EngineFacts, ImagePlan, LaunchPlan, LoadSheet, ModelSummary
from loadmaster.engines.readiness import NotReady, Ready, WarmUp, probe, wait_ready, warm_up, warm_up_picture
from tests.running import Running, fake_engine, free_port


def ready(
    running: Running, *, model: str = "fake", key: str | None = None, within: float = 20.0
) -> tuple[Ready, list[str]]:
    said: list[str] = []
    deadline = time.monotonic() + within
    alive = running.child.poll
    return asyncio.run(wait_ready(running.url, model, key, deadline, lambda: alive() is None, said.append)), said


def test_ready_after_a_token(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as running:
        found, said = ready(running)
        seen = running.fake()
    assert found.chat
    assert 0 <= found.listed_s <= found.answered_s < 20
    assert seen["last_body"]["max_tokens"] == 1
    assert seen["finished"] == 1
    assert said[-1].startswith("the model is listed")


def test_it_waits_for_the_port(tmp_path: Path) -> None:
    port = free_port()
    with fake_engine(tmp_path, "--load", "0.5", "--port", str(port), wait=False) as running:
        running.url = f"http://127.0.0.1:{port}"
        found, said = ready(running)
    assert said[0] == "it does not listen yet"
    assert found.listed_s > 0.2


def test_an_open_port_alone_is_not_ready(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--stuck") as running:
        begin = time.monotonic()
        with pytest.raises(NotReady, match="not ready in time: no answer") as caught:
            ready(running, within=0.6)
    assert 0.5 < time.monotonic() - begin < 10
    assert caught.value.hint is not None


def test_an_engine_that_ends_is_noticed_at_once(tmp_path: Path) -> None:
    port = str(free_port())
    with (
        fake_engine(tmp_path, "--exit-at", "start", "--exit", "7", "--port", port, wait=False) as running,
        pytest.raises(NotReady, match="the engine has ended"),
    ):
        running.url = f"http://127.0.0.1:{port}"
        ready(running)


def test_an_engine_that_ends_during_its_first_answer(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--crash-after-tokens", "1") as running, pytest.raises(NotReady, match="ended"):
        ready(running)


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        (("--api-key", "right"), {"key": "wrong"}, "another API key"),
        (("--api-key", "right"), {}, "another API key"),
        (("--model", "other"), {}, "serves other, not fake"),
    ],
)
def test_what_waiting_does_not_mend(
    tmp_path: Path, options: tuple[str, ...], arguments: dict[str, Any], said: str
) -> None:
    with fake_engine(tmp_path, *options) as running, pytest.raises(NotReady, match=said) as caught:
        ready(running, **arguments)
    assert caught.value.final


def test_the_key_is_sent(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--api-key", "right") as running:
        assert ready(running, key="right")[0].model == "fake"


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--garbage",), "no HTTP"), (("--status", "500"), "answers 500: as asked for"), (("--tokens", "0"), "no token")],
)
def test_answers_that_prove_nothing(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    with fake_engine(tmp_path, *options) as running, pytest.raises(NotReady, match=said):
        ready(running, within=0.5)


def test_trouble_that_passes(tmp_path: Path) -> None:
    async def both(running: Running) -> Ready:
        waiting = asyncio.ensure_future(
            wait_ready(running.url, "fake", None, time.monotonic() + 20, lambda: True, lambda text: None)
        )
        await asyncio.sleep(0.4)
        await asyncio.to_thread(running.fake, status=None)
        return await waiting

    with fake_engine(tmp_path, "--status", "503") as running:
        assert asyncio.run(both(running)).answered_s > 0.3


def test_a_probe(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as running:
        assert asyncio.run(probe(running.url, "fake", None, 10)) is None
        assert asyncio.run(probe(running.url, "fake", None, 10, chat=False)) is None
        running.fake(stuck=True)
        assert asyncio.run(probe(running.url, "fake", None, 0.3)) == "no answer within 0.3 s"
    assert asyncio.run(probe(running.url, "fake", None, 0.3)) == "it does not listen yet"


def test_warm_up_asks_for_a_text_and_a_picture(tmp_path: Path) -> None:
    said: list[str] = []
    with fake_engine(tmp_path) as running:
        done = asyncio.run(warm_up(running.url, "fake", None, picture=(64, 32), report=said.append))
        seen = running.fake()
    assert done.problems == ()
    assert (done.text_s or 0) > 0
    assert (done.picture_s or 0) > 0
    assert done.picture_size == (64, 32)
    assert seen["finished"] == 2
    url = seen["last_body"]["messages"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,")
    assert said[-1] == "warming up with a picture of 64 x 32 pixels"


def test_a_refused_picture_is_told(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--max-images", "0") as running:
        done = asyncio.run(warm_up(running.url, "fake", None, picture=(64, 32)))
        only_text = asyncio.run(warm_up(running.url, "fake", None, picture=None))
    assert done.picture_s is None
    assert done.problems == (
        "the warm-up picture of 64 x 32 pixels failed: the engine answers 400: "
        "At most 0 image(s) may be provided in one request.",
    )
    assert msgspec.structs.replace(only_text, text_s=None) == WarmUp(text_s=None)


def plan(size: tuple[int, int] | None, *, images: bool = True) -> LoadSheet:
    return LoadSheet(
        fits=True,
        engine=EngineFacts(),
        model=ModelSummary(architecture=None, quantization=None, parameters=None),
        gpus=(),
        kv_cache=None,
        launch=LaunchPlan(argv=()),
        images=ImagePlan(largest_size=size) if images else None,
    )


@pytest.mark.parametrize(
    ("raw", "sheet", "expected"),
    [
        ({}, plan((4096, 2048)), (4096, 2048)),
        ({"limits": {"max_image_pixels": 2048 * 1024}}, plan((4096, 2048)), (2048, 1024)),
        ({"limits": {"max_image_pixels": 1 << 30}}, plan((4096, 2048)), (4096, 2048)),
        ({"limits": {"max_image_pixels": 1 << 20}}, None, (1024, 1024)),
        ({"limits": {"max_images": 0}}, plan((4096, 2048)), None),
        ({}, plan(None), (512, 512)),
        ({}, plan(None, images=False), None),
        ({"engine": {"kind": "llamacpp"}}, None, None),
        ({"engine": {"kind": "llamacpp"}, "projector": "p"}, None, (512, 512)),
        ({"engine": {"kind": "command", "command": ["x"]}}, None, (512, 512)),
    ],
)
def test_the_largest_picture(raw: dict[str, Any], sheet: LoadSheet | None, expected: tuple[int, int] | None) -> None:
    subject = msgspec.convert({"name": "cat", "model": "m", **raw}, Deployment)
    assert warm_up_picture(subject, sheet) == expected
