from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.thinking import ThinkingSplit


def split(pieces: list[str], *, inside: bool = False) -> tuple[str, str]:
    """(thinking, text) of a stream that comes in these pieces."""
    splitter = ThinkingSplit(inside=inside)
    thinking = text = ""
    for part in [*(splitter.feed(piece) for piece in pieces), splitter.end()]:
        if part.moved:
            thinking, text = thinking + text, ""
        thinking, text = thinking + part.thinking, text + part.text
    return thinking, text


def test_a_block_at_the_begin_is_thinking() -> None:
    assert split(["<think>\nIt is red.\n</think>\n\nRed."]) == ("It is red.\n", "Red.")


def test_a_closing_tag_alone_makes_what_was_before_it_thinking() -> None:
    assert split(["It is", " red.\n</thi", "nk>\n\nRed."]) == ("It is red.\n", "Red.")


def test_text_without_tags_is_text() -> None:
    assert split(["  a < b <thin", " soup"]) == ("", "  a < b <thin soup")
    assert split(["<think"]) == ("", "<think")


def test_a_later_tag_is_text() -> None:
    assert split(["<think>a</think>Write </think> or <think>."]) == ("a", "Write </think> or <think>.")


def test_a_block_that_never_ends_is_thinking() -> None:
    assert split(["<think>on and on </th"]) == ("on and on </th", "")


def test_an_answer_continued_in_its_thinking() -> None:
    assert split(["more</think>\nDone"], inside=True) == ("more", "Done")


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", "a", "\n", " ", "think>", "猫"]), max_size=8)


@given(PARTS, st.lists(st.integers(0, 60), max_size=6), st.booleans())
def test_how_the_stream_is_cut_does_not_matter(parts: list[str], cuts: list[int], inside: bool) -> None:
    whole = "".join(parts)
    bounds = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[begin:end] for begin, end in itertools.pairwise(bounds)]
    assert split(pieces, inside=inside) == split([whole], inside=inside)
