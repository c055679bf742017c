"""Scenes drawn at random: free things, many of a kind, something on a table, a number, coloured parts, nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from demo_model.world import (
    COLOURS,
    ICONS,
    KINDS,
    SHAPES,
    SUPPORTS,
    Number,
    Rgb,
    Scene,
    Thing,
    clash,
    number_is_held_out,
    paper,
    pick,
    shade,
)

Maker = Callable[[Random, int, int, bool], Scene]
STYLES = ("type", "stroke", "segments")


def free(random: Random, width: int, height: int, unseen: bool, most: int = 5) -> Scene:
    """One to ``most`` things anywhere, each of its own kind and colour as it comes."""
    kinds: tuple[str, ...] = random.choice((SHAPES, SHAPES, ICONS, KINDS))
    wanted = random.choices(range(1, most + 1), (5, 7, 6, 4, 3)[:most])[0]
    drawn = [pick(random, kinds, COLOURS, unseen) for _ in range(wanted)]
    return _laid_out(random, width, height, drawn)


def pair(random: Random, width: int, height: int, unseen: bool) -> Scene:
    """Two different things side by side or one above the other."""
    kinds: tuple[str, ...] = random.choice((SHAPES, SHAPES, ICONS, KINDS))
    first = pick(random, kinds, COLOURS, unseen)
    second = first
    while second[0] == first[0] or second[1] == first[1]:
        second = pick(random, kinds, COLOURS, unseen)
    short = min(width, height)
    beside = random.random() < 0.75 if abs(width - height) < 0.3 * short else width > height
    sizes = [random.uniform(0.14, 0.36) * min(short, max(width, height) / 2) for _ in range(2)]
    if random.random() < 0.6:
        sizes = [max(sizes)] * 2
    places = []
    for part, size in zip((0.27, 0.73), sizes):
        along, across = (width, height) if beside else (height, width)
        one = along * (part + random.uniform(-0.05, 0.05))
        room = max(across / 2 - size * 1.15, 0)
        two = across / 2 + random.uniform(-0.5, 0.5) * room
        places.append((one, two) if beside else (two, one))
    if random.random() < 0.5:
        places = [(x, height / 2) if beside else (width / 2, y) for x, y in places]
    name, rgb = paper(random, {first[0], second[0]})
    things = tuple(
        _thing(random, colour, kind, x, y, size) for (colour, kind), (x, y), size in zip((first, second), places, sizes)
    )
    return Scene(width=width, height=height, background=name, paper=rgb, things=things, seed=random.getrandbits(30))


def single(random: Random, width: int, height: int, unseen: bool) -> Scene:
    """One thing, often a large one in the middle."""
    colour, kind = pick(random, random.choice((SHAPES, ICONS, KINDS)), COLOURS, unseen)
    if random.random() < 0.5:
        return _laid_out(random, width, height, [(colour, kind)])
    size = random.uniform(0.2, 0.44) * min(width, height)
    name, rgb = paper(random, {colour})
    x = width / 2 + random.uniform(-0.5, 0.5) * max(width / 2 - size * 1.1, 0)
    y = height / 2 + random.uniform(-0.5, 0.5) * max(height / 2 - size * 1.1, 0)
    thing = _thing(random, colour, kind, x, y, size)
    return Scene(width=width, height=height, background=name, paper=rgb, things=(thing,), seed=random.getrandbits(30))


def same_kind(random: Random, other: Scene, width: int, height: int) -> Scene:
    """One thing of the kind that the other scene shows, in a colour of its own."""
    colours = tuple(colour for colour in COLOURS if colour != other.things[0].colour)
    colour, kind = pick(random, (other.things[0].kind,), colours, False)
    size = random.uniform(0.2, 0.44) * min(width, height)
    name, rgb = paper(random, {colour})
    thing = _thing(random, colour, kind, width / 2, height / 2, size)
    return Scene(width=width, height=height, background=name, paper=rgb, things=(thing,), seed=random.getrandbits(30))


def many(random: Random, width: int, height: int, unseen: bool) -> Scene:
    """One to five of a kind, and at times some of another: for counting."""
    kinds: tuple[str, ...] = random.choice((SHAPES, SHAPES, ICONS))
    first = pick(random, kinds, COLOURS, unseen)
    count = random.randint(1, 5)
    drawn = [first] * count
    if random.random() < 0.55:
        other = pick(random, kinds, COLOURS, unseen)
        drawn += [other] * random.randint(1, max(1, min(5, 7 - count)))
    elif random.random() < 0.4:  # one kind in many colours
        drawn = [pick(random, (first[1],), COLOURS, unseen) for _ in range(count)]
    return _laid_out(random, width, height, drawn)


def scenery(random: Random, width: int, height: int, unseen: bool) -> Scene:
    """Something on, under or beside a table or a chair, on a floor."""
    support = random.choice(SUPPORTS)
    place = random.choice(("on", "on", "under", "beside") if support == "table" else ("on", "on", "beside"))
    colour, kind = pick(random, random.choice((ICONS, ICONS, SHAPES)), COLOURS, unseen)
    tops = ("brown", "brown", "white", "grey", "black", "red", "blue", "green")
    top = random.choice([name for name in tops if name != colour])
    short = min(width, height)
    size = random.uniform(0.22, 0.28) * short
    name, rgb = paper(random, {colour, top})
    x = width / 2 + random.uniform(-0.6, 0.6) * max(width / 2 - size * 1.2, 0)
    floor = height * random.uniform(0.82, 0.95)
    y = floor - size * 0.75  # supports reach from -0.75 to 0.75 of their size
    small = size * random.uniform(0.42, 0.55)
    if place == "on":
        seat = y - size * 0.72 if support == "table" else y + size * 0.05
        spot = (x + random.uniform(-0.25, 0.25) * size * (support == "table"), seat - small * 0.86)
        if support == "chair":
            small *= 0.8
            spot = (x + 0.08 * size, seat - small * 0.86)
    elif place == "under":
        small = size * 0.42
        spot = (x, floor - small * 0.86)
    else:
        side = 1 if x < width / 2 else -1
        spot = (x + side * (size + small * random.uniform(1.1, 1.3)), floor - small * 0.86)
    thing = _thing(random, colour, kind, spot[0], spot[1], small, tilted=False)
    held = _thing(random, top, support, x, y, size, tilted=False)
    return Scene(
        width=width,
        height=height,
        background=name,
        paper=rgb,
        things=(held, thing),
        on=(1, place, 0),
        seed=random.getrandbits(30),
    )


def numbered(random: Random, width: int, height: int, unseen: bool) -> Scene:
    """A number of one to four digits, at times on a plate, at times with a shape beside it."""
    digits = _digits(random, random.choices((1, 2, 3, 4), (1, 1, 1, 4))[0], unseen)
    colour = random.choice(COLOURS)
    name, rgb = paper(random, {colour})
    plate: Rgb | None = None
    if random.random() < 0.25:
        plate_name = next(other for other in random.sample(COLOURS, len(COLOURS)) if not clash(other, colour))
        plate = shade(random, plate_name)
    style = random.choices(STYLES, (6, 3, 1))[0]
    most_height = min(height * 0.7, width * 0.88 / (len(digits) * 0.62))
    least_height = min(most_height, 26.0)
    tall = random.uniform(least_height, most_height) if random.random() < 0.7 else most_height
    long = tall * 0.62 * len(digits)
    x = width / 2 + random.uniform(-0.5, 0.5) * max(width - long - 8, 0)
    y = height / 2 + random.uniform(-0.5, 0.5) * max(height - tall * 1.2 - 8, 0)
    if random.random() < 0.3:
        x, y = width / 2, height / 2
    number = Number(
        digits=digits,
        colour=colour,
        rgb=shade(random, colour),
        x=x,
        y=y,
        height=tall,
        style=style,
        plate=plate,
        tilt=random.uniform(-7, 7) if random.random() < 0.4 else 0.0,
        slant=random.uniform(-0.2, 0.2) if random.random() < 0.4 else 0.0,
        weight=random.uniform(0.08, 0.2),
    )
    return Scene(width=width, height=height, background=name, paper=rgb, number=number, seed=random.getrandbits(30))


def parts(random: Random, width: int, height: int, unseen: bool) -> Scene:
    """Halves, quarters, or a half and two quarters, each in a colour of its own."""
    layout = random.choice(("across", "down", "quarters", "half top", "half top", "half bottom", "half left"))
    whole = {
        "across": ((0, 0, 0.5, 1), (0.5, 0, 1, 1)),
        "down": ((0, 0, 1, 0.5), (0, 0.5, 1, 1)),
        "quarters": ((0, 0, 0.5, 0.5), (0.5, 0, 1, 0.5), (0, 0.5, 0.5, 1), (0.5, 0.5, 1, 1)),
        "half top": ((0, 0, 1, 0.5), (0, 0.5, 0.5, 1), (0.5, 0.5, 1, 1)),
        "half bottom": ((0, 0, 0.5, 0.5), (0.5, 0, 1, 0.5), (0, 0.5, 1, 1)),
        "half left": ((0, 0, 0.5, 1), (0.5, 0, 1, 0.5), (0.5, 0.5, 1, 1)),
    }[layout]
    colours = random.sample(COLOURS, len(whole))
    blocks = tuple((colour, shade(random, colour), box) for colour, box in zip(colours, whole))
    return Scene(
        width=width, height=height, background=None, paper=(255, 255, 255), blocks=blocks, seed=random.getrandbits(30)
    )


def nothing(random: Random, width: int, height: int, unseen: bool) -> Scene:
    """Paper alone, or noise, stripes and gradients: nothing that has a name here."""
    name, rgb = paper(random, set())
    texture = random.choice(("plain", "noise", "stripes", "gradient", "blobs"))
    return Scene(
        width=width,
        height=height,
        background=name if texture == "plain" else None,
        paper=rgb,
        texture=texture,
        seed=random.getrandbits(30),
    )


MAKERS: dict[str, tuple[Maker, float]] = {
    "single": (single, 2.0),
    "pair": (pair, 3.5),
    "free": (free, 5.0),
    "many": (many, 4.0),
    "scenery": (scenery, 2.0),
    "numbered": (numbered, 5.0),
    "parts": (parts, 1.2),
    "nothing": (nothing, 0.6),
}


def any_scene(random: Random, width: int, height: int, unseen: bool) -> Scene:
    """A scene of any sort, in the shares of MAKERS."""
    makers = [maker for maker, _ in MAKERS.values()]
    return random.choices(makers, [share for _, share in MAKERS.values()])[0](random, width, height, unseen)


def _laid_out(random: Random, width: int, height: int, drawn: list[tuple[str, str]]) -> Scene:
    """The things where they do not touch each other; fewer if there is no room."""
    name, rgb = paper(random, {colour for colour, _ in drawn})
    short = min(width, height)
    alike = random.random() < 0.4
    room = (width * height / len(drawn)) ** 0.5
    largest = max(11.0, min(0.3 * short, 0.36 * room))
    smallest = max(10.0, 0.085 * short)
    common = random.uniform(smallest, largest)
    placed: list[Thing] = []
    for colour, kind in drawn:
        for attempt in range(40):
            size = common if alike else random.uniform(smallest, largest)
            size *= 0.97**attempt
            size = max(size, 9.5)
            edge = size * 1.12
            if 2 * edge > short:
                continue
            x, y = random.uniform(edge, width - edge), random.uniform(edge, height - edge)
            if all(max(abs(x - t.x), abs(y - t.y)) > 1.12 * (size + t.size) + 2 for t in placed):
                placed.append(_thing(random, colour, kind, x, y, size))
                break
    return Scene(
        width=width, height=height, background=name, paper=rgb, things=tuple(placed), seed=random.getrandbits(30)
    )


_TILTS = {
    "circle": 0, "square": 9, "triangle": 180, "rectangle": 14, "star": 36, "heart": 18, "cross": 14, "diamond": 8,
}  # fmt: skip


def _thing(random: Random, colour: str, kind: str, x: float, y: float, size: float, tilted: bool = True) -> Thing:
    most = _TILTS.get(kind, 7)
    tilt = random.uniform(-most, most) if tilted and random.random() < 0.5 else 0.0
    return Thing(kind=kind, colour=colour, rgb=shade(random, colour), x=x, y=y, size=size, tilt=tilt)


def _digits(random: Random, count: int, unseen: bool) -> str:
    while True:
        digits = "".join(random.choice("0123456789") for _ in range(count))
        if count > 1 and digits[0] == "0":
            continue
        if number_is_held_out(digits) == (unseen and count == 4):
            return digits
