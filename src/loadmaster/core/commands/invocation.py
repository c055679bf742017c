"""Finds the engine in the words of a command: behind ``nohup``, ``numactl``, ``uv run``, a shell, a container."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from loadmaster.core.commands.docker import read_run, run_start
from loadmaster.core.commands.found import MAX_DEPTH, CommandError, Found, looks_like_vllm
from loadmaster.core.commands.parameters import Variables
from loadmaster.core.commands.shell import Shell, Simple
from loadmaster.core.flagtable import flag_table

_SERVERS = frozenset(
    {
        "vllm.entrypoints.openai.api_server",
        "vllm.entrypoints.api_server",
        "vllm.entrypoints.openai.rpc.api_server",
        "vllm.entrypoints.launchers.api_server.entry",
    }
)
_PROGRAMS = frozenset({"vllm", "vllm.entrypoints.cli.main", "vllm.entrypoints.cli", "vllm.scripts", "vllm.__main__"})
_SHELLS = frozenset({"sh", "bash", "zsh", "dash", "ash", "ksh", "fish"})
_TALKERS = frozenset(
    [
        "echo",
        "printf",
        "grep",
        "egrep",
        "rg",
        "pkill",
        "pgrep",
        "ps",
        "kill",
        "killall",
        "sed",
        "awk",
        "which",
        "man",
        "help",
        "cat",
        "tail",
        "head",
        "less",
        "curl",
        "watch",
        "alias",
        "type",
        "apt",
        "apt-get",
        "pip",
        "pip3",
        "git",
        "wget",
        "export",
        "docker-compose",
    ]
)
MENTION = re.compile(r"\bvllm[\"',\]\s]+serve\b|vllm[./]entrypoints[./]|\bvllm\.entrypoints\b")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# Flags that hardly any other program has.
_TELLING = [
    "--tensor-parallel-size",
    "--max-model-len",
    "--gpu-memory-utilization",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--limit-mm-per-prompt",
    "--kv-cache-dtype",
    "--enable-prefix-caching",
    "--enforce-eager",
    "--served-model-name",
]


def basename(word: str) -> str:
    name = re.split(r"[/\\]", word)[-1]
    return name.removesuffix(".exe")


def engine_words(words: Sequence[str]) -> tuple[str, int, int] | None:
    """(kind, where the program begins, where its own words begin) of a vLLM server among ``words``."""
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        if basename(word) == "vllm" and following == "serve":
            return "serve", index, index + 2
        if basename(word) == "kubectl" and following == "run" and "--" in words[index:]:
            return "kubernetes", index, words.index("--", index) + 1
        if word == "-m" and following in _SERVERS:
            return "module", index, index + 2
        if word == "-m" and following in _PROGRAMS and words[index + 2 : index + 3] == ["serve"]:
            return "serve", index, index + 3
        if re.search(r"vllm[/\\]entrypoints[/\\](?:openai[/\\])?api_server\.py$", word):
            return "module", index, index + 1
        if re.search(r"vllm[/\\]entrypoints[/\\]cli[/\\]main\.py$", word) and following == "serve":
            return "serve", index, index + 2
    return None


def find(command: Simple, variables: Variables, depth: int = 0) -> Found | None:
    """The launch in one simple command, None if there is none."""
    words = command.words
    environment = {**variables.environment(), **command.assigned}
    start = run_start(words)
    if start is not None:
        return _container(words[start:], environment, depth)
    if basename(words[0]) in _TALKERS:
        return None
    found = _in_shell(words, variables, environment, depth)
    if found is not None:
        return found
    place = engine_words(words)
    if place is not None:
        kind, program, first = place
        return Found(kind=kind, words=list(words[first:]), env={**environment, **_assignments(words[:program])})
    for word in words:
        if any(blank in word for blank in " \t\n") and MENTION.search(word):
            found = find_in_text(word, variables, environment, depth + 1)
            if found is not None:
                return found
    return None


def _assignments(words: Sequence[str]) -> dict[str, str]:
    """``env A=1 B=2`` and ``sudo A=1``: what stands between the wrapper and the program."""
    return {match.group(1): match.group(2) for word in words if (match := _ASSIGNED.fullmatch(word))}


def _in_shell(words: Sequence[str], variables: Variables, environment: dict[str, str], depth: int) -> Found | None:
    """``bash -lc '...'``, wherever it stands in the words."""
    for index, word in enumerate(words):
        if basename(word) not in _SHELLS:
            continue
        script = shell_script(words[index + 1 :])
        if script is not None:
            inner = {**environment, **_assignments(words[:index])}
            return find_in_text(script, variables, inner, depth + 1)
    return None


def shell_script(words: Sequence[str]) -> str | None:
    """The text after ``-c`` among a shell's words. Several words are joined if the first is no command in itself."""
    for index, word in enumerate(words):
        if not word.startswith(("-", "+")):
            return None
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", word):
            rest = list(words[index + 1 :])
            while rest and rest[0].startswith("-") and rest[0] in ("-e", "-x", "-u", "-l", "--"):
                rest = rest[1:]
            if not rest:
                return None
            lone = not re.search(r"\s", rest[0]) and len(rest) > 1
            return " ".join(rest) if lone else rest[0]
    return None


