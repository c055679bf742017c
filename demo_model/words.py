"""The words of questions and answers in English and Chinese: names, numbers, places, and how things are asked."""

from __future__ import annotations

from random import Random

from demo_model.world import CHINESE, MEASURES, Language

_PLURALS = {"cross": "crosses", "fish": "fish"}
_ALSO: dict[str, dict[str, tuple[str, ...]]] = {
    "en": {
        "circle": ("disc", "dot"), "cup": ("mug",), "boat": ("sailboat",), "cross": ("plus",), "car": ("automobile",),
    },
    "zh": {
        "circle": ("圆", "圆圈"), "square": ("方块",), "rectangle": ("矩形",), "star": ("星星", "五角星"),
        "triangle": ("三角",), "heart": ("爱心",), "cross": ("十字",),
        "cup": ("茶杯",), "car": ("车",), "cat": ("小猫",), "dog": ("小狗",),
    },
}  # fmt: skip
_ENGLISH_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_CHINESE_NUMBERS = ("零", "一", "两", "三", "四", "五", "六", "七", "八", "九", "十")
PLACES = {
    "top left": "左上方", "top": "上方", "top right": "右上方", "left": "左边", "middle": "中间", "right": "右边",
    "bottom left": "左下方", "bottom": "下方", "bottom right": "右下方",
}  # fmt: skip
CORNERS = {"top left": "左上角", "top right": "右上角", "bottom left": "左下角", "bottom right": "右下角"}
SIDES = {"left": "左边", "right": "右边", "above": "上面", "below": "下面"}
SUPPORTED = {"on": "上", "under": "下面", "beside": "旁边"}

ONE_WORD = {
    "en": ("Answer with one word.", "Answer in one word.", "One word, please.", "Reply with a single word."),
    "zh": ("用一个词回答。", "只用一个词回答。", "请用一个词回答。"),
}
DIGITS_ALONE = {
    "en": ("Answer with the digits alone.", "Answer with a number.", "Just the number.", "Answer with digits only."),
    "zh": ("只回答数字。", "只用数字回答。", "请只写数字。"),
}

