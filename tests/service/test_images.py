from __future__ import annotations

import asyncio
import base64
import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from PIL import Image

from loadmaster.service.imagepool import Outcome, _Cache
from loadmaster.service.images import ImageError, ImagePool, ImageRules, apply, changes_header
from loadmaster.service.urlfetch import Fetcher, FetchError
from tests.drawn_pictures import chat, corner_picture, decoded, encoded, photograph, png_claiming, url

T = TypeVar("T")
RULES = ImageRules(max_pixels=1200)
SMALL = url(encoded(corner_picture(40, 30), "PNG"))
LARGE = url(encoded(corner_picture(160, 120), "PNG"))
# 60 million transparent pixels in a few hundred kilobytes: half a second and half a gigabyte to decode.
HEAVY = Image.new("LA", (7750, 7750), (9, 9))


def in_pool(work: Callable[[ImagePool], Awaitable[T]], **options: Any) -> T:
    """Runs ``work`` with a pool, which must leave no process."""

    async def run() -> T:
        pool = ImagePool(**options)
        seen: set[int] = set()
        try:
            return await asyncio.wait_for(work(pool), 60)
        finally:
            seen.update(pool.processes())
            await pool.stop()
            assert pool.processes() == ()
            assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]

    return asyncio.run(run())


def applied(messages: list[Any], rules: ImageRules = RULES, **options: Any) -> tuple[list[Any], list[str]]:
    before = copy.deepcopy(messages)
    result = in_pool(lambda pool: apply(messages, rules, pool, **options))
    assert messages == before, "the messages given are not modified"
    return result


async def refused(messages: list[Any], rules: ImageRules, pool: ImagePool, **options: Any) -> ImageError:
    with pytest.raises(ImageError) as caught:
        await apply(messages, rules, pool, **options)
    return caught.value


def refusal(messages: list[Any], rules: ImageRules = RULES, **options: Any) -> ImageError:
    return in_pool(lambda pool: refused(messages, rules, pool, **options))


