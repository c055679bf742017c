"""fetch: exit code, stdout, stderr."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from loadmaster.commands import transfer
from loadmaster.commands.fetch import fetch
from loadmaster.edge import download
from loadmaster.edge import fetch as fetching
from loadmaster.edge.sample import sample_config
from tests.commands.transcript import Transcript, run
from tests.loopback_hub import Fault, LoopbackHub, serve

WEIGHTS = "model.safetensors"


def safetensors() -> bytes:
    shape = [64, 64]
    header = json.dumps({"lm_head.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 8192]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8192)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    for name in list(os.environ):
        if name.upper().startswith(("HF_", "HUGGING", "MODELSCOPE", "XDG")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetching, "has_library", lambda: False)
    monkeypatch.setattr(fetching, "free_bytes", lambda folder: 5 << 30)
    files = {"config.json": json.dumps(sample_config("Qwen3-8B")).encode(), WEIGHTS: safetensors()}
    with serve(LoopbackHub(files)) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("MODELSCOPE_DOMAIN", running.endpoint)
        yield running


def loadmaster(*arguments: str) -> Transcript:
    return run(fetch, arguments, "fetch")


def test_fetch_plans_says_the_room_and_downloads(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.files["tokenizer.json"] = b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}'
    seen = loadmaster("org/name", "--gpus", "2x24GiB")
    assert seen.without(home=str(tmp_path / "home")) == snapshot(
        (
            0,
            """\
fetched HOME/.cache/huggingface/hub/models--org--name/snapshots/0123456789abcdef0123456789abcdef01234567
next    loadmaster init NAME --model org/name
""",
            """\
from   127.0.0.1, org/name at 0123456789ab
files  3, 8.6 KiB in all, 0 B of it here
plan   fits 2x24GiB: at most 23.40 of 24.00 GiB
disk   8.6 KiB needed, 5.00 GiB free
to     HOME/.cache/huggingface/hub/models--org--name/snapshots/0123456789abcdef0123456789abcdef01234567
""",
        )
    )
    assert seen.code == 0


def test_fetch_into_a_folder_from_modelscope(hub: LoopbackHub, tmp_path: Path) -> None:
    seen = loadmaster("org/name", "--from", "modelscope", "--to", str(tmp_path / "m"), "--gpus", "2x24GiB")
    assert (seen.code, seen.out.replace(str(tmp_path), "TMP")) == snapshot(
        (
            0,
            """\
fetched TMP/m
next    loadmaster init NAME --model TMP/m
""",
        )
    )
    assert (tmp_path / "m" / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_what_does_not_fit_is_not_downloaded(hub: LoopbackHub, tmp_path: Path) -> None:
    seen = loadmaster("org/name", "--to", str(tmp_path / "m"), "--gpus", "1x1GiB")
    assert (seen.code, seen.out) == (1, "")
    assert seen.err.splitlines()[-2:] == snapshot(
        ["error: the model does not fit these cards, so nothing was downloaded", "hint: --force downloads it"]
    )
    assert not (tmp_path / "m").exists()
    assert loadmaster("org/name", "--to", str(tmp_path / "m"), "--gpus", "1x1GiB", "--force").code == 0
    assert (tmp_path / "m" / WEIGHTS).exists()


def test_too_little_room(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "free_bytes", lambda folder: 100)
    seen = loadmaster("org/name", "--to", str(tmp_path / "m"), "--gpus", "2x24GiB")
    assert (seen.code, seen.out) == (1, "")
    assert seen.err.replace(str(tmp_path), "TMP").splitlines()[-2:] == snapshot(
        [
            "error: the disk has too little room at TMP/m: 0.00 GiB needed, 0.00 GiB free",
            "hint: make room, or name another place with --to DIR",
        ]
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["name"], 2, "error: 'name' is no name on a hub\nhint: For example Qwen/Qwen3.5-9B\n"),
        (["../x"], 2, "error: '../x' is no name on a hub\nhint: For example Qwen/Qwen3.5-9B\n"),
        (["org/name", "--include", "nothing"], 2, "error: org/name holds no file of these names\n"),
        (
            ["org/name", "--gpus", "2xNOSUCHCARD"],
            2,
            "error: ",
        ),
        (["org/name", "--from", "elsewhere"], 2, "error"),
    ],
)
def test_fetch_refuses(hub: LoopbackHub, arguments: list[str], code: int, said: str) -> None:
    seen = loadmaster(*arguments)
    assert (seen.code, seen.out) == (code, "")
    assert said.lower() in seen.err.lower()


def test_a_hub_that_cannot_be_reached_leaves_it_open(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    seen = loadmaster("org/name")
    assert (seen.code, seen.out) == (3, "")
    assert seen.err.startswith("error: cannot reach 127.0.0.1: ")


def test_a_gated_file_ends_the_download_in_words(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.always[WEIGHTS] = Fault(status=403)
    seen = loadmaster("org/name", "--to", str(tmp_path / "m"), "--gpus", "2x24GiB")
    assert (seen.code, seen.out) == (1, "")
    assert seen.err.splitlines()[-2:] == snapshot(
        [
            "error: model.safetensors: 127.0.0.1 refuses access (403)",
            "hint: Accept the licence on the model's page and log in (hf auth login), or set HF_TOKEN",
        ]
    )


def test_an_interruption_says_what_is_kept(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "wait", interrupted)
    seen = loadmaster("org/name", "--to", str(tmp_path / "m"), "--gpus", "2x24GiB")
    assert (seen.code, seen.out) == (130, "")
    assert seen.err.splitlines()[-1].startswith("interrupted; ")
    monkeypatch.undo()


def test_progress_without_a_terminal_is_a_line_now_and_then() -> None:
    now = [0.0]
    written: list[str] = []
    report = transfer.lines("fetching", written.append, lambda: now[0])
    for second in range(0, 40, 5):
        now[0] = float(second)
        report(second << 28, 10 << 30, "a.safetensors")
    report(10 << 30, 10 << 30, "a.safetensors: waits")
    report(10 << 30, 10 << 30, "a.safetensors: waits")
    assert written == snapshot(
        [
            "fetching 3.75 of 10.00 GiB  a.safetensors",
            "fetching 7.50 of 10.00 GiB  a.safetensors",
            "fetching 10.00 of 10.00 GiB  a.safetensors: waits",
        ]
    )
