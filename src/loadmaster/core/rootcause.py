"""What a start died of: the earliest of what was seen that names a cause, and what else counts beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import GIB, Evidence, Finding, Severity
from loadmaster.core.heldmemory import held_at_start, held_beside
from loadmaster.core.logfacts import LogReadings
from loadmaster.core.startlog import SERVING, Seen, StartLog

_MASK = "engine-dead-masked"
_WAITING = "worker-not-answering"
_FREE, _HELD = "free-memory-below-request", "gpu-held-by-other-process"
_MOST_CAUSES = 6
_SEVERITIES = ("error", "warning", "note")
_MOST_EVIDENCE = 3


def findings_of(start: StartLog, readings: LogReadings) -> tuple[list[Seen], list[Finding], list[str]]:
    """What was seen that counts, the findings in their order, and what has to be said beside them."""
    notes: list[str] = []
    start.settled()
    seen = [item for item in start.in_order() if not _went_on(start, item)]
    if start.phase == SERVING:
        seen = _since_ready(seen, notes)
    dead = {item.code for item in seen if item.kind == "symptom"}
    seen = [item for item in seen if not dead & set(item.hit.signature.yields_to)]
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
    found = _with_held(found, counting, readings)
    notes += _many_causes(causes)
    return counting, found, notes


def _went_on(start: StartLog, item: Seen) -> bool:
    return item.hit.signature.stuck and (start.phase == SERVING or start.went_on_after(item))


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


def _with_held(found: list[Finding], counting: Sequence[Seen], readings: LogReadings) -> list[Finding]:
    """Where others hold the card's memory, that is a cause beside the failure that it leads to, or before it."""
    for place, item in enumerate(found):
        if item.code == _FREE:
            held = held_at_start(readings)
        elif item.code.startswith("oom-"):
            held = next(
                (some for seen in counting if seen.code == item.code and (some := held_beside(seen.message))), None
            )
        else:
            continue
        if held is None:
            continue
        sentence = f"{held.held_bytes / GIB:.2f} of {held.total_bytes / GIB:.2f} GiB on the card were in use by others."
        named = next((other for other in found if other.code == _HELD), None)
        other = named or finding(_HELD, sentence, evidence=item.evidence, confidence="likely")
        rest = [kept for kept in found[place + 1 :] if kept is not named]
        before = [kept for kept in found[:place] if kept is not named]
        return [*before, *((other, item) if held.decides else (item, other)), *rest]
    return found


def _many_causes(causes: Sequence[Seen]) -> list[str]:
    codes = list(dict.fromkeys(item.code for item in causes))
    if len(codes) < 2:
        return []
    first = causes[0]
    return [f"several causes were named; the first, {first.code} in line {first.line}, is taken for the root"]
