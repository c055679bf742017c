"""Every state of the page as a picture, to be looked at: ``scripts/screenshots [FOLDER] [STATE ...]``.

``scripts/screenshots --readme`` draws the four that the README shows into docs/images.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from playwright.sync_api import Browser, FilePayload, Page, sync_playwright

from tests.page.chromium import chromium, launched
from tests.page.conftest import scripted_server
from tests.page.scripted import STATIC, Script, ScriptedServer, message_of

PLAN = Path(__file__).parents[1] / "data" / "page" / "plan.json"
DEVICES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1440, "height": 900}},
    "phone": {
        "viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True,
    },
}  # fmt: skip
LOCALES = {"en": "en-US", "zh": "zh-CN"}
NUMBERS = {
    "first_token_s": 0.33,
    "tokens_per_s": 215.0,
    "prompt_tokens": 1102,
    "completion_tokens": 148,
    "image_tokens": 1024,
}
WORDS = {
    "en": {
        "question": "What is on the table, and what does it cost?",
        "second": "Which colour is the cat?",
        "titles": ("Cat on a table", "Receipt from the station", "How many red circles are there?", "Wiring of the fuse box with an extraordinarilylongunbrokenword"),
        "answer": (
            "A **black cat** sits on a brown table.\n\n| thing | place | price |\n|---|---|---:|\n| cat | on the table | – |\n"
            "| table | in the middle | 1,290.00 |\n\nIts area is $w \\cdot h = 1.2 \\times 0.7$, so:\n\n"
            "```python\nwidth, height = 1.2, 0.7\nprint(f\"{width * height:.2f} m²\")\n```\n\n1. The cat looks at you.\n2. The wall is light blue."
        ),
        "thought": "The picture shows a cat. The user asks about the table and a price; no price is visible.",
        "short": "The cat is black, with yellow eyes.",
    },
    "zh": {
        "question": "桌上有什么？多少钱？",
        "second": "猫是什么颜色的？",
        "titles": ("桌上的猫", "车站的收据", "有几个红色的圆形？", "配电箱接线图与一段很长很长没有空格的标题文字用来检查省略"),
        "answer": (
            "一只**黑猫**坐在棕色的桌子上。\n\n| 物品 | 位置 | 价格 |\n|---|---|---:|\n| 猫 | 桌上 | – |\n| 桌子 | 中间 | 1,290.00 |\n\n"
            "面积为 $w \\cdot h = 1.2 \\times 0.7$，因此：\n\n```python\nwidth, height = 1.2, 0.7\nprint(f\"{width * height:.2f} m²\")\n```\n\n"
            "1. 猫在看你。\n2. 墙是浅蓝色的。"
        ),
        "thought": "图中有一只猫。用户询问桌子和价格，但看不到价格。",
        "short": "猫是黑色的，眼睛是黄色的。",
    },
}  # fmt: skip
FINDING = {
    "code": "oom-runtime",
    "severity": "error",
    "title": "Out of memory while serving",
    "cause": "A picture of 4096 x 4096 pixels took 2.0 GiB more than the budget on both cards.",
    "evidence": [{"source": "log", "line": 412, "text": "torch.OutOfMemoryError: CUDA out of memory."}],
    "fixes": [
        {"argv": ["--mm-processor-kwargs", '{"max_pixels": 1048576}'], "env": {}, "command": None, "why": "pictures are scaled down before they reach the tower", "replanned": True}
    ],
    "confidence": "certain",
}  # fmt: skip


class Shot(NamedTuple):
    """A state. ``script`` prepares the server, ``act`` brings the page into it; ``path`` is where it opens."""

    script: Callable[[Script, ScriptedServer, dict[str, Any]], str]
    act: Callable[[Page, dict[str, Any]], None] = lambda page, words: page.wait_for_timeout(300)


def _conversations(server: ScriptedServer, words: dict[str, Any]) -> None:
    for place, title in enumerate(words["titles"]):
        server.add(title, [], age_s=place * 50_000)


def _cat(script: Script) -> dict[str, Any]:
    content = (STATIC / "examples" / "cat.png").read_bytes()
    script.pictures["a" * 64] = (content, "image/png")
    width, height = Image.open(io.BytesIO(content)).size
    return {
        "sha256": "a" * 64,
        "width": width,
        "height": height,
        "original_width": 4032,
        "original_height": 3024,
        "name": "cat.png",
    }


def _talk(script: Script, server: ScriptedServer, words: dict[str, Any], **last: Any) -> str:
    first = message_of("m1", "user", words["question"], pictures=[_cat(script)])
    second = message_of("m2", "assistant", words["answer"], numbers=NUMBERS, thinking=words["thought"])
    third = message_of("m3", "user", words["second"])
    fourth = message_of("m4", "assistant", words["short"], numbers=NUMBERS | {"image_tokens": 1024}) | last
    one = server.add(words["titles"][0], [first, second, third, fourth])
    return f"/#/c/{one['id']}"


def _empty(script: Script, server: ScriptedServer, words: dict[str, Any]) -> str:
    return "/"


def _with(**changes: Any) -> Callable[[Script, ScriptedServer, dict[str, Any]], str]:
    """A conversation, with these attributes of the script."""

    def prepare(script: Script, server: ScriptedServer, words: dict[str, Any]) -> str:
        for name, value in changes.items():
            if name == "session":
                script.session |= value
            elif name == "model":
                script.session["models"][0] |= value
            elif name != "last":
                setattr(script, name, value)
        _conversations(server, words)
        return _talk(script, server, words, **changes.get("last", {}))

    return prepare


def _panel(tab: str) -> Callable[[Page, dict[str, Any]], None]:
    def act(page: Page, words: dict[str, Any]) -> None:
        if page.locator("#panel").count() == 0:
            page.locator("[aria-controls=panel]").click()
        page.locator(f"#tab-{tab}").click()
        page.wait_for_timeout(1200)

    return act


def _ask(page: Page, words: dict[str, Any]) -> None:
    page.locator("#question").fill(words["second"])
    page.locator(".send").click()
    page.wait_for_timeout(1200)


def _attach(*files: tuple[str, bytes]) -> Callable[[Page, dict[str, Any]], None]:
    def act(page: Page, words: dict[str, Any]) -> None:
        payloads: list[FilePayload] = [{"name": n, "mimeType": "image/png", "buffer": data} for n, data in files]
        page.locator("input.pick").set_input_files(payloads)
        page.locator("#question").fill(words["question"])
        page.wait_for_timeout(1200)

    return act


def _crop(page: Page, words: dict[str, Any]) -> None:
    _attach(("receipt.png", _drawn(1600, 1200)))(page, words)
    page.locator(".preview-tools button").first.click()
    page.locator(".handle.se").focus()
    for _ in range(8):
        page.keyboard.press("Shift+ArrowLeft")
        page.keyboard.press("Shift+ArrowUp")
    page.wait_for_timeout(200)


def _click(*selectors: str) -> Callable[[Page, dict[str, Any]], None]:
    def act(page: Page, words: dict[str, Any]) -> None:
        for selector in selectors:
            target = page.locator(selector).first
            if target.is_visible():
                target.click()
        page.wait_for_timeout(300)

    return act


def _open_thinking(page: Page, words: dict[str, Any]) -> None:
    page.locator(".thinking summary").first.click()
    page.locator(".thread").evaluate("(node) => (node.scrollTop = 0)")
    page.wait_for_timeout(200)


def _offline(page: Page, words: dict[str, Any]) -> None:
    page.context.set_offline(True)
    page.locator("#question").fill(words["second"])
    page.wait_for_timeout(400)


def _drawn(width: int, height: int) -> bytes:
    image = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    image.paste(
        Image.open(STATIC / "examples" / "number.png").convert("RGB").resize((width // 2, height // 2)), (60, 60)
    )
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


SLOW = [(0.0, "delta", {"thinking": "…"}), (30.0, "done", {"state": "done"})]
STEPS = [
    {"step": {"name": "models", "kind": "transport", "status": "passed", "seconds": 0.02, "detail": "lists Qwen3.5-35B-A3B"}},
    {"step": {"name": "stream", "kind": "transport", "status": "passed", "seconds": 0.42, "detail": "38 chunks, usage, [DONE]"}},
    {"step": {"name": "image-colour", "kind": "answer", "status": "failed", "seconds": 0.61, "detail": "asked for the circle's colour, expected red, answered blue"}},
    {"step": {"name": "cards", "kind": "transport", "status": "not_applicable", "seconds": 0.0, "detail": "one card is planned"}},
    {"done": True, "ok": False},
]  # fmt: skip
SHOTS: dict[str, Shot] = {
    "empty": Shot(_empty),
    "talk": Shot(_with()),
    "thinking": Shot(_with(), _open_thinking),
    "waiting": Shot(_with(pieces=SLOW), _ask),
    "queued": Shot(_with(pieces=[(0.0, "queue", {"place": 3}), (30.0, "done", {"state": "done"})]), _ask),
    "stopped": Shot(_with(last={"state": "stopped"})),
    "failed": Shot(_with(last={"state": "failed", "error": {"code": "engine_lost", "message": "", "findings": [FINDING]}})),
    "queue-full": Shot(_with(refusal=(429, "queue_full", "the queue is full")), _ask),
    "loading": Shot(_with(engine={"state": "loading", "phase": "loading", "seconds": 41, "words": None})),
    "down": Shot(_with(engine={"state": "failed", "phase": None, "seconds": 3, "words": None, "finding": FINDING})),
    "context": Shot(_with(model={"context_tokens": 1300})),
    "pictures": Shot(
        _with(), _attach(("large-photograph-with-a-long-name.png", _drawn(3000, 2000)), ("broken.png", b"no picture"), ("a.png", _drawn(300, 300)))
    ),
    "crop": Shot(_with(), _crop),
    "parameters": Shot(_with(), _click("[aria-controls=parameters]")),
    "settings": Shot(_with(), _click(".only-narrow", ".sidebar footer button")),
    "menu": Shot(_with(), _click(".only-narrow", ".entry .icon-button")),
    "offline": Shot(_with(), _offline),
    "key": Shot(_with(key="secret")),
    "read-only": Shot(_with(session={"read_only": "The disk is full: make room on the file system of /var/lib/loadmaster.", "storage": "browser"})),
    "card-missing": Shot(_with(cards=1)),
    "panel-load": Shot(_with(findings=[FINDING]), _panel("load")),
    "panel-live": Shot(_with(), _panel("live")),
    "panel-log": Shot(_with(), _panel("log")),
    "panel-check": Shot(_with(steps=STEPS), _panel("check")),
}  # fmt: skip
README = {
    "page-chat": ("thinking", "en", "light", "desktop"),
    "page-live": ("panel-live", "zh", "dark", "desktop"),
    "page-down": ("down", "en", "light", "desktop"),
    "page-phone": ("thinking", "zh", "dark", "phone"),
}
LOG = [
    "(APIServer pid=4363) INFO 11-30 20:17:45 [api_utils.py:273] non-default args: {'model': 'Qwen3.5-35B-A3B-AWQ-4bit', 'tensor_parallel_size': 2}",
    "(Worker_TP0 pid=4365) INFO 11-30 20:17:52 [gpu_model_runner.py:5255] Model loading took 11.30 GiB memory and 7.0 seconds",
    "(Worker_TP0 pid=4365) WARNING 11-30 20:17:53 [custom_all_reduce.py:144] Custom allreduce is disabled",
    "(EngineCore pid=4364) INFO 11-30 20:17:58 [kv_cache_utils.py:1307] GPU KV cache size: 831,162 tokens",
    "(APIServer pid=4363) INFO:     Application startup complete.",
] * 3  # fmt: skip


def draw(browser: Browser, folder: Path, name: str, shot: Shot, language: str, theme: str, device: str) -> None:
    script = Script()
    script.plan = json.loads(PLAN.read_text())
    script.log = LOG
    words = WORDS[language]
    with scripted_server(script) as server:
        path = shot.script(script, server, words)
        context = browser.new_context(locale=LOCALES[language], color_scheme=theme, **DEVICES[device])  # type: ignore[arg-type]
        page = context.new_page()
        try:
            page.goto(f"http://127.0.0.1:{server.port}{path}")
            page.wait_for_selector(".message, .example, .login")
            page.wait_for_timeout(350)
            shot.act(page, words)
            page.screenshot(path=folder / f"{name}-{language}-{theme}-{device}.png")
        finally:
            context.close()


def readme(browser: Browser, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (shot, language, theme, device) in README.items():
        draw(browser, folder, name, SHOTS[shot], language, theme, device)
        drawn = folder / f"{name}-{language}-{theme}-{device}.png"
        with Image.open(drawn) as image:
            image.save(folder / f"{name}.webp", quality=82, method=6)
        drawn.unlink()


def every(browser: Browser, folder: Path, only: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, shot in SHOTS.items():
        if only and name not in only:
            continue
        for language, theme, device in itertools.product(LOCALES, ("light", "dark"), DEVICES):
            draw(browser, folder, name, shot, language, theme, device)


def main(words: list[str]) -> None:
    path = chromium()
    if path is None:
        sys.exit("screenshots need Chromium\nhint: apt-get install --no-install-recommends chromium fonts-noto-cjk")
    with sync_playwright() as playwright:
        browser = launched(playwright, path)
        if words[0] == "--readme":
            readme(browser, Path(__file__).parents[2] / "docs" / "images")
        else:
            every(browser, Path(words[0]), words[1:])
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
