"""Pictures with known answers, drawn on the spot: shapes, a number, one that has to be turned, a huge one."""

from __future__ import annotations

import base64
import io
from functools import cache
from random import Random

from msgspec import Struct
from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (220, 20, 30),
    "green": (20, 150, 50),
    "blue": (25, 60, 220),
    "yellow": (250, 215, 20),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle")
_WHITE = (255, 255, 255)
_ORIENTATION, _TURN_RIGHT = 0x0112, 6  # EXIF: to be shown, the stored picture is turned clockwise by 90 degrees
HUGE = (4608, 3456)  # 15.9 megapixels, a photograph of a telephone


class Picture(Struct, frozen=True, kw_only=True):
    """``width``, ``height``: as shown. ``answers``: what it shows, by the name of the question."""

    content: bytes
    media_type: str
    width: int
    height: int
    answers: dict[str, str]

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{base64.b64encode(self.content).decode('ascii')}"


def two_shapes(random: Random) -> Picture:
    """One shape on the left, another on the right, in two colours, on white."""
    left, right = random.sample(SHAPES, 2)
    left_colour, right_colour = random.sample(sorted(COLOURS), 2)
    image = Image.new("RGB", (640, 384), _WHITE)
    draw = ImageDraw.Draw(image)
    _shape(draw, left, (176, 192), 120, COLOURS[left_colour])
    _shape(draw, right, (464, 192), 120, COLOURS[right_colour])
    return _png(
        image,
        {"left shape": left, "right shape": right, "left colour": left_colour, "right colour": right_colour},
    )


@cache
def one_colour(colour: str) -> Picture:
    """A large disc of this colour on white."""
    image = Image.new("RGB", (384, 384), _WHITE)
    _shape(ImageDraw.Draw(image), "circle", (192, 192), 160, COLOURS[colour])
    return _png(image, {"colour": colour})


def number(random: Random) -> Picture:
    """Four different digits, dark on light."""
    digits = _digits(random)
    image = Image.new("RGB", (640, 320), _WHITE)
    _type(image, digits, COLOURS["black"])
    return _png(image, {"number": digits})


def turned(random: Random) -> Picture:
    """The upper half has one colour, the lower quarters have two more; stored lying, with EXIF to set it upright.

    Whoever ignores EXIF sees the answer "unturned" in the top right corner.
    """
    top, lower_left, lower_right = random.sample(sorted(COLOURS), 3)
    width, height = 448, 640
    upright = Image.new("RGB", (width, height), COLOURS[top])
    draw = ImageDraw.Draw(upright)
    draw.rectangle((0, height // 2, width // 2 - 1, height), COLOURS[lower_left])
    draw.rectangle((width // 2, height // 2, width, height), COLOURS[lower_right])
    stored = upright.transpose(Image.Transpose.ROTATE_90)  # counter-clockwise, which the viewer undoes
    exif = Image.Exif()
    exif[_ORIENTATION] = _TURN_RIGHT
    file = io.BytesIO()
    stored.save(file, "JPEG", quality=92, exif=exif)
    return Picture(
        content=file.getvalue(),
        media_type="image/jpeg",
        width=width,
        height=height,
        answers={"top right": top, "unturned": lower_right},
    )


def huge(random: Random) -> Picture:
    """As :func:`number`, as a photograph of more than 12 megapixels."""
    digits = _digits(random)
    image = Image.new("RGB", HUGE, (235, 240, 245))
    _type(image, digits, COLOURS["black"])
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return Picture(
        content=file.getvalue(), media_type="image/jpeg", width=HUGE[0], height=HUGE[1], answers={"number": digits}
    )


def _digits(random: Random) -> str:
    # no 0, which is read as a letter, and no digit twice, so that none can be lost unseen
    return "".join(random.sample("123456789", 4))


def _png(image: Image.Image, answers: dict[str, str]) -> Picture:
    file = io.BytesIO()
    image.save(file, "PNG")
    return Picture(
        content=file.getvalue(), media_type="image/png", width=image.width, height=image.height, answers=answers
    )


def _shape(
    draw: ImageDraw.ImageDraw, shape: str, centre: tuple[int, int], radius: int, colour: tuple[int, int, int]
) -> None:
    x, y = centre
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, colour)
    elif shape == "square":
        draw.rectangle(box, colour)
    else:
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], colour)


def _type(image: Image.Image, text: str, colour: tuple[int, int, int]) -> None:
    """The text across four fifths of the width, in the middle, in the type that Pillow carries."""
    try:
        font = ImageFont.load_default(size=100)
    except ImportError:  # a Pillow without FreeType has only its bitmap type, which is scaled up
        font = ImageFont.load_default()
    left, top, right, bottom = (int(edge) for edge in font.getbbox(text))
    mask = Image.new("L", (right - left, bottom - top), 0)
    ImageDraw.Draw(mask).text((-left, -top), text, fill=255, font=font)
    scale = min(image.width * 0.8 / mask.width, image.height * 0.7 / mask.height)
    mask = mask.resize((round(mask.width * scale), round(mask.height * scale)), Image.Resampling.BICUBIC)
    image.paste(colour, ((image.width - mask.width) // 2, (image.height - mask.height) // 2), mask)
