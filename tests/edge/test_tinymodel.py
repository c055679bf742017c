"""The tiny model: the same bytes everywhere, read by our own reader, and answered with by the real engine."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from loadmaster.core.facts import EngineFacts, HostFacts, LaunchArgs
from loadmaster.core.hostplan import make_host_plan
from loadmaster.edge import tinymodel
from loadmaster.edge.gguf import read_gguf
from loadmaster.edge.ggufheader import read_header


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    begin = time.monotonic()
    written = tinymodel.write_tiny_model(tmp_path_factory.mktemp("tiny") / "new" / "folder")
    assert time.monotonic() - begin < 5
    return written


def test_the_bytes_are_the_same_everywhere(files: tuple[Path, Path]) -> None:
    digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files]
    assert digests == ["67aeda76d5adeac7", "dfd688c2d7273dee"]


def test_it_is_small_whole_and_marked_as_random(files: tuple[Path, Path]) -> None:
    for path in files:
        assert path.stat().st_size < 4 << 20
        assert read_header(path).metadata[tinymodel.RANDOM_KEY] is True
    facts = read_gguf(*files)
    assert facts.architecture == "qwen35"
    assert facts.findings == ()
    assert facts.vision is not None
    assert facts.text.layer_types == ("linear_attention",) * 3 + ("full_attention",)


def test_it_fits_into_a_small_host(files: tuple[Path, Path]) -> None:
    host = HostFacts(memory_total_bytes=2 << 30, memory_available_bytes=1 << 30)
    flags = ("--ctx-size", "16384", "--parallel", "4", "--image-max-tokens", "1024", "--cache-ram", "64")
    launch = LaunchArgs(model=str(files[0]), argv=flags)
    sheet = make_host_plan(read_gguf(*files), host, launch, EngineFacts("llamacpp"))
    assert sheet.fits is True


@pytest.fixture(scope="module")
def address(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("engine") / "log"
    model, projector = files
    argv = [sys.executable, "-m", "loadmaster.engines.llamacpp_server", "--model", str(model)]
    argv += ["--mmproj", str(projector), "--alias", "tiny", "--port", str(port)]
    with log.open("wb") as output:
        engine = subprocess.Popen(argv, stdout=output, stderr=output, start_new_session=True)
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                assert engine.poll() is None, log.read_text(errors="replace")[-2000:]
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                        break
                except OSError:
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            engine.kill()
            engine.wait(10)


def ask(address: str, content: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body | more).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def picture(colour: str) -> list[dict[str, Any]]:
    file = io.BytesIO()
    Image.new("RGB", (256, 192), colour).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]


def test_the_real_engine_answers_in_printable_letters(address: str) -> None:
    answer = ask(address, "Hello")
    text = answer["choices"][0]["message"]["content"]
    assert len(text) == 16
    assert all(" " <= letter <= "~" for letter in text)
    assert ask(address, "Hello")["choices"][0]["message"]["content"] == text


def test_the_real_engine_sees_a_picture(address: str) -> None:
    red, blue = (ask(address, picture(colour)) for colour in ("red", "blue"))
    for answer in (red, blue):
        assert answer["usage"]["prompt_tokens"] > 48  # 256 x 192 pixels are 8 x 6 merged patches
        assert answer["choices"][0]["message"]["content"]
    assert red["choices"][0]["message"]["content"] != blue["choices"][0]["message"]["content"]


def test_the_real_engine_keeps_to_a_schema(address: str) -> None:
    schema = {"type": "object", "properties": {"shape": {"enum": ["circle", "square"]}}, "required": ["shape"]}
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "shape", "schema": schema | {"additionalProperties": False}},
    }
    answer = ask(address, "Hello", response_format=wanted, max_tokens=100)
    assert json.loads(answer["choices"][0]["message"]["content"])["shape"] in ("circle", "square")
