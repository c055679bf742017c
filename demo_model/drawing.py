"""Scenes as pictures: Pillow alone, at twice the size and scaled down, so that edges are smooth."""

from __future__ import annotations

import io
import math
from functools import cache
from random import Random

from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from demo_model.world import COLOURS, Number, Rgb, Scene, Thing, shade

_TWICE = 2
Points = list[tuple[float, float]]
_DARK, _LIGHT = (30, 30, 35), (245, 245, 240)

# Digits as strokes on a grid of 1 x 2: polylines from the top left.
_STROKES: dict[str, tuple[tuple[tuple[float, float], ...], ...]] = {
    "1": (((0.2, 0.4), (0.6, 0.0), (0.6, 2.0)),),
    "2": (((0.0, 0.45), (0.12, 0.12), (0.5, 0.0), (0.9, 0.15), (1.0, 0.5), (0.8, 0.95), (0.0, 2.0), (1.0, 2.0)),),
    "3": (
        ((0.05, 0.2), (0.5, 0.0), (0.9, 0.2), (0.95, 0.6), (0.7, 0.9), (0.4, 0.95)),
        ((0.4, 0.95), (0.8, 1.1), (1.0, 1.45), (0.85, 1.85), (0.45, 2.0), (0.0, 1.8)),
    ),
    "4": (((0.75, 2.0), (0.75, 0.0), (0.0, 1.4), (1.0, 1.4)),),
    "5": (
        ((0.95, 0.0), (0.15, 0.0), (0.1, 0.9), (0.5, 0.78), (0.9, 1.0), (1.0, 1.4), (0.8, 1.85), (0.4, 2.0), (0, 1.85)),
    ),
    "7": (((0.0, 0.0), (1.0, 0.0), (0.35, 2.0)),),
}  # fmt: skip
_SEGMENTS = {
    "0": "abcdef", "1": "bc", "2": "abged", "3": "abgcd", "4": "fgbc",
    "5": "afgcd", "6": "afgedc", "7": "abc", "8": "abcdefg", "9": "abcdfg",
}  # fmt: skip
_SEGMENT_LINES = {
    "a": ((0, 0), (1, 0)), "b": ((1, 0), (1, 1)), "c": ((1, 1), (1, 2)), "d": ((0, 2), (1, 2)),
    "e": ((0, 1), (0, 2)), "f": ((0, 0), (0, 1)), "g": ((0, 1), (1, 1)),
}  # fmt: skip


def draw(scene: Scene) -> Image.Image:
    """The picture, RGB, of the scene's width and height; ``info["number"]``: the box of the number's digits."""
    random = Random(scene.seed)
    size = (scene.width * _TWICE, scene.height * _TWICE)
    image = Image.new("RGB", size, scene.paper)
    if scene.texture != "plain":
        _texture(image, scene, random)
    pen = ImageDraw.Draw(image)
    for _, rgb, (left, top, right, bottom) in scene.blocks:
        pen.rectangle((left * size[0], top * size[1], right * size[0], bottom * size[1]), rgb)
    for thing in scene.things:
        _thing(pen, thing)
    if scene.number is not None:
        box = _number(image, scene.number)
    drawn = image.reduce(_TWICE)
    if scene.number is not None:
        drawn.info["number"] = tuple(edge / _TWICE for edge in box)
    return drawn


def roughened(image: Image.Image, random: Random) -> Image.Image:
    """As pictures arrive: scaled by some program, compressed, a little blurred; the size stays."""
    if random.random() < 0.35:
        factor = random.choice((0.7, 0.85, 1.3, 1.7))
        other = (max(32, round(image.width * factor)), max(32, round(image.height * factor)))
        image = image.resize(other, Image.Resampling.BILINEAR).resize(
            image.size, random.choice((Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC))
        )
    if random.random() < 0.12:
        image = image.filter(ImageFilter.GaussianBlur(random.uniform(0.3, 0.9)))
    if random.random() < 0.15:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=random.randint(55, 95))
        image = Image.open(file).convert("RGB")
    return image


# ------------------------------------------------------------------------------------------------ things


