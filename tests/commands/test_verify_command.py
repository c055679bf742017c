"""verify as a command: what it says, where it writes, and its exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import aiohttp
import pytest

from loadmaster.commands import verify as verify_module
from loadmaster.commands.verify import verify
from loadmaster.config import load_deployment, write_deployment
from loadmaster.core.deployment import Deployment, EngineSection, KeysSection
from loadmaster.failure import Failure
from loadmaster.service import verifyload, verifypictures
from loadmaster.service.keys import write_own_key
from loadmaster.service.places import Places
from loadmaster.service.verifyclient import Service
from tests.commands.transcript import Transcript, run
from tests.service.seeing_service import serving_in_thread


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(verifypictures, "HUGE", (1200, 900))
    monkeypatch.setattr(verifyload, "_FREE_AGAIN_S", 0.5)
    yield tmp_path


def verified(*arguments: str) -> Transcript:
    return run(verify, arguments, "verify")


def shape(text: str) -> str:
    """The output with what changes from run to run taken out."""
    text = re.sub(r"http://127\.0\.0\.1:\d+", "URL", text)
    text = re.sub(r" +\d+\.\d\d s\b", " N s", text)
    return re.sub(r"\d+\.\d s", "N s", text)


@pytest.mark.parametrize(
    ("fault", "code", "last"),
    [
        ("chinese", 0, "PASSED: the service works"),
        ("blind", 1, "FAILED: the picture path is broken: the model knows the answer in words, and not\n    from"),
        ("drops", 1, "FAILED: the picture path is broken: image\n"),
        ("swaps", 1, "FAILED: the picture path is broken"),
        ("stream-no-done", 1, "FAILED: the service does not work: stream"),
        ("weak", 3, "COULD NOT TELL: could not tell whether pictures arrive: the model is too weak"),
        ("text-only", 3, "COULD NOT TELL: could not tell whether pictures should arrive"),
    ],
)
def test_the_exit_code_is_the_verdict(fault: str, code: int, last: str) -> None:
    with serving_in_thread(fault) as url:
        done = verified("--url", url, "--concurrency", "4")
    assert (done.code, done.err) == (code, "")
    assert done.out.startswith(f"{url}\n\n    ok  models")
    assert last in done.out


def test_steps_are_shown_one_a_line() -> None:
    with serving_in_thread("weak") as url:
        done = verified("--url", url + "/v1/", "--concurrency", "4")
    text = shape(done.out)
    assert "    ok  stream" in text
    assert "  weak  control-colour" in text
    assert "     -  image-colour" in text
    assert re.search(r"\n9 passed, 0 failed, 2 too hard for the model, 10 not applicable; N s\n", text)
    assert max(len(line) for line in done.out.splitlines()) <= 80


def test_json_is_the_only_thing_on_stdout() -> None:
    with serving_in_thread("blind") as url:
        done = verified("--url", url, "--json", "--concurrency", "2")
    document = json.loads(done.out)
    assert (done.code, done.err) == (1, "")
    assert document["ok"] is False
    assert document["limits"]["concurrency"] == 2
    assert {step["name"]: step["status"] for step in document["steps"]}["image-colour"] == "failed"


def test_a_page_is_written(tmp_path: Path) -> None:
    with serving_in_thread() as url:
        assert verified("--url", url, "--html", str(tmp_path / "report.html")).code == 0
        assert "<h1>" in (tmp_path / "report.html").read_text()
        done = verified("--url", url, "--html", str(tmp_path / "no" / "report.html"))
    assert done.code == 1
    assert done.err == f"error: cannot write {tmp_path}/no/report.html: No such file or directory\n"


def test_the_key_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    with serving_in_thread("key") as url:
        assert verified("--url", url, "--api-key-file", str(tmp_path / "key")).code == 0
        done = verified("--url", url)
    assert done.code == 1
    assert "--api-key-file" in done.out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no key"),
        (b"\xff\xfe", "is not a text file"),
        ("schlüssel".encode(), "is no key"),
        (None, "cannot read"),
    ],
)
def test_what_is_no_key_is_said(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    done = verified("--url", "http://127.0.0.1:9", "--api-key-file", str(tmp_path / "key"))
    assert done.code == 2
    assert said in done.err


def test_nobody_there() -> None:
    done = verified("--url", "http://127.0.0.1:9", "--timeout", "5")
    assert done.code == 1
    assert "FAILED  models" in done.out
    assert "cannot connect to http://127.0.0.1:9" in " ".join(done.out.split())


def test_a_password_in_the_address_is_never_shown(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    address = "http://someone:secretpw@127.0.0.1:9/v1"
    for more in ((), ("--json",)):
        done = verified("--url", address, "--timeout", "5", "--html", str(page), *more)
        assert done.code == 1
        text = done.out + done.err + page.read_text(encoding="utf-8")
        assert "http://127.0.0.1:9" in text
        assert "secretpw" not in text and "someone" not in text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "error: name a deployment, or a service with --url; there is none yet\n"),
        (("--url", "localhost:8000"), "error: 'localhost:8000' is no address of a service\n"),
        (("one", "--url", "http://x"), "error: either the name of a deployment or --url, not both\n"),
        (("one",), "error: no deployment 'one'\n"),
        (("--url", "http://"), "error: 'http://' is no address of a service\n"),
        (("--url", "http://[::1"), "error: 'http://[::1' is no address of a service\n"),
        (("--url", "http://127.0.0.1:abc"), "error: 'http://127.0.0.1:abc' is no address of a service\n"),
        (("--url", "http://me:secretpw@h:99999"), "error: 'http://***@h:99999' is no address of a service\n"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], error: str) -> None:
    done = verified(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(error)


def deployed(name: str, keys: KeysSection | None = None) -> None:
    engine = EngineSection(kind="command", command=["true"])
    write_deployment(Deployment(name=name, model="m", engine=engine, keys=keys or KeysSection()))


def test_a_deployment_that_is_down_is_said() -> None:
    deployed("one")
    done = verified()
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: one is not up: down\nhint: loadmaster up one\n"


def test_several_deployments_have_to_be_named() -> None:
    deployed("one")
    deployed("two")
    assert verified().err == "error: name a deployment, or a service with --url; there are: one, two\n"


def test_the_key_is_the_gateways_own_else_one_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed("one", KeysSection(environment="MY_KEYS"))
    loaded = load_deployment("one")
    with pytest.raises(Failure, match="MY_KEYS, which is not set here") as refused:
        verify_module._key_of(loaded)
    assert refused.value.hint == "give the key with --api-key-file"
    monkeypatch.setenv("MY_KEYS", "alice=sk-0123456789abcdefghij, bob=sk-x")
    assert verify_module._key_of(loaded) == "sk-0123456789abcdefghij"
    monkeypatch.setenv("MY_KEYS", "sk-0123456789=abcdefghij")  # the equals sign is a part of this one
    assert verify_module._key_of(loaded) == "sk-0123456789=abcdefghij"
    own = write_own_key(Places(loaded.path.parent).web_key)
    assert verify_module._key_of(loaded) == own


def test_a_key_that_is_kept_as_a_hash_has_to_be_given_where_the_gateway_made_none() -> None:
    deployed("one", KeysSection(file="keys"))
    with pytest.raises(Failure, match="keeps only its hash"):
        verify_module._key_of(load_deployment("one"))


def test_credentials_in_the_address_are_sent_unless_a_key_is_given() -> None:
    session = cast(aiohttp.ClientSession, None)
    assert Service(session, "http://me:pw@h")._headers == {"Authorization": "Basic bWU6cHc="}
    assert Service(session, "http://me:pw@h", api_key="sk")._headers == {"Authorization": "Bearer sk"}
    assert Service(session, "http://h")._headers == {}
