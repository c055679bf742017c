"""A GGUF model with its projector, read from the headers: ModelFacts of format "gguf".

A model is one file or the parts of a split one; its projector (``mmproj``) is a file of its own, beside it.
Nothing but headers is read, whatever the size of the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from loadmaster.core import ggufconfig
from loadmaster.core.facts import Evidence, Finding, Fix, ModelFacts, ModelFile
from loadmaster.edge.ggufheader import Header, HeaderError, read_header
from loadmaster.edge.source import ModelError

_SPLIT = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE | re.DOTALL)
_MAX_PARTS = 1000
_REFETCH = Fix("The file is damaged or not what it should be: download it again and compare its size.")
_TITLES = {
    "header-invalid": "the header of a GGUF file cannot be read",
    "weights-truncated": "a GGUF file is cut short",
    "weights-lfs-pointer": "a Git LFS pointer instead of weights",
    "weights-missing-shard": "a part of a split GGUF model is missing",
    "tensor-duplicate": "a tensor is there twice",
    "tensor-overlap": "tensors do not lie one after the other in the file",
    "quant-format-unsupported": "a number format that llama.cpp does not load",
    "processor-missing": "the projector cannot be used",
    "chat-template-missing": "no chat template",
    "config-invalid": "metadata that decides the plan is missing",
    "download-incomplete": "a download that did not finish",
}  # fmt: skip
# names of number formats that a projector is preferred in, best first
_PROJECTOR_ORDER = ("f16", "bf16", "q8_0", "f32")
_UNFINISHED = (".incomplete", ".part", ".aria2", ".crdownload", ".!qb")


class _File(Struct, frozen=True, kw_only=True):
    """One file of a model: its header, or why there is none."""

    path: Path
    header: Header | None
    bytes: int
    status: str
    findings: tuple[Finding, ...]


def read_gguf(path: Path, projector: Path | None = None) -> ModelFacts:
    """Read the model at ``path``: a GGUF file, any part of a split one, or a directory with one model.

    ``projector``: its mmproj file; None: the one beside it, if there is any.
    Damage is reported as findings. Raises ModelError when there is nothing to read.
    """
    path = path.expanduser()
    if path.is_dir():
        path = _model_in(path)
    if not path.is_file():
        _refuse(f"there is no file {path}", "give the path of a .gguf file")
    paths, missing = _parts(path)
    findings = [_missing(path, name) for name in missing]
    files = [_read(part) for part in paths]
    found = projector.expanduser() if projector is not None else find_projector(paths[0])
    projector_file: _File | None = None
    if found is not None:
        if not found.is_file():
            _refuse(f"there is no projector {found}", "give the path of the model's mmproj file")
        projector_file = _read(found)
    for file in [*files, *([projector_file] if projector_file else [])]:
        findings += file.findings
    findings += _unfinished(paths)
    return _facts(paths[0], files, missing, projector_file, findings)


def find_projector(path: Path) -> Path | None:
    """The projector beside a model: a GGUF file with ``mmproj`` in its name, best one first."""
    candidates = [
        other
        for other in _gguf_files(path.parent)
        if "mmproj" in other.name.lower() and other != path and "mmproj" not in path.name.lower()
    ]
    if not candidates:
        return None
    stem = _stem(path)

    def rank(other: Path) -> tuple[int, int, str]:
        name = other.name.lower()
        words = re.split(r"[^a-z0-9_]+", name.removesuffix(".gguf"))
        place = next((at for at, word in enumerate(_PROJECTOR_ORDER) if word in words), len(_PROJECTOR_ORDER))
        return (-_common(stem, name.replace("mmproj", "").strip("-._")), place, name)

    return min(candidates, key=rank)


def _stem(path: Path) -> str:
    match = _SPLIT.match(path.name)
    return (match["stem"] if match else path.stem).lower()


def _common(a: str, b: str) -> int:
    """Words that two names share at their start; a number format is none."""
    count = 0
    for left, right in zip(re.split(r"[-_.]+", a), re.split(r"[-_.]+", b)):
        if left != right:
            break
        count += 1
    return count


# ------------------------------------------------------------------------------------------ files


def _refuse(message: str, hint: str) -> NoReturn:
    raise ModelError(message, hint)


def _gguf_files(directory: Path) -> list[Path]:
    try:
        return sorted(p for p in directory.iterdir() if p.name.lower().endswith(".gguf") and p.is_file())
    except OSError:
        return []


def _model_in(directory: Path) -> Path:
    """The one model of a directory, first part if it is split."""
    models = [p for p in _gguf_files(directory) if "mmproj" not in p.name.lower()]
    first = [p for p in models if not (match := _SPLIT.match(p.name)) or int(match["number"]) == 1] or models[:1]
    if len(first) != 1:
        names = ", ".join(p.name for p in first[:6]) or "none"
        _refuse(f"{directory} has not one GGUF model but {len(first)}: {names}", "name the file itself")
    return first[0]


def _parts(path: Path) -> tuple[list[Path], list[str]]:
    """The files of the model in order, and the names of those that are missing."""
    match = _SPLIT.match(path.name)
    if match is None:
        return [path], []
    count = int(match["count"])
    if not 0 < count <= _MAX_PARTS:
        return [path], []
    present, missing = [], []
    for number in range(1, count + 1):
        name = f"{match['stem']}-{number:05d}-of-{match['count']}.gguf"
        part = path.with_name(name)
        if part.is_file():
            present.append(part)
        else:
            missing.append(name)
    return (present or [path]), missing


def _finding(code: str, path: Path, cause: str, severity: str = "error", fix: Fix | None = _REFETCH) -> Finding:
    return Finding(
        code=code,
        severity="error" if severity == "error" else "warning",
        title=_TITLES[code],
        cause=f"{path.name}: {cause}",
        evidence=(Evidence(source="file", text=cause, path=path.name),),
        fixes=(fix,) if fix is not None else (),
    )


def _missing(path: Path, name: str) -> Finding:
    fix = Fix(f"Download {name} into {path.parent}.")
    return _finding("weights-missing-shard", path.with_name(name), "the part is not there", fix=fix)


def _unfinished(paths: Iterable[Path]) -> list[Finding]:
    found = []
    directory = next(iter(paths)).parent
    try:
        leftovers = sorted(p for p in directory.iterdir() if p.name.lower().endswith(_UNFINISHED))
    except OSError:
        return []
    for path in leftovers[:20]:
        if ".gguf" in path.name.lower():
            cause = "a leftover of a download that did not finish"
            found.append(
                _finding("download-incomplete", path, cause, fix=Fix("Resume the download, or delete the file."))
            )
    return found


def _read(path: Path) -> _File:
    size = 0
    try:
        size = path.stat().st_size
        header = read_header(path)
    except HeaderError as error:
        status = {"weights-lfs-pointer": "lfs-pointer", "weights-truncated": "truncated"}.get(
            error.code, "header-invalid"
        )
        fix = _REFETCH
        if status == "lfs-pointer":
            fix = Fix("Fetch the real file.", command="git lfs pull")
        finding = _finding(error.code, path, str(error), fix=fix)
        return _File(path=path, header=None, bytes=size, status=status, findings=(finding,))
    except OSError as error:
        finding = _finding("header-invalid", path, f"the file cannot be read: {error.strerror or error}", fix=None)
        return _File(path=path, header=None, bytes=size, status="header-invalid", findings=(finding,))
    findings = tuple(_extents(path, header))
    status = "ok"
    if any(f.code == "weights-truncated" for f in findings):
        status = "truncated"
    elif any(f.severity == "error" for f in findings):
        status = "header-invalid"
    return _File(path=path, header=header, bytes=size, status=status, findings=findings)


def _extents(path: Path, header: Header) -> Iterable[Finding]:
    """Where the tensors lie against each other and the end of the file."""
    if header.problem is not None:
        yield _finding("header-invalid", path, header.problem)
    room = header.file_bytes - header.data_start
    kinds = ggufconfig.ggml_types()
    unknown = sorted({t.type_id for t in header.tensors if t.type_id not in kinds})
    if unknown:
        numbers = ", ".join(str(number) for number in unknown[:8])
        fix = Fix("A file in a format that this engine knows, or a newer llama.cpp.")
        yield _finding("quant-format-unsupported", path, f"number formats {numbers} are not known", fix=fix)
    removed = sorted(
        {kinds[t.type_id]["name"] for t in header.tensors if t.type_id in kinds and kinds[t.type_id].get("removed")}
    )
    if removed:
        fix = Fix("A file made for a newer llama.cpp; Q4_0 takes the place of the rearranged kinds.")
        yield _finding("quant-format-unsupported", path, f"{', '.join(removed)} is no longer loaded", fix=fix)
    outside = [t for t in header.tensors if t.offset + (t.nbytes or 0) > room]
    if outside:
        worst = max(outside, key=lambda t: t.offset + (t.nbytes or 0))
        lacking = worst.offset + (worst.nbytes or 0) - room
        cause = f"{len(outside)} of {len(header.tensors)} tensors end behind the file, {lacking:,} bytes are missing"
        yield _finding("weights-truncated", path, cause)
    ordered = sorted(header.tensors, key=lambda t: t.offset)
    expected, last = 0, None
    for tensor in ordered:
        if tensor.offset != expected:
            if tensor.offset < expected and last is not None:
                cause = f"tensor {tensor.name[:80]!r} begins inside {last.name[:80]!r}"
            else:
                cause = f"tensor {tensor.name[:80]!r} begins {tensor.offset - expected:,} bytes late"
            yield _finding("tensor-overlap", path, cause)
            return
        if tensor.nbytes is None:
            return
        expected = tensor.offset + -(-tensor.nbytes // header.alignment) * header.alignment
        last = tensor


# ------------------------------------------------------------------------------------------ facts


def _facts(
    path: Path, files: Sequence[_File], missing: Sequence[str], projector: _File | None, findings: list[Finding]
) -> ModelFacts:
    headers = [file.header for file in files if file.header is not None]
    metadata: dict[str, Any] = headers[0].metadata if headers else {}
    lengths = headers[0].array_lengths if headers else {}
    entries = _sized(headers)
    findings += _across(path, headers, missing)
    vision_metadata: dict[str, Any] = {}
    if projector is not None and projector.header is not None:
        if ggufconfig.architecture(projector.header.metadata) == "clip":
            vision_metadata = projector.header.metadata
            entries += _sized([projector.header])
        else:
            findings.append(
                _finding(
                    "processor-missing", projector.path, "its architecture is not clip, so it is no projector", fix=None
                )
            )
    names = {name for name, _, _, _ in entries}
    rows = next((shape[0] for name, _, shape, _ in entries if name == "token_embd.weight" and len(shape) == 2), None)
    vocabulary = lengths.get("tokenizer.ggml.tokens")
    groups = ggufconfig.group_tensors(entries)
    text = ggufconfig.text_config(
        metadata,
        vocab_size=vocabulary if vocabulary is not None else rows,
        tied=("output.weight" not in names) if rows else None,
    )
    vision = ggufconfig.vision_config(vision_metadata) if vision_metadata else None
    findings += _lacking(path, headers, text.hidden_size, metadata)
    name = metadata.get("general.name")
    return ModelFacts(
        name=name if isinstance(name, str) and name else path.stem,
        path=str(path),
        format="gguf",
        architecture=ggufconfig.architecture(metadata),
        model_type=ggufconfig.architecture(metadata),
        text=text,
        vision=vision,
        processor=ggufconfig.processor(vision_metadata, vision),
        quantization=ggufconfig.quantization(metadata, groups),
        quantization_by_class=ggufconfig.quantization_by_class(groups),
        tensors=groups,
        parts=ggufconfig.parts(groups),
        parameters=sum(ggufconfig.elements(group) for group in groups) if headers else None,
        weight_bytes=sum(group.total_bytes for group in groups) if headers else None,
        files=_files(files, missing, projector),
        has_chat_template=(
            any(key.startswith("tokenizer.chat_template") for key in [*metadata, *lengths]) if headers else None
        ),
        config={"gguf": metadata, "array_lengths": lengths}
        | ({"projector": vision_metadata} if vision_metadata else {}),
        findings=tuple(findings),
    )


def _files(files: Sequence[_File], missing: Sequence[str], projector: _File | None) -> tuple[ModelFile, ...]:
    known = [*files, *([projector] if projector is not None else [])]
    found = [
        ModelFile(
            name=file.path.name,
            bytes=file.bytes,
            kind="processor" if file is projector else "weights",
            status=file.status,
            tensors=len(file.header.tensors) if file.header is not None else None,
        )
        for file in known
    ]
    found += [ModelFile(name=name, bytes=0, kind="weights", status="missing") for name in missing]
    return tuple(found)


def _sized(headers: Iterable[Header]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Tensors as (name, format, shape, bytes). One of an unknown format reaches to the next."""
    kinds = ggufconfig.ggml_types()
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    for header in headers:
        ends: dict[str, int] = {}
        if any(t.nbytes is None for t in header.tensors):
            room = max(0, header.file_bytes - header.data_start)
            ordered = sorted(header.tensors, key=lambda t: t.offset)
            following = [*(t.offset for t in ordered[1:]), room]
            ends = {t.name: max(0, min(end, room) - t.offset) for t, end in zip(ordered, following, strict=True)}
        for tensor in header.tensors:
            kind = kinds.get(tensor.type_id)
            size = tensor.nbytes if tensor.nbytes is not None else ends[tensor.name]
            label = kind["name"] if kind is not None else f"ggml type {tensor.type_id}"
            entries.append((tensor.name, label, tensor.shape, size))
    return entries


