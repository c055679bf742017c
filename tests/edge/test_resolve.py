"""Names and paths to models: caches on disk, a hub over loopback, and no network at all."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loadmaster.edge import hub
from loadmaster.edge.modeldir import read_model
from loadmaster.edge.resolve import resolve
from loadmaster.edge.sample import write_sample
from loadmaster.edge.source import LocalSource, ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's caches, tokens and proxies."""
    for name in list(os.environ):
        if name.upper().startswith(("HF_", "HUGGING", "MODELSCOPE", "VLLM", "TRANSFORMERS", "XDG")):
            monkeypatch.delenv(name)
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample("Qwen3-8B", "awq-g128", tmp_path_factory.mktemp("model") / "m", layers=2, shard_bytes=1 << 30)


def into_cache(model: Path, cache: Path, name: str = "org/name") -> Path:
    """The model as huggingface_hub lays it out; blobs are named by their hash."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for path in model.iterdir():
        if path.suffix == ".safetensors":
            blob = folder / "blobs" / hashlib.sha256(path.name.encode()).hexdigest()
            os.link(path, blob)
        else:
            content = path.read_bytes()
            blob = folder / "blobs" / hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            blob.write_bytes(content)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


# ----------------------------------------------------------------------------------------------------- local paths


def test_directory_and_file_inside(model: Path) -> None:
    for name in (model, model / "config.json", next(model.glob("*.safetensors"))):
        source = resolve(str(name))
        assert isinstance(source, LocalSource)
        assert source.directory == model
    assert read_model(str(model)).findings == ()


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    for name in ("/no/such/dir", "./nothing", "a/b/c", "../x", "", "bad\0name", "org/../name"):
        with pytest.raises(ModelError) as caught:
            resolve(name, {})
        assert caught.value.hint
    with pytest.raises(ModelError):
        read_model(str(tmp_path))


def test_a_gguf_file_goes_to_its_own_reader(tmp_path: Path) -> None:
    path = tmp_path / "model-Q4_K_M.gguf"
    path.write_bytes(b"GGUF")
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert resolve(str(path)) == path
    assert resolve(str(tmp_path)) == path


# ----------------------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize(
    ("place", "variables"),
    [
        (".cache/huggingface/hub", {}),
        ("xdg/huggingface/hub", {"XDG_CACHE_HOME": "{}/xdg"}),
        ("home/hub", {"HF_HOME": "{}/home"}),
        ("direct", {"HF_HUB_CACHE": "{}/direct", "HF_HOME": "{}/elsewhere"}),
    ],
)
def test_hugging_face_cache(place: str, variables: dict[str, str], model: Path, tmp_path: Path) -> None:
    snapshot = into_cache(model, tmp_path / place)
    environment = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment |= {name: value.format(tmp_path) for name, value in variables.items()}
    for name in ("org/name", "org/name@main", f"org/name@{COMMIT}", str(snapshot), str(snapshot.parent.parent)):
        source = resolve(name, environment)
        assert isinstance(source, LocalSource)
        assert source.directory == snapshot
        assert source.origin.repository == "org/name"
    with pytest.raises(ModelError):
        resolve("org/name@other", environment)


def test_a_link_whose_blob_is_gone_is_a_missing_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = into_cache(model, tmp_path / "hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    victim = min(snapshot.glob("*.safetensors"))
    victim.resolve().unlink()
    facts = read_model("org/name")
    (finding,) = facts.findings
    assert finding.code == "weights-missing-shard"
    assert finding.evidence[0].path == victim.name
    assert finding.fixes[0].command == f"hf download org/name --include {victim.name}"
    assert next(file.status for file in facts.files if file.name == victim.name) == "missing"


def test_an_unfinished_blob_is_a_leftover(model: Path, tmp_path: Path) -> None:
    snapshot = into_cache(model, tmp_path / "hub")
    (snapshot.parent.parent / "blobs" / "abc.incomplete").write_bytes(b"12345")
    facts = read_model(str(snapshot))
    (finding,) = facts.findings
    assert finding.code == "download-incomplete"
    assert finding.evidence[0].text == "5 bytes"
    assert facts.name == "org/name"


@pytest.mark.parametrize("place", ["hub/models/org/na___me-1___5", "hub/org/na___me-1___5", "hub/models/org/na.me-1.5"])
def test_modelscope_cache(place: str, model: Path, tmp_path: Path) -> None:
    target = tmp_path / ".cache" / "modelscope" / place
    target.parent.mkdir(parents=True)
    target.symlink_to(model)
    environment = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    source = resolve("org/na.me-1.5", environment)
    assert isinstance(source, LocalSource)
    assert (source.origin.repository, source.origin.hub) == ("org/na.me-1.5", "modelscope")
    by_path = resolve(str(target), environment)
    assert isinstance(by_path, LocalSource)
    assert by_path.origin.repository == "org/na.me-1.5"
    moved = resolve(
        "org/na.me-1.5", {"MODELSCOPE_CACHE": str(tmp_path / ".cache/modelscope/hub"), "HF_HUB_OFFLINE": "1"}
    )
    assert moved.label == "org/na.me-1.5"  # type: ignore[union-attr]


def test_offline_refuses_what_is_in_no_cache(tmp_path: Path) -> None:
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        with pytest.raises(ModelError) as caught:
            resolve("org/name", {variable: "1", "HOME": str(tmp_path)})
        assert caught.value.code == "hub-offline"
        assert variable in caught.value.message


# ---------------------------------------------------------------------------------------------------------- hashes


def hashed_cache(tmp_path: Path, content: bytes) -> Path:
    """A cache with one small weight file under its true hash, and a configuration."""
    model = tmp_path / "made"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    header = json.dumps({"a": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + content
    (model / "model.safetensors").write_bytes(whole)
    snapshot = into_cache(model, tmp_path / "hub")
    link = snapshot / "model.safetensors"
    blob = link.resolve()
    link.unlink()
    true = blob.with_name(hashlib.sha256(whole).hexdigest())
    blob.rename(true)
    link.symlink_to(os.path.relpath(true, snapshot))
    return snapshot


def test_content_is_compared_with_the_names_of_the_blobs(tmp_path: Path) -> None:
    snapshot = hashed_cache(tmp_path, b"x" * 5000)
    seen: list[tuple[int, int, str]] = []
    facts = read_model(str(snapshot), hash_files=True, progress=lambda *args: seen.append(args))
    assert {file.name: file.content_verified for file in facts.files} == {
        "config.json": True,
        "model.safetensors": True,
    }
    total = sum(path.stat().st_size for path in snapshot.iterdir())
    assert seen[-1][0] == seen[-1][1] == total
    assert {name for _, _, name in seen} == {"config.json", "model.safetensors"}
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)

    blob = (snapshot / "model.safetensors").resolve()
    damaged = bytearray(blob.read_bytes())
    damaged[-1] ^= 1
    blob.write_bytes(damaged)
    facts = read_model(str(snapshot), hash_files=True)
    finding = facts.findings[0]
    assert finding.code == "weights-truncated"
    assert blob.name in finding.evidence[0].text
    assert finding.fixes[0].command == "hf download org/name --include model.safetensors --force-download"
    assert next(file for file in facts.files if file.name == "model.safetensors").status == "hash-mismatch"


def test_local_directories_carry_hashes_too(tmp_path: Path) -> None:
    snapshot = hashed_cache(tmp_path, b"y" * 100)
    local = tmp_path / "local"
    metadata = local / ".cache" / "huggingface" / "download"
    metadata.mkdir(parents=True)
    for path in snapshot.iterdir():
        (local / path.name).write_bytes(path.read_bytes())
        (metadata / f"{path.name}.metadata").write_text(f"{COMMIT}\n{path.resolve().name}\n1700000000.0\n")
    facts = read_model(str(local), hash_files=True)
    assert {file.content_verified for file in facts.files if file.kind in ("weights", "config")} == {True}
    for path in metadata.iterdir():
        path.unlink()
    facts = read_model(str(local), hash_files=True)
    assert "hash-unknown" in {finding.code for finding in facts.findings}
    assert {file.content_verified for file in facts.files} == {None}


# ------------------------------------------------------------------------------------------------------------- hub


@dataclass
class Hub:
    """A hub over loopback. ``blobs_elsewhere``: weight files are redirected to a second host."""

    model: Path
    token: str | None = None
    ignores_ranges: bool = False
    status: int | None = None
    listing: bytes | None = None
    blobs_elsewhere: str | None = None
    seen: list[tuple[str, str | None, str | None]] = field(default_factory=list)  # path, range, authorisation
    sent: int = 0
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.hub.sent += len(body)
        self.wfile.write(body)

    def do_GET(self) -> None:
        state = self.hub
        state.seen.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if state.status is not None:
            return self.answer(state.status)
        if state.token is not None and self.headers.get("Authorization") != f"Bearer {state.token}":
            return self.answer(401)
        if self.path.startswith("/api/models/"):
            files = [{"rfilename": p.name, "size": p.stat().st_size} for p in sorted(state.model.iterdir())]
            body = json.dumps({"sha": COMMIT, "siblings": files}).encode()
            return self.answer(200, state.listing if state.listing is not None else body)
        name = self.path.rsplit("/", 1)[1]
        if state.blobs_elsewhere and name.endswith(".safetensors"):
            return self.answer(302, Location=f"{state.blobs_elsewhere}/{name}")
        return self.send_file(state.model / name)

    def send_file(self, path: Path) -> None:
        if not path.exists():
            return self.answer(404)
        size = path.stat().st_size
        wanted = self.headers.get("Range")
        if wanted is None or self.hub.ignores_ranges:
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            with path.open("rb") as file:
                while chunk := file.read(1 << 16):
                    try:
                        self.wfile.write(chunk)
                    except OSError:
                        return None  # the client has what it wanted
                    self.hub.sent += len(chunk)
            return None
        start, end = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
        if start >= size:
            return self.answer(416)
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(min(end, size - 1) - start + 1)
        return self.answer(206, body, Content_Range=f"bytes {start}-{start + len(body) - 1}/{size}")


def serve(state: Hub) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": state}))
    server.daemon_threads = True
    state.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


@pytest.fixture
def hubs(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, Hub]]:
    """A hub, and the second host of its large files."""
    states = (Hub(model), Hub(model))
    servers = [serve(state) for state in states]
    monkeypatch.setenv("HF_ENDPOINT", states[0].endpoint)
    yield states
    for server in servers:
        server.shutdown()
        server.server_close()


def test_configuration_and_headers_from_a_hub(hubs: tuple[Hub, Hub], model: Path) -> None:
    facts = read_model("org/name")
    local = read_model(str(model))
    assert facts.findings == ()
    assert facts.tensors == local.tensors
    assert facts.parts == local.parts
    assert (facts.name, facts.path, facts.weight_bytes) == ("org/name", None, local.weight_bytes)
    assert hubs[0].sent < 4 * hub.PREFIX_BYTES + 200_000  # headers and small files, no weights
    assert all(COMMIT in path for path, _, _ in hubs[0].seen if "/resolve/" in path)


def test_a_header_longer_than_the_first_read(
    hubs: tuple[Hub, Hub], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "PREFIX_BYTES", 64)
    assert read_model("org/name").tensors == read_model(str(model)).tensors


def test_a_server_that_ignores_ranges(hubs: tuple[Hub, Hub], model: Path) -> None:
    hubs[0].ignores_ranges = True
    assert read_model("org/name").tensors == read_model(str(model)).tensors
    assert hubs[0].sent < 64 << 20  # it was cut off, not read to the end


def test_the_token_reaches_the_hub_and_no_other_host(
    hubs: tuple[Hub, Hub], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hubs
    first.token = "hf_secret"
    first.blobs_elsewhere = second.endpoint
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    assert read_model("org/name").tensors == read_model(str(model)).tensors
    assert {authorisation for _, _, authorisation in first.seen} == {"Bearer hf_secret"}
    assert second.seen
    assert {authorisation for _, _, authorisation in second.seen} == {None}
    assert all(wanted for _, wanted, _ in second.seen)  # the range survives the redirection


def test_the_token_of_a_log_in_is_found(hubs: tuple[Hub, Hub], tmp_path: Path) -> None:
    hubs[0].token = "hf_from_file"
    file = tmp_path / ".cache" / "huggingface" / "token"
    file.parent.mkdir(parents=True)
    file.write_text("hf_from_file\n")
    assert read_model("org/name").findings == ()


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_refusals_have_words_and_no_token(status: int, hubs: tuple[Hub, Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    hubs[0].status = status
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ModelError) as caught:
        read_model("org/name")
    error = caught.value
    assert error.code == {401: "gated-or-auth", 403: "gated-or-auth", 404: None}.get(status, "hub-offline")
    assert str(status) in error.message
    assert error.hint
    assert "hf_secret" not in f"{error.message}{error.hint}{error!r}"


@pytest.mark.parametrize(
    "listing", [b"<html>sign in</html>", b"[]", b'{"siblings": 3}', b'{"siblings": [{"size": 1}]}', b""]
)
def test_what_is_no_hub_is_said(listing: bytes, hubs: tuple[Hub, Hub]) -> None:
    hubs[0].listing = listing
    with pytest.raises(ModelError, match="does not answer as a model hub does"):
        read_model("org/name")


def test_no_network_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError) as caught:
        read_model("org/name")
    assert caught.value.code == "hub-offline"
    assert "127.0.0.1" in caught.value.message
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc/passwd")
    with pytest.raises(ModelError, match="HF_ENDPOINT"):
        read_model("org/name")


def test_a_server_that_falls_silent(hubs: tuple[Hub, Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    monkeypatch.setattr(hub, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(Handler, "do_GET", lambda self: stop.wait(5) and None)
    with pytest.raises(ModelError, match="no answer in time"):
        read_model("org/name")
    stop.set()


def test_the_token_does_not_go_over_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str | None] = []

    class Client:
        host = "mirror.example"

        def __init__(self, endpoint: str, token: str | None) -> None:
            made.append(token)

        def get(self, *args: Any, **more: Any) -> bytes:
            return b'{"siblings": []}'

    monkeypatch.setattr(hub, "Client", Client)
    for endpoint in ("http://mirror.example", "https://mirror.example", "http://127.0.0.1:1"):
        hub.open_hub("org/name", "main", {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_secret"})
    assert made == [None, "hf_secret", "hf_secret"]
