"""loadmaster diagnose as people run it: files, streams, several of them, and what is no log."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from loadmaster.commands.diagnose import diagnose
from tests.commands.transcript import Transcript, run

SHORT_CACHE = """\
(APIServer pid=11) INFO 11-30 10:00:00 [api_server.py:1200] vLLM API server version 0.24.0
(APIServer pid=11) INFO 11-30 10:00:00 [utils.py:233] non-default args: {'model': 'org/home-made-8b', \
'max_model_len': 32768, 'gpu_memory_utilization': 0.7, 'enforce_eager': True}
(EngineCore pid=12) INFO 11-30 10:00:09 [core.py:114] Initializing a V1 LLM engine (v0.24.0) with config: \
model='org/home-made-8b', tensor_parallel_size=1, quantization=None
(Worker pid=13) INFO 11-30 10:00:10 [gpu_model_runner.py:5160] Starting to load model org/home-made-8b...
(Worker pid=13) INFO 11-30 10:00:30 [gpu_model_runner.py:5255] Model loading took 14.99 GiB memory and 20.1 seconds
(Worker pid=13) INFO 11-30 10:00:40 [gpu_worker.py:508] Available KV cache memory: 0.95 GiB
(EngineCore pid=12) ERROR 11-30 10:00:41 [core.py:1100] EngineCore failed to start.
(EngineCore pid=12) ERROR 11-30 10:00:41 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-30 10:00:41 [core.py:1100] ValueError: To serve at least one request with the model's \
max seq len (32768), (4.00 GiB KV cache is needed, which is larger than the available KV cache memory (0.95 GiB). \
Based on the available memory, the estimated maximum model length is 7760. Try increasing \
`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
HEALTHY = """\
(APIServer pid=11) INFO 11-30 10:00:00 [api_server.py:1200] vLLM API server version 0.24.0
(Worker pid=13) INFO 11-30 10:00:30 [gpu_model_runner.py:5255] Model loading took 14.99 GiB memory and 20.1 seconds
(EngineCore pid=12) INFO 11-30 10:00:40 [kv_cache_utils.py:1714] GPU KV cache size: 45,968 tokens
(APIServer pid=11) INFO:     Application startup complete.
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "engine.log"
    path.write_text(SHORT_CACHE)
    return path


def ask(*arguments: str | Path) -> Transcript:
    return run(diagnose, [str(word) for word in arguments], "diagnose")


def test_one_screen_for_people(log: Path) -> None:
    shown = ask(log)
    assert shown.code == 1
    assert shown.err == ""
    assert shown.out == snapshot("""\
FAILED: The cache is smaller than one request of the full length