def _thing(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    cosine, sine = math.cos(math.radians(thing.tilt)), math.sin(math.radians(thing.tilt))
    size, x, y = thing.size * _TWICE, thing.x * _TWICE, thing.y * _TWICE

    def at(points: Points) -> Points:
        return [(x + size * (a * cosine - b * sine), y + size * (a * sine + b * cosine)) for a, b in points]

    for points, role in _outline(thing.kind):
        if role == "body":
            pen.polygon(at(points), thing.rgb)
        elif role == "mark":
            pen.polygon(at(points), _LIGHT if sum(thing.rgb) < 330 else _DARK)
        else:
            pen.polygon(at(points), _toned(thing.rgb))


def _toned(rgb: Rgb) -> Rgb:
    """A part of a thing in the same colour, darker, or lighter where it is dark."""
    if sum(rgb) < 150:
        return rgb[0] + 45, rgb[1] + 45, rgb[2] + 45
    return int(rgb[0] * 0.72), int(rgb[1] * 0.72), int(rgb[2] * 0.72)


def _round(x: float, y: float, across: float, down: float, corners: int = 28) -> Points:
    turns = [2 * math.pi * n / corners for n in range(corners)]
    return [(x + across * math.cos(turn), y + down * math.sin(turn)) for turn in turns]


def _box(left: float, top: float, right: float, bottom: float) -> Points:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


@cache
def _outline(kind: str) -> tuple[tuple[Points, str], ...]:
    """Polygons in units of the thing's size, y downwards: (points, "body" | "tone" | "mark"), bottom first."""
    return tuple(_OUTLINES[kind])


def _star() -> Points:
    points = []
    for corner in range(10):
        reach = 1.0 if corner % 2 == 0 else 0.42
        turn = math.pi * corner / 5 - math.pi / 2
        points.append((reach * math.cos(turn), reach * math.sin(turn)))
    return points


def _heart() -> Points:
    points = []
    for n in range(40):
        turn = 2 * math.pi * n / 40
        x = 16 * math.sin(turn) ** 3
        y = 13 * math.cos(turn) - 5 * math.cos(2 * turn) - 2 * math.cos(3 * turn) - math.cos(4 * turn)
        points.append((x / 17, -(y + 2.5) / 17))
    return points


_FIFTHS = tuple(2 * math.pi * n / 5 for n in range(5))
_OUTLINES: dict[str, list[tuple[Points, str]]] = {
    "circle": [(_round(0, 0, 1, 1, 40), "body")],
    "square": [(_box(-0.92, -0.92, 0.92, 0.92), "body")],
    "triangle": [([(0, -1), (1, 0.95), (-1, 0.95)], "body")],
    "rectangle": [(_box(-1, -0.5, 1, 0.5), "body")],
    "star": [(_star(), "body")],
    "heart": [(_heart(), "body")],
    "cross": [(_box(-0.32, -0.98, 0.32, 0.98), "body"), (_box(-0.98, -0.32, 0.98, 0.32), "body")],
    "diamond": [([(0, -1), (0.78, 0), (0, 1), (-0.78, 0)], "body")],
    "cat": [
        ([(0.62, 0.75), (0.95, 0.55), (0.98, 0.0), (0.84, -0.02), (0.8, 0.45), (0.5, 0.5)], "body"),
        (_round(0, 0.45, 0.62, 0.43), "body"),
        (_round(-0.12, -0.22, 0.5, 0.42), "body"),
        ([(-0.6, -0.35), (-0.62, -0.98), (-0.2, -0.55)], "body"),
        ([(0.36, -0.35), (0.38, -0.98), (-0.04, -0.55)], "body"),
        (_round(-0.31, -0.27, 0.09, 0.1, 10), "mark"),
        (_round(0.07, -0.27, 0.09, 0.1, 10), "mark"),
        ([(-0.2, -0.08), (-0.04, -0.08), (-0.12, 0.02)], "mark"),
    ],
    "dog": [
        (_box(-0.55, 0.1, -0.33, 0.86), "body"),
        (_box(0.42, 0.1, 0.64, 0.86), "body"),
        (_box(-0.55, -0.05, 0.66, 0.48), "body"),
        ([(0.55, 0.0), (0.95, -0.5), (0.98, -0.3), (0.66, 0.2)], "body"),
        (_box(-0.98, -0.55, -0.3, 0.0), "body"),
        (_box(-0.7, -0.8, -0.22, 0.0), "body"),
        ([(-0.38, -0.8), (-0.12, -0.75), (-0.08, -0.05), (-0.34, -0.15)], "tone"),
        (_round(-0.6, -0.5, 0.08, 0.09, 10), "mark"),
        (_round(-0.95, -0.42, 0.09, 0.09, 10), "mark"),
    ],
    "house": [
        (_box(-0.72, -0.15, 0.72, 0.86), "body"),
        ([(-1, -0.12), (0, -0.95), (1, -0.12)], "tone"),
        (_box(-0.14, 0.3, 0.2, 0.86), "mark"),
        (_box(-0.56, 0.08, -0.28, 0.36), "mark"),
    ],
    "tree": [
        (_box(-0.13, 0.3, 0.13, 0.9), "tone"),
        (_round(0, -0.5, 0.48, 0.46), "body"),
        (_round(-0.34, -0.05, 0.46, 0.42), "body"),
        (_round(0.34, -0.05, 0.46, 0.42), "body"),
    ],
    "car": [
        ([(-0.55, -0.02), (-0.34, -0.46), (0.34, -0.46), (0.62, -0.02)], "body"),
        (_box(-0.98, -0.06, 0.98, 0.36), "body"),
        (_box(-0.3, -0.36, 0.0, -0.06), "mark"),
        (_box(0.08, -0.36, 0.32, -0.06), "mark"),
        (_round(-0.52, 0.36, 0.22, 0.22), "mark"),
        (_round(0.52, 0.36, 0.22, 0.22), "mark"),
        (_round(-0.52, 0.36, 0.1, 0.1, 12), "body"),
        (_round(0.52, 0.36, 0.1, 0.1, 12), "body"),
    ],
    "fish": [
        (_round(-0.2, 0, 0.72, 0.46), "body"),
        ([(0.35, 0), (0.98, -0.5), (0.98, 0.5)], "body"),
        ([(-0.15, -0.4), (0.2, -0.72), (0.25, -0.3)], "tone"),
        (_round(-0.6, -0.1, 0.09, 0.09, 10), "mark"),
    ],
    "flower": [
        (_box(-0.06, 0.1, 0.06, 0.95), "tone"),
        ([(0.0, 0.8), (0.45, 0.42), (0.5, 0.62)], "tone"),
        *((_round(0.42 * math.cos(turn), -0.35 + 0.42 * math.sin(turn), 0.27, 0.27, 16), "body") for turn in _FIFTHS),
        (_round(0, -0.35, 0.2, 0.2, 14), "mark"),
    ],
    "boat": [
        ([(-0.98, 0.3), (0.98, 0.3), (0.6, 0.82), (-0.6, 0.82)], "body"),
        (_box(-0.06, -0.95, 0.04, 0.32), "mark"),
        ([(0.1, -0.9), (0.82, 0.18), (0.1, 0.18)], "body"),
        ([(-0.14, -0.6), (-0.14, 0.18), (-0.66, 0.18)], "tone"),
    ],
    "cup": [
        (_round(0.5, 0.05, 0.44, 0.4), "tone"),
        (_round(0.5, 0.05, 0.24, 0.2), "mark"),
        ([(-0.8, -0.6), (0.55, -0.6), (0.42, 0.8), (-0.67, 0.8)], "body"),
        (_round(-0.125, -0.6, 0.675, 0.13), "tone"),
    ],
    "apple": [
        (_round(-0.3, 0.15, 0.52, 0.68), "body"),
        (_round(0.3, 0.15, 0.52, 0.68), "body"),
        ([(-0.06, -0.4), (0.04, -0.95), (0.16, -0.92), (0.06, -0.4)], "mark"),
        ([(0.1, -0.6), (0.35, -0.88), (0.62, -0.8), (0.4, -0.58)], "tone"),
    ],
    "table": [
        (_box(-0.84, -0.6, -0.68, 0.75), "body"),
        (_box(0.68, -0.6, 0.84, 0.75), "body"),
        (_box(-1.0, -0.75, 1.0, -0.53), "body"),
    ],
    "chair": [
        (_box(-0.5, -0.85, -0.34, 0.75), "body"),
        (_box(-0.5, -0.85, -0.28, -0.1), "body"),
        (_box(0.44, 0.1, 0.6, 0.75), "body"),
        (_box(-0.5, 0.05, 0.62, 0.25), "body"),
    ],
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ numbers


def _number(image: Image.Image, number: Number) -> tuple[int, int, int, int]:
    """The box that the digits fill."""
    tall = max(8, round(number.height * _TWICE))
    mask = _typed(number.digits, tall) if number.style == "type" else _stroked(number, tall)
    if number.slant:
        extra = round(abs(number.slant) * mask.height) + 2
        wide = Image.new("L", (mask.width + 2 * extra, mask.height), 0)
        wide.paste(mask, (extra, 0))
        shift = (1, number.slant, -number.slant * mask.height / 2, 0, 1, 0)
        mask = wide.transform(wide.size, Image.Transform.AFFINE, shift, Image.Resampling.BILINEAR)
    if number.tilt:
        mask = mask.rotate(number.tilt, Image.Resampling.BILINEAR, expand=True)
    room = min((image.width - 4) / mask.width, (image.height - 4) / mask.height, 1.0)
    if room < 1.0:
        mask = mask.resize((max(1, int(mask.width * room)), max(1, int(mask.height * room))))
    x = min(max(round(number.x * _TWICE - mask.width / 2), 2), image.width - mask.width - 2)
    y = min(max(round(number.y * _TWICE - mask.height / 2), 2), image.height - mask.height - 2)
    if number.plate is not None:
        edge = max(3, tall // 6)
        box = (x - edge, y - edge, x + mask.width + edge, y + mask.height + edge)
        ImageDraw.Draw(image).rounded_rectangle(box, edge, number.plate)
    image.paste(number.rgb, (x, y), mask)
    return x, y, x + mask.width, y + mask.height


@cache
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size=size)


def _typed(text: str, tall: int) -> Image.Image:
    font = _font(96)
    left, top, right, bottom = (int(edge) for edge in font.getbbox(text))
    mask = Image.new("L", (right - left, bottom - top), 0)
    ImageDraw.Draw(mask).text((-left, -top), text, fill=255, font=font)
    return mask.resize((max(4, round(mask.width * tall / mask.height)), tall), Image.Resampling.BILINEAR)


def _stroked(number: Number, tall: int) -> Image.Image:
    thick = max(3, round(tall * number.weight))
    high = (tall - thick) / 2  # a unit of the grid
    wide = high * 0.95
    step = wide + thick * 1.5 + tall * 0.06
    mask = Image.new("L", (round(step * len(number.digits)) + thick, tall + 2), 0)
    pen = ImageDraw.Draw(mask)
    for place, digit in enumerate(number.digits):
        left = thick / 2 + place * step
        for line in _lines(number.style, digit):
            points = [(left + x * wide, thick / 2 + y * high) for x, y in line]
            pen.line(points, 255, thick, joint="curve")
            if number.style == "stroke":
                for x, y in (points[0], points[-1]):
                    pen.ellipse((x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2), 255)
    box = mask.getbbox()
    return mask.crop(box) if box is not None else mask


def _lines(style: str, digit: str) -> list[Points]:
    if style == "segments":
        return [list(_SEGMENT_LINES[segment]) for segment in _SEGMENTS[digit]]
    if digit in _STROKES:
        return [list(line) for line in _STROKES[digit]]
    if digit == "0":
        ring = _round(0.5, 1.0, 0.5, 1.0, 24)
        return [[*ring, ring[0]]]
    if digit == "8":
        upper, lower = _round(0.5, 0.47, 0.42, 0.47, 20), _round(0.5, 1.45, 0.5, 0.55, 20)
        return [[*upper, upper[0]], [*lower, lower[0]]]
    ring = _round(0.5, 1.45, 0.5, 0.55, 20) if digit == "6" else _round(0.5, 0.55, 0.5, 0.55, 20)
    tail: Points = [(0.0, 1.45), (0.15, 0.7), (0.75, 0.0)] if digit == "6" else [(1.0, 0.55), (0.9, 1.3), (0.4, 2.0)]
    return [[*ring, ring[0]], tail]


# ------------------------------------------------------------------------------------------------ textures


def _texture(image: Image.Image, scene: Scene, random: Random) -> None:
    other = shade(random, random.choice(COLOURS))
    if scene.texture == "noise":
        grain = Image.effect_noise((image.width // 4, image.height // 4), random.uniform(30, 90)).resize(image.size)
        image.paste(Image.merge("RGB", [ImageChops.offset(grain, n * 37, n * 11) for n in range(3)]))
    elif scene.texture == "gradient":
        ramp = Image.linear_gradient("L").rotate(random.choice((0, 90, 180, 270))).resize(image.size)
        image.paste(Image.composite(Image.new("RGB", image.size, other), image, ramp))
    elif scene.texture == "stripes":
        pen, step = ImageDraw.Draw(image), random.randint(8, 40)
        for place in range(0, max(image.size), 2 * step):
            if scene.seed % 2:
                pen.rectangle((place, 0, place + step, image.height), other)
            else:
                pen.rectangle((0, place, image.width, place + step), other)
    else:
        pen = ImageDraw.Draw(image, "RGBA")
        for _ in range(14):
            x, y, r = random.random() * image.width, random.random() * image.height, random.uniform(10, 120)
            colour = shade(random, random.choice(COLOURS))
            pen.ellipse((x - r, y - r * random.uniform(0.4, 1), x + r, y + r), (*colour, 60))
