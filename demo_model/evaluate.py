"""How many questions about unseen pictures are answered rightly, letter for letter, by sort and language.

``python -m demo_model.evaluate torch CHECKPOINT`` asks the network itself: an answer is right when every token of it
is the likeliest one, which is what greedy decoding writes. ``... service URL`` asks an OpenAI-compatible service.
Pictures and questions are drawn from seeds that training does not use; half of the things are pairs of colour and
kind that no training picture shows, and four-digit numbers are all held out.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct
from PIL import Image

from demo_model import questions, scenes, talk
from demo_model.drawing import draw
from demo_model.world import HELD_OUT, Language, Scene

CELL = 32
LANGUAGES: tuple[Language, ...] = ("en", "zh")
_WITH_THINGS = (scenes.single, scenes.pair, scenes.free, scenes.many, scenes.scenery)
# what has to hold, and what is told beside it: makers of scenes, sorts of questions
SORTS: dict[str, tuple[tuple[scenes.Maker, ...], tuple[str, ...]]] = {
    "colour": (_WITH_THINGS, ("colour",)),
    "shape": (_WITH_THINGS, ("shape",)),
    "count": ((scenes.many, scenes.free, scenes.pair), ("count",)),
    "digits": ((scenes.numbered,), ("number",)),
    "absent": ((*_WITH_THINGS, scenes.parts), ("absent",)),
    "two turns": ((*_WITH_THINGS, scenes.numbered), tuple(questions.ASKERS)),
    "exists": (_WITH_THINGS, ("exists",)),
    "where": (_WITH_THINGS, ("where", "what at", "on what")),
    "beside": ((scenes.pair, scenes.free), ("beside", "is beside")),
    "size": ((scenes.pair, scenes.free), ("size",)),
    "describe": ((*_WITH_THINGS, scenes.numbered, scenes.parts), ("describe",)),
    "parts": ((scenes.parts,), ("corner", "half")),
    "two pictures": ((scenes.single,), ()),
}
REQUIRED = ("colour", "shape", "count", "digits", "absent", "two turns")
_GRIDS = ((4, 4), (6, 6), (8, 8), (10, 10), (7, 12), (7, 14), (8, 11), (11, 8), (6, 9), (9, 6), (5, 8), (12, 7), (5, 5))


class Case(Struct, frozen=True):
    """``unseen``: it shows a pair of colour and kind that training never shows."""

    sort: str
    language: Language
    scenes: tuple[Scene, ...]
    turns: tuple[tuple[str, str], ...]
    unseen: bool


def case(sort: str, language: Language, n: int) -> Case:
    random = Random(f"evaluation {sort} {language} {n}")
    makers, asked = SORTS[sort]
    while True:
        rows, columns = random.choice(_GRIDS)
        shown = [random.choice(makers)(random, columns * CELL, rows * CELL, True)]
        if sort == "digits" and (shown[0].number is None or len(shown[0].number.digits) != 4):
            continue
        if sort == "two pictures":
            shown.append(scenes.same_kind(random, shown[0], columns * CELL, rows * CELL))
            turns = [t for t in talk.about_two(shown[0], shown[1], random, language) if t.kind == "order"][:1]
        else:
            turns = questions.ask(shown[0], random, language, asked)
        if not turns or (sort == "two turns") != (len(turns) == 2):
            turns = turns[:1] if sort != "two turns" else []
        if not turns or (sort == "count" and any(word in turns[0].answer for word in _MORE_THAN_FIVE)):
            continue
        held = any((t.colour, t.kind) in HELD_OUT for scene in shown for t in scene.things)
        return Case(sort, language, tuple(shown), tuple((t.question, t.answer) for t in turns), held)


_MORE_THAN_FIVE = ("six", "seven", "eight", "6", "7", "8", "六", "七", "八")


def cases(required: int, others: int) -> Iterator[Case]:
    for sort in SORTS:
        for language in LANGUAGES:
            for n in range(required if sort in REQUIRED else others):
                yield case(sort, language, n)


class Tally:
    """Right and asked, by (sort, language); beside it those with a pair that training never shows."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, str]] = Counter()
        self.right: Counter[tuple[str, str]] = Counter()
        self.unseen: Counter[str] = Counter()
        self.unseen_right: Counter[str] = Counter()
        self.wrong: dict[str, list[str]] = defaultdict(list)

    def add(self, one: Case, right: bool, said: str = "") -> None:
        self.asked[one.sort, one.language] += 1
        self.right[one.sort, one.language] += right
        if one.unseen:
            self.unseen[one.sort] += 1
            self.unseen_right[one.sort] += right
        if not right and len(self.wrong[one.sort]) < 8:
            self.wrong[one.sort].append(f"{one.turns[-1][0]} | {one.turns[-1][1]} | {said}")

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for sort in SORTS:
            if self.asked[sort, "en"]:
                found[sort] = {
                    language: round(100 * self.right[sort, language] / self.asked[sort, language], 1)
                    for language in LANGUAGES
                    if self.asked[sort, language]
                }
                if self.unseen[sort]:
                    found[sort]["unseen pairs"] = round(100 * self.unseen_right[sort] / self.unseen[sort], 1)
        return found


