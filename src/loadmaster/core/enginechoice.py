"""Which vLLM release fits a machine and a model: driver, cards, Python, C library and architecture against data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from loadmaster.core.engineversion import version_key
from loadmaster.core.releasetable import architecture_runs, releases
from loadmaster.core.tables import load_toml

_DATA = "engine-requirements.toml"


class Machine(Struct, frozen=True, kw_only=True):
    """What decides. None: unknown, and then not held against a release. ``python``: (3, 11)."""

    driver: str | None = None
    compute_capability: tuple[int, int] | None = None  # of the least capable card
    python: tuple[int, int] | None = None
    glibc: str | None = None
    machine: str | None = None
    system: str = "Linux"


class Choice(Struct, frozen=True):
    """The release to install, or None and why not: the reason against each, newest first."""

    version: str | None
    refused: tuple[tuple[str, str], ...] = ()


def known_releases() -> tuple[str, ...]:
    """The releases that were looked at and whose needs are known, oldest first."""
    oldest = version_key(load_toml(_DATA)["vllm"]["oldest"])
    return tuple(release for release in releases() if version_key(release) >= oldest)


def choose_release(machine: Machine, architecture: str | None = None) -> Choice:
    """The newest release that fits the machine and has a class for the architecture (None: any)."""
    refused: list[tuple[str, str]] = []
    for release in reversed(known_releases()):
        against = next(objections(release, machine, architecture), None)
        if against is None:
            return Choice(release, tuple(refused))
        refused.append((release, against))
    return Choice(None, tuple(refused))


def objections(version: str, machine: Machine, architecture: str | None = None) -> Iterator[str]:
    """What speaks against a release, a clause each; nothing for what is unknown, such as a newer release's needs."""
    data = load_toml(_DATA)["vllm"]
    if machine.system != "Linux":
        yield f"vLLM's packages are for Linux, this is {machine.system}"
        return
    if machine.machine is not None and machine.machine not in data["machines"]:
        yield f"its packages are for {' and '.join(data['machines'])}, this is {machine.machine}"
    row = _row(version)
    if row is not None:
        yield from _row_objections(row, machine)
    if architecture is not None:
        yield from _architecture_objections(version, architecture)


def _row(version: str) -> dict[str, Any] | None:
    key = version_key(version)
    found = None
    for row in load_toml(_DATA)["vllm"]["rows"]:
        if key >= version_key(row["since"]):
            found = row
    return found


def _row_objections(row: dict[str, Any], machine: Machine) -> Iterator[str]:
    cuda = str(row["cuda"])
    needs = load_toml(_DATA)["cuda"][cuda.split(".")[0]]
    if machine.driver is not None and _numbers(machine.driver) < _numbers(needs["driver"]):
        yield f"it is built for CUDA {cuda}, which needs driver {needs['driver']}; this one is {machine.driver}"
    least = tuple(needs["compute_capability"])
    if machine.compute_capability is not None and machine.compute_capability < least:
        had = ".".join(map(str, machine.compute_capability))
        yield f"CUDA {cuda} needs compute capability {least[0]}.{least[1]}; the card has {had}"
    first, last = row["python"]
    if machine.python is not None and not _numbers(first) <= machine.python <= _numbers(last):
        yield f"it needs Python {first} to {last}; this one is {machine.python[0]}.{machine.python[1]}"
    if machine.glibc is not None and _numbers(machine.glibc) < _numbers(str(row["glibc"])):
        yield f"it needs glibc {row['glibc']}; this system has {machine.glibc}"


def _architecture_objections(version: str, architecture: str) -> Iterator[str]:
    runs = architecture_runs(architecture)
    if not runs:
        return  # no class in any release: transformers or the repository's own code is tried, in any of them
    key, first, last = version_key(version), runs[0][0], runs[-1][1]
    if key < version_key(first):
        yield f"{architecture} is there from {first} on"
    if last != releases()[-1] and key > version_key(last):
        yield f"{architecture} was taken out after {last}"


def refusal_words(choice: Choice) -> str:
    """The reasons of a refusal, each once, with the releases that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for version, reason in choice.refused:
        by_reason.setdefault(reason, []).append(version)
    parts = []
    for reason, versions in by_reason.items():
        span = versions[0] if len(versions) == 1 else f"{versions[-1]} to {versions[0]}"
        parts.append(f"{span}: {reason}")
    return "; ".join(parts)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
