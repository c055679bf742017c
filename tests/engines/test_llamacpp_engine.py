"""llama.cpp in its child program: the command, real loads, real answers, and each way of failing."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadmaster.core.deployment import Deployment
from loadmaster.core.enginelog import LogReader
from loadmaster.edge.process import Child, Exit
from loadmaster.engines.base import EngineCommand, EngineError, engine_for
from loadmaster.engines.llamacpp import LlamaCppEngine, parameters
from loadmaster.engines.png import data_url, gradient
from loadmaster.engines.readiness import wait_ready, warm_up, warm_up_picture
from tests.gguf_writer import projector, text_model, write_gguf
from tests.running import free_port, until

needs_engine = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_gguf(folder / "model.gguf", *text_model("qwen3vl"))
    write_gguf(folder / "mmproj.gguf", *projector())
    return folder


def deployment(folder: Path, *flags: str, picture: bool = True, model: str = "model.gguf", **engine: Any) -> Deployment:
    raw = {"name": "tiny", "model": str(folder / model), "engine": {"kind": "llamacpp", "flags": list(flags), **engine}}
    if picture:
        raw["projector"] = str(folder / "mmproj.gguf")
    return msgspec.convert(raw, Deployment)


# --------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-c", "4096", "-np", "2"], ["n_ctx=4096", "n_parallel=2"]),
        (["-ctk", "q8_0"], ["cache_type_k=GGML_TYPE_Q8_0"]),
        (["-fa", "off"], ["flash_attn_type=LLAMA_FLASH_ATTN_TYPE_DISABLED"]),
        (["--no-mmap", "--no-repack"], ["load_mode=LLAMA_LOAD_MODE_NONE", "no_extra_bufts=True"]),
        (["--metrics", "--no-warmup", "-t", "1"], ["warmup=False", "cpuparams.n_threads=1"]),
        (["--fit", "off"], ["fit_params=False"]),
        ([], []),
    ],
)
def test_flags_become_parameters(flags: list[str], expected: list[str]) -> None:
    words = parameters(flags)
    assert words[0::2] == ["--set"] * len(expected)
    assert words[1::2] == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-such-flag"], "--no-such-flag: not known"),
        (["-c", "many"], "--ctx-size many|-c many"),
        (["--port", "9"], "--port is not for engine.flags"),
        (["-m", "x"], "--model is not for engine.flags"),
        (["--chat-template-file", "/no/such/file"], "cannot be read"),
    ],
)
def test_flags_that_cannot_be_taken(flags: list[str], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        parameters(flags)


def test_every_flag_of_the_plan_has_a_parameter() -> None:
    from loadmaster.core.tables import load_toml

    known = set(load_toml("llamacpp-parameters.toml")["flag"])
    assert {entry["name"] for entry in load_toml("llamacpp.toml")["flag"]} == known


@needs_engine
def test_every_parameter_exists_in_the_engine(tmp_path: Path) -> None:
    """Each flag of the table is set in the real engine's parameters, in a child as always."""
    samples = {"count": "2", "type": "q8_0", "path": "3", "size": "1"}
    from loadmaster.core.tables import load_toml

    flags: list[str] = []
    for entry in load_toml("llamacpp.toml")["flag"]:
        mapped = load_toml("llamacpp-parameters.toml")["flag"][entry["name"]]
        if "refused" in mapped or mapped.get("file"):
            continue
        if entry["takes"] == "switch":
            flags += [entry["name"], *entry.get("negative", [])[:1]]
        else:
            flags += [entry["name"], entry.get("choices", [samples.get(entry["takes"], "2")])[0]]
    code = (
        "import sys, xllamacpp\n"
        "from loadmaster.engines.llamacpp_server import arguments, build\n"
        "options = arguments(['--model', 'm', '--port', '1', '--alias', 'a', *sys.argv[1:]])\n"
        "made = build(options, xllamacpp)\n"
        "print(made.n_ctx, made.n_parallel, made.hostnames, made.endpoint_metrics, made.endpoint_slots, made.api_keys)"
    )
    child = Child.start(EngineCommand(argv=(sys.executable, "-c", code, *parameters(flags))), tmp_path / "log")
    assert child.wait(60) == Exit(code=0), (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text() == "2 2 ['127.0.0.1'] True False ['3']\n"


def test_files_that_are_missing(tmp_path: Path) -> None:
    engine = LlamaCppEngine()
    with pytest.raises(EngineError, match="no GGUF file"):
        engine.command(deployment(tmp_path, picture=False), None, 1)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(EngineError, match="no projector"):
        engine.command(deployment(tmp_path), None, 1)


def test_another_python_gets_the_program_as_a_file(files: Path) -> None:
    command = LlamaCppEngine("/opt/python").command(deployment(files), None, 8001)
    assert command.argv[0] == "/opt/python"
    assert command.argv[1].endswith("llamacpp_server.py")
    assert command.env["OMP_WAIT_POLICY"] == "passive"


def test_names_and_keys(files: Path) -> None:
    engine = LlamaCppEngine()
    assert engine.served_model(deployment(files)) == "tiny"
    assert engine.served_model(deployment(files, "--alias", "other")) == "other"
    assert engine.api_key(deployment(files, "--api-key", "k")) == "k"
    assert engine.api_key(deployment(files)) is None
    assert engine.fixed_port(deployment(files)) is None


# --------------------------------------------------------------------------------------- the real engine


class Service:
    def __init__(self, subject: Deployment, folder: Path) -> None:
        self.engine = engine_for(subject)
        self.deployment = subject
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "engine.log"
        self.child = Child.start(self.engine.command(subject, None, self.port), self.log)

    def ask(self, body: Any, path: str = "/v1/chat/completions") -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
                return answer.status, json.loads(text) if text.startswith("{") else text
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def service(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    subject = deployment(files, "-c", "8192", "-np", "2", "--image-max-tokens", "256", "-t", "1", "-tb", "1")
    running = Service(subject, tmp_path_factory.mktemp("service"))
    try:
        said: list[str] = []
        asyncio.run(
            wait_ready(
                running.url, "tiny", None, time.monotonic() + 60, lambda: running.child.poll() is None, said.append
            )
        )
        yield running
    finally:
        stopped = running.child.stop(term_s=10)
        assert stopped.exit == Exit(code=0)
        assert (stopped.killed, stopped.left) == ((), ())


def test_it_answers_about_a_picture(service: Service) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(gradient(160, 96))}},
        {"type": "text", "text": "Which colours?"},
    ]
    status, answer = service.ask({"messages": [{"role": "user", "content": parts}], "max_tokens": 3})
    assert status == 200, answer
    assert answer["model"] == "tiny"
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["prompt_tokens"] > 15, "the picture's tokens are among them"


