"""Logs as they lie about: plain or packed, in any encoding, of any size. What comes out is whole lines of UTF-8."""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import zstandard

_BLOCK = 1 << 20
_HEAD = 4096
# A line is cut in its middle to this much: no person writes longer ones, and memory is not for them.
_LONGEST_LINE = 256 * 1024
_KEPT_END = 32 * 1024
_GZIP, _XZ, _ZSTANDARD, _BZIP2 = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"BZh"
_LONGEST_MARK = 6
# Packed bytes that are unpacked at once, which bounds what comes out of them: a thousandfold, of Zstandard more.
_PACKED_PIECE, _ZSTANDARD_PIECE = 4096, 512
_PIECE = 256  # unpacked bytes that are lost with an error
_BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)  # bz2 raises OSError
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def blocks(source: Path | BinaryIO, damaged: Callable[[str], None] | None = None) -> Iterator[bytes]:
    """The log in blocks of whole lines, each line ended by a newline.

    gzip, xz, bzip2 and Zstandard are unpacked. Of a packed log that is cut off or damaged, all comes out that can be
    read, and ``damaged`` gets a sentence that says what is wrong with it. UTF-16 and UTF-32 become UTF-8, with or
    without a mark at the front. Raises OSError.
    """
    if isinstance(source, Path):
        with source.open("rb") as stream:
            yield from blocks(stream, damaged)
        return
    yield from _whole_lines(_as_utf8(_unpacked(source, damaged or _nobody)))


def _nobody(_: str) -> None:
    return


def _unpacked(source: BinaryIO, damaged: Callable[[str], None]) -> Iterator[bytes]:
    head = _exactly(source, _HEAD)
    unpacker = _unpacker_of(head)
    if unpacker is None:
        yield head
        while data := source.read(_BLOCK):
            yield data
        return
    pieces: list[bytes] = []
    size = 0
    for piece in _of_members(unpacker, cast("BinaryIO", io.BufferedReader(_Again(head, source), _BLOCK)), damaged):
        pieces.append(piece)
        size += len(piece)
        if size >= _BLOCK:
            yield b"".join(pieces)
            pieces, size = [], 0
    yield b"".join(pieces)


def _of_members(first: _Unpacker, packed: BinaryIO, damaged: Callable[[str], None]) -> Iterator[bytes]:
    """The text of packed files that stand one after the other, as far as it can be read."""
    unpacker: _Unpacker | None = first
    begun = False
    data = b""
    while data := data or packed.read(_PACKED_PIECE):
        if unpacker is None:
            data = data.lstrip(b"\0")  # tape blocks and copies are filled up with them
            if not data:
                continue
            data += _exactly(packed, _LONGEST_MARK)
            unpacker = _unpacker_of(data)
            if unpacker is None:
                damaged("after the end of the packed log stands something else, which was not read")
                return
        begun = True
        try:
            yield from unpacker.take(data)
        except _BROKEN:
            yield from unpacker.last()
            damaged("the packed log is damaged; what comes after the damage was not read")
            return
        data = unpacker.rest
        if unpacker.ended:
            unpacker, begun = None, False
    if begun:
        damaged("the packed log is cut off; what its end said is missing")


class _Unpacker(Protocol):
    """One packed file. ``rest``: what came after its end."""

    rest: bytes
    ended: bool

    def take(self, data: bytes) -> Iterator[bytes]: ...

    def last(self) -> Iterator[bytes]:
        """After an error: what stood before it."""


class _Gzip:
    def __init__(self) -> None:
        self._unpacking = zlib.decompressobj(wbits=31)
        self._before, self._data = self._unpacking.copy(), b""
        self.rest, self.ended = b"", False

    def take(self, data: bytes) -> Iterator[bytes]:
        self._before, self._data = self._unpacking.copy(), data
        yield self._unpacking.decompress(data)
        self.rest, self.ended = self._unpacking.unused_data, self._unpacking.eof

    def last(self) -> Iterator[bytes]:
        """Byte by byte from where the broken piece began."""
        left = self._data
        with suppress(zlib.error):
            while left:
                yield self._before.decompress(left, 1)
                left = self._before.unconsumed_tail


class _Blockwise:
    """xz and bzip2. An error takes the piece with it in which it is found, so pieces are small."""

    def __init__(self, unpacking: lzma.LZMADecompressor | bz2.BZ2Decompressor) -> None:
        self._unpacking = unpacking
        self.rest, self.ended = b"", False

    def take(self, data: bytes) -> Iterator[bytes]:
        yield self._unpacking.decompress(data, _PIECE)
        while not self._unpacking.eof and not self._unpacking.needs_input:
            yield self._unpacking.decompress(b"", _PIECE)
        self.rest, self.ended = self._unpacking.unused_data, self._unpacking.eof

    def last(self) -> Iterator[bytes]:
        yield from ()


class _Zstandard:
    def __init__(self) -> None:
        self._unpacking = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        self.rest, self.ended = b"", False

    def take(self, data: bytes) -> Iterator[bytes]:
        for place in range(0, len(data), _ZSTANDARD_PIECE):
            piece = data[place : place + _ZSTANDARD_PIECE]
            yield self._unpacking.decompress(piece)
            if self._unpacking.eof:
                self.rest = self._unpacking.unused_data + data[place + len(piece) :]
                self.ended = True
                return
        self.rest = b""

    def last(self) -> Iterator[bytes]:
        yield from ()


def _unpacker_of(head: bytes) -> _Unpacker | None:
    """By how the file begins; None: it is not packed."""
    if head.startswith(_GZIP):
        return _Gzip()
    if head.startswith(_XZ):
        return _Blockwise(lzma.LZMADecompressor())
    if head.startswith(_BZIP2):
        return _Blockwise(bz2.BZ2Decompressor())
    return _Zstandard() if head.startswith(_ZSTANDARD) else None


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