# ------------------------------------------------------------------------------------------------ the network


def by_network(network: Any, asked: Iterable[Case], size: int = 128) -> Tally:
    """Every token of every answer has to be the likeliest one, given the right ones before it."""
    import numpy as np
    import torch

    from demo_model.batches import Dialogue, places, written
    from demo_model.train import clean

    tally = Tally()
    device = next(network.parameters()).device
    groups: dict[tuple[tuple[int, int], ...], list[Case]] = defaultdict(list)
    for one in asked:
        groups[tuple((scene.height // CELL, scene.width // CELL) for scene in one.scenes)].append(one)
    for grids, members in groups.items():
        for at in range(0, len(members), size):
            part = members[at : at + size]
            texts = []
            for one in part:
                turns = tuple((0 if n else len(one.scenes), q, a, None) for n, (q, a) in enumerate(one.turns))
                texts.append(written(Dialogue(turns), [rows * columns for rows, columns in grids]))
            length = max(len(numbers) for numbers, _, _ in texts)
            numbers = torch.zeros(len(part), length, dtype=torch.long)
            wanted = torch.zeros(len(part), length, dtype=torch.bool)
            where = torch.empty(3, len(part), length, dtype=torch.long)
            for n, (found, learned, starts) in enumerate(texts):
                numbers[n, : len(found)], wanted[n, : len(found)] = torch.tensor(found), torch.tensor(learned)
                where[:, n] = torch.from_numpy(places(length, starts, list(grids)))
            pixels = [
                clean(torch.from_numpy(np.stack([np.asarray(draw(one.scenes[slot])) for one in part])).to(device), None)
                for slot in range(len(grids))
            ]
            numbers, wanted, where = numbers.to(device), wanted.to(device), where.to(device)
            with torch.no_grad():
                hidden, _ = network(numbers, where, pixels)
                likeliest = network.model.lm_head(hidden).argmax(-1)
            right = ((likeliest[:, :-1] == numbers[:, 1:]) | ~wanted[:, 1:]).all(1).tolist()
            for one, good in zip(part, right):
                tally.add(one, good)
    return tally


# ------------------------------------------------------------------------------------------------ a service


def url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def answers(address: str, one: Case, model: str = "demo") -> list[str]:
    """What the service answers, turn by turn, remembering its own answers."""
    messages: list[dict[str, Any]] = []
    said = []
    for n, (question, _) in enumerate(one.turns):
        parts: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if n == 0:
            parts = [{"type": "image_url", "image_url": {"url": url(draw(scene))}} for scene in one.scenes] + parts
        messages.append({"role": "user", "content": parts})
        body = {"model": model, "messages": messages, "max_tokens": 64, "temperature": 0}
        request = urllib.request.Request(
            f"{address}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
        said.append(text)
        messages.append({"role": "assistant", "content": text})
    return said


def by_service(address: str, asked: Iterable[Case], at_once: int) -> Tally:
    tally = Tally()

    def one_by_one(one: Case) -> tuple[Case, list[str]]:
        return one, answers(address, one)

    with ThreadPoolExecutor(at_once) as pool:
        for one, said in pool.map(one_by_one, asked):
            tally.add(one, said == [answer for _, answer in one.turns], said[-1])
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("torch", "service"))
    parser.add_argument("source", help="a checkpoint, or the address of a service")
    parser.add_argument("--size", default="demo")
    parser.add_argument("--required", type=int, default=1000, help="pictures for each required sort and language")
    parser.add_argument("--others", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked = cases(options.required, options.others)
    if options.way == "torch":
        import torch

        from demo_model.export import loaded

        network = loaded(Path(options.source), options.size)
        tally = by_network(network.to("cuda" if torch.cuda.is_available() else "cpu"), asked)
    else:
        tally = by_service(options.source, asked, options.at_once)
    found = {"figures": tally.figures(), "wrong": tally.wrong}
    text = json.dumps(found, ensure_ascii=False, indent=1)
    if options.out:
        options.out.write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
