"""A checkpoint as text: what it is, what each part weighs, how it is quantised, and whether it is whole."""

from __future__ import annotations

from msgspec import structs

from loadmaster.core.facts import ModelFacts
from loadmaster.render.findings import findings_text, summary
from loadmaster.render.paint import Paint, plain
from loadmaster.render.units import count, parameters, size
from loadmaster.render.visible import shown

_FILES_SHOWN = 12


def model_text(model: ModelFacts, width: int = 80, paint: Paint = plain, all_files: bool = False) -> str:
    model = structs.replace(shown(model, lines=False), findings=shown(model.findings))
    blocks = [_head(model, paint)]
    if model.parts:
        blocks.append(_parts(model, paint))
    if model.quantization_by_class:
        blocks.append(_quantization(model, paint))
    blocks.append(_limits(model, paint))
    if model.files:
        blocks.append(_files(model, paint, all_files))
    if model.findings:
        blocks.append(findings_text(model.findings, width, paint))
    bad = any(finding.severity == "error" for finding in model.findings)
    verdict = paint("NOT WHOLE", "bold", "red") if bad else paint("WHOLE", "bold", "green")
    blocks.append(f"{verdict}: {summary(model.findings)}")
    return "\n\n".join(blocks)


def _head(model: ModelFacts, paint: Paint) -> str:
    label = model.quantization.label or model.quantization.method or "not quantised"
    lines = [paint(model.name, "bold")]
    lines.append(f"{model.architecture or 'architecture unknown'}, {label}")
    lines.append(f"{parameters(model.parameters)} parameters, {size(model.weight_bytes)} of weights")
    if model.path:
        lines.append(f"in {model.path}")
    if model.format == "config":
        lines.append("only the configuration is here; the tensors are computed from it")
    if model.format == "known":
        lines.append("no file is here; configuration from loadmaster's table of public models")
    return "\n".join(lines)


def _parts(model: ModelFacts, paint: Paint) -> str:
    lines = [paint(f"  {'part':<28}{'parameters':>14}{'bytes':>14}{'tensors':>10}", "bold")]
    for part in model.parts:
        lines.append(f"  {part.name:<28}{parameters(part.parameters):>14}{size(part.bytes):>14}{part.tensors:>10,}")
    return "\n".join(lines)


def _quantization(model: ModelFacts, paint: Paint) -> str:
    lines = [paint(f"  {'read from the tensors':<28}{'scheme':<28}{'bytes':>14}", "bold")]
    for row in model.quantization_by_class:
        lines.append(f"  {row.module_class:<28}{row.scheme:<28}{size(row.bytes):>14}")
    return "\n".join(lines)


def _limits(model: ModelFacts, paint: Paint) -> str:
    rows = [("positions", count(model.text.max_position_embeddings))]
    if model.processor is not None:
        p = model.processor
        rows.append(
            (
                "picture",
                f"{count(p.min_pixels)} to {count(p.max_pixels)} pixels" + (f" ({p.source})" if p.source else ""),
            )
        )
        if (
            p.max_pixels is not None
            and model.vision is not None
            and model.vision.patch_size
            and model.vision.spatial_merge_size
        ):
            area = (model.vision.patch_size * model.vision.spatial_merge_size) ** 2
            rows.append(("picture tokens", f"{area:,} pixels each, up to {p.max_pixels // area:,}"))
        if p.video_max_pixels is not None:
            rows.append(("video", f"up to {count(p.video_max_pixels)} pixels over all frames"))
    template = {True: "present", False: "missing", None: "unknown"}[model.has_chat_template]
    rows.append(("chat template", template))
    if model.auto_map:
        rows.append(("own code", "config.json names code of its own (auto_map)"))
    return "\n".join([paint("  limits", "bold"), *(f"  {name:<16}{value}" for name, value in rows)])


def _files(model: ModelFacts, paint: Paint, all_files: bool) -> str:
    worst_first = sorted(model.files, key=lambda file: (file.status == "ok", file.kind != "weights", file.name))
    shown = worst_first if all_files else worst_first[:_FILES_SHOWN]
    lines = [paint(f"  {'file':<48}{'size':>14}  status", "bold")]
    for file in shown:
        lines.append(f"  {file.name:<48}{size(file.bytes):>14}  {file.status}")
    hidden = len(model.files) - len(shown)
    if hidden:
        lines.append(f"  and {hidden} more, listed by --files")
    return "\n".join(lines)
