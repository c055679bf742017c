"""What a start died of: the earliest of what was seen that names a cause, and what else counts beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import GIB, Evidence, Finding, Severity
from loadmaster.core.logfacts import LogReadings
from loadmaster.core.startlog import SERVING, Seen, StartLog

_MASK = "engine-dead-masked"
_WAITING = "worker-not-answering"
_FREE, _HELD = "free-memory-below-request", "gpu-held-by-other-process"
# What a display and the engine's own context take of a card is nobody's fault.
_USUALLY_HELD_BYTES = 3 * GIB // 2
# So little missing is a matter of the utilisation, whoever holds the rest.
_LITTLE_BYTES = GIB // 2
_MOST_CAUSES = 6
_SEVERITIES = ("error", "warning", "note")
_MOST_EVIDENCE = 3


def findings_of(start: StartLog, readings: LogReadings) -> tuple[list[Seen], list[Finding], list[str]]:
    """What was seen that counts, the findings in their order, and what has to be said beside them."""
    notes: list[str] = []
    seen = [item for item in start.in_order() if not (item.hit.signature.stuck and start.went_on_after(item))]
    if start.phase == SERVING:
        seen = _since_ready(seen, notes)
    kinds: dict[str, list[Seen]] = {}
    for item in seen:
        kinds.setdefault(item.kind, []).append(item)
    causes, requests = kinds.get("cause", []), kinds.get("request", [])
    counting = [*causes, *requests]
    if not causes:
        counting += kinds.get("hint", [])
    if not counting:
        counting = kinds.get("symptom", [])
    elif not causes:
        counting += [item for item in kinds.get("symptom", []) if item.code != _MASK]
    counting += kinds.get("remark", [])
    counting = _without_lookalikes(counting)
    found = [_finding(group) for group in _by_code(counting)][: _MOST_CAUSES + len(kinds.get("remark", []))]
    found = _held_or_asked(found, readings)
    notes += _many_causes(causes)
    return counting, found, notes


def _since_ready(seen: Sequence[Seen], notes: list[str]) -> list[Seen]:
    """What came before the server answered did not keep it from answering."""
    kept: list[Seen] = []
    for item in seen:
        if item.kind in ("remark", "request") or item.phase == SERVING:
            kept.append(item)
        elif item.code == _WAITING:
            kept.append(_as_note(item))
        elif item.kind == "cause":
            notes.append(f"line {item.line} looks like {item.code}, but the start went on and the server answered")
    return kept


def _as_note(item: Seen) -> Seen:
    signature = replace(item.hit.signature, severity="note", kind="remark")
    return replace(item, hit=replace(item.hit, signature=signature))


def _without_lookalikes(seen: Sequence[Seen]) -> list[Seen]:
    codes = {item.code for item in seen}
    return [item for item in seen if not codes & (set(item.hit.signature.yields_to) - {item.code})]


def _by_code(seen: Iterable[Seen]) -> list[list[Seen]]:
    groups: dict[str, list[Seen]] = {}
    for item in seen:
        groups.setdefault(item.code, []).append(item)
    return list(groups.values())


def _finding(group: Sequence[Seen]) -> Finding:
    """One finding for all that showed a code; the first that has its numbers speaks."""
    first = next((item for item in group if item.hit.sentence is not None), group[0])
    entry = first.hit.signature
    evidence: list[Evidence] = []
    for item in sorted(group, key=lambda item: item.order):
        if len(evidence) < _MOST_EVIDENCE and item.text not in [known.text for known in evidence]:
            evidence.append(item.evidence())
    return finding(
        entry.code,
        first.hit.sentence or said(first.message),
        evidence=evidence,
        severity=_worst([item.hit.signature.severity for item in group]),
        confidence=entry.confidence or ("likely" if entry.kind == "hint" else "certain"),
    )


def said(message: str) -> str:
    """The message itself, in one line and not for ever."""
    text = " ".join(message.split())
    end = text.find(". ", 20)
    text = text[: end + 1] if 0 < end < 300 else text[:300]
    return f"It said: {text}"


def _worst(severities: Sequence[Severity | None]) -> Severity | None:
    """None: the catalogue's."""
    given = [item for item in severities if item is not None]
    return min(given, key=_SEVERITIES.index) if len(given) == len(severities) else None


def _held_or_asked(found: list[Finding], readings: LogReadings) -> list[Finding]:
    """Free memory below what was asked for: whether somebody holds the card, or a little too much was asked for."""
    codes = [item.code for item in found]
    total, free, asked = readings.total_bytes, readings.free_bytes, readings.requested_bytes
    if _FREE not in codes or total is None or free is None:
        return found
    held = total - free
    if held <= _USUALLY_HELD_BYTES:
        return found
    place = codes.index(_FREE)
    own = found[place]
    sentence = f"{held / GIB:.2f} of {total / GIB:.2f} GiB on the card were in use before the engine took any."
    if _HELD in codes:
        other = found.pop(codes.index(_HELD))
        place = [item.code for item in found].index(_FREE)
    else:
        other = finding(_HELD, sentence, evidence=own.evidence, confidence="likely")
    missing = None if asked is None else asked - free
    first = missing is None or missing > _LITTLE_BYTES
    return [*found[:place], *((other, own) if first else (own, other)), *found[place + 1 :]]


def _many_causes(causes: Sequence[Seen]) -> list[str]:
    codes = list(dict.fromkeys(item.code for item in causes))
    if len(codes) < 2:
        return []
    first = causes[0]
    return [f"several causes were named; the first, {first.code} in line {first.line}, is taken for the root"]
