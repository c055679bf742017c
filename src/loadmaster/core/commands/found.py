"""What the readers of pasted text hand over, and how it becomes a :class:`LaunchArgs`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from loadmaster.core.argv import launch_from_settings, normalise_argv, parse_argv
from loadmaster.core.facts import GIB, KIB, MIB, Evidence, LaunchArgs

MAX_TEXT = 400_000  # characters; the longest scripts that start an engine have a tenth
MAX_LINE = 100_000
MAX_LINES = 20_000
MAX_DEPTH = 12
CUT = "the shell never sees what follows"  # how damage says that words are lost


class CommandError(Exception):
    """The text is no launch that can be read. ``hint`` says what would help."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class NoSuchService(CommandError):
    """The text holds launches, and none of them has the name that was asked for."""


class Found(Struct, kw_only=True):
    """One launch as the text has it: the engine's own words (or settings), and what stands around them.

    ``kind`` is one of ``LaunchArgs.kind``. ``gpus``: number of cards given outside the environment. ``command``: the
    shell's words that start it, assignments in front included. ``whole``: the same launch with damage put right.
    """

    kind: str
    words: list[str] = field(default_factory=list)
    settings: dict[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)
    image: str | None = None
    gpus: int | None = None
    shm_bytes: int | None = None
    ipc_host: bool | None = None
    damage: list[Evidence] = field(default_factory=list)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    gpu_access: bool | None = None
    name: str | None = None
    others: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    whole: Found | None = None

    def launch(self, engine_version: str | None = None) -> LaunchArgs:
        """``engine_version`` goes before the one that the image's tag names."""
        version = engine_version or image_version(self.image)
        if self.settings is not None:
            launch = launch_from_settings(self.settings, engine_version=version, env=self.env)
        else:
            launch = parse_argv(self.words, engine_version=version, env=self.env)
        launch = msgspec.structs.replace(
            launch,
            kind=self.kind,
            image=self.image,
            visible_gpus=visible_gpus(self.env, self.gpus),
            shm_bytes=self.shm_bytes,
            ipc_host=self.ipc_host,
            damage=tuple(self.damage),
            mounts=tuple(self.mounts),
            gpu_access=self.gpu_access,
            name=self.name,
            others=tuple(self.others),
        )
        if self.whole is not None:
            whole = self.whole.launch(engine_version)
            launch = msgspec.structs.replace(launch, whole=whole, repaired=self.whole.line() or None)
        return msgspec.structs.replace(launch, argv=normalise_argv(launch))

    def line(self) -> str:
        """The command as one line of a shell, with the variables that the text sets; empty if it is no shell's."""
        if not self.command:
            return ""
        words = list(self.command)
        if self.kind in ("serve", "module"):
            said = {word.partition("=")[0] for word in words}
            words[:0] = [f"{name}={value}" for name, value in self.env.items() if name not in said]
        return " ".join(quoted(word) for word in words)


def quoted(word: str) -> str:
    """The word as a shell must be given it; a variable in it that the text does not set stays one."""
    name, equals, value = word.partition("=")
    if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
        return f"{name}={quoted(value)}"
    if word.startswith("~/"):
        return "~/" + quoted(word[2:])
    if "$" in word and not re.search(r"[\"`\\]", word):
        return f'"{word}"' if re.search(r"[^\w$@%+=:,./{}-]", word) else word
    return shlex.quote(word) if word else "''"


def choose(launches: Sequence[Found], name: str | None) -> Found | None:
    """The launch of that name, the first one without a name; it carries the names of the others.

    Raises :class:`NoSuchService` for a name that there is not.
    """
    names = [launch.name or "(unnamed)" for launch in launches]
    if name is not None:
        for launch in launches:
            if launch.name == name:
                return launch
        there = ", ".join(names) or "none"
        raise NoSuchService(f"no service {name!r} runs vLLM in the text", f"services that do: {there}")
    if not launches:
        return None
    launches[0].others = names[1:]
    return launches[0]


def is_path(text: str) -> bool:
    """Whether a volume's source is a path of the host, not the name of a volume."""
    return text.startswith((".", "/", "~", "$")) or re.match(r"[A-Za-z]:[\\/]", text) is not None


def mount_of(text: str) -> tuple[str, str] | None:
    """``host:container[:options]``; None for a named or an anonymous volume."""
    drive = re.match(r"[A-Za-z]:[\\/]", text)
    start = 2 if drive else 0
    # a colon inside ${X:-default} does not part the two
    plain = re.sub(r"\$\{[^{}]*\}", lambda match: match.group().replace(":", "\0"), text)
    head, colon, rest = plain[start:].partition(":")
    source = (plain[:start] + head).replace("\0", ":")
    target = rest.partition(":")[0].replace("\0", ":")
    return (source, target) if colon and target.startswith("/") and is_path(source) else None


# ---------------------------------------------------------------------------------------------- images

_VERSION = r"(\d+\.\d+\.\d+(?:\.\d+)?(?:\.?(?:post|rc|dev|a|b)\d+)?)"
_NAMED = re.compile(r"vllm[-_]?v?" + _VERSION)
_TAG = re.compile(r"v?" + _VERSION + r"(?![\d.])")


def image_version(image: str | None) -> str | None:
    """``vllm/vllm-openai:v0.11.0`` -> "0.11.0"; None for "latest", a digest, or an image that is not vLLM's."""
    if not image or "vllm" not in image.lower():
        return None
    name, _, tag = image.split("@", 1)[0].rpartition(":")
    if not name or "/" in tag or "lmcache" in name:
        return None
    found = _NAMED.search(tag.lower()) or _TAG.match(tag.lower())
    # vLLM is below 2; a tag such as 25.09.1 counts the image's own releases
    return found.group(1) if found and int(found.group(1).split(".")[0]) < 2 else None


def looks_like_vllm(image: str | None) -> bool:
    return bool(image) and "vllm" in str(image).lower()


# ---------------------------------------------------------------------------------------------- cards


def listed(text: str) -> int | None:
    """How many cards ``0,1`` or ``GPU-uuid,GPU-uuid`` lists; None for all, for a variable or for nothing known."""
    text = text.strip().strip("\"'")
    if text.lower() in ("all", "void") or "$" in text or "%" in text:
        return None
    if text.lower() in ("", "none", "nodevfiles", "no"):
        return 0
    count = 0
    for item in text.split(","):
        if item.strip().startswith("-"):  # CUDA stops at the first invalid index
            break
        count += 1
    return count


def visible_gpus(env: Mapping[str, str], given: int | None) -> int | None:
    """The number of cards that the engine sees, by what the text says; None when it says nothing."""
    counts = [] if given is None else [given]
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in env:
            count = listed(env[name])
            if count is not None:
                counts.append(count)
    return min(counts) if counts else None


# ---------------------------------------------------------------------------------------------- sizes

_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": GIB * 1024, "p": GIB * 1024**2}


def docker_size(text: str) -> int | None:
    """``16gb``, ``10.24g``, ``2g``, ``1073741824``: bytes, all units being powers of 1024 there."""
    found = _SIZE.fullmatch(text)
    return int(float(found.group(1)) * _UNITS[found.group(2).lower()]) if found else None


def kubernetes_size(text: str) -> int | None:
    """``16Gi`` is 16 x 2^30, ``16G`` 16 x 10^9."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([KMGTPk]?)(i?)", text.strip())
    if found is None:
        return None
    number, unit, binary = found.groups()
    power = " kmgtp".index(unit.lower()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)
