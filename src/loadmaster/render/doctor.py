"""The report of ``loadmaster doctor``: a text to paste into a bug, not yet redacted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadmaster.core.facts import Finding, GpuFacts, ModelFacts
from loadmaster.core.machinereport import Libraries, Link, MachineReport
from loadmaster.render.findings import findings_text, summary
from loadmaster.render.units import UNKNOWN, bare_gib, gib, size

_WIDTH = 100


def report_text(
    report: MachineReport,
    findings: Sequence[Finding],
    model: ModelFacts | None = None,
    deployment: Mapping[str, str] | None = None,
) -> str:
    """Sections with a heading each. ``deployment``: heading → text, as it is."""
    parts = [
        f"# loadmaster {report.loadmaster}: report of a machine",
        _section("Findings", summary(findings) + ("\n\n" + findings_text(findings, _WIDTH) if findings else "")),
        _section("System", _rows(_system(report))),
        _section("Cards", _cards(report)),
        _section("Limits and disks", _rows(_room(report))),
        _section("Engines and libraries", "\n\n".join(_libraries(one) for one in report.libraries) or "none found"),
        _section("Ports", _rows([(str(use.port), f"{use.purpose}: {use.holder or 'free'}") for use in report.ports])),
        _section("Environment", _environment(report.environment)),
    ]
    if model is not None:
        parts.append(_section("Model", _rows(_model(model))))
    for heading, text in (deployment or {}).items():
        parts.append(_section(heading, text.rstrip("\n")))
    if report.unread:
        parts.append(_section("Not read", "\n".join(f"- {sentence}" for sentence in report.unread)))
    return "\n\n".join(parts) + "\n"


def _section(heading: str, body: str) -> str:
    return f"## {heading}\n\n{body}"


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(f"{label:{width}}  {text}" for label, text in rows)


def _environment(variables: Mapping[str, str]) -> str:
    lines = [f"{name}={value}" for name, value in variables.items()]
    return "\n".join(lines) or "no variable that an engine looks at"


def _system(report: MachineReport) -> list[tuple[str, str]]:
    host = report.host
    return [
        ("system", f"{report.distribution or report.system}, kernel {report.kernel}, {report.machine}"),
        ("C library", f"glibc {report.glibc}" if report.glibc else UNKNOWN),
        ("Python", report.python),
        ("container", report.container or "none seen"),
        ("processor", f"{report.cpu or UNKNOWN}; {host.cpu_count or UNKNOWN} usable"),
        ("NUMA nodes", str(report.numa_nodes or UNKNOWN)),
        ("memory", f"{gib(host.memory_available_bytes)} of {gib(host.memory_total_bytes)} available"),
        ("/dev/shm", f"{size(host.shm_free_bytes)} of {size(host.shm_total_bytes)} free"),
        ("IOMMU", report.iommu or UNKNOWN),
        ("NVIDIA driver", f"{report.driver or UNKNOWN}, speaks CUDA up to {report.cuda_driver or UNKNOWN}"),
    ]


def _cards(report: MachineReport) -> str:
    if not report.gpus:
        return "no card is seen"
    lines = [_card(gpu) for gpu in report.gpus]
    lines += [_link(link) for link in report.links]
    lines.append(f"peer copy test: {report.peer_copy.status}, {report.peer_copy.detail}")
    return "\n".join(lines)


def _card(gpu: GpuFacts) -> str:
    capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else UNKNOWN
    lines = [
        f"GPU {gpu.index}: {gpu.name or 'unnamed'}, {gib(gpu.total_bytes)} for CUDA, {gib(gpu.driver_total_bytes)} for "
        f"the driver, {gib(gpu.free_bytes)} free, compute capability {capability}"
    ]
    for process in gpu.processes or ():
        lines.append(f"       process {process.pid} {process.name or '(name unknown)'}: {gib(process.used_bytes)}")
    if gpu.note:
        lines.append(f"       {gpu.note}")
    return "\n".join(lines)


def _link(link: Link) -> str:
    answers = {True: "yes", False: "no", None: UNKNOWN}
    return (
        f"GPU {link.first} and {link.second}: share {link.path or UNKNOWN}; NVLink {answers[link.nvlink]}; "
        f"peer reads {answers[link.read]}, writes {answers[link.write]}"
    )


def _room(report: MachineReport) -> list[tuple[str, str]]:
    rows = [(limit.name, f"{_amount(limit.soft)}, at most {_amount(limit.hard)}") for limit in report.limits]
    for disk in report.disks:
        rows.append(
            (disk.purpose, f"{bare_gib(disk.free_bytes)} of {gib(disk.total_bytes)} free, {disk.filesystem or UNKNOWN}")
        )
    return rows


def _amount(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _libraries(libraries: Libraries) -> str:
    if libraries.python is None:
        return f"{libraries.where}: the interpreter does not answer"
    rows = [(name, version) for name, version in libraries.versions.items()]
    rows += [(kind, found or "not there") for kind, found in libraries.compilers.items()]
    return f"{libraries.where}: Python {libraries.python}\n{_rows(rows)}"


def _model(model: ModelFacts) -> list[tuple[str, str]]:
    quantization = model.quantization.label or model.quantization.method or "none declared"
    rows = [
        ("architecture", model.architecture or UNKNOWN),
        ("format", f"{model.format}, quantisation {quantization}, data type {model.text.dtype or UNKNOWN}"),
        ("weights", gib(model.weight_bytes)),
        ("chat template", {True: "there", False: "missing", None: UNKNOWN}[model.has_chat_template]),
    ]
    rows += [(file.name, f"{size(file.bytes)}, {file.kind}, {file.status}") for file in model.files]
    return rows
