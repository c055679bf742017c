"""Kept runs as text and as JSON: one run's plan against actual, two runs side by side, what was learnt."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from loadmaster.core.facts import LoadSheet
from loadmaster.core.localcalibration import Learnt
from loadmaster.core.reconcile import CardReconciliation, HostReconciliation, Line, Reconciliation
from loadmaster.core.runrecord import KeptFinding, RunEnding
from loadmaster.render.documents import SCHEMA
from loadmaster.render.lines import wrap
from loadmaster.render.paint import Paint, plain
from loadmaster.render.status import duration
from loadmaster.render.units import bare_gib, size
from loadmaster.render.visible import visible

if TYPE_CHECKING:
    StoredRun = Any

_POINTS = {"ready": "when it was ready", "serving": "at the highest point of serving"}
_NAMES = {"activations": "activations", "kv_cache": "KV cache", "cuda_graphs": "CUDA graphs"}


class ShownRun(Struct, frozen=True, kw_only=True):
    """All that is kept of one run."""

    run: Any  # edge.runquery.StoredRun
    plan: LoadSheet | None = None
    found: tuple[Reconciliation, ...] = ()
    findings: tuple[KeptFinding, ...] = ()
    running: bool = False


# ---------------------------------------------------------------------------------------------- the list


def runs_text(
    kept: Sequence[tuple[StoredRun, Sequence[Reconciliation]]], running: Collection[int], now: float, width: int = 80
) -> str:
    """A line a run, or two where ``width`` has no room for one. ``running``: numbers of those that go on."""
    heads = ("RUN", "DEPLOYMENT", "STARTED", "FOR", "ENGINE", "HELD", "UNEXPLAINED", "ENDED")
    rows = [heads, *(_list_row(run, found, run.number in running, now) for run, found in kept)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    if sum(widths) + 2 * (len(heads) - 1) <= width:
        return "\n".join(_columns(row, widths) for row in rows)
    lines = [_columns(heads[:4], widths)]
    for row in rows[1:]:
        engine, held, unexplained, ended = row[4:]
        further = [engine, "" if held == "-" else f"held {held}"]
        further += ["" if unexplained == "-" else f"unexplained {unexplained}", ended]
        lines.append(_columns(row[:4], widths))
        lines += wrap("; ".join(filter(None, further)), width, "     ", "     ")
    return "\n".join(lines)


def _list_row(run: StoredRun, found: Sequence[Reconciliation], running: bool, now: float) -> tuple[str, ...]:
    record, ending = run.record, run.ending
    until = ending.ended if ending is not None else now if running else None
    held, unexplained = _most_held(found), _most_unexplained(found)
    return (
        str(run.number),
        record.deployment,
        _when(record.started),
        duration(None if until is None else until - record.started),
        f"{record.engine.name} {record.engine.version or ''}".strip(),
        "-" if held is None else size(held),
        "-" if unexplained is None else _signed(unexplained),
        _ended(ending, running),
    )


def _columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()


def _ended(ending: RunEnding | None, running: bool) -> str:
    if ending is not None:
        return visible(ending.message)
    return "still runs" if running else "nobody saw it end"


def runs_document(
    kept: Sequence[tuple[StoredRun, Sequence[Reconciliation]]], running: Collection[int]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "runs": [
            {
                **_run_fields(run, run.number in running),
                "held_bytes": _most_held(found),
                "unexplained_bytes": _most_unexplained(found),
            }
            for run, found in kept
        ],
    }


def _most_held(found: Sequence[Reconciliation]) -> int | None:
    """Of the fullest card at any point, or of the host."""
    cards = [card.actual_bytes for one in found for card in one.cards]
    hosts = [one.host.resident_bytes for one in found if one.host is not None]
    return max((held for held in (*cards, *hosts) if held is not None), default=None)


def _most_unexplained(found: Sequence[Reconciliation]) -> int | None:
    values = [card.unexplained_bytes for one in found for card in one.cards if card.unexplained_bytes is not None]
    return max(values, key=abs, default=None)


# ---------------------------------------------------------------------------------------------- one run


def run_document(shown: ShownRun) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run": {
            **_run_fields(shown.run, shown.running),
            "argv": list(shown.run.record.argv),
            "env": shown.run.record.env,
            "cards": msgspec.to_builtins(shown.run.record.cards),
            "loadmaster": shown.run.record.loadmaster,
            "corrections": shown.run.record.corrections,
            "plan": msgspec.to_builtins(shown.plan),
            "reconciliations": msgspec.to_builtins(shown.found),
            "findings": msgspec.to_builtins(shown.findings),
        },
    }


def _run_fields(run: StoredRun, running: bool) -> dict[str, Any]:
    record, ending = run.record, run.ending
    return {
        "number": run.number,
        "deployment": record.deployment,
        "started": record.started,
        "running": running,
        "ended": None if ending is None else ending.ended,
        "message": None if ending is None else ending.message,
        "exit_code": None if ending is None else ending.code,
        "engine": msgspec.to_builtins(record.engine),
        "model": record.model,
        "architecture": record.architecture,
        "quantization": record.quantization,
    }


def run_text(shown: ShownRun, width: int = 80, paint: Paint = plain) -> str:
    """The run's facts, then each card at each point."""
    blocks = ["\n".join(_head(shown, width, paint))]
    for one in shown.found:
        if one.host is not None:
            blocks.append("\n".join(_host(one.host, one.point, width, paint)))
        for card in one.cards:
            blocks.append("\n".join(_card(card, one.point, width, paint)))
        if one.notes:
            blocks.append("\n".join(line for note in one.notes for line in wrap(note, width, "note: ", "      ")))
    if not shown.found:
        blocks.append("\n".join(wrap(_not_compared(shown), width, "")))
    if shown.findings:
        lines = [paint("findings", "bold")]
        for kept in shown.findings:
            until = "still holds" if kept.until is None else f"for {duration(kept.until - kept.since)}"
            text = f"{kept.finding.severity}[{kept.finding.code}] {_when(kept.since)}, {until}: {kept.finding.cause}"
            lines += wrap(visible(text), width, "  ", "    ")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _not_compared(shown: ShownRun) -> str:
    if shown.plan is None or not shown.plan.gpus:
        return "Nothing was compared: the run has no plan of its memory."
    if shown.running:
        return "Nothing is compared yet: the plan is compared once the engine is ready."
    return "Nothing was compared: the run ended before it was ready, or what was read then was not kept."


