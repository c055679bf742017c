"""Files that are no safetensors files, and what is said of each."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from loadmaster.edge.safetensors import HEADER_LIMIT, ShardError, read_header
from loadmaster.edge.sample import write_header, write_shard
from loadmaster.edge.source import LocalSource, ReadError


def read(directory: Path, name: str = "model.safetensors") -> tuple[int, int]:
    source = LocalSource(directory)
    header, start = read_header(source, name, source.files[name] or 0)
    return len(header.tensors), start


def test_a_header_is_read_and_nothing_behind_it(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", {"a.weight": ("BF16", (4, 4)), "b.weight": ("F32", (2,))})
    count, start = read(tmp_path)
    assert count == 2
    assert start + 40 == (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", "truncated", "empty"),
        (b"\x10\x00", "truncated", "only 2 bytes"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5368709120\n",
            "lfs-pointer",
            "5,368,709,120",
        ),
        (b"<!DOCTYPE html><html><title>403 Forbidden</title></html>", "header-invalid", "web page"),
        (b"\n <html>" + b" " * 100, "header-invalid", "web page"),
        (b'{"error":"Repository not found"}', "header-invalid", "server's error message"),
        (b"\x00" * 4096, "header-invalid", "zeros"),
        (b"\xff" * 64, "header-invalid", "18446744073709551615"),
        (b"PK\x03\x04" + b"\x01" * 60, "header-invalid", "ZIP"),
        (b"GGUF" + b"\x03" * 60, "header-invalid", "GGUF"),
        (struct.pack("<Q", 4000) + b'{"a":', "truncated", "4000"),
        (struct.pack("<Q", HEADER_LIMIT + 1) + b"{" + b" " * 100, "header-invalid", str(HEADER_LIMIT + 1)),
        (struct.pack("<Q", 16) + b"no JSON at all! and more", "header-invalid", "no JSON object of"),
        (struct.pack("<Q", 16) + b'{"a": [1, 2, 3] ' + b"data", "header-invalid", "does not parse"),
        (struct.pack("<Q", 1) + b"{", "header-invalid", "no JSON object of"),
    ],
)
def test_what_the_file_is_instead(tmp_path: Path, content: bytes, status: str, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ShardError) as caught:
        read(tmp_path)
    assert caught.value.status == status
    assert words in caught.value.reason


@pytest.mark.parametrize("start", [b"", b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'])
def test_a_length_within_the_file_that_no_header_has_is_not_read(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 90_000_000) + start)
        file.truncate(1 << 30)
    source = LocalSource(tmp_path)
    lengths: list[int] = []
    original = source.read_range

    def counted(name: str, start: int, length: int) -> bytes:
        lengths.append(length)
        return original(name, start, length)

    source.read_range = counted  # type: ignore[method-assign]
    with pytest.raises(ShardError):
        read_header(source, path.name, 1 << 30)
    assert max(lengths) < 1000


def test_a_file_that_vanishes_or_may_not_be_read(tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", b"{}", 0)
    source = LocalSource(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ReadError, match="No such file"):
        read_header(source, "model.safetensors", 16)
