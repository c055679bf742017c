"""A repository of a hub → a folder here: which files, where to, how much room, and then the download.

Without a folder of the caller's, files go where others look for them: Hugging Face's cache (blobs by hash,
snapshots of links) or ModelScope's. With huggingface_hub installed it does the transfer (it has faster ways);
what it brings is checked here all the same, and what it does not bring is fetched here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from loadmaster.core.facts import GIB
from loadmaster.core.hubfiles import ManyModelsError, needed_files
from loadmaster.edge.download import DownloadError, RemoteFile, alone, bytes_missing, download, free_bytes, safe_name
from loadmaster.edge.hashes import Progress
from loadmaster.edge.hub import HubSource, open_hub
from loadmaster.edge.modelscope import open_modelscope
from loadmaster.edge.resolve import hugging_face_home, modelscope_cache
from loadmaster.edge.source import ModelError

Hub = Literal["hf", "modelscope"]
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_LOOK_EVERY_S = 0.5


class Fetch(Struct, frozen=True, kw_only=True):
    """What will be fetched. ``folder``: what the model is called by afterwards. ``base``: where the bytes go.

    ``links``: place of a link → the file it leads to, made when everything is there. ``reference``: file of the
    cache that says which commit a revision is.
    """

    source: HubSource
    names: tuple[str, ...]
    files: tuple[RemoteFile, ...]
    folder: Path
    base: Path
    links: tuple[tuple[Path, Path], ...] = ()
    reference: Path | None = None

    @property
    def total_bytes(self) -> int:
        return sum(file.size or 0 for file in self.files)

    @property
    def unknown_sizes(self) -> int:
        return sum(file.size is None for file in self.files)

    @property
    def missing_bytes(self) -> int:
        return bytes_missing(self.files)

    @property
    def free_bytes(self) -> int | None:
        return free_bytes(self.base)


def prepare(
    repository: str,
    hub: Hub,
    *,
    revision: str | None = None,
    to: Path | None = None,
    include: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Fetch:
    """Lists the repository and says what goes where; nothing is written.

    Raises :class:`ModelError` when the hub cannot be asked, and :class:`DownloadError` when there is nothing to fetch.
    """
    environment = os.environ if environment is None else environment
    for variable in _OFFLINE:
        if hub == "hf" and environment.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ModelError(f"{variable} forbids the network", f"unset {variable}", "hub-offline")
    source = (
        open_hub(repository, revision or "main", environment)
        if hub == "hf"
        else open_modelscope(repository, revision or "master", environment)
    )
    unsafe = next((name for name in source.files if not safe_name(name)), None)
    if unsafe is not None:
        raise DownloadError(f"{source.client.host} lists a file {unsafe!r}, which would lie outside the folder")
    try:
        names = needed_files(source.files, include)
    except ManyModelsError as error:
        shown = ", ".join(error.names[:8]) + (", …" if len(error.names) > 8 else "")
        raise DownloadError(f"{repository} holds {error}: {shown}", "choose with --include '*NAME*'") from None
    if not names:
        raise DownloadError(f"{repository} holds no file" + (" of these names" if include else ""))
    if to is not None:
        return _into(source, names, to.absolute())
    if hub == "modelscope":
        owner, name = repository.split("/")
        return _into(source, names, modelscope_cache(environment) / "models" / owner / name.replace(".", "___"))
    return _into_cache(source, names, repository, revision or "main", environment)


def _into(source: HubSource, names: Sequence[str], folder: Path) -> Fetch:
    files = tuple(RemoteFile(name, folder / name, source.files[name], source.hashes.get(name)) for name in names)
    return Fetch(source=source, names=tuple(names), files=files, folder=folder, base=folder)


def _into_cache(
    source: HubSource, names: Sequence[str], repository: str, revision: str, environment: Mapping[str, str]
) -> Fetch:
    """Blobs by their hash and a snapshot of links; a file whose hash is not told lies in the snapshot itself."""
    stated = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    cache = Path(stated).expanduser() if stated else hugging_face_home(environment) / "hub"
    base = cache.absolute() / f"models--{repository.replace('/', '--')}"
    snapshot = base / "snapshots" / source.commit
    files: list[RemoteFile] = []
    links: list[tuple[Path, Path]] = []
    for name in names:
        known = source.hashes.get(name)
        place = base / "blobs" / known if known is not None else snapshot / name
        if known is not None:
            links.append((snapshot / name, place))
        if all(file.place != place for file in files):  # files of one content are one blob
            files.append(RemoteFile(name, place, source.files[name], known))
    return Fetch(
        source=source,
        names=tuple(names),
        files=tuple(files),
        folder=snapshot,
        base=base,
        links=tuple(links),
        reference=base / "refs" / revision if revision != source.commit else None,
    )


def has_library() -> bool:
    """Whether huggingface_hub is installed."""
    return importlib.util.find_spec("huggingface_hub") is not None


def fetch(prepared: Fetch, progress: Progress | None = None, *, with_library: bool | None = None) -> str | None:
    """Downloads and checks everything; returns what the library could not do, if it was tried and failed.

    Raises :class:`DownloadError` and :class:`ModelError`; what came is kept.
    """
    missing, free = prepared.missing_bytes, prepared.free_bytes
    if free is not None and missing > free:
        raise DownloadError(
            f"the disk has too little room at {prepared.base}: "
            f"{missing / GIB:.2f} GiB needed, {free / GIB:.2f} GiB free",
            "make room, or name another place with --to DIR",
        )
    failed = None
    with alone(prepared.base):
        if (has_library() if with_library is None else with_library) and prepared.source.hub == "huggingface":
            failed = _with_library(prepared, progress)
        download(prepared.files, prepared.source, progress)
        try:
            for link, target in prepared.links:
                _link(link, target)
            if prepared.reference is not None:
                prepared.reference.parent.mkdir(parents=True, exist_ok=True)
                prepared.reference.write_text(prepared.source.commit, encoding="ascii")
        except OSError as error:
            raise DownloadError(f"cannot write {prepared.base}: {(error.strerror or str(error)).lower()}") from None
    return failed


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    relative = Path(os.path.relpath(target, link.parent))
    if not link.is_symlink() or link.readlink() != relative:
        link.unlink(missing_ok=True)
        link.symlink_to(relative)


def _with_library(prepared: Fetch, progress: Progress | None) -> str | None:
    """huggingface_hub's own download of the same files; None when it has brought all, else why not."""
    library: Any = importlib.import_module("huggingface_hub")
    importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    source = prepared.source
    in_cache = prepared.folder != prepared.base
    try:
        with _watched(prepared, progress):
            library.snapshot_download(
                source.label,
                revision=source.commit,
                allow_patterns=[_literal(name) for name in prepared.names],
                endpoint=source.client.endpoint,
                token=source.client.token or False,
                cache_dir=prepared.base.parent if in_cache else None,
                local_dir=None if in_cache else prepared.folder,
            )
    except KeyboardInterrupt:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"huggingface_hub: {first[:200] or type(error).__name__}"
    return None


def _literal(name: str) -> str:
    """A pattern that matches this name alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


@contextlib.contextmanager
def _watched(prepared: Fetch, progress: Progress | None) -> Iterator[None]:
    """Reports what has come by looking at the files, for a downloader that does not tell."""
    if progress is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        before = _taken(prepared.base)
        already = prepared.total_bytes - prepared.missing_bytes
        while not ended.wait(_LOOK_EVERY_S):
            done = min(already + max(_taken(prepared.base) - before, 0), prepared.total_bytes)
            progress(done, max(prepared.total_bytes, 1), prepared.source.label)

    thread = threading.Thread(target=watch, name="download-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _taken(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(parent, name).lstat().st_size
    return total
