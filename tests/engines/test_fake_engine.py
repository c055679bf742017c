"""The program that plays vLLM: its starts end as real ones do, its API is the one that clients know."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from loadmaster.core.enginelog import LogReader, grammar
from loadmaster.edge.process import Exit, end, leftovers
from loadmaster.engines.command import CommandEngine
from tests.running import Running, fake_engine, until

CAUSES = {
    "load": "oom-weights",
    "profile-vision": "oom-profile-vision",
    "profile-language": "oom-profile-language",
    "sampler": "oom-sampler-warmup",
    "graph-pool": "oom-cudagraph-profile-pool",
    "kv": "no-kv-memory",
    "capture": "oom-cudagraph-capture",
}
MESSAGES = {
    "context": "context-exceeds-kv",
    "free-memory": "free-memory-below-request",
    "bad-flag": "unknown-flag",
    "truncated": "weights-truncated",
}


def ask(running: Running, path: str, body: Any = None) -> tuple[int, str]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"{running.url}{path}", data, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def question(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def read_log(running: Running) -> tuple[LogReader, list[str]]:
    reader, phases = LogReader("vllm-log.toml"), []
    for line in running.log.read_text().splitlines():
        phase = reader.phase(line)
        phases += [phase] if phase else []
        reader.failure(line)
    return reader, phases


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
@pytest.mark.parametrize("place", CAUSES)
def test_a_start_that_runs_out_of_memory(tmp_path: Path, place: str, version: str) -> None:
    with fake_engine(tmp_path, "--oom-at", place, "--version", version, wait=False) as running:
        assert running.child.wait(20) == Exit(code=1)
        reader, phases = read_log(running)
    assert reader.cause == CAUSES[place]
    assert "serving" not in phases


@pytest.mark.parametrize("message", MESSAGES)
def test_a_start_that_is_refused(tmp_path: Path, message: str) -> None:
    with fake_engine(tmp_path, "--message", message, wait=False) as running:
        assert running.child.wait(20) == Exit(code=2 if message == "bad-flag" else 1)
        assert read_log(running)[0].cause == MESSAGES[message]


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
def test_a_start_that_succeeds(tmp_path: Path, version: str) -> None:
    with fake_engine(tmp_path, "--version", version) as running:
        until(lambda: "startup complete" in running.log.read_text())
        reader, phases = read_log(running)
        assert json.loads(ask(running, "/version")[1]) == {"version": version}
    assert (reader.cause, reader.weak_cause) == (None, None)
    assert phases == [phase.name for phase in grammar("vllm-log.toml").phase]


def test_out_of_memory_while_serving(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--oom-at", "runtime") as running:
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(running, "/v1/chat/completions", question())
        assert running.child.wait(20) == Exit(code=1)
        assert read_log(running)[0].cause == "oom-runtime"


def test_it_hangs_exits_and_crashes_where_it_is_told(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--hang", "profile", wait=False) as running:
        until(lambda: "Encoder cache" in running.log.read_text())
        assert running.child.wait(0.2) is None
    with fake_engine(tmp_path, "--exit-at", "capture", "--exit", "9", wait=False) as running:
        assert running.child.wait(20) == Exit(code=9)
    with fake_engine(tmp_path, "--crash-at", "load", wait=False) as running:
        assert running.child.wait(20) == Exit(signal=11)


def test_only_the_first_starts_fail(tmp_path: Path) -> None:
    options = ("--crash-at", "load", "--starts", str(tmp_path / "starts"), "--only-first", "1")
    with fake_engine(tmp_path, *options, wait=False) as running:
        assert running.child.wait(20) == Exit(signal=11)
    with fake_engine(tmp_path, *options) as running:
        assert ask(running, "/v1/models")[0] == 200


def test_a_text_whole_and_in_a_stream(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tps", "1000") as running:
        _, whole = ask(running, "/v1/chat/completions", question(max_tokens=3))
        _, stream = ask(
            running,
            "/v1/chat/completions",
            question(max_tokens=3, stream=True, stream_options={"include_usage": True}),
        )
        _, completion = ask(running, "/v1/completions", {"prompt": "hello", "max_tokens": 30})
    answer = json.loads(whole)
    assert answer["choices"][0]["message"]["content"] == "The picture shows"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "The picture shows"
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert json.loads(completion)["choices"][0]["finish_reason"] == "stop"


def test_answers_that_are_given(tmp_path: Path) -> None:
    (tmp_path / "answers").write_text('[["colour", "red and blue"]]')
    with fake_engine(tmp_path, "--answers", str(tmp_path / "answers")) as running:
        _, answer = ask(running, "/v1/chat/completions", question("Which COLOUR is it?"))
    assert json.loads(answer)["choices"][0]["message"]["content"] == "red and blue"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", [], 400),
        ("/v1/chat/completions", {}, 400),
        ("/v1/chat/completions", {"messages": [3]}, 200),
        ("/v1/chat/completions", question(model="other"), 404),
        ("/sleep", {}, 404),
        ("/v1/embeddings", {"input": "x"}, 200),
        ("/tokenize", {"prompt": "a b"}, 200),
        ("/health", None, 200),
    ],
)
def test_statuses(tmp_path: Path, path: str, body: Any, status: int) -> None:
    with fake_engine(tmp_path) as running:
        assert ask(running, path, body)[0] == status


def test_too_many_pictures(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    with fake_engine(tmp_path, "--max-images", "1") as running:
        status, answer = ask(
            running, "/v1/chat/completions", {"messages": [{"role": "user", "content": [picture, picture]}]}
        )
    assert status == 400
    assert json.loads(answer)["error"]["message"] == "At most 1 image(s) may be provided in one request."


def test_tokens_come_at_their_pace(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tps", "50") as running:
        begin = time.monotonic()
        ask(running, "/v1/chat/completions", question(max_tokens=10))
        assert 0.19 < time.monotonic() - begin < 5


def test_a_client_that_leaves_is_noticed(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tps", "5", "--tokens", "100") as running:
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=20)
        connection.request("POST", "/v1/chat/completions", json.dumps(question(stream=True)))
        connection.getresponse().read(10)
        assert running.fake()["running"] == 1
        connection.close()
        until(lambda: running.fake()["running"] == 0)
        seen = running.fake()
    assert (seen["cancelled"], seen["finished"], seen["most_running"]) == (1, 0, 1)


def test_it_crashes_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--crash-after-tokens", "3") as running:
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(running, "/v1/chat/completions", question(stream=True))
        assert running.child.wait(20) == Exit(signal=9)


def test_stuck_keeps_its_health_and_its_counter_still(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--stuck-after", "1") as running:
        ask(running, "/v1/chat/completions", question())
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=20)
        connection.request("POST", "/v1/chat/completions", json.dumps(question()))
        engine = CommandEngine()
        until(lambda: running.fake()["running"] == 1)
        first = engine.running_waiting_tokens(ask(running, "/metrics")[1])
        time.sleep(0.2)
        second = engine.running_waiting_tokens(ask(running, "/metrics")[1])
        assert ask(running, "/health")[0] == 200
        connection.close()
    assert first is not None
    assert first == second
    assert first.busy


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_metrics_of_both_engines(tmp_path: Path, kind: str) -> None:
    with fake_engine(tmp_path, "--metrics", kind) as running:
        ask(running, "/v1/chat/completions", question(max_tokens=4))
        found = CommandEngine().running_waiting_tokens(ask(running, "/metrics")[1])
    assert found is not None
    assert (found.running, found.waiting) == (0, 0)
    assert (found.steps or 0) >= 4


def test_workers_outlive_it(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--workers", "2", "--stray") as running:
        until(lambda: len(running.child.members()) == 3)
        os.kill(running.child.pid, 9)
        until(lambda: running.child.poll() is not None)
        assert len(running.child.members()) == 2
        stopped = running.child.stop(term_s=0.2)
    assert stopped.left == ()


def test_titled_workers_lose_their_mark(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--workers", "2", "--titled") as running:
        until(lambda: len(running.child.members()) == 3)
        workers = [member.pid for member in running.child.members() if member.pid != running.child.pid]
        until(lambda: all(not Path(f"/proc/{pid}/environ").read_bytes().strip(b"\0") for pid in workers))
        os.kill(running.child.pid, 9)
        until(lambda: running.child.poll() is not None)
        assert [member.pid for member in leftovers(running.child.identity)] == workers
        assert end(running.child.identity, term_s=0.1) == ()


def test_it_may_ignore_a_polite_end(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--ignore-term") as running:
        assert running.child.stop(term_s=0.3).exit == Exit(signal=9)
    with fake_engine(tmp_path) as running:
        assert running.child.stop(term_s=10).exit == Exit(code=0)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as first:
        port = first.url.rpartition(":")[2]
        second = tmp_path / "second"
        second.mkdir()
        with fake_engine(second, "--port", port, wait=False) as running:
            assert running.child.wait(20) == Exit(code=1)
            assert read_log(running)[0].cause == "port-in-use"
