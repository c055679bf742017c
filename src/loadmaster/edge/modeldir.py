"""A model by name or path → :class:`ModelFacts`: configuration, headers, integrity. Weights are never loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadmaster.core import modelconfig, parts
from loadmaster.core.facts import Finding, ModelFacts, ModelFile, TensorGroup, TextConfig
from loadmaster.core.integrity import LEFTOVER_SUFFIXES, leftovers, no_weights
from loadmaster.core.quantcheck import quantization_findings, structure_findings
from loadmaster.core.quantization import quantization
from loadmaster.core.rawobject import word
from loadmaster.edge import sidefiles
from loadmaster.edge.hashes import Progress, verify_content
from loadmaster.edge.integrity import WeightIndex, WeightReport, index_name, read_index, read_weights
from loadmaster.edge.resolve import resolve
from loadmaster.edge.source import LocalSource, ModelError, ModelSource, ReadError

__all__ = ["ModelError", "Progress", "read_model", "read_source"]


def read_model(name_or_path: str, *, hash_files: bool = False, progress: Progress | None = None) -> ModelFacts:
    """Everything that configuration and headers say, with what is wrong in ``findings``.

    ``name_or_path``: a directory, a file in one, a name in the Hugging Face or ModelScope cache, or a hub name.
    ``hash_files`` reads all content and compares it with the hashes that the cache carries; ``progress`` is called
    with bytes done, bytes in all, and the file's name. Raises :class:`ModelError` when there is no model.
    """
    source = resolve(name_or_path)
    if isinstance(source, Path):
        return _read_gguf(source)
    facts = read_source(source)
    if not hash_files:
        return facts
    if not isinstance(source, LocalSource):
        raise ModelError(f"{name_or_path} is not on this machine, so there is no content to hash", "Download it first")
    return verify_content(facts, source, progress)


def _read_gguf(path: Path) -> ModelFacts:
    """A GGUF file with the projector that lies beside it, if exactly one does."""
    from loadmaster.edge.gguf import read_gguf

    projectors = [file for file in path.parent.glob("*.gguf") if "mmproj" in file.name.lower() and file != path]
    return read_gguf(path, projectors[0] if len(projectors) == 1 else None)


def read_source(source: ModelSource) -> ModelFacts:
    """The facts of any source. Raises :class:`ModelError` when it holds neither configuration nor weights."""
    side = sidefiles.read_side_files(source)
    findings = list(side.findings)
    index_file = index_name(source.files)
    index: WeightIndex | None = None
    if index_file is not None:
        try:
            index = read_index(source, index_file)
        except ReadError as error:
            findings.append(sidefiles.bad_index(source, index_file, str(error)))
    report = read_weights(source, index, index_file)
    if side.config is None and not report.files:
        if any(name.endswith(".gguf") for name in source.files):
            raise ModelError(f"{source.label} holds GGUF files only", "Download one of them and give its path")
        raise ModelError(
            f"{source.label}: neither config.json nor weights", "Give the directory that holds config.json"
        )
    config = side.config or {}
    findings[:0] = report.findings
    if not report.files:
        others = (".bin", ".pt", ".pth", ".gguf")
        findings.append(no_weights(source.origin, [name for name in source.files if name.endswith(others)]))
    unfinished = {name: size for name, size in source.files.items() if name.endswith(LEFTOVER_SUFFIXES)}
    if unfinished:
        halves = [name for name in unfinished if not name.endswith(".lock")]
        missing = [file.name for file in report.files if file.status == "missing"] if halves else []
        findings.append(leftovers(unfinished, source.origin, missing))
    return _facts(source, config, side, report, findings)


def _facts(
    source: ModelSource,
    config: Mapping[str, Any],
    side: sidefiles.SideFiles,
    report: WeightReport,
    findings: list[Finding],
) -> ModelFacts:
    problems: list[str] = []
    declared = quantization(config, side.hf_quant_config, problems)
    text = modelconfig.text_config(config)
    modules = parts.find_modules(report.groups, declared, text.num_hidden_layers)
    summed = parts.sum_parts(modules)
    if side.config is not None and not any(finding.severity == "error" for finding in report.findings):
        # with files missing or damaged, what the tensors lack is known already
        findings += quantization_findings(modules, declared)
        findings += structure_findings(modules, text)
    text = _complete(text, report.groups)
    findings += modelconfig.config_findings(config, side.preprocessor, side.video_preprocessor, problems)
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return ModelFacts(
        name=source.label,
        path=source.origin.directory,
        format="safetensors" if report.headers_read else "config",
        architecture=word(first),
        model_type=word(config.get("model_type")),
        text=text,
        vision=modelconfig.vision_config(config),
        processor=modelconfig.processor(side.preprocessor, side.video_preprocessor, config),
        quantization=declared,
        quantization_by_class=parts.sum_classes(modules),
        tensors=report.groups,
        parts=summed,
        parameters=sum(part.parameters for part in summed if part.name != "mtp") if report.headers_read else None,
        weight_bytes=sum(group.total_bytes for group in report.groups) if report.headers_read else None,
        files=_files(source, report),
        has_chat_template=side.has_chat_template,
        auto_map=isinstance(config.get("auto_map"), dict) and bool(config["auto_map"]),
        config=dict(config),
        findings=tuple(findings),
    )


def _complete(text: TextConfig, groups: tuple[TensorGroup, ...]) -> TextConfig:
    """What the configuration leaves open and the tensors show: tied embeddings, data type, MTP layers."""
    if not groups:
        return text
    changes: dict[str, Any] = {}
    if text.tie_word_embeddings is None:
        changes["tie_word_embeddings"] = not any(parts.part_of(group.name) == "language.lm_head" for group in groups)
    if text.dtype is None:
        sizes: dict[str, int] = {}
        for group in groups:
            sizes[group.dtype] = sizes.get(group.dtype, 0) + group.total_bytes
        plain = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
        known = [dtype for dtype in sizes if dtype in plain]
        if known:
            changes["dtype"] = plain[max(known, key=lambda dtype: sizes[dtype])]
    if text.num_mtp_layers is None:
        layers = [max(group.layers) + 1 for group in groups if group.layers and group.name.startswith("mtp.")]
        if layers:
            changes["num_mtp_layers"] = max(layers)
    return msgspec.structs.replace(text, **changes) if changes else text


def _files(source: ModelSource, report: WeightReport) -> tuple[ModelFile, ...]:
    weights = {file.name: file for file in report.files}
    files = dict(weights)
    for name, size in source.files.items():
        if name not in files:
            leftover = name.endswith(LEFTOVER_SUFFIXES)
            status = "missing" if size is None else "leftover" if leftover else "ok"
            kind = "leftover" if leftover else sidefiles.kind_of(name)
            files[name] = ModelFile(name=name, bytes=size or 0, kind=kind, status=status)
    return tuple(files[name] for name in sorted(files))
