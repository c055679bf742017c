from __future__ import annotations

import io
import math
import struct
import zlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageDraw, features

from loadmaster.service.imagecodec import Converted, convert, fit_size
from loadmaster.service.imagerules import ImageError, ImageRules
from tests.drawn_pictures import (
    BLUE,
    RED,
    WHITE,
    corner_picture,
    encoded,
    photograph,
    png_claiming,
    with_orientation,
)

RULES = ImageRules()


def result_of(data: bytes, rules: ImageRules = RULES) -> tuple[Image.Image, Converted]:
    converted = convert(data, rules)
    image = Image.open(io.BytesIO(converted.data or data))
    image.load()
    assert image.mode in ("RGB", "L") or converted.data is None
    assert converted.data is None or image.size == converted.size
    assert Image.MIME[str(image.format)] == converted.media_type
    return image, converted


def near(found: object, wanted: tuple[int, ...], tolerance: int = 12) -> bool:
    assert isinstance(found, tuple)
    return all(abs(a - b) <= tolerance for a, b in zip(found, wanted, strict=True))


def refused(data: bytes, rules: ImageRules = RULES) -> ImageError:
    with pytest.raises(ImageError) as caught:
        convert(data, rules)
    assert caught.value.message.isascii() and len(caught.value.message) < 250
    return caught.value


def untouched(converted: Converted) -> str:
    """The type of a picture that nothing was done to."""
    assert converted.data is None and converted.notes == () and converted.size == converted.source_size
    return converted.media_type


# What may stay as it is


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
def test_a_png_that_needs_nothing_stays(mode: str) -> None:
    assert untouched(convert(encoded(corner_picture().convert(mode), "PNG"), RULES)) == "image/png"


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_that_needs_nothing_stays(progressive: bool) -> None:
    data = encoded(photograph(90, 60), "JPEG", progressive=progressive)
    assert untouched(convert(data, ImageRules(max_pixels=5400))) == "image/jpeg"


def test_an_opaque_alpha_channel_stays() -> None:
    assert convert(encoded(corner_picture().convert("RGBA"), "PNG"), RULES).data is None


def test_a_format_that_the_engine_does_not_take_is_converted() -> None:
    data = encoded(corner_picture(), "PNG")
    image, converted = result_of(data, ImageRules(engine_formats=("JPEG",)))
    assert converted.data is not None and image.size == (64, 48)
    webp = encoded(corner_picture(), "WEBP", lossless=True)
    assert untouched(convert(webp, ImageRules(engine_formats=("JPEG", "PNG", "WEBP")))) == "image/webp"


# Formats and modes


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000"])
def test_other_formats_are_converted(kind: str) -> None:
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    image, converted = result_of(encoded(corner_picture(), kind))
    assert image.size == (64, 48)
    assert near(image.convert("RGB").getpixel((5, 5)), RED, 20)
    assert near(image.convert("RGB").getpixel((58, 42)), BLUE, 20)
    assert converted.notes == (f"{kind} converted to {image.format}",)


def test_several_pictures_in_a_jpeg_are_a_jpeg() -> None:
    data = encoded(photograph(40, 40), "MPO", save_all=True, append_images=[photograph(40, 40)])
    assert untouched(convert(data, RULES)) == "image/jpeg"


def test_the_first_frame_of_an_animation_is_kept() -> None:
    frames = [Image.new("RGB", (40, 30), colour) for colour in (RED, BLUE, WHITE)]
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **options)
        image, converted = result_of(data)
        assert "first frame kept" in converted.notes
        assert near(image.convert("RGB").getpixel((20, 15)), RED)
        assert not getattr(image, "is_animated", False)


def test_cmyk_is_converted() -> None:
    image, converted = result_of(encoded(corner_picture().convert("CMYK"), "JPEG", quality=95))
    assert image.mode == "RGB" and "CMYK converted to 8-bit RGB" in converted.notes
    assert near(image.getpixel((5, 5)), RED, 30)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey_keeps_its_range(kind: str) -> None:
    ramp = Image.frombytes("I;16", (256, 8), b"".join(struct.pack("<256H", *range(0, 65536, 256)) for _ in range(8)))
    image, converted = result_of(encoded(ramp, kind))
    assert "16-bit grey converted to 8-bit RGB" in converted.notes
    for column in (0, 64, 128, 255):
        value = image.convert("L").getpixel((column, 4))
        assert isinstance(value, (int, float)) and abs(value - column) <= 2


