"""Logs from files: packed, cut off, in other encodings, with lines of any length."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.edge.logstream import blocks

TEXT = "".join(
    f"(Worker_TP{place % 2} pid=7) INFO 11-30 09:48:14 [a.py:{place}] Zeile {place} 温度\n" for place in range(40_000)
)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "zstandard": zstandard.ZstdCompressor().compress,
}


def read(data: bytes, damaged: list[str] | None = None) -> bytes:
    found = list(blocks(io.BytesIO(data), None if damaged is None else damaged.append))
    assert all(block.endswith(b"\n") for block in found)
    return b"".join(found)


@pytest.mark.parametrize("packer", PACKERS)
def test_packed_or_not_the_lines_are_the_same(packer: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(PACKERS[packer](TEXT.encode()))
    assert b"".join(blocks(path)) == TEXT.encode()


def test_several_packed_files_one_after_the_other() -> None:
    for packer in ("gzip", "xz", "zstandard"):
        assert read(PACKERS[packer](b"a\n") + PACKERS[packer](b"b\n")) == b"a\nb\n"


@pytest.mark.parametrize("packer", [name for name in PACKERS if name != "plain"])
def test_a_packed_log_that_is_cut_off_is_read_as_far_as_it_goes(packer: str) -> None:
    packed = PACKERS[packer](TEXT.encode())
    found = read(packed[: len(packed) * 2 // 3])
    lines = found.splitlines()
    assert lines[:-1] == TEXT.encode().splitlines()[: len(lines) - 1]
    assert len(lines) > 1000 or packer == "bzip2"  # bzip2 unpacks by whole blocks


@pytest.mark.parametrize("packer", [name for name in PACKERS if name != "plain"])
def test_damage_of_a_packed_log_is_told_and_what_stood_before_it_is_read(packer: str) -> None:
    text = TEXT.encode()
    packed = PACKERS[packer](text)
    told: list[str] = []
    assert read(packed, told) == text
    assert read(packed + bytes(3000), told) == text
    assert told == []

    assert read(packed + b"something else", told) == text
    assert "after the end" in told.pop()
    place = len(packed) * 2 // 3
    found = read(packed[:place] + bytes([packed[place] ^ 0xFF]) + packed[place + 1 :], told)
    assert len(found) > len(text) // 3 or packer == "bzip2"
    assert "damaged" in told.pop()
    read(packed[:-8], told)
    assert "cut off" in told.pop()


def test_of_a_gzip_without_its_check_every_line_is_read() -> None:
    told: list[str] = []
    packed = gzip.compress(TEXT.encode())
    assert read(packed[:-8], told) == TEXT.encode()
    assert read(packed[:-6] + b"\0" + packed[-5:], told) == TEXT.encode()
    assert len(told) == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "utf-32"])
def test_encodings(encoding: str) -> None:
    text = TEXT[:200_000].rsplit("\n", 1)[0] + "\n"
    assert read(text.encode(encoding)).decode() == text


def test_broken_bytes_stay_in_their_line() -> None:
    assert read(b"a\xff\xfeb\n\x00\nc") == b"a\xff\xfeb\n\x00\nc\n"


def test_a_line_without_end_is_cut_in_its_middle() -> None:
    data = b"first\n" + b"x" * 5_000_000 + b" at the end: CUDA out of memory\nlast\n"
    first, long, last = read(data).splitlines()
    assert (first, last) == (b"first", b"last")
    assert len(long) < 300_000
    assert long.startswith(b"xxx")
    assert long.endswith(b"CUDA out of memory")


@given(st.binary(max_size=2000))
def test_any_bytes_are_read(data: bytes) -> None:
    read(data)


@given(st.binary(max_size=400))
def test_plain_text_comes_out_as_it_is(data: bytes) -> None:
    data = data.replace(b"\x00", b"0")
    if data[:3].startswith((b"\x1f\x8b", b"BZh", b"\xfd", b"\x28\xb5", b"\xff", b"\xfe", b"\xef")):
        return
    assert read(data) == (data if data.endswith(b"\n") or not data else data + b"\n")