def stop_process(pid: int) -> None:
    """SIGSTOP, and waits until it is in force."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.005)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


# The forms of a conversation


def test_messages_without_pictures_are_the_same_object_and_start_no_process() -> None:
    async def work(pool: ImagePool) -> None:
        for messages in (
            [],
            [{"role": "user", "content": "hello"}],
            [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": '{"image_url":"x"}'}}]}],
            [{"role": "assistant", "content": [{"type": "tool_use", "input": {"image_url": "http://x"}}]}],
            [{"type": "function_call", "arguments": "{}"}],
            ["not a message", 3, None],
        ):
            result, changes = await apply(messages, RULES, pool)
            assert result is messages and changes == []
        assert pool.processes() == ()

    in_pool(work)


def test_a_chat_picture_is_scaled_in_place() -> None:
    messages = chat(SMALL, LARGE)
    messages[0]["content"][2]["image_url"]["detail"] = "high"
    result, changes = applied(messages)
    assert changes == ["picture 2: scaled from 160x120 to 40x30"]
    first, second = result[0]["content"][1:]
    assert first is messages[0]["content"][1]
    assert second["image_url"]["detail"] == "high"
    image = decoded(second["image_url"]["url"])
    assert image.size == (40, 30)
    assert changes_header(changes) == changes[0]


def test_a_chat_picture_given_as_a_text() -> None:
    result, _ = applied([{"role": "user", "content": [{"type": "image_url", "image_url": LARGE}]}])
    assert decoded(result[0]["content"][0]["image_url"]).size == (40, 30)


def test_a_picture_without_a_type_or_in_an_odd_place_is_no_way_around() -> None:
    for message in (
        {"role": "user", "content": [{"image_url": LARGE, "uuid": "a"}]},
        {"role": "user", "content": {"type": "image_url", "image_url": {"url": LARGE}}},
        {"type": "input_image", "image_url": LARGE},
        {"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": LARGE}}]},
    ):
        result, changes = applied([message])
        assert changes == ["picture 1: scaled from 160x120 to 40x30"]
        assert LARGE not in str(result) and "uuid" not in str(result)


def test_pictures_of_the_responses_form() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": LARGE, "detail": "auto"}]},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": LARGE}]},
    ]
    result, changes = applied(items, ImageRules(max_pixels=1200, max_images=1))
    assert result[0]["content"][0]["type"] == "input_text"
    assert decoded(result[1]["output"][0]["image_url"]).size == (40, 30)
    assert changes == ["1 older picture left out", "picture 2: scaled from 160x120 to 40x30"]


def test_pictures_of_anthropics_form_also_in_a_tools_result() -> None:
    data = LARGE.partition(",")[2]
    jpeg_named_png = base64.b64encode(encoded(photograph(20, 20), "JPEG")).decode()
    source = {"type": "base64", "media_type": "image/png", "data": "\n".join((data[:40], data[40:]))}
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": jpeg_named_png}},
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]},
            ],
        }
    ]
    result, changes = applied(messages)
    assert result[0]["content"][0] is messages[0]["content"][0]
    changed = result[0]["content"][1]["content"][0]["source"]
    assert changed["type"] == "base64"
    assert decoded(f"data:{changed['media_type']};base64,{changed['data']}").size == (40, 30)
    assert changes == ["picture 2: scaled from 160x120 to 40x30"]


def test_an_odd_spelling_is_put_in_the_plain_form_with_the_same_bytes() -> None:
    data = encoded(corner_picture(40, 30), "PNG")
    spelt = "DATA:image/PNG;charset=x;BASE64," + base64.urlsafe_b64encode(data).decode().rstrip("=")
    result, changes = applied(chat(spelt))
    assert result[0]["content"][1]["image_url"]["url"] == url(data)
    assert changes == ["picture 1: data: URL respelt"]


def test_a_uuid_of_a_picture_never_reaches_the_engine() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SMALL}, "uuid": "other"}]}]
    result, _ = applied(messages)
    assert result[0]["content"][0] == {"type": "image_url", "image_url": {"url": SMALL}}


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": "FTP://example.com/a"}}, "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": "gopher://example.com/a"}}, "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}, "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": " hTTps://example.com/a.png"}}, "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": "iVBORw0KGgo="}}, "invalid_image_url"),
        ({"type": "image_url", "image_url": None, "uuid": "a"}, "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "invalid_image_url"),
        ({"type": "image_url", "image_url": []}, "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,\ud800"}}, "invalid_base64_image"),
        ({"type": "input_image", "file_id": "file-1"}, "invalid_image_url"),
        ({"type": "image", "source": {"type": "file", "file_id": "1"}}, "invalid_image_url"),
        ({"type": "image", "source": {"type": "base64"}}, "invalid_image_url"),
        ({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}, "invalid_image_url"),
        ({"type": "video_url", "video_url": {"url": "http://127.0.0.1/"}}, "unsupported_media_url"),
        ({"type": "audio_url", "audio_url": "file:///etc/passwd"}, "unsupported_media_url"),
    ],
)
def test_what_the_engine_would_fetch_is_refused(part: dict[str, Any], code: str) -> None:
    error = refusal([{"role": "user", "content": [{"type": "text", "text": "x"}, part]}])
    assert error.code == code and error.status == 400
    assert error.param is not None and error.param.startswith("messages[0].content[1].")
    assert "passwd" not in error.message


def test_parts_nested_without_end_are_refused() -> None:
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": LARGE}}
    for _ in range(500):
        part = {"type": "tool_result", "content": [part]}
    assert refusal([{"role": "user", "content": [part]}]).code == "invalid_image"


# How many


def test_the_newest_pictures_are_kept_and_the_rest_become_texts() -> None:
    messages = [*chat(SMALL), *chat(LARGE, SMALL), {"role": "assistant", "content": "A square."}, *chat(LARGE)]
    result, changes = applied(messages, ImageRules(max_images=2))
    assert result[0]["content"][1]["type"] == result[1]["content"][1]["type"] == "text"
    assert "only the newest 2 of a conversation are kept" in result[0]["content"][1]["text"]
    assert result[1]["content"][2] is messages[1]["content"][2]
    assert result[3] is messages[3]
    assert changes == ["2 older pictures left out"]


def test_pictures_that_are_left_out_are_not_looked_at() -> None:
    result, _ = applied(chat("http://10.0.0.1/", "data:,", SMALL), ImageRules(max_images=1))
    assert [part["type"] for part in result[0]["content"]] == ["text", "text", "image_url"]


def test_pictures_that_are_left_out_cost_one_short_text_a_message() -> None:
    messages = [*chat(*[SMALL] * 300), {"role": "assistant", "content": "Squares."}, *chat(*[SMALL] * 60)]
    result, changes = applied(messages, ImageRules(max_images=4))
    first, second = result[0]["content"], result[2]["content"]
    assert [part["type"] for part in first] == ["text", "text"]
    assert "only the newest 4 of a conversation are kept" in first[1]["text"]
    assert [part["type"] for part in second] == ["text", "text", *["image_url"] * 4]
    assert len(second[1]["text"]) <= 12
    assert changes == ["356 older pictures left out"]
    assert len(messages[0]["content"]) == 301  # what came in stays as it was


def test_a_tools_result_of_which_every_picture_is_left_out_is_not_empty() -> None:
    data = SMALL.partition(",")[2]
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    tool = {"type": "tool_result", "tool_use_id": "1", "content": [picture, picture]}
    messages = [{"role": "user", "content": [tool, picture, picture]}]
    result, _ = applied(messages, ImageRules(max_images=1))
    answer, *rest = result[0]["content"]
    assert [part["type"] for part in answer["content"]] == ["text"]
    assert [part["type"] for part in rest] == ["text", "image"]


def test_a_service_without_pictures_refuses_them() -> None:
    assert refusal(chat(SMALL), ImageRules(max_images=0)).code == "images_not_supported"
    assert applied([{"role": "user", "content": "x"}], ImageRules(max_images=0))[1] == []


def test_a_kept_picture_is_the_same_from_turn_to_turn_with_and_without_cache() -> None:
    photo = url(encoded(photograph(160, 120), "WEBP"), "image/webp")
    seen = set()
    for cache_bytes in (0, 1 << 20):

        async def work(pool: ImagePool) -> None:
            conversation = chat(photo)
            for _ in range(3):
                result, _ = await apply(conversation, RULES, pool)
                seen.add(result[0]["content"][1]["image_url"]["url"])
                conversation = [*conversation, {"role": "assistant", "content": "x"}, *chat(SMALL)]

        in_pool(work, cache_bytes=cache_bytes)
    assert len(seen) == 1


@linux
def test_known_pictures_and_known_refusals_need_no_worker() -> None:
    bomb = url(png_claiming(60_000, 60_000))

    async def work(pool: ImagePool) -> None:
        first = await apply(chat(LARGE), RULES, pool)
        error = await refused(chat(bomb), RULES, pool)
        for pid in pool.processes():
            stop_process(pid)
        assert await apply(chat(LARGE), RULES, pool) == first
        again = await refused(chat(bomb), RULES, pool)
        assert (again.code, again.message) == (error.code, error.message) and again is not error

    in_pool(work)


def test_the_cache_is_bounded_in_bytes_and_drops_the_least_used() -> None:
    cache = _Cache(10_000)
    for index in range(5):
        cache.put(bytes([index]), Outcome("x" * 2500))
        cache.get(b"\0")
    assert cache.get(b"\0") is not None and cache.get(b"\4") is not None
    assert cache.get(b"\1") is None and cache.get(b"\2") is None
    cache.put(b"large", Outcome("x" * 20_000))
    assert cache.get(b"large") is None and cache.get(b"\0") is not None


def test_one_picture_asked_for_at_once_is_converted_once() -> None:
    async def work(pool: ImagePool) -> None:
        results = await asyncio.gather(*(apply(chat(LARGE, LARGE), RULES, pool) for _ in range(5)))
        assert all(result == results[0] for result in results)
        assert [worker.jobs for worker in pool._idle] == [1]

    in_pool(work)


# Time, memory and death


def heavy_url() -> str:
    return url(encoded(HEAVY, "PNG", compress_level=1))


def test_a_picture_that_takes_too_long_ends_and_harms_no_other() -> None:
    heavy = heavy_url()

    async def work(pool: ImagePool) -> None:
        await pool.start()
        before = pool.processes()
        started = time.monotonic()
        slow = asyncio.create_task(refused(chat(heavy), ImageRules(max_pixels=1200, timeout_s=0.1), pool))
        good = asyncio.create_task(apply(chat(LARGE), RULES, pool))
        error = await slow
        assert error.code == "image_parse_error" and "longer than 0.1 s" in error.message
        assert (await good)[1] == ["picture 1: scaled from 160x120 to 40x30"]
        assert time.monotonic() - started < 10
        assert len(set(before) & set(pool.processes())) == 1, "the other worker lives on"

    in_pool(work, workers=2)


def test_a_picture_that_needs_too_much_memory_is_refused_and_the_worker_replaced() -> None:
    heavy = heavy_url()

    async def work(pool: ImagePool) -> None:
        await pool.start()
        before = pool.processes()
        error = await refused(chat(heavy), RULES, pool)
        assert error.code == "image_too_large" and "memory" in error.message
        assert (await apply(chat(LARGE), RULES, pool))[1]
        assert pool.processes() != before

    if sys.platform.startswith("linux"):
        in_pool(work, memory_bytes=64 << 20)


def test_the_largest_picture_allowed_fits_the_memory_limit() -> None:
    result, changes = applied(chat(heavy_url()), ImageRules(max_pixels=1200, timeout_s=30))
    assert decoded(result[0]["content"][1]["image_url"]["url"]).size == (34, 34)
    assert "put on white" in changes[0]


@linux
def test_the_pool_survives_killed_workers() -> None:
    async def work(pool: ImagePool) -> None:
        await pool.start()
        for round_ in range(3):  # idle
            for pid in pool.processes():
                os.kill(pid, signal.SIGKILL)
            await apply(chat(url(encoded(corner_picture(100 + round_, 90), "PNG"))), RULES, pool)
        (pid,) = pool.processes()  # at work
        stop_process(pid)
        busy = asyncio.create_task(apply(chat(LARGE), RULES, pool))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        assert (await busy)[1] == ["picture 1: scaled from 160x120 to 40x30"]
        assert pid not in pool.processes()

    in_pool(work)


@linux
def test_a_picture_that_always_kills_its_worker_is_refused() -> None:
    async def work(pool: ImagePool) -> None:
        async def executioner() -> None:
            while True:
                for pid in pool.processes():
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.001)

        await pool.start()
        task = asyncio.create_task(executioner())
        error = await refused(chat(LARGE), RULES, pool)
        task.cancel()
        assert error.status in (400, 503)
        assert (await apply(chat(LARGE), RULES, pool))[1]

    in_pool(work)


@linux
def test_a_client_that_leaves_frees_the_worker() -> None:
    async def work(pool: ImagePool) -> None:
        await pool.start()
        (pid,) = pool.processes()
        stop_process(pid)
        leaving = [asyncio.create_task(apply(chat(LARGE), RULES, pool)) for _ in range(2)]
        await asyncio.sleep(0.05)
        leaving[0].cancel()
        await asyncio.sleep(0.05)
        assert pool.processes() == (pid,), "the other still waits"
        leaving[1].cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert all(task.cancelled() for task in leaving)
        assert (await apply(chat(LARGE), RULES, pool))[1]

    in_pool(work)


@linux
def test_stop_ends_a_picture_at_work() -> None:
    async def work(pool: ImagePool) -> None:
        await pool.start()
        (pid,) = pool.processes()
        stop_process(pid)
        busy = asyncio.create_task(refused(chat(LARGE), RULES, pool))
        await asyncio.sleep(0.05)
        await pool.stop()
        assert (await busy).status == 503
        assert not Path(f"/proc/{pid}").exists()
        assert (await refused(chat(SMALL), RULES, pool)).status == 503

    in_pool(work)


@linux
def test_more_pictures_than_may_wait_are_refused_for_now() -> None:
    async def work(pool: ImagePool) -> None:
        await pool.start()
        (pid,) = pool.processes()
        stop_process(pid)
        busy = asyncio.create_task(apply(chat(LARGE), RULES, pool))
        await asyncio.sleep(0.02)
        assert (await refused(chat(SMALL), RULES, pool)).status == 429
        os.kill(pid, signal.SIGCONT)
        assert (await busy)[1]
        await apply(chat(SMALL), RULES, pool)

    in_pool(work, max_waiting=1)


@linux
def test_no_worker_outlives_a_process_that_was_killed() -> None:
    program = (
        "import asyncio\nfrom loadmaster.service.images import ImagePool\n"
        "async def main():\n pool = ImagePool(workers=2)\n await pool.start()\n"
        " print(*pool.processes(), flush=True)\n await asyncio.sleep(60)\nasyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        stop_process(workers[0])  # not even one that cannot see its input end
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@linux
def test_a_worker_gets_limits_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_KEYS", "sk-secret")

    async def work(pool: ImagePool) -> None:
        await pool.start()
        (pid,) = pool.processes()
        assert b"sk-secret" not in Path(f"/proc/{pid}/environ").read_bytes()
        limits = Path(f"/proc/{pid}/limits").read_text()
        space = next(line for line in limits.splitlines() if line.startswith("Max address space"))
        assert int(space.split()[3]) < 2 << 30
        assert next(line for line in limits.splitlines() if line.startswith("Max file size")).split()[3] == "0"

    in_pool(work)


def test_hostile_pictures_leave_the_pool_in_order() -> None:
    png = encoded(corner_picture(40, 30), "PNG")
    hostile = [
        url(png_claiming(50_000, 50_000)),
        url(png_claiming(7000, 7000)),
        url(png[:-30]),
        "data:image/svg+xml,%3Csvg%20xmlns='http://www.w3.org/2000/svg'%3E%3Cimage%20href='file:///etc/passwd'/%3E",
        url(b"\xff\xd8\xff\xe0" + b"\xff" * 5000, "image/jpeg"),
        url(b"%!PS\n(/etc/passwd) run"),
        "data:image/png;base64," + "A" * 4001,
        "data:image/png;base64," + "%41" * 1000,
        url(encoded(corner_picture(5, 2000), "PNG")),
    ]

    async def work(pool: ImagePool) -> None:
        for text in hostile:
            error = await refused(chat(text), RULES, pool)
            assert error.status == 400 and error.message.isascii()
        assert (await apply(chat(LARGE), RULES, pool))[1]

    in_pool(work)


# By URL


class Page(Fetcher):
    """Gives what it holds, without a network."""

    def __init__(self, pages: dict[str, bytes]) -> None:
        self.pages = pages

    async def fetch(self, url: str) -> bytes:
        if url not in self.pages:
            raise FetchError("failed_to_download_image", "The picture could not be fetched: no such page.")
        return self.pages[url]


def test_a_url_becomes_data_before_the_engine_sees_it() -> None:
    data = encoded(corner_picture(40, 30), "PNG")
    rules = ImageRules(allow_urls=True)
    page = Page({"https://example.com/a.png": data, "https://example.com/b": b"<html>"})
    result, changes = applied(chat("https://example.com/a.png"), rules, fetcher=page)
    assert result[0]["content"][1]["image_url"]["url"] == url(data)
    assert changes == ["picture 1: fetched"]
    assert refusal(chat("https://example.com/b"), rules, fetcher=page).code == "unsupported_image_media_type"
    assert refusal(chat("https://example.com/c"), rules, fetcher=page).code == "failed_to_download_image"
    assert refusal(chat("https://example.com/a.png"), RULES, fetcher=page).code == "invalid_image_url"
    anthropic = [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}]}
    ]
    result, _ = applied(anthropic, rules, fetcher=page)
    source = result[0]["content"][0]["source"]
    assert source["type"] == "base64" and base64.b64decode(source["data"]) == data


def test_addresses_within_are_refused_by_the_default_fetcher() -> None:
    error = refusal(chat("http://127.0.0.1:80/a.png"), ImageRules(allow_urls=True))
    assert error.code == "invalid_image_url" and "not a public one" in error.message


# The header


def test_the_header_is_bounded_and_printable() -> None:
    assert changes_header([]) == ""
    assert changes_header(["a", "b"]) == "a; b"
    text = changes_header([f"picture {number}: turned upright\r\nx: y \u00e9" for number in range(500)])
    assert len(text) <= 1000 and text.isascii() and text.isprintable()
    assert text.endswith("more") and "\r" not in text
    assert len(changes_header(["x" * 5000, "y"])) <= 1000


def test_many_pictures_in_one_request() -> None:
    messages = chat(*(url(encoded(corner_picture(60 + index, 50), "PNG")) for index in range(12)))
    result, changes = applied(messages)
    assert len(changes) == 12
    assert all(decoded(part["image_url"]["url"]).size[0] < 60 for part in result[0]["content"][1:])
