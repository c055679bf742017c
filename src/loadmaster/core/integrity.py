"""Findings about the files of a checkpoint: each says which file, by how much, and the command that mends it.

Pure: :mod:`loadmaster.edge.integrity` reads the files and hands over what it saw.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from loadmaster.core.facts import Evidence, Finding, Fix, Severity, TensorGroup
from loadmaster.core.tensorheaders import expected_bytes, shorten

_SHOWN = 10  # evidence lines of one finding
LEFTOVER_SUFFIXES = (
    ".incomplete",
    ".part",
    ".aria2",
    ".lock",
    ".tmp",
    ".crdownload",
    ".partial",
    ".download",
    ".aria2__temp",
)
SHARD_NAME = re.compile(r"^(?P<stem>.*?)-?(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors$")


class Origin(Struct, frozen=True):
    """Where a model lies and where it came from, for commands that mend it."""

    directory: str | None = None
    repository: str | None = None  # "org/name"
    hub: str = "huggingface"  # or "modelscope"
    in_cache: bool = False  # the directory is managed by the hub's client


class BadFile(Struct, frozen=True):
    """A file with what is wrong with it, in words."""

    name: str
    reason: str


def _files(items: Sequence[BadFile]) -> tuple[Evidence, ...]:
    shown = [Evidence(source="file", path=shorten(item.name), text=item.reason) for item in items[:_SHOWN]]
    if len(items) > _SHOWN:
        shown.append(Evidence(source="file", text=f"and {len(items) - _SHOWN} more"))
    return tuple(shown)


def foreign_content(start: bytes) -> str | None:
    """What a file that should be JSON or weights is instead, by its first bytes; ``None`` if they do not tell."""
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<body", b"<error")):
        return "a web page (HTML or XML) saved under this name, an error page most likely"
    if start.startswith(b"PK\x03\x04"):
        return "a ZIP archive, as torch.save writes"
    if start.startswith(b"GGUF"):
        return "a GGUF file under another name"
    if start and not any(start):
        return f"the first {len(start)} bytes are zeros: space was set aside and never written"
    return None


def is_pointer(start: bytes) -> bool:
    """Git LFS leaves such a text in place of a large file."""
    return start.startswith(b"version https://git-lfs")


def pointer_reason(start: bytes, size: int) -> str:
    """``size``: of the pointer; the size of what it stands for is read from it."""
    for line in start.split(b"\n"):
        key, _, value = line.partition(b" ")
        if key == b"size" and value.isdigit() and len(value) < 20:
            return f"{size:,} bytes of text: a Git LFS pointer to {int(value):,} bytes"
    return f"{size:,} bytes of text: a Git LFS pointer"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def download_fix(origin: Origin, names: Sequence[str], why: str | None = None, *, again: bool = False) -> Fix:
    """Fetches ``names``: a command when the repository is known, else the names. ``again``: over a damaged copy."""
    names = [shorten(name) for name in names]
    shown = list(names[:_SHOWN])
    listed = ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
    if origin.repository is None:
        return Fix(why=why or (f"Fetch again from where the model came from: {listed}" if listed else "Fetch again"))
    few = list(names) if len(names) <= _SHOWN else []
    if origin.hub == "modelscope":
        words = ["modelscope", "download", "--model", origin.repository, *few]
        target = ["--local_dir", origin.directory] if origin.directory else []
    else:
        words = ["hf", "download", origin.repository]
        for name in few:
            words += ["--include", name]
        words += ["--force-download"] if again else []
        target = ["--local-dir", origin.directory] if origin.directory and not origin.in_cache else []
    return Fix(why=why or f"Fetches {listed or 'what is missing'}", command=shlex.join(words + target))


# -------------------------------------------------------------------------------------------------- weight files

_SHARD_CODES: dict[str, tuple[str, str, str]] = {
    "lfs-pointer": (
        "weights-lfs-pointer",
        "a Git LFS pointer instead of the file",
        "The repository was cloned without its large files; the engine says HeaderTooLarge",
    ),
    "truncated": (
        "weights-truncated",
        "cut short or damaged",
        "The download or copy ended early; the engine says MetadataIncompleteBuffer",
    ),
    "unreadable": ("header-invalid", "cannot be read", "Permissions, or an error of the disk or the network"),
    "header-invalid": (
        "header-invalid",
        "without a readable safetensors header",
        "The file is not what its name says; the engine says HeaderTooLarge or InvalidHeaderDeserialization",
    ),
}


def bad_shards(status: str, files: Sequence[BadFile], origin: Origin) -> Finding:
    """Weight files with ``status`` ``lfs-pointer``, ``truncated`` or ``header-invalid``."""
    code, what, cause = _SHARD_CODES[status]
    names = [shorten(item.name) for item in files]
    fixes = [download_fix(origin, names, again=True)]
    if status == "unreadable":
        fixes = [Fix(why="Make the file readable for this user, or fetch it again")]
    if status == "lfs-pointer":
        where = f" -C {shlex.quote(origin.directory)}" if origin.directory else ""
        fixes.insert(0, Fix(why="Fetches the large files of a clone", command=f"git{where} lfs pull"))
    return Finding(
        code=code,
        severity="error",
        title=f"{names[0] if len(names) == 1 else _count(len(names), 'weight file')}: {what}",
        cause=cause,
        evidence=_files(files),
        fixes=tuple(fixes),
    )


def missing_shards(
    missing: Mapping[str, int | None],
    said_by: str,
    missing_bytes: int | None,
    origin: Origin,
) -> Finding:
    """Files that the index (or the numbering) names and that are not there; values: tensors in each, if known."""
    size = f"; {missing_bytes:,} bytes of tensors are missing" if missing_bytes and missing_bytes > 0 else ""
    files = [
        BadFile(name, f"named by {said_by}" + (f" for {_count(tensors, 'tensor')}" if tensors else "") + ", not there")
        for name, tensors in missing.items()
    ]
    names = [shorten(name) for name in missing]
    return Finding(
        code="weights-missing-shard",
        severity="error",
        title=f"{names[0] if len(names) == 1 else _count(len(names), 'weight file')} missing{size}",
        cause="The download did not finish, or a link of the cache points to a file that was removed",
        evidence=_files(files),
        fixes=(download_fix(origin, names),),
    )


def no_weights(origin: Origin, other: Sequence[str] = ()) -> Finding:
    """``other``: weight files of formats whose headers are not read (PyTorch's)."""
    if other:
        return Finding(
            code="weights-missing-shard",
            severity="warning",
            title=f"No safetensors file; {_count(len(other), 'file')} of other formats cannot be looked into",
            cause="PyTorch's files are programs for an unpickler: only their sizes are read, the plan has no tensors",
            evidence=_files([BadFile(name, "not read") for name in other]),
            fixes=(download_fix(origin, ["*.safetensors"], "Use the repository's safetensors files, if it has them"),),
        )
    return Finding(
        code="weights-missing-shard",
        severity="error",
        title="No weight files",
        cause="There is a configuration and no *.safetensors file",
        evidence=(Evidence(source="file", path=origin.directory, text="no file matches *.safetensors"),),
        fixes=(download_fix(origin, ["*.safetensors"]),),
    )


def numbering_gaps(names: Iterable[str]) -> dict[str, None]:
    """Names that a numbered set (``…-00002-of-00005.safetensors``) lacks."""
    present = set(names)
    gaps: dict[str, None] = {}
    for name in sorted(present):
        match = SHARD_NAME.match(name)
        if match is None or not 0 < int(match["total"]) <= 2000:
            continue
        start = name[: match.start("number")]
        for number in range(1, int(match["total"]) + 1):
            other = f"{start}{number:05d}-of-{match['total']}.safetensors"
            if other not in present:
                gaps[other] = None
    return gaps


def wrong_size(name: str, expected: int, actual: int) -> tuple[str, BadFile] | None:
    """Header and file disagree on the length. Returns the status and the reason, ``None`` when they agree."""
    if expected == actual:
        return None
    if actual < expected:
        return "truncated", BadFile(
            name,
            f"header and tensors need {expected:,} bytes, the file has {actual:,}: {expected - actual:,} are missing",
        )
    return "truncated", BadFile(
        name, f"header and tensors need {expected:,} bytes, the file has {actual:,}: {actual - expected:,} too many"
    )


def overlapping(files: Sequence[BadFile], origin: Origin) -> Finding:
    return Finding(
        code="tensor-overlap",
        severity="error",
        title=f"Data ranges overlap, leave gaps or are no ranges in {_count(len({f.name for f in files}), 'file')}",
        cause="The header was damaged or written by a faulty tool; the engine says InvalidOffset or TensorInvalidInfo",
        evidence=_files(files),
        fixes=(download_fix(origin, sorted({f.name for f in files})),),
    )


def unreadable_tensors(files: Sequence[BadFile], origin: Origin) -> Finding:
    return Finding(
        code="header-invalid",
        severity="error",
        title=f"Header entries that describe no tensor in {_count(len({f.name for f in files}), 'file')}",
        cause="An entry lacks a usable dtype, shape or data_offsets; the engine says InvalidHeaderDeserialization",
        evidence=_files(files),
        fixes=(download_fix(origin, sorted({f.name for f in files})),),
    )


def duplicate_tensors(files: Sequence[BadFile], tensors: int, origin: Origin) -> Finding:
    return Finding(
        code="tensor-duplicate",
        severity="error",
        title=f"{_count(tensors, 'tensor')} stored twice",
        cause="The engine loads the last one silently; a stray shard of another build, or a faulty conversion",
        evidence=_files(files),
        fixes=(download_fix(origin, sorted({f.name for f in files}), "Remove the stray file or fetch again"),),
    )


def index_mismatch(
    code: str, severity: Severity, title: str, cause: str, files: Sequence[BadFile], fix: Fix
) -> Finding:
    """Index and files disagree: ``weights-name-mismatch`` when tensors are lacking, else ``config-invalid``."""
    return Finding(code=code, severity=severity, title=title, cause=cause, evidence=_files(files), fixes=(fix,))


def group_findings(groups: Iterable[TensorGroup], origin: Origin) -> list[Finding]:
    """Data types that nobody knows, and extents that are not shape x data type."""
    unknown: list[BadFile] = []
    wrong: list[BadFile] = []
    for group in groups:
        expected = expected_bytes(group.dtype, group.shape)
        name = shorten(group.name)
        where = f"{name} ({_count(group.count, 'tensor')})"
        shape = list(group.shape[:8])
        if any(side < 0 for side in group.shape):
            wrong.append(BadFile(name, f"{where}: shape {shape} has a negative side"))
        elif expected is None:
            unknown.append(BadFile(name, f"{where}: data type {shorten(group.dtype)!r} is not one of the format's"))
        elif expected != group.nbytes:
            wrong.append(
                BadFile(name, f"{where}: {group.nbytes:,} bytes, but shape {shape} of {group.dtype} is {expected:,}")
            )
    findings = []
    if unknown:
        findings.append(
            Finding(
                code="header-invalid",
                severity="error",
                title=f"Unknown data type in {_count(len(unknown), 'tensor pattern')}",
                cause="The header is damaged, or newer than this program knows; the engine may refuse it",
                evidence=tuple(Evidence(source="file", text=item.reason) for item in unknown[:_SHOWN]),
                fixes=(download_fix(origin, ["*.safetensors"]),),
                confidence="likely",
            )
        )
    if wrong:
        findings.append(
            Finding(
                code="tensor-overlap",
                severity="error",
                title=f"Extent is not shape x data type in {_count(len(wrong), 'tensor pattern')}",
                cause="The header was damaged or written by a faulty tool; the engine says TensorInvalidInfo",
                evidence=tuple(Evidence(source="file", text=item.reason) for item in wrong[:_SHOWN]),
                fixes=(download_fix(origin, ["*.safetensors"]),),
            )
        )
    return findings


# --------------------------------------------------------------------------------------------------- small files


def bad_json(
    name: str,
    reason: str,
    size: int,
    code: str,
    origin: Origin,
    severity: Severity = "error",
) -> Finding:
    return Finding(
        code=code,
        severity=severity,
        title=f"{name} is no JSON object",
        cause="The file is cut short or damaged",
        evidence=(Evidence(source="file", path=name, text=f"{size:,} bytes; {reason}"),),
        fixes=(download_fix(origin, [name]),),
    )


def missing_file(code: str, name: str, title: str, cause: str, severity: Severity, origin: Origin) -> Finding:
    return Finding(
        code=code,
        severity=severity,
        title=title,
        cause=cause,
        evidence=(Evidence(source="file", path=name, text="not there"),),
        fixes=(download_fix(origin, [name]),),
    )


def leftovers(files: Mapping[str, int | None], origin: Origin, missing: Collection[str] = ()) -> Finding:
    """``missing``: weight files that are not there. With any of them the download is surely not finished."""
    items = [
        BadFile(name, f"{size:,} bytes" if size is not None else "a dangling link") for name, size in files.items()
    ]
    total = sum(size or 0 for size in files.values())
    fix = download_fix(origin, [], "Resume the download, or remove the leftovers if it is complete")
    return Finding(
        code="download-incomplete",
        severity="error" if missing else "warning",
        title=f"{_count(len(items), 'leftover')} of an unfinished download, {total:,} bytes",
        cause="A downloader leaves such files while it works or after it was stopped"
        + (
            f"; {_count(len(missing), 'weight file')} {'is' if len(missing) == 1 else 'are'} not there"
            if missing
            else ""
        ),
        evidence=_files(items),
        fixes=(fix,),
        confidence="certain" if missing else "likely",
    )
