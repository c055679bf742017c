"""The report of an end-to-end proof: lines for the terminal, one HTML file for everybody else."""

from __future__ import annotations

from html import escape

from loadmaster.core.verification import Report, Step, counts
from loadmaster.render.lines import wrap
from loadmaster.render.paint import Paint, plain
from loadmaster.render.visible import shown

_MARKS = {"passed": ("ok", "green"), "failed": ("FAILED", "red"), "not_applicable": ("-", "dim")}
_WEAK = ("weak", "yellow")  # a control that failed says something about the model, not about the service
_WORDS = {"passed": "passed", "failed": "failed", "not_applicable": "not applicable"}
_NAME, _MARK, _SECONDS = 18, 6, 8

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --ok: #2e7d46; --bad: #b3382c; --none: #777; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } .ok { color: var(--ok); } .bad { color: var(--bad); } .none { color: var(--none); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.s { white-space: nowrap; } td.d { overflow-wrap: anywhere; }
"""


def verdict_words(report: Report) -> str:
    """The outcome in one sentence without full stop."""
    if report.ok is True:
        return "the service works"
    failed = [step for step in report.steps if step.status == "failed"]
    if report.ok is False:
        broken = [step for step in failed if not step.control]
        if all(step.name.startswith("image") for step in broken):
            if all(step.kind == "answer" for step in broken):
                return "the picture path is broken: the model knows the answer in words, and not from the picture"
            return f"the picture path is broken: {', '.join(step.name for step in broken)}"
        return f"the service does not work: {', '.join(step.name for step in broken)}"
    if failed:
        return "could not tell whether pictures arrive: the model is too weak to be asked"
    return "could not tell whether pictures should arrive: the service takes none"


def step_line(step: Step, width: int, paint: Paint = plain) -> str:
    """One step on one or several lines, ended by a line end."""
    step = shown(step)
    mark, style = _WEAK if step.control and step.status == "failed" else _MARKS[step.status]
    head = f"{paint(mark.rjust(_MARK), style)}  {step.name.ljust(_NAME)}{_seconds(step).rjust(_SECONDS)}  "
    indent = " " * (_MARK + 2 + _NAME + _SECONDS + 2)
    return "\n".join(wrap(step.detail, width, head, indent)) + "\n"


def report_summary(report: Report, width: int, paint: Paint = plain) -> str:
    """The last lines: how many steps, and what it adds up to."""
    report = shown(report)
    found = counts(report.steps)
    weak = sum(step.control and step.status == "failed" for step in report.steps)
    numbers = f"{found['passed']} passed, {found['failed'] - weak} failed"
    numbers += f", {weak} too hard for the model" if weak else ""
    numbers += f", {found['not_applicable']} not applicable"
    lines = [f"{numbers}; {report.seconds:.1f} s", ""]
    for note in report.notes:
        lines += wrap(f"note: {note}", width, "", "      ")
    word, style = {True: ("PASSED", "green"), False: ("FAILED", "red"), None: ("COULD NOT TELL", "yellow")}[report.ok]
    lines += wrap(f"{word}: {verdict_words(report)}", width, "", " " * 4)
    return "\n".join(lines).replace(word, paint(word, "bold", style), 1) + "\n"


def report_text(report: Report, width: int, paint: Paint = plain) -> str:
    """The whole report for a terminal."""
    report = shown(report)
    head = f"{report.url}\nmodel {report.model or 'unknown'}\n\n"
    return (
        head
        + "".join(step_line(step, width, paint) for step in report.steps)
        + "\n"
        + report_summary(report, width, paint)
    )


def report_html(report: Report, when: str) -> str:
    """A page of its own: no script, nothing to load. ``when``: the time of the proof, as it is to be shown."""
    kind = {True: ("ok", "Passed"), False: ("bad", "Failed"), None: ("none", "Could not tell")}[report.ok]
    report = shown(report)
    found = counts(report.steps)
    rows = "\n".join(_row(step) for step in report.steps)
    notes = "".join(f"<p>Note: {escape(note)}</p>\n" for note in report.notes)
    summary = (
        f"{found['passed']} passed, {found['failed']} failed, {found['not_applicable']} not applicable "
        f"in {report.seconds:.1f} s"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(report.url)}: {kind[1].lower()}</title><style>{_STYLE}</style></head>
<body>
<h1><span class="{kind[0]}">{kind[1]}</span>: {escape(verdict_words(report))}</h1>
<p>{escape(report.url)}, model {escape(report.model or "unknown")}, {escape(when)}<br>{summary}</p>
{notes}<table>
<thead><tr><th>Step</th><th>Kind</th><th>Outcome</th><th>Seconds</th><th>What was seen</th></tr></thead>
<tbody>
{rows}
</tbody></table>
</body></html>
"""


def _row(step: Step) -> str:
    shade = {"passed": "ok", "failed": "bad", "not_applicable": "none"}[step.status]
    return (
        f'<tr><td class="s">{escape(step.name)}</td><td>{escape(step.kind)}</td>'
        f'<td class="s {shade}">{_WORDS[step.status]}</td><td class="n">{step.seconds:.2f}</td>'
        f'<td class="d">{escape(step.detail)}</td></tr>'
    )


def _seconds(step: Step) -> str:
    return f"{step.seconds:.2f} s" if step.seconds >= 0.005 else ""
