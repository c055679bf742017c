"""Keys: never kept, never told, valid and invalid at once, and counted."""

from __future__ import annotations

import asyncio
import logging
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from loadmaster.commands.keys import keys as keys_command
from loadmaster.service.gatewaysettings import LimitSettings
from loadmaster.service.keys import Allowance, Key, KeyRing, KeysError, KeyUse, add_key, read_keys, remove_key
from tests.commands.transcript import run
from tests.gateways import gateway, one_backend
from tests.running import fake_engine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_found_by_its_secret_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first, second = add_key(path, "ann"), add_key(path, "bob")
    ring = KeyRing(path, None)
    assert [key.name for key in (ring.find(first), ring.find(second)) if key] == ["ann", "bob"]
    for wrong in ("", first[:-1], first + "x", first.upper(), "ann", ring.keys[0].hash, ring.keys[0].salt, "\udcff"):
        assert ring.find(wrong) is None


def test_the_file_holds_no_secret_and_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.json"
    secrets = [add_key(path, f"key{number}") for number in range(3)]
    text = path.read_text()
    assert not any(secret in text or secret[3:] in text for secret in secrets)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = read_keys(path)
    assert len({key.salt for key in found}) == len({key.hash for key in found}) == 3
    assert len(set(secrets)) == 3 and all(len(secret) >= 43 for secret in secrets)


def test_names_are_unique_and_plain(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "ann")
    with pytest.raises(KeysError, match="already"):
        add_key(path, "ann")
    for name in ("", "a b", "a\n", "-a", "x" * 65):
        with pytest.raises(KeysError, match="letters"):
            add_key(path, name)
    with pytest.raises(KeysError, match="no key 'bob'"):
        remove_key(path, "bob")
    remove_key(path, "ann")
    assert read_keys(path) == ()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema": 2, "keys": []}',
        b'{"keys": [{"name": "a", "salt": "zz", "hash": ""}]}',
        b'{"keys": [{"name": "a", "salt": "00", "hash": "00"}]}',
        b'{"keys": [], "more": 1}',
        b"[" * 5000,
    ],
)
def test_a_damaged_file_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    with pytest.raises(KeysError, match=r"keys\.json"):
        KeyRing(path, None)


