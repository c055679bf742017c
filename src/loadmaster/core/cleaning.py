"""A launch without what the engine would refuse or does not need, each flag with the reason why it went."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from loadmaster.core.argv import with_flags
from loadmaster.core.checks.architecture import check_architecture
from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.facts import Change, LaunchArgs
from loadmaster.core.review import review

_VALUES = frozenset({"flag-value-invalid", "util-out-of-range"})


def cleaned(case: LaunchCase) -> tuple[LaunchArgs, tuple[Change, ...]]:
    """The launch that a recommendation starts from, and what was dropped from the one that was given."""
    launch, dropped = case.launch, []
    changes: dict[str, Any] = {}
    for item in review(case).launch:
        if item.severity != "error":
            continue
        for evidence in item.evidence:
            flag = evidence.text.split(" ")[0].partition("=")[0]
            unknown = item.code == "unknown-flag"
            if not unknown and (item.code not in _VALUES or (flag in launch.flags) is False):
                continue
            if unknown or flag not in changes:
                dropped.append(Change(flag, False, item.cause, launch.flags.get(flag, True)))
                changes |= {} if unknown else {flag: None}
    for item in check_architecture(case):
        if item.code == "trust-remote-code-unneeded":
            changes["--trust-remote-code"] = None
            dropped.append(Change("--trust-remote-code", False, f"not needed: {item.cause}", True))
    known = structs.replace(launch, unknown_flags=(), extra=(), extra_places=(), refused=())
    return with_flags(known, changes), tuple(dropped)
