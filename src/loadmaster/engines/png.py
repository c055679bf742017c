"""Pictures made here, as PNG: the format needs nothing but zlib."""

from __future__ import annotations

import base64
import struct
import zlib


def gradient(width: int, height: int) -> bytes:
    """A PNG of that size, red growing to the right and green downwards."""
    if width < 1 or height < 1:
        raise ValueError(f"a picture of {width} x {height} pixels has no area")
    blue = 96
    reds = bytes(x * 255 // max(1, width - 1) for x in range(width))
    row = bytearray(3 * width)
    row[0::3] = reds
    row[2::3] = bytes([blue]) * width
    packer = zlib.compressobj(1)
    data = bytearray()
    for y in range(height):
        row[1::3] = bytes([y * 255 // max(1, height - 1)]) * width
        data += packer.compress(b"\0" + bytes(row))
    data += packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", bytes(data)) + _chunk(b"IEND", b"")


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
