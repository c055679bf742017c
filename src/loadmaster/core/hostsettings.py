"""llama-server's flags as settings: what is given, else the engine's default.

Flags, their aliases and the defaults are data (llamacpp.toml).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from msgspec import Struct

from loadmaster.core.facts import LaunchArgs, ModelFacts
from loadmaster.core.tables import load_toml

_NUMBER = re.compile(r"-?\d+\Z")
_LIMIT = 1 << 31
CACHE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q5_0", "Q5_1")


class HostFlags(Struct, frozen=True, kw_only=True):
    """Flags by long name; ``unknown``: names that no flag of the table has; ``bad``: (flag, value, what it must be)."""

    values: dict[str, Any]
    unknown: tuple[str, ...] = ()
    bad: tuple[tuple[str, str, str], ...] = ()


class HostSettings(Struct, frozen=True, kw_only=True):
    """What decides memory. ``context``: cells of the cache over all slots; ``context_per_slot``: what one request has.

    ``streams``: separate caches; 1 when the slots share one.
    """

    context: int
    context_per_slot: int
    slots: int
    streams: int
    unified: bool
    micro_batch: int
    cache_type_k: str
    cache_type_v: str
    flash_attention: bool
    full_window_cache: bool
    memory_map: bool
    lock: bool
    repack: bool
    projector: bool
    warm_up: bool
    image_max_tokens: int | None
    cache_ram_bytes: int | None  # None: without limit
    checkpoints: int
    gpu_layers: str | None
    context_given: bool
    shortened_from: int | None = None
    fit: bool


@cache
def _flags() -> tuple[dict[str, dict[str, Any]], dict[str, tuple[dict[str, Any], bool]]]:
    by_name: dict[str, dict[str, Any]] = {}
    by_spelling: dict[str, tuple[dict[str, Any], bool]] = {}
    for entry in load_toml("llamacpp.toml")["flag"]:
        by_name[entry["name"]] = entry
        for spelling in (entry["name"], *entry["aliases"]):
            by_spelling[spelling] = (entry, True)
        for spelling in entry.get("negative", ()):
            by_spelling[spelling] = (entry, False)
    return by_name, by_spelling


def parse_flags(tokens: Sequence[str]) -> HostFlags:
    """Read llama-server's flags. A leading program name is passed over; the last of two equal flags wins."""
    _, spellings = _flags()
    values: dict[str, Any] = {}
    unknown: list[str] = []
    bad: list[tuple[str, str, str]] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if not token.startswith("-") or _NUMBER.match(token):
            continue
        name, joined, inline = token.partition("=")
        spelt = name.replace("_", "-") if name.startswith("--") else name
        found = spellings.get(spelt)
        follows = at < len(tokens) and (not tokens[at].startswith("-") or _NUMBER.match(tokens[at]) is not None)
        if found is None:
            unknown.append(name)
            if not joined and follows:
                at += 1
            continue
        entry, positive = found
        if entry["takes"] == "switch":
            values[entry["name"]] = positive
            continue
        if joined:
            raw = inline
        elif follows and (entry.get("default") is None or tokens[at] in entry.get("choices", ())):
            raw = tokens[at]
            at += 1
        elif entry.get("default") is not None:
            raw = entry["default"]
        else:
            bad.append((name, "", "a value"))
            continue
        value, wanted = _value(entry, raw)
        if wanted is None:
            values[entry["name"]] = value
        else:
            bad.append((name, raw, wanted))
    return HostFlags(values=values, unknown=tuple(unknown), bad=tuple(bad))


def _value(entry: dict[str, Any], raw: str) -> tuple[Any, str | None]:
    """The value, and what it should be when it is not."""
    takes = entry["takes"]
    if takes == "count":
        if not _NUMBER.match(raw) or not -1 <= int(raw) < _LIMIT:
            return None, "a whole number"
        return int(raw), None
    if takes == "type":
        if raw.upper() not in CACHE_TYPES:
            return None, "one of " + ", ".join(kind.lower() for kind in CACHE_TYPES)
        return raw.upper(), None
    choices = entry.get("choices")
    if choices is not None and raw not in choices:
        return None, "one of " + ", ".join(choices)
    return raw, None


def launch_flags(launch: LaunchArgs) -> HostFlags:
    """The flags of a launch: those that somebody parsed, else the tokens in ``argv``."""
    if not launch.flags:
        return parse_flags(launch.argv or launch.extra)
    tokens: list[str] = []
    for name, value in launch.flags.items():
        if value is True:
            tokens.append(name)
        elif value is False:
            _, spellings = _flags()
            entry = spellings.get(name, ({}, True))[0]
            tokens.append(next(iter(entry.get("negative", ())), f"--no-{name.removeprefix('--')}"))
        elif value is not None:
            tokens += [name, str(value)]
    return parse_flags(tokens)


def pad(value: int, step: int) -> int:
    return -(-value // step) * step


def host_settings(flags: HostFlags, model: ModelFacts, *, context: int | None = None) -> HostSettings | None:
    """The effective settings; None when no context is given and the model does not say one.

    ``context`` takes the place of ``--ctx-size``.
    """
    table = load_toml("llamacpp.toml")
    default, step = table["defaults"], table["padding"]["context"]
    given = flags.values

    slots = given.get("--parallel", default["parallel"])
    automatic = slots < 1
    if automatic:
        slots = default["auto_parallel"]
    unified = bool(given.get("--kv-unified", automatic))
    wanted = context if context is not None else given.get("--ctx-size", default["context"])
    total = wanted if wanted and wanted > 0 else None
    if total is None and model.text.max_position_embeddings:
        # the model's own context, for each slot that has a cache of its own
        total = model.text.max_position_embeddings * (1 if unified else slots)
    if not total:
        return None
    batch = _positive(given.get("--batch-size"), default["batch"])
    micro = _positive(given.get("--ubatch-size"), default["micro_batch"])
    micro_batch = min(total, batch, micro)
    cells = pad(total, step)
    per_slot = cells if unified else pad(cells // slots, step) or step
    streams = 1 if unified else slots
    cache_ram = given.get("--cache-ram", default["cache_ram_mib"])
    return HostSettings(
        context=per_slot * streams,
        context_per_slot=per_slot,
        slots=slots,
        streams=streams,
        unified=unified,
        micro_batch=micro_batch,
        cache_type_k=given.get("--cache-type-k", default["cache_type_k"]),
        cache_type_v=given.get("--cache-type-v", default["cache_type_v"]),
        flash_attention=given.get("--flash-attn", default["flash_attention"]) != "off",
        full_window_cache=bool(given.get("--swa-full", False)),
        memory_map=bool(given.get("--mmap", True)),
        lock=bool(given.get("--mlock", False)),
        repack=bool(given.get("--repack", True)),
        projector=bool(given.get("--mmproj-auto", True)),
        warm_up=bool(given.get("--warmup", True)),
        image_max_tokens=_positive(given.get("--image-max-tokens"), None),
        cache_ram_bytes=None if cache_ram < 0 else cache_ram << 20,
        checkpoints=max(0, given.get("--ctx-checkpoints", default["context_checkpoints"])),
        gpu_layers=given.get("--n-gpu-layers"),
        context_given=bool(wanted and wanted > 0),
        fit=given.get("--fit", "on") != "off",
    )


def _positive(value: Any, default: Any) -> Any:
    return value if isinstance(value, int) and value > 0 else default
