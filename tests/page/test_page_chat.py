"""The chat against the real gateway and the real embedded engine: nothing between them and the browser is made up."""

from __future__ import annotations

import base64
import io
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import FilePayload, Locator, Page, expect

from tests.page.deployed import address, deployed, kill_engine
from tests.service.served import Served

LONG_S = 30_000
Look = Callable[..., Any]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with deployed(tmp_path_factory.mktemp("real")) as one:
        yield one


def picture(width: int = 320, height: int = 240, colour: str = "#3366cc", kind: str = "PNG", **options: Any) -> bytes:
    image = Image.new("RGB", (width, height), colour)
    image.paste(Image.new("RGB", (width // 4, height // 4), "#ffffff"), (0, 0))
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def pick(page: Page, *files: tuple[str, str, bytes]) -> None:
    payloads: list[FilePayload] = [{"name": name, "mimeType": kind, "buffer": data} for name, kind, data in files]
    page.locator("input.pick").set_input_files(payloads)


def transfer(page: Page, event: str, *files: tuple[str, str, bytes]) -> None:
    """Drop or paste, with the browser's own objects."""
    given = [[name, kind, base64.b64encode(data).decode()] for name, kind, data in files]
    page.evaluate(
        """([event, files]) => {
            const data = new DataTransfer();
            for (const [name, kind, text] of files) {
              const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
              data.items.add(new File([bytes], name, { type: kind }));
            }
            const target = document.getElementById("question");
            const made = event === "paste"
              ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
              : new DragEvent(event, { dataTransfer: data, bubbles: true, cancelable: true });
            target.dispatchEvent(made);
        }""",
        [event, given],
    )


def limited(page: Page, tokens: int) -> None:
    """The tiny model writes on until it is stopped; bound its answers."""
    page.evaluate(
        "(tokens) => localStorage.setItem('loadmaster.parameters', JSON.stringify({ max_tokens: String(tokens) }))",
        tokens,
    )
    page.reload()


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your question").fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def answers(page: Page) -> Locator:
    return page.locator(".message.assistant")


def finished(page: Page, count: int = 1) -> Locator:
    expect(answers(page)).to_have_count(count, timeout=LONG_S)
    last = answers(page).last
    expect(last).to_have_attribute("aria-busy", "false", timeout=LONG_S)
    return last


def asked_of_engine(requests: list[tuple[str, str, str | None]]) -> list[Any]:
    return [
        json.loads(body or "null") for method, url, body in requests if url.endswith("/answer") and method == "POST"
    ]


# ------------------------------------------------------------------------------------------- pictures and turns


def test_two_turns_about_pictures_that_are_picked_dropped_and_pasted(service: Served, look: Look) -> None:
    with look(address(service)) as (page, _):
        limited(page, 24)
        sent: list[tuple[str, str, str | None]] = []
        page.on("request", lambda r: sent.append((r.method, r.url, r.post_data if r.url.endswith("/answer") else None)))
        pick(page, ("one.png", "image/png", picture(colour="#cc3333")))
        transfer(page, "drop", ("two.jpg", "image/jpeg", picture(colour="#33cc33", kind="JPEG")))
        transfer(page, "paste", ("three.png", "image/png", picture(colour="#3333cc")))
        expect(page.locator(".preview.ready")).to_have_count(3)
        ask(page, "What is in these pictures?")
        first = finished(page)
        expect(first.locator(".numbers")).to_contain_text("to first token")
        expect(first.locator(".numbers")).to_contain_text("image tokens")
        expect(page.locator(".message.user figure img")).to_have_count(3)
        assert page.evaluate(
            "Promise.all([...document.querySelectorAll('.message.user figure img')].map((i) => i.decode())).then(() => true)"
        )
        ask(page, "And which is the largest?")
        finished(page, 2)
        puts = [url for method, url, _ in sent if method == "PUT"]
        assert len(puts) == len(set(puts)) == 3
        questions = asked_of_engine(sent)
        assert [len(question.get("pictures", [])) for question in questions] == [3, 0]
        assert all(len(json.dumps(question)) < 2000 for question in questions)
        expect(page.locator(".use")).to_contain_text("3 of 4 pictures")
        expect(page.locator(".top .title")).to_have_text("What is in these pictures?")
        expect(page.locator(".entry.open")).to_have_text("What is in these pictures?")


def test_a_photograph_is_turned_upright_and_scaled_to_the_cap(service: Served, look: Look) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying: the camera was turned
    with look(address(service)) as (page, _):
        cap = json.load(urllib.request.urlopen(f"{address(service)}/api/session"))["models"][0]["max_pixels"]
        pick(page, ("photo.jpg", "image/jpeg", picture(2400, 1600, kind="JPEG", exif=exif.tobytes())))
        about = page.locator(".preview.ready .about")
        expect(about).to_contain_text("1,600 × 2,400, sent as")
        width, height = (
            int(n.replace(",", "")) for n in re.findall(r"sent as ([\d,]+) × ([\d,]+)", about.inner_text())[0]
        )
        assert width < height
        assert width * height <= cap


def test_cropping_shows_fewer_tokens_and_sends_the_part(service: Served, look: Look) -> None:
    with look(address(service)) as (page, _):
        pick(page, ("wide.png", "image/png", picture(960, 640)))
        expect(page.locator(".preview.ready")).to_contain_text("600 tokens")
        page.get_by_role("button", name="Crop wide.png").click()
        page.get_by_role("button", name="Bottom right corner").focus()
        for _ in range(10):
            page.keyboard.press("Shift+ArrowLeft")
        expect(page.locator(".crop-numbers")).to_contain_text("instead of 600")
        page.get_by_role("button", name="Use this part").click()
        expect(page.locator(".preview.ready")).to_contain_text("960 × 640, sent as 460 × 640")
        expect(page.locator(".preview.ready")).to_contain_text("280 tokens")


def test_the_camera_takes_a_picture(service: Served, look: Look) -> None:
    with look(address(service), permissions=["camera"]) as (page, _):
        page.get_by_role("button", name="Take a photograph").click()
        page.get_by_role("button", name="Take", exact=True).click()
        expect(page.locator(".preview.ready")).to_contain_text("photograph.jpg")


def test_pictures_that_cannot_be_used_say_why(service: Served, look: Look) -> None:
    with look(address(service)) as (page, _):
        pick(
            page,
            ("broken.jpg", "image/jpeg", picture(kind="JPEG")[:200]),
            ("letter.png", "image/png", b"this is no picture"),
            ("empty.png", "image/png", b""),
            ("strip.png", "image/png", picture(2000, 8)),
            ("good.png", "image/png", picture()),
        )
        expect(page.locator(".preview.ready")).to_have_count(1)
        refused = page.locator(".preview.refused")
        expect(refused).to_have_count(4)
        expect(refused.nth(3)).to_contain_text("2,000 × 8 pixels is too thin a strip")
        expect(refused.nth(0)).to_contain_text("cannot read this as a picture")
        expect(refused.nth(2)).to_contain_text("This file is empty")
        for n in range(3):
            pick(page, (f"more{n}.png", "image/png", picture(colour=f"#{n}{n}{n}")))
        pick(page, ("fifth.png", "image/png", picture(colour="#fedcba")))
        expect(page.locator(".preview.refused").last).to_contain_text("The model reads 4 pictures at once")
        page.get_by_role("button", name="Remove letter.png").click()
        expect(page.locator(".preview.refused")).to_have_count(4)


def test_fifty_megabytes_are_scaled_before_they_are_sent(service: Served, look: Look, tmp_path: Path) -> None:
    file = tmp_path / "large.png"
    Image.linear_gradient("L").resize((4200, 4200)).convert("RGB").save(file, "PNG", compress_level=0)
    assert file.stat().st_size > 48_000_000
    with look(address(service)) as (page, _):
        page.locator("input.pick").set_input_files(file)
        expect(page.locator(".preview.ready")).to_contain_text("4,200 × 4,200, sent as", timeout=LONG_S)
        assert page.evaluate("document.querySelectorAll('.preview.refused').length") == 0


# ------------------------------------------------------------------------------------------- an answer's life


def test_stop_keeps_what_was_written_and_continue_goes_on(service: Served, look: Look) -> None:
    with look(address(service)) as (page, _):
        limited(page, 3000)
        ask(page, "Write a long story.")
        expect(page.locator(".markdown")).not_to_be_empty(timeout=LONG_S)
        page.get_by_role("button", name="Stop", exact=True).click()
        message = finished(page)
        expect(message).to_contain_text("Stopped. What was written is kept.")
        page.reload()
        message = finished(page)
        kept = message.locator(".markdown").inner_text()
        assert len(kept) > 10
        limited(page, 20)
        finished(page).get_by_role("button", name="Continue").click()
        expect(page.locator(".message.assistant .note", has_text="Stopped")).to_have_count(0, timeout=LONG_S)
        message = finished(page)
        assert len(message.locator(".markdown").inner_text()) > len(kept)


def test_a_reload_in_mid_stream_takes_the_answer_up_again(service: Served, look: Look) -> None:
    with look(address(service)) as (page, _):
        limited(page, 3900)
        ask(page, "Tell me more than you know.")
        expect(page.locator(".markdown")).not_to_be_empty(timeout=LONG_S)
        page.reload()
        finished(page)  # the tiny model may have ended meanwhile; a slow engine's reload is in test_page_service.py
        page.wait_for_timeout(500)
        text = page.locator(".markdown").text_content() or ""
        kept = page.evaluate("fetch('api' + location.hash.replace('#/c', '/conversations')).then((r) => r.json())")
        said = kept["messages"][1]["text"]
        letters = [len(re.sub(r"[\s\W_]", "", one)) for one in (said, text)]
        assert letters[0] == letters[1], "a piece is missing or twice"
        assert kept["messages"][1]["state"] == "done"


def test_regenerate_edit_and_resend(service: Served, look: Look) -> None:
    with look(address(service)) as (page, _):
        limited(page, 12)
        ask(page, "First question")
        finished(page)
        ask(page, "Second question")
        finished(page, 2)
        before = answers(page).last.locator(".markdown").inner_html()
        answers(page).last.get_by_role("button", name="Answer again").click()
        page.wait_for_function(
            "(before) => ![undefined, before].includes([...document.querySelectorAll('.markdown')][1]?.innerHTML)",
            arg=before,
        )
        finished(page, 2)
        page.locator(".message.user").first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit", exact=True).fill("A better first question")
        page.get_by_role("button", name="Send again").click()
        finished(page, 1)
        expect(page.locator(".message.user")).to_have_count(1)
        expect(page.locator(".message.user .said")).to_have_text("A better first question")


def test_parameters_are_sent_and_kept(service: Served, look: Look) -> None:
    with look(address(service)) as (page, _):
        page.get_by_role("button", name="Parameters").click()
        page.get_by_label("Longest answer, tokens").fill("7")
        page.get_by_label("System prompt").fill("Answer in one word.")
        page.reload()
        with page.expect_request(lambda request: request.url.endswith("/answer")) as sent:
            ask(page, "Hello")
        assert json.loads(sent.value.post_data or "")["parameters"] == {
            "max_tokens": 7,
            "system": "Answer in one word.",
        }
        message = finished(page)
        expect(message).to_contain_text("7 tokens of answer")
        expect(message).to_contain_text("The answer reached its longest length.")


def test_nothing_typed_is_lost(service: Served, look: Look) -> None:
    with look(address(service)) as (page, _):
        page.get_by_label("Your question").fill("A question that is not sent yet")
        pick(page, ("kept.png", "image/png", picture()))
        expect(page.locator(".preview.ready")).to_have_count(1)
        page.reload()
        expect(page.get_by_label("Your question")).to_have_value("A question that is not sent yet")
        expect(page.locator(".preview.ready")).to_contain_text("kept.png")


# ------------------------------------------------------------------------------------------- conversations


def test_conversations_are_found_renamed_exported_imported_and_deleted(
    service: Served, look: Look, tmp_path: Path
) -> None:
    with look(address(service), accept_downloads=True) as (page, _):
        limited(page, 8)
        pick(page, ("a.png", "image/png", picture()))
        expect(page.locator(".preview.ready")).to_have_count(1)
        ask(page, "Pelicans by the sea")
        finished(page)
        page.get_by_label("Search").fill("pelican")
        expect(page.locator(".entry")).to_have_count(1)
        page.get_by_role("button", name="Actions for Pelicans by the sea").click()
        page.get_by_role("menuitem", name="Rename").click()
        page.locator("input.rename").fill("Birds")
        page.keyboard.press("Enter")
        expect(page.locator(".entry .title")).to_have_text("Birds")
        files = {}
        for name in ("Export as JSON", "Export as Markdown"):
            page.get_by_role("button", name="Actions for Birds").click()
            with page.expect_download() as download:
                page.get_by_role("menuitem", name=name).click()
            files[name] = tmp_path / download.value.suggested_filename
            download.value.save_as(files[name])
        assert [file.suffix for file in files.values()] == [".json", ".zip"]
        page.get_by_role("button", name="Actions for Birds").click()
        page.get_by_role("menuitem", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.locator(".entry")).to_have_count(0)
        page.get_by_role("button", name="Settings").click()
        page.locator("dialog input[type=file]").set_input_files(files["Export as Markdown"])
        expect(page.locator(".top .title")).to_have_text("Birds")
        expect(page.locator(".message.user figure img")).to_have_count(1)


# ------------------------------------------------------------------------------------------- the engine dies


def test_an_engine_killed_in_mid_answer_leaves_the_text_and_a_retry_works(service: Served, look: Look) -> None:
    with look(address(service)) as (page, watched):
        watched.expected = ["503 (Service Unavailable)"]
        limited(page, 3900)
        ask(page, "Count to a million.")
        expect(page.locator(".markdown")).not_to_be_empty(timeout=LONG_S)
        kill_engine(service)
        message = finished(page)
        expect(message.get_by_role("alert")).to_contain_text("The answer broke off; what was written is kept.")
        assert len(message.locator(".markdown").inner_text()) > 5
        page.get_by_label("Your question").fill("typed while it was down")
        service.until(lambda status: status.healthy is True, "the engine again")
        limited(page, 12)
        expect(page.get_by_label("Your question")).to_have_value("typed while it was down")
        finished(page).get_by_role("button", name="Try again").click()
        expect(page.locator(".message.assistant").get_by_role("alert")).to_have_count(0, timeout=LONG_S)
        message = finished(page)
        assert message.locator(".markdown").inner_text()
