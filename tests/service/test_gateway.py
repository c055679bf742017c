"""The gateway over real sockets: what passes, what waits, and what happens when an engine does not do its part."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadmaster.core.facts import Finding
from loadmaster.service.connections import Listener
from loadmaster.service.enginestate import EngineState, Pid, State, write_state
from loadmaster.service.errors import ImageError
from loadmaster.service.gateway import create_app
from loadmaster.service.gatewaysettings import BackendSettings, GatewaySettings, LimitSettings, SettingsError
from loadmaster.service.relay import is_end
from loadmaster.service.tokenizing import llamacpp_request
from tests.gateways import CHAT, HEAD, QUICK, chunk, gateway, one_backend, scripted, soon
from tests.running import Running, fake_engine

PICTURE = "data:image/png;base64,iVBORw0KGgo="


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


async def seen(engine: Running, **switches: Any) -> dict[str, Any]:
    return await asyncio.to_thread(engine.fake, **switches)


def figure(text: bytes, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items()):
                return sample.value
    return 0.0


# ------------------------------------------------------------------------------------------- what passes


def test_an_answer_passes_as_the_engine_wrote_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway(one_backend(engine.url)) as opened:
            answer = await opened.chat("Hello", max_tokens=4, headers={"X-Request-Id": "mine-1"})
            assert answer.status == 200 and answer.headers["x-request-id"] == "mine-1"
            assert answer.json["choices"][0]["message"]["content"] == "The picture shows a"
            assert "x-loadmaster-changes" not in answer.headers and answer.headers["server"] == "loadmaster"
            told = await seen(engine)
            assert told["last_body"]["messages"] == [{"role": "user", "content": "Hello"}]
            assert told["last_headers"]["x-request-id"] == "mine-1"
            answer = await opened.ask("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert answer.json["choices"][0]["text"] == "The picture"
            answer = await opened.ask("POST", "/tokenize", json={"model": "fake", "prompt": "a b c"})
            assert answer.json["count"] == 3
            answer = await opened.ask("POST", "/v1/embeddings", json={"model": "fake", "input": ["a", "b"]})
            assert answer.json["data"][0]["embedding"] == [0.0, 1.0]

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_a_stream_passes_whole_and_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway(one_backend(engine.url)) as opened:
            body = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": "x"}]}
            began, times, text = time.perf_counter(), [], b""
            async with opened.session.post(opened.url + CHAT, json=body) as answer:
                assert answer.headers["Content-Type"].startswith("text/event-stream")
                async for part in answer.content.iter_any():
                    times.append(time.perf_counter() - began)
                    text += part
            events = [event.removeprefix(b"data: ") for event in text.split(b"\n\n") if event]
            assert events[-1] == b"[DONE]" and len(events) == 1 + 20 + 2
            words = [msgspec.json.decode(event)["choices"][0]["delta"].get("content") for event in events[1:-2]]
            assert words[:3] == ["The", " picture", " shows"] and len(words) == 20
            assert len(times) >= 15 and times[0] < 0.2 < times[-1]  # 20 tokens at 50 a second: as they come

    with fake_engine(tmp_path, "--tps", "50", "--tokens", "20") as engine:
        play(scene())


def test_the_routes_there_are_and_no_others(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway(one_backend(engine.url), further_routes=("/tokenize",)) as opened:
            assert (await opened.ask("GET", "/health")).json == {"status": "ok"}
            for path in (
                "/version",
                "/v1/embeddings",
                "/fake",
                "/",
                "/v1/chat/completions/",
                "/v1/../fake",
                "/metrics/x",
            ):
                for method in ("GET", "POST"):
                    answer = await opened.ask(method, path, json={} if method == "POST" else None)
                    assert (answer.status, answer.code) == (404, "route_not_found"), path
                    assert answer.json["source"] == "loadmaster" and "/tokenize" in answer.json["error"]["message"]
            for method, path in (("GET", CHAT), ("DELETE", CHAT), ("POST", "/v1/models"), ("PUT", "/health")):
                answer = await opened.ask(method, path)
                assert (answer.status, answer.code) == (405, "method_not_allowed")
                assert answer.headers["allow"]
            answer = await opened.ask("GET", "/v1/models")
            assert [card["id"] for card in answer.json["data"]] == ["fake"]
            assert answer.json["data"][0]["max_model_len"] == 32768
            told = await seen(engine)
            assert told["requests"] == 0

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_several_models_and_the_engines_own_name(tmp_path: Path) -> None:
    async def scene() -> None:
        backends = (
            BackendSettings(model="small", url=engine.url, served_name="fake"),
            BackendSettings(model="large", url="http://127.0.0.1:1", concurrency=3),
        )
        async with gateway(backends) as opened:
            assert (await opened.chat(model="small")).status == 200
            assert (await seen(engine))["last_body"]["model"] == "fake"
            answer = await opened.chat(model="medium")
            assert (answer.status, answer.code) == (404, "model_not_found")
            assert "small, large" in answer.json["error"]["message"]
            answer = await opened.ask("POST", CHAT, json={"messages": [{"role": "user", "content": "x"}]})
            assert (answer.status, answer.code) == (400, "model_missing")
            answer = await opened.chat(model="large")
            assert (answer.status, answer.code) == (503, "engine_down")
            assert [card["id"] for card in (await opened.ask("GET", "/v1/models")).json["data"]] == ["small"]
            assert (await opened.ask("GET", "/ready")).status == 503

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_figures(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway(one_backend(engine.url, concurrency=7)) as opened:
            await opened.chat()
            await opened.chat(stream=True)
            await opened.chat(model="x" * 50)
            await opened.ask("GET", "/some/other/path")
            text = (await opened.ask("GET", "/metrics")).body
            assert figure(text, "loadmaster_requests_total", route=CHAT, model="fake", status="200") == 2
            assert figure(text, "loadmaster_requests_total", route=CHAT, model="", status="404") == 1
            assert figure(text, "loadmaster_requests_total", route="other", status="404") == 1
            assert figure(text, "loadmaster_refusals_total", code="model_not_found") == 1
            assert figure(text, "loadmaster_request_duration_seconds_count", route=CHAT, model="fake") == 2
            assert figure(text, "loadmaster_request_duration_seconds_count", route=CHAT, model="") == 1
            assert figure(text, "loadmaster_first_byte_seconds_count", model="fake") == 2
            assert figure(text, "loadmaster_backend_up", model="fake", backend="0") == 1
            assert figure(text, "loadmaster_places", model="fake") == 7
            assert figure(text, "loadmaster_answer_bytes_total", model="fake") > 1000
            assert b"x" * 50 not in text and b"/some/other" not in text
            names = {family.name for family in text_string_to_metric_families(text.decode())}
            assert all(name.startswith("loadmaster_") for name in names)

    with fake_engine(tmp_path) as engine:
        play(scene())


# ------------------------------------------------------------------------------------ who may come in


def test_host_and_origin() -> None:
    async def scene() -> None:
        async with (
            scripted() as url,
            gateway(
                one_backend(url), allowed_hosts=("gpu.example",), allowed_origins=("https://chat.example",)
            ) as opened,
        ):

            async def status(method: str, path: str, *headers: str) -> tuple[int, str]:
                body = "{}" if method == "POST" else ""
                lines = "\r\n".join((f"{method} {path} HTTP/1.1", "Connection: close", *headers, "", body))
                answer = (await opened.raw(lines.encode())).decode()
                code = answer.partition('"code":"')[2].partition('"')[0]
                return int(answer.split(" ", 2)[1]), code

            port = opened.port
            for host in ("localhost", f"127.0.0.1:{port}", "[::1]:9", "GPU.example:80", "127.5.5.5", "localhost."):
                assert await status("GET", "/health", f"Host: {host}") == (200, ""), host
            for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil", "1", "[::2]"):
                assert await status("GET", "/v1/models", f"Host: {host}") == (403, "host_not_allowed"), host
            for hosts in ([], ["Host: localhost", "Host: localhost"], ["Host: a b"], ["Host:"], ["Host: u@localhost"]):
                assert (await status("GET", "/health", *hosts))[0] == 400, hosts
            here = f"Host: localhost:{port}"
            post = ("POST", CHAT, here, "Content-Type: application/json", "Content-Length: 2")
            assert (await status(*post, f"Origin: http://localhost:{port}"))[1] != "origin_not_allowed"
            assert (await status(*post, "Origin: https://chat.example"))[1] != "origin_not_allowed"
            for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port}", "http://localhost:1", "x", ""):
                assert await status(*post, f"Origin: {origin}") == (403, "origin_not_allowed"), origin
                assert await status("GET", "/v1/models", here, f"Origin: {origin}") == (403, "origin_not_allowed")
            assert await status(*post, "Sec-Fetch-Site: cross-site") == (403, "origin_not_allowed")
            assert (await status("OPTIONS", CHAT, here, "Origin: http://evil.example"))[0] == 403

            answer = await opened.ask("GET", "/v1/models", Origin="https://chat.example")
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
            assert "access-control-allow-origin" not in (await opened.ask("GET", "/v1/models")).headers
            asked = {"Origin": "https://chat.example", "Access_Control_Request_Method": "POST"}
            answer = await opened.ask("OPTIONS", CHAT, **asked)
            assert answer.status == 204 and "Authorization" in answer.headers["access-control-allow-headers"]
            asked["Origin"] = "https://other.example"
            answer = await opened.ask("OPTIONS", CHAT, **asked)
            assert answer.status == 403 and "access-control-allow-origin" not in answer.headers

    play(scene())


def test_what_is_refused_before_it_starts(tmp_path: Path) -> None:
    backends = one_backend("http://127.0.0.1:1")
    for host in ("0.0.0.0", "::", "192.168.1.5", "gpu.example"):
        with pytest.raises(SettingsError, match="other machines"):
            create_app(GatewaySettings(backends=backends, host=host))
        create_app(GatewaySettings(backends=backends, host=host, insecure=True))
        create_app(GatewaySettings(backends=backends, host=host, keys_environment="k" * 30))
    for host in ("127.0.0.1", "localhost", "::1"):
        create_app(GatewaySettings(backends=backends, host=host))
    with pytest.raises(SettingsError, match="no backend"):
        create_app(GatewaySettings(backends=()))
    with pytest.raises(SettingsError, match="no header"):
        create_app(GatewaySettings(backends=one_backend("http://127.0.0.1:1", api_key="a\r\nX: y")))
    with pytest.raises(SettingsError, match="routes"):
        create_app(GatewaySettings(backends=backends, further_routes=("/pause",)))
    with pytest.raises(SettingsError, match="origin"):
        create_app(GatewaySettings(backends=backends, allowed_origins=("*",)))
    with pytest.raises(SettingsError, match="no such file"):
        create_app(GatewaySettings(backends=backends, keys_file=str(tmp_path / "keys.json")))


# --------------------------------------------------------------------------------------- waiting and leaving


def test_no_more_at_once_than_fit_and_the_rest_is_told_when_to_come_back(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway(one_backend(engine.url, concurrency=2), limits=LimitSettings(queue=3)) as opened:
            answers = await asyncio.gather(*(opened.chat() for _ in range(9)))
            assert sorted(answer.status for answer in answers) == [200] * 5 + [429] * 4
            refused = next(answer for answer in answers if answer.status == 429)
            assert refused.code == "queue_full" and int(refused.headers["retry-after"]) >= 1
            assert refused.json["error"]["type"] == "rate_limit_error"
            assert (await seen(engine))["most_running"] == 2
            wide = [opened.chat(n=2), opened.chat(n=2)]
            assert [answer.status for answer in await asyncio.gather(*wide)] == [200, 200]
            assert (await opened.chat()).status == 200
            assert opened.gateway.backends.groups["fake"].admission.tickets == 0

    with fake_engine(tmp_path, "--delay", "0.15") as engine:
        play(scene())


def test_the_queue_has_an_end(tmp_path: Path) -> None:
    async def scene() -> None:
        limits = LimitSettings(queue_timeout_s=0.1)
        async with gateway(one_backend(engine.url, concurrency=1), limits=limits) as opened:
            answers = await asyncio.gather(opened.chat(), opened.chat())
            assert sorted(answer.status for answer in answers) == [200, 429]
            assert {answer.code for answer in answers if answer.status == 429} == {"queue_too_slow"}

    with fake_engine(tmp_path, "--delay", "0.4") as engine:
        play(scene())


def test_who_leaves_frees_the_place_and_stops_the_engine(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway(one_backend(engine.url, concurrency=1)) as opened:
            admission = opened.gateway.backends.groups["fake"].admission
            for stream in (True, False):
                running = asyncio.create_task(opened.chat(stream=stream))
                await soon(lambda: admission.running == 1, "the first request at the engine")
                waiting = asyncio.create_task(opened.chat())
                await soon(lambda: admission.waiting == 1, "the second in the queue")
                waiting.cancel()
                await soon(lambda: admission.waiting == 0, "an empty queue")
                cancelled = (await seen(engine))["cancelled"]
                running.cancel()

                async def stopped(before: int = cancelled) -> bool:
                    told = await seen(engine)
                    return bool(told["cancelled"] == before + 1 and told["running"] == 0)

                await soon(stopped, "the engine's end of the request")
                await soon(lambda: admission.tickets == 0, "a free place")
                await asyncio.gather(running, waiting, return_exceptions=True)
            await seen(engine, tps=0)
            assert (await opened.chat()).status == 200
            text = (await opened.ask("GET", "/metrics")).body
            assert figure(text, "loadmaster_clients_left_total", model="fake") == 4
            assert figure(text, "loadmaster_requests_total", route=CHAT, status="499") == 4
            assert figure(text, "loadmaster_requests_total", route=CHAT, status="200") == 1
            assert figure(text, "loadmaster_request_duration_seconds_count", route=CHAT) == 5

    with fake_engine(tmp_path, "--tps", "2") as engine:
        play(scene())


def test_a_client_that_does_not_read_is_left(tmp_path: Path) -> None:
    async def scene() -> None:
        event = chunk(b"data: " + b"x" * 60_000 + b"\n\n")
        async with (
            scripted(HEAD, *[event] * 2000) as url,
            gateway(one_backend(url, concurrency=1), limits=LimitSettings(client_timeout_s=0.5)) as opened,
        ):
            body = msgspec.json.encode({"stream": True, "messages": [{"role": "user", "content": "x"}]})
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", opened.port))
            client.sendall(
                b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (CHAT.encode(), len(body), body)
            )
            admission = opened.gateway.backends.groups["fake"].admission
            await soon(lambda: admission.running == 1, "the request at the engine")
            await soon(lambda: admission.tickets == 0, "its end")
            client.close()
            text = (await opened.ask("GET", "/metrics")).body
            for name in ("requests_total", "clients_left_total", "request_duration_seconds_count"):
                assert figure(text, f"loadmaster_{name}", route=CHAT) == 1

    play(scene())


# ------------------------------------------------------------------------------------- engines that fail


def test_an_engine_that_is_down_comes_back(tmp_path: Path) -> None:
    async def scene() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        async with gateway(one_backend(f"http://127.0.0.1:{port}")) as opened:
            for answer in (
                await opened.chat(),
                await opened.ask("GET", "/v1/models"),
                await opened.ask("GET", "/ready"),
            ):
                assert (answer.status, answer.code) == (503, "engine_down")
                assert answer.headers["retry-after"] == "5" and answer.json["source"] == "loadmaster"
            assert (await opened.ask("GET", "/health")).status == 200
            with fake_engine(tmp_path, "--port", str(port)) as engine:
                await soon(lambda: opened.gateway.backends.groups["fake"].backends[0].up, "the engine's return")
                assert (await opened.chat()).status == 200
                assert (await opened.ask("GET", "/ready")).status == 200
                os.kill(engine.child.pid, signal.SIGKILL)
                engine.child.poll()
                answer = await opened.chat()
                assert (answer.status, answer.code) == (503, "engine_down")

    play(scene())


def test_the_reason_comes_from_the_engines_state(tmp_path: Path) -> None:
    async def scene() -> None:
        state = tmp_path / "engine.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            elsewhere = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = int(engine.url.rpartition(":")[2])

        def say(name: State, **fields: Any) -> None:
            write_state(state, EngineState(state=name, since=time.time() - 41, port=port, **fields))

        say("loading", phase="loading weights")
        async with gateway(one_backend(elsewhere, state_file=str(state))) as opened:
            answer = await opened.chat()
            assert (answer.status, answer.code) == (503, "model_starting")
            assert answer.json["error"]["message"] == "model starting: loading weights, 41 s so far"
            assert answer.headers["retry-after"] == "5"
            backend = opened.gateway.backends.groups["fake"].backends[0]
            say("ready")
            await soon(lambda: backend.up, "readiness")
            assert (await opened.chat()).status == 200  # on the port that the state names
            finding = Finding(code="oom-kv-cache", severity="error", title="no room for the cache", cause="")
            ends: tuple[tuple[State, str, str], ...] = (
                ("stuck", "engine_stuck", "stuck"),
                ("failed", "engine_failed", "no room for the cache"),
                ("exited", "engine_down", "exited"),
                ("stopping", "engine_stopping", "stopping"),
            )
            for name, code, words in ends:
                say(name, findings=(finding,) if name == "failed" else ())
                await soon(lambda: not backend.up, "its end")
                answer = await opened.chat()
                assert (answer.status, answer.code) == (503, code)
                assert words in answer.json["error"]["message"]
                say("ready")
                await soon(lambda: backend.up, "readiness")
            gone = subprocess.Popen([sys.executable, "-c", ""])
            gone.wait()
            say("loading", runner=Pid(gone.pid))  # whoever wrote that is no more: the engine itself decides
            await asyncio.sleep(0.3)
            assert (await opened.chat()).status == 200
            state.write_text("garbage")
            assert (await opened.chat()).status == 200

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_death_in_the_middle_of_a_stream_is_said(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway(one_backend(engine.url)) as opened:
            answer = await opened.chat(stream=True)
            assert answer.status == 200
            error = msgspec.json.decode(answer.events[-1])
            assert error["error"]["code"] == "engine_down" and error["source"] == "loadmaster"
            assert b"[DONE]" not in answer.body
            assert all(b"delta" in event for event in answer.events[:-1]) and len(answer.events) >= 4
            again = await opened.chat()
            assert (again.status, again.code) == (503, "engine_down")
            assert b"loadmaster_streams_broken_total" in (await opened.ask("GET", "/metrics")).body

    with fake_engine(tmp_path, "--tps", "100", "--crash-after-tokens", "5") as engine:
        play(scene())


def test_death_before_the_answer_is_a_plain_error(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway(one_backend(engine.url)) as opened:
            answer = await opened.chat()
            assert (answer.status, answer.code) == (503, "engine_down")

    with fake_engine(tmp_path, "--tps", "100", "--crash-after-tokens", "5") as engine:
        play(scene())


@pytest.mark.parametrize(
    ("parts", "cut", "whole", "code"),
    [
        ((HEAD, chunk(b"data: 1\n\ndata: 2"), chunk(b"2\n\nda")), True, [b"1", b"22"], "engine_down"),
        ((HEAD, chunk(b"data: 1\n\ndata: [DO"), chunk(b"NE]\n\n"), b"0\r\n\r\n"), False, [b"1", b"[DONE]"], None),
        ((HEAD, chunk(b"data: 1\r\n\r\ndata: [DONE]\r\n\r\n"), b"0\r\n\r\n"), False, None, None),
        ((HEAD, chunk(b"data: 1\n\n"), b"0\r\n\r\n"), False, [b"1"], "engine_down"),
        ((HEAD, chunk(b"data: 1\n\n"), b"zz\r\n"), False, [b"1"], "engine_garbage"),
        ((HEAD, chunk(b'data: {"error": 1}\n\n'), b"0\r\n\r\n"), False, [b'{"error": 1}'], None),
    ],
    ids=["half-event", "split-event", "other-line-ends", "no-done", "broken-chunks", "own-error"],
)
def test_streams_end_whole_or_with_an_error(
    parts: tuple[bytes, ...], cut: bool, whole: list[bytes] | None, code: str | None
) -> None:
    async def scene() -> None:
        async with scripted(*parts, pause_s=0.05, cut=cut) as url, gateway(one_backend(url)) as opened:
            answer = await opened.chat(stream=True)
            assert answer.status == 200
            events = answer.events
            if code is not None:
                assert msgspec.json.decode(events.pop())["error"]["code"] == code
            if whole is not None:
                assert events == whole

    play(scene())


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ((b"\x00\xff garbage\r\n\r\n",), 502, "engine_garbage"),
        ((HEAD, chunk(b"\x00\x01\n\n")), 502, "engine_garbage"),
        ((HEAD.replace(b"text/event-stream", b"application/json"), chunk(b"{oh"), b"0\r\n\r\n"), 502, "engine_garbage"),
        ((HEAD.replace(b"text/event-stream", b"text/html"), chunk(b"<p>"), b"0\r\n\r\n"), 502, "engine_garbage"),
        ((b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",), 502, "engine_garbage"),
        ((b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n",), 502, "engine_refuses_gateway"),
        ((HEAD,), 503, "engine_down"),
        ((b"",), 503, "engine_down"),
        ((b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{}",), 503, "engine_down"),
    ],
)
def test_garbage_never_reaches_the_client(parts: tuple[bytes, ...], status: int, code: str) -> None:
    async def scene() -> None:
        async with scripted(*parts) as url, gateway(one_backend(url)) as opened:
            answer = await opened.chat(stream=True)
            assert (answer.status, answer.code) == (status, code)
            assert answer.json["source"] == "loadmaster"

    play(scene())


@pytest.mark.parametrize(
    ("status", "kind", "body", "expected"),
    [
        (400, "application/json", b'{"error": {"message": "no", "code": 400}}', {"message": "no", "code": 400}),
        (500, "application/json", b'{"error": "flat"}', {"message": "flat", "code": "engine_error"}),
        (
            404,
            "application/json",
            b'{"object": "error", "message": "old", "code": 404}',
            {"message": "old", "code": "404"},
        ),
        (422, "application/json", b'{"detail": [{"loc": 1}]}', {"message": '[{"loc":1}]'}),
        (
            500,
            "text/plain",
            b"Internal\x07 Server Error",
            {"message": "the engine answered 500: Internal\ufffd Server Error"},
        ),
        (503, "application/json", b"{", {"code": "engine_error"}),
    ],
)
def test_the_engines_errors_keep_their_words(status: int, kind: str, body: bytes, expected: dict[str, Any]) -> None:
    async def scene() -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nRetry-After: 7\r\nContent-Length: {len(body)}\r\n\r\n"
        async with scripted(head.encode() + body) as url, gateway(one_backend(url)) as opened:
            answer = await opened.chat()
            assert answer.status == status and answer.json["source"] == "engine"
            assert answer.json["error"] | expected == answer.json["error"]
            assert answer.headers["retry-after"] == "7"

    play(scene())


def test_ready_means_that_it_writes(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway(one_backend(engine.url)) as opened:
            assert (await opened.ask("GET", "/ready")).status == 200
            await seen(engine, stuck=True)
            assert (await opened.ask("GET", "/v1/models")).status == 200
            await asyncio.sleep(QUICK.answer_fresh_s)
            before = (await seen(engine))["requests"]
            answers = await asyncio.gather(*(opened.ask("GET", "/ready") for _ in range(5)))
            assert {(answer.status, answer.code) for answer in answers} == {(503, "engine_silent")}
            assert (await seen(engine))["requests"] - before <= 1  # one question for all

    with fake_engine(tmp_path) as engine:
        play(scene())


# ------------------------------------------------------------------------------------------------ replicas


def test_replicas_share_the_work_and_stand_in_for_each_other(tmp_path: Path) -> None:
    async def scene() -> None:
        backends = (*one_backend(first.url, concurrency=4), *one_backend(second.url, concurrency=4))
        async with gateway(backends) as opened:
            group = opened.gateway.backends.groups["fake"]
            assert group.admission.limit == 8
            answers = await asyncio.gather(*(opened.chat() for _ in range(8)))
            assert {answer.status for answer in answers} == {200}
            told = [await seen(engine) for engine in (first, second)]
            assert [one["requests"] for one in told] == [4, 4]
            first.child.stop(term_s=1.0)
            answers = await asyncio.gather(*(opened.chat() for _ in range(4)))
            assert {answer.status for answer in answers} == {200}  # refused connections go to the other one
            assert group.admission.limit == 4
            assert (await opened.ask("GET", "/ready")).status == 200

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        fake_engine(tmp_path / "a", "--delay", "0.1") as first,
        fake_engine(tmp_path / "b", "--delay", "0.1") as second,
    ):
        play(scene())


def test_an_engine_with_another_model_is_out(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway((BackendSettings(model="mine", url=engine.url),)) as opened:
            answer = await opened.chat(model="mine")
            assert (answer.status, answer.code) == (503, "engine_serves_another")
            assert "fake, not mine" in answer.json["error"]["message"]

    with fake_engine(tmp_path) as engine:
        play(scene())


# ------------------------------------------------------------------------------------------------ pictures


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_pictures_go_through_the_rules(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def rules(messages: list[Any]) -> tuple[list[Any], list[str]]:
        asked.append(messages)
        if "bad" in str(messages):
            raise ImageError("image_truncated", "the picture ends too early")
        return [{"role": "user", "content": [picture("data:image/jpeg;base64,AAAA")]}], ["scaled", "a\r\nb\u20ac"]

    async def scene() -> None:
        async with gateway(one_backend(engine.url), image_rules=rules) as opened:
            message = {"role": "user", "content": [{"type": "text", "text": "x"}, picture(PICTURE)]}
            answer = await opened.ask("POST", CHAT, json={"model": "fake", "messages": [message]})
            assert answer.status == 200 and answer.headers["x-loadmaster-changes"] == "scaled; a??b?"
            assert (await seen(engine))["last_body"]["messages"] == [
                {"role": "user", "content": [picture("data:image/jpeg;base64,AAAA")]}
            ]
            assert (await opened.chat("no picture")).status == 200 and len(asked) == 1
            message["content"] = [{"type": "image_url", "image_url": "http://bad.example/x.png", "uuid": "1"}]
            answer = await opened.ask("POST", CHAT, json={"model": "fake", "messages": [message]})
            assert (answer.status, answer.code) == (400, "image_truncated")
            assert asked[1][0]["content"] == [picture("http://bad.example/x.png")]
            assert opened.gateway.backends.groups["fake"].admission.tickets == 0

    with fake_engine(tmp_path) as engine:
        play(scene())


def test_without_rules_nothing_is_fetched(tmp_path: Path) -> None:
    async def scene() -> None:
        async with gateway(one_backend(engine.url)) as opened:

            async def status(path: str, **body: Any) -> int:
                return (await opened.ask("POST", path, json={"model": "fake", **body})).status

            def chat(part: Any) -> Any:
                return {"messages": [{"role": "user", "content": [part]}]}

            assert await status(CHAT, **chat(picture(PICTURE))) == 200
            before = (await seen(engine))["requests"]
            for url in ("http://127.0.0.1:1/", "file:///etc/passwd", "ftp://x", "//x", "HTTPS://x", " data:", "x"):
                assert await status(CHAT, **chat(picture(url))) == 400
                assert await status(CHAT, **chat({"image_url": url})) == 400
                assert await status(CHAT, **chat({"type": "text", "text": "", "image_url": url, "uuid": "1"})) == 400
                assert await status(CHAT, **chat({"type": "video_url", "video_url": {"url": url}})) == 400
                assert await status(CHAT, **chat({"type": "input_image", "image_url": url})) == 400
                assert await status("/tokenize", **chat(picture(url))) == 400
                source = {"type": "image", "source": {"type": "url", "url": url}}
                assert await status("/v1/messages", **chat(source)) == 400
                result = {"type": "tool_result", "tool_use_id": "1", "content": [source]}
                assert await status("/v1/messages", **chat(result)) == 400
                shown = {"type": "input_image", "image_url": url}
                assert await status("/v1/responses", input=[{"role": "user", "content": [shown]}]) == 400
                assert await status("/v1/responses", input=[{"type": "function_call_output", "output": [shown]}]) == 400
            for part in (
                {"type": "image_pil", "image_pil": 1},
                {"type": "prompt_embeds", "data": ""},
                {"type": "file"},
                1,
            ):
                assert await status(CHAT, **chat(part)) == 400
            assert (
                await status(CHAT, **chat({"type": "text", "text": "x"}), mm_processor_kwargs={"min_pixels": 9}) == 400
            )
            assert (await seen(engine))["requests"] == before

    with fake_engine(tmp_path) as engine:
        play(scene())


# ---------------------------------------------------------------------------------------- start and end


PROGRAM = """
import sys
from loadmaster.service.gateway import serve
from loadmaster.service.gatewaysettings import BackendSettings, GatewaySettings, LimitSettings
settings = GatewaySettings(
    backends=(BackendSettings(model="fake", url=sys.argv[1]),), port=int(sys.argv[2]), address_file=sys.argv[3],
    limits=LimitSettings(drain_s=float(sys.argv[4])))
