"""Downloads from a loopback hub: whole, resumed, checked; every way in which a hub or a disk fails."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.hubfiles import ManyModelsError, needed_files
from loadmaster.edge import download as module
from loadmaster.edge import fetch as fetching
from loadmaster.edge import hub as hub_module
from loadmaster.edge.download import DownloadError, alone, safe_name
from loadmaster.edge.fetch import Fetch, prepare
from loadmaster.edge.source import ModelError
from tests.loopback_hub import COMMIT, Fault, LoopbackHub, git_hash, serve, sha256

CONTENT = {
    "config.json": b'{"architectures": ["X"]}',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 900,
    "model-00002-of-00002.safetensors": b"second" * 7000,
    "sub/tokenizer.json": b"{}" * 40,
    "empty.txt": b"",
}
BIG = "model-00001-of-00002.safetensors"


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith(("HF_", "HUGGING", "MODELSCOPE", "XDG")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(module, "_CHUNK", 4096)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with serve(LoopbackHub(dict(CONTENT))) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("MODELSCOPE_DOMAIN", running.endpoint)
        yield running


def get(prepared: Fetch, pauses: list[float] | None = None, **options: Any) -> None:
    """The download without the library and without real waits."""
    taken: list[float] = [] if pauses is None else pauses
    module.download(prepared.files, prepared.source, pause=taken.append, **options)


def whole(folder: Path, files: dict[str, bytes] = CONTENT) -> None:
    there = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert there == files


# ---------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("hub_name", ["hf", "modelscope"])
def test_everything_arrives_in_the_folder(hub: LoopbackHub, hub_name: Any, tmp_path: Path) -> None:
    prepared = prepare("org/name", hub_name, to=tmp_path / "m")
    assert prepared.total_bytes == prepared.missing_bytes == sum(map(len, CONTENT.values()))
    assert not (tmp_path / "m").exists()
    assert fetching.fetch(prepared, with_library=False) is None
    whole(tmp_path / "m")
    assert prepared.missing_bytes == 0
    hub.requests.clear()
    fetching.fetch(prepared, with_library=False)
    assert hub.requests == []


def test_hugging_face_s_cache_is_laid_out_as_its_client_does(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.files["again.json"] = CONTENT["config.json"]
    prepared = prepare("org/name", "hf")
    fetching.fetch(prepared, with_library=False)
    base = tmp_path / "home/.cache/huggingface/hub/models--org--name"
    assert prepared.folder == base / "snapshots" / COMMIT
    assert (base / "refs" / "main").read_text() == COMMIT
    assert {path.name for path in (base / "blobs").iterdir()} == {
        sha256(content) if name.endswith(".safetensors") else git_hash(content) for name, content in hub.files.items()
    }
    for name, content in hub.files.items():
        link = prepared.folder / name
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert link.read_bytes() == content
    from loadmaster.edge.resolve import resolve

    source = resolve("org/name", {"HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"})
    assert getattr(source, "directory", None) == prepared.folder


def test_modelscope_s_cache_is_found_again(hub: LoopbackHub, tmp_path: Path) -> None:
    prepared = prepare("org/name-3.5", "modelscope")
    fetching.fetch(prepared)
    from loadmaster.edge.resolve import resolve

    source = resolve("org/name-3.5", {"HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"})
    assert getattr(source, "directory", None) == prepared.folder
    whole(prepared.folder)


def test_without_hashes_sizes_are_checked(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.hashes = False
    prepared = prepare("org/name", "hf")
    fetching.fetch(prepared, with_library=False)
    assert (prepared.folder / BIG).read_bytes() == CONTENT[BIG]
    assert not (prepared.folder / BIG).is_symlink()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../b", "a\\b", "a//b", "./a", "", "a\nb", "..", "a/"])
def test_names_that_leave_the_folder_are_refused(name: str, hub: LoopbackHub, tmp_path: Path) -> None:
    assert not safe_name(name)
    hub.names["config.json"] = name
    for hub_name in ("hf", "modelscope"):
        with pytest.raises(DownloadError, match="outside the folder"):
            prepare("org/name", hub_name, to=tmp_path / "m")


@given(st.lists(st.sampled_from(["a", "..", ".", "b.c", "", "/"]), max_size=6))
def test_safe_names_stay_inside(parts: Sequence[str]) -> None:
    name = "/".join(parts)
    if safe_name(name):
        assert Path("/base", name).resolve().is_relative_to("/base")


# ---------------------------------------------------------------------------------------------- resuming


def test_a_part_is_continued_and_not_fetched_again(hub: LoopbackHub, tmp_path: Path) -> None:
    prepared = prepare("org/name", "hf", to=tmp_path)
    (tmp_path / f"{BIG}.part").write_bytes(CONTENT[BIG][:100_000])
    assert prepared.missing_bytes == prepared.total_bytes - 100_000
    get(prepared)
    whole(tmp_path)
    assert (BIG, "bytes=100000-") in hub.requests


def test_a_complete_part_only_gets_its_name(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / f"{BIG}.part").write_bytes(CONTENT[BIG])
    get(prepare("org/name", "hf", to=tmp_path))
    whole(tmp_path)
    assert BIG not in [name for name, _ in hub.requests]


def test_cut_lines_go_on_where_they_were_cut(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults[BIG] = [Fault(cut=10_000), Fault(cut=0), Fault(cut=50_000)]
    pauses: list[float] = []
    get(prepare("org/name", "hf", to=tmp_path), pauses)
    whole(tmp_path)
    ranges = [wanted for name, wanted in hub.requests if name == BIG]
    assert ranges == [None, "bytes=10000-", "bytes=10000-", "bytes=60000-"]
    assert pauses == [1.0, 2.0, 1.0]  # a try that brings something counts as none


def test_a_hub_that_ignores_ranges_begins_anew(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.ignores_ranges = True
    hub.faults[BIG] = [Fault(cut=10_000)]
    get(prepare("org/name", "hf", to=tmp_path))
    whole(tmp_path)


def test_a_part_that_is_longer_than_the_file(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / f"{BIG}.part").write_bytes(CONTENT[BIG] + b"more")
    get(prepare("org/name", "hf", to=tmp_path))
    whole(tmp_path)


def test_a_part_of_something_else_is_fetched_once_more(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / f"{BIG}.part").write_bytes(b"x" * 1000)
    get(prepare("org/name", "hf", to=tmp_path))
    whole(tmp_path)
    assert [wanted for name, wanted in hub.requests if name == BIG] == ["bytes=1000-", None]


def test_a_file_with_other_content_is_kept_aside(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"mine, not theirs, of some size")
    get(prepare("org/name", "hf", to=tmp_path))
    whole(tmp_path, {**CONTENT, "config.json.bak": b"mine, not theirs, of some size"})


def test_an_interruption_keeps_the_part(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults[BIG] = [Fault(silent_after=20_000)]
    prepared = prepare("org/name", "hf", to=tmp_path)
    came = threading.Event()

    def progress(done: int, total: int, name: str) -> None:
        if name == BIG and (tmp_path / f"{BIG}.part").stat().st_size >= 20_000:
            came.set()

    def interrupt(*args: Any, **more: Any) -> Any:
        assert came.wait(10)
        hub.gone.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        module.download(prepared.files, prepared.source, progress)
    assert (tmp_path / f"{BIG}.part").stat().st_size >= 20_000
    assert not (tmp_path / BIG).exists()
    monkeypatch.undo()
    get(prepared)
    whole(tmp_path)


def test_progress_never_passes_the_total_and_reaches_it(hub: LoopbackHub, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    hub.faults[BIG] = [Fault(cut=5000)]
    prepared = prepare("org/name", "hf", to=tmp_path)
    module.download(prepared.files, prepared.source, lambda d, t, n: seen.append((d, t)), pause=lambda seconds: None)
    assert all(0 <= done <= total == prepared.total_bytes for done, total in seen)
    assert seen[-1][0] == prepared.total_bytes


FAULTS = st.one_of(
    st.builds(Fault, cut=st.integers(0, 20_000)),
    st.builds(Fault, status=st.sampled_from([408, 429, 500, 502, 503, 504])),
    st.builds(Fault, headers=st.just({"Content-Range": "bytes 7-/9"}), status=st.none()),
)
SMALL = {"config.json": b"{}" * 300, "model.safetensors": bytes(range(256)) * 80}


@pytest.fixture(scope="module")
def patient_hub() -> Iterator[LoopbackHub]:
    with serve(LoopbackHub(dict(SMALL))) as running:
        yield running


@given(st.lists(FAULTS, max_size=5), st.booleans(), st.booleans(), st.integers(0, 30_000))
def test_whatever_happens_on_the_way_the_files_are_whole(
    patient_hub: LoopbackHub, faults: list[Fault], ignores_ranges: bool, hashes: bool, there: int
) -> None:
    name = "model.safetensors"
    patient_hub.faults = {name: list(faults)}
    patient_hub.ignores_ranges, patient_hub.hashes = ignores_ranges, hashes
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{name}.part").write_bytes((SMALL[name] + b"x" * 10_000)[:there])
        environment = {"HF_ENDPOINT": patient_hub.endpoint, "HOME": folder}
        get(prepare("org/name", "hf", to=Path(folder), environment=environment))
        whole(Path(folder), SMALL)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("hub_name", "status", "message", "hint"),
    [
        ("hf", 403, "refuses access (403)", "HF_TOKEN"),
        ("hf", 404, "no such model or file (404)", "spelling"),
        ("modelscope", 403, "refuses access (403)", "MODELSCOPE_API_TOKEN"),
        ("modelscope", 404, "no such model or file (404)", "spelling"),
        ("modelscope", 410, "answers 410", "Try again later"),
    ],
)
def test_refusals_end_at_once_in_words(
    hub: LoopbackHub, hub_name: Any, status: int, message: str, hint: str, tmp_path: Path
) -> None:
    hub.always[BIG] = Fault(status=status)
    pauses: list[float] = []
    with pytest.raises(ModelError) as caught:
        get(prepare("org/name", hub_name, to=tmp_path), pauses)
    assert f"{BIG}: 127.0.0.1" in caught.value.message and message in caught.value.message
    assert hint in str(caught.value.hint)
    assert pauses == []


@pytest.mark.parametrize(("hub_name", "hint"), [("hf", "HF_ENDPOINT"), ("modelscope", "--from hf")])
def test_a_hub_that_is_away_has_its_own_hint(hub_name: Any, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("MODELSCOPE_DOMAIN", address)
    with pytest.raises(ModelError, match="cannot reach 127") as caught:
        prepare("org/name", hub_name)
    assert hint in str(caught.value.hint)
    assert ("HF_ENDPOINT" in str(caught.value.hint)) == (hub_name == "hf")


def test_too_many_requests_are_waited_for_as_the_hub_says(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults[BIG] = [
        Fault(status=429, headers={"Retry-After": "7"}),
        Fault(status=503, headers={"Retry-After": formatdate(0, usegmt=True)}),
        Fault(status=429, headers={"Retry-After": "soon"}),
    ]
    pauses: list[float] = []
    get(prepare("org/name", "hf", to=tmp_path), pauses)
    whole(tmp_path)
    assert pauses == [7.0, 0.0, 8.0]


def test_a_wait_that_is_too_long_is_refused_with_its_length(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.always[BIG] = Fault(status=429, headers={"Retry-After": "7200"})
    with pytest.raises(DownloadError) as caught:
        get(prepare("org/name", "hf", to=tmp_path))
    assert caught.value.message == "127.0.0.1 asks to wait 120 minutes (127.0.0.1 answers 429)"


def test_a_hub_that_stays_away_is_given_up(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.always[BIG] = Fault(status=502)
    pauses: list[float] = []
    with pytest.raises(DownloadError) as caught:
        get(prepare("org/name", "hf", to=tmp_path), pauses)
    assert caught.value.message == f"{BIG}: 127.0.0.1 answers 502, 6 times in a row"
    assert caught.value.hint == "what came is kept; the same command goes on from there"
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0]


def test_a_hub_that_falls_silent(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "SILENCE_SECONDS", 0.2)
    hub.faults[BIG] = [Fault(silent_after=3000)]
    get(prepare("org/name", "hf", to=tmp_path))
    whole(tmp_path)


def test_content_with_a_wrong_hash_never_gets_the_name(hub: LoopbackHub, tmp_path: Path) -> None:
    damaged = b"y" + CONTENT[BIG][1:]
    hub.faults[BIG] = [Fault(body=damaged)]
    get(prepare("org/name", "hf", to=tmp_path / "once"))
    whole(tmp_path / "once")
    hub.always[BIG] = Fault(body=damaged)
    with pytest.raises(DownloadError) as caught:
        get(prepare("org/name", "hf", to=tmp_path / "always"))
    assert f"not {sha256(CONTENT[BIG])[:12]}…, twice" in caught.value.message
    assert not (tmp_path / "always" / BIG).exists()
    assert not (tmp_path / "always" / f"{BIG}.part").exists()


@pytest.mark.parametrize("body", [b"<html>log in</html>", CONTENT[BIG] + b"more"])
def test_a_file_of_another_size_is_refused(hub: LoopbackHub, body: bytes, tmp_path: Path) -> None:
    hub.always[BIG] = Fault(body=body)
    with pytest.raises(DownloadError) as caught:
        get(prepare("org/name", "hf", to=tmp_path))
    assert f"the list says {len(CONTENT[BIG])} bytes, but {len(body)} are sent" in caught.value.message


def test_a_range_that_nobody_asked_for_is_not_written(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / f"{BIG}.part").write_bytes(CONTENT[BIG][:1000])
    hub.faults[BIG] = [Fault(headers={"Content-Range": f"bytes 5-/{len(CONTENT[BIG])}"})]
    get(prepare("org/name", "hf", to=tmp_path))
    whole(tmp_path)


@pytest.mark.parametrize(
    "listing",
    [b"", b"<html>", b'{"Code": 404, "Message": "no such \\u001b[31mmodel"}', b'{"Data": {"Files": 3}}', b"[" * 9000],
)
def test_lists_that_are_none(hub: LoopbackHub, listing: bytes, tmp_path: Path) -> None:
    hub.listing = listing
    with pytest.raises(ModelError) as caught:
        prepare("org/name", "modelscope", to=tmp_path)
    assert caught.value.message.isprintable()


def test_a_token_goes_along(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with pytest.raises(ModelError, match="refuses access"):
        prepare("org/name", "modelscope", to=tmp_path)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    get(prepare("org/name", "modelscope", to=tmp_path))
    whole(tmp_path)


# ---------------------------------------------------------------------------------------------- the disk


def test_too_little_room_is_said_before_anything_is_written(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare("org/name", "hf", to=tmp_path / "m")
    monkeypatch.setattr(fetching, "free_bytes", lambda folder: prepared.total_bytes - 1)
    with pytest.raises(DownloadError, match="the disk has too little room at"):
        fetching.fetch(prepared, with_library=False)
    assert not (tmp_path / "m").exists()
    assert hub.requests == []
    monkeypatch.setattr(fetching, "free_bytes", lambda folder: prepared.total_bytes)
    fetching.fetch(prepared, with_library=False)


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, "the disk is full at"), (errno.EIO, "cannot write")])
def test_a_disk_that_fills_up_in_the_middle_keeps_what_came(
    hub: LoopbackHub, number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare("org/name", "hf", to=tmp_path)
    real = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, chunk: bytes) -> int:
            if self.file.tell() > 50_000:
                raise OSError(number, os.strerror(number))
            return int(self.file.write(chunk))

    def open_full(path: Path, *arguments: Any, **options: Any) -> Any:
        file = real(path, *arguments, **options)
        return Full(file) if path.name == f"{BIG}.part" else file

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(DownloadError, match=said):
        get(prepared)
    monkeypatch.undo()
    kept = (tmp_path / f"{BIG}.part").stat().st_size
    assert kept > 50_000
    hub.requests.clear()
    get(prepared)
    whole(tmp_path)
    assert (BIG, f"bytes={kept}-") in hub.requests


def test_a_folder_that_may_not_be_written(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DownloadError, match="cannot write"):
        fetching.fetch(prepare("org/name", "hf", to=tmp_path / "file" / "m"), with_library=False)


def test_two_downloads_into_one_folder(tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(DownloadError, match="another download"), alone(tmp_path):
        pass
    with alone(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- the library


@pytest.mark.skipif(not fetching.has_library(), reason="huggingface_hub is an extra")
@pytest.mark.parametrize("to", [None, "m"])
def test_huggingface_hub_brings_the_same(
    hub: LoopbackHub, to: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    prepared = prepare("org/name", "hf", to=None if to is None else tmp_path / to)
    assert fetching.fetch(prepared, lambda done, total, name: None, with_library=True) is None
    for name, content in CONTENT.items():
        assert (prepared.folder / name).read_bytes() == content
    assert not (prepared.base / ".loadmaster-fetch").exists()


def test_what_the_library_cannot_do_is_said_and_done_here(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        @staticmethod
        def snapshot_download(*arguments: object, **options: object) -> None:
            raise RuntimeError("no such protocol\nmore")

        @staticmethod
        def disable_progress_bars() -> None:
            pass

    monkeypatch.setattr("loadmaster.edge.fetch.importlib.import_module", lambda name: Broken)
    prepared = prepare("org/name", "hf", to=tmp_path / "m")
    assert fetching.fetch(prepared, with_library=True) == "huggingface_hub: no such protocol"
    whole(tmp_path / "m")


# ---------------------------------------------------------------------------------------------- which files


def test_needed_files() -> None:
    names = ["config.json", "a.safetensors", "pytorch_model.bin", "original/x.safetensors", ".gitattributes", "m.gguf"]
    assert needed_files(names) == ("a.safetensors", "config.json")
    assert needed_files(names, ["*.gguf"]) == ("m.gguf",)
    assert needed_files(["pytorch_model.bin", "config.json"]) == ("config.json", "pytorch_model.bin")
    assert needed_files(["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj.gguf"]) == (
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
        "mmproj.gguf",
    )
    with pytest.raises(ManyModelsError, match="2 GGUF files"):
        needed_files(["a-Q4.gguf", "a-Q8.gguf", "README.md"])


def test_a_repository_of_many_models_asks_which(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.files = {"a-Q4.gguf": b"1", "a-Q8.gguf": b"2", "mmproj.gguf": b"3"}
    with pytest.raises(DownloadError) as caught:
        prepare("org/name", "hf", to=tmp_path)
    assert caught.value.hint == "choose with --include '*NAME*'"
    get(prepare("org/name", "hf", to=tmp_path, include=["*Q4*", "mmproj*"]))
    whole(tmp_path, {"a-Q4.gguf": b"1", "mmproj.gguf": b"3"})
    with pytest.raises(DownloadError, match="no file of these names"):
        prepare("org/name", "hf", to=tmp_path, include=["nothing"])


def test_offline_is_respected(hub: LoopbackHub) -> None:
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids the network"):
        prepare("org/name", "hf", environment={"HF_HUB_OFFLINE": "1"})
