"""The three pictures that the page offers: ``python -m demo_model.examples`` writes them again."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from demo_model.drawing import draw
from demo_model.world import Number, Scene, Thing, shade

FOLDER = Path(__file__).resolve().parent.parent / "src/loadmaster/service/static/examples"
_WIDTH, _HEIGHT = 320, 256


def _thing(kind: str, colour: str, x: float, y: float, size: float) -> Thing:
    return Thing(kind=kind, colour=colour, rgb=shade(Random(f"{kind} {colour}"), colour), x=x, y=y, size=size)


EXAMPLES: tuple[tuple[str, Scene, str, str], ...] = (
    (
        "cat.png",
        Scene(
            width=_WIDTH,
            height=_HEIGHT,
            background=None,
            paper=(226, 236, 245),
            things=(_thing("table", "brown", 150, 166, 88), _thing("cat", "black", 158, 68, 40)),
            on=(1, "on", 0),
        ),
        "Where is the cat?",
        "猫在哪里？",
    ),
    (
        "shapes.png",
        Scene(
            width=_WIDTH,
            height=_HEIGHT,
            background="white",
            paper=(255, 255, 255),
            things=(
                _thing("circle", "red", 62, 70, 38),
                _thing("star", "yellow", 170, 166, 44),
                _thing("square", "blue", 254, 78, 36),
                _thing("circle", "red", 70, 190, 34),
            ),
        ),
        "How many red circles are there?",
        "有几个红色的圆形？",
    ),
    (
        "number.png",
        Scene(
            width=_WIDTH,
            height=_HEIGHT,
            background="yellow",
            paper=(250, 213, 60),
            number=Number(
                digits="4821", colour="black", rgb=(20, 20, 24), x=160, y=128, height=92, style="type", plate=None
            ),
        ),
        "Which number is written in this picture?",
        "图中写的是什么数字？",
    ),
)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    listed = []
    for file, scene, english, chinese in EXAMPLES:
        draw(scene).save(FOLDER / file, optimize=True)
        listed.append({"file": file, "question_en": english, "question_zh": chinese})
    (FOLDER / "examples.json").write_text(json.dumps(listed, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
