"""An answer as it grows: places in UTF-16 units, engines' streams in any form, and numbers."""

from __future__ import annotations

import asyncio

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.conversation import Message
from loadmaster.service.admission import Admission
from loadmaster.service.answerstream import Growing, GrowingAnswer, units


@given(st.lists(st.text(max_size=6), max_size=6), st.integers(0, 40))
def test_places_are_those_of_javascript(pieces: list[str], cut: int) -> None:
    growing, whole = Growing(), "".join(pieces)
    for piece in pieces:
        growing.add(piece)
    assert growing.length == units(whole) == len(whole.encode("utf-16-le")) // 2
    known = whole[:cut]
    assert growing.since(units(known)) == whole[len(known) :]
    assert str(growing) == whole and growing.since(units(known)) == whole[len(known) :]


def answer() -> GrowingAnswer:
    return GrowingAnswer(Message(id="m", role="assistant", state="streaming"), image_tokens=5, forgotten=0)


def heard(growing: GrowingAnswer, *parts: bytes) -> GrowingAnswer:
    async def scene() -> None:
        growing.told(None)
        await growing.begin({})
        for part in parts:
            await growing.write(part)
        await growing.finish()
        growing.end("done")

    asyncio.run(scene())
    return growing


def delta(**fields: object) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"delta": fields, "finish_reason": None}]}) + b"\n\n"


def test_reasoning_fields_of_both_engines_are_thinking() -> None:
    growing = heard(answer(), delta(reasoning_content="a "), delta(reasoning="b"), delta(content="c"))
    message = growing.message()
    assert (message.thinking, message.text, message.state) == ("a b", "c", "done")


def test_usage_and_the_reason_of_the_end_become_numbers() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    growing = heard(
        answer(),
        delta(content="a") + delta(content="b"),
        b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\r\n\r\n',
        b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n",
    )
    numbers = growing.numbers()
    assert (numbers.prompt_tokens, numbers.completion_tokens, numbers.image_tokens) == (7, 3, 5)
    assert numbers.finish_reason == "length" and numbers.first_token_s is not None and str(growing.text) == "ab"


def test_an_error_in_the_stream_makes_it_failed_and_keeps_the_text() -> None:
    growing = heard(answer(), delta(content="so far"), b'data: {"error": {"code": "engine_down", "message": "x"}}\n\n')
    message = growing.message()
    assert (message.state, message.text) == ("failed", "so far")
    assert message.error is not None and message.error.code == "engine_down"


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_no_stream_makes_it_raise(parts: list[bytes]) -> None:
    heard(answer(), *(b"data: " + part + b"\n\n" for part in parts)).message()


ODD = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "error", "usage", "finish_reason", "completion_tokens"]),
            inner,
        )
    ),
    max_leaves=8,
)


@given(st.lists(ODD, max_size=4))
def test_no_json_makes_it_raise(values: list[object]) -> None:
    growing = heard(answer(), *(b"data: " + msgspec.json.encode(value) + b"\n\n" for value in values))
    message = growing.message()
    assert msgspec.json.decode(msgspec.json.encode(message), type=Message) == message


def test_the_place_in_the_queue_goes_round_the_clients() -> None:
    async def scene() -> None:
        admission = Admission(1, 10)
        first = admission.enter("a")
        await first.start()
        tickets = [admission.enter(client) for client in ("a", "a", "b", "b", "c")]
        waiting = [asyncio.create_task(ticket.start()) for ticket in tickets]
        await asyncio.sleep(0)
        told = [admission.place(ticket) for ticket in tickets]
        order: list[int] = []
        first.leave()
        for _ in tickets:
            await asyncio.sleep(0)
            (now,) = [place for place, task in enumerate(waiting) if task.done() and place not in order]
            order.append(now)
            tickets[now].leave()
        assert [order.index(place) + 1 for place in range(5)] == told == [1, 4, 2, 5, 3]

    asyncio.run(scene())