# {k}: a kind of thing, {p}: its plural, {c}: a colour, {n}: colour and kind, {a}: with its article, {l}: a place
ASKED: dict[str, dict[str, tuple[str, ...]]] = {
    "colour": {
        "en": (
            "What colour is the {k}?", "What color is the {k}?", "What colour is the {k} in this picture?",
            "Which colour does the {k} have?", "What is the colour of the {k}?", "Tell me the colour of the {k}.",
            "Which color is the {k}?", "The {k} is what colour?",
        ),
        "zh": (
            "{k}是什么颜色？", "{k}是什么颜色的？", "图中的{k}是什么颜色？", "这个{k}是什么颜色？", "{k}的颜色是什么？",
            "图片里的{k}是什么颜色的？", "请告诉我{k}的颜色。",
        ),
    },
    "shape": {
        "en": (
            "Which shape is {c}?", "What is the {c} thing?", "Which shape has the {c} thing?", "What shape is {c}?",
            "What shape is the {c} thing in this picture?", "And which shape has the {c} thing in the same picture?",
            "What is {c} in this picture?", "What shape is the {c} object?",
        ),
        "zh": (
            "{c}的是什么？", "{c}的东西是什么？", "{c}的是什么形状？", "什么东西是{c}的？", "图中{c}的是什么？",
            "{c}的东西是什么形状？", "同一张图里{c}的是什么？",
        ),
    },
    "count": {
        "en": (
            "How many {p} are there?", "How many {p} do you see?", "How many {p} are in this picture?",
            "Count the {p}.", "How many {p} can you see?", "What is the number of {p}?", "How many {p} are shown?",
        ),
        "zh": (
            "有{q}{n}？", "图中有{q}{n}？", "你看到{q}{n}？", "图片里有{q}{n}？", "数一数有{q}{n}。", "一共有{q}{n}？",
        ),
    },
    "where": {
        "en": (
            "Where is the {k}?", "Where is the {k} in this picture?", "In which part of the picture is the {k}?",
            "Where do you see the {k}?", "Where can I find the {k}?",
        ),
        "zh": ("{k}在哪里？", "{k}在哪儿？", "图中的{k}在哪里？", "{k}在图片的什么位置？", "{k}在什么地方？"),
    },
    "what at": {
        "en": ("What is {l}?", "What do you see {l}?", "What is {l} of this picture?", "Which thing is {l}?"),
        "zh": ("{l}是什么？", "图片{l}是什么？", "{l}有什么？", "图中{l}是什么东西？"),
    },
    "beside": {
        "en": ("What is {s} the {k}?", "Which thing is {s} the {k}?", "What do you see {s} the {k}?"),
        "zh": ("{k}的{s}是什么？", "{k}{s}是什么？", "{k}的{s}有什么？", "在{k}的{s}是什么东西？"),
    },
    "is beside": {
        "en": ("Is the {k} {s} the {o}?", "Is it true that the {k} is {s} the {o}?"),
        "zh": ("{k}在{o}的{s}吗？", "{k}是在{o}的{s}吗？"),
    },
    "exists": {
        "en": (
            "Is there {a}?", "Do you see {a}?", "Is there {a} in this picture?", "Can you see {a}?",
            "Does this picture show {a}?", "Is {a} in the picture?", "Is there {a} here?",
        ),
        "zh": (
            "有{n}吗？", "图中有{n}吗？", "你看到{n}了吗？", "图片里有没有{n}？", "这张图里有{n}吗？", "有没有{n}？",
        ),
    },
    "number": {
        "en": (
            "Which number is written in this picture?", "What number is in this picture?", "Read the number.",
            "What number do you see?", "Which number is this?", "What number is written here?", "What does it say?",
            "Which digits do you see?", "What is written in this picture?", "What number is shown?", "Read the text.",
        ),
        "zh": (
            "图中写的是什么数字？", "这是什么数字？", "图片上的数字是多少？", "读出图中的数字。", "你看到什么数字？",
            "图中的数字是多少？", "上面写着什么？", "图里写了什么？",
        ),
    },
    "describe": {
        "en": (
            "Describe this picture.", "What do you see?", "What is in this picture?", "What is this?",
            "What does this picture show?", "Describe the image.", "What can you see in this picture?",
            "Tell me what you see.", "What is shown here?", "What is in the image?", "Please describe the picture.",
        ),
        "zh": (
            "描述这张图片。", "你看到了什么？", "图中有什么？", "这是什么？", "请描述一下这张图。", "图片里有什么？",
            "这张图里是什么？", "看图说话。", "请描述图片。",
        ),
    },
    "background": {
        "en": ("What colour is the background?", "Which colour has the background?", "What color is the background?"),
        "zh": ("背景是什么颜色？", "背景是什么颜色的？", "图片的背景是什么颜色？"),
    },
    "corner": {
        "en": (
            "What colour is the {l} corner of this picture?", "What colour is the {l} corner?",
            "Which colour do you see in the {l} corner?", "What color is in the {l} corner?",
        ),
        "zh": ("图片{l}是什么颜色？", "{l}是什么颜色？", "{l}是什么颜色的？", "图中{l}是什么颜色？"),
    },
    "half": {
        "en": ("What colour is the {l} half of this picture?", "What colour is the {l} half?"),
        "zh": ("图片的{l}是什么颜色？", "{l}是什么颜色？"),
    },
    "larger": {
        "en": ("Which is larger, the {k} or the {o}?", "Which is bigger, the {k} or the {o}?"),
        "zh": ("{k}和{o}哪个更大？", "哪个更大，{k}还是{o}？"),
    },
    "smaller": {
        "en": ("Which is smaller, the {k} or the {o}?", "Which one is smaller, the {k} or the {o}?"),
        "zh": ("{k}和{o}哪个更小？", "哪个更小，{k}还是{o}？"),
    },
    "largest": {
        "en": ("Which thing is the largest?", "What is the largest thing?", "Which thing is the biggest?"),
        "zh": ("最大的是什么？", "哪个东西最大？", "图中最大的是什么？"),
    },
    "it colour": {
        "en": ("What colour is it?", "And what colour is it?", "Which colour does it have?", "What color is it?"),
        "zh": ("它是什么颜色？", "它是什么颜色的？", "那它是什么颜色？", "什么颜色？"),
    },
    "it where": {
        "en": ("Where is it?", "And where is it?", "Where in the picture is it?"),
        "zh": ("它在哪里？", "那它在哪里？", "它在什么位置？"),
    },
    "and": {
        "en": ("And the {k}?", "And what about the {k}?", "What about the {k}?"),
        "zh": ("那{k}呢？", "{k}呢？"),
    },
    "of them": {
        "en": ("How many of them are {c}?", "And how many of them are {c}?"),
        "zh": ("其中有几{m}是{c}的？", "其中几{m}是{c}的？"),
    },
    "first digit": {
        "en": ("What is its first digit?", "Which digit comes first?", "And the first digit?"),
        "zh": ("第一个数字是什么？", "它的第一位是几？", "第一位是什么？"),
    },
    "last digit": {
        "en": ("What is its last digit?", "Which digit comes last?", "And the last digit?"),
        "zh": ("最后一个数字是什么？", "它的最后一位是几？", "最后一位是什么？"),
    },
    "number colour": {
        "en": ("What colour is the number?", "What color are the digits?", "Which colour has the number?"),
        "zh": ("数字是什么颜色？", "这个数字是什么颜色的？", "数字的颜色是什么？"),
    },
    "on what": {
        "en": ("What is {s} the {k}?", "Which thing is {s} the {k}?"),
        "zh": ("{k}{s}是什么？", "{k}{s}有什么？", "什么东西在{k}{s}？"),
    },
}  # fmt: skip


