"""Why a text holds no launch that can be read: another engine, a misspelt word, no model."""

from __future__ import annotations

import difflib

from loadmaster.core.commands.found import CommandError
from loadmaster.core.commands.invocation import basename
from loadmaster.core.commands.shell import Shell
from loadmaster.core.tables import load_toml

_SUBCOMMANDS = ("serve", "chat", "complete", "bench", "collect-env", "run-batch", "launch")  # vLLM entrypoints/cli
_HINT = "give a `vllm serve ...` or `docker run ...` line, a compose file, a Kubernetes, supervisor or systemd file"


def other_engine(text: str) -> str | None:
    """The name of another engine that a command of the text starts; None if there is none."""
    engines = load_toml("other-engines.toml")["engine"]
    for words in _commands(text):
        for place, word in enumerate(words[:12]):
            module = place > 0 and words[place - 1] == "-m"
            if word.startswith("-") or (place and not module and words[place - 1].startswith("-")):
                continue
            for engine in engines:
                if (word if module else basename(word)) in engine["words"]:
                    return str(engine["name"])
    return None


def explain(text: str) -> CommandError:
    """What to tell about a text in which no launch was found."""
    engine = other_engine(text)
    if engine is not None:
        return CommandError(f"this starts {engine}; check reads commands of vLLM only so far", _HINT)
    for words in _commands(text):
        for place, word in enumerate(words):
            if basename(word) != "vllm":
                continue
            rest = words[place + 1 :]
            if rest[:1] == ["serve"]:
                return CommandError("the command names no model", "vllm serve MODEL ...")
            if not rest:
                return CommandError("vllm is given nothing to do", "vllm serve MODEL ...")
            near = difflib.get_close_matches(rest[0], _SUBCOMMANDS, 1)
            if rest[0] in _SUBCOMMANDS:
                return CommandError(f"vllm {rest[0]} starts no server", "check reads vllm serve MODEL ...")
            if near:
                return CommandError(f"vllm has no command {rest[0]!r}", f"did you mean vllm {near[0]}?")
    return CommandError("no vLLM command is in the text", _HINT)


def _commands(text: str) -> list[list[str]]:
    try:
        return [command.words for command in Shell(text).commands()][:200]
    except CommandError:
        return []
