"""``loadmaster check``: where the model's files are looked for, what is said when something is not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadmaster.cli import main
from loadmaster.edge.mounts import host_path
from loadmaster.edge.sample import write_sample


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and no cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *arguments)
    return code, json.loads(out)


CARD = ("--gpus", "80GiB", "--engine-version", "0.24.0")


def test_a_model_known_by_its_name_alone_is_not_clear_to_launch(capsys: pytest.CaptureFixture[str]) -> None:
    name = "/nowhere/Qwen3-8B"
    code, found = document(capsys, "check", "--json", *CARD, "--", "vllm", "serve", name, "--max-model-len", "8192")
    assert (code, found["ok"]) == (3, None)
    assert found["not_checked"] == [
        f"the model's files: {name} is not on this machine; planned from the table of public models; "
        "--model DIR says where it is"
    ]


def test_a_mistyped_path_is_said_to_be_none(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "m").mkdir()
    _, found = document(capsys, "check", "--json", *CARD, "--", "vllm", "serve", "m/nope")
    assert found["not_checked"][0].startswith("the model: there is no such directory: m/nope")
    code, _, err = run(capsys, "plan", "m/nope", "--gpus", "24GiB")
    assert (code, err.splitlines()[0]) == (2, "error: there is no such directory: m/nope")


def test_the_files_behind_a_mount_are_read(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """A compose file's folder is where its relative paths begin, whatever the working directory."""
    write_sample("Qwen3-8B", "bf16", here / "d" / "m" / "q", damage="truncated", layers=2)
    (here / "d" / "compose.yaml").write_text(
        "services:\n  chat:\n    image: vllm/vllm-openai:v0.24.0\n    runtime: nvidia\n    ipc: host\n"
        "    command: --model /models/q\n    volumes: ['./m:/models:ro']\n"
    )
    code, found = document(capsys, "check", "--json", *CARD, "--command-file", str(here / "d" / "compose.yaml"))
    assert code == 1
    assert "weights-truncated" in [item["code"] for item in found["findings"]]
    line = f"docker run --gpus all -v {here}/d/m:/models vllm/vllm-openai:v0.24.0 --model /models/q"
    code, found = document(capsys, "check", "--json", *CARD, "--", *line.split())
    assert code == 1 and "weights-truncated" in [item["code"] for item in found["findings"]]


@pytest.mark.parametrize(
    ("path", "mounts", "place"),
    [
        ("/models/q", [("./m", "/models")], "/f/m/q"),
        ("/models/q", [("/a", "/models"), ("/b", "/models/q")], "/b"),
        ("/models/../models/q/", [("/a", "/models/")], "/a/q"),
        ("/modelsx/q", [("/a", "/models")], None),
        ("/models/q", [("$PWD/m", "/models")], "/f/m/q"),
        ("/models/q", [("${HOME}/m", "/models")], "/home/u/m/q"),
        ("/models/q", [("~/m", "/models")], "/home/u/m/q"),
        ("/models/q", [("$ELSEWHERE", "/models")], None),
    ],
)
def test_where_a_path_of_a_container_is(
    path: str, mounts: list[tuple[str, str]], place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert host_path(path, mounts, Path("/f")) == (None if place is None else Path(place))


def test_other_services_are_named(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    text = "services:\n" + "".join(
        f"  {name}:\n    image: vllm/vllm-openai:v0.24.0\n    runtime: nvidia\n    command: --model Qwen/{name}\n"
        for name in ("Qwen3-8B", "Qwen3-4B")
    )
    (here / "c.yaml").write_text(text)
    _, found = document(capsys, "check", "--json", *CARD, "--command-file", "c.yaml")
    assert found["launch"]["model"] == "Qwen/Qwen3-8B"
    assert "Qwen3-4B: it runs vLLM too; check it with --service NAME" in found["not_checked"]
    _, found = document(capsys, "check", "--json", *CARD, "--command-file", "c.yaml", "--service", "Qwen3-4B")
    assert found["launch"]["model"] == "Qwen/Qwen3-4B"
    assert not any("runs vLLM too" in item for item in found["not_checked"])


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["check", "--", "vllm", "server", "m"], "vllm has no command 'server'", "did you mean vllm serve?"),
        (["check", "--", "vllm", "serve"], "the command names no model", "vllm serve MODEL ..."),
        (["check", "--", "llama-server", "-m", "x.gguf"], "this starts llama.cpp; check reads commands of vLLM", ""),
        (["check", "--", "python", "-m", "sglang.launch_server", "--model-path", "m"], "this starts SGLang", ""),
        (["check", "--", "lmdeploy", "serve", "api_server", "m"], "this starts LMDeploy", ""),
        (["check", "--", "ollama", "run", "m"], "this starts Ollama", ""),
        (["check", "vllm", "serve", "m", "-tp", "2"], "No such option: -tp", "vLLM flags go after --: "),
        (["plan", "m", "--tensor-parallel-size", "2"], "No such option '--tensor-parallel-size'", "vLLM flags go aft"),
        (["plan", "Qwen/Qwen3-8B", "--gpus", "cpu"], "vLLM is planned for GPUs, and --gpus cpu names none", "cpu is"),
        (["check", "--gpus", "cpu", "--", "vllm", "serve", "m"], "vLLM is planned for GPUs", "cpu is for GGUF files"),
    ],
)
def test_what_cannot_be_read_is_said_in_words(
    arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith(("error: ", "hint: "))]
    assert lines[0].startswith(f"error: {message}") and lines[1].startswith(f"hint: {hint}")


