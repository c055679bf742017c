"""A Dockerfile -> the launch of the image that it builds: ENTRYPOINT and CMD together, as the daemon joins them."""

from __future__ import annotations

import json
import re
import shlex

from msgspec import Struct, field

from loadmaster.core.commands.found import Found
from loadmaster.core.commands.invocation import entry

_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*$", re.IGNORECASE | re.MULTILINE)
_START = re.compile(r"^\s*(?:ENTRYPOINT|CMD)\s+\S", re.IGNORECASE | re.MULTILINE)
_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)\s+(.*)", re.DOTALL)
_SHELL = ["/bin/sh", "-c"]


class _Stage(Struct):
    image: str
    entrypoint: list[str] | None = None
    command: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)


def is_dockerfile(text: str) -> bool:
    """Whether the text says how an image is built, and what it starts."""
    return _FROM.search(text) is not None and _START.search(text) is not None


def read_dockerfile(text: str) -> Found | None:
    """The launch of the last stage; None when what it starts is no engine."""
    stages: dict[str, _Stage] = {}
    stage: _Stage | None = None
    for name, rest in _instructions(text):
        if name == "FROM":
            match = _FROM.match(f"FROM {rest}")
            if match is None:
                return None
            base = stages.get(match[1].lower())
            stage = (
                _Stage(match[1])
                if base is None
                else _Stage(base.image, base.entrypoint, base.command, dict(base.environment))
            )
            if match[2]:
                stages[match[2].lower()] = stage
        elif stage is None:
            continue
        elif name == "ENTRYPOINT":
            stage.entrypoint, stage.command = _words(rest), None  # a new entry point drops the base's command
        elif name == "CMD":
            stage.command = _words(rest)
        elif name == "ENV":
            stage.environment |= _environment(rest)
    if stage is None or (stage.entrypoint is None and stage.command is None):
        return None
    own = stage.entrypoint or []
    if own[:2] == _SHELL:
        return _named(entry(own, [], stage.image, stage.environment, 0), stage)  # a shell's text takes no words
    return _named(entry(own, stage.command or [], stage.image, stage.environment, 0), stage)


def _named(found: Found | None, stage: _Stage) -> Found | None:
    if found is not None:
        found.image = stage.image
    return found


def _instructions(text: str) -> list[tuple[str, str]]:
    """Instructions in upper case with their arguments, continued lines joined, comments left out."""
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    found = (_INSTRUCTION.match(line) for line in joined.split("\n"))
    return [(match[1].upper(), match[2].strip()) for match in found if match is not None]


def _words(rest: str) -> list[str]:
    """``["a", "b"]`` as it is, other text as the shell's."""
    try:
        words = json.loads(rest)
    except (ValueError, RecursionError):
        return [*_SHELL, rest]
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else [*_SHELL, rest]


def _environment(rest: str) -> dict[str, str]:
    """``A=1 B="2 3"``, or the old ``A 1``."""
    name, _, value = rest.partition(" ")
    if "=" not in name:
        return {name: value.strip()} if value else {}
    try:
        words = shlex.split(rest)
    except ValueError:
        return {}
    pairs = (word.partition("=") for word in words if "=" in word)
    return {key: text for key, _, text in pairs}