def _host(host: HostReconciliation, point: str, width: int, paint: Paint) -> list[str]:
    lines = [paint(f"host memory, {_POINTS.get(point, point)}", "bold")]
    lines.append(f"  planned   {size(host.low_bytes)} when idle to {size(host.high_bytes)} when serving")
    lines.append(f"  resident  {size(host.resident_bytes)}, all processes of the engine")
    if host.reason:
        lines += wrap(host.reason, width, "  ", "    ")
    return lines


def _head(shown: ShownRun, width: int, paint: Paint) -> list[str]:
    record, ending = shown.run.record, shown.run.ending
    names = [card.name or "a card without a name" for card in record.cards]
    cards = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    model = ", ".join(filter(None, (record.model, record.architecture, record.quantization)))
    rows = [
        ("started", _when(record.started)),
        ("ended", _ended(None, shown.running) if ending is None else f"{_when(ending.ended)}: {ending.message}"),
        ("engine", f"{record.engine.name} {record.engine.version or 'of unknown version'}"),
        ("model", model or "unknown"),
        ("cards", cards or "none"),
        ("command", shlex.join(record.argv)),
    ]
    if record.env:
        rows.append(("environment", " ".join(f"{name}={value}" for name, value in record.env.items())))
    if record.corrections:
        learnt = ", ".join(f"{name} {_signed(value)}" for name, value in record.corrections.items())
        rows.append(("learnt", f"the plan used what earlier runs taught: {learnt}"))
    lines = [paint(f"run {shown.run.number} of {record.deployment}", "bold")]
    for label, text in rows:
        lines += wrap(visible(text), width, f"  {label:<13}", " " * 15)
    return lines


