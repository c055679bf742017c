"""What a log says, as text of one screen and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import msgspec
from msgspec import structs

from loadmaster.core.diagnosis import Diagnosis
from loadmaster.core.facts import EngineFacts, Evidence, Finding
from loadmaster.core.secrets import HIDDEN, hide_in_environment, hide_in_text, hide_in_words, is_secret_name
from loadmaster.render.findings import finding_text
from loadmaster.render.lines import wrap
from loadmaster.render.paint import Paint, plain
from loadmaster.render.units import gib, plural
from loadmaster.render.visible import shown

SCHEMA = 1
_REACHED = {
    "nothing": "the weights were not loaded",
    "loaded": "the weights were loaded",
    "profiled": "weights were loaded and memory was profiled",
    "captured": "weights were loaded, memory was profiled, graphs were captured",
    "ready": "it was ready to answer",
    "served": "it answered requests",
}
_SAME = 60  # letters in which repeated messages agree
_PAGES = "docs/failures"
_EVIDENCE_SHOWN, _FIXES_SHOWN, _OTHERS_SHOWN, _NOTES_SHOWN = 2, 3, 4, 4


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """The JSON object of ``loadmaster diagnose``; without the secrets that a log or a launch may hold."""
    diagnosis = _without_secrets(diagnosis)
    facts = diagnosis.facts
    built: dict[str, Any] = msgspec.to_builtins(facts)
    launch = facts.launch
    return {
        "schema": SCHEMA,
        "healthy": diagnosis.healthy,
        "engine": built["engine"],
        "launch": None
        if launch is None
        else {"model": launch.model, "flags": launch.flags, "env": launch.env, "argv": list(launch.argv)},
        "model": facts.model,
        "quantization": facts.quantization,
        "backends": facts.backends,
        "parallel": {
            "tensor": facts.tensor_parallel_size,
            "pipeline": facts.pipeline_parallel_size,
            "data": facts.data_parallel_size,
        },
        "readings": built["readings"],
        "phases": built["phases"],
        "reached": facts.reached,
        "starts": facts.starts,
        "lines": facts.lines,
        "findings": msgspec.to_builtins(diagnosis.findings),
        "notes": list(diagnosis.notes),
        "suspicious": msgspec.to_builtins(diagnosis.suspicious),
    }


def diagnosis_text(diagnosis: Diagnosis, width: int = 80, paint: Paint = plain, *, everything: bool = False) -> str:
    """One screen: the root cause with its fixes, what the log is of, how far the start came, what is not known.

    ``everything``: all findings in full, and all that was read.
    """
    diagnosis = shown(_without_secrets(diagnosis))
    errors = [item for item in diagnosis.findings if item.severity == "error"]
    first = diagnosis.findings[:1] if errors or everything else ()
    blocks = [_headline(diagnosis, bool(errors), paint)]
    blocks += [
        _with_page(item if everything else _short(item), width, paint)
        for item in (diagnosis.findings if everything else first)
    ]
    rest = () if everything else diagnosis.findings[len(first) :]
    if rest:
        blocks.append(_others(rest, width, paint))
    if diagnosis.suspicious and not errors:
        blocks.append(_suspicious(diagnosis.suspicious, width))
    blocks.append("\n".join(_facts(diagnosis, width, paint, everything)))
    if diagnosis.notes:
        blocks.append("\n".join(line for note in diagnosis.notes for line in wrap(note, width, "note: ", "  ")))
    return "\n\n".join(blocks)


def failure_text(findings: Sequence[Finding], notes: Sequence[str], width: int = 80, paint: Paint = plain) -> str:
    """Why a deployment failed, in one screen: the root cause in full, a line for each of the others."""
    worth = [item for item in shown(tuple(findings)) if item.severity != "note"]
    worth.sort(key=lambda item: item.severity != "error")
    blocks = [_with_page(_short(item), width, paint) for item in worth[:1]]
    if worth[1:]:
        lines = [f"{item.severity}[{item.code}]: {item.title}" for item in worth[1 : 1 + _OTHERS_SHOWN]]
        hidden = len(worth) - 1 - len(lines)
        lines += [f"and {hidden} more"] if hidden > 0 else []
        blocks.append("\n".join(line for each in lines for line in wrap(each, width, "also: ", "  ")))
    said = [line for note in shown(tuple(notes))[:_NOTES_SHOWN] for line in wrap(note, width, "note: ", "  ")[:3]]
    if said:
        blocks.append("\n".join(said))
    return "\n\n".join(blocks)


def _without_secrets(diagnosis: Diagnosis) -> Diagnosis:
    def hidden(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
        return tuple(structs.replace(one, text=hide_in_text(one.text)) for one in evidence)

    findings = tuple(
        structs.replace(item, cause=hide_in_text(item.cause), evidence=hidden(item.evidence))
        for item in diagnosis.findings
    )
    launch = diagnosis.facts.launch
    if launch is not None:
        launch = structs.replace(
            launch,
            flags={name: HIDDEN if is_secret_name(name) else value for name, value in launch.flags.items()},
            env=hide_in_environment(launch.env),
            argv=tuple(hide_in_words(launch.argv)),
        )
    facts = structs.replace(diagnosis.facts, launch=launch)
    return structs.replace(diagnosis, facts=facts, findings=findings, suspicious=hidden(diagnosis.suspicious))


def _short(item: Finding) -> Finding:
    """With as many fixes and lines of evidence as one screen has room for."""
    kept = [item.fixes[0]] if item.fixes else []
    kept += [fix for fix in item.fixes[1:] if fix.argv or fix.env or fix.command or fix.remove][: _FIXES_SHOWN - 1]
    # every process repeats the same message after its own prefix
    lines = {one.text.rpartition("] ")[2][:_SAME]: one for one in reversed(item.evidence)}
    evidence = sorted(lines.values(), key=item.evidence.index)[:_EVIDENCE_SHOWN]
    return structs.replace(item, evidence=tuple(evidence), fixes=tuple(kept))


def _headline(diagnosis: Diagnosis, failed: bool, paint: Paint) -> str:
    if failed:
        return paint("FAILED", "bold", "red") + f": {diagnosis.findings[0].title}"
    if diagnosis.healthy:
        return paint("HEALTHY", "bold", "green") + ": the server started and nothing failed after that"
    if diagnosis.healthy is False:
        return paint("FAILED", "bold", "red") + ": the wording of the failure is not known here"
    return paint("COULD NOT TELL", "bold", "yellow") + ": the log shows neither a server that answers nor why not"


def _with_page(item: Finding, width: int, paint: Paint) -> str:
    return finding_text(item, width, paint) + f"\n  read: {_PAGES}/{item.code}.md"


def _others(findings: Sequence[Finding], width: int, paint: Paint) -> str:
    lines = [paint("also", "bold") + " (in full with --all)"]
    for item in findings:
        head = f"  {item.severity}[{item.code}]: "
        lines += wrap(shorten(item.cause, 2 * width - len(head) - 12, placeholder=" ..."), width, head, "    ")
    return "\n".join(lines)


def _suspicious(evidence: Sequence[Evidence], width: int) -> str:
    lines = ["the first lines that look like a failure"]
    for one in evidence:
        place = f"{one.path} line {one.line}: " if one.path else f"line {one.line}: "
        lines += wrap(place + one.text, width, "  | ")
    return "\n".join(lines)


def _facts(diagnosis: Diagnosis, width: int, paint: Paint, everything: bool) -> list[str]:
    facts, readings = diagnosis.facts, diagnosis.facts.readings
    rows = [("engine", _engine(facts.engine))]
    if facts.model:
        rows.append(("model", facts.model + (f", {facts.quantization}" if facts.quantization else "")))
    rows.append(("came as far as", _REACHED[facts.reached]))
    said = [
        (label, value)
        for label, value in (
            ("weights", _each(readings.model_loading_bytes)),
            ("cache", gib(readings.kv_available_bytes) if readings.kv_available_bytes is not None else None),
            ("cache for", plural(readings.kv_tokens, "token") if readings.kv_tokens is not None else None),
            ("graphs", gib(readings.graph_bytes) if readings.graph_bytes is not None else None),
        )
        if value is not None
    ]
    if said:
        rows.append(("it measured", ", ".join(f"{label} {value}" for label, value in said)))
    if facts.starts > 1:
        rows.append(("starts", f"{facts.starts} in this log; the last one is meant"))
    if everything:
        rows += [(f"{what} backend", name) for what, name in facts.backends.items()]
        rows += [
            (phase.name, f"line {phase.line}" + (f", {phase.seconds:.1f} s" if phase.seconds is not None else ""))
            for phase in facts.phases
        ]
        if facts.launch is not None:
            rows.append(("command", " ".join(facts.launch.argv)))
    rows.append(("read", plural(facts.lines, "line")))
    indent = max(len(label) for label, _ in rows) + 2
    return [
        line
        for label, text in rows
        for line in wrap(text, width, paint(label, "bold") + " " * (indent - len(label)), " " * indent)
    ]


def _engine(engine: EngineFacts) -> str:
    name = {"vllm": "vLLM", "llamacpp": "llama.cpp", "sglang": "SGLang", "lmdeploy": "LMDeploy"}.get(
        engine.name, engine.name
    )
    return f"{name} {engine.version}" if engine.version else f"{name}, version not said"


def _each(sizes: Sequence[int | None]) -> str | None:
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    return gib(known[0]) if min(known) == max(known) else f"{gib(min(known))} to {gib(max(known))} a rank"
