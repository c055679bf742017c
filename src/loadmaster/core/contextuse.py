"""How much of a model's context a conversation takes, and what has to be left out so that the rest fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadmaster.core.conversation import Message

AROUND = 8  # tokens of a chat template around a turn: assumed, 4 to 7 in the published templates of Qwen and Gemma
_BYTES_A_TOKEN = (
    3.0  # of UTF-8: about 4 in English and 3 in Chinese with today's vocabularies; assumed, on the safe side
)
_LEAST_ANSWER = 1024  # tokens that an answer should have room for, or a quarter of a short context


def guessed_tokens(message: Message, image_tokens: int) -> int:
    """Tokens of a message, its thinking left out: templates drop what was thought in earlier turns."""
    return AROUND + math.ceil(len(message.text.encode("utf-8", "replace")) / _BYTES_A_TOKEN) + image_tokens


def corrected(messages: Sequence[Message], guesses: Sequence[int]) -> list[int]:
    """The guesses, scaled by what the engine counted for the newest answer whose question was sent whole."""
    for index in range(len(messages) - 1, -1, -1):
        numbers = messages[index].numbers
        if numbers is None or numbers.prompt_tokens is None or numbers.forgotten:
            continue
        before = sum(guesses[:index])
        if before > 0:
            scale = min(2.0, max(0.5, numbers.prompt_tokens / before))
            return [math.ceil(guess * scale) for guess in guesses]
    return list(guesses)


def first_kept(messages: Sequence[Message], tokens: Sequence[int], context: int | None, answer: int | None) -> int:
    """The first message that is sent so that the rest fits beside an answer of ``answer`` tokens.

    Always a question, never beyond the last one. ``context`` None: everything is sent.
    """
    if context is None:
        return 0
    room = context - min(answer if answer is not None else _LEAST_ANSWER, max(1, context // 4))
    begins = [index for index, message in enumerate(messages) if message.role == "user"]
    if not begins:
        return 0
    for begin in begins:
        start = 0 if begin == begins[0] else begin
        if sum(tokens[start:]) <= room:
            return start
    return begins[-1] if len(begins) > 1 else 0
