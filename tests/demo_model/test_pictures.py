"""The generator of pictures and dialogues: the same everywhere, and never an answer that the picture denies."""

from __future__ import annotations

import re
from random import Random

from PIL import Image

from demo_model import evaluate, examples, questions, scenes
from demo_model.drawing import draw, roughened
from demo_model.world import HELD_OUT, Language, Scene, number_is_held_out

LANGUAGES: tuple[Language, ...] = ("en", "zh")


def drawn(count: int, unseen: bool = False) -> list[Scene]:
    return [scenes.any_scene(Random(f"scene {n}"), 192, 160, unseen) for n in range(count)]


def test_a_seed_gives_the_same_scene_picture_and_dialogue() -> None:
    for one, again in zip(drawn(12), drawn(12), strict=True):
        assert one == again
        assert draw(one).tobytes() == draw(again).tobytes()
        assert roughened(draw(one), Random(1)).tobytes() == roughened(draw(again), Random(1)).tobytes()
        assert questions.ask(one, Random(2), "zh") == questions.ask(again, Random(2), "zh")


def test_training_never_shows_what_is_held_out() -> None:
    shown = {(t.colour, t.kind) for scene in drawn(400) for t in scene.things}
    assert len(shown) > 150
    assert not shown & HELD_OUT
    numbers = {scene.number.digits for scene in drawn(400) if scene.number is not None}
    assert not any(number_is_held_out(digits) for digits in numbers)
    asked = list(evaluate.cases(12, 0))
    held = {(t.colour, t.kind) for one in asked for scene in one.scenes for t in scene.things} & HELD_OUT
    assert len(held) > 10
    assert all(number_is_held_out(one.scenes[0].number.digits) for one in asked if one.sort == "digits")  # type: ignore[union-attr]


def test_counts_and_denials_are_true() -> None:
    counted = denied = 0
    for n, scene in enumerate(drawn(300)):
        for turn in questions.count(scene, Random(n), "en") or []:
            found = re.fullmatch(r"(?:Count|How many|What is the number of) (?:the )?(\w+)\b.*", turn.question)
            kinds = [t.kind for t in scene.things]
            if found and turn.answer.isdigit() and (kind := found[1].removesuffix("s").removesuffix("e")) in kinds:
                assert int(turn.answer) == kinds.count(kind)
                counted += 1
        for turn in questions.absent(scene, Random(n), "en") or []:
            if found := re.fullmatch(r"No, I don't see an? (\w+)\.", turn.answer):
                assert found[1] not in [t.kind for t in scene.things]
                denied += 1
    assert counted > 10
    assert denied > 40


def test_every_sort_of_question_has_its_words_in_both_languages() -> None:
    for language in LANGUAGES:
        asked = dict.fromkeys(questions.ASKERS, 0)
        for n, scene in enumerate(drawn(200)):
            for sort, (ask, _) in questions.ASKERS.items():
                turns = ask(scene, Random(n), language) or []
                asked[sort] += bool(turns)
                for turn in turns:
                    assert "{" not in turn.question + turn.answer
                    chinese = re.search(r"[\u4e00-\u9fff]", turn.question) is not None
                    assert chinese == (language == "zh"), turn
        assert min(asked.values()) > 2, asked


def test_the_pages_examples_are_the_generators() -> None:
    for file, scene, _, _ in examples.EXAMPLES:
        with Image.open(examples.FOLDER / file) as stored:
            assert stored.convert("RGB").size == draw(scene).size
            assert stored.convert("RGB").resize((8, 8)).tobytes() == draw(scene).resize((8, 8)).tobytes()
