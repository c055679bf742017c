"""Pictures for tests, drawn or damaged on purpose."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image, ImageDraw

RED, BLUE, WHITE = (220, 20, 30), (20, 40, 220), (255, 255, 255)


def corner_picture(width: int = 64, height: int = 48) -> Image.Image:
    """White with a red square at the top left and a blue one at the bottom right."""
    image = Image.new("RGB", (width, height), WHITE)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width // 3, height // 3), fill=RED)
    draw.rectangle((width - 1 - width // 3, height - 1 - height // 3, width - 1, height - 1), fill=BLUE)
    return image


def photograph(width: int, height: int) -> Image.Image:
    """Grain on a gradient: many colours."""
    bands = [Image.effect_noise((width, height), 40 + 10 * band) for band in range(3)]
    return Image.merge("RGB", bands)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_orientation(image: Image.Image, kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif.tobytes())


def url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"


def decoded(data_url: str) -> Image.Image:
    """The picture of a plain data: URL, fully decoded."""
    head, comma, data = data_url.partition(",")
    assert comma and head in ("data:image/png;base64", "data:image/jpeg;base64")
    image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    image.load()
    assert Image.MIME[str(image.format)] == head.removeprefix("data:").removesuffix(";base64")
    return image


def png_claiming(width: int, height: int, rows: bytes = b"\0" * 64) -> bytes:
    """A PNG whose header claims a size, with little data behind it."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def chat(*urls: str) -> list[Any]:
    """One user message with a text and pictures."""
    parts: list[Any] = [{"type": "text", "text": "What is this?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": parts}]
