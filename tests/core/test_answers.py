"""Answers are understood as people mean them, and no further."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.answers import named, names, numbers, says_number, spoken
from loadmaster.core.tables import load_toml


@pytest.mark.parametrize(
    ("text", "wanted", "right"),
    [
        ("Red", "red", True),
        ("The circle is **red**.", "red", True),
        ("It's reddish.", "red", True),
        ("红色", "red", True),
        ("圆形是红色的。", "red", True),
        ("Rot.", "red", True),
        ("rendered", "red", False),
        ("coloured", "red", False),
        ("blue", "red", False),
        ("The circle is red and the square is blue.", "red", True),
        ("The square is blue and the circle is red.", "red", False),
        ("<think>Is it blue? No.</think>Red", "red", True),
        ("It may be blue.</think>Red", "red", True),
        ("<think>It is red", "red", False),
        ("", "red", False),
        ("ＲＥＤ", "red", True),
        ("grün", "green", True),
    ],
)
def test_colours(text: str, wanted: str, right: bool) -> None:
    assert names("colour", wanted, text) is right


@pytest.mark.parametrize(
    ("text", "wanted", "right"),
    [
        ("A circle.", "circle", True),
        ("two triangles", "triangle", True),
        ("rectangle", "square", True),
        ("square", "rectangle", False),
        ("三角形", "triangle", True),
        ("正方形", "square", True),
        ("圆", "circle", True),
        ("background", "circle", False),
    ],
)
def test_shapes(text: str, wanted: str, right: bool) -> None:
    assert names("shape", wanted, text) is right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("4821", True),
        ("The number is 4821.", True),
        ("4,821", True),
        ("4 8 2 1", True),
        ("４８２１", True),
        ("1. The number is 4821", True),
        ("4821 or 4822", False),
        ("48210", False),
        ("482", False),
        ("I see 2 digits", False),
        ("", False),
    ],
)
def test_numbers(text: str, right: bool) -> None:
    assert says_number("4821", text) is right


def test_the_first_colour_counts() -> None:
    assert named("colour", "blue, then red, then blue again") == ["blue", "red"]


def test_no_word_names_two_things() -> None:
    table = load_toml("answer-words.toml")
    for kind in ("colour", "shape"):
        words = [word for spellings in table[kind].values() for word in spellings]
        assert len(words) == len(set(words))


def test_every_colour_that_is_drawn_has_words() -> None:
    from loadmaster.service.verifypictures import COLOURS, SHAPES

    table = load_toml("answer-words.toml")
    assert set(COLOURS) <= set(table["colour"])
    assert set(SHAPES) <= set(table["shape"])


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    assert set(named("colour", text)) <= set(load_toml("answer-words.toml")["colour"])
    assert all(number.isdigit() for number in numbers(text))
    assert len(spoken(text)) <= len(text)
