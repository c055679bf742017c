"""Findings as text: what, why, the evidence, and a fix that can be pasted."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from loadmaster.core.facts import Evidence, Finding, Fix
from loadmaster.render.lines import wrap
from loadmaster.render.paint import Paint, plain
from loadmaster.render.units import plural

_STYLE = {"error": ("bold", "red"), "warning": ("bold", "yellow"), "note": ("bold", "blue")}
_EVIDENCE_SHOWN = 6


def findings_text(findings: Iterable[Finding], width: int = 80, paint: Paint = plain) -> str:
    """All findings, an empty line between them; empty when there is none."""
    return "\n\n".join(finding_text(finding, width, paint) for finding in findings)


def finding_text(finding: Finding, width: int = 80, paint: Paint = plain) -> str:
    head = paint(f"{finding.severity}[{finding.code}]", *_STYLE[finding.severity])
    sure = "" if finding.confidence == "certain" else f" ({finding.confidence})"
    lines = wrap(f"{finding.title}{sure}", width, f"{head}: ", "    ")
    if finding.cause and finding.cause != finding.title:
        lines += wrap(finding.cause, width, "  ")
    for evidence in finding.evidence[:_EVIDENCE_SHOWN]:
        lines += wrap(_where(evidence) + evidence.text, width, "  | ")
    if len(finding.evidence) > _EVIDENCE_SHOWN:
        lines.append(f"  | and {len(finding.evidence) - _EVIDENCE_SHOWN} more")
    for fix in finding.fixes:
        lines += _fix_lines(fix, width, paint)
    return "\n".join(lines)


def paste(fix: Fix) -> str:
    """What one pastes: variables, the flags to add or the command, and the flags to drop."""
    parts = [f"{name}={shlex.quote(value)}" for name, value in fix.env.items()]
    if fix.command:
        parts.append(fix.command)
    if fix.argv:
        parts.append(shlex.join(fix.argv))
    text = " ".join(parts)
    if fix.remove:
        drop = "drop " + " ".join(fix.remove)
        text = f"{text}   ({drop})" if text else drop
    return text


def summary(findings: Sequence[Finding]) -> str:
    """``2 errors, 1 warning, 3 notes``; ``no findings`` for none."""
    numbers = [(sum(f.severity == name for f in findings), name) for name in ("error", "warning", "note")]
    return ", ".join(plural(number, name) for number, name in numbers if number) or "no findings"


def _where(evidence: Evidence) -> str:
    place = evidence.path or evidence.source
    if evidence.line is not None:
        place += f" line {evidence.line}"
    return f"{place}: "


def _fix_lines(fix: Fix, width: int, paint: Paint) -> list[str]:
    """A fix that was planned again says ``fix:``, any other ``try:``. What is pasted stays on one line."""
    label = paint("fix:", "bold", "green") if fix.replanned else paint("try:", "bold")
    text = paste(fix)
    if not text:
        return wrap(fix.why, width, f"  {label} ", " " * 7)
    lines = [f"  {label} {text}"]
    if fix.why:
        lines += wrap(fix.why, width, " " * 7)
    return lines
