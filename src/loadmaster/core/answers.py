"""Whether an answer names what a picture shows: colours and shapes in several languages, numbers to the digit."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from loadmaster.core.tables import load_toml

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL | re.IGNORECASE)
_OPEN_THOUGHT = re.compile(r"<think>.*", re.DOTALL | re.IGNORECASE)
_CLOSED_THOUGHT = re.compile(r"^.*?</think>", re.DOTALL | re.IGNORECASE)
_LATIN = re.compile(r"[a-zà-öø-ÿß]+")
# digits that belong together: nothing, a thousands mark, or single spaces and hyphens as in "4 8 2 1"
_NUMBER = re.compile(r"\d(?:[ ,.'\-]?\d)*")


def spoken(text: str) -> str:
    """The answer without what the model thought aloud before it."""
    text = _THOUGHT.sub(" ", text)
    if "</think>" in text.lower():  # the opening mark was part of the prompt
        text = _CLOSED_THOUGHT.sub(" ", text)
    return _OPEN_THOUGHT.sub(" ", text).strip()


def named(kind: str, text: str) -> list[str]:
    """The colours or shapes ("colour", "shape") in the order in which the text first names them."""
    plain = unicodedata.normalize("NFKC", spoken(text)).lower()
    first: dict[str, int] = {}
    for name, word, whole in _words(kind):
        place = _place(plain, word, whole)
        if place is not None:
            first[name] = min(place, first.get(name, place))
    return sorted(first, key=lambda name: first[name])


def names(kind: str, wanted: str, text: str) -> bool:
    """Whether the text answers with ``wanted``: it names it, and nothing else of the kind before it."""
    right = {wanted, *load_toml("answer-words.toml")["also"].get(wanted, ())}
    found = named(kind, text)
    return bool(found) and found[0] in right


def numbers(text: str) -> list[str]:
    """The numbers of a text as digits alone, in order: "4,821" and "4 8 2 1" are "4821"."""
    plain = unicodedata.normalize("NFKC", spoken(text))
    return [re.sub(r"\D", "", found) for found in _NUMBER.findall(plain)]


def says_number(wanted: str, text: str) -> bool:
    """Whether ``wanted`` is the one number of as many digits that the text has."""
    found = {number for number in numbers(text) if len(number) >= len(wanted)}
    return found == {wanted}


@cache
def _words(kind: str) -> tuple[tuple[str, str, bool], ...]:
    """(name, word, whether it has to stand alone) of every word of the kind."""
    table = load_toml("answer-words.toml")[kind]
    return tuple(
        (name, word, _LATIN.fullmatch(word) is not None)
        for name, spellings in table.items()
        for word in (text.lower() for text in spellings)
    )


def _place(text: str, word: str, whole: bool) -> int | None:
    if not whole:
        place = text.find(word)
        return place if place >= 0 else None
    found = re.search(rf"(?<![^\W\d_]){re.escape(word)}(?:s|es|[a-z]?ish)?(?![^\W\d_])", text)
    return found.start() if found else None
