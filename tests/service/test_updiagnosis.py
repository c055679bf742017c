"""Every failure that the fake engine can play, from ``loadmaster up`` to its diagnosis in one screen of text."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from inline_snapshot import snapshot

from loadmaster.core.checks.catalogue import codes
from tests import fake_engine
from tests.service.served import Served

pytestmark = pytest.mark.slow
ONE_SCREEN = 40  # lines
AT_ONCE = 3
OPEN = {"engine": {"start_timeout_s": 3.0}}

# what the fake engine plays → (its options, configuration, code of the root cause, words that must be shown)
PLAYED: dict[str, tuple[tuple[str, ...], dict[str, Any], str | None, str]] = {
    "load": (("--oom-at", "load"), {}, "oom-weights", "Fewer bits, or more cards"),
    "profile-vision": (("--oom-at", "profile-vision"), {}, "oom-profile-vision", "max_pixels"),
    "profile-language": (("--oom-at", "profile-language"), {}, "oom-profile-language", "--max-num-batched-tokens"),
    "sampler": (("--oom-at", "sampler"), {}, "oom-sampler-warmup", "--max-num-seqs"),
    "sampler-0.24": (("--oom-at", "sampler", "--version", "0.24.0"), {}, "oom-sampler-warmup", "--max-num-seqs 128"),
    "graph-pool": (("--oom-at", "graph-pool"), {}, "oom-cudagraph-profile-pool", "--max-num-seqs"),
    "kv": (("--oom-at", "kv"), {}, "no-kv-memory", "--gpu-memory-utilization"),
    "capture": (("--oom-at", "capture"), {}, "oom-cudagraph-capture", "--gpu-memory-utilization"),
    "context": (("--message", "context"), {}, "context-exceeds-kv", "fix: --max-model-len 96000"),
    "free-memory": (("--message", "free-memory"), {}, "gpu-held-by-other-process", "nvidia-smi"),
    "bad-flag": (("--message", "bad-flag"), {}, "unknown-flag", "--max-model-len 4096"),
    "truncated": (("--message", "truncated"), {}, "weights-truncated", "read: docs/failures/weights-truncated.md"),
    "crash": (("--crash-at", "profile"), {}, None, "killed by SIGSEGV"),
    "exit": (("--exit-at", "load", "--exit", "3"), {}, None, "exit code 3"),
    "hang": (("--hang",), OPEN, None, "not ready in time"),
    "garbage": (("--garbage",), OPEN, None, "not ready in time"),
    "stuck": (("--stuck",), OPEN, None, "not ready in time"),
}


def test_all_that_it_plays_is_here() -> None:
    """``runtime`` and ``port`` need a request or a port, and have tests of their own."""
    played = {word for options, *_ in PLAYED.values() for word in options}
    assert set(fake_engine.OOM_PLACES) - {"runtime"} <= played
    assert set(fake_engine.MESSAGES) - {"port"} <= played


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, str, Served]]]:
    """What ``up`` shows of each, some at a time, since most of their time is waiting."""
    shown: dict[str, tuple[int, str, Served]] = {}
    everyone: list[Served] = []
    running: dict[str, tuple[Served, subprocess.Popen[str], float]] = {}
    waiting = list(PLAYED)
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name = waiting.pop(0)
                options, changes, *_ = PLAYED[name]
                one = Served(tmp_path_factory.mktemp("up"), f"up-{len(everyone)}")
                everyone.append(one)
                one.configure(*options, **changes)
                running[name] = (one, one.start("up", one.name), time.monotonic())
            for name, (one, process, begun) in list(running.items()):
                if process.poll() is None:
                    assert time.monotonic() - begun < 120, f"{name} does not end"
                    continue
                out, err = process.communicate()
                shown[name] = (process.returncode, out + err, one)
                one.run("down", one.name)
                del running[name]
            time.sleep(0.05)
        yield shown
    finally:
        for one in everyone:
            one.end()
        for _, process, _ in running.values():
            process.communicate()


@pytest.mark.parametrize("name", PLAYED)
def test_up_names_the_cause_in_one_screen(name: str, screens: dict[str, tuple[int, str, Served]]) -> None:
    _, _, code, words = PLAYED[name]
    returned, text, one = screens[name]
    screen = _screen(text)
    assert returned == 1, text
    assert words in screen, text
    assert len(screen.splitlines()) <= ONE_SCREEN, text
    assert f"error: {one.name} " in screen
    assert "Traceback" not in re.sub(r"^ *\|.*$", "", screen, flags=re.MULTILINE)
    if code is None:
        assert not re.search(r"^error\[", screen, re.MULTILINE), text
    else:
        assert screen.startswith(f"error[{code}]: "), text
        assert f"read: docs/failures/{code}.md" in screen
        assert re.search(r"^  \| log line \d+: ", screen, re.MULTILINE)
        assert re.search(r"^  (fix|try): ", screen, re.MULTILINE)
        assert code in codes()


@pytest.mark.parametrize("name", [name for name, (_, _, code, _) in PLAYED.items() if code is not None])
def test_diagnose_says_the_same_afterwards(name: str, screens: dict[str, tuple[int, str, Served]]) -> None:
    _, _, code, _ = PLAYED[name]
    one = screens[name][2]
    done = one.run("diagnose", "--deployment", one.name, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert document["findings"][0]["code"] == code
    line = document["findings"][0]["evidence"][0]["line"]
    written = one.places.backend_log.read_text(errors="replace").split("\n")[line - 1]
    assert document["findings"][0]["evidence"][0]["text"][-40:] in written


def test_a_screen(screens: dict[str, tuple[int, str, Served]]) -> None:
    assert _plain(screens["context"][1]) == snapshot("""\
