"""The engine's own API key, kept out of the process list where the engine takes it from its environment."""

from __future__ import annotations

from msgspec import structs

from loadmaster.engines.base import EngineCommand

_FLAG = "--api-key"
_VARIABLE = "VLLM_API_KEY"  # vLLM reads one key from it, in place of the flag


def without_key(command: EngineCommand, kind: str, *, container: bool) -> tuple[EngineCommand, bool]:
    """The command with vLLM's key in its environment, and whether a key still stands in the command line."""
    words = list(command.argv)
    place = next((at for at, word in enumerate(words) if word == _FLAG or word.startswith(f"{_FLAG}=")), None)
    if place is None:
        return command, any(word.startswith("api_keys=") for word in words)
    end = place + 1
    if words[place] == _FLAG:
        while end < len(words) and not words[end].startswith("-"):
            end += 1
        values = words[place + 1 : end]
    else:
        values = [words[place].partition("=")[2]]
    if kind != "vllm" or container or len(values) != 1 or _VARIABLE in command.env:
        return command, True
    argv = tuple(words[:place] + words[end:])
    return structs.replace(command, argv=argv, env={**command.env, _VARIABLE: values[0]}), False