def _card(card: CardReconciliation, point: str, width: int, paint: Paint) -> list[str]:
    name = f" ({card.name})" if card.name else ""
    lines: list[str] = []
    lines.append(f"  {'GiB':<22}{'planned':>9}{'expected':>10}{'actual':>9}{'off by':>9}")
    for line in card.lines:
        lines.append(_row(line, paint if line.name in card.off else plain))
        lines += [f"    {part.name:<20}{bare_gib(part.planned):>9}" for part in line.parts if len(line.parts) > 1]
    reserve = "-" if card.driver_reserved_bytes is None else bare_gib(card.driver_reserved_bytes)
    actual = "-" if card.actual_bytes is None else bare_gib(card.actual_bytes)
    lines.append(f"  {'driver reserve':<22}{'':>9}{'':>10}{reserve:>9}")
    lines.append(f"  {'held, driver count':<22}{'':>9}{'':>10}{actual:>9}")
    if card.unexplained_bytes is None:
        lines.append(f"  {'unexplained':<22}{'':>9}{'':>10}{'unknown':>9}")
    else:
        lines.append(f"  {'unexplained':<22}{'':>9}{'':>10}{'':>9}{_bare_signed(card.unexplained_bytes):>9}")
    lines = [paint(f"GPU {card.index}{name}, {_POINTS.get(point, point)}", "bold"), *(row.rstrip() for row in lines)]
    if any(line.actual is None and line.difference is not None for line in card.lines):
        lines += wrap("activations: actual is how much more the driver counts than when ready", width, "  ", "    ")
    for label, reason in [*((line.name, line.reason) for line in card.lines), ("unexplained", card.reason)]:
        if reason:
            lines += wrap(f"{label}: {reason}", width, "  ", "    ")
    return lines


def _row(line: Line, paint: Paint) -> str:
    expected = bare_gib(line.expected) if line.expected != line.planned else ""
    actual = "-" if line.actual is None else bare_gib(line.actual)
    if line.actual is None and line.difference is not None:  # not the component itself: what the driver counts more
        actual = bare_gib(line.expected + line.difference)
    off = "" if line.difference is None else _bare_signed(line.difference)
    return paint(
        f"  {_NAMES.get(line.name, line.name):<22}{bare_gib(line.planned):>9}{expected:>10}{actual:>9}{off:>9}",
        "yellow",
    )


# ---------------------------------------------------------------------------------------------- two runs


def compared_document(first: ShownRun, second: ShownRun) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "runs": [run_document(first)["run"], run_document(second)["run"]],
        "differences": {
            "facts": [{"name": name, "values": list(values)} for name, values in _fact_rows(first, second)],
            "arguments": [{"flag": flag, "values": list(values)} for flag, values in _flag_rows(first, second)],
            "planned": _component_rows(_planned(first), _planned(second)),
            "actual": _component_rows(_actual(first), _actual(second)),
        },
    }


def compared_text(first: ShownRun, second: ShownRun, width: int = 80, paint: Paint = plain) -> str:
    """What differs, the first run's value before the second's."""
    numbers = (first.run.number, second.run.number)
    blocks = [paint(f"run {numbers[0]} against run {numbers[1]}", "bold")]
    facts = [
        line
        for name, (before, after) in _fact_rows(first, second)
        for line in wrap(visible(f"{before or '-'} -> {after or '-'}"), width, f"  {name:<14}", " " * 16)
    ]
    flags = [
        line
        for flag, (before, after) in _flag_rows(first, second)
        for line in wrap(visible(f"{flag}: {_given(before)} -> {_given(after)}"), width, "  ", "    ")
    ]
    blocks.append("\n".join(["facts", *(facts or ["  the same"])]))
    blocks.append("\n".join(["arguments", *(flags or ["  the same"])]))
    for title, none, values in (
        ("planned, GPU by GPU", "has a plan of its cards", (_planned(first), _planned(second))),
        ("actual, GPU by GPU", "was compared with its cards", (_actual(first), _actual(second))),
    ):
        same = "  the same" if any(values) else f"  unknown: neither run {none}"
        blocks.append("\n".join([title, *(_difference_lines(_component_rows(*values)) or [same])]))
    return "\n\n".join(blocks)


