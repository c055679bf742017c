"""Decodes, checks, scales and encodes one picture. Runs in the worker process only: its input is hostile."""

from __future__ import annotations

import io
import math
import struct
import warnings
from typing import Any

import msgspec
from PIL import Image, ImageCms, UnidentifiedImageError, features

from loadmaster.service.imagerules import ImageError, ImageRules

# Pillow's readers that are tried. Left out: those that start another program (EPS), that only identify (MPEG, HDF5,
# GRIB), and rare ones that would only widen the surface. MPO is a JPEG with more pictures behind it.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP", "TIFF", "JPEG2000")
MEDIA_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif", "BMP": "image/bmp"}

# A JPEG is decoded at 1/2, 1/4 or 1/8 when that leaves at least this many times the wanted size for the filter.
DRAFT_GAP = 1.5
# Pillow halves (box) a picture down to this many times the wanted size before the filter: "3.0: about the same as fair
# resampling" by its documentation.
REDUCING_GAP = 3.0
JPEG_QUALITY = 90
# A picture with no more colours is drawn, not photographed: a photograph passes this within its first rows.
FEW_COLOURS = 16384
FEW_GREYS = 64

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Errors that Pillow's readers raise for damaged files.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, AttributeError,
            ZeroDivisionError, OverflowError, RuntimeError, NotImplementedError, struct.error)  # fmt: skip


class Converted(msgspec.Struct, frozen=True):
    """``data`` None: the picture goes to the engine as it came. ``notes``: what was done, each a few ASCII words.

    ``source_size``, ``size``: pixels across and down, upright, as it came and as it goes to the engine.
    """

    media_type: str
    data: bytes | None
    notes: tuple[str, ...]
    source_size: tuple[int, int]
    size: tuple[int, int]


