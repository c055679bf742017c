"""Logs as they lie about: plain or packed, in any encoding, of any size. What comes out is whole lines of UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 20


def blocks(source: Path | BinaryIO) -> Iterator[bytes]:
    """The log in blocks of whole lines, each line ended by a newline. Raises OSError."""
    if isinstance(source, Path):
        with source.open("rb") as stream:
            yield from blocks(stream)
        return
    rest = b""
    while data := source.read(_BLOCK):
        data = rest + data
        end = data.rfind(b"\n") + 1
        if end:
            yield data[:end]
        rest = data[end:]
    if rest:
        yield rest + b"\n"