def test_sixteen_bit_colour_stays() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = (b"\0" + struct.pack(">3H", 0xFFFF, 0x8000, 0) * 16) * 16
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 16, 2, 0, 0, 0))
    data += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    image, converted = result_of(data)
    assert converted.data is None
    assert near(image.getpixel((8, 8)), (255, 128, 0), 1)


def test_floating_point_grey_is_spread_over_eight_bits() -> None:
    ramp = Image.frombytes("F", (64, 8), struct.pack("<64f", *(column / 63 for column in range(64))) * 8)
    image, _ = result_of(encoded(ramp, "TIFF"))
    assert image.convert("L").getpixel((0, 4)) == 0
    assert image.convert("L").getpixel((63, 4)) == 255


def test_samples_that_are_no_numbers_are_refused() -> None:
    bad = Image.frombytes("F", (8, 8), struct.pack("<f", math.inf) * 64)
    assert refused(encoded(bad, "TIFF")).code == "image_parse_error"


def test_lab_is_converted() -> None:
    lab = ImageCms.profileToProfile(
        corner_picture(), ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    assert lab is not None
    image, _ = result_of(encoded(lab, "TIFF"))
    assert near(image.convert("RGB").getpixel((5, 5)), RED, 20)


def transparent_pictures() -> list[bytes]:
    rgba = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    ImageDraw.Draw(rgba).rectangle((10, 10, 29, 29), fill=(*RED, 255))
    palette = Image.new("P", (40, 40), 0)
    palette.putpalette([0, 0, 0, *RED])
    ImageDraw.Draw(palette).rectangle((10, 10, 29, 29), fill=1)
    keyed = Image.new("RGB", (40, 40), (0, 0, 0))
    ImageDraw.Draw(keyed).rectangle((10, 10, 29, 29), fill=RED)
    return [
        encoded(rgba, "PNG"),
        encoded(rgba, "WEBP", lossless=True),
        encoded(palette, "PNG", transparency=0),
        encoded(palette, "PNG", transparency=b"\x00\xff"),
        encoded(palette, "GIF", transparency=0),
        encoded(keyed, "PNG", transparency=(0, 0, 0)),
        encoded(rgba, "TIFF"),
    ]


@pytest.mark.parametrize("data", transparent_pictures())
@pytest.mark.parametrize("max_pixels", [None, 400])
def test_transparency_is_put_on_white(data: bytes, max_pixels: int | None) -> None:
    image, converted = result_of(data, ImageRules(max_pixels=max_pixels))
    assert "put on white" in converted.notes
    colours = image.convert("RGB")
    assert near(colours.getpixel((1, 1)), WHITE)
    assert near(colours.getpixel((colours.width // 2, colours.height // 2)), RED)


def test_hidden_colours_do_not_bleed_when_scaled() -> None:
    image = Image.new("RGBA", (200, 200), (255, 0, 255, 0))  # fully transparent magenta
    ImageDraw.Draw(image).rectangle((100, 0, 199, 199), fill=(255, 255, 255, 255))
    scaled, _ = result_of(encoded(image, "PNG"), ImageRules(max_pixels=900))
    assert all(near(scaled.convert("RGB").getpixel((column, 15)), WHITE, 3) for column in range(30))


def test_grey_with_alpha() -> None:
    image = Image.new("LA", (20, 20), (0, 128))
    result, _ = result_of(encoded(image, "PNG"))
    assert near(result.convert("RGB").getpixel((10, 10)), (127, 127, 127), 2)


# Orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_every_orientation_comes_out_upright(orientation: int, kind: str) -> None:
    stored = {
        1: [],
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }[orientation]
    image = corner_picture(96, 48)
    for method in stored:
        image = image.transpose(method)
    for max_pixels in (None, 1200):
        result, converted = result_of(with_orientation(image, kind, orientation), ImageRules(max_pixels=max_pixels))
        assert result.size == ((96, 48) if max_pixels is None else (48, 24))
        colours = result.convert("RGB")
        assert near(colours.getpixel((4, 3)), RED, 40), colours.getpixel((4, 3))
        assert near(colours.getpixel((colours.width - 4, colours.height - 3)), BLUE, 40)
        assert near(colours.getpixel((colours.width - 4, 3)), WHITE, 40)
        assert result.getexif().get(0x0112, 1) == 1
        if kind != "TIFF" and orientation != 1:
            assert "turned upright" in converted.notes
    if orientation == 6 and kind == "JPEG":
        assert "scaled from 96x48 to 48x24" in converted.notes


def test_damaged_exif_is_ignored() -> None:
    data = encoded(photograph(40, 30), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff\xff\xff")
    assert convert(data, RULES).data is None


# Colour


def profile(primaries_swapped: bool) -> bytes:
    """An RGB profile; with swapped primaries red means blue, which no viewer could miss."""
    raw = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    if primaries_swapped:
        count = struct.unpack(">I", raw[128:132])[0]
        for index in range(count):
            at = 132 + 12 * index
            raw[at : at + 4] = {b"rXYZ": b"bXYZ", b"bXYZ": b"rXYZ"}.get(bytes(raw[at : at + 4]), raw[at : at + 4])
        raw = bytearray(bytes(raw).replace("sRGB".encode("utf-16-be"), "sBGR".encode("utf-16-be")))
    return bytes(raw)


def test_a_foreign_profile_is_applied_and_srgb_left_alone() -> None:
    picture = corner_picture()
    assert convert(encoded(picture, "PNG", icc_profile=profile(False)), RULES).data is None
    image, converted = result_of(encoded(picture, "PNG", icc_profile=profile(True)))
    assert converted.notes[0] == "colours converted to sRGB"
    assert near(image.getpixel((5, 5)), RED[::-1], 12)
    assert "icc_profile" not in image.info


@pytest.mark.parametrize("junk", [b"no profile", b"\0" * 200, b"\xff" * 128])
def test_a_damaged_profile_is_ignored(junk: bytes) -> None:
    assert convert(encoded(corner_picture(), "PNG", icc_profile=junk), RULES).data is None


def test_a_profile_of_another_colour_space_is_ignored() -> None:
    assert convert(encoded(corner_picture().convert("L"), "PNG", icc_profile=profile(True)), RULES).data is None


# Encoding


def test_a_photograph_becomes_jpeg_and_a_drawing_png() -> None:
    assert result_of(encoded(photograph(200, 200), "PNG"), ImageRules(max_pixels=10_000))[0].format == "JPEG"
    assert result_of(encoded(corner_picture(200, 200), "PNG"), ImageRules(max_pixels=10_000))[0].format == "PNG"
    assert result_of(encoded(photograph(200, 200), "JPEG"), ImageRules(max_pixels=10_000))[0].format == "JPEG"


def test_nothing_of_the_source_but_its_pixels_is_kept() -> None:
    exif = Image.Exif()
    exif[0x010E] = "a secret place"
    data = encoded(photograph(80, 80), "JPEG", exif=exif.tobytes(), comment=b"a secret place")
    converted = convert(data, ImageRules(max_pixels=1600))
    assert converted.data is not None and b"secret" not in converted.data


def test_the_same_picture_gives_the_same_bytes() -> None:
    data = encoded(photograph(300, 200), "WEBP")
    assert convert(data, ImageRules(max_pixels=9000)) == convert(data, ImageRules(max_pixels=9000))


# Geometry


sizes = st.integers(1, 20_000)


@given(sizes, sizes, st.integers(1, 2_000_000))
@example(4000, 3000, 1_000_000)
@example(20_000, 1, 3)
def test_fit_size_keeps_the_cap_and_the_shape(width: int, height: int, cap: int) -> None:
    new_width, new_height = fit_size(width, height, cap)
    assert 1 <= new_width <= width and 1 <= new_height <= height
    assert new_width * new_height <= cap
    if width * height <= cap:
        assert (new_width, new_height) == (width, height)
    short, long = sorted((width, height))
    new_short, new_long = sorted((new_width, new_height))
    if cap >= 4 * math.ceil(long / short):  # else the shorter side is at its least, a pixel
        assert abs(new_long * short - new_short * long) <= short, "the longer side follows within a pixel"
        # no smaller than one pixel of the shorter side
        assert (new_short + 1) ** 2 * long > cap * short or (new_width, new_height) == (width, height)
    assert fit_size(height, width, cap) == (new_height, new_width)


@settings(max_examples=40)
@given(
    st.integers(4, 300),
    st.integers(4, 300),
    st.integers(64, 30_000),
    st.sampled_from(["JPEG", "PNG", "WEBP"]),
    st.integers(1, 8),
)
def test_pictures_come_out_as_fit_size_says(width: int, height: int, cap: int, kind: str, orientation: int) -> None:
    size = fit_size(width, height, cap)
    data = with_orientation(photograph(width, height), kind, orientation)
    rules = ImageRules(max_pixels=cap)
    if min(size) < rules.min_side:
        assert refused(data, rules).code == "invalid_image"
        return
    image, _ = result_of(data, rules)
    if orientation >= 5 and image.getexif().get(0x0112, 1) == 1:
        size = size[::-1]
    assert image.size == size


# Refused


@pytest.mark.parametrize(
    ("data", "code", "word"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported_image_media_type", "SVG"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<!-- x -->\n<svg/>", "unsupported_image_media_type", "SVG"),
        (b"<!DOCTYPE html><html></html>", "unsupported_image_media_type", "web page"),
        (b"%PDF-1.7\n", "unsupported_image_media_type", "PDF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 40, "unsupported_image_media_type", "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + b"\0" * 40, "unsupported_image_media_type", "HEIC"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + b"\0" * 40, "unsupported_image_media_type", "video"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "invalid_image_format", "no picture"),
        (b"hello", "invalid_image_format", "no picture"),
        (b"\0" * 1000, "invalid_image_format", "no picture"),
        (b"\xff\xd8\xff", "image_parse_error", "damaged"),
        (b"\x89PNG\r\n\x1a\n", "image_parse_error", "damaged"),
        (b"GIF89a", "image_parse_error", "damaged"),
        (b"RIFF\x10\0\0\0WEBPVP8 \0\0\0\0", "image_parse_error", "damaged"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, code: str, word: str) -> None:
    error = refused(data)
    assert error.code == code
    assert word in error.message


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_cut_off_pictures_are_refused(kind: str, part: float) -> None:
    data = encoded(photograph(120, 80), kind)
    assert refused(data[: int(len(data) * part)]).code == "image_parse_error"


def test_sizes_beyond_the_limits_are_refused() -> None:
    data = encoded(corner_picture(), "PNG")
    assert refused(data, ImageRules(max_bytes=len(data) - 1)).code == "image_file_too_large"
    assert convert(data, ImageRules(max_bytes=len(data))).data is None
    assert refused(data, ImageRules(max_source_pixels=64 * 48 - 1)).code == "image_too_large"
    assert convert(data, ImageRules(max_source_pixels=64 * 48)).data is None
    assert refused(encoded(Image.new("RGB", (3, 50)), "PNG")).code == "image_too_small"
    assert refused(encoded(Image.new("RGB", (1001, 5)), "PNG")).code == "invalid_image"
    assert refused(encoded(Image.new("RGB", (700, 7)), "PNG"), ImageRules(max_pixels=900)).code == "invalid_image"


@pytest.mark.parametrize("size", [(50_000, 50_000), (2**31 - 1, 2**31 - 1), (64_000_001, 1), (8001, 8001)])
def test_claimed_sizes_are_refused_before_decoding(size: tuple[int, int]) -> None:
    assert refused(png_claiming(*size)).code == "image_too_large"


def test_a_png_with_a_text_bomb_is_refused() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    data = encoded(corner_picture(), "PNG")
    bomb = chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * (80 << 20)))
    refused(data[:33] + bomb + data[33:])


@settings(max_examples=150)
@given(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]), st.data())
def test_damaged_pictures_give_a_picture_or_an_image_error(kind: str, draw: st.DataObject) -> None:
    data = bytearray(encoded(corner_picture(40, 30), kind))
    for _ in range(draw.draw(st.integers(1, 6))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        converted = convert(bytes(data), ImageRules(max_pixels=500, max_source_pixels=1_000_000))
    except ImageError as error:
        assert error.message
    else:
        assert converted.data is None or converted.media_type in ("image/png", "image/jpeg")


@pytest.mark.parametrize(
    "wrong",
    [{"max_pixels": 0}, {"max_images": -1}, {"max_bytes": 0}, {"timeout_s": 0.0}, {"max_source_pixels": -5}],
)
def test_rules_without_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ImageRules(**wrong)  # type: ignore[arg-type]
