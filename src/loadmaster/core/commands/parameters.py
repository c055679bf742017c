"""Shell variables: what a text has set, and ``$X``, ``${X:-default}``, ``${X##*/}`` filled in from it.

A variable that the text does not give stays as written.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from loadmaster.core.commands.found import MAX_DEPTH, CommandError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_VALUE = 200_000  # characters


def joined(pieces: Iterable[str]) -> str:
    """The pieces as one text. Raises :class:`CommandError` when variables blow it up."""
    kept: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_VALUE:
            raise CommandError("variables make a word too long", "give the command with its values")
        kept.append(piece)
    return "".join(kept)


class Variables:
    """What the text has set so far."""

    def __init__(self, values: dict[str, str] | None = None) -> None:
        self.values: dict[str, str] = dict(values or {})
        self.arrays: dict[str, list[str]] = {}
        self.exported: set[str] = set(self.values)
        self.export_all = False

    def assign(self, name: str, value: str, export: bool = False) -> None:
        self.values[name] = value
        self.arrays.pop(name, None)
        if export or self.export_all:
            self.exported.add(name)

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in self.values.items() if name in self.exported}


def expand_parameter(inner: str, source: str, variables: Variables, depth: int = 0, unquote: bool = True) -> str:
    """``${inner}``: the variable's value, its default, or ``source`` when the text does not give it.

    ``unquote``: quotes around a default are taken off, as a shell does and Compose does not.
    """
    if depth > MAX_DEPTH:
        raise CommandError("variables are too deeply nested", "give the command with its values")
    name = _NAME.match(inner) or re.match(r"[0-9@*]", inner)
    if name is None:
        return source
    value = variables.values.get(name.group())
    if value is None and name.group() in variables.arrays:
        value = (variables.arrays[name.group()] or [""])[0]
    rest = inner[name.end() :]
    if not rest:
        return source if value is None else value
    operator = re.match(r":?[-=?+]", rest)
    if operator:
        return _default(
            name.group(), value, operator.group(), rest[operator.end() :], source, variables, depth, unquote
        )
    return source if value is None else _edited(value, rest, source)


def _default(
    name: str,
    value: str | None,
    operator: str,
    word: str,
    source: str,
    variables: Variables,
    depth: int,
    unquote: bool,
) -> str:
    given = value is not None and (value != "" or not operator.startswith(":"))
    if operator.endswith("+"):
        return expand_text(word, variables, depth + 1, unquote) if given else (source if value is None else "")
    if given and value is not None:
        return value
    if operator.endswith("?"):
        return source
    default = expand_text(word, variables, depth + 1, unquote)
    if operator.endswith("="):
        variables.assign(name, default)
    return default


def _edited(value: str, rest: str, source: str) -> str:
    """``${X##*/}``, ``${X%.*}``, ``${X/a/b}``, ``${X,,}``."""
    for operator in ("##", "#", "%%", "%"):
        if rest.startswith(operator):
            return _trimmed(value, operator, rest[len(operator) :])
    if rest.startswith("/"):
        everywhere = rest.startswith("//")
        old, _, new = rest.lstrip("/").partition("/")
        return value.replace(old, new) if everywhere else value.replace(old, new, 1)
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    return source


def _trimmed(value: str, operator: str, pattern: str) -> str:
    lengths = range(len(value) + 1)
    if operator in ("##", "%"):
        lengths = range(len(value), -1, -1)
    for length in lengths if len(value) < 4096 else ():
        if operator.startswith("#") and fnmatch.fnmatchcase(value[:length], pattern):
            return value[length:]
        if operator.startswith("%") and fnmatch.fnmatchcase(value[length:], pattern):
            return value[:length]
    return value


def expand_text(text: str, variables: Variables, depth: int = 0, unquote: bool = True) -> str:
    """The text with ``$X``, ``${X:-default}`` filled in; ``unquote``: one pair of quotes around it is taken off."""
    if depth > MAX_DEPTH:
        raise CommandError("variables are too deeply nested", "give the command with its values")
    if unquote and len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        if text[0] == "'":
            return text[1:-1]
        text = text[1:-1]
    return joined(_expanded(text, variables, depth, unquote))


def _expanded(text: str, variables: Variables, depth: int, unquote: bool) -> Iterable[str]:
    at = 0
    while at < len(text):
        dollar = text.find("$", at)
        if dollar < 0:
            break
        yield text[at:dollar]
        end = parameter_end(text, dollar)
        source = text[dollar:end]
        if source.startswith("${") and source.endswith("}"):
            yield expand_parameter(source[2:-1], source, variables, depth, unquote)
        elif len(source) > 1 and source[1] != "(":
            yield expand_parameter(source[1:], source, variables, depth)
        else:
            yield source
        at = end
    yield text[at:]


def parameter_end(text: str, dollar: int) -> int:
    """Where the expansion that begins at ``dollar`` ends."""
    if text.startswith("${", dollar):
        depth = 0
        for index in range(dollar + 1, len(text)):
            if text[index] == "{":
                depth += 1
            elif text[index] == "}":
                depth -= 1
                if depth == 0:
                    return index + 1
        return len(text)
    name = _NAME.match(text, dollar + 1)
    return name.end() if name else dollar + 1
