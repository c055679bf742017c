"""One flag's value between the text of a command line and what it means.

``read_value`` reads as the engine's argument parser does; a text that it would refuse stays text, with the reason.
``write_value`` is its inverse: ``read_value(flag, write_value(flag, value))`` gives ``value`` again.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from loadmaster.core.flagtable import Flag

# JSON readers elsewhere hold integers in 64 bits.
_LARGEST_INTEGER = (1 << 63) - 1
_HUMAN = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)([kKmMgGtT])")
_HUMAN_IN_JSON = re.compile(r"\b\d{1,30}(?:\.\d{1,30})?[kKmMgGtT]\b")
_JSON_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_PAIRS = re.compile(r"\s*[A-Za-z_]\w*\s*=\s*\d{1,18}\s*(,\s*[A-Za-z_]\w*\s*=\s*\d{1,18}\s*)*")
_MAX_JSON = 200_000
_MAX_DEPTH = 60
JSON_KINDS = frozenset({"json", "json-or-str", "pairs"})


class ValueRefusedError(ValueError):
    """The engine would not take this text. ``args[0]`` says why, in words that follow the flag's name."""


def human_integer(text: str) -> int:
    """``32k`` -> 32000, ``32K`` -> 32768, ``1.5m`` -> 1500000; decimals only before a small letter."""
    text = text.strip()
    match = _HUMAN.fullmatch(text)
    if match is None:
        return integer(text)
    number, unit = match.groups()
    power = _POWERS[unit.lower()]
    if unit.islower():
        return _bounded(int(float(number) * 1000**power))
    if "." in number:
        raise ValueRefusedError(f"{text!r} has decimals before {unit}, which counts in 1024s")
    return _bounded(int(number) * 1024**power)


def integer(text: str) -> int:
    if len(text) > 40:
        raise ValueRefusedError("is no whole number")
    try:
        return _bounded(int(text))
    except ValueError as error:
        raise ValueRefusedError(f"{text!r} is no whole number") from error


def _bounded(number: int) -> int:
    if abs(number) > _LARGEST_INTEGER:
        raise ValueRefusedError("does not fit in 64 bits")
    return number


def real(text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise ValueRefusedError(f"{text[:60]!r} is no number") from error
    if not math.isfinite(number):
        raise ValueRefusedError(f"{text[:60]!r} is no finite number")
    return number


def json_value(text: str) -> Any:
    """Strict JSON: no NaN, numbers that fit, at most 60 levels. Raises :class:`ValueRefusedError`."""
    if len(text) > _MAX_JSON or _depth(text) > _MAX_DEPTH:
        raise ValueRefusedError("is too large or too deeply nested")
    try:
        return json.loads(text, parse_int=integer, parse_float=real, parse_constant=_no_constant)
    except ValueRefusedError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueRefusedError(f"{_short(text)} is no valid JSON") from error


def _no_constant(text: str) -> Any:
    raise ValueRefusedError(f"{text} is no valid JSON")


def _depth(text: str) -> int:
    """An upper bound of the nesting: brackets inside strings count too."""
    depth = deepest = 0
    for character in text:
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def expand_human_numbers(text: str) -> str:
    """``{"a": 80m}`` -> ``{"a": 80000000}``; what stands in quotes stays."""
    parts = _JSON_STRING.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = _HUMAN_IN_JSON.sub(lambda match: str(human_integer(match.group())), parts[index])
    return "".join(parts)


def pairs(text: str) -> dict[str, int]:
    """``image=4,video=0`` -> {"image": 4, "video": 0}."""
    if not _PAIRS.fullmatch(text):
        raise ValueRefusedError(f"{_short(text)} is not of the form name=number,name=number")
    found: dict[str, int] = {}
    for item in text.split(","):
        name, number = item.split("=", 1)
        found[name.strip().lower()] = int(number)
    return found


def dotted_value(text: str, human: bool) -> Any:
    """The value of ``--flag.key text``: JSON, else a human-readable integer, else the text itself."""
    try:
        return json_value(text)
    except ValueRefusedError:
        pass
    if human:
        try:
            return human_integer(text)
        except ValueRefusedError:
            pass
    return text


def _json_of(flag: Flag, text: str, features: frozenset[str]) -> tuple[Any, str | None]:
    try:
        return json_value(text), None
    except ValueRefusedError as error:
        reason = str(error)
    if "dotted-human" in features:
        try:
            return json_value(expand_human_numbers(text)), None
        except ValueRefusedError:
            pass
    if "pairs" in flag.kinds and _PAIRS.fullmatch(text):
        reason = "takes JSON in this version, no longer name=number"
        return pairs(text), None if "pairs-for-json" in features else reason
    return text, reason


def read_value(flag: Flag, text: str, features: frozenset[str] = frozenset()) -> tuple[Any, str | None]:
    """(value, why the engine would refuse it or None) of one value's text. A refused text stays text.

    A form that another version takes is read too, and said to be refused: ``32k`` for a plain integer.
    ``features``: what the version's parser understands (``FlagTable.features``).
    """
    kind = flag.kind
    try:
        if kind == "int":
            return integer(text), None
        if kind == "human":
            return human_integer(text), None
        if kind == "human-auto":
            return (-1 if text.strip().lower() == "auto" else human_integer(text)), None
        if kind == "float":
            return real(text), None
        if kind == "truth":
            return _truth(text), None
        if kind == "pairs":
            return pairs(text), None
    except ValueRefusedError as error:
        return _other_form(flag, text, str(error))
    if kind == "json" or (kind == "json-or-str" and re.fullmatch(r"(?s)\s*\{.*\}\s*", text)):
        return _json_of(flag, text, features)
    return text, None


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueRefusedError(f"{text[:60]!r} is neither true nor false")
    return text.lower() == "true"


def _other_form(flag: Flag, text: str, reason: str) -> tuple[Any, str]:
    """What another version would make of a text that this one refuses."""
    if flag.kind == "int" and ("human" in flag.kinds or "human-auto" in flag.kinds):
        try:
            return human_integer(text), f"{text!r} is no whole number for this version"
        except ValueRefusedError:
            pass
    if flag.kind == "pairs" and "json" in flag.kinds:
        try:
            return json_value(text), "takes name=number in this version, JSON only later"
        except ValueRefusedError:
            pass
    return text, reason


def write_value(flag: Flag, value: Any) -> str:
    """One value as one word of a command line."""
    if flag.kind in JSON_KINDS:
        if isinstance(value, str) and read_value(flag, value)[0] == value:
            return value
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list) or value is None:
        return json.dumps(value, ensure_ascii=False)
    return str(value)
