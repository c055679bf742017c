"""Safetensors files, headers only: never more than the header is read, and its length is capped.

https://github.com/huggingface/safetensors#format: eight bytes of little-endian length, JSON, data.
"""

from __future__ import annotations

import struct

from loadmaster.core.integrity import foreign_content, is_pointer, pointer_reason
from loadmaster.core.tensorheaders import Header, HeaderError, parse_header
from loadmaster.edge.source import ModelSource

HEADER_LIMIT = 100_000_000  # bytes; safetensors' own
_PEEK = 512
_LONG = 4 << 20


class ShardError(Exception):
    """A weight file that is none. ``status`` as in :class:`ModelFile`, ``reason`` in words for people."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def read_header(source: ModelSource, name: str, size: int) -> tuple[Header, int]:
    """The header of one file and the bytes before its data area. Raises :class:`ShardError`, :class:`ReadError`."""
    start = source.read_range(name, 0, 8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise _no_header(source.read_range(name, 0, _PEEK), length, size)
    if source.read_range(name, 8, 1) != b"{" or not _ends_like_json(source, name, length):
        raise _no_header(source.read_range(name, 0, _PEEK), length, size)
    raw = source.read_range(name, 8, length)
    if len(raw) < length:
        raise ShardError("truncated", f"the header says {length} bytes, the file ends after {len(raw)} of them")
    try:
        return parse_header(raw), 8 + length
    except HeaderError as error:
        raise ShardError("header-invalid", str(error)) from error


def _ends_like_json(source: ModelSource, name: str, length: int) -> bool:
    """A long header is looked at from its end before it is read: a wrong length leads into the data."""
    return length < _LONG or source.read_range(name, 7 + length, 1) in (b"}", b" ", b"\n")


def _no_header(start: bytes, length: int, size: int) -> ShardError:
    """Says what the first bytes are instead of a header."""
    if is_pointer(start):
        return ShardError("lfs-pointer", pointer_reason(start, size))
    if size == 0:
        return ShardError("truncated", "the file is empty")
    if (words := foreign_content(start)) is not None:
        return ShardError("header-invalid", words)
    if start.lstrip().startswith((b"{", b"[")):
        return ShardError("header-invalid", "text (JSON) saved under this name, a server's error message most likely")
    if size < 8:
        return ShardError("truncated", f"the file has only {size} bytes")
    if start[8:9] == b"{" and size - 8 < length <= HEADER_LIMIT:
        return ShardError("truncated", f"the header says {length} bytes, the file has {size}")
    if length > HEADER_LIMIT or length > size:
        return ShardError(
            "header-invalid", f"the first 8 bytes say that the header has {length} bytes; the file has {size}"
        )
    return ShardError("header-invalid", f"no JSON object of {length} bytes behind the length")
