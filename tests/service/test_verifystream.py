"""A stream's form is judged the same however its bytes are cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.service.verifystream import StreamReader, error_text


def chunk(content: str | None = None, finish: str | None = None, **more: object) -> bytes:
    choices = [{"index": 0, "delta": {"content": content}, "finish_reason": finish}] if "usage" not in more else []
    document = {"id": "1", "object": "chat.completion.chunk", "choices": choices, **more}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


WHOLE = chunk("") + chunk("one ") + b": a comment\n\n" + chunk("zwölf") + chunk(None, "stop") + chunk(usage={"x": 1})
DONE = b"data: [DONE]\n\n"


def read(*pieces: bytes, usage: bool = True) -> StreamReader:
    reader = StreamReader(usage)
    for piece in pieces:
        reader.feed(piece)
    reader.end()
    return reader


def test_a_whole_stream() -> None:
    reader = read(WHOLE + DONE)
    assert (reader.text, reader.finish_reason, reader.usage) == ("one zwölf", "stop", {"x": 1})
    assert reader.problems == []


def test_carriage_returns_are_line_ends_too() -> None:
    assert read((WHOLE + DONE).replace(b"\n", b"\r\n")).problems == []


@given(st.lists(st.integers(0, len(WHOLE + DONE)), max_size=30))
def test_cuts_change_nothing(places: list[int]) -> None:
    content = WHOLE + DONE
    edges = [0, *sorted(places), len(content)]
    reader = read(*(content[begin:end] for begin, end in pairwise(edges)))
    assert reader.text == "one zwölf"
    assert reader.problems == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (WHOLE, "no data: [DONE] at the end"),
        (WHOLE + b"data: [DONE]", "the stream ends in the middle of a line"),
        (WHOLE + b"data: [DONE]\n", "the last event is not ended by an empty line"),
        (WHOLE + DONE + chunk("x"), "an event after data: [DONE]"),
        (WHOLE + b"data: {oops\n\n" + DONE, "an event that is not JSON: '{oops'"),
        (WHOLE + b"data: 7\n\n" + DONE, "an event that is not a JSON object"),
        (WHOLE + b"Traceback\n\n" + DONE, "a line that is no field of an event: 'Traceback'"),
        (WHOLE + b"data: \xff\n\n" + DONE, "bytes that are not UTF-8"),
        (WHOLE + chunk("late") + DONE, "text after the finish reason"),
        (WHOLE.replace(b'"id": "1"', b'"id": "2"', 1) + DONE, "2 different ids in one answer"),
        (chunk("x") + chunk(usage={}) + DONE, "no finish reason"),
        (chunk(None, "stop") + chunk(usage={}) + DONE, "no text in any event"),
        (chunk("x", "stop") + DONE, "no usage, though it was asked for"),
        (WHOLE.replace(b"chat.completion.chunk", b"chat.completion", 1) + DONE, "an event whose object is"),
    ],
)
def test_what_is_wrong_is_named(content: bytes, problem: str) -> None:
    assert any(found.startswith(problem) for found in read(content).problems)


def test_usage_is_not_missed_when_nobody_asked() -> None:
    assert read(chunk("x", "stop") + DONE, usage=False).problems == []


@given(st.binary(max_size=400))
def test_any_bytes_are_survived(content: bytes) -> None:
    assert read(content).problems


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "a"}}, "a"),
        ({"error": "b"}, "b"),
        ({"detail": "c"}, "c"),
        ({"message": "d"}, "d"),
        ({"error": {"code": 7}}, None),
        ([], None),
    ],
)
def test_messages_of_errors(body: object, message: str | None) -> None:
    assert error_text(body) == message
