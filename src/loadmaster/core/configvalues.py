"""Values as a configuration file or a variable gives them → values of a struct's types, or what is wrong in words."""

from __future__ import annotations

import difflib
import shlex
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

_MOST = (1 << 63) - 1  # TOML's and JSON's common range of whole numbers
_SHOWN = 40  # characters of a wrong value that are shown
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class SettingError(Exception):
    """A value that cannot be taken. The message begins with the key's path."""

    def __init__(self, key: str, message: str, hint: str | None = None) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.hint = hint


def near(name: str, known: Iterable[str], cutoff: float = 0.75) -> str | None:
    """The known name that was probably meant; ``cutoff`` is difflib's ratio, 1 for the same."""
    close = difflib.get_close_matches(name, list(known), 1, cutoff)
    return close[0] if close else None


def convert(raw: Mapping[str, Any], struct: type[Struct], prefix: str = "") -> dict[str, Any]:
    """The values of ``raw`` in the types of ``struct``'s fields, sections included.

    Raises :class:`SettingError` for the first unknown key, missing key or wrong type.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    result: dict[str, Any] = {}
    for key, value in raw.items():
        path = prefix + key
        if key not in fields:
            raise SettingError(path, "no such key", _meant(key, prefix, struct))
        wanted = fields[key].type
        if isinstance(wanted, type) and issubclass(wanted, Struct):
            if not isinstance(value, dict):
                raise SettingError(path, f"expected a section, got {_shown(value)}", f"write it as [{path}]")
            result[key] = convert(value, wanted, f"{path}.")
        else:
            result[key] = _value(value, wanted, path)
    for key, field in fields.items():
        if field.required and key not in result:
            raise SettingError(prefix + key, "is missing")
    return result


def _meant(key: str, prefix: str, struct: type[Struct]) -> str | None:
    """Where the key is spelt nearly so, here or in another section."""
    names = [field.encode_name for field in msgspec.structs.fields(struct)]
    close = near(key, names)
    if close is not None:
        return f"did you mean {prefix}{close}?"
    return f"known here: {', '.join(names)}"


def _value(value: Any, wanted: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return _value(value, next(part for part in arguments if part is not type(None)), path)
    if origin is Literal:
        if value in arguments and isinstance(value, str):
            return value
        close = near(value, arguments) if isinstance(value, str) else None
        raise _wrong(path, wanted, value, f'did you mean "{close}"?' if close else None)
    if origin is list and isinstance(value, list):
        return [_value(item, arguments[0], f"{path}[{place}]") for place, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _value(item, arguments[1], f"{path}.{key}") for key, item in value.items()}
    if wanted is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST:
        return float(value)
    if isinstance(wanted, type) and type(value) is wanted:
        if isinstance(value, int) and not -_MOST <= value <= _MOST:
            raise SettingError(path, "the number is too large")
        return value
    raise _wrong(path, wanted, value, _quoting(wanted, value, path))


def _wrong(path: str, wanted: Any, value: Any, hint: str | None = None) -> SettingError:
    return SettingError(path, f"expected {expected_words(wanted)}, got {_shown(value)}", hint)


def _quoting(wanted: Any, value: Any, path: str) -> str | None:
    """The commonest slips: a number in quotes, a text without them, one word instead of a list."""
    name = path.split("[")[0].rsplit(".", 1)[-1]
    if isinstance(value, str) and wanted in (int, float, bool):
        try:
            from_text(value, path, wanted)
        except SettingError:
            return None
        return f"without quotes: {name} = {value.strip()}"
    if wanted is str and type(value) in (int, float):
        return f'in quotes: "{value}"'
    if typing.get_origin(wanted) is list and isinstance(value, str):
        return f'as a list of words: {name} = ["--flag", "value"]'
    return None


def expected_words(wanted: Any) -> str:
    """A type in words, for people who write configuration files."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return expected_words(next(part for part in arguments if part is not type(None)))
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if origin is list:
        return "a list of texts"
    if origin is dict:
        return "a table of texts"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[wanted]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "the text " + msgspec.json.encode(value if len(value) <= _SHOWN else value[:_SHOWN] + "…").decode()
    if isinstance(value, (int, float)):
        return f"the number {value}" if isinstance(value, float) or abs(value) <= _MOST else "a very large number"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    return "a date or time"


# ---------------------------------------------------------------------------------------------- variables


def from_text(text: str, key: str, wanted: Any) -> Any:
    """The value of an environment variable. Lists are split as a shell would; tables are ``A=x B=y``.

    Raises :class:`SettingError` when the text is none of the type.
    """
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return from_text(text, key, next(part for part in arguments if part is not type(None)))
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise SettingError(key, "not UTF-8 text")
    if origin is list:
        return _words(text, key)
    if origin is dict:
        pairs = [word.partition("=") for word in _words(text, key)]
        if any(not separator for _, separator, _ in pairs):
            raise SettingError(key, "expected NAME=value words")
        return {name: value for name, _, value in pairs}
    if wanted is bool:
        lowered = text.strip().lower()
        if lowered not in _TRUE + _FALSE:
            raise _wrong(key, bool, text)
        return lowered in _TRUE
    if wanted in (int, float):
        try:
            return wanted(text.strip())
        except ValueError:
            raise _wrong(key, wanted, text) from None
    return _value(text, wanted, key)


def _words(text: str, key: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise SettingError(key, "a quote is not closed") from None