def find_in_text(text: str, variables: Variables, environment: dict[str, str], depth: int) -> Found | None:
    """The launch in a text that a shell is given."""
    if depth > MAX_DEPTH:
        raise CommandError("commands are too deeply nested in each other", "give the inner command alone")
    inner = Variables(environment)
    inner.arrays.update(variables.arrays)
    for name, value in variables.values.items():
        inner.values.setdefault(name, value)
    shell = Shell(text, inner, depth)
    for command in shell.commands():
        found = find(command, inner, depth)
        if found is not None and (found.words or found.kind != "serve"):
            found.damage.extend(shell.damage)
            return found
    return None


def _container(words: Sequence[str], environment: dict[str, str], depth: int) -> Found | None:
    run = read_run(words, environment)
    found = entry(run.entrypoint.split() if run.entrypoint else [], run.words, run.image, run.env, depth)
    if found is None:
        return None
    found.kind = "docker-run"
    found.gpus = run.gpus
    found.shm_bytes = run.shm_bytes
    found.ipc_host = run.ipc_host
    found.mounts = run.mounts
    found.gpu_access = run.gpu_access or gpus_by_environment(run.env, run.image)
    return found


def gpus_by_environment(env: Mapping[str, str], image: str | None) -> bool:
    """Whether the container has its cards by other means: a default runtime that reads the environment, no cards."""
    named = {"NVIDIA_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"} & env.keys()
    return bool(named) or re.search(r"cpu|tpu|hpu|gaudi|neuron|xpu|rocm|ascend", image or "", re.IGNORECASE) is not None


def entry(
    entrypoint: Sequence[str], command: Sequence[str], image: str | None, env: dict[str, str], depth: int = 0
) -> Found | None:
    """The launch in a container that is given these words: its own entry point's flags, or a whole command.

    ``entrypoint``: [] for the image's own, which is the server of vLLM's images and ``vllm`` of some.
    """
    words = [*entrypoint, *command]
    found = None
    if words:
        found = find(Simple(1, words), Variables(env), depth)
    if found is None and not entrypoint:
        if list(command[:1]) == ["serve"]:
            found = Found(kind="serve", words=list(command[1:]), env=dict(env))
        elif (looks_like_vllm(image) or known_flags_in(command) >= 2) and not _other_program(command):
            found = Found(kind="serve", words=list(command), env=dict(env))
    elif found is None and basename(entrypoint[-1]) == "vllm" and list(command[:1]) == ["serve"]:
        found = Found(kind="serve", words=list(command[1:]), env=dict(env))
    if found is not None:
        found.image = image
    return found


def _other_program(command: Sequence[str]) -> bool:
    """Whether a container is told to run something that is no server of ours (``bash``, ``sleep infinity``)."""
    first = basename(command[0]) if command else ""
    return first in _SHELLS or first in ("python", "python3", "sleep", "tail", "pip", "nvidia-smi", "vllm", "ray")


def known_flags_in(words: Sequence[str]) -> int:
    """How many of the words are flags of vLLM; one that hardly any other program has counts twice."""
    options = flag_table(None).options
    count = 0
    for word in words:
        name = word.partition("=")[0].partition(".")[0].replace("_", "-") if word.startswith("--") else ""
        if name in options:
            count += 2 if name in _TELLING else 1
    return count
