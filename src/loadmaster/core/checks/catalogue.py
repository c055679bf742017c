"""Findings made from the catalogue ``core/data/findings.toml``: title and usual severity come from there."""

from __future__ import annotations

from collections.abc import Iterable

from loadmaster.core.facts import Confidence, Evidence, Finding, Fix, Severity
from loadmaster.core.tables import load_toml

_SEVERITY_RANK = {"error": 0, "warning": 1, "note": 2}
_CONFIDENCE_RANK = {"certain": 0, "likely": 1, "possible": 2}


def codes() -> tuple[str, ...]:
    """Every code there is, in the catalogue's order."""
    return tuple(load_toml("findings.toml"))


def usual_severity(code: str) -> Severity:
    """KeyError for a code that does not exist."""
    severity: Severity = load_toml("findings.toml")[code]["severity"]
    return severity


def finding(
    code: str,
    cause: str,
    *,
    evidence: Iterable[Evidence] = (),
    fixes: Iterable[Fix] = (),
    severity: Severity | None = None,
    confidence: Confidence = "certain",
) -> Finding:
    """A finding of a known code. ``severity`` None takes the usual one. KeyError for a code that does not exist."""
    entry = load_toml("findings.toml")[code]
    return Finding(
        code,
        severity or entry["severity"],
        entry["title"],
        cause,
        tuple(evidence),
        tuple(fixes),
        confidence,
    )


def order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The most severe first; within one severity the earliest cause of a start, then the surer one."""
    table = load_toml("findings.toml")

    def rank(item: Finding) -> tuple[int, int, int]:
        stage = int(table.get(item.code, {}).get("stage", 99))
        return _SEVERITY_RANK[item.severity], stage, _CONFIDENCE_RANK[item.confidence]

    return tuple(sorted(findings, key=rank))
