"""What a request has to look like before an engine sees it, by route.

Engines differ in what they take (llama.cpp answers an empty conversation, vLLM fetches what a ``video_url`` names),
so the shape is judged here: one rule for all. Fields that are not in ``core/data/request-fields.toml`` are refused,
those in it have bounds, since an engine may reserve memory by them; within the bounds the engine judges.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from loadmaster.core.tables import load_toml
from loadmaster.service.errors import MESSAGES_ROUTE, RESPONSES_ROUTE, invalid
from loadmaster.service.gatewaysettings import CHAT_ROUTE, COMPLETIONS_ROUTE

MOST_MESSAGES = 10_000
MOST_PROMPTS = 2048  # of one request, as OpenAI's embeddings take

# Fields with which one request could undo what the plan and the gateway rely on.
REFUSED_FIELDS = {
    "mm_processor_kwargs": "the size of pictures is set by the gateway",
    "media_io_kwargs": "how media are read is set by the operator",
    "kv_transfer_params": "it makes the engine connect to other machines",
    "request_id": "the gateway names requests",
    "prompt_embeds": "embeddings instead of a prompt are not taken",
    "chat_template": "the template is the model's",
    "logits_processors": "it names code",
    "lora": "adapters are set by the operator",
}
# Other engines' names of the longest answer; only OpenAI's reach an engine, so that none overrides another.
_LENGTH_ALIASES = ("n_predict", "max_new_tokens")
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_SHORT_TEXT = 1024
_TEXT_PARTS = frozenset(
    ("text", "input_text", "output_text", "refusal", "thinking", "reasoning", "reasoning_text", "tool_reference")
)
_PICTURE_PARTS = frozenset(("image_url", "input_image"))
_SOUND_AND_FILM = frozenset(("audio_url", "video_url"))
_ANTHROPIC_PARTS = frozenset(("tool_use", "tool_result", "redacted_thinking", "server_tool_use"))
# Engines look for these keys whatever the part calls itself.
_MEDIA_KEYS = frozenset(
    (
        *("image_url", "audio_url", "video_url", "input_audio", "image", "video", "audio", "file", "file_id"),
        *("image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "input_file"),
        *("uuid", "source"),
    )
)


class Asked(Struct, frozen=True, kw_only=True):
    """What the gateway needs of a request. ``places``: answers it makes the engine write at once.

    ``conversation``: the field that holds one, for the image rules. ``pictures``: whether there are any in it.
    """

    model: str | None
    stream: bool
    places: int = 1
    conversation: str | None = None
    pictures: bool = False


def judge(route: str, body: dict[str, Any]) -> Asked:
    """Judge a request; pictures in it are brought into one form. Raises :class:`ApiError`, status 400."""
    for name, why in REFUSED_FIELDS.items():
        if body.get(name) is not None:
            raise invalid("field_not_allowed", f"{name} is not taken: {why}", name)
    model = body.get("model")
    if model is not None and (not isinstance(model, str) or not 0 < len(model) <= 256):
        raise invalid("model_invalid", "model has to be a name", "model")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise invalid("stream_invalid", "stream has to be true or false", "stream")
    _bound_fields(body)
    _one_length(body, route)
    conversation: str | None = None
    pictures = prompts = 1
    if route == RESPONSES_ROUTE:
        conversation, pictures = "input", _of_responses(body)
    elif route == MESSAGES_ROUTE:
        conversation, pictures = "messages", _of_anthropic(body)
    elif route == CHAT_ROUTE or "messages" in body:
        conversation, pictures = "messages", _of_chat(body.get("messages"))
    elif route == COMPLETIONS_ROUTE:
        prompts = _prompts(body.get("prompt"), "prompt")
    elif route == "/tokenize":
        if not isinstance(body.get("prompt"), str):
            raise invalid("prompt_invalid", "prompt has to be a text, or give messages", "prompt")
    else:
        _prompts(body.get("input"), "input")
    answers = max(body.get("n") or 1, body.get("best_of") or 1)
    return Asked(
        model=model,
        stream=bool(stream),
        places=prompts * answers,
        conversation=conversation,
        pictures=conversation is not None and pictures > 0,
    )


@cache
def _bounds() -> dict[str, dict[str, Any]]:
    """The group of each field that may reach an engine."""
    return {name: group for group in load_toml("request-fields.toml")["group"] for name in group["names"]}


def _bound_fields(body: dict[str, Any]) -> None:
    """Refuse fields that are not known, and values outside their bounds; unknown fields that are null are dropped."""
    bounds = _bounds()
    for name in tuple(body):
        value, group = body[name], bounds.get(name)
        if group is None:
            if value is None:
                del body[name]
                continue
            shown = "".join(letter if letter.isprintable() else "?" for letter in name[:60])
            raise invalid("field_not_allowed", f"{shown} is not a field that is taken here", shown)
        if value is not None:
            _check_bound(name, value, group)


def _check_bound(name: str, value: Any, group: dict[str, Any]) -> None:
    kind: str = group["kind"]
    switch = isinstance(value, bool)
    if kind == "scalar":
        if isinstance(value, (list, dict)) or (isinstance(value, str) and len(value) > _SHORT_TEXT):
            raise invalid("value_invalid", f"{name} has to be one value", name)
    elif kind == "text":
        if not isinstance(value, str):
            raise invalid("text_expected", f"{name} has to be a text", name)
        if len(value) > group["most"]:
            raise invalid("value_too_large", f"{name} may have {group['most']:,} letters at most", name)
    elif kind == "json":
        if len(msgspec.json.encode(value)) > group["most"]:
            raise invalid("value_too_large", f"{name} may have {group['most']:,} bytes at most", name)
        if "properties" in group:
            _check_properties(name, value, group["properties"], group["all_properties"])
    elif kind == "list":
        items = value if isinstance(value, list) else [value]
        if len(items) > group["most"]:
            raise invalid("value_too_large", f"{name} may have {group['most']:,} entries at most", name)
        if any(
            not isinstance(item, (str, int)) or (isinstance(item, str) and len(item) > _SHORT_TEXT) for item in items
        ):
            raise invalid("value_invalid", f"{name} holds texts of up to {_SHORT_TEXT:,} letters, or numbers", name)
    elif kind in ("number", "whole", "whole_or_switch") and not (switch and kind == "whole_or_switch"):
        if switch or not isinstance(value, (int, float)):
            raise invalid("number_expected", f"{name} has to be a number", name)
        if kind != "number" and value != int(value):
            raise invalid("number_expected", f"{name} has to be a whole number", name)
        if not group["least"] <= value <= group["most"]:
            between = f"from {group['least']:,} to {group['most']:,}"
            raise invalid("number_out_of_range", f"{name} has to be {between}", name)


def _check_properties(name: str, value: Any, most: int, together: int) -> None:
    """Count the properties of all schemas in the value, whatever holds them."""
    total, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            properties = item.get("properties")
            count = len(properties) if isinstance(properties, dict) else 0
            total += count
            if count > most or total > together:
                words = f"{name} may have {most:,} properties in one object and {together:,} in all"
                raise invalid("value_too_large", words, name)
            rest += item.values()
        elif isinstance(item, list):
            rest += item


def _one_length(body: dict[str, Any], route: str) -> None:
    """Put the smallest length that is asked for under OpenAI's name, when an alias asks for one."""
    given = [value for name in _LENGTH_ALIASES if (value := body.pop(name, None)) is not None]
    if not given:
        return
    most = min([*given, *(body[name] for name in _LENGTHS if body.get(name) is not None)])
    for name in _LENGTHS:
        if body.get(name) is not None:
            body[name] = most
    body["max_output_tokens" if route == RESPONSES_ROUTE else "max_tokens"] = most


