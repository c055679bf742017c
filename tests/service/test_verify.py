"""The end-to-end proof against a service that sees, and against services with one fault each."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image, ImageOps

from loadmaster.core.deployment import Deployment, EngineSection, LimitsSection
from loadmaster.core.verification import Limits, Report, report_document
from loadmaster.render.verification import report_html, report_text
from loadmaster.service import verifyload, verifypictures
from loadmaster.service.serviceaddress import AddressError
from loadmaster.service.verify import LOCAL as LOCAL_STEPS
from loadmaster.service.verify import STEPS, planned_limits, verify
from loadmaster.service.verifylocal import Installation
from tests.service.seeing_service import CONTEXT, MODEL, PLACES, SeeingService, serving

LOCAL = {"cards", "memory", "arguments"}
FOUR = Limits(concurrency=PLACES)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifypictures, "HUGE", (1200, 900))
    monkeypatch.setattr(verifyload, "_FREE_AGAIN_S", 0.5)


def proof(*faults: str, limits: Limits = FOUR, **more: Any) -> tuple[Report, SeeingService]:
    async def run() -> tuple[Report, SeeingService]:
        async with serving(*faults) as (url, service):
            return await verify(url, limits=limits, seed=7, timeout_s=20, **more), service

    return asyncio.run(run())


def named(report: Report, status: str) -> set[str]:
    return {step.name for step in report.steps if step.status == status}


def detail(report: Report, name: str) -> str:
    return next(step.detail for step in report.steps if step.name == name)


def test_a_working_service_passes_every_step() -> None:
    report, service = proof()
    assert report.ok is True, report_text(report, 100)
    assert named(report, "failed") == set()
    assert named(report, "not_applicable") == LOCAL
    assert report.model == MODEL
    assert report.limits == Limits(concurrency=PLACES, context=CONTEXT, images=None, pictures=None)
    assert service.most_running == PLACES
    assert service.running == 0
    assert detail(report, "longest-prompt").startswith(f"{CONTEXT - 16:,} of {CONTEXT:,} tokens")


def test_every_picture_question_follows_its_control() -> None:
    names = [step.name for step in proof()[0].steps]
    for control, asked in (("control-colour", "image-colour"), ("control-number", "image-number")):
        assert names.index(control) < names.index(asked)


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        ("drops", {"image"}),
        (
            "blind",
            {"image-colour", "image-second-turn", "image-exif", "image-order", "image-number", "image-huge"},
        ),
        ("swaps", {"image-order"}),
        ("small-pictures", {"image-large", "image-huge"}),
        ("mixes", {"concurrent"}),
        ("ignores-exif", {"image-exif"}),
        ("forgets", {"conversation"}),
        ("schema-ignored", {"json-schema"}),
        ("short-context", {"longest-prompt"}),
        ("full", {"concurrent", "cancel"}),
        ("goes-on", {"cancel"}),
        ("garbage", {"text"}),
        ("no-models", {"models"}),
        ("key", {"models"}),
        ("stream-type", {"stream"}),
        ("stream-no-finish", {"stream"}),
        ("stream-late-text", {"stream"}),
        ("stream-no-usage", {"stream"}),
        ("stream-no-done", {"stream"}),
        ("stream-after-done", {"stream"}),
        ("stream-not-json", {"stream"}),
        ("stream-no-field", {"stream"}),
        ("stream-error", {"stream"}),
        ("stream-cut", {"stream"}),
    ],
)
def test_a_fault_is_found_by_its_step(fault: str, failing: set[str]) -> None:
    report, _ = proof(fault)
    assert named(report, "failed") == failing, report_text(report, 100)
    assert report.ok is False


def test_a_weak_model_is_no_broken_service() -> None:
    report, _ = proof("weak")
    assert report.ok is None
    assert named(report, "failed") == {"control-colour", "control-number"}
    asked = {"image-colour", "image-second-turn", "image-exif", "image-order", "image-number", "image-huge"}
    assert asked <= named(report, "not_applicable")
    assert "answered wrongly" in detail(report, "image-colour")
    assert "too weak" in report_text(report, 100)


def test_a_broken_stream_of_a_weak_model_is_broken() -> None:
    assert proof("weak", "stream-no-done")[0].ok is False


@pytest.mark.parametrize("fault", ["chinese", "thinks", "strict", "no-metrics"])
def test_other_manners_pass(fault: str) -> None:
    report, _ = proof(fault)
    assert report.ok is True, report_text(report, 100)
    assert named(report, "failed") == set()


def test_what_a_service_refuses_is_left_out_and_said() -> None:
    report, service = proof("strict")
    assert any("chat_template_kwargs" in note for note in report.notes)
    assert "max_completion_tokens" in service.bodies[-1]
    assert "chat_template_kwargs" not in service.bodies[-1]


def test_thinking_is_switched_off_where_that_is_known() -> None:
    _, service = proof()
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in service.bodies)


def test_a_service_that_goes_on_without_its_clients_is_found_without_metrics() -> None:
    report, _ = proof("goes-on", "no-metrics")
    assert named(report, "failed") == {"cancel"}


def test_an_engine_that_goes_on_behind_its_gateway_is_found(tmp_path: Path) -> None:
    async def run() -> Report:
        async with serving() as (url, _), serving() as (engine_url, engine):
            engine.running = 2  # what the engine counts from before is no fault
            installation = Installation(
                deployment=Deployment(name="d", model="m"), log=tmp_path / "none", engine_url=engine_url
            )
            counted = iter([2, *[3] * 1000])
            engine.count = lambda: next(counted)
            return await verify(url, limits=FOUR, installation=installation, seed=7, timeout_s=20)

    report = asyncio.run(run())
    assert named(report, "failed") == {"cancel"}
    assert "still counts 3 requests (2 before)" in detail(report, "cancel")


def test_unknown_limits_leave_steps_out_with_words() -> None:
    report, _ = proof("no-context", "no-metrics", limits=Limits())
    assert report.ok is True
    assert named(report, "not_applicable") == LOCAL | {"concurrent", "longest-prompt", "cancel"}
    assert "--concurrency" in detail(report, "concurrent")
    assert "max_model_len" in detail(report, "longest-prompt")


def test_a_model_of_words_leaves_it_open_whether_pictures_belong_to_it() -> None:
    report, _ = proof("text-only")
    assert report.ok is None
    assert named(report, "failed") == set()
    assert "not a multimodal model" in detail(report, "image")


def test_a_model_that_takes_pictures_must_get_them() -> None:
    report, _ = proof("text-only", limits=Limits(concurrency=PLACES, pictures=True))
    assert report.ok is False
    assert "image" in named(report, "failed")


def test_a_model_that_takes_none_need_not_get_them() -> None:
    report, _ = proof("text-only", limits=Limits(concurrency=PLACES, pictures=False))
    assert report.ok is True


@pytest.mark.parametrize(("fault", "step"), [("one-picture", "image-order"), ("no-schema", "json-schema")])
def test_what_a_service_does_not_offer_is_no_fault(fault: str, step: str) -> None:
    report, _ = proof(fault)
    assert report.ok is True
    assert named(report, "not_applicable") == LOCAL | {step}


def test_a_key_opens_the_service() -> None:
    assert proof("key", api_key="secret")[0].ok is True
    assert "HTTP 401" in detail(proof("key")[0], "models")


def test_a_model_that_is_not_listed_is_said() -> None:
    report, _ = proof(model="other")
    assert detail(report, "models") == f"no model 'other'; listed: {MODEL}"
    assert report.ok is False


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:9/v1/", "http://[::1]:9"])
def test_nobody_there_is_said_without_a_traceback(url: str) -> None:
    report = asyncio.run(verify(url, timeout_s=5))
    assert report.ok is False
    assert named(report, "failed") == {"models"}
    assert named(report, "passed") == set()


@pytest.mark.parametrize("url", ["http://[::1", "http://", "http://h:99999"])
def test_what_is_no_address_is_not_asked(url: str) -> None:
    with pytest.raises(AddressError, match="is no address of a service"):
        asyncio.run(verify(url, timeout_s=5))


def test_the_json_is_as_agreed() -> None:
    document = json.loads(json.dumps(report_document(proof("weak")[0])))
    assert document["schema"] == 1
    assert document["ok"] is None
    for step in document["steps"]:
        assert step.keys() == {"name", "kind", "status", "seconds", "detail"}
        assert step["kind"] in ("transport", "answer")
        assert step["status"] in ("passed", "failed", "not_applicable")
        assert isinstance(step["seconds"], float)
        assert step["detail"]


def test_the_page_needs_nothing_else_and_escapes() -> None:
    report, _ = proof("blind")
    page = report_html(report, "2026-11-30 18:00 <UTC>")
    assert "<script" not in page
    assert "src=" not in page
    assert "&lt;UTC&gt;" in page
    assert "picture path is broken" in page
    assert page.count("<tr>") == len(report.steps) + 1


# ------------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize("draw", [verifypictures.two_shapes, verifypictures.number, verifypictures.turned])
def test_pictures_are_the_same_for_a_seed(draw: Callable[[Random], verifypictures.Picture]) -> None:
    assert draw(Random(5)) == draw(Random(5))
    assert draw(Random(5)).answers != draw(Random(6)).answers


def test_the_huge_picture_has_more_than_12_megapixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    picture = verifypictures.huge(Random(1))
    with Image.open(io.BytesIO(picture.content)) as image:
        assert image.format == "JPEG"
        assert image.width * image.height > 12_000_000
    assert len(picture.content) < 2 << 20


def test_the_turned_picture_is_stored_lying() -> None:
    picture = verifypictures.turned(Random(1))
    with Image.open(io.BytesIO(picture.content)) as image:
        assert image.size == (picture.height, picture.width)
        assert ImageOps.exif_transpose(image).size == (picture.width, picture.height)


# ------------------------------------------------------------------------------------------------ this machine


def installed(tmp_path: Path, log: str, kind: str = "vllm", flags: tuple[str, ...] = ()) -> Installation:
    path = tmp_path / "backend.log"
    path.write_text(log)
    engine = EngineSection(kind=kind, flags=list(flags))  # type: ignore[arg-type]
    return Installation(deployment=Deployment(name="d", model="m", engine=engine), log=path)


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (("--max-model-len", "4096", "--enforce-eager"), "passed", "--max-model-len, --enforce-eager"),
        (("--max-model-len", "8192"), "failed", "the log says --max-model-len 4096, wanted is 8192"),
        (("--max-model-len", "4096", "--max-num-seqs", "256"), "passed", "not named, as is a default: --max-num-seqs"),
        (("--dtype", "bfloat16", "--gpu-memory-utilization", "0.9"), "passed", "--gpu-memory-utilization"),
    ],
)
def test_the_arguments_are_looked_for_in_the_log(
    tmp_path: Path, flags: tuple[str, ...], status: str, words: str
) -> None:
    line = (
        "(APIServer pid=7) INFO 11-30 09:29:14 [api_utils.py:273] non-default args: {'model_tag': 'm', "
        "'max_model_len': 4096, 'enforce_eager': True, 'gpu_memory_utilization': 0.9}\n"
    )
    report, _ = proof(installation=installed(tmp_path, "INFO begin\n" + line + "INFO end\n", flags=flags))
    step = next(step for step in report.steps if step.name == "arguments")
    assert step.status == status
    assert words in step.detail


def test_a_log_without_arguments_shows_nothing(tmp_path: Path) -> None:
    report, _ = proof(installation=installed(tmp_path, "INFO begin\n", flags=("--max-model-len", "4096")))
    assert "arguments" in named(report, "not_applicable")
    assert report.ok is True


def test_the_embedded_engines_slots_are_found(tmp_path: Path) -> None:
    log = "0.00.1 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 4096, kv_unified = 'false'\n"
    right = installed(tmp_path, log, "llamacpp", ("--parallel", "4"))
    assert "--parallel" in detail(proof(installation=right)[0], "arguments")
    wrong = installed(tmp_path, log, "llamacpp", ("--parallel", "2"))
    assert proof(installation=wrong)[0].ok is False


def test_the_limits_of_a_deployment_are_what_is_tried() -> None:
    deployment = Deployment(name="d", model="m", limits=LimitsSection(concurrency=3, max_images=1))
    assert planned_limits(Installation(deployment=deployment)) == Limits(concurrency=3, images=1)


# ------------------------------------------------------------------------------------------------ no HTTP at all


LONG = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "connection"),
        (b"\x00\xff garbage\r\n\r\n", "connection failed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[1]", "connection failed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1]", "does not answer with a list"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{" + b'"data":[{"id":null}]',
            "connection failed|no model|list",
        ),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "HTTP 302"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", "HTTP 503"),
        (LONG + (b"100000\r\n" + b"x" * 0x100000 + b"\r\n") * 20, "more than 16 MiB"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", "connection failed"),
        (None, "not answered within 1 s"),
    ],
)
def test_whatever_answers_is_said_in_words(raw: bytes | None, words: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            if raw is None:
                await reader.read()
            else:
                writer.write(raw)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def run() -> Report:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            return await verify(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=1)

    report = asyncio.run(run())
    assert report.ok is False
    assert named(report, "failed") == {"models"}
    assert re.search(words, detail(report, "models")), detail(report, "models")
    assert len(detail(report, "models")) < 500


def test_every_step_is_documented_in_its_order() -> None:
    text = (Path(__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| (transport|answer) \|", text, re.MULTILINE)
    assert rows == [(plan.name, plan.kind) for plan in STEPS] + [(name, "transport") for name in LOCAL_STEPS]
