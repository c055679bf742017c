"""What is written goes where it was sent from, and nothing that is written gets lost: drafts, edits, answers, tabs."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

from PIL import Image
from playwright.sync_api import FilePayload, Page, Route, expect

from tests.page.scripted import Script, ScriptedServer, message_of

Look = Callable[..., Any]
ANSWER: list[tuple[float, str, dict[str, Any]]] = [(0, "delta", {"text": "Yes."}), (0, "done", {"state": "done"})]


def url(server: ScriptedServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def png(colour: str) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (320, 240), colour).save(content, "PNG")
    return content.getvalue()


def pick(page: Page, *colours: str) -> None:
    files: list[FilePayload] = [
        {"name": f"{colour}.png", "mimeType": "image/png", "buffer": png(colour)} for colour in colours
    ]
    page.locator("input.pick").set_input_files(files)


def hold(held: list[Route], route: Route) -> None:
    held.append(route)


def old_turn(text: str) -> list[dict[str, Any]]:
    return [message_of("q1", "user", text), message_of("a1", "assistant", "An old answer.")]


def test_a_question_goes_where_enter_was_pressed(script: Script, scripted: ScriptedServer, look: Look) -> None:
    old = scripted.add("Old", old_turn("Hello"))
    script.pieces = ANSWER
    held: list[Route] = []
    with look(url(scripted), f"/#/c/{old['id']}") as (page, _):
        page.route("**/api/pictures/*", lambda route: hold(held, route))
        pick(page, "red")
        expect(page.locator(".preview.ready")).to_be_visible()
        page.locator("#question").fill("About the red one")
        page.keyboard.press("Enter")
        expect(page.locator(".message.pending")).to_be_visible()
        page.locator("button.new").click()
        expect(page.locator(".empty-chat")).to_be_visible()
        expect(page.locator(".message.pending")).to_have_count(0)
        expect(page.locator(".preview")).to_have_count(0)
        page.locator("#question").fill("Something else")
        for route in held:
            route.continue_()
        page.unroute("**/api/pictures/*")
        expect(page.locator(".entry")).to_have_count(1)
        page.wait_for_function("localStorage['loadmaster.draft.c1'] === ''")
        expect(page.locator("#question")).to_have_value("Something else")
        expect(page.locator(".empty-chat")).to_be_visible()
        page.locator(".entry a").click()
        expect(page.locator(".message.user .said").last).to_have_text("About the red one")
        expect(page.locator(".message.user").last.locator("figure img")).to_have_count(1)
        expect(page.locator(".preview")).to_have_count(0)
        expect(page.locator("#question")).to_have_value("")
    assert len(script.conversations) == 1
    assert [len(one["pictures"]) for one in script.asked] == [1]


def test_what_is_added_while_a_question_is_sent_stays(script: Script, scripted: ScriptedServer, look: Look) -> None:
    script.pieces = ANSWER
    held: list[Route] = []
    with look(url(scripted)) as (page, _):
        page.route("**/api/conversations/*/answer", lambda route: hold(held, route))
        page.locator("#question").fill("The first")
        page.keyboard.press("Enter")
        expect(page.locator(".message.pending")).to_be_visible()
        page.keyboard.type(" and the second")
        pick(page, "blue")
        expect(page.locator(".preview.ready")).to_be_visible()
        held[0].continue_()
        expect(page.locator(".message.assistant .markdown")).to_have_text("Yes.")
        expect(page.locator("#question")).to_have_value("and the second")
        expect(page.locator(".preview.ready")).to_contain_text("blue.png")
        page.reload()
        expect(page.locator("#question")).to_have_value("and the second")
        expect(page.locator(".preview.ready")).to_contain_text("blue.png")
    assert [one["text"] for one in script.asked] == ["The first"]


def test_a_picture_too_many_is_sent_by_no_accident_and_taken_when_one_goes(
    script: Script, scripted: ScriptedServer, look: Look
) -> None:
    script.session["models"][0]["max_images"] = 2
    script.pieces = ANSWER
    with look(url(scripted)) as (page, _):
        pick(page, "red", "red", "blue")
        expect(page.locator(".preview.refused")).to_contain_text("blue.png")
        expect(page.locator(".use")).to_contain_text("2 of 2 pictures")
        page.locator("#question").fill("Which?")
        page.keyboard.press("Enter")
        expect(page.locator(".composer .banner")).to_contain_text("A picture here cannot be sent.")
        assert script.asked == []
        page.get_by_role("button", name="Remove red.png").first.click()
        expect(page.locator(".preview.refused")).to_have_count(0)
        expect(page.locator(".preview.ready")).to_have_count(2)
        page.locator(".send").click()
        expect(page.locator(".message.user figure")).to_have_count(2)


def test_text_and_a_picture_are_pasted_together(scripted: ScriptedServer, look: Look) -> None:
    with look(url(scripted)) as (page, _):
        prevented = page.evaluate(
            """(letters) => {
                const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
                return ["A caption", "shot.png", ""].map((text) => {
                  const data = new DataTransfer();
                  data.items.add(new File([bytes], "shot.png", { type: "image/png" }));
                  data.setData("text/plain", text);
                  const made = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
                  document.getElementById("question").dispatchEvent(made);
                  return made.defaultPrevented;
                });
            }""",
            base64.b64encode(png("red")).decode(),
        )
        assert prevented == [False, True, True]  # the browser itself puts in the text of the first
        expect(page.locator(".preview.ready")).to_have_count(3)


def test_a_good_answer_stays_when_a_new_one_fails(script: Script, scripted: ScriptedServer, look: Look) -> None:
    old = scripted.add("Old", old_turn("Hello"))
    script.pieces = [(0, "error", {"code": "engine_error", "message": "CUDA error"})]
    with look(url(scripted), f"/#/c/{old['id']}") as (page, _):
        page.get_by_role("button", name="Answer again").click()
        alert = page.locator(".message.assistant").get_by_role("alert")
        expect(alert).to_contain_text("No new answer came. This one is kept.")
        expect(alert).to_contain_text("The engine failed over this question; its log may say why.")
        expect(page.locator(".markdown")).to_have_text("An old answer.")
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit", exact=True).fill("Hello again")
        page.get_by_role("button", name="Send again").click()
        expect(page.locator("textarea[aria-label=Edit]")).to_have_count(0)
        expect(alert).to_contain_text("No new answer came.")
        expect(page.locator(".said")).to_have_text("Hello")
        expect(page.locator(".markdown")).to_have_text("An old answer.")
        script.pieces = ANSWER
        page.get_by_role("button", name="Edit").click()
        expect(page.get_by_label("Edit", exact=True)).to_have_value("Hello again")
        page.get_by_role("button", name="Send again").click()
        expect(page.locator(".markdown")).to_have_text("Yes.")
        expect(page.locator(".said")).to_have_text("Hello again")
        page.reload()
        expect(page.locator(".markdown")).to_have_text("Yes.")
        expect(page.locator("textarea[aria-label=Edit]")).to_have_count(0)
    assert [one.get("text") for one in script.asked] == [None, "Hello again", "Hello again"]


def test_an_edit_outlives_escape_and_a_reload(scripted: ScriptedServer, look: Look) -> None:
    old = scripted.add("Old", old_turn("Hello"))
    with look(url(scripted), f"/#/c/{old['id']}") as (page, _):
        area = page.get_by_label("Edit", exact=True)
        page.get_by_role("button", name="Edit").click()
        area.fill("Changed")
        for key in ("Escape", "Enter"):  # an input method's own keys
            area.evaluate(
                "(node, key) => node.dispatchEvent(new KeyboardEvent('keydown',"
                " { key, ctrlKey: true, isComposing: true, bubbles: true }))",
                key,
            )
        expect(area).to_have_value("Changed")
        page.keyboard.press("Escape")
        expect(page.locator(".said")).to_have_text("Hello")
        page.reload()
        expect(area).to_have_value("Changed")
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Edit").click()
        expect(area).to_have_value("Hello")
