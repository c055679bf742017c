"""Logs as they lie about: plain or packed, in any encoding, of any size. What comes out is whole lines of UTF-8."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

_BLOCK = 1 << 20
_HEAD = 4096
# A line is cut in its middle to this much: no person writes longer ones, and memory is not for them.
_LONGEST_LINE = 256 * 1024
_KEPT_END = 32 * 1024
_GZIP, _XZ, _ZSTANDARD, _BZIP2 = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"BZh"
_BROKEN = (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, gzip.BadGzipFile)
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def blocks(source: Path | BinaryIO) -> Iterator[bytes]:
    """The log in blocks of whole lines, each line ended by a newline.

    gzip, xz, bzip2 and Zstandard are unpacked; a packed log that is cut off or damaged ends where it can no longer be
    read. UTF-16 and UTF-32 become UTF-8, with or without a mark at the front. Raises OSError.
    """
    if isinstance(source, Path):
        with source.open("rb") as stream:
            yield from blocks(stream)
        return
    yield from _whole_lines(_as_utf8(_unpacked(source)))


def _unpacked(source: BinaryIO) -> Iterator[bytes]:
    head = _exactly(source, _HEAD)
    joined = cast("BinaryIO", io.BufferedReader(_Again(head, source), _BLOCK))
    if head.startswith(_GZIP):
        with gzip.GzipFile(fileobj=joined) as of_gzip:
            yield from _read(cast("BinaryIO", of_gzip))
    elif head.startswith(_XZ):
        with lzma.LZMAFile(joined) as of_xz:
            yield from _read(cast("BinaryIO", of_xz))
    elif head.startswith(_BZIP2):
        with bz2.BZ2File(joined) as of_bzip2:
            yield from _read(cast("BinaryIO", of_bzip2))
    elif head.startswith(_ZSTANDARD):
        unpacking = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        yield from _read(cast("BinaryIO", unpacking.stream_reader(joined, read_across_frames=True)))
    else:
        yield head
        while data := source.read(_BLOCK):
            yield data


def _read(stream: BinaryIO) -> Iterator[bytes]:
    while True:
        try:
            data = stream.read(_BLOCK)
        except _BROKEN:
            return
        except OSError as error:
            if error.errno is not None:
                raise
            return  # bz2 and gzip say so of damaged data
        if not data:
            return
        yield data


class _Again(io.RawIOBase):
    """A stream whose beginning has been read already."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if self._head:
            data, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        else:
            data = self._rest.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _exactly(source: BinaryIO, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := source.read(size - len(data))):
        data += more
    return data


def _as_utf8(data: Iterator[bytes]) -> Iterator[bytes]:
    head = next(data, b"")
    encoding = _encoding(head)
    if encoding is None:
        yield head.removeprefix(codecs.BOM_UTF8)
        yield from data
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(head).removeprefix("\ufeff").encode("utf-8", "replace")
    for block in data:
        yield decoder.decode(block).encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def _encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 by its mark, or by the empty half of nearly every letter; None: bytes as they are."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    sample = head[:_HEAD]
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    if len(sample) >= 8 and max(even, odd) > len(sample) // 4 and min(even, odd) < len(sample) // 50:
        return "utf-16-le" if odd > even else "utf-16-be"
    return None


def _whole_lines(data: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in data:
        end = block.rfind(b"\n") + 1
        if not end:
            rest = _bounded(rest + block)
            continue
        first = block.find(b"\n") + 1
        if len(rest) + first > _LONGEST_LINE:
            yield _bounded(rest + block[:first])
            if end > first:
                yield block[first:end]
        else:
            yield rest + block[:end] if rest else block[:end]
        rest = block[end:]
    if rest:
        yield _bounded(rest) + b"\n"


def _bounded(line: bytes) -> bytes:
    if len(line) <= _LONGEST_LINE:
        return line
    return line[: _LONGEST_LINE - _KEPT_END] + b" ... " + line[-_KEPT_END:]
