"""The bytes in a data: URL, in all the spellings that clients send (RFC 2397, RFC 4648)."""

from __future__ import annotations

import base64
import re
from urllib.parse import unquote_to_bytes

import msgspec

from loadmaster.service.imagerules import ImageError

# What both engines read: lower case, one media type, no parameter. The base64 text itself is checked by decoding it.
_PLAIN = re.compile(rb"data:image/[a-z0-9.+-]{1,40};base64,", re.ASCII)
_BASE64 = msgspec.json.Decoder(bytes)
_LONGEST_HEADER = 1024
_SPACE = b" \t\r\n\v\f"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def is_data_url(text: str) -> bool:
    """Whether ``text`` has the scheme ``data``, however written."""
    return text[:64].lstrip()[:5].lower() == "data:"


def data_url(media_type: str, data: bytes) -> bytes:
    """The plain form: ``data:TYPE;base64,DATA``."""
    return b"data:%s;base64,%s" % (media_type.encode("ascii"), base64.b64encode(data))


def read_data_url(url: bytes) -> tuple[bytes, bool]:
    """The bytes, and whether the URL is in the plain form that the engines read.

    Raises ImageError when it is no data: URL or its base64 is broken.
    """
    plain = _PLAIN.match(url)
    if plain:
        data = _strict_base64(url[plain.end() :])
        if data is not None:
            return _not_empty(data), True
    url = url.lstrip(_SPACE)
    if url[:5].lower() != b"data:":
        raise ImageError("invalid_image_url", "The picture is not a data: URL.")
    comma = url.find(b",", 0, _LONGEST_HEADER)
    if comma < 0:
        raise ImageError("invalid_image_url", "The data: URL of the picture has no comma before its data.")
    parameters = [part.strip(_SPACE).lower() for part in unquote_to_bytes(url[5:comma]).split(b";")]
    data = url[comma + 1 :]
    if b"%" in data:
        data = unquote_to_bytes(data)
    if b"base64" not in parameters[1:]:
        return _not_empty(data), False
    return _not_empty(_lenient_base64(data)), False


def _lenient_base64(data: bytes) -> bytes:
    """Decodes base64 with white space, in the URL-safe alphabet, or with padding missing; anything else is refused."""
    data = data.translate(_URL_SAFE, _SPACE).rstrip(b"=")
    decoded = None if len(data) % 4 == 1 else _decoded(data + b"=" * (-len(data) % 4))
    if decoded is None:
        raise ImageError("invalid_base64_image", "The base64 text of the picture is broken.")
    return decoded


def _strict_base64(data: bytes) -> bytes | None:
    """The bytes if ``data`` is exactly their base64 by RFC 4648, else None."""
    decoded = _decoded(data)
    if decoded is None or (data.endswith(b"=") and base64.b64encode(decoded[-(len(decoded) % 3) :]) != data[-4:]):
        return None
    return decoded


def _decoded(data: bytes) -> bytes | None:
    """msgspec's decoder of a JSON string takes half the time of binascii, and no character outside the alphabet."""
    if b"\\" in data:  # JSON would read an escape
        return None
    try:
        return _BASE64.decode(b'"%s"' % data)
    except msgspec.MsgspecError:
        return None


def _not_empty(data: bytes) -> bytes:
    if not data:
        raise ImageError("empty_image_file", "The picture is empty: its data: URL holds no data.")
    return data
