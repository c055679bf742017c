"""A deployment as the text of ``loadmaster.toml``: every key with what it means, defaults commented out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from loadmaster.core.deployment import Deployment
from loadmaster.core.tables import load_toml

_WIDTH = 100
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def setting_keys() -> Iterator[str]:
    """Every key of the configuration, its section in front: "model", "engine.port"."""
    for field in msgspec.structs.fields(Deployment):
        if is_section(field.type):
            yield from (f"{field.name}.{inner.name}" for inner in msgspec.structs.fields(field.type))
        else:
            yield field.name


def setting_type(key: str) -> Any:
    """The type of a key's value."""
    holder: Any = Deployment
    for name in key.split("."):
        holder = next(field.type for field in msgspec.structs.fields(holder) if field.name == name)
    return holder


def setting_value(deployment: Deployment, key: str) -> Any:
    value: Any = deployment
    for name in key.split("."):
        value = getattr(value, name)
    return value


def is_section(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, Struct)


def deployment_text(deployment: Deployment, notes: Mapping[str, str] | None = None) -> str:
    """TOML that reads back as ``deployment``. ``notes``: a key, or a flag in ``engine.flags``, → a comment above it."""
    notes = notes or {}
    lines = [f'# Deployment "{deployment.name}". Each value\'s origin: loadmaster config {deployment.name}']
    section = ""
    for key in setting_keys():
        holder, _, name = key.rpartition(".")
        if holder != section:
            lines += ["", f"[{holder}]"]
            section = holder
        elif not holder:
            lines.append("")
        lines += _entry(deployment, key, name, notes)
    return "\n".join(lines) + "\n"


def _entry(deployment: Deployment, key: str, name: str, notes: Mapping[str, str]) -> list[str]:
    about = load_toml("deployment-keys.toml")[key]
    value, default = setting_value(deployment, key), setting_default(key)
    lines = _comment(about["text"])
    if key in notes:
        lines += _comment(notes[key])
    if value != default or (about.get("written") and value is not None):
        if key == "engine.flags" and value:
            return lines + _flags(value, notes)
        return [*lines, f"{name} = {toml_value(value)}"]
    shown = about.get("example") if value is None else value
    return [*lines, f"# {name} = {toml_value(shown)}"]


def setting_default(key: str) -> Any:
    """The value of a key that is not given; :data:`msgspec.NODEFAULT` for one that must be."""
    holder: Any = Deployment
    *sections, name = key.split(".")
    for section in sections:
        holder = setting_type(section)
    field = next(field for field in msgspec.structs.fields(holder) if field.name == name)
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _comment(text: str, indent: str = "") -> list[str]:
    # a line end or a control character inside a comment would end it, or be refused by the parser
    plain = "".join(letter if letter >= " " and letter != "\x7f" else " " for letter in text)
    return textwrap.wrap(
        plain, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_long_words=False
    )


def _flags(words: list[str], notes: Mapping[str, str]) -> list[str]:
    """One line a flag with its values, each flag's note above."""
    lines = ["flags = ["]
    row: list[str] = []
    for word in words:
        if word.startswith("-") and row:
            lines.append(f"  {', '.join(row)},")
            row = []
        if word.startswith("-"):
            lines += _comment(notes.get(word.split("=", 1)[0], ""), "  ")
        row.append(toml_value(word))
    if row:
        lines.append(f"  {', '.join(row)},")
    return [*lines, "]"]


def toml_value(value: Any) -> str:
    """A text, number, truth value, list or table of these as one line of TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_escaped(letter) for letter in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{_key(key)} = {toml_value(item)}" for key, item in value.items())
        return "{ " + ", ".join(pairs) + " }" if value else "{}"
    return repr(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml_value(key)


def _escaped(letter: str) -> str:
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    return f"\\u{ord(letter):04x}" if letter < " " or letter == "\x7f" else letter
