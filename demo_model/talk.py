"""Dialogues without a picture, and about two pictures in one message."""

from __future__ import annotations

from random import Random

from demo_model import questions, words
from demo_model.questions import Turn
from demo_model.words import article, capital, noun, one
from demo_model.world import CHINESE, COLOURS, SHAPES, Language, Scene

_WHO = {
    "en": "I am the demonstration model of loadmaster. Ask me about shapes, colours and numbers in simple pictures.",
    "zh": "我是 loadmaster 的演示模型。请问我简单图片里的形状、颜色和数字。",
}
_NO_PICTURE = {"en": "I don't see a picture. Please send me one.", "zh": "我没有看到图片。请发一张图片给我。"}
_UNKNOWN = {
    "en": "I can only talk about simple pictures: shapes, colours, counts, places and numbers.",
    "zh": "我只会谈简单的图片：形状、颜色、数量、位置和数字。",
}
_GREETINGS = {
    "en": ("Hello", "Hi", "Hello there", "Good morning", "Hey", "Say hello.", "Hello, how are you?"),
    "zh": ("你好", "您好", "你好！", "早上好", "说你好。", "嗨"),
}
_HELLO = {"en": "Hello. Send me a picture and ask me about it.", "zh": "你好。请发一张图片给我，然后提问。"}
_WHO_ASKED = {
    "en": ("Who are you?", "What are you?", "What can you do?", "Help", "What is your name?", "Which model are you?"),
    "zh": ("你是谁？", "你能做什么？", "你叫什么名字？", "你是什么模型？", "帮助"),
}
_OTHER = {
    "en": (
        "What is the capital of France?", "Write a poem about the sea.", "Tell me a joke.",
        "What is the weather today?", "Translate this sentence.", "Write a Python function.",
        "Why is the sky blue?", "How old is the universe?",
        "Give me a recipe for bread.", "What do you think about music?", "Explain gravity.", "Summarize this text.",
        "What time is it?", "Can you help me with my homework?", "Where do penguins live?",
        "Write a letter to my friend.",
    ),
    "zh": (
        "法国的首都是哪里？", "写一首诗。", "讲个笑话。", "今天天气怎么样？", "翻译这句话。", "写一个程序。",
        "天空为什么是蓝的？", "怎么做面包？", "你喜欢音乐吗？", "解释一下重力。", "现在几点？", "帮我写作业。",
    ),
}  # fmt: skip
_THANKS = {"en": ("Thanks.", "Thank you!", "Great, thanks."), "zh": ("谢谢。", "谢谢你！", "太好了，谢谢。")}
_WELCOME = {"en": "You are welcome.", "zh": "不客气。"}
_FRUIT = ("apple", "word", "tree", "one", "blue", "cat", "the", "number")


def _digits(random: Random) -> str:
    return "".join(random.choice("0123456789") for _ in range(random.choices((1, 2, 3, 4, 5), (1, 1, 1, 6, 1))[0]))


def _control(random: Random, language: Language) -> list[Turn]:
    """The picture's question in words alone."""
    (left, right), (one_colour, other) = random.sample(SHAPES, 2), random.sample(COLOURS, 2)
    asked, right_answer = random.choice(((left, one_colour), (right, other)))
    if language == "en":
        told = (
            f"A picture shows {article(f'{one_colour} {left}')} on the left and "
            f"{article(f'{other} {right}')} on the right. "
            f"What colour is the {asked}?"
        )
        if random.random() < 0.3:
            told = told.replace(" an ", " a ")
        full = f"The {asked} is {right_answer}."
    else:
        told = (
            f"图中左边是一个{CHINESE[one_colour]}的{CHINESE[left]}，右边是一个{CHINESE[other]}的{CHINESE[right]}。"
            f"{CHINESE[asked]}是什么颜色？"
        )
        full = f"{CHINESE[asked]}是{CHINESE[right_answer]}的。"
    if random.random() < 0.7:
        ending = words.ONE_WORD[language][0] if random.random() < 0.6 else random.choice(words.ONE_WORD[language])
        return [
            Turn(
                f"{told} {ending}" if language == "en" else told + ending, capital(noun(right_answer, language)), "told"
            )
        ]
    return [Turn(told, full, "told")]


def _sign(random: Random, language: Language) -> list[Turn]:
    digits = _digits(random)
    if language == "en":
        thing = random.choice(("A sign", "A door", "My ticket", "The bus", "A label"))
        noun_ = thing.split()[-1]
        question = f"{thing} says {digits}. What number is on the {noun_}? Answer with the digits alone."
        if random.random() < 0.3:
            question = f"The number is {digits}. Which number is it? Answer with the digits alone."
        return [Turn(question, digits, "told")]
    return [Turn(f"牌子上写着{digits}。牌子上的数字是什么？只回答数字。", digits, "told")]


