"""The picture rules of the gateway: finds the pictures of a request, converts them, keeps the newest.

``apply`` takes the messages of any of the three conversation forms: OpenAI's chat completions (``image_url``), its
responses (``input_image``) and Anthropic's messages (``image`` with a ``source``). What reaches the engine afterwards
is only data: URLs in the plain form, or base64 where the form has it, of pictures that a worker process has decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from loadmaster.service.dataurl import is_data_url
from loadmaster.service.imagepool import ImagePool, Outcome
from loadmaster.service.imagerules import ImageError, ImageRules
from loadmaster.service.urlfetch import Fetcher, FetchError, FetchLimits

__all__ = ["ImageError", "ImagePool", "ImageRules", "apply", "changes_header"]

HEADER = "x-loadmaster-images"
HEADER_LENGTH = 1000
LEFT_OUT = "[An earlier picture was left out: only the newest {count} of a conversation {verb} kept.]"
LEFT_OUT_AS_WELL = "[left out]"
# Pictures of one request that are in work at once: the rest wait here, so that other requests get their turn.
AT_ONCE = 4
# A tool's result holds parts, which hold pictures: three levels in the forms as documented.
DEEPEST = 8

_NESTED = ("content", "output")
_OTHER_MEDIA = ("video_url", "audio_url")


class _Place(msgspec.Struct, frozen=True):
    """Where a picture stands: ``steps`` lead from the messages to the part; ``key``: image_url or source."""

    steps: tuple[int | str, ...]
    part: dict[str, Any]
    key: str

    def param(self) -> str:
        text = ""
        for step in (*self.steps, self.key):
            text += f"[{step}]" if isinstance(step, int) else f".{step}"
        return f"messages{text}"


async def apply(
    messages: list[Any],
    rules: ImageRules,
    pool: ImagePool,
    fetcher: Fetcher | None = None,
    seen: Callable[[tuple[int, int]], None] | None = None,
) -> tuple[list[Any], list[str]]:
    """The messages with ``rules`` applied to their pictures, and what was changed, in short ASCII sentences.

    ``messages`` is not modified; messages without a changed picture are the same objects in the result. A picture is
    converted the same way every time, so one that is kept stays byte for byte the same from turn to turn.
    ``fetcher`` gets pictures by URL when the rules allow it; by default one of the rules' limits. ``seen`` is called
    with the size of each picture that goes to the engine.
    Raises ImageError, whose ``param`` says where the picture stands.
    """
    places = list(_pictures(messages))
    if not places:
        return messages, []
    if rules.max_images == 0:
        raise ImageError("images_not_supported", "This service takes no pictures.", param=places[0].param())
    kept = places if rules.max_images is None else places[-rules.max_images :]
    left_out = len(places) - len(kept)
    if rules.allow_urls and fetcher is None:
        fetcher = Fetcher(FetchLimits(max_bytes=rules.max_bytes, timeout_s=rules.timeout_s))
    outcomes = await _convert_all(kept, rules, pool, fetcher)
    for outcome in outcomes:
        if seen is not None and outcome.size is not None:
            seen(outcome.size)

    changes = []
    if left_out:
        changes.append(f"{left_out} older {'picture' if left_out == 1 else 'pictures'} left out")
    edits = _edits_of_left_out(places[:left_out], len(kept))
    for number, (place, outcome) in enumerate(zip(kept, outcomes, strict=True), start=left_out + 1):
        part = _rebuilt(place, outcome)
        if part is not place.part:
            edits.append((place, part))
        if outcome.notes:
            changes.append(f"picture {number}: {', '.join(outcome.notes)}")
    return _with_parts(messages, edits), changes


def changes_header(changes: list[str], limit: int = HEADER_LENGTH) -> str:
    """The value of the header ``x-loadmaster-images``: printable ASCII, at most ``limit`` characters; "" for none."""
    text = ""
    for index, change in enumerate(changes):
        clean = "".join(letter if " " <= letter <= "~" else "?" for letter in change)
        rest = f"; and {len(changes) - index} more"
        longer = f"{text}; {clean}" if text else clean
        if len(longer) + (len(rest) if index + 1 < len(changes) else 0) > limit:
            return (text + rest)[:limit]
        text = longer
    return text


async def _convert_all(
    places: list[_Place], rules: ImageRules, pool: ImagePool, fetcher: Fetcher | None
) -> list[Outcome]:
    """In order; the first failure ends the rest and is raised."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(place: _Place) -> Outcome:
        async with turns:
            try:
                return await _convert(place, rules, pool, fetcher)
            except ImageError as error:
                error.param = place.param()
                raise

    tasks = [asyncio.create_task(one(place)) for place in places]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _convert(place: _Place, rules: ImageRules, pool: ImagePool, fetcher: Fetcher | None) -> Outcome:
    url = _url_of(place)
    if is_data_url(url):
        return await pool.convert_url(url, rules)
    scheme = url[:16].strip().lower().partition(":")[0]
    if scheme not in ("http", "https"):
        if ":" not in url[:64]:
            message = "A picture must be given as a data: URL: put data:image/jpeg;base64, before the base64 text."
        else:
            message = "A picture must be given as a data: URL" + (" or by http(s)." if rules.allow_urls else ".")
        raise ImageError("invalid_image_url", message)
    if fetcher is None or not rules.allow_urls:
        raise ImageError(
            "invalid_image_url",
            "This service does not fetch pictures from the network: send the picture itself as a data: URL.",
        )
    try:
        data = await fetcher.fetch(url.strip())
    except FetchError as error:
        raise ImageError(error.code, error.message) from None
    outcome = await pool.convert_bytes(data, rules)
    return Outcome(outcome.url, ("fetched", *outcome.notes))


