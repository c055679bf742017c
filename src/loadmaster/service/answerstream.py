"""An answer as it grows: what an engine's stream of a chat completion adds to it, and who follows it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from loadmaster.core.conversation import Message, MessageState, Numbers, Problem
from loadmaster.core.thinking import ThinkingSplit
from loadmaster.service.errors import ApiError
from loadmaster.service.passage import CHANGES_HEADER

MOST_LETTERS = 4 << 20  # of one answer; an engine that writes on and on is cut off
_LEAST_RATED_S = 0.05  # tokens that come in one burst have no rate
_LONGEST_WORD, _LONGEST_REASON = 100, 4000  # letters of what an engine says of itself


class Growing:
    """A text that only grows, or begins anew. Places in it count UTF-16 units, as JavaScript does."""

    def __init__(self, text: str = "") -> None:
        self._pieces: list[str] = []
        self._begins: list[int] = []
        self.length = 0  # UTF-16 units
        self.letters = 0
        self.turn = 0  # how often it began anew
        self.add(text)

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._begins.append(self.length)
            self.length += units(piece)
            self.letters += len(piece)

    def replace(self, text: str) -> None:
        self._pieces, self._begins, self.length, self.letters = [], [], 0, 0
        self.turn += 1
        self.add(text)

    def since(self, place: int) -> str:
        """What comes after so many units."""
        found: list[str] = []
        for index in range(len(self._pieces) - 1, -1, -1):
            begin, piece = self._begins[index], self._pieces[index]
            if begin >= place:
                found.append(piece)
                continue
            rest = piece.encode("utf-16-le", "surrogatepass")[2 * (place - begin) :]
            found.append(rest.decode("utf-16-le", "replace"))
            break
        return "".join(reversed(found))

    def __str__(self) -> str:
        if len(self._pieces) > 1:
            self._pieces, self._begins = ["".join(self._pieces)], [0]
        return self._pieces[0] if self._pieces else ""


def _count(value: object) -> int | None:
    """A number of tokens, None for what cannot be one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else None


def units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


class GrowingAnswer:
    """The answer in the making, and the outlet that an engine's stream goes into.

    ``message``: what it began as. ``image_tokens``: of the pictures that were asked about. Those who follow wait on
    :meth:`changed`; one who is slow holds nothing back and misses nothing.
    """

    def __init__(self, message: Message, *, image_tokens: int | None, forgotten: int) -> None:
        self._message = message
        self._image_tokens = image_tokens
        self._forgotten = forgotten
        continued = message.state == "streaming" and (message.text or message.thinking)
        self._split = ThinkingSplit(inside=bool(continued and message.thinking and not message.text))
        self.text = Growing(message.text)
        self.thinking = Growing(message.thinking or "")
        self.place: int | None = None
        self.state: MessageState = "streaming"
        self.error: Problem | None = None
        self.version = 0
        self._waiting: asyncio.Future[None] | None = None
        self._asked_at = time.monotonic()
        self._turn_at: float | None = None
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._tokens_seen = 0
        self._usage: dict[str, Any] = {}
        self._finish: str | None = None
        self._changes: str | None = None
        self.begun = False

    # ------------------------------------------------------------------------------------------ as an outlet

    async def begin(self, headers: dict[str, str]) -> None:
        self.begun = True
        self._changes = headers.get(CHANGES_HEADER)

    async def write(self, part: bytes | bytearray) -> None:
        """Raises :class:`ApiError`, which ends the request, when the answer is too long."""
        for block in bytes(part).replace(b"\r\n", b"\n").split(b"\n\n"):
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            data = b"\n".join(lines)
            if data and data != b"[DONE]":
                self._take(data)
        self._tell()

    async def finish(self) -> None:
        return None

    def abort(self) -> None:
        return None

    def told(self, place: int | None) -> None:
        """The place in the queue; None: the turn has come."""
        if place is None:
            self._turn_at = time.monotonic()
        self.place = place
        self._tell()

    def _take(self, data: bytes) -> None:
        try:
            value = msgspec.json.decode(data)
        except (msgspec.MsgspecError, RecursionError):
            return
        if not isinstance(value, dict):
            return
        if isinstance(value.get("error"), dict):
            code, message = value["error"].get("code"), value["error"].get("message")
            self.fail(str(code or "engine_error")[:_LONGEST_WORD], str(message or "")[:_LONGEST_REASON])
            return
        if isinstance(value.get("usage"), dict):
            self._usage = value["usage"]
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        finish = choices[0].get("finish_reason")
        if isinstance(finish, str) and finish:
            self._finish = finish[:_LONGEST_WORD]
        delta = choices[0].get("delta")
        if not isinstance(delta, dict):
            return
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        content = delta.get("content")
        if isinstance(reasoning, str) and reasoning:
            self._came()
            self.thinking.add(reasoning)
        if isinstance(content, str) and content:
            self._came()
            self._add(content)
        if self.text.letters + self.thinking.letters > MOST_LETTERS:
            raise ApiError(502, "answer_too_long", f"the answer was cut off after {MOST_LETTERS:,} letters")

    def _came(self) -> None:
        self._last_at = time.monotonic()
        if self._first_at is None:
            self._first_at = self._last_at
        self._tokens_seen += 1

    def _add(self, content: str) -> None:
        self._apply(self._split.feed(content))

    def _apply(self, part: Any) -> None:
        if part.moved:
            self.thinking.add(str(self.text))
            self.text.replace("")
        self.thinking.add(part.thinking)
        self.text.add(part.text)

    # ------------------------------------------------------------------------------------------ its end

    @property
    def over(self) -> bool:
        return self.state != "streaming"

    def fail(self, code: str, message: str, findings: tuple[dict[str, Any], ...] = ()) -> None:
        """What is there stays; the first reason counts."""
        if self.error is None:
            self.error = Problem(code=code, message=message, findings=findings)

    def end(self, state: MessageState) -> None:
        """Nothing comes any more. An error that was seen makes it failed, unless somebody stopped it."""
        if self.over:
            return
        self._apply(self._split.end())
        self.state = "failed" if self.error is not None and state != "stopped" else state
        if self.state == "stopped":
            self.error = None
        self.place = None
        self._tell()

    def numbers(self) -> Numbers:
        turn, first, last = self._turn_at, self._first_at, self._last_at
        written, prompt = _count(self._usage.get("completion_tokens")), _count(self._usage.get("prompt_tokens"))
        tokens = written if written is not None else self._tokens_seen or None
        span = 0.0 if first is None or last is None else last - first
        speed = (tokens - 1) / span if tokens is not None and tokens > 1 and span >= _LEAST_RATED_S else None
        return Numbers(
            queue_s=None if turn is None else turn - self._asked_at,
            first_token_s=None if first is None or turn is None else first - turn,
            tokens_per_s=speed,
            prompt_tokens=prompt,
            completion_tokens=tokens,
            image_tokens=self._image_tokens,
            seconds=None if last is None or turn is None else last - turn,
            changes=self._changes,
            forgotten=self._forgotten,
            finish_reason=self._finish,
        )

    def message(self) -> Message:
        """As it is now."""
        thinking = str(self.thinking)
        return msgspec.structs.replace(
            self._message,
            text=str(self.text),
            thinking=thinking or None,
            state=self.state,
            error=self.error,
            numbers=self.numbers(),
        )

    # ------------------------------------------------------------------------------------------ who follows

    def _tell(self) -> None:
        self.version += 1
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        self._waiting = None

    async def changed(self, seen: int) -> None:
        """Return when something is there that was not at version ``seen``."""
        while self.version == seen:
            if self._waiting is None:
                self._waiting = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._waiting)