serve(settings, lambda url: print(url, flush=True))
"""


def start(engine_url: str, port: int, address: Path, drain_s: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", PROGRAM, engine_url, str(port), str(address), str(drain_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("drain_s", "whole"), [(10.0, True), (0.1, False)])
def test_it_stops_when_told_and_not_in_the_middle(tmp_path: Path, drain_s: float, whole: bool) -> None:
    address = tmp_path / "web.json"

    async def scene(url: str, program: subprocess.Popen[str]) -> None:
        async with aiohttp.ClientSession() as session:
            body = {"stream": True, "messages": [{"role": "user", "content": "x"}]}
            async with session.post(url + CHAT, json=body) as answer:
                text = await answer.content.readany()
                program.send_signal(signal.SIGTERM)
                async for part in answer.content.iter_any():
                    text += part
            if whole:
                assert text.endswith(b"data: [DONE]\n\n")
            else:
                last = text.split(b"\n\n")[-2].removeprefix(b"data: ")
                assert msgspec.json.decode(last)["error"]["code"] == "gateway_stopping"
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(url + "/health")

    with fake_engine(tmp_path, "--tps", "20", "--tokens", "10") as engine:
        program = start(engine.url, 0, address, drain_s)
        try:
            assert program.stdout is not None
            url = program.stdout.readline().strip()
            told = json.loads(address.read_text())
            assert told["url"] == url and told["pid"] == program.pid and told["port"] > 0
            play(scene(url, program))
            assert program.wait(10) == 0
            assert not address.exists()
            assert program.stderr is not None and program.stderr.read() == ""
        finally:
            program.kill()
            program.communicate()


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    async def scene() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            settings = GatewaySettings(backends=one_backend("http://127.0.0.1:1"), port=taken.getsockname()[1])
            with pytest.raises(OSError, match="address already in use"):
                await Listener(create_app(settings), settings).open()

    play(scene())


def test_connections_are_bounded(tmp_path: Path) -> None:
    async def scene() -> None:
        limits = LimitSettings(max_connections=3, idle_connection_s=0.3)
        async with scripted() as url, gateway(one_backend(url), limits=limits) as opened:
            pairs = [await asyncio.open_connection("127.0.0.1", opened.port) for _ in range(3)]
            assert await opened.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
            for reader, writer in pairs:  # silent ones are closed after a while
                assert await asyncio.wait_for(reader.read(), 5) == b""
                writer.close()
            assert (await opened.ask("GET", "/health")).status == 200

    play(scene())


@pytest.mark.parametrize(
    ("route", "events", "whole"),
    [
        (CHAT, b'data: {"choices": [{"delta": {"content": "[DONE]"}}]}\n\n', False),
        (CHAT, b'data: {"choices": [{"delta": {"content": "an \\"error\\""}}], "error": null}\n\n', False),
        (CHAT, b"data: [DONE]\n\n", True),
        (CHAT, b"data:[DONE]\r\n\r\n: still here\r\n\r\n", True),
        (CHAT, b'data: {"error": {"message": "no memory"}}\n\n', True),
        ("/v1/responses", b'event: response.in_progress\ndata: {"type": "response.in_progress", "error": null}\n\n', False),
        (
            "/v1/responses",
            b'data: {"type": "response.output_text.delta", "delta": "response.completed \\"error\\""}\n\n',
            False,
        ),
        ("/v1/responses", b'event: response.completed\ndata: {"type": "response.completed"}\n\n', True),
        ("/v1/responses", b'data: {"type": "error", "message": "x"}\n\n', True),
        ("/v1/messages", b'event: content_block_delta\ndata: {"type": "content_block_delta", "x": "message_stop"}\n\n', False),
        ("/v1/messages", b'event: message_stop\ndata: {"type": "message_stop"}\n\n', True),
        (CHAT, b"data: [DONE]\n\ndata: {broken\n\n", False),
    ],
)  # fmt: skip
def test_the_end_of_a_stream_is_known_by_the_type_of_its_last_event(route: str, events: bytes, whole: bool) -> None:
    assert is_end(events, route) is whole


def test_a_responses_stream_that_breaks_off_ends_with_an_error_event() -> None:
    async def scene() -> None:
        event = b'event: response.in_progress\ndata: {"type": "response.in_progress", "response": {"error": null}}\n\n'
        ends = b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)
        async with scripted(HEAD, ends) as url, gateway(one_backend(url)) as opened:
            answer = await opened.ask("POST", "/v1/responses", json={"model": "fake", "input": "x", "stream": True})
            assert answer.status == 200 and len(answer.events) == 2
            last = msgspec.json.decode(answer.events[-1].partition(b"data: ")[2])
            assert (last["type"], last["code"]) == ("error", "engine_down")

    play(scene())


def test_an_expectation_that_nobody_meets_is_refused_with_an_error_object() -> None:
    async def scene() -> None:
        async with scripted() as url, gateway(one_backend(url)) as opened:
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("POST", "/nowhere"), ("DELETE", CHAT)):
                answer = await opened.raw(
                    f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: a-miracle\r\n"
                    "Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}".encode()
                )
                head, _, body = answer.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 417 "), answer
                assert b"application/json" in head and b"X-Request-Id" in head
                assert msgspec.json.decode(body)["error"]["code"] == "expectation_failed"
            answer = await opened.raw(
                f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\nConnection: close\r\n"
                "Content-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n".encode()
            )
            assert answer.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in answer
            text = (await opened.ask("GET", "/metrics")).body
            assert figure(text, "loadmaster_requests_total", route=CHAT, status="417") == 1
            assert figure(text, "loadmaster_requests_total", route=CHAT, status="413") == 1

    play(scene())


def json_answer(body: bytes) -> tuple[bytes, bytes]:
    return HEAD.replace(b"text/event-stream", b"application/json"), chunk(body) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("tokens", "answer"),
    [
        (b"[5, 7, 7]", {"count": 3, "tokens": [5, 7, 7]}),
        (
            b'[{"id": 5, "piece": "a"}, {"id": 7, "piece": [195, 169]}]',
            {"count": 2, "tokens": [5, 7], "token_strs": ["a", "\u00e9"]},
        ),
        (b"[]", {"count": 0, "tokens": []}),
        (b"null", None),
    ],
)
def test_llamacpp_tokenizes_in_the_words_of_vllm(tokens: bytes, answer: dict[str, Any] | None) -> None:
    async def scene() -> None:
        answers = json_answer(b'{"tokens": ' + tokens + b"}")
        async with scripted(*answers) as url, gateway(one_backend(url, llamacpp=True)) as opened:
            told = await opened.ask("POST", "/tokenize", json={"model": "fake", "prompt": "a\u00e9"})
            if answer is None:
                assert (told.status, told.code) == (502, "engine_garbage")
            else:
                assert told.status == 200 and told.json == answer
            messages = [{"role": "user", "content": "x"}]
            told = await opened.ask("POST", "/tokenize", json={"model": "fake", "messages": messages})
            assert (told.status, told.code) == (400, "tokenize_messages")

    play(scene())


def test_a_prompt_is_sent_to_llamacpp_as_content() -> None:
    body = {"model": "m", "prompt": "x", "add_special_tokens": False, "return_token_strs": True}
    assert llamacpp_request(body) == {"model": "m", "content": "x", "add_special": False, "with_pieces": True}
    assert llamacpp_request({"model": "m", "prompt": "x"})["add_special"] is True


def test_replicas_of_two_kinds_do_not_tokenize() -> None:
    async def scene() -> None:
        async with scripted(*json_answer(b'{"tokens": [1]}')) as url:
            backends = (BackendSettings(model="fake", url=url, llamacpp=True), BackendSettings(model="fake", url=url))
            async with gateway(backends) as opened:
                told = await opened.ask("POST", "/tokenize", json={"model": "fake", "prompt": "x"})
                assert (told.status, told.code) == (400, "tokenize_not_offered")

    play(scene())