def _url_of(place: _Place) -> str:
    """The URL of a picture; base64 of Anthropic's form as a data: URL. Raises ImageError when there is none."""
    value = place.part[place.key]
    if place.key == "image_url":
        url = value.get("url") if isinstance(value, dict) else value
    elif value.get("type") == "url":
        url = value.get("url")
    elif value.get("type") == "base64" and isinstance(value.get("data"), str):
        media_type = value.get("media_type")
        if not isinstance(media_type, str) or not media_type.startswith("image/") or len(media_type) > 40:
            media_type = "image/unknown"  # the bytes decide
        url = f"data:{media_type};base64,{value['data']}"
    else:
        raise ImageError("invalid_image_url", "A picture needs a source of type base64 with data, or of type url.")
    if not isinstance(url, str) or not url:
        raise ImageError("invalid_image_url", "A picture has no data: URL; references to stored files are not taken.")
    return url


def _rebuilt(place: _Place, outcome: Outcome) -> dict[str, Any]:
    """The part with its new picture, in its own form; the part itself when nothing changes.

    An engine looks up processed pictures by a part's ``uuid`` instead of its bytes: it is never passed on.
    """
    part = place.part
    if outcome.url is None and "uuid" not in part:
        return part
    rebuilt = {key: value for key, value in part.items() if key != "uuid"}
    if outcome.url is None:
        return rebuilt
    value = part[place.key]
    if place.key == "source":
        media_type, _, data = outcome.url.removeprefix("data:").partition(";base64,")
        rebuilt["source"] = {"type": "base64", "media_type": media_type, "data": data}
    else:
        rebuilt["image_url"] = {**value, "url": outcome.url} if isinstance(value, dict) else outcome.url
    return rebuilt


def _edits_of_left_out(places: list[_Place], count: int) -> list[tuple[_Place, dict[str, Any] | None]]:
    """One text for all pictures that a message's list of parts loses; only the conversation's first says why.

    A list is never left empty: engines refuse that.
    """
    edits: list[tuple[_Place, dict[str, Any] | None]] = []
    told: set[tuple[int | str, ...]] = set()
    for place in places:
        holder = place.steps[:-1]
        if holder in told and isinstance(place.steps[-1], int) and len(holder) > 0:
            edits.append((place, None))
            continue
        kind = "input_text" if place.part.get("type") in ("input_image", "computer_screenshot") else "text"
        text = LEFT_OUT.format(count="one" if count == 1 else count, verb="is" if count == 1 else "are")
        edits.append((place, {"type": kind, "text": LEFT_OUT_AS_WELL if told else text}))
        told.add(holder)
    return edits


def _pictures(messages: list[Any]) -> Iterator[_Place]:
    """All pictures, oldest first."""
    for index, message in enumerate(messages):
        if isinstance(message, dict):
            if "role" in message:
                yield from _nested(message, (index,), 1)
            else:
                yield from _of_part(message, (index,), 1)


def _nested(holder: dict[str, Any], steps: tuple[int | str, ...], depth: int) -> Iterator[_Place]:
    for key in _NESTED:
        value = holder.get(key)
        if isinstance(value, dict):
            yield from _of_part(value, (*steps, key), depth + 1)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _of_part(item, (*steps, key, index), depth + 1)


def _of_part(part: dict[str, Any], steps: tuple[int | str, ...], depth: int) -> Iterator[_Place]:
    if depth > DEEPEST:
        raise ImageError("invalid_image", "The parts of a message are nested too deeply.")
    for key in _OTHER_MEDIA:
        value = part.get(key)
        url = value.get("url") if isinstance(value, dict) else value
        if isinstance(url, str) and not is_data_url(url):
            raise ImageError(
                "unsupported_media_url",
                f"This service fetches no sound or film: {key} must be a data: URL.",
                param=_Place(steps, part, key).param(),
            )
    if "image_url" in part:
        yield _Place(steps, part, "image_url")
    elif part.get("type") == "image" and isinstance(part.get("source"), dict):
        yield _Place(steps, part, "source")
    elif part.get("type") == "input_image":
        raise ImageError(
            "invalid_image_url",
            "A picture has no image_url; references to stored files are not taken.",
            param=_Place(steps, part, "image_url").param(),
        )
    else:
        yield from _nested(part, steps, depth)


def _with_parts(messages: list[Any], edits: list[tuple[_Place, dict[str, Any] | None]]) -> list[Any]:
    """A copy of ``messages`` with parts exchanged, or taken out for None; only containers on the way are copied."""
    if not edits:
        return messages
    result: list[Any] = list(messages)
    copied: dict[tuple[int | str, ...], Any] = {}
    for place, part in edits:
        container: Any = result
        for length in range(1, len(place.steps)):
            path = place.steps[:length]
            if path not in copied:
                copied[path] = container[path[-1]].copy()
                container[path[-1]] = copied[path]
            container = copied[path]
        container[place.steps[-1]] = part
    for path in {place.steps[:-1] for place, part in edits if part is None}:
        copied[path][:] = [part for part in copied[path] if part is not None]
    return result
