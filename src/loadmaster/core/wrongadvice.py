"""Popular remedies in a launch that do not help against what failed, by ``data/wrong-advice.toml``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from msgspec import Struct, convert

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.engineversion import is_before
from loadmaster.core.facts import Evidence, Finding, Fix, LaunchArgs, Severity
from loadmaster.core.tables import load_toml

_LONGEST_VALUE = 120


class Advice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry; the fields are described in the file. ``{value}`` in ``says`` is the flag's value."""

    code: str
    severity: Severity
    says: str
    source: str
    flag: str | None = None
    values: tuple[str, ...] = ()
    above: float | None = None
    below: float | None = None
    environment: str | None = None
    contains: str = ""
    causes: tuple[str, ...] = ()
    not_causes: tuple[str, ...] = ()
    quantised: bool | None = None
    remove: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    since: str | None = None


@cache
def advice() -> tuple[Advice, ...]:
    """The whole table, in the order of the file."""
    return convert(load_toml("wrong-advice.toml")["advice"], tuple[Advice, ...])


def wrong_advice(
    launch: LaunchArgs, cause: str, quantised: bool | None, said: Sequence[str], version: str | None = None
) -> tuple[Finding, ...]:
    """Findings beside ``cause``, none of them an error. ``said``: codes that the log shows already.

    ``quantised``: whether the checkpoint is; None: not known, which counts as not.
    """
    found: dict[tuple[str, str], Finding] = {}
    for entry in advice():
        if entry.code in said or entry.code == cause or not _beside(entry, cause, quantised):
            continue
        if entry.since is not None and is_before(version, entry.since):
            continue
        shown = _shown(entry, launch)
        if shown is not None:
            item = _finding(entry, *shown)
            found.setdefault((entry.code, item.evidence[0].text), item)
    return tuple(found.values())


def _beside(entry: Advice, cause: str, quantised: bool | None) -> bool:
    if (entry.causes and cause not in entry.causes) or cause in entry.not_causes:
        return False
    return entry.quantised is None or entry.quantised is bool(quantised)


def _shown(entry: Advice, launch: LaunchArgs) -> tuple[str, str] | None:
    """What the launch has of it as (text, value); None where it has nothing."""
    if entry.environment is not None:
        value = launch.env.get(entry.environment)
        if value is None or entry.contains not in value:
            return None
        return f"{entry.environment}={value}", value
    if entry.flag is None or entry.flag not in launch.flags:
        return None
    given = launch.flags[entry.flag]
    if given is False or not _matches(entry, given):
        return None
    text = "" if given is True else _text(given)
    return f"{entry.flag} {text}".strip(), text


def _matches(entry: Advice, given: Any) -> bool:
    if entry.values and str(given) not in entry.values:
        return False
    if entry.above is None and entry.below is None:
        return True
    if isinstance(given, bool) or not isinstance(given, int | float):
        return False
    return (entry.above is None or given > entry.above) and (entry.below is None or 0 < given < entry.below)


def _finding(entry: Advice, text: str, value: str) -> Finding:
    return finding(
        entry.code,
        entry.says.replace("{value}", value),
        evidence=[Evidence("command", text)],
        fixes=[Fix("It can go.", remove=(*entry.remove, *entry.unset))] if entry.remove or entry.unset else (),
        severity=entry.severity,
        confidence="likely",
    )


def _text(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
