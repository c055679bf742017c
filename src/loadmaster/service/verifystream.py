"""Server-sent events of a streamed chat answer, checked for form as they arrive."""

from __future__ import annotations

import json
from typing import Any

_LONGEST_LINE = 1 << 20
_MOST_PROBLEMS = 5


class StreamReader:
    """Takes the bytes of one stream; :meth:`end` says what is wrong with its form.

    The form: lines "data: JSON" that an empty line ends, chunks of one id, text, then one finish reason, usage when
    it was asked for, and "data: [DONE]" with nothing after it. Comments and other fields are allowed.
    """

    def __init__(self, usage_wanted: bool) -> None:
        self._usage_wanted = usage_wanted
        self._buffer = b""
        self._data: list[str] = []
        self._ids: set[str] = set()
        self._done = False
        self.text = ""
        self.reasoning = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.error: str | None = None
        self.events = 0
        self.problems: list[str] = []

    def feed(self, chunk: bytes) -> None:
        self._buffer += chunk
        while (end := self._buffer.find(b"\n")) >= 0:
            line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
            self._line(line.removesuffix(b"\r"))
        if len(self._buffer) > _LONGEST_LINE:
            self._problem("a line of more than 1 MiB")
            self._buffer = b""

    def end(self) -> list[str]:
        """What is wrong, a phrase each; empty when the stream is well-formed."""
        if self._buffer.strip():
            self._problem("the stream ends in the middle of a line")
        elif self._data:
            self._problem("the last event is not ended by an empty line")
        if not self._done:
            self._problem("no data: [DONE] at the end")
        if self.finish_reason is None and self.error is None:
            self._problem("no finish reason")
        if not self.text and not self.reasoning and self.error is None:
            self._problem("no text in any event")
        if self._usage_wanted and self.usage is None and self.error is None:
            self._problem("no usage, though it was asked for")
        if len(self._ids) > 1:
            self._problem(f"{len(self._ids)} different ids in one answer")
        return self.problems

    def _problem(self, phrase: str) -> None:
        if phrase not in self.problems and len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(phrase)

    def _line(self, raw: bytes) -> None:
        if not raw:
            if self._data:
                self._event("\n".join(self._data))
                self._data = []
            return
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            self._problem("bytes that are not UTF-8")
            return
        field, _, value = line.partition(":")
        if field == "data":
            self._data.append(value.removeprefix(" "))
        elif field not in ("", "event", "id", "retry"):
            self._problem(f"a line that is no field of an event: {line[:60]!r}")

    def _event(self, data: str) -> None:
        if self._done:
            self._problem("an event after data: [DONE]")
        if data.strip() == "[DONE]":
            self._done = True
            return
        self.events += 1
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            self._problem(f"an event that is not JSON: {data[:60]!r}")
            return
        if not isinstance(chunk, dict):
            self._problem("an event that is not a JSON object")
            return
        if chunk.get("error"):
            self.error = error_text(chunk) or "an error without a message"
            return
        self._chunk(chunk)

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if chunk.get("object") != "chat.completion.chunk":
            self._problem(f"an event whose object is {str(chunk.get('object'))[:40]!r}")
        if isinstance(chunk.get("id"), str):
            self._ids.add(chunk["id"])
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            self._problem("an event without choices")
            return
        for choice in choices:
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict):
                self._problem("a choice without a delta")
                continue
            text, thought = delta.get("content") or "", reasoning_of(delta)
            if not isinstance(text, str):
                self._problem("a content that is no text")
                continue
            if (text or thought) and self.finish_reason is not None:
                self._problem("text after the finish reason")
            self.text += text
            self.reasoning += thought
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])


def reasoning_of(message: dict[str, Any]) -> str:
    """What a thinking model thought; servers name the field in two ways."""
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    return thought if isinstance(thought, str) else ""


def error_text(body: Any) -> str | None:
    """The message of an OpenAI error object, or of the other shapes in which servers say why."""
    if not isinstance(body, dict):
        return None
    error = body.get("error", body)
    if isinstance(error, str):
        return error
    if isinstance(error, dict):
        for key in ("message", "detail"):
            if isinstance(error.get(key), str):
                return str(error[key])
    detail = body.get("detail")
    return detail if isinstance(detail, str) else None