def _across(path: Path, headers: Sequence[Header], missing: Sequence[str]) -> list[Finding]:
    """What only shows when the parts are seen together."""
    if not headers:
        return []
    found = []
    seen: set[str] = set()
    for header in headers:
        twice = sorted(t.name for t in header.tensors if t.name in seen)
        if twice:
            found.append(
                _finding("tensor-duplicate", path, f"{len(twice)} tensors are in two parts, the first {twice[0]!r}")
            )
            break
        seen.update(t.name for t in header.tensors)
    declared = headers[0].metadata.get("split.count")
    total = headers[0].metadata.get("split.tensors.count")
    if isinstance(declared, int) and declared > len(headers) + len(missing):
        number = headers[0].metadata.get("split.no")
        which = f"part {number + 1}" if isinstance(number, int) else "a part"
        cause = f"it is {which} of {declared}, and the others are not beside it"
        fix = Fix("Put all parts into one folder, under the names that they were published with.")
        found.append(_finding("weights-missing-shard", path, cause, fix=fix))
    elif isinstance(total, int) and not missing and total != len(seen):
        found.append(
            _finding("weights-truncated", path, f"the parts hold {len(seen):,} tensors, and {total:,} are declared")
        )
    return found


def _lacking(path: Path, headers: Sequence[Header], width: int | None, metadata: dict[str, Any]) -> list[Finding]:
    if not headers:
        return []
    found = []
    if ggufconfig.architecture(metadata) is None:
        found.append(_finding("config-invalid", path, "general.architecture is missing, so nothing loads the file"))
    elif metadata.get("general.architecture") == "clip":
        cause = "the file is a projector, not a language model"
        found.append(
            _finding(
                "config-invalid", path, cause, fix=Fix("Name the model's file; the projector goes with --projector.")
            )
        )
    elif width is None:
        found.append(
            _finding("config-invalid", path, f"{metadata['general.architecture']}.embedding_length is missing")
        )
    elif not any(key.startswith("tokenizer.chat_template") for key in metadata):
        fix = Fix("Give the template of the original model.", argv=("--chat-template-file", "TEMPLATE.jinja"))
        found.append(
            _finding(
                "chat-template-missing",
                path,
                "the file has none, so chats are not laid out as it was trained",
                "warning",
                fix,
            )
        )
    return found