error[context-exceeds-kv]: The cache is smaller than one request of the full
    length
  One request of 32768 tokens needs 4.00 GiB of cache, and 0.95 GiB were left.
  | log line 9: (EngineCore pid=12) ERROR 11-30 10:00:41 [core.py:1100]
  | ValueError: To serve at least one request with the model's max seq len
  | (32768), (4.00 GiB KV cache is needed, which is larger than the available KV
  | cache memory (0.95 GiB). Based on the available memory, the estimated
  | maximum model length is 77
  fix: --max-model-len 7760
       7,760 tokens are what the cache holds (the engine's own estimate). It
       costs: prompt and answer together have at most 7,760 tokens, not 32,768.
  read: docs/failures/context-exceeds-kv.md

also (in full with --all)
  warning[eager-mode-cost]: --enforce-eager does not touch what failed here: it
    only spares the CUDA graphs, 0.1 to 0.8 GiB, and decoding is ...
  note[advice-without-effect]: --gpu-memory-utilization 0.7 is a small share,
    often set against running out of memory. The cache is what it ...

engine          vLLM 0.24.0
model           org/home-made-8b
came as far as  weights were loaded and memory was profiled
it measured     weights 14.99 GiB, cache 0.95 GiB
read            10 lines
""")


def test_all_of_it(log: Path) -> None:
    shown = ask("--all", log).out
    assert "command" in shown
    assert "vllm serve org/home-made-8b --max-model-len 32768" in shown
    assert "warning[eager-mode-cost]" in shown
    assert len(shown.splitlines()) > len(ask(log).out.splitlines())


def test_for_programs(log: Path) -> None:
    shown = ask("--json", log)
    document = json.loads(shown.out)
    assert shown.code == 1
    assert (document["schema"], document["healthy"], document["reached"]) == (1, False, "profiled")
    assert document["engine"] == {"name": "vllm", "version": "0.24.0"}
    assert document["launch"]["argv"][:3] == ["vllm", "serve", "org/home-made-8b"]
    assert document["launch"]["flags"]["--gpu-memory-utilization"] == 0.7
    assert document["readings"]["kv_available_bytes"] == round(0.95 * (1 << 30))
    assert document["readings"]["model_loading_bytes"] == [round(14.99 * (1 << 30))]
    first = document["findings"][0]
    assert (first["code"], first["severity"]) == ("context-exceeds-kv", "error")
    assert first["evidence"][0]["line"] == 9
    assert first["fixes"][0]["argv"] == ["--max-model-len", "7760"]
    assert first["fixes"][0]["replanned"] is True


def test_a_healthy_log(tmp_path: Path) -> None:
    path = tmp_path / "fine.log"
    path.write_text(HEALTHY)
    shown = ask(path)
    assert shown.code == 0
    assert shown.out.startswith("HEALTHY: the server started and nothing failed after that\n")
    assert json.loads(ask("--json", path).out)["findings"] == []


def test_what_is_not_known_is_said_to_be_unknown(tmp_path: Path) -> None:
    path = tmp_path / "odd.log"
    path.write_text(
        HEALTHY[: HEALTHY.index("(EngineCore")] + "Traceback (most recent call last):\nOddError: the moon\n"
    )
    shown = ask(path)
    assert shown.code == 3
    assert "OddError: the moon" in shown.out
    assert json.loads(ask("--json", path).out)["findings"] == []


def test_standard_input() -> None:
    command = [sys.executable, "-m", "loadmaster", "diagnose", "-", "--json"]
    done = subprocess.run(command, input=SHORT_CACHE, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["findings"][0]["code"] == "context-exceeds-kv"


def test_several_files_are_one_log_and_evidence_names_its_file(tmp_path: Path) -> None:
    lines = SHORT_CACHE.splitlines(keepends=True)
    older, newer = tmp_path / "log.1.gz", tmp_path / "log"
    older.write_bytes(gzip.compress("".join(lines[:5]).encode()))
    newer.write_text("".join(lines[5:]))
    document = json.loads(ask("--json", older, newer).out)
    first = document["findings"][0]
    assert first["code"] == "context-exceeds-kv"
    assert (first["evidence"][0]["path"], first["evidence"][0]["line"]) == (str(newer), 4)
    assert document["engine"]["version"] == "0.24.0"


def test_the_cards_and_the_version_can_be_said(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(SHORT_CACHE.replace("org/home-made-8b", "meta-llama/Llama-3.1-8B-Instruct"))
    found = json.loads(ask("--json", "--gpus", "1x24GiB", "--engine-version", "0.18.0", path).out)
    assert found["engine"]["version"] == "0.18.0"
    fixes = found["findings"][0]["fixes"]
    raised = [fix for fix in fixes if fix["argv"][:1] == ["--gpu-memory-utilization"]]
    assert raised
    assert raised[0]["replanned"] is True
    assert "The cache grows from 0.95 GiB to" in raised[0]["why"]


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, 2, "there is no file"),
        (b"", 3, "there is nothing in"),
        (b"\x7fELF" + b"\x00\x01" * 3000, 2, "is no text"),
        (random.Random(4).randbytes(300_000), 2, "is no text"),
        (gzip.compress(random.Random(4).randbytes(300_000)), 2, "is no text"),
    ],
)
def test_what_is_no_log(tmp_path: Path, content: bytes | None, code: int, words: str) -> None:
    path = tmp_path / "it"
    if content is not None:
        path.write_bytes(content)
    shown = ask(path)
    assert (shown.code, shown.out) == (code, "")
    assert words in shown.err
    assert "Traceback" not in shown.err


def test_a_directory_and_nothing_at_all(tmp_path: Path) -> None:
    assert ask(tmp_path).code == 2
    assert "is a directory" in ask(tmp_path).err
    assert ask().code == 2
    assert ask(tmp_path / "x", "--deployment", "y").code == 2
    assert ask("a\x00b").code == 2


def test_an_unreadable_file_and_a_wrong_model_are_errors_of_the_user(tmp_path: Path, log: Path) -> None:
    assert ask(log, "--model", tmp_path / "nothing").code == 2
    assert ask(log, "--gpus", "3xBanana").code == 2
    packed = tmp_path / "cut.gz"
    packed.write_bytes(gzip.compress(SHORT_CACHE.encode())[:-40])
    assert ask(packed).code in (1, 3)


def test_a_packed_log_that_is_cut_off_is_never_healthy(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    whole = gzip.compress(HEALTHY.encode())
    path.write_bytes(whole)
    assert ask(path).code == 0
    for broken in (whole[:-8], whole[:-3], whole[:-6] + b"\0" + whole[-5:], whole + b"more"):
        path.write_bytes(broken)
        shown = ask(path)
        assert (shown.code, shown.out.splitlines()[0].split(":")[0]) == (3, "COULD NOT TELL")
        assert "packed log" in shown.out
    path.write_bytes(gzip.compress((HEALTHY * 500 + SHORT_CACHE).encode())[:-8])
    shown = ask(path)
    assert (shown.code, "context-exceeds-kv" in shown.out) == (1, True)


def test_keys_of_the_launch_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(SHORT_CACHE.replace("'enforce_eager': True", "'api_key': ['correct-horse'], 'enforce_eager': True"))
    for shown in (ask("--all", path).out, ask("--json", path).out):
        assert "correct-horse" not in shown
        assert "--enforce-eager" in shown


def test_escape_sequences_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(SHORT_CACHE.replace("ValueError: To", "\x1b]0;owned\x07\x1b[2JValueError: To"))
    shown = ask("--all", path).out
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_json_has_no_characters_that_a_terminal_obeys(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(SHORT_CACHE.replace("org/home-made-8b", "org/a\u009b31m\u202eb"))
    shown = ask("--json", path)
    assert not any(letter in shown.out for letter in "\u009b\u202e")
    assert "a\u009b31m\u202eb" in json.loads(shown.out)["model"]