def fit_size(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """The largest size of the same shape with at most ``max_pixels`` pixels, never larger than the source.

    The shorter side is rounded down to a pixel, the longer one follows it to the nearest.
    """
    if max_pixels is None or width * height <= max_pixels:
        return width, height
    short, long = sorted((width, height))
    # floor(short * sqrt(max_pixels / (short * long))), in integers
    new_short = max(1, math.isqrt(max_pixels * short // long))
    new_long = max(1, min((2 * new_short * long + short) // (2 * short), max_pixels // new_short, long))
    return (new_short, new_long) if width <= height else (new_long, new_short)


def convert(data: bytes, rules: ImageRules) -> Converted:
    """Applies ``rules`` to one encoded picture. Raises ImageError; MemoryError when the worker's limit is met."""
    if len(data) > rules.max_bytes:
        raise ImageError(
            "image_file_too_large",
            f"The picture has {len(data)} bytes; at most {rules.max_bytes} are taken.",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, rules.max_source_pixels
        try:
            return _convert(data, rules)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise _too_large(None, rules) from None
        except UnidentifiedImageError:
            raise _unreadable(data) from None
        except _DAMAGED as error:
            if "truncated" in str(error).lower():
                message = "The picture is cut off: its data ends before the picture does."
            else:
                message = f"The picture is damaged and cannot be decoded ({type(error).__name__})."
            raise ImageError("image_parse_error", message) from None
        finally:
            Image.MAX_IMAGE_PIXELS = before


def _convert(data: bytes, rules: ImageRules) -> Converted:
    image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    source_format = "JPEG" if image.format == "MPO" else str(image.format)
    source_size = image.size
    if image.width * image.height > rules.max_source_pixels:
        raise _too_large(source_size, rules)
    size = fit_size(*source_size, rules.max_pixels)
    _check_sides(source_size, size, rules)
    animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
    if size != source_size and source_format == "JPEG":
        image.draft(None, (math.ceil(size[0] * DRAFT_GAP), math.ceil(size[1] * DRAFT_GAP)))
    image.load()
    orientation = _orientation(image)
    profile = _foreign_profile(image)
    transparent = _is_transparent(image)
    odd_mode = image.mode not in ("RGB", "L", "P", "1", "RGBA", "LA")

    notes = []
    shown, was = (size[::-1], source_size[::-1]) if orientation >= 5 else (size, source_size)
    if size != source_size:
        notes.append(f"scaled from {was[0]}x{was[1]} to {shown[0]}x{shown[1]}")
    if orientation != 1:
        notes.append("turned upright")
    if animated:
        notes.append("first frame kept")
    if transparent:
        notes.append("put on white")
    if odd_mode:
        notes.append(f"{_mode_name(image.mode)} converted to 8-bit RGB")
    if profile is not None:
        notes.append("colours converted to sRGB")
    if not notes and source_format in rules.engine_formats:
        return Converted(MEDIA_TYPES.get(source_format, f"image/{source_format.lower()}"), None, (), was, shown)

    graphic = source_format != "JPEG"
    image = _plain(image, size, transparent, profile)
    if orientation != 1:
        image = image.transpose(_UPRIGHT[orientation])
    encoded, target_format = _encode(image, graphic)
    if target_format != source_format:
        notes.append(f"{source_format} converted to {target_format}")
    return Converted(MEDIA_TYPES[target_format], encoded, tuple(notes), was, shown)


def _check_sides(source: tuple[int, int], size: tuple[int, int], rules: ImageRules) -> None:
    width, height = source
    if min(source) < rules.min_side:
        raise ImageError(
            "image_too_small",
            f"The picture has {width}x{height} pixels; the shorter side must have at least {rules.min_side}.",
        )
    if max(source) > rules.max_aspect_ratio * min(source):
        raise ImageError(
            "invalid_image",
            f"The picture has {width}x{height} pixels; "
            f"the longer side may be at most {rules.max_aspect_ratio:g} times the shorter.",
        )
    if min(size) < rules.min_side:
        raise ImageError(
            "invalid_image",
            f"The picture of {width}x{height} pixels is too narrow: "
            f"scaled down to {rules.max_pixels} pixels it would be {size[0]}x{size[1]}.",
        )


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1-8; 1 when there is none or it cannot be read. A TIFF is turned by Pillow as it loads."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except _DAMAGED:
        return 1
    return value if value in _UPRIGHT else 1


def _foreign_profile(image: Image.Image) -> ImageCms.ImageCmsProfile | None:
    """The embedded colour profile if it is readable, fits the mode and is another than sRGB."""
    raw = image.info.get("icc_profile")
    if not isinstance(raw, bytes) or not raw:
        return None
    space = {"RGB": "RGB", "RGBA": "RGB", "P": "RGB", "L": "GRAY", "LA": "GRAY", "CMYK": "CMYK"}.get(image.mode)
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(raw))
        if profile.profile.xcolor_space.strip() != space:
            return None
        description = ImageCms.getProfileDescription(profile)
    except (ImageCms.PyCMSError, *_DAMAGED):
        return None
    return None if "srgb" in description.lower() else profile


def _is_transparent(image: Image.Image) -> bool:
    """Whether a pixel lets the background through."""
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        lowest = image.getchannel(image.getbands()[-1]).getextrema()[0]
        return isinstance(lowest, (int, float)) and lowest < 255
    return image.mode in ("P", "L", "RGB", "1") and "transparency" in image.info


def _mode_name(mode: str) -> str:
    return {"I;16": "16-bit grey", "I;16B": "16-bit grey", "I": "32-bit grey", "F": "floating-point grey"}.get(
        mode, mode
    )


def _plain(
    image: Image.Image, size: tuple[int, int], transparent: bool, profile: ImageCms.ImageCmsProfile | None
) -> Image.Image:
    """An RGB or L picture of ``size``, on white, in sRGB. Conversions that cost by the pixel come after scaling."""
    if transparent:
        image = image.convert("RGBA")
    elif image.mode in ("P", "PA", "RGBA", "RGBa", "HSV", "YCbCr"):
        image = image.convert("RGB")
    elif image.mode in ("1", "LA", "La"):
        image = image.convert("L")
    elif image.mode.startswith("I") or image.mode == "F":
        image = _eight_bit(image)
    if image.size != size:
        if image.mode == "RGBA":  # premultiplied, so that hidden colours do not bleed into edges
            image = image.convert("RGBa")
        image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=REDUCING_GAP)
        if image.mode == "RGBa":
            image = image.convert("RGBA")
    alpha = image.getchannel("A") if image.mode == "RGBA" else None
    if alpha is not None:
        image = image.convert("RGB")
    if image.mode == "LAB":
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
    if profile is not None:
        image = _in_srgb(image, profile)
    if image.mode not in ("RGB", "L"):
        image = image.convert("RGB")
    if alpha is not None:
        page = Image.new("RGB", image.size, "white")
        page.paste(image, mask=alpha)
        image = page
    image.info = {}  # no profile, comment or colour key of the source in the result
    return image


def _in_srgb(image: Image.Image, profile: ImageCms.ImageCmsProfile) -> Image.Image:
    target = ImageCms.createProfile("sRGB")
    try:
        converted = ImageCms.profileToProfile(image, profile, target, outputMode="RGB")
    except (ImageCms.PyCMSError, *_DAMAGED):
        return image  # a profile that only reads but does not transform: the numbers are taken as they are
    return image if converted is None else converted


def _eight_bit(image: Image.Image) -> Image.Image:
    """Grey of 16 or 32 bits or floating point, as 8-bit grey.

    16-bit samples go from 0 to 65535 by the formats' definition; wider ones from their least to their greatest.
    """
    image = image.convert("F" if image.mode == "F" else "I") if image.mode not in ("I", "F") else image
    low, high = image.getextrema()
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float)) and math.isfinite(low + high)):
        raise ImageError("image_parse_error", "The samples of the picture are not numbers.")
    if image.mode == "I" and low >= 0 and high <= 65535:
        low, high = 0, 65535
    scale = 255 / (high - low) if high > low else 0.0
    offset = -low * scale
    return image.point(lambda value: value * scale + offset).convert("L")


def _encode(image: Image.Image, graphic: bool) -> tuple[bytes, str]:
    """JPEG; PNG for a drawn picture of few colours, when that is not larger."""
    few = graphic and image.getcolors(FEW_GREYS if image.mode == "L" else FEW_COLOURS) is not None
    options: dict[str, Any] = {"quality": JPEG_QUALITY}
    if few:
        options["subsampling"] = 0  # thin coloured lines blur at half the colour resolution
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", **options)
    if few:
        png = io.BytesIO()
        image.save(png, "PNG")
        if png.tell() <= jpeg.tell():
            return png.getvalue(), "PNG"
    return jpeg.getvalue(), "JPEG"


def _too_large(size: tuple[int, int] | None, rules: ImageRules) -> ImageError:
    pixels = f"{size[0]}x{size[1]} pixels" if size else "too many pixels"
    return ImageError(
        "image_too_large",
        f"The picture has {pixels}; at most {rules.max_source_pixels} in all are decoded.",
    )


def _unreadable(data: bytes) -> ImageError:
    """Says what the bytes are instead of a picture that this Pillow reads."""
    start = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    brand = data[8:12] if data[4:8] == b"ftyp" else b""
    kind, advice = "", "send JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
    if start.startswith(b"<") and b"<svg" in start:
        kind, advice = "an SVG drawing", "send it drawn, as PNG"
    elif start.startswith((b"<!doctype html", b"<html")):
        kind, advice = "a web page, not a picture", "give the address of the picture itself"
    elif brand in (b"avif", b"avis") and not features.check("avif"):
        kind = "AVIF, which the Pillow of this service cannot read"
    elif brand in (b"avif", b"avis") or (data[:4] == b"RIFF" and data[8:12] == b"WEBP" and features.check("webp")):
        return ImageError("image_parse_error", "The picture is damaged and cannot be decoded.")
    elif brand[:3] in (b"hei", b"hev") or brand in (b"mif1", b"msf1"):
        kind, advice = "HEIC, which the Pillow of this service cannot read", "send it as JPEG"
    elif brand:
        kind, advice = "a video, not a picture", "send single pictures"
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "WebP, which the Pillow of this service cannot read"
    elif data[:5] == b"%PDF-":
        kind, advice = "a PDF document", "send its pages as pictures"
    elif data[:3] == b"\xff\xd8\xff" or data[:8] == b"\x89PNG\r\n\x1a\n" or data[:4] in (b"GIF8", b"II*\0", b"MM\0*"):
        return ImageError("image_parse_error", "The picture is damaged and cannot be decoded.")
    if kind:
        return ImageError("unsupported_image_media_type", f"The picture is {kind}; {advice}.")
    return ImageError("invalid_image_format", f"The data is no picture that this service reads; {advice}.")