def phrase(random: Random, kind: str, language: Language, **words: str) -> str:
    return random.choice(ASKED[kind][language]).format(**words)


def called(random: Random, kind: str, language: Language) -> str:
    """A kind's name in a question: now and then another word for it."""
    also = _ALSO[language].get(kind, ())
    if also and random.random() < 0.2:
        return random.choice(also)
    return noun(kind, language)


def noun(word: str, language: Language) -> str:
    """A kind's or a colour's name in an answer."""
    return word if language == "en" else CHINESE[word]


def article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def plural(kind: str) -> str:
    return _PLURALS.get(kind, kind + "s")


def measure(kind: str) -> str:
    return MEASURES.get(kind, "个")


def number(count: int, language: Language) -> str:
    return _ENGLISH_NUMBERS[count] if language == "en" else _CHINESE_NUMBERS[count]


def one(colour: str | None, kind: str, language: Language) -> str:
    """``a red circle``, ``一个红色的圆形``; without a colour: ``a circle``."""
    return some(1, colour, kind, language)


def some(count: int, colour: str | None, kind: str, language: Language) -> str:
    if language == "zh":
        described = f"{CHINESE[colour]}的{CHINESE[kind]}" if colour else CHINESE[kind]
        return f"{number(count, 'zh')}{measure(kind)}{described}"
    named = kind if count == 1 else plural(kind)
    described = f"{colour} {named}" if colour else named
    return article(described) if count == 1 else f"{number(count, 'en')} {described}"


def listed(parts: list[str], language: Language) -> str:
    if len(parts) < 2:
        return "".join(parts)
    if language == "en":
        return f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{'、'.join(parts[:-1])}和{parts[-1]}"


def place_phrase(place: str, language: Language) -> str:
    """``at the top left``, ``on the left``, ``in the middle``; ``左上方``."""
    if language == "zh":
        return PLACES[place]
    preposition = {"left": "on", "right": "on", "middle": "in"}.get(place, "at")
    return f"{preposition} the {place}"


def side_phrase(side: str, language: Language) -> str:
    if language == "zh":
        return SIDES[side]
    return f"{side} of" if side in ("left", "right") else side


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
