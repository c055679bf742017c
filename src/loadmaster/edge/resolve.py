"""MODEL as people write it → the place to read: a directory, a file in one, a cached hub name, or a hub.

Caches are looked up without any network: Hugging Face's by ``HF_HUB_CACHE``, ``HF_HOME`` or ``XDG_CACHE_HOME``
(huggingface_hub's documented environment variables), ModelScope's by ``MODELSCOPE_CACHE``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from loadmaster.core.integrity import Origin
from loadmaster.edge.regularfile import kind_of
from loadmaster.edge.source import LocalSource, ModelError, ModelSource

_NAME = re.compile(
    r"^(?P<owner>[A-Za-z0-9][\w.-]{0,95})/(?P<name>[A-Za-z0-9_][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,100}))?$"
)
_CACHE_FOLDER = re.compile(r"^models--(?P<owner>.+?)--(?P<name>.+)$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


def resolve(name_or_path: str, environment: Mapping[str, str] | None = None) -> ModelSource | Path:
    """The source of a model; a :class:`Path` for a GGUF file, which has a reader of its own.

    Raises :class:`ModelError` with code ``hub-offline`` or ``gated-or-auth`` where one of them is the cause.
    """
    environment = os.environ if environment is None else environment
    if not name_or_path or "\0" in name_or_path:
        raise ModelError("no model named", "Give a directory, a file, or a name such as Qwen/Qwen3.5-9B")
    path = Path(name_or_path).expanduser()
    try:
        exists, is_directory = path.exists(), path.is_dir()
    except OSError as error:
        raise ModelError(f"{name_or_path}: {error.strerror or error}") from error
    if exists:
        return _local(path, is_directory)
    try:
        repository, revision = repository_name(name_or_path)
    except ModelError:
        raise ModelError(
            f"{name_or_path}: no such file or directory", "Give an existing path, or a hub name of the form owner/name"
        ) from None
    return _named(repository, revision, environment)


def repository_name(text: str) -> tuple[str, str | None]:
    """``owner/name`` and, after an ``@``, a revision. Raises :class:`ModelError` for anything else."""
    match = _NAME.match(text)
    if match is None or text.startswith((".", "~")) or ".." in text or "\n" in text:
        raise ModelError(f"{text!r} is no name on a hub", "For example Qwen/Qwen3.5-9B")
    return f"{match['owner']}/{match['name']}", match["revision"]


def _local(path: Path, is_directory: bool) -> ModelSource | Path:
    if not is_directory:
        kind = kind_of(path)
        if kind is not None:
            raise ModelError(f"{path} is {kind}, not a file or directory", "Give the directory that holds config.json")
        if path.suffix.lower() == ".gguf":
            return path
        path = path.parent
    if _CACHE_FOLDER.match(path.name) and (path / "snapshots").is_dir():
        snapshot = _snapshot(path, None)
        if snapshot is None:
            raise ModelError(f"{path}: the cache folder holds no snapshot", "Download the model again")
        path = snapshot
    origin = _origin(path)
    source = LocalSource(path, origin, origin.repository)
    if not any(name.endswith(".safetensors") for name in source.files):
        gguf = sorted(name for name in source.files if name.endswith(".gguf") and "/" not in name)
        models = [name for name in gguf if "mmproj" not in name.lower()]
        if models and "config.json" not in source.files:
            return path / models[0]
    return source


def _origin(directory: Path) -> Origin:
    """The repository that a path of a hub's cache names in itself."""
    parts = directory.parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and (match := _CACHE_FOLDER.match(parts[-3])):
        return Origin(str(directory), f"{match['owner']}/{match['name']}", in_cache=True)
    if len(parts) >= 4 and "modelscope" in "/".join(parts[:-2]).lower() and parts[-3] in ("models", "hub"):
        return Origin(str(directory), f"{parts[-2]}/{parts[-1]}".replace("___", "."), "modelscope", in_cache=True)
    return Origin(str(directory))


# ------------------------------------------------------------------------------------------------------ by name


def _named(repository: str, revision: str | None, environment: Mapping[str, str]) -> ModelSource:
    cached = [_in_hugging_face_cache(repository, revision, environment)]
    modelscope = _in_modelscope_cache(repository, environment)
    if environment.get("VLLM_USE_MODELSCOPE", "").upper() in _TRUE:
        cached.insert(0, modelscope)
    else:
        cached.append(modelscope)
    partial: ModelSource | None = None
    for directory in cached:
        if directory is None:
            continue
        source = LocalSource(directory, _origin_of(directory, repository), repository)
        if any(".safetensors" in name for name in source.files):
            return source
        partial = partial or source
    offline = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environment.get(name, "").upper() in _TRUE
    ]
    if offline:
        if partial is not None:
            return partial
        raise ModelError(
            f"{repository} is in no cache, and {offline[0]} forbids the network",
            "Give the path of a complete local directory, or unset " + offline[0],
            "hub-offline",
        )
    from loadmaster.edge.hub import open_hub  # the HTTP client, imported only when it is needed

    try:
        return open_hub(repository, revision or "main", environment)
    except ModelError:
        if partial is not None:
            return partial
        raise


def _origin_of(directory: Path, repository: str) -> Origin:
    hub = "huggingface" if directory.parent.name == "snapshots" else "modelscope"
    return Origin(str(directory), repository, hub, in_cache=True)


def hugging_face_home(environment: Mapping[str, str]) -> Path:
    """``HF_HOME``, else ``$XDG_CACHE_HOME/huggingface``, else ``~/.cache/huggingface``."""
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser()
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else _home(environment) / ".cache") / "huggingface"


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment["HOME"]) if environment.get("HOME") else Path.home()


def _in_hugging_face_cache(repository: str, revision: str | None, environment: Mapping[str, str]) -> Path | None:
    stated = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    cache = Path(stated).expanduser() if stated else hugging_face_home(environment) / "hub"
    folder = cache / ("models--" + repository.replace("/", "--"))
    return _snapshot(folder, revision) if folder.is_dir() else None


def _snapshot(folder: Path, revision: str | None) -> Path | None:
    """The snapshot of a revision: a commit, what ``refs`` says, else (for no revision) the newest there is."""
    snapshots = folder / "snapshots"
    try:
        if revision is not None and _COMMIT.match(revision):
            found = snapshots / revision
            return found if found.is_dir() else None
        reference = folder / "refs" / (revision or "main")
        if reference.is_file():
            commit = reference.read_text("ascii", "replace")[:64].strip()
            if _COMMIT.match(commit) and (snapshots / commit).is_dir():
                return snapshots / commit
        if revision is not None:
            return None
        there = [entry for entry in snapshots.iterdir() if entry.is_dir()]
        return max(there, key=lambda entry: entry.stat().st_mtime) if there else None
    except OSError:
        return None


def modelscope_cache(environment: Mapping[str, str]) -> Path:
    """``MODELSCOPE_CACHE``, else ``~/.cache/modelscope/hub``."""
    stated = environment.get("MODELSCOPE_CACHE")
    return Path(stated).expanduser() if stated else _home(environment) / ".cache" / "modelscope" / "hub"


def _in_modelscope_cache(repository: str, environment: Mapping[str, str]) -> Path | None:
    """``hub/models/owner/name`` and the older ``hub/owner/name``; a dot in the name is written ``___``."""
    cache = modelscope_cache(environment)
    owner, name = repository.split("/")
    for root in (cache / "models", cache, cache / "hub" / "models", cache / "hub"):
        for written in (name.replace(".", "___"), name):
            found = root / owner / written
            if (found / "config.json").exists() or (found / "configuration.json").exists():
                return found
    return None