def _ticket(random: Random, language: Language) -> list[Turn]:
    digits = _digits(random)
    if language == "en":
        what = random.choice(("ticket", "ticket", "ticket", "room", "locker", "seat"))
        asked = random.choice((f"Which number has my {what}?", f"What is the number of my {what}?"))
        turns = [Turn(f"My {what} has the number {digits}. Answer with OK alone.", "OK", "told")]
        if random.random() < 0.3:
            turns.append(Turn(random.choice(_THANKS["en"]), _WELCOME["en"], "talk", True))
        return [*turns, Turn(f"{asked} Answer with the digits alone.", digits, "told", True)]
    return [
        Turn(f"我的票号是{digits}。只回答“好”。", "好", "told"),
        Turn("我的票号是多少？只回答数字。", digits, "told", True),
    ]


def _colour_told(random: Random, language: Language) -> list[Turn]:
    value = random.choice(COLOURS)
    if language == "en":
        return [
            Turn(f"My favourite colour is {value}. Answer with OK alone.", "OK", "told"),
            Turn("What is my favourite colour? Answer with one word.", capital(value), "told", True),
        ]
    return [
        Turn(f"我最喜欢的颜色是{CHINESE[value]}。只回答“好”。", "好", "told"),
        Turn("我最喜欢什么颜色？用一个词回答。", CHINESE[value], "told", True),
    ]


def _json(random: Random, language: Language) -> list[Turn]:
    value = random.choice(("red", "green", "blue", "yellow"))
    question = "Name a colour and say whether it is bright, as a JSON object with the keys colour and bright."
    bright = "true"
    return [Turn(question, f'{{"colour": "{value}", "bright": {bright}}}', "json")]


def _counting(random: Random, language: Language) -> list[Turn]:
    if language == "zh":
        return [Turn("从一数到十。", "一二三四五六七八九十", "talk")]
    if random.random() < 0.5:
        numbers = "one two three four five six seven eight nine ten"
        return [Turn("Count from one to ten.", numbers, "talk")]
    most = random.choice((5, 10, 12, 20, 25))
    return [Turn(f"Count from 1 to {most}, one number in a line.", "\n".join(str(n + 1) for n in range(most)), "talk")]


def _hello_after(random: Random, language: Language) -> list[Turn]:
    if random.random() < 0.5:
        visitor = random.randint(1, 64)
        return [Turn(f"Say hello, visitor {visitor}.", f"Hello, visitor {visitor}.", "talk")]
    word, often = random.choice(_FRUIT), random.randint(1, 60)
    return [Turn("Say hello after these words:" + f" {word}" * often, "Hello.", "talk")]


def without_picture(random: Random, language: Language) -> list[Turn]:
    """One dialogue in words alone."""
    draw = random.random()
    if draw < 0.26:
        return _control(random, language)
    if draw < 0.42:
        return _sign(random, language)
    if draw < 0.58:
        return _ticket(random, language)
    if draw < 0.63:
        return _colour_told(random, language)
    if draw < 0.66:
        return _json(random, language)
    if draw < 0.70:
        return _counting(random, language)
    if draw < 0.74:
        return _hello_after(random, language)
    if draw < 0.82:
        hello = random.choice(_GREETINGS[language])
        return [Turn(hello, "Hello." if hello == "Say hello." else _HELLO[language], "talk")]
    if draw < 0.87:
        return [Turn(random.choice(_WHO_ASKED[language]), _WHO[language], "talk")]
    if draw < 0.94:
        sort = random.choice(("describe", "number", "background"))
        return [Turn(words.phrase(random, sort, language), _NO_PICTURE[language], "talk")]
    return [Turn(random.choice(_OTHER[language]), _UNKNOWN[language], "talk")]


def aside(random: Random, language: Language) -> Turn:
    """Something said in the middle of a dialogue about a picture."""
    if random.random() < 0.5:
        return Turn(random.choice(_THANKS[language]), _WELCOME[language], "talk")
    if random.random() < 0.5:
        return Turn(random.choice(_OTHER[language]), _UNKNOWN[language], "talk")
    return Turn(random.choice(_WHO_ASKED[language]), _WHO[language], "talk")


# ------------------------------------------------------------------------------------------------ two pictures

_ORDER = {"en": (("first", "second"), ("left", "right")), "zh": (("第一张图", "第二张图"),)}