def test_a_slot_has_its_share_of_the_context(service: Service) -> None:
    status, answer = service.ask({"prompt": "a " * 5000, "max_tokens": 1}, "/v1/completions")
    assert status == 400
    assert "4096 tokens" in answer


def test_its_metrics_are_read(service: Service) -> None:
    before = service.engine.running_waiting_tokens(service.ask(None, "/metrics")[1])
    service.ask({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
    after = service.engine.running_waiting_tokens(service.ask(None, "/metrics")[1])
    assert before is not None
    assert after is not None
    assert (after.running, after.waiting) == (0, 0)
    assert (after.steps or 0) > (before.steps or 0)


def test_the_prompts_of_others_are_not_shown(service: Service) -> None:
    assert service.ask(None, "/slots")[0] in (403, 404, 501)


def test_pages_of_others_may_not_read_it(service: Service) -> None:
    request = urllib.request.Request(f"{service.url}/v1/models", headers={"origin": "http://evil.example"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert "evil" not in (answer.headers.get("access-control-allow-origin") or "")


def test_files_are_not_read(service: Service) -> None:
    content = [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]
    assert service.ask({"messages": [{"role": "user", "content": content}], "max_tokens": 1})[0] == 400


def test_phases_of_its_log(service: Service) -> None:
    engine = engine_for(service.deployment)
    lines = service.log.read_text().splitlines()
    assert [phase for line in lines if (phase := engine.phase(line))] == ["loading", "serving"]
    assert all(LogReader("llamacpp-log.toml").failure(line) is None for line in lines)


def test_warm_up_with_the_largest_picture(service: Service) -> None:
    picture = warm_up_picture(msgspec.structs.replace(service.deployment), None)
    assert picture == (512, 512)
    done = asyncio.run(warm_up(service.url, "tiny", None, picture=picture))
    assert done.problems == ()
    assert (done.text_s or 0) > 0
    assert (done.picture_s or 0) > 0


@needs_engine
def test_its_version() -> None:
    assert (LlamaCppEngine().detect_version() or "").startswith("20")
    assert LlamaCppEngine("/no/such/python").detect_version() is None


def run_to_the_end(command: EngineCommand, folder: Path) -> tuple[Exit | None, LogReader, str]:
    child = Child.start(command, folder / "log")
    try:
        ended = child.wait(60)
    finally:
        child.stop(term_s=0.5)
    text = (folder / "log").read_text(errors="replace")
    reader = LogReader("llamacpp-log.toml")
    for line in text.splitlines():
        reader.failure(line)
    return ended, reader, text


@needs_engine
@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        ("junk", "header-invalid"),
        ("cut", "weights-truncated"),
        ("projector as model", "config-invalid"),
        ("junk projector", "header-invalid"),
        ("model as projector", "processor-missing"),
    ],
)
def test_damaged_files_are_named(files: Path, tmp_path: Path, damage: str, cause: str) -> None:
    model, tower = (files / "model.gguf").read_bytes(), (files / "mmproj.gguf").read_bytes()
    junk = bytes(range(256)) * 12
    whole = {
        "junk": (junk, None),
        "cut": (model[: len(model) // 2], None),
        "projector as model": (tower, None),
        "junk projector": (model, junk),
        "model as projector": (model, model),
    }[damage]
    (tmp_path / "model.gguf").write_bytes(whole[0])
    if whole[1] is not None:
        (tmp_path / "mmproj.gguf").write_bytes(whole[1])
    subject = deployment(tmp_path, picture=whole[1] is not None)
    ended, reader, text = run_to_the_end(LlamaCppEngine().command(subject, None, free_port()), tmp_path)
    assert ended == Exit(code=1), text
    assert reader.cause == cause, text
    assert "the engine did not start" in text


@needs_engine
def test_a_port_that_is_taken(files: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        command = LlamaCppEngine().command(deployment(files), None, other.getsockname()[1])
        ended, reader, text = run_to_the_end(command, tmp_path)
    assert (ended, reader.cause) == (Exit(code=1), "port-in-use"), text


@needs_engine
def test_a_parameter_that_it_does_not_have(files: Path, tmp_path: Path) -> None:
    command = LlamaCppEngine().command(deployment(files), None, free_port())
    command = msgspec.structs.replace(command, argv=(*command.argv, "--set", "no_such_field=1"))
    ended, reader, text = run_to_the_end(command, tmp_path)
    assert (ended, reader.cause) == (Exit(code=2), "flag-value-invalid"), text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("libgomp.so.1: cannot open shared object file: No such file or directory", "apt-get install libgomp1"),
        ("No module named 'xllamacpp'", "pip install 'loadmaster[cpu]'"),
    ],
)
def test_a_library_that_is_missing(files: Path, tmp_path: Path, error: str, said: str) -> None:
    (tmp_path / "xllamacpp.py").write_text(f"raise ImportError({error!r})")
    command = LlamaCppEngine().command(deployment(files, env={"PYTHONPATH": str(tmp_path)}), None, free_port())
    ended, _, text = run_to_the_end(command, tmp_path)
    assert ended == Exit(code=2)
    assert said in text
    assert "Traceback" not in text


@needs_engine
def test_it_does_not_outlive_its_parent(files: Path, tmp_path: Path) -> None:
    command = LlamaCppEngine().command(deployment(files), None, free_port())
    code = "import os, subprocess, sys, time\nsubprocess.Popen(sys.argv[1:], start_new_session=True)\ntime.sleep(300)"
    parent = Child.start(
        EngineCommand(argv=(sys.executable, "-c", code, *command.argv), env=command.env), tmp_path / "log"
    )
    try:
        until(lambda: "listening on" in (tmp_path / "log").read_text(), "the engine's start")
        assert len(parent.members()) == 2
        os.kill(parent.pid, 9)
        until(lambda: not parent.members(), "the engine's end")
        assert "has gone" in (tmp_path / "log").read_text()
    finally:
        parent.stop(term_s=0)


@needs_engine
def test_it_can_be_stopped_while_it_loads(files: Path, tmp_path: Path) -> None:
    command = LlamaCppEngine().command(deployment(files), None, free_port())
    child = Child.start(command, tmp_path / "log")
    time.sleep(0.05)
    stopped = child.stop(term_s=5)
    assert stopped.seconds < 3
    assert child.members() == ()
