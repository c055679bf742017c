"""Where a model's files come from: a directory, or a hub over HTTP. Both are read through :class:`ModelSource`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

# Folders of a model directory that hold other models or tools, not this one's files.
_SKIPPED_FOLDERS = frozenset({".git", ".cache", "__pycache__", "runs", "onnx", "openvino", "gguf"})
_DEPTH = 3


class ReadError(Exception):
    """A file of the model could not be read; the message says which and why."""


class ModelSource(Protocol):
    """A model's files by name. Sizes are bytes; ``None`` is a name whose content is not there (a dangling link)."""

    label: str
    path: str | None
    repository: str | None  # "org/name" on a hub, when it is known
    files: Mapping[str, int | None]

    def read(self, name: str, limit: int) -> bytes:
        """The whole file, at most ``limit`` bytes. Raises :class:`ReadError`."""

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``, fewer at the end of the file. Raises :class:`ReadError`."""


class LocalSource:
    """A directory. Files of sub-folders are listed with their relative path, three levels deep."""

    def __init__(self, directory: Path, *, label: str | None = None, repository: str | None = None) -> None:
        self.directory = directory
        self.label = label or directory.name or str(directory)
        self.path: str | None = str(directory)
        self.repository = repository
        self.files: Mapping[str, int | None] = _list(directory)

    def read(self, name: str, limit: int) -> bytes:
        size = self.files.get(name) or 0
        if size > limit:
            raise ReadError(f"{name} has {size} bytes, more than the {limit} that such a file may have")
        return self.read_range(name, 0, limit)

    def read_range(self, name: str, start: int, length: int) -> bytes:
        try:
            with (self.directory / name).open("rb", buffering=0) as file:
                file.seek(start)
                chunks = []
                while length > 0 and (chunk := file.read(length)):
                    chunks.append(chunk)
                    length -= len(chunk)
        except OSError as error:
            raise ReadError(f"{name}: {error.strerror or error}") from error
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _list(directory: Path) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    _walk(directory, "", _DEPTH, found)
    return dict(sorted(found.items()))


def _walk(directory: Path, prefix: str, depth: int, found: dict[str, int | None]) -> None:
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                if depth > 1 and entry.name not in _SKIPPED_FOLDERS:
                    _walk(Path(entry.path), f"{prefix}{entry.name}/", depth - 1, found)
                elif entry.name == ".cache" and not prefix:
                    _walk_download_cache(Path(entry.path), found)
            elif entry.is_file():
                found[prefix + entry.name] = entry.stat().st_size
            elif entry.is_symlink():
                found[prefix + entry.name] = None
        except OSError:
            found[prefix + entry.name] = None


def _walk_download_cache(directory: Path, found: dict[str, int | None]) -> None:
    """``hf download --local-dir`` keeps unfinished files under .cache/huggingface/download."""
    downloads = directory / "huggingface" / "download"
    if downloads.is_dir():
        unfinished: dict[str, int | None] = {}
        _walk(downloads, ".cache/huggingface/download/", _DEPTH, unfinished)
        found.update({name: size for name, size in unfinished.items() if name.endswith(".incomplete")})