def test_a_ring_follows_its_file(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    first = add_key(path, "ann")
    ring = KeyRing(path, None, clock)
    second = add_key(path, "bob")
    assert ring.find(second) is None  # not looked at again yet
    clock.now += 2
    assert ring.find(second) is not None
    remove_key(path, "ann")
    clock.now += 2
    assert ring.find(first) is None and ring.find(second) is not None
    path.write_text("{")
    clock.now += 2
    assert ring.find(second) is not None  # damaged: as it was
    path.unlink()
    clock.now += 2
    assert ring.find(second) is None  # gone: no keys


def test_keys_of_the_environment() -> None:
    long, other = "k" * 24, "b" * 24
    ring = KeyRing(None, f"ann={long},\n  {other}")
    found = [ring.find(long), ring.find(other)]
    assert [key.name if key else None for key in found] == ["ann", "environment-2"]
    with pytest.raises(KeysError, match="20"):
        KeyRing(None, "short")
    with pytest.raises(KeysError):
        KeyRing(None, " ")


def test_an_allowance_refills_evenly() -> None:
    clock = Clock()
    allowance = Allowance(6, clock)
    assert [allowance.take() for _ in range(7)] == [None] * 6 + [10]
    clock.now += 9.5
    assert allowance.take() == 1
    clock.now += 0.6
    assert allowance.take() is None
    clock.now += 3600
    assert [allowance.take() for _ in range(7)].count(None) == 6


def test_use_of_a_key_by_its_own_limits_and_the_gateways() -> None:
    clock = Clock()
    use = KeyUse(2, 1, clock)
    ann = Key(name="ann", salt="", hash="", requests_per_minute=100, requests_at_once=2)
    bob = Key(name="bob", salt="", hash="")
    assert use.begin(ann) is None and use.begin(ann) is None
    assert use.begin(ann) == ("at once", 1)
    use.end(ann)
    assert use.begin(ann) is None
    assert use.begin(bob) is None
    assert use.begin(bob) == ("at once", 1)
    use.end(bob)
    assert use.begin(bob) is None
    use.end(bob)
    assert use.begin(bob) == ("minute", 30)


def test_the_gateway_asks_for_keys_everywhere_it_matters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "keys.json"
    secret = add_key(path, "ann")

    async def ask(url: str) -> None:
        async with gateway(one_backend(url), keys_file=str(path)) as opened:
            assert (await opened.ask("GET", "/health")).status == 200
            assert (await opened.ask("GET", "/ready")).status == 200
            for method, route in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/chat/completions")):
                answer = await opened.ask(method, route)
                assert (answer.status, answer.code) == (401, "api_key_missing")
                assert answer.headers["www-authenticate"] == "Bearer"
                for header in ("Bearer", "Bearer ", f"Basic {secret}", f"Bearer {secret}x", f"Bearer {'k' * 600}"):
                    answer = await opened.ask(method, route, Authorization=header)
                    assert (answer.status, answer.code) == (401, "api_key_invalid")
                    assert secret not in answer.body.decode()
            twice = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{f'Authorization: Bearer {secret}{chr(13)}{chr(10)}' * 2}\r\n"
            assert b" 401 " in await opened.raw(twice.encode())
            assert (await opened.ask("GET", "/v1/models", Authorization=f"Bearer {secret}")).status == 200
            assert (await opened.ask("GET", "/metrics", Authorization=f"bearer {secret}")).status == 200
            answer = await opened.chat(headers={"Authorization": f"Bearer {secret}"})
            assert answer.status == 200

    with fake_engine(tmp_path) as engine:
        asyncio.run(ask(engine.url))
        seen = engine.fake()
    assert "authorization" not in seen["last_headers"]
    assert secret not in caplog.text


def test_the_engine_gets_its_own_key(tmp_path: Path) -> None:
    async def ask(url: str) -> None:
        async with gateway(one_backend(url, api_key="of-the-engine")) as opened:
            assert (await opened.chat()).status == 200
        async with gateway(one_backend(url, api_key="another")) as opened:
            answer = await opened.chat()
            assert (answer.status, answer.code) == (503, "engine_down")
            assert "another" not in answer.body.decode().replace("asks for another key", "")

    with fake_engine(tmp_path, "--api-key", "of-the-engine") as engine:
        asyncio.run(ask(engine.url))
        assert engine.fake()["last_headers"]["authorization"] == "Bearer of-the-engine"


def test_a_key_has_its_share(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    slow, free = add_key(path, "slow", requests_per_minute=2), add_key(path, "free", requests_at_once=1)

    async def ask(url: str) -> None:
        async with gateway(
            one_backend(url), keys_file=str(path), limits=LimitSettings(requests_per_minute=100)
        ) as opened:
            answers = [await opened.chat(headers={"Authorization": f"Bearer {slow}"}) for _ in range(3)]
            assert [answer.status for answer in answers] == [200, 200, 429]
            assert answers[2].code == "rate_limit_exceeded" and int(answers[2].headers["retry-after"]) == 30
            both = await asyncio.gather(*(opened.chat(headers={"Authorization": f"Bearer {free}"}) for _ in range(2)))
            assert sorted(answer.status for answer in both) == [200, 429]
            assert (await opened.chat(headers={"Authorization": f"Bearer {free}"})).status == 200

    with fake_engine(tmp_path, "--delay", "0.2") as engine:
        asyncio.run(ask(engine.url))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("time.time", lambda: datetime(2026, 11, 30, tzinfo=UTC).timestamp())
    path = tmp_path / "keys.json"

    def loadmaster(*arguments: str) -> tuple[int, str, str]:
        return run(keys_command, arguments, "keys").without(path=str(path))

    assert loadmaster("list", "--file", str(path)) == (
        0,
        "",
        "no keys in PATH; make one with: loadmaster keys add NAME\n",
    )
    code, out, err = loadmaster("add", "ann", "--file", str(path), "--per-minute", "60")
    assert (code, err) == (0, "key ann is in PATH; it cannot be shown again\n")
    key = KeyRing(path, None).find(out.strip())
    assert key is not None and key.name == "ann"
    assert loadmaster("add", "ann", "--file", str(path)) == (
        2,
        "",
        "error: there is a key 'ann' already\nhint: remove it first, or choose another name\n",
    )
    loadmaster("add", "longer.name", "--file", str(path), "--at-once", "2")
    assert loadmaster("list", "--file", str(path)) == (
        0,
        "ann          made 2026-11-30  60 requests a minute\nlonger.name  made 2026-11-30  2 requests at once\n",
        "",
    )
    assert '"requests_per_minute": 60' in loadmaster("list", "--file", str(path), "--json")[1]
    assert loadmaster("remove", "bob", "--file", str(path)) == (
        2,
        "",
        "error: there is no key 'bob'\nhint: `loadmaster keys list` shows the names\n",
    )
    assert loadmaster("remove", "ann", "--file", str(path)) == (0, "", "key ann is removed from PATH\n")
    assert loadmaster("add", "ann") == (
        2,
        "",
        "error: whose keys? say --deployment NAME\nhint: there is no deployment; --file names a file\n",
    )


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, out, err = run(keys_command, ("add", "ann", "--file", str(blocked / "keys.json")), "keys").without()
    assert (code, out) == (1, "") and err.startswith("error: cannot write ") and "file exists" in err
