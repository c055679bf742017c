"""Where a model's files come from: a directory, or a hub over HTTP. Both are read through :class:`ModelSource`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from loadmaster.core.integrity import Origin

# Folders of a model directory that hold other models or tools, not this one's files.
_SKIPPED_FOLDERS = frozenset({".git", ".cache", "__pycache__", "runs", "onnx", "openvino", "gguf"})
_DEPTH = 3
_MOST_FILES = 20_000


class ModelError(Exception):
    """Nothing can be said about the model. ``hint``: what to do about it. ``code``: of failure-codes, if one fits."""

    def __init__(self, message: str, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code


class ReadError(Exception):
    """A file of the model could not be read; the message says which and why."""


class ModelSource(Protocol):
    """A model's files by name. Sizes are bytes; ``None`` is a name whose content is not there (a dangling link)."""

    label: str
    origin: Origin
    files: Mapping[str, int | None]

    def read(self, name: str, limit: int) -> bytes:
        """The whole file, at most ``limit`` bytes. Raises :class:`ReadError`."""

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``, fewer at the end of the file. Raises :class:`ReadError`."""


class LocalSource:
    """A directory. Files of sub-folders are listed with their relative path, three levels deep."""

    def __init__(self, directory: Path, origin: Origin | None = None, label: str | None = None) -> None:
        self.directory = directory
        self.origin = origin or Origin(directory=str(directory))
        self.label = label or directory.resolve().name or str(directory)
        self.files: Mapping[str, int | None] = _list(directory) | _unfinished_blobs(directory)

    def read(self, name: str, limit: int) -> bytes:
        size = self.files.get(name) or 0
        if size > limit:
            raise ReadError(f"{size} bytes, more than the {limit} that such a file may have")
        return self.read_range(name, 0, size)

    def read_range(self, name: str, start: int, length: int) -> bytes:
        try:
            with (self.directory / name).open("rb", buffering=0) as file:
                if start:
                    file.seek(start)
                chunks = []
                while length > 0 and (chunk := file.read(length)):
                    chunks.append(chunk)
                    length -= len(chunk)
        except (OSError, ValueError) as error:
            raise ReadError(f"{getattr(error, 'strerror', None) or error}") from error
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _list(directory: Path) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    _walk(directory, "", _DEPTH, found)
    return dict(sorted(found.items()))


def _walk(directory: Path, prefix: str, depth: int, found: dict[str, int | None]) -> None:
    try:
        entries = list(os.scandir(directory))
    except OSError as error:
        if not prefix:
            raise ModelError(f"{directory}: {error.strerror or error}") from error
        return
    for entry in entries:
        if len(found) >= _MOST_FILES:
            return
        name = prefix + entry.name
        try:
            if entry.is_dir(follow_symlinks=False):
                if entry.name == ".cache" and not prefix:
                    _walk_download_cache(Path(entry.path), found)
                elif depth > 1 and entry.name not in _SKIPPED_FOLDERS:
                    _walk(Path(entry.path), f"{name}/", depth - 1, found)
            elif entry.is_file():
                found[name] = entry.stat().st_size
            elif entry.is_symlink():
                found[name] = None
        except OSError:
            found[name] = None


def _unfinished_blobs(snapshot: Path) -> dict[str, int | None]:
    """The hub client's cache keeps what it is downloading in ``blobs``, two levels above a snapshot."""
    blobs = snapshot.parent.parent / "blobs"
    if snapshot.parent.name != "snapshots" or not blobs.is_dir():
        return {}
    found: dict[str, int | None] = {}
    _walk(blobs, "../../blobs/", 1, found)
    return {name: size for name, size in found.items() if name.endswith(".incomplete")}


def _walk_download_cache(directory: Path, found: dict[str, int | None]) -> None:
    """``hf download --local-dir`` keeps unfinished files under .cache/huggingface/download."""
    downloads = directory / "huggingface" / "download"
    if downloads.is_dir():
        unfinished: dict[str, int | None] = {}
        _walk(downloads, ".cache/huggingface/download/", _DEPTH, unfinished)
        found.update({name: size for name, size in unfinished.items() if name.endswith(".incomplete")})
