"""What the readers of pasted text hand over, and how it becomes a :class:`LaunchArgs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from loadmaster.core.argv import launch_from_settings, normalise_argv, parse_argv
from loadmaster.core.facts import GIB, KIB, MIB, Evidence, LaunchArgs

MAX_TEXT = 400_000  # characters; the longest scripts that start an engine have a tenth
MAX_LINE = 100_000
MAX_LINES = 20_000
MAX_DEPTH = 12


class CommandError(Exception):
    """The text is no launch that can be read. ``hint`` says what would help."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Found(Struct, kw_only=True):
    """One launch as the text has it: the engine's own words (or settings), and what stands around them.

    ``kind`` is one of ``LaunchArgs.kind``. ``gpus``: number of cards given outside the environment.
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
        )
        return msgspec.structs.replace(launch, argv=normalise_argv(launch))


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