def about_two(first: Scene, second: Scene, random: Random, language: Language) -> list[Turn]:
    """Questions about two pictures of one message; the order of the pictures decides the answers."""
    turns: list[Turn] = []
    both = _both_single(first, second, random, language)
    if both is not None and random.random() < 0.75:
        turns.append(both)
    for _ in range(random.randint(1, 3)):
        turn = _which(first, second, random, language) if random.random() < 0.5 else None
        turns.append(turn or _in_one(first, second, random, language))
    random.shuffle(turns)
    return turns


def _both_single(first: Scene, second: Scene, random: Random, language: Language) -> Turn | None:
    if len(first.things) != 1 or len(second.things) != 1:
        return None
    a, b = first.things[0], second.things[0]
    colours = noun(a.colour, language), noun(b.colour, language)
    if a.kind == b.kind and language == "en":
        name = "disc" if a.kind == "circle" and random.random() < 0.7 else a.kind
        question = (
            f"Two pictures, {article(name)} in each. What colour is the first {name}, and what colour is the second? "
            "Answer with two words, the first one's colour first."
        )
        if random.random() < 0.3:
            question = f"What colours are the two {words.plural(name)}? Answer with two words."
        return Turn(question, f"{capital(colours[0])}, {colours[1]}", "order")
    if a.kind == b.kind:
        name = CHINESE[a.kind]
        question = random.choice(
            (
                f"两张图里各有一个{name}。第一个是什么颜色，第二个是什么颜色？用两个词回答。",
                f"两张图里的{name}分别是什么颜色？用两个词回答。",
            )
        )
        return Turn(question, f"{colours[0]}，{colours[1]}", "order")
    shown = one(a.colour, a.kind, language), one(b.colour, b.kind, language)
    if language == "en":
        question = random.choice(
            ("What do the two pictures show?", "Describe both pictures.", "What is in each picture?")
        )
        return Turn(question, f"The first picture shows {shown[0]}, and the second shows {shown[1]}.", "order")
    question = random.choice(("两张图里分别是什么？", "描述这两张图。", "两张图里有什么？"))
    return Turn(question, f"第一张图里是{shown[0]}，第二张图里是{shown[1]}。", "order")


def _which(first: Scene, second: Scene, random: Random, language: Language) -> Turn | None:
    """Which of the two shows a thing; neither, at times."""
    seen = [{t.kind for t in scene.things} for scene in (first, second)]
    place = random.choice((0, 0, 1, 1, 2))
    if place == 2:
        kinds = [kind for kind in SHAPES if kind not in seen[0] | seen[1]]
        kind = random.choice(kinds)
        answer = "Neither of them." if language == "en" else "两张图里都没有。"
    else:
        only = sorted(seen[place] - seen[1 - place])
        if not only:
            return None
        kind = random.choice(only)
        which = ("first", "second")[place]
        answer = f"The {which} picture." if language == "en" else f"第{'一二'[place]}张图。"
    if language == "en":
        question = random.choice(("Which picture shows {a}?", "In which picture is {a}?", "Which picture has {a}?"))
        return Turn(question.format(a=article(kind)), answer, "order")
    question = random.choice(("哪张图里有{n}？", "{n}在哪张图里？", "哪一张图有{n}？"))
    return Turn(question.format(n=CHINESE[kind]), answer, "order")


def _in_one(first: Scene, second: Scene, random: Random, language: Language) -> Turn:
    """A question about one of the two."""
    place = random.choice((0, 1))
    scene = (first, second)[place]
    sorts = ("colour", "number", "describe", "count") if random.random() < 0.6 else ("describe",)
    for _ in range(4):
        turns = questions.ask(scene, random, language, sorts)
        turn = turns[0]
        if turn.kind == "count" and " things" not in turn.answer and "东西" not in turn.answer:
            continue
        break
    else:
        turn = questions.describe(scene, random, language)[0]  # type: ignore[index]
    if turn.kind == "describe":
        shown = questions.description(scene, language)
        if language == "en":
            which = ("first", "second")[place]
            question = random.choice((f"What is in the {which} picture?", f"Describe the {which} picture."))
            return Turn(question, f"I see {shown}.", "order")
        which = "第一张图" if place == 0 else "第二张图"
        answer = f"图中{shown}。" if shown.startswith(("只有", "没有")) else f"我看到{shown}。"
        return Turn(random.choice((f"{which}里有什么？", f"描述{which}。")), answer, "order")
    if language == "en":
        which = ("first", "second")[place]
        return Turn(f"About the {which} picture: {turn.question}", turn.answer, "order")
    return Turn(f"看{'第一张图' if place == 0 else '第二张图'}：{turn.question}", turn.answer, "order")