def test_an_error_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", "--json", "--", "vllm", "server", "m")
    assert code == 2 and err.startswith("error: ")
    assert json.loads(out) == {
        "schema": 1,
        "error": {"message": "vllm has no command 'server'", "hint": "did you mean vllm serve?"},
    }
    code, out, _ = run(capsys, "plan", "m", "--json", "--gpu", "x")
    assert code == 2 and json.loads(out)["error"]["message"].startswith("No such option '--gpu'")
    code, out, _ = run(capsys, "check", "--", "vllm", "server", "m", "--json")  # the engine's word, not ours
    assert (code, out) == (2, "")


@pytest.mark.parametrize(("text", "tokens"), [("8000", 8000), ("8k", 8000), ("8K", 8192)])
def test_a_context_is_written_as_vllm_writes_it(text: str, tokens: int) -> None:
    from loadmaster.commands.options import token_count

    assert token_count(text) == tokens


@pytest.mark.parametrize("text", ["32x", "0", "-1", "1.5k", "", "k"])
def test_a_context_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "Qwen/Qwen3-8B", "--gpus", "24GiB", "--recommend", f"--context={text}")
    assert code == 2 and "write 32768, 32k (32,000) or 32K (32,768)" in err


@pytest.mark.parametrize("arguments", [["inspect", "q"], ["--help"], ["check", "--help"], ["--version"]])
def test_a_result_that_cannot_be_written_is_said(arguments: list[str], here: Path) -> None:
    write_sample("Qwen3-8B", "bf16", here / "q", layers=1)
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "loadmaster", *arguments]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: cannot write the result: No space left on device\n")


def test_a_title_keeps_to_the_columns() -> None:
    from loadmaster.core.facts import Finding
    from loadmaster.core.tables import load_toml
    from loadmaster.render.findings import finding_text

    for code, entry in load_toml("findings.toml").items():
        text = finding_text(Finding(code, entry["severity"], entry["title"], "", confidence="possible"))
        assert all(len(line) <= 80 for line in text.splitlines()), text
        assert " ".join(line.strip() for line in text.splitlines()).endswith(f"{entry['title']} (possible)")


def test_columns_count_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    from loadmaster.terminal import terminal_width

    monkeypatch.setenv("COLUMNS", "100")
    assert terminal_width() == 100
    monkeypatch.delenv("COLUMNS")
    assert terminal_width() == 80


def test_a_template_in_an_image_or_behind_a_mount(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """A path that no mount covers may be in the image; one that a mount covers must be on this machine."""
    write_sample("Qwen3-8B", "bf16", here / "m" / "q", layers=1)
    line = f"docker run --gpus all -v {here}/m:/models vllm/vllm-openai:v0.24.0 --model /models/q --chat-template"
    for path, codes in (("/templates/x.jinja", []), ("/models/x.jinja", ["chat-template-missing"])):
        _, found = document(capsys, "check", "--json", *CARD, "--", *line.split(), path)
        assert [item["code"] for item in found["findings"] if item["code"] == "chat-template-missing"] == codes
