"""The steps of the end-to-end proof: what is asked of the service and what has to come back, a function each."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from msgspec import Struct, structs

from loadmaster.core.answers import named, names, numbers, says_number, spoken
from loadmaster.core.tables import load_toml
from loadmaster.core.verification import Limits, Status
from loadmaster.service import verifypictures
from loadmaster.service.verifyclient import Answer, Service, ServiceError
from loadmaster.service.verifypictures import Picture

ANSWER_TOKENS = 96  # a word, or a sentence with it
_THINKING_TOKENS = 4096  # for a model that thinks although it was asked not to
ONE_WORD = "Answer with one word."
_QUOTED = 80


class Outcome(Struct, frozen=True):
    status: Status
    detail: str
    undecided: bool = False


def passed(detail: str) -> Outcome:
    return Outcome("passed", detail)


def failed(detail: str) -> Outcome:
    return Outcome("failed", detail)


def not_applicable(detail: str, *, undecided: bool = False) -> Outcome:
    return Outcome("not_applicable", detail, undecided)


class Proof:
    """What the steps know of each other.

    ``picture_refusal``: the service's words for not taking pictures. ``too_weak``: the controls that the model
    answered wrongly. ``alone_s``: seconds of a short request with nothing else running. ``engine_url``: of the
    engine behind the service, where it is on this machine.
    """

    def __init__(self, service: Service, limits: Limits, random: Random) -> None:
        self.service = service
        self.limits = limits
        self.random = random
        self.statuses: dict[str, Status] = {}
        self.shapes = verifypictures.two_shapes(random)
        self.first_turn: tuple[dict[str, Any], str] | None = None
        self.picture_refusal: str | None = None
        self.too_weak: set[str] = set()
        self.alone_s: float | None = None
        self.engine_url: str | None = None
        self._huge: Picture | None = None

    async def huge(self) -> Picture:
        """A picture of more than 12 megapixels, drawn once."""
        if self._huge is None:
            self._huge = await asyncio.to_thread(verifypictures.huge, self.random)
        return self._huge

    def tokens(self, wanted: int) -> int:
        """At most half of the context, if it is known."""
        context = self.limits.context
        return wanted if context is None else max(1, min(wanted, context // 2))

    async def ask(self, messages: list[dict[str, Any]]) -> Answer:
        """An answer with words in it; a model that spent its tokens on thinking gets more of them."""
        answer = await self.service.chat(messages, max_tokens=self.tokens(ANSWER_TOKENS))
        if not spoken(answer.text) and answer.finish_reason == "length":
            answer = await self.service.chat(messages, max_tokens=self.tokens(_THINKING_TOKENS))
        return answer


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def shown(pictures: list[Picture], text: str) -> dict[str, Any]:
    """A user's message with pictures in front of its words."""
    parts = [{"type": "image_url", "image_url": {"url": picture.url}} for picture in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def quoted(text: str) -> str:
    """The beginning of an answer on one line."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in spoken(text)).split())
    return repr(line if len(line) <= _QUOTED else line[:_QUOTED] + "...") if line else "nothing"


# ------------------------------------------------------------------------------------------------ transport


async def models(proof: Proof) -> Outcome:
    status, raw = await proof.service.get("/v1/models")
    if status != 200:
        hint = "; give its key with --api-key-file" if status in (401, 403) else ""
        return failed(f"HTTP {status} from /v1/models{hint}")
    try:
        listed = [entry for entry in json.loads(raw)["data"] if isinstance(entry["id"], str)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return failed("/v1/models does not answer with a list of models")
    if not listed:
        return failed("/v1/models lists no model")
    wanted = proof.service.model
    entry = next((entry for entry in listed if not wanted or wanted in (entry["id"], *_aliases(entry))), None)
    ids = ", ".join(entry["id"] for entry in listed[:5]) + (", ..." if len(listed) > 5 else "")
    if entry is None:
        return failed(f"no model {wanted!r}; listed: {ids}")
    proof.service.model = wanted or entry["id"]
    context, pictures = _claimed(entry)
    proof.limits = structs.replace(
        proof.limits,
        context=proof.limits.context if proof.limits.context is not None else context,
        pictures=proof.limits.pictures if proof.limits.pictures is not None else pictures,
    )
    return passed(f"{ids}; asked is {proof.service.model}" if len(listed) > 1 else ids)


def _aliases(entry: dict[str, Any]) -> list[str]:
    aliases = entry.get("aliases")
    return [alias for alias in aliases if isinstance(alias, str)] if isinstance(aliases, list) else []


def _claimed(entry: dict[str, Any]) -> tuple[int | None, bool | None]:
    """The context and whether there are pictures, where an entry of the list says so (vLLM's and llama.cpp's keys)."""
    meta = entry.get("meta")
    context = entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    architecture = entry.get("architecture")
    inputs = architecture.get("input_modalities") if isinstance(architecture, dict) else None
    return (
        context if isinstance(context, int) and context > 0 else None,
        "image" in inputs if isinstance(inputs, list) else None,
    )


async def text(proof: Proof) -> Outcome:
    answer = await proof.service.chat([said("Say hello.")], max_tokens=proof.tokens(32))
    if not answer.text and not answer.reasoning:
        return failed("the answer is empty")
    proof.alone_s = answer.seconds
    faults = [
        phrase
        for phrase, wrong in (
            ("no finish reason", answer.finish_reason is None),
            ("no usage", answer.prompt_tokens is None or answer.completion_tokens is None),
        )
        if wrong
    ]
    if faults:
        return failed(f"answered, but the answer has {' and '.join(faults)}")
    return passed(f"{answer.prompt_tokens} tokens in, {answer.completion_tokens} out: {quoted(answer.text)}")


async def stream(proof: Proof) -> Outcome:
    answer = await proof.service.stream([said("Count from one to ten.")], max_tokens=proof.tokens(48))
    if answer.problems:
        return failed("; ".join(answer.problems))
    first = f", the first text after {answer.first_s:.2f} s" if answer.first_s is not None else ""
    usage = "" if "stream_options" in proof.service.refused else ", with usage"
    return passed(f"{answer.events} events{usage}{first}")


async def image(proof: Proof) -> Outcome:
    """A picture is taken, and it costs tokens: one that is dropped on the way costs none."""
    question = "What is this?"
    with_picture = await proof.service.chat([shown([proof.shapes], question)], max_tokens=proof.tokens(16))
    if not with_picture.text and not with_picture.reasoning:
        return failed("the answer to a picture is empty")
    without = await proof.service.chat([said(question)], max_tokens=proof.tokens(16))
    if with_picture.prompt_tokens is None or without.prompt_tokens is None:
        return passed(f"answered; the service counts no tokens: {quoted(with_picture.text)}")
    cost = with_picture.prompt_tokens - without.prompt_tokens
    if cost < 1:
        return failed(f"a picture costs {cost} tokens: it is dropped before it reaches the model")
    return passed(f"{proof.shapes.width}x{proof.shapes.height} cost {cost} tokens: {quoted(with_picture.text)}")


async def image_large(proof: Proof) -> Outcome:
    """A photograph of many megapixels is taken, whatever the model makes of it."""
    picture = await proof.huge()
    answer = await proof.service.chat([shown([picture], "What is this?")], max_tokens=proof.tokens(16))
    if not answer.text and not answer.reasoning:
        return failed("the answer to a large picture is empty")
    tokens = f", {answer.prompt_tokens:,} tokens with the question" if answer.prompt_tokens is not None else ""
    return passed(f"{_size(picture)} in {answer.seconds:.2f} s{tokens}")


async def json_schema(proof: Proof) -> Outcome:
    colours = ["red", "green", "blue"]
    schema = {
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": colours}, "bright": {"type": "boolean"}},
        "required": ["colour", "bright"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "colour", "strict": True, "schema": schema}}
    try:
        answer = await proof.service.chat(
            [said("Name a colour and say whether it is bright, as a JSON object with the keys colour and bright.")],
            max_tokens=proof.tokens(512),
            response_format=wanted,
        )
    except ServiceError as error:
        if error.status in (400, 422, 501) and says(error.message, "no_schema"):
            return not_applicable(f"the service does not offer it: {error.message}")
        raise
    try:
        found = json.loads(spoken(answer.text))
    except (ValueError, RecursionError):
        return failed(f"not JSON, although a schema was given: {quoted(answer.text)}")
    right = isinstance(found, dict) and found.keys() == {"colour", "bright"}
    if not right or found["colour"] not in colours or not isinstance(found["bright"], bool):
        return failed(f"JSON that the schema does not allow: {quoted(answer.text)}")
    return passed(quoted(answer.text))


# ------------------------------------------------------------------------------------------------ answers


async def control_colour(proof: Proof) -> Outcome:
    """The picture question in words: whoever fails here cannot be asked about a picture."""
    answers = proof.shapes.answers
    question = (
        f"A picture shows a {answers['left colour']} {answers['left shape']} on the left and "
        f"a {answers['right colour']} {answers['right shape']} on the right. "
        f"What colour is the {answers['left shape']}? {ONE_WORD}"
    )
    answer = await proof.ask([said(question)])
    if names("colour", answers["left colour"], answer.text):
        return passed(f"answered {quoted(answer.text)}")
    return failed(
        f"told that it is {answers['left colour']}, the model answered {quoted(answer.text)}: "
        "it is too weak to be asked about pictures"
    )


async def control_number(proof: Proof) -> Outcome:
    digits = "".join(proof.random.sample("123456789", 4))
    answer = await proof.ask([said(f"A sign says {digits}. What number is on the sign? Answer with the digits alone.")])
    if says_number(digits, answer.text):
        return passed(f"answered {quoted(answer.text)}")
    return failed(
        f"told that it is {digits}, the model answered {quoted(answer.text)}: it is too weak to be asked for numbers"
    )


async def conversation(proof: Proof) -> Outcome:
    digits = "".join(proof.random.sample("123456789", 4))
    first = said(f"My ticket has the number {digits}. Answer with OK alone.")
    answer = await proof.ask([first])
    turns = [first, {"role": "assistant", "content": spoken(answer.text) or "OK"}]
    again = await proof.ask([*turns, said("Which number has my ticket? Answer with the digits alone.")])
    if digits in numbers(again.text):
        return passed(f"the second answer knows the first turn: {quoted(again.text)}")
    return failed(f"told {digits} in the first turn, the second was answered with {quoted(again.text)}")


async def image_colour(proof: Proof) -> Outcome:
    answers = proof.shapes.answers
    message = shown([proof.shapes], f"What colour is the {answers['left shape']} in this picture? {ONE_WORD}")
    answer = await proof.ask([message])
    proof.first_turn = (message, spoken(answer.text))
    return _colour_outcome("colour", answers["left colour"], answer.text, f"of the {answers['left shape']}")


async def image_second_turn(proof: Proof) -> Outcome:
    if proof.first_turn is None:
        return not_applicable("the first question about the picture was not answered")
    answers = proof.shapes.answers
    message, before = proof.first_turn
    again = said(
        f"And which shape has the {answers['right colour']} thing in the same picture: "
        f"{', '.join(verifypictures.SHAPES)}? {ONE_WORD}"
    )
    answer = await proof.ask([message, {"role": "assistant", "content": before or "?"}, again])
    return _colour_outcome("shape", answers["right shape"], answer.text, f"of the {answers['right colour']} thing")


async def image_number(proof: Proof) -> Outcome:
    return await _number(proof, verifypictures.number(proof.random))


async def image_huge(proof: Proof) -> Outcome:
    picture = await proof.huge()
    outcome = await _number(proof, picture)
    return Outcome(outcome.status, f"{_size(picture)}: {outcome.detail}")


def _size(picture: Picture) -> str:
    return f"{picture.width}x{picture.height} JPEG, {picture.width * picture.height / 1e6:.1f} megapixels"


async def image_exif(proof: Proof) -> Outcome:
    picture = verifypictures.turned(proof.random)
    wanted, unturned = picture.answers["top right"], picture.answers["unturned"]
    answer = await proof.ask([shown([picture], f"What colour is the top right corner of this picture? {ONE_WORD}")])
    if names("colour", wanted, answer.text):
        return passed(f"turned upright by its EXIF orientation: {quoted(answer.text)}")
    why = (
        "the picture is seen as stored, its EXIF orientation is ignored"
        if names("colour", unturned, answer.text)
        else f"the corner is {wanted}"
    )
    return failed(f"{why}: answered {quoted(answer.text)}")


async def image_order(proof: Proof) -> Outcome:
    """Two pictures in one message: each has to be seen, in its place."""
    if proof.limits.images is not None and proof.limits.images < 2:
        return not_applicable(f"the service takes {proof.limits.images} picture in a request")
    first, second = proof.random.sample(sorted(verifypictures.COLOURS), 2)
    pictures = [verifypictures.one_colour(first), verifypictures.one_colour(second)]
    message = shown(
        pictures,
        "Two pictures, a disc in each. What colour is the first disc, and what colour is the second? "
        "Answer with two words, the first one's colour first.",
    )
    try:
        answer = await proof.ask([message])
    except ServiceError as error:
        most = next((found for found in _found(error.message, "most_pictures")), None)
        if error.status in (400, 413, 422) and most is not None and int(most) < 2:
            return not_applicable(f"the service takes {most} picture in a request: {error.message}")
        raise
    seen = named("colour", answer.text)
    if seen[:2] == [first, second]:
        return passed(f"seen in their order: {quoted(answer.text)}")
    if seen[:2] == [second, first]:
        return failed(f"shown {first}, then {second}, and seen in the wrong order: {quoted(answer.text)}")
    return failed(f"shown {first}, then {second}; answered {quoted(answer.text)}")


async def _number(proof: Proof, picture: Picture) -> Outcome:
    wanted = picture.answers["number"]
    question = "Which number is written in this picture? Answer with the digits alone."
    answer = await proof.ask([shown([picture], question)])
    if says_number(wanted, answer.text):
        return passed(f"read {wanted}: {quoted(answer.text)}")
    return failed(f"the picture says {wanted}, answered {quoted(answer.text)}")


def _colour_outcome(kind: str, wanted: str, text: str, what: str) -> Outcome:
    if names(kind, wanted, text):
        return passed(f"the {kind} {what} is {wanted}: {quoted(text)}")
    return failed(f"the {kind} {what} is {wanted}, answered {quoted(text)}")


# ------------------------------------------------------------------------------------------------ refusals


def refuses_pictures(error: ServiceError) -> bool:
    """Whether the service says that its model takes no pictures."""
    return error.status is not None and 400 <= error.status < 600 and says(error.message, "no_pictures")


def says(message: str, what: str) -> bool:
    phrases = load_toml("verify-phrases.toml")[what]
    return any(phrase in message.lower() for phrase in phrases)


def _found(message: str, what: str) -> list[str]:
    patterns = load_toml("verify-phrases.toml")[what]
    return [found.group(1) for pattern in patterns if (found := re.search(pattern, message.lower()))]


StepFunction = Callable[[Proof], Awaitable[Outcome]]