def _prompts(value: object, name: str) -> int:
    """How many prompts: a text, token numbers, or a list of either."""
    if isinstance(value, str):
        if value:
            return 1
    elif isinstance(value, list) and value:
        kinds = {type(item) for item in value}
        if kinds == {int}:
            return 1
        if len(value) > MOST_PROMPTS:
            raise invalid("too_many_prompts", f"{name} may hold {MOST_PROMPTS:,} entries at most", name)
        if kinds == {str}:
            return len(value)
        if kinds == {list} and all(item and all(type(token) is int for token in item) for item in value):
            return len(value)
        if kinds == {dict} and name == "input":
            return len(value)
    raise invalid(f"{name}_invalid", f"{name} has to be a text, token numbers, or a list of them, not empty", name)


def _list_of_messages(value: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise invalid(f"{name}_invalid", f"{name} has to be a list", name)
    if not value:
        raise invalid(f"{name}_empty", f"{name} is empty", name)
    if len(value) > MOST_MESSAGES:
        raise invalid(f"{name}_too_many", f"{name} may hold {MOST_MESSAGES:,} at most", name)
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise invalid(f"{name}_invalid", f"{name}[{place}] has to be an object", f"{name}[{place}]")
    return value


def _role(message: dict[str, Any], where: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= 64:
        raise invalid("role_invalid", f"{where}.role has to be a word such as user", f"{where}.role")


def _of_chat(value: object) -> int:
    """Judge a conversation in OpenAI's chat form, rewrite its pictures to the plain form, and count them."""
    pictures = 0
    messages = _list_of_messages(value, "messages")
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        _role(message, where)
        for name in ("reasoning", "reasoning_content", "name", "tool_call_id"):
            if message.get(name) is not None and not isinstance(message[name], str):
                raise invalid("message_invalid", f"{where}.{name} has to be a text", f"{where}.{name}")
        content = message.get("content")
        if isinstance(content, list):
            if not content:
                raise invalid("content_empty", f"{where}.content is empty", f"{where}.content")
            for index, part in enumerate(content):
                content[index] = _chat_part(part, f"{where}.content[{index}]")
                pictures += content[index]["type"] == "image_url"
        elif content is None:
            if message["role"] == "user":
                raise invalid("content_missing", f"{where} has no content", f"{where}.content")
        elif not isinstance(content, str):
            raise invalid("content_invalid", f"{where}.content has to be a text or a list", f"{where}.content")
    return pictures


def _refused_part(where: str, what: str) -> Exception:
    return invalid("part_not_allowed", f"{where}: {what}", where)


def _chat_part(part: object, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise invalid("part_invalid", f"{where} has to be an object", where)
    kind = part.get("type")
    media = _MEDIA_KEYS.intersection(part)
    if "image_url" in media:
        media = media - {"uuid"}  # the engine's name for a picture that it has seen: not taken over
    if kind in _PICTURE_PARTS or (kind is None and media == {"image_url"}):
        if media != {"image_url"}:
            raise _refused_part(where, f"a picture has image_url and nothing like {_words(media - {'image_url'})}")
        picture: dict[str, Any] = {"url": _url_of(part["image_url"], where)}
        detail = part["image_url"].get("detail") if isinstance(part["image_url"], dict) else part.get("detail")
        if isinstance(detail, str):
            picture["detail"] = detail
        return {"type": "image_url", "image_url": picture}
    if isinstance(kind, str) and kind in _TEXT_PARTS:
        if media:
            raise _refused_part(where, f"a part of type {kind} has no {_words(media)}")
        _check_flat(part, where)
        if kind == "text" and not isinstance(part.get("text"), str):
            raise invalid("part_invalid", f"{where}.text has to be a text", f"{where}.text")
        return part
    if kind in _SOUND_AND_FILM and media == {kind}:
        url = _url_of(part[kind], where)
        if not url[:5].lower() == "data:":
            raise invalid("url_not_allowed", f"{where}: only data: URLs are taken here", where)
        return {"type": kind, kind: {"url": url}}
    if kind == "input_audio" and media == {"input_audio"}:
        sound = part["input_audio"]
        if not isinstance(sound, dict) or not isinstance(sound.get("data"), str) or ":" in sound["data"][:64]:
            raise invalid("part_invalid", f"{where}.input_audio needs data in base64", where)
        return part
    raise _refused_part(where, f"parts of type {str(kind)[:40]!r} are not taken")


def _words(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names)) or "the like"


def _url_of(value: object, where: str) -> str:
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise invalid("image_url_invalid", f"{where} has no URL", where)
    return url


def _of_responses(body: dict[str, Any]) -> int:
    """Judge the input of OpenAI's responses form and count its pictures."""
    value = body.get("input")
    if isinstance(value, str):
        if not value:
            raise invalid("input_empty", "input is empty", "input")
        return 0
    pictures = 0
    for place, item in enumerate(_list_of_messages(value, "input")):
        where = f"input[{place}]"
        media = _MEDIA_KEYS.intersection(item)
        if media:
            raise _refused_part(where, f"{_words(media)} belongs into a message's content")
        for name in ("content", "output"):
            if isinstance(item.get(name), list):
                pictures += _parts(item[name], f"{where}.{name}")
            elif isinstance(item.get(name), dict):
                raise _refused_part(f"{where}.{name}", "has to be a text or a list")
    return pictures


def _of_anthropic(body: dict[str, Any]) -> int:
    """Judge a conversation in Anthropic's form and count its pictures."""
    if isinstance(body.get("system"), list) and _parts(body["system"], "system"):
        raise _refused_part("system", "holds no pictures")
    pictures = 0
    for place, message in enumerate(_list_of_messages(body.get("messages"), "messages")):
        where = f"messages[{place}]"
        _role(message, where)
        content = message.get("content")
        if isinstance(content, list):
            pictures += _parts(content, f"{where}.content")
        elif not isinstance(content, str):
            raise invalid("content_invalid", f"{where}.content has to be a text or a list", f"{where}.content")
    return pictures


def _parts(parts: list[Any], where: str) -> int:
    """Judge the parts of a message that is not in chat form and count the pictures among them."""
    pictures = 0
    for index, part in enumerate(parts):
        here = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise invalid("part_invalid", f"{here} has to be an object", here)
        kind = part.get("type")
        media = _MEDIA_KEYS.intersection(part)
        if kind == "image" and media == {"source"}:
            _check_source(part["source"], here)
            pictures += 1
        elif kind in _PICTURE_PARTS and media == {"image_url"}:
            _url_of(part["image_url"], here)
            pictures += 1
        elif media or not isinstance(kind, str):
            raise _refused_part(here, f"parts of type {str(kind)[:40]!r} are not taken")
        elif kind == "tool_result" and isinstance(part.get("content"), list):
            pictures += _parts(part["content"], f"{here}.content")
        elif kind == "tool_result" and isinstance(part.get("content"), dict):
            raise _refused_part(f"{here}.content", "has to be a text or a list")
        elif kind not in _TEXT_PARTS and kind not in _ANTHROPIC_PARTS:
            raise _refused_part(here, f"parts of type {kind[:40]!r} are not taken")
        else:
            _check_flat(part, here)
    return pictures


def _check_flat(part: dict[str, Any], where: str) -> None:
    """Only a tool's result holds parts of its own."""
    for name in ("content", "output"):
        if isinstance(part.get(name), (list, dict)):
            raise _refused_part(f"{where}.{name}", "has to be a text")


def _check_source(source: object, where: str) -> None:
    if not isinstance(source, dict):
        raise invalid("part_invalid", f"{where}.source has to be an object", where)
    if source.get("type") == "url":
        _url_of(source.get("url"), where)
    elif not isinstance(source.get("data"), str) or not isinstance(source.get("media_type"), str):
        raise invalid("part_invalid", f"{where}.source has neither base64 data nor a URL", where)


def urls_of_pictures(value: object) -> list[str]:
    """URLs of all pictures in a judged conversation of any form, those of base64 sources left out."""
    found: list[str] = []
    if isinstance(value, list):
        for item in value:
            found += urls_of_pictures(item)
    elif isinstance(value, dict):
        if "image_url" in value:
            found.append(_url_of(value["image_url"], "image_url"))
        elif value.get("type") == "image" and isinstance(value.get("source"), dict):
            if value["source"].get("type") == "url":
                found.append(_url_of(value["source"].get("url"), "source"))
        else:
            for name in ("content", "output"):
                found += urls_of_pictures(value.get(name))
    return found