def _fact_rows(first: ShownRun, second: ShownRun) -> list[tuple[str, tuple[str | None, str | None]]]:
    def facts(shown: ShownRun) -> dict[str, str | None]:
        record = shown.run.record
        return {
            "deployment": record.deployment,
            "engine": f"{record.engine.name} {record.engine.version or ''}".strip(),
            "model": record.model,
            "architecture": record.architecture,
            "quantization": record.quantization,
            "cards": ", ".join(card.name or size(card.total_bytes) for card in record.cards) or None,
            "loadmaster": record.loadmaster,
        }

    before, after = facts(first), facts(second)
    return [(name, (before[name], after[name])) for name in before if before[name] != after[name]]


def _flag_rows(first: ShownRun, second: ShownRun) -> list[tuple[str, tuple[str | None, str | None]]]:
    before, after = (_flags(shown.run.record.argv, shown.run.record.env) for shown in (first, second))
    names = [*before, *(name for name in after if name not in before)]
    return [(name, (before.get(name), after.get(name))) for name in names if before.get(name) != after.get(name)]


def _flags(argv: Sequence[str], env: dict[str, str]) -> dict[str, str]:
    """Flags with their values, "" for a switch; variables by ``NAME=``."""
    found: dict[str, str] = {}
    flag: str | None = None
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found[flag] = value if equals else ""
        elif flag is not None:
            found[flag] = f"{found[flag]} {word}".strip()
    return found | {f"{name}=": value for name, value in env.items()}


def _given(value: str | None) -> str:
    return "not given" if value is None else value or "given"


def _planned(shown: ShownRun) -> dict[tuple[int, str], int]:
    plan = shown.plan
    if plan is None:
        return {}
    return {(load.index, part.name): part.bytes for load in plan.gpus for part in load.components}


def _actual(shown: ShownRun) -> dict[tuple[int, str], int]:
    values: dict[tuple[int, str], int] = {}
    for one in shown.found:
        for card in one.cards:
            if one.point == "ready":
                values |= {(card.index, line.name): line.actual for line in card.lines if line.actual is not None}
            if card.actual_bytes is not None:
                values[card.index, f"held {_POINTS[one.point]}"] = card.actual_bytes
    return values


def _component_rows(before: dict[tuple[int, str], int], after: dict[tuple[int, str], int]) -> list[dict[str, Any]]:
    keys = sorted({*before, *after}, key=lambda key: (key[0], list({**before, **after}).index(key)))
    return [
        {"gpu": key[0], "name": key[1], "bytes": [before.get(key), after.get(key)]}
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _difference_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        before, after = row["bytes"]
        change = "" if None in (before, after) else f"  {_bare_signed(after - before)}"
        lines.append(f"  GPU {row['gpu']}  {row['name']:<36}{_or_dash(before):>9} ->{_or_dash(after):>9} GiB{change}")
    return lines


def _or_dash(value: int | None) -> str:
    return "-" if value is None else bare_gib(value)


# ---------------------------------------------------------------------------------------------- what was learnt


def calibration_text(learnt: Sequence[Learnt], width: int = 80) -> str:
    lines = []
    for one in learnt:
        lines.append(shlex.quote(one.key))
        text = (
            f"{_signed(one.difference)} ({_bare_signed(one.low)} to {_bare_signed(one.high)}) on the plan's figure, "
            f"learnt from runs {', '.join(map(str, one.runs))}, the last on {one.last}"
        )
        lines += wrap(text, width, "  ")
    lines += ["", "Plans of just that use it and say so. To forget one, such as the first:"]
    lines.append(f"  loadmaster runs calibration --drop {shlex.quote(learnt[0].key)}")
    return "\n".join(lines)


def calibration_document(learnt: Sequence[Learnt], dropped: Sequence[str]) -> dict[str, Any]:
    return {"schema": SCHEMA, "learnt": msgspec.to_builtins(tuple(learnt)), "dropped": list(dropped)}


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _signed(value: int) -> str:
    return f"{_bare_signed(value)} GiB"


def _bare_signed(value: int) -> str:
    text = f"{value / (1 << 30):+.2f}"
    return "0.00" if text in ("+0.00", "-0.00") else text
