"""Questions about one picture with their answers: a function for each sort, some with a second turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from msgspec import Struct

from demo_model import words
from demo_model.words import article, called, capital, listed, noun, number, one, phrase, plural, some
from demo_model.world import CHINESE, COLOURS, ICONS, KINDS, SHAPES, Language, Scene, Thing


class Turn(Struct, frozen=True):
    """``kind``: what is asked, for the tally. ``follows``: it makes sense only after the turn before."""

    question: str
    answer: str
    kind: str
    follows: bool = False


Asker = Callable[[Scene, Random, Language], list[Turn] | None]
_BRIEF = 0.3  # the part of questions that ask for one word


def place(thing: Thing, scene: Scene) -> str | None:
    """The ninth of the picture in which the thing is; None near a border between two of them."""
    across, down = thing.x / scene.width * 3, thing.y / scene.height * 3
    if any(abs(value - border) < 0.1 for value in (across, down) for border in (1, 2)):
        return None
    column, row = min(2, int(across)), min(2, int(down))
    return (
        ("top left", "top", "top right"),
        ("left", "middle", "right"),
        ("bottom left", "bottom", "bottom right"),
    )[row][column]


def _unique(scene: Scene, random: Random) -> Thing | None:
    """A thing that is the only one of its kind."""
    kinds = Counter(thing.kind for thing in scene.things)
    alone = [thing for thing in scene.things if kinds[thing.kind] == 1]
    return random.choice(alone) if alone else None


def _absent(scene: Scene, random: Random) -> str:
    """A kind that the picture does not show."""
    seen = {thing.kind for thing in scene.things}
    shapes = bool(seen & set(SHAPES))
    kinds: tuple[str, ...] = random.choice((SHAPES if shapes else ICONS, KINDS))
    return random.choice([kind for kind in kinds if kind not in seen])


def _not_seen(words_for: str, language: Language) -> str:
    return f"I don't see {words_for}." if language == "en" else f"我没有看到{words_for}。"


def _bare(kind: str, language: Language) -> str:
    return article(kind) if language == "en" else CHINESE[kind]


def _brief(random: Random, question: str, language: Language, kind: str = "one") -> str:
    endings = words.ONE_WORD if kind == "one" else words.DIGITS_ALONE
    return (
        f"{question} {random.choice(endings[language])}"
        if language == "en"
        else question + random.choice(endings[language])
    )


def _answered(random: Random, question: str, full: str, short: str, language: Language, kind: str) -> Turn:
    if random.random() < _BRIEF:
        return Turn(_brief(random, question, language), capital(short), kind)
    return Turn(question, full, kind)


# ------------------------------------------------------------------------------------------------ one turn each


def colour(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    thing = _unique(scene, random)
    if thing is None:
        return None
    name, value = noun(thing.kind, language), noun(thing.colour, language)
    question = phrase(random, "colour", language, k=called(random, thing.kind, language))
    first = _answered(random, question, _is(name, value, language), value, language, "colour")
    follow = random.random()
    others = [t for t in scene.things if t.kind != thing.kind]
    alone = [t for t in others if sum(o.kind == t.kind for o in others) == 1]
    if follow < 0.3 and alone:
        other = random.choice(alone)
        again = phrase(random, "and", language, k=noun(other.kind, language))
        full = _is(noun(other.kind, language), noun(other.colour, language), language)
        short = first.answer == capital(value)
        return [first, Turn(again, capital(noun(other.colour, language)) if short else full, "colour", True)]
    if follow < 0.5:
        where = _where(thing, scene, language, "it")
        if where is not None:
            return [first, Turn(phrase(random, "it where", language), where, "where", True)]
    return [first]


def _is(name: str, value: str, language: Language) -> str:
    return f"The {name} is {value}." if language == "en" else f"{name}是{value}的。"


def shape(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    colours = Counter(thing.colour for thing in scene.things)
    alone = [thing for thing in scene.things if colours[thing.colour] == 1]
    if not alone:
        return None
    thing = random.choice(alone)
    value, name = noun(thing.colour, language), noun(thing.kind, language)
    question = phrase(random, "shape", language, c=value)
    if random.random() < 0.15:
        shown = sorted({thing.kind, *random.sample(KINDS, 2)} if random.random() < 0.5 else {thing.kind, *SHAPES[:3]})
        choices = ", ".join(shown) if language == "en" else "、".join(noun(kind, "zh") for kind in shown)
        question = f"{question[:-1]}: {choices}?" if language == "en" else f"{question[:-1]}：{choices}？"
    full = f"The {value} thing is {article(name)}." if language == "en" else f"{value}的是{name}。"
    first = _answered(random, question, full, name, language, "shape")
    if random.random() < 0.3:
        where = _where(thing, scene, language, "it")
        if where is not None:
            return [first, Turn(phrase(random, "it where", language), where, "where", True)]
    return [first]


def count(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    if not scene.things:
        return None
    by = random.choices(("kind", "colour", "both", "all"), (5, 2, 2, 2))[0]
    thing = random.choice(scene.things)
    if by == "kind":
        found = [t for t in scene.things if t.kind == thing.kind]
    elif by == "colour":
        found = [t for t in scene.things if t.colour == thing.colour]
    elif by == "both":
        found = [t for t in scene.things if (t.kind, t.colour) == (thing.kind, thing.colour)]
    else:
        found = list(scene.things)
    if language == "en":
        value = {
            "kind": plural(thing.kind),
            "colour": f"{thing.colour} things",
            "both": f"{thing.colour} {plural(thing.kind)}",
            "all": random.choice(("things", "objects")),
        }[by]
        asked = plural(called(random, thing.kind, "en")) if by == "kind" else value
        question = phrase(random, "count", "en", p=asked)
        answered = "things" if by == "all" else value
        single = answered[:-1] if by in ("all", "colour") else answered.removesuffix(plural(thing.kind)) + thing.kind
        full = f"There is one {single}." if len(found) == 1 else f"There are {number(len(found), 'en')} {answered}."
    else:
        unit = measure = words.measure(thing.kind) if by in ("kind", "both") else "个"
        value = {
            "kind": CHINESE[thing.kind],
            "colour": f"{CHINESE[thing.colour]}的东西",
            "both": f"{CHINESE[thing.colour]}的{CHINESE[thing.kind]}",
            "all": "东西",
        }[by]
        question = phrase(random, "count", "zh", q=random.choice((f"几{unit}", f"多少{unit}")), n=value)
        full = f"有{number(len(found), 'zh')}{measure}{value}。"
    if random.random() < _BRIEF:
        first = Turn(_brief(random, question, language, "digits"), str(len(found)), "count")
    else:
        first = Turn(question, full, "count")
    if by == "kind" and len(found) > 1 and random.random() < 0.6:
        wanted = random.choice(found).colour if random.random() < 0.75 else random.choice(COLOURS)
        of_them = sum(t.colour == wanted for t in found)
        return [first, _of_them(random, thing.kind, wanted, of_them, language)]
    if len(found) == 1 and by == "kind" and random.random() < 0.4:
        return [first, _it_colour(random, thing, language)]
    return [first]


def _of_them(random: Random, kind: str, wanted: str, found: int, language: Language) -> Turn:
    question = phrase(random, "of them", language, c=noun(wanted, language), m=words.measure(kind))
    if language == "en":
        verb = "is" if found <= 1 else "are"
        answer = f"{capital('none' if not found else number(found, 'en'))} of them {verb} {wanted}."
    elif found:
        answer = f"其中{number(found, 'zh')}{words.measure(kind)}是{CHINESE[wanted]}的。"
    else:
        answer = f"其中没有{CHINESE[wanted]}的。"
    return Turn(question, answer, "count", True)


def _it_colour(random: Random, thing: Thing, language: Language) -> Turn:
    value = noun(thing.colour, language)
    answer = f"It is {value}." if language == "en" else f"它是{value}的。"
    return Turn(phrase(random, "it colour", language), answer, "colour", True)


def _where(thing: Thing, scene: Scene, language: Language, subject: str) -> str | None:
    """The sentence that says where the thing is. ``subject``: "it", or the kind's name."""
    subject = ("It" if language == "en" else "它") if subject == "it" else subject
    if scene.on is not None:
        index, how, support = scene.on
        if scene.things[index] is thing:
            under = noun(scene.things[support].kind, language)
            if language == "en":
                return f"{subject} is {how} the {under}."
            return f"{subject}在{under}{words.SUPPORTED[how]}。"
    spot = place(thing, scene)
    if spot is None:
        return None
    if language == "en":
        return f"{subject} is {words.place_phrase(spot, 'en')}."
    return f"{subject}在{words.place_phrase(spot, 'zh')}。"


