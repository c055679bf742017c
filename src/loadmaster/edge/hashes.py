"""Content against the hashes that a download leaves behind.

Hugging Face's cache names each blob by its hash: SHA-256 for large files, the Git blob's SHA-1 for small ones.
``hf download --local-dir`` writes the same hash into ``.cache/huggingface/download/FILE.metadata``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from loadmaster.core.facts import Evidence, Finding, ModelFacts, ModelFile
from loadmaster.core.integrity import download_fix
from loadmaster.edge.source import LocalSource

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, name of the file

_CHUNK = 8 << 20
_HASH = re.compile(r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")


def verify_content(facts: ModelFacts, source: LocalSource, progress: Progress | None = None) -> ModelFacts:
    """Reads every file whose hash is known; marks each file and adds a finding for what differs."""
    expected = known_hashes(source.directory, source.files)
    total = sum(source.files[name] or 0 for name in expected)
    done = 0
    verified: dict[str, bool] = {}
    findings: list[Finding] = []
    for name, known in expected.items():
        size = source.files[name] or 0

        def report(read: int, name: str = name, before: int = done) -> None:
            if progress is not None:
                progress(before + read, total, name)

        try:
            actual = content_hash(source.directory / name, known, report)
        except OSError as error:
            findings.append(_differs(source, name, known, f"cannot be read: {error.strerror or error}"))
            verified[name] = False
        else:
            verified[name] = actual == known
            if actual != known:
                findings.append(_differs(source, name, known, f"is {actual}"))
        done += size
    unknown = [
        file.name
        for file in facts.files
        if file.kind == "weights" and file.status == "ok" and file.name not in expected
    ]
    if unknown:
        findings.append(
            Finding(
                code="hash-unknown",
                severity="note",
                title=f"No hash is known for {len(unknown)} weight file{'' if len(unknown) == 1 else 's'}",
                cause="Only the Hugging Face client's cache and its local directories carry hashes",
                evidence=tuple(Evidence(source="file", path=name, text="not hashed") for name in unknown[:10]),
            )
        )
    files = tuple(_marked(file, verified.get(file.name)) for file in facts.files)
    return msgspec.structs.replace(facts, files=files, findings=(*findings, *facts.findings))


def _marked(file: ModelFile, verified: bool | None) -> ModelFile:
    if verified is None:
        return file
    status = "hash-mismatch" if not verified and file.status == "ok" else file.status
    return msgspec.structs.replace(file, content_verified=verified, status=status)


def _differs(source: LocalSource, name: str, known: str, what: str) -> Finding:
    weights = name.endswith((".safetensors", ".bin", ".gguf"))
    return Finding(
        code="weights-truncated" if weights else "config-invalid",
        severity="error",
        title=f"{name}: the content is not what was published",
        cause="The file was damaged on the way, on the disk, or changed after the download",
        evidence=(Evidence(source="file", path=name, text=f"should hash to {known}, {what}"),),
        fixes=(download_fix(source.origin, [name], again=True),),
    )


def known_hashes(directory: Path, files: Mapping[str, int | None]) -> dict[str, str]:
    """File name → lower-case SHA-256 or Git blob SHA-1, for files whose content is there."""
    found: dict[str, str] = {}
    for name, size in files.items():
        if size is None or name.startswith(".cache/"):
            continue
        path = directory / name
        try:
            candidate = Path(path.readlink()).name if path.is_symlink() else _from_metadata(directory, name)
        except OSError:
            continue
        if candidate is not None and _HASH.match(candidate):
            found[name] = candidate
    return found


def _from_metadata(directory: Path, name: str) -> str | None:
    """Second line of the metadata file: the server's entity tag, which is the hash."""
    path = directory / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    if not path.is_file():
        return None
    with path.open("r", encoding="utf-8", errors="replace") as file:
        lines = file.read(4096).splitlines()
    return lines[1].strip().strip('"') if len(lines) > 1 else None


def content_hash(path: Path, like: str, report: Callable[[int], None]) -> str:
    """SHA-256 of the content, or the SHA-1 of its Git blob when ``like`` has 40 digits. Raises :class:`OSError`."""
    with path.open("rb", buffering=0) as file:
        if len(like) == 64:
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        buffer = bytearray(_CHUNK)
        view = memoryview(buffer)
        read = 0
        while count := file.readinto(buffer):
            digest.update(view[:count])
            read += count
            report(read)
    return digest.hexdigest()
