"""Whether an engine's log shows the arguments that it was meant to start with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from loadmaster.core.secrets import is_secret_name

_ARGUMENTS = "non-default args: "  # vLLM 0.6 to 0.33: what differs from the defaults, as a Python dictionary
_SLOTS = re.compile(r"n_slots = (\d+), n_ctx_slot = (\d+)")  # llama.cpp, tools/server, when a model is loaded
_ENUMERATION = re.compile(r"<[\w.]+: '([^']*)'>")
_NUMBER = re.compile(r"-?[\d.]+(?:e[+-]?\d+)?")
_QUOTED = ("'{key}': ", '"{key}": ')


class Arguments(Struct, frozen=True):
    """Flags by what the log says: with the wanted value, with another one (flag, wanted, found), or not named."""

    shown: tuple[str, ...]
    other: tuple[tuple[str, str, str], ...]
    unnamed: tuple[str, ...]


def vllm_arguments(log: Sequence[str], flags: Mapping[str, Any]) -> Arguments | None:
    """Compare ``flags`` (long name → value) with the last such line of the log; None when it has none.

    A flag that has the engine's default value is not in that line, so "not named" is no contradiction.
    """
    line = next((line for line in reversed(log) if _ARGUMENTS in line), None)
    if line is None:
        return None
    text = line.split(_ARGUMENTS, 1)[1]
    shown, other, unnamed = [], [], []
    for flag, wanted in flags.items():
        if is_secret_name(flag):
            continue  # masked in the log, and not to be repeated here
        found = _value(text, flag.removeprefix("--").replace("-", "_"))
        if found is None:
            unnamed.append(flag)
        elif _same(found, wanted):
            shown.append(flag)
        else:
            other.append((flag, str(wanted), found))
    return Arguments(tuple(shown), tuple(other), tuple(unnamed))


def llamacpp_arguments(log: Sequence[str], slots: int | None, context: int | None) -> Arguments | None:
    """Compare the slots and the context of one with the last such line of the log; None when it has none."""
    found = next((match for line in reversed(log) if (match := _SLOTS.search(line))), None)
    if found is None:
        return None
    shown, other = [], []
    for flag, wanted, value in (("--parallel", slots, found.group(1)), ("--ctx-size", context, found.group(2))):
        if wanted is None:
            continue
        if wanted == int(value):
            shown.append(flag)
        else:
            other.append((flag, str(wanted), value))
    return Arguments(tuple(shown), tuple(other), ())


def _value(text: str, key: str) -> str | None:
    """The value behind a key, as written: a number, a word, a quoted text; ``...`` for a list or an object."""
    for quoted in _QUOTED:
        start = text.find(quoted.format(key=key))
        if start >= 0:
            rest = text[start + len(quoted.format(key=key)) :]
            if rest[:1] in ("[", "{"):
                return "..."
            if rest[:1] in ("'", '"'):
                return rest[1 : max(rest.find(rest[0], 1), 1)]
            return re.split(r"[,}]", rest, maxsplit=1)[0].strip()
    return None


def _same(found: str, wanted: Any) -> bool:
    if found == "..." or isinstance(wanted, (dict, list)):
        return True  # spelt too variously to be compared; that it is named is what can be seen
    if isinstance(wanted, bool):
        return found == str(wanted)
    if isinstance(wanted, str) and _NUMBER.fullmatch(found):
        return True  # a word for a number that the engine has put in its place: "auto"
    try:
        return float(found) == float(wanted)
    except (TypeError, ValueError):
        enumeration = _ENUMERATION.fullmatch(found)
        return str(wanted) == (enumeration.group(1) if enumeration else found)
