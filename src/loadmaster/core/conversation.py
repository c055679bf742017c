"""What a conversation of the page is: its messages, their pictures, and how an answer went."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Role = Literal["user", "assistant", "system"]
MessageState = Literal["done", "stopped", "failed", "streaming"]

MOST_TITLE = 200  # letters
MOST_TEXT = 1 << 20  # letters of one message
MOST_PICTURES = 64  # of one message
_FIRST_TITLE = 60


class PictureRef(Struct, frozen=True, kw_only=True):
    """A picture of a message, by its file's SHA-256. Sizes in pixels; ``original_*``: before the browser scaled it."""

    sha256: str
    width: int
    height: int
    original_width: int | None = None
    original_height: int | None = None
    name: str | None = None


class Numbers(Struct, frozen=True, kw_only=True):
    """How an answer went, in seconds and tokens; None: not known.

    ``queue_s``: waited for the turn. ``first_token_s``: from the turn to the first token. ``image_tokens``: computed
    from the sizes of the pictures. ``seconds``: from the turn to the end. ``changes``: what the picture rules did.
    ``forgotten``: older messages that were left out so that the rest fits the context.
    """

    queue_s: float | None = None
    first_token_s: float | None = None
    tokens_per_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    image_tokens: int | None = None
    seconds: float | None = None
    changes: str | None = None
    forgotten: int = 0
    finish_reason: str | None = None


class Problem(Struct, frozen=True, kw_only=True):
    """Why an answer is not whole: the error's code and sentence, and what the engine's state says of the cause."""

    code: str
    message: str
    findings: tuple[dict[str, Any], ...] = ()


class Message(Struct, frozen=True, kw_only=True):
    """``created``: seconds since 1970. ``model``: who answered."""

    id: str
    role: Role
    text: str = ""
    thinking: str | None = None
    pictures: tuple[PictureRef, ...] = ()
    state: MessageState = "done"
    error: Problem | None = None
    numbers: Numbers | None = None
    created: float = 0.0
    model: str | None = None


class Summary(Struct, frozen=True, kw_only=True):
    """A conversation in the list. ``messages``, ``pictures``: how many."""

    id: str
    title: str
    created: float
    changed: float
    messages: int = 0
    pictures: int = 0


class Conversation(Struct, frozen=True, kw_only=True):
    """``settings``: the parameters that its next answer begins with."""

    id: str
    title: str
    created: float
    changed: float
    settings: dict[str, Any] = {}
    messages: tuple[Message, ...] = ()


def title_of(text: str) -> str:
    """A title from the first question: its first line, cut between words where there are any."""
    line = " ".join(next((line for line in text.splitlines() if line.strip()), "").split())
    if len(line) <= _FIRST_TITLE:
        return line
    cut = line[:_FIRST_TITLE]
    words = cut.rfind(" ")
    return (cut[:words] if words > _FIRST_TITLE // 2 else cut) + "…"
