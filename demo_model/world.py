"""What the pictures are made of: colours, shapes, icons, their names in two languages, and scenes of them.

Everything is drawn from a ``random.Random``, so that a seed gives the same scene on every machine.
"""

from __future__ import annotations

import colorsys
from random import Random
from typing import Literal

from msgspec import Struct

Rgb = tuple[int, int, int]
Language = Literal["en", "zh"]

# Regions of hue (degrees), saturation and value; the gaps between them are colours that people name differently.
_REGIONS: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((-8, 7), (0.78, 1.0), (0.72, 1.0)),
    "orange": ((21, 38), (0.85, 1.0), (0.92, 1.0)),
    "yellow": ((48, 60), (0.75, 1.0), (0.9, 1.0)),
    "green": ((98, 146), (0.55, 1.0), (0.4, 1.0)),
    "blue": ((208, 241), (0.68, 1.0), (0.55, 1.0)),
    "purple": ((268, 300), (0.55, 1.0), (0.42, 0.78)),
    "pink": ((326, 350), (0.24, 0.5), (0.96, 1.0)),
    "brown": ((18, 30), (0.6, 0.88), (0.34, 0.54)),
    "black": ((0, 360), (0.0, 0.25), (0.0, 0.13)),
    "white": ((0, 360), (0.0, 0.03), (0.96, 1.0)),
    "grey": ((0, 360), (0.0, 0.05), (0.4, 0.66)),
}
COLOURS = tuple(_REGIONS)
SHAPES = ("circle", "square", "triangle", "rectangle", "star", "heart", "cross", "diamond")
ICONS = ("cat", "dog", "house", "tree", "car", "fish", "flower", "boat", "cup", "apple")
SUPPORTS = ("table", "chair")
KINDS = (*SHAPES, *ICONS, *SUPPORTS)
DIGITS = tuple("0123456789")
# what the training-only head tells apart at the place of a thing's centre; 0 is nothing
CENTRES = (*KINDS, *DIGITS)

CHINESE = {
    "red": "红色", "orange": "橙色", "yellow": "黄色", "green": "绿色", "blue": "蓝色", "purple": "紫色",
    "pink": "粉色", "brown": "棕色", "black": "黑色", "white": "白色", "grey": "灰色",
    "circle": "圆形", "square": "正方形", "triangle": "三角形", "rectangle": "长方形", "star": "星形",
    "heart": "心形", "cross": "十字形", "diamond": "菱形",
    "cat": "猫", "dog": "狗", "house": "房子", "tree": "树", "car": "汽车", "fish": "鱼", "flower": "花",
    "boat": "船", "cup": "杯子", "apple": "苹果", "table": "桌子", "chair": "椅子",
}  # fmt: skip
MEASURES = {
    "cat": "只", "dog": "只", "house": "座", "tree": "棵", "car": "辆", "fish": "条", "flower": "朵",
    "boat": "条", "table": "张", "chair": "把",
}  # fmt: skip
_CLASH = {
    # a thing of the first colour is hard to see on the second
    frozenset(pair)
    for pair in (
        ("white", "yellow"), ("white", "pink"), ("white", "grey"), ("black", "brown"), ("orange", "red"),
        ("orange", "yellow"), ("orange", "brown"), ("red", "pink"), ("black", "grey"), ("purple", "brown"),
        ("brown", "grey"), ("red", "brown"), ("purple", "blue"), ("purple", "black"), ("black", "blue"),
    )
}  # fmt: skip
_VERIFIED = ("circle", "square", "triangle"), ("red", "green", "blue", "yellow", "black")


def _held_out() -> frozenset[tuple[str, str]]:
    """Pairs of colour and kind that no training picture shows; those of ``loadmaster verify`` are not among them."""
    shapes, colours = _VERIFIED
    pairs = [
        (colour, kind) for kind in (*SHAPES, *ICONS) for colour in COLOURS if not (kind in shapes and colour in colours)
    ]
    return frozenset(Random("held out").sample(pairs, 24))


HELD_OUT = _held_out()


def number_is_held_out(digits: str) -> bool:
    """A tenth of the four-digit numbers is never shown in training."""
    return len(digits) == 4 and Random(f"number {digits}").random() < 0.1


class Thing(Struct, frozen=True, kw_only=True):
    """``x``, ``y``: the centre; ``size``: half of its greater extent, all in picture pixels. ``tilt``: degrees."""

    kind: str
    colour: str
    rgb: Rgb
    x: float
    y: float
    size: float
    tilt: float = 0.0


class Number(Struct, frozen=True, kw_only=True):
    """A number that is written: the box of its digits in picture pixels, its type and the plate behind it."""

    digits: str
    colour: str
    rgb: Rgb
    x: float
    y: float
    height: float
    style: str
    plate: Rgb | None
    tilt: float = 0.0
    slant: float = 0.0
    weight: float = 0.12


class Scene(Struct, frozen=True, kw_only=True):
    """A picture to be drawn. ``blocks``: colours of parts, from the top left, instead of one background.

    ``on``: (index of the thing, "on" | "under" | "beside", index of the support), if the scene has one.
    """

    width: int
    height: int
    background: str | None  # the colour's name; None: one that has no sure name
    paper: Rgb
    things: tuple[Thing, ...] = ()
    number: Number | None = None
    blocks: tuple[tuple[str, Rgb, tuple[float, float, float, float]], ...] = ()
    on: tuple[int, str, int] | None = None
    texture: str = "plain"
    seed: int = 0


def shade(random: Random, colour: str) -> Rgb:
    """A colour that people call by this name."""
    hue, saturation, value = (random.uniform(*bounds) for bounds in _REGIONS[colour])
    red, green, blue = colorsys.hsv_to_rgb((hue % 360) / 360, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def clash(one: str, other: str) -> bool:
    return one == other or frozenset((one, other)) in _CLASH


def paper(random: Random, avoid: set[str]) -> tuple[str | None, Rgb]:
    """A background on which things of these colours can be told: its name, if it has a sure one."""
    for _ in range(12):
        draw = random.random()
        if draw < 0.45:
            name: str | None = "white"
            rgb: Rgb = (255, 255, 255) if random.random() < 0.6 else shade(random, "white")
        elif draw < 0.6:
            name = None  # pale, between white and a colour
            hue, saturation = random.random(), random.uniform(0.05, 0.14)
            red, green, blue = colorsys.hsv_to_rgb(hue, saturation, random.uniform(0.86, 0.95))
            rgb = round(red * 255), round(green * 255), round(blue * 255)
        else:
            name = random.choice(COLOURS)
            rgb = shade(random, name)
        if not any(clash(name or "white", colour) for colour in avoid):
            return name, rgb
    others = [colour for colour in random.sample(COLOURS, len(COLOURS)) if colour not in avoid]
    name = min(others, key=lambda colour: sum(clash(colour, other) for other in avoid))
    return name, shade(random, name)


def allowed(colour: str, kind: str, unseen: bool) -> bool:
    """Whether a picture may show the pair: in training all but the held out."""
    return unseen or (colour, kind) not in HELD_OUT


def pick(random: Random, kinds: tuple[str, ...], colours: tuple[str, ...], unseen: bool) -> tuple[str, str]:
    """A pair (colour, kind). ``unseen``: of a picture for evaluation, half of whose pairs are held-out ones."""
    if unseen and random.random() < 0.5:
        pairs = sorted(pair for pair in HELD_OUT if pair[1] in kinds and pair[0] in colours)
        if pairs:
            return random.choice(pairs)
    while True:
        colour, kind = random.choice(colours), random.choice(kinds)
        if allowed(colour, kind, unseen):
            return colour, kind