error[context-exceeds-kv]: The cache is smaller than one request of the full
    length
  One request of 262144 tokens needs 2.57 GiB of cache, and 0.95 GiB were left.
  fix: --max-model-len 96000
       96,000 tokens are what the cache holds (the engine's own estimate). It
       costs: prompt and answer together have at most 96,000 tokens, not
       262,144.
  read: docs/failures/context-exceeds-kv.md

error: NAME failed: the engine ended in the phase cache (exit code 1): The cache is smaller than one request of the full length
hint: loadmaster logs NAME; loadmaster diagnose --deployment NAME\
""")


def _screen(text: str) -> str:
    """What stands below the progress of the start."""
    lines = text.splitlines()
    last = max((at for at, line in enumerate(lines) if re.match(r" *[\d.]+ s  ", line)), default=-1)
    return "\n".join(lines[last + 1 :]).strip("\n")


def _plain(text: str) -> str:
    """The screen without what is another one each time: lines of evidence wrap by the width of a process number."""
    screen = "\n".join(line for line in _screen(text).splitlines() if not line.startswith("  | "))
    return re.sub(r"\bup-\d+\b", "NAME", screen)


def test_a_request_that_kills_the_server(tmp_path: Any) -> None:
    one = Served(tmp_path, "one")
    try:
        one.configure("--tokens", "1", supervision={"backoff_first_s": 20.0, "backoff_most_s": 30.0})
        one.up()
        state = one.state()
        assert state is not None
        url = f"http://127.0.0.1:{state.port}"
        subprocess.run(
            ["curl", "-s", "-m", "5", f"{url}/fake", "-d", '{"oom": true}'], check=False, capture_output=True
        )
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 2})
        subprocess.run(["curl", "-s", "-m", "9", f"{url}/v1/completions", "-d", body], check=False, capture_output=True)
        now = one.until(lambda now: bool(now.findings), "the diagnosis")
        assert now.findings[0].code == "oom-runtime"
        said = one.run("status", one.name)
        assert "error[oom-runtime]" in said.stderr
        assert "--gpu-memory-utilization" in said.stderr
        document = json.loads(one.run("diagnose", "--deployment", one.name, "--json").stdout)
        assert document["findings"][0]["code"] == "oom-runtime"
        assert document["reached"] in ("ready", "served")
    finally:
        one.end()


def test_before_the_first_start_there_is_no_log(tmp_path: Any) -> None:
    one = Served(tmp_path, "one")
    one.configure()
    done = one.run("diagnose", "--deployment", "one")
    assert done.returncode == 3
    assert "there is no log yet" in done.stderr
    assert one.run("diagnose", "--deployment", "nobody").returncode == 2