def where(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    thing = _unique(scene, random)
    if thing is None:
        return None
    name = noun(thing.kind, language)
    answer = _where(thing, scene, language, f"The {name}" if language == "en" else name)
    if answer is None:
        return None
    first = Turn(phrase(random, "where", language, k=called(random, thing.kind, language)), answer, "where")
    if random.random() < 0.45:
        return [first, _it_colour(random, thing, language)]
    return [first]


def what_at(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    if not scene.things or scene.on is not None:
        return None
    places = [place(thing, scene) for thing in scene.things]
    if None in places:
        return None
    tally = Counter(places)
    spots = [spot for spot in words.PLACES if tally[spot] == 1]
    if not spots:
        return None

    def said(spot: str, follows: bool) -> Turn:
        thing = scene.things[places.index(spot)]
        at, shown = words.place_phrase(spot, language), one(thing.colour, thing.kind, language)
        question = phrase(random, "what at", language, l=at)
        if follows:
            question = random.choice(
                (f"And {at}?", f"What about {at}?") if language == "en" else (f"那{at}呢？", f"{at}呢？")
            )
        answer = f"{capital(shown)} is {at}." if language == "en" else f"{at}是{shown}。"
        return Turn(question, answer, "what at", follows)

    random.shuffle(spots)
    turns = [said(spots[0], False)]
    if len(spots) > 1 and random.random() < 0.5:
        turns.append(said(spots[1], True))
    return turns


def beside(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    """What is left of, right of, above or below something; nothing, at times."""
    thing = _unique(scene, random)
    if thing is None or scene.on is not None or len(scene.things) < 2:
        return None
    side = random.choice(tuple(words.SIDES))
    sign = 1 if side in ("right", "below") else -1
    axis, length = ("x", scene.width) if side in ("left", "right") else ("y", scene.height)
    found = []
    for other in scene.things:
        if other is thing:
            continue
        ahead = sign * (getattr(other, axis) - getattr(thing, axis)) / length
        if abs(ahead) < 0.09:
            return None
        if ahead > 0:
            found.append(other)
    if len(found) > 1:
        return None
    name, at = called(random, thing.kind, language), words.side_phrase(side, language)
    canonical = noun(thing.kind, language)
    question = phrase(random, "beside", language, k=name, s=at)
    if not found:
        answer = f"Nothing is {at} the {canonical}." if language == "en" else f"{canonical}的{at}没有东西。"
        return [Turn(question, answer, "beside")]
    shown = one(found[0].colour, found[0].kind, language)
    answer = f"{capital(shown)} is {at} the {canonical}." if language == "en" else f"{canonical}的{at}是{shown}。"
    return [Turn(question, answer, "beside")]


_OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}


def is_beside(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    if scene.on is not None or len(scene.things) < 2:
        return None
    thing = _unique(scene, random)
    others = [
        t for t in scene.things if thing and t.kind != thing.kind and sum(o.kind == t.kind for o in scene.things) == 1
    ]
    if thing is None or not others:
        return None
    other = random.choice(others)
    across, down = (thing.x - other.x) / scene.width, (thing.y - other.y) / scene.height
    if abs(across) > 0.12 and (abs(down) < 0.12 or random.random() < 0.5):
        true = "right" if across > 0 else "left"
    elif abs(down) > 0.12:
        true = "below" if down > 0 else "above"
    else:
        return None
    asked = true if random.random() < 0.5 else _OPPOSITE[true]
    name, second = noun(thing.kind, language), noun(other.kind, language)
    at = words.side_phrase(true, language)
    question = phrase(random, "is beside", language, k=name, o=second, s=words.side_phrase(asked, language))
    if language == "en":
        answer = f"{'Yes' if asked == true else 'No'}, the {name} is {at} the {second}."
    else:
        answer = f"{'是的' if asked == true else '不'}，{name}在{second}的{at}。"
    return [Turn(question, answer, "beside")]


def exists(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    if not scene.things:
        return None
    thing = random.choice(scene.things)
    coloured = random.random() < 0.5
    found = [t for t in scene.things if t.kind == thing.kind and (not coloured or t.colour == thing.colour)]
    value = thing.colour if coloured else None
    asked = _asked_name(random, value, thing.kind, language)
    question = phrase(random, "exists", language, a=article(asked), n=asked)
    shown = some(len(found), value, thing.kind, language)
    if language == "en":
        full = f"Yes, there {'is' if len(found) == 1 else 'are'} {shown}."
    else:
        full = f"有，图中有{shown}。"
    first = _answered(random, question, full, "Yes" if language == "en" else "有", language, "exists")
    if len(found) == 1 and random.random() < 0.35:
        if not coloured and random.random() < 0.6:
            return [first, _it_colour(random, thing, language)]
        answer = _where(thing, scene, language, "it")
        if answer is not None:
            return [first, Turn(phrase(random, "it where", language), answer, "where", True)]
    return [first]


def _asked_name(random: Random, value: str | None, kind: str, language: Language) -> str:
    name = called(random, kind, language)
    if value is None:
        return name
    return f"{value} {name}" if language == "en" else f"{CHINESE[value]}的{name}"


def absent(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    """Something that is not there: a kind, or a kind in another colour."""
    value: str | None = None
    kind = _absent(scene, random)
    if scene.things and random.random() < 0.45:
        seen = {(t.colour, t.kind) for t in scene.things}
        kind = random.choice(scene.things).kind
        colours = random.choice((tuple({t.colour for t in scene.things}), COLOURS))
        missing = [c for c in sorted(colours) if (c, kind) not in seen]
        if missing:
            value = random.choice(missing)
        else:
            kind = _absent(scene, random)
    asked = _asked_name(random, value, kind, language)
    if language == "en":
        denied = _not_seen(article(f"{value} {kind}" if value else kind), "en")
    else:
        denied = _not_seen(f"{CHINESE[value]}的{CHINESE[kind]}" if value else CHINESE[kind], "zh")
    way = random.random()
    if way < 0.55 or value is not None:
        question = phrase(random, "exists", language, a=article(asked), n=asked)
        full = f"No, {denied}" if language == "en" else f"没有，{denied}"
        first = _answered(random, question, full, "No" if language == "en" else "没有", language, "absent")
        if value is None and random.random() < 0.25:
            return [first, Turn(phrase(random, "it colour", language), denied, "absent", True)]
        return [first]
    if way < 0.72:
        return [Turn(phrase(random, "colour", language, k=asked), denied, "absent")]
    if way < 0.88:
        return [Turn(phrase(random, "where", language, k=asked), denied, "absent")]
    many = f"I don't see any {plural(kind)}." if language == "en" else denied
    unit = words.measure(kind)
    question = phrase(random, "count", language, p=plural(kind), q=random.choice((f"几{unit}", f"多少{unit}")), n=asked)
    if random.random() < _BRIEF:
        return [Turn(_brief(random, question, language, "digits"), "0", "absent")]
    return [Turn(question, many, "absent")]


def number_asked(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    if scene.number is None:
        return None
    digits = scene.number.digits
    question = phrase(random, "number", language)
    if random.random() < 0.5:
        first = Turn(_brief(random, question, language, "digits"), digits, "digits")
    else:
        first = Turn(question, f"The number is {digits}." if language == "en" else f"数字是{digits}。", "digits")
    draw = random.random()
    if draw < 0.2:
        answer = f"The first digit is {digits[0]}." if language == "en" else f"第一个数字是{digits[0]}。"
        return [first, Turn(phrase(random, "first digit", language), answer, "digits", True)]
    if draw < 0.4:
        answer = f"The last digit is {digits[-1]}." if language == "en" else f"最后一个数字是{digits[-1]}。"
        return [first, Turn(phrase(random, "last digit", language), answer, "digits", True)]
    if draw < 0.6:
        value = noun(scene.number.colour, language)
        answer = f"It is {value}." if language == "en" else f"它是{value}的。"
        return [first, Turn(phrase(random, "it colour", language), answer, "colour", True)]
    return [first]


def number_colour(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    if scene.number is None:
        return None
    value = noun(scene.number.colour, language)
    full = f"The number is {value}." if language == "en" else f"数字是{value}的。"
    return [_answered(random, phrase(random, "number colour", language), full, value, language, "colour")]


def no_number(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    if scene.number is not None:
        return None
    answer = "I don't see a number." if language == "en" else "我没有看到数字。"
    return [Turn(phrase(random, "number", language), answer, "absent")]


def description(scene: Scene, language: Language) -> str:
    """What is seen, things from left to right, those that are alike together; without "I see"."""
    if scene.number is not None:
        digits, value = scene.number.digits, noun(scene.number.colour, language)
        return f"the number {digits} in {value}" if language == "en" else f"{value}的数字{digits}"
    if scene.on is not None:
        index, how, support = scene.on
        above, below = scene.things[index], scene.things[support]
        shown, held = one(above.colour, above.kind, language), one(below.colour, below.kind, language)
        return f"{shown} {how} {held}" if language == "en" else f"{shown}在{held}{words.SUPPORTED[how]}"
    if scene.things:
        tally: Counter[tuple[str, str]] = Counter()
        for thing in sorted(scene.things, key=lambda t: t.x):
            tally[thing.colour, thing.kind] += 1
        return listed([some(n, value, kind, language) for (value, kind), n in tally.items()], language)
    if scene.blocks:
        shown = listed([noun(name, language) for name, _, _ in scene.blocks], language)
        return f"areas in {shown}" if language == "en" else f"{shown}的区域"
    if scene.background is not None:
        value = noun(scene.background, language)
        return f"nothing but a {value} background" if language == "en" else f"只有{value}的背景"
    return "nothing that I know" if language == "en" else "没有认识的东西"


def describe(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    shown = description(scene, language)
    if language == "en":
        answer = f"I see {shown}."
    else:
        answer = f"图中{shown}。" if shown.startswith(("只有", "没有")) else f"我看到{shown}。"
    return [Turn(phrase(random, "describe", language), answer, "describe")]


def background(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    if scene.background is None:
        return None
    value = noun(scene.background, language)
    full = f"The background is {value}." if language == "en" else f"背景是{value}的。"
    return [_answered(random, phrase(random, "background", language), full, value, language, "background")]


def corner(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    spot = random.choice(tuple(words.CORNERS))
    value = scene.background
    for name, _, (left, top, right, bottom) in scene.blocks:
        x, y = (0.02 if "left" in spot else 0.98), (0.02 if "top" in spot else 0.98)
        if left <= x <= right and top <= y <= bottom:
            value = name
    if value is None or (not scene.blocks and random.random() < 0.6):
        return None
    answer = noun(value, language)
    at = spot if language == "en" else words.CORNERS[spot]
    full = f"The {spot} corner is {answer}." if language == "en" else f"{at}是{answer}的。"
    return [_answered(random, phrase(random, "corner", language, l=at), full, answer, language, "corner")]


def half(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    halves = {
        (0, 0, 0.5, 1): ("left", "左半边"),
        (0.5, 0, 1, 1): ("right", "右半边"),
        (0, 0, 1, 0.5): ("top", "上半部分"),
        (0, 0.5, 1, 1): ("bottom", "下半部分"),
    }
    found = [(name, halves[box]) for name, _, box in scene.blocks if box in halves]
    if not found:
        return None
    name, (english, chinese) = random.choice(found)
    at, value = (english if language == "en" else chinese), noun(name, language)
    full = f"The {at} half is {value}." if language == "en" else f"{at}是{value}的。"
    return [_answered(random, phrase(random, "half", language, l=at), full, value, language, "corner")]


def size(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    if scene.on is not None or len(scene.things) < 2:
        return None
    ordered = sorted(scene.things, key=lambda t: t.size)
    kinds = Counter(t.kind for t in scene.things)
    if ordered[-1].size > 1.35 * ordered[-2].size and random.random() < 0.4:
        shown = ordered[-1]
        name = noun(shown.kind, language)
        named = f"{shown.colour} {name}" if language == "en" else f"{noun(shown.colour, 'zh')}的{name}"
        answer = f"The {named} is the largest." if language == "en" else f"{named}最大。"
        return [Turn(phrase(random, "largest", language), answer, "size")]
    one_thing, other = random.sample(scene.things, 2)
    ratio = one_thing.size / other.size
    if kinds[one_thing.kind] > 1 or kinds[other.kind] > 1 or 1 / 1.4 < ratio < 1.4:
        return None
    asked = random.choice(("larger", "smaller"))
    right = one_thing if (ratio > 1) == (asked == "larger") else other
    first, second = noun(one_thing.kind, language), noun(other.kind, language)
    name = noun(right.kind, language)
    full = f"The {name} is {asked}." if language == "en" else f"{name}更{'大' if asked == 'larger' else '小'}。"
    return [_answered(random, phrase(random, asked, language, k=first, o=second), full, name, language, "size")]


def on_what(scene: Scene, random: Random, language: Language) -> list[Turn] | None:
    if scene.on is None:
        return None
    index, how, support = scene.on
    thing, held = scene.things[index], scene.things[support]
    name = noun(held.kind, language)
    at = how if language == "en" else words.SUPPORTED[how]
    question = phrase(random, "on what", language, k=name, s=at)
    shown = one(thing.colour, thing.kind, language)
    answer = f"{capital(shown)} is {how} the {name}." if language == "en" else f"{name}{at}是{shown}。"
    first = Turn(question, answer, "where")
    if random.random() < 0.4:
        return [first, _it_colour(random, thing, language)]
    return [first]


ASKERS: dict[str, tuple[Asker, float]] = {
    "colour": (colour, 3.0),
    "shape": (shape, 2.5),
    "count": (count, 3.0),
    "where": (where, 2.0),
    "what at": (what_at, 1.5),
    "beside": (beside, 1.7),
    "is beside": (is_beside, 1.0),
    "exists": (exists, 1.5),
    "absent": (absent, 2.2),
    "number": (number_asked, 6.0),
    "number colour": (number_colour, 1.0),
    "no number": (no_number, 0.35),
    "describe": (describe, 2.0),
    "background": (background, 0.7),
    "corner": (corner, 1.5),
    "half": (half, 1.0),
    "size": (size, 1.2),
    "on what": (on_what, 2.0),
}


def ask(scene: Scene, random: Random, language: Language, wanted: tuple[str, ...] = tuple(ASKERS)) -> list[Turn]:
    """One question about the scene, or two that follow each other; empty if none of the wanted sorts fits."""
    open_sorts = list(wanted)
    while open_sorts:
        sort = random.choices(open_sorts, [ASKERS[name][1] for name in open_sorts])[0]
        turns = ASKERS[sort][0](scene, random, language)
        if turns:
            return turns
        open_sorts.remove(sort)
    return []
