"""Reads the weights of a source file by file: headers into groups, headers against index, extents against sizes.

One shard's tensors are in memory at a time. Names are compared with the index as sets; only what differs is
looked at one by one, and a header is read again only when something is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from loadmaster.core import integrity as say
from loadmaster.core.facts import Finding, Fix, ModelFile, TensorGroup
from loadmaster.core.integrity import BadFile
from loadmaster.core.tensorheaders import TensorGroups, shorten
from loadmaster.edge.safetensors import ShardError, read_header
from loadmaster.edge.source import ModelSource, ReadError

INDEX_LIMIT = 128 << 20  # bytes; the largest published index has about 50 MB
_EXAMPLES = 3  # tensor names shown of one difference


class WeightIndex(Struct):
    """``model.safetensors.index.json``: tensor name → file name."""

    weight_map: Mapping[str, str]
    total_size: int | None = None


class WeightReport(Struct):
    """What the weight files hold and what is wrong with them."""

    groups: tuple[TensorGroup, ...] = ()
    files: tuple[ModelFile, ...] = ()
    findings: tuple[Finding, ...] = ()
    headers_read: int = 0


def index_name(files: Mapping[str, Any]) -> str | None:
    """The index among a directory's files; transformers' own name first."""
    names = [name for name in files if name.endswith(".safetensors.index.json") and "/" not in name]
    return "model.safetensors.index.json" if "model.safetensors.index.json" in names else names[0] if names else None


def read_index(source: ModelSource, name: str) -> WeightIndex:
    """Raises :class:`ReadError` when the file is no index."""
    raw = source.read(name, INDEX_LIMIT)
    shards = tuple(file for file in source.files if file.endswith(".safetensors"))
    if shards:
        # File names from a closed set are shared, not decoded into one string per tensor.
        closed = dict[str, Literal[shards]]  # type: ignore[valid-type]
        # what fails here names a file that is not there, or is no index at all
        with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return _decode_index(raw, closed)
    try:
        return _decode_index(raw, dict[str, str])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ReadError(f"{error}") from error


def _decode_index(raw: bytes, map_type: Any) -> WeightIndex:
    model = msgspec.defstruct("_Index", [("weight_map", map_type), ("metadata", msgspec.Raw, msgspec.Raw(b"null"))])
    index: Any = msgspec.json.decode(raw, type=model)
    total = None
    try:
        metadata = msgspec.json.decode(index.metadata)
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
    except (msgspec.DecodeError, RecursionError):
        pass
    return WeightIndex(index.weight_map, int(total) if isinstance(total, int) and 0 < total < 1 << 62 else None)


def _by_file(weight_map: Mapping[str, str]) -> dict[str, list[str]]:
    """The index turned round: file name → tensor names."""
    named: dict[str, list[str]] = {file: [] for file in dict.fromkeys(weight_map.values())}
    add = {file: names.append for file, names in named.items()}
    for tensor, file in weight_map.items():
        add[file](tensor)
    return named


class _Reader:
    def __init__(self, source: ModelSource, index: WeightIndex | None, index_file: str | None) -> None:
        self.source = source
        self.index = index
        self.index_file = index_file or ""
        self.named = _by_file(index.weight_map) if index is not None else {}
        self.groups = TensorGroups()
        self.files: dict[str, ModelFile] = {}
        self.bad: dict[str, list[BadFile]] = {}
        self.overlaps: list[BadFile] = []
        self.unreadable: list[BadFile] = []
        self.repeated: list[BadFile] = []
        self.repeated_count = 0
        self.matched = 0
        self.data_bytes = 0
        self.strays: dict[str, list[str]] = {}  # file -> its tensors that the index puts elsewhere or nowhere
        self.seen: set[str] = set()
        self.headers_read = 0

    def read_all(self, names: Sequence[str]) -> None:
        keep_names = self.index is None and len(names) > 1
        for name in names:
            self._read(name, keep_names)

    def _read(self, name: str, keep_names: bool) -> None:
        size = self.source.files[name]
        if size is None:
            return
        try:
            header, start = read_header(self.source, name, size)
        except ShardError as error:
            self._mark(name, size, error.status)
            self.bad.setdefault(error.status, []).append(BadFile(name, error.reason))
            return
        except ReadError as error:
            self._mark(name, size, "unreadable")
            self.bad.setdefault("unreadable", []).append(BadFile(name, str(error)))
            return
        self.headers_read += 1
        tensors = header.tensors
        extents = header.extents
        self.groups.add(tensors, extents.sizes)
        self.data_bytes += extents.end
        status = "ok"
        wrong = say.wrong_size(name, start + extents.end, size)
        if wrong is not None:
            status = wrong[0]
            self.bad.setdefault(status, []).append(wrong[1])
        if extents.overlap_count:
            status = "header-invalid" if status == "ok" else status
            self.overlaps += [BadFile(name, text) for text in extents.overlaps]
        if header.unreadable:
            status = "header-invalid"
            self.unreadable.append(BadFile(name, _some("no tensor in", header.unreadable)))
        if header.repeated:
            self.repeated_count += len(header.repeated)
            self.repeated.append(BadFile(name, _some("twice in one header:", header.repeated)))
        self._mark(name, size, status, len(tensors))
        if self.index is not None:
            self._compare(name, tensors)
        elif keep_names:
            again = self.seen.intersection(tensors)
            if again:
                self.repeated_count += len(again)
                self.repeated.append(BadFile(name, _some("also in an earlier file:", sorted(again))))
            self.seen.update(tensors)

    def _mark(self, name: str, size: int, status: str, tensors: int | None = None) -> None:
        self.files[name] = ModelFile(name=name, bytes=size, kind="weights", status=status, tensors=tensors)

    def _compare(self, name: str, tensors: Mapping[str, Any]) -> None:
        assert self.index is not None
        named = self.named.get(name, ())
        if len(named) == len(tensors) and all(map(tensors.__contains__, named)):
            self.matched += len(tensors)
            return
        where = self.index.weight_map.get
        strays = [tensor for tensor in tensors if where(tensor) != name]
        self.matched += len(tensors) - len(strays)
        if strays:
            self.strays[name] = strays

    # ------------------------------------------------------------------------------------------ what it comes to

    def findings(self, unindexed: Sequence[str], absent: Mapping[str, int | None], said_by: str) -> list[Finding]:
        origin = self.source.origin
        found: list[Finding] = []
        if absent:
            total = self.index.total_size if self.index is not None else None
            missing_bytes = total - self.data_bytes if total is not None and not self.bad else None
            found.append(say.missing_shards(absent, said_by, missing_bytes, origin))
        for status in ("lfs-pointer", "truncated", "header-invalid", "unreadable"):
            if status in self.bad:
                found.append(say.bad_shards(status, self.bad[status], origin))
        if self.overlaps:
            found.append(say.overlapping(self.overlaps, origin))
        if self.unreadable:
            found.append(say.unreadable_tensors(self.unreadable, origin))
        found += self._index_findings(absent)
        if self.repeated:
            found.append(say.duplicate_tensors(self.repeated, self.repeated_count, origin))
        if unindexed:
            found.append(
                say.index_mismatch(
                    "config-invalid",
                    "note" if all(name.startswith("consolidated") for name in unindexed) else "warning",
                    f"{len(unindexed)} weight {'file' if len(unindexed) == 1 else 'files'} outside the index",
                    f"{self.index_file} does not name it",
                    [BadFile(name, "not named by the index, so the engine leaves it out") for name in unindexed],
                    Fix(why="Remove it, or fetch the index that belongs to it"),
                )
            )
        return found

    def _index_findings(self, absent: Mapping[str, int | None]) -> list[Finding]:
        if self.index is None:
            return []
        weight_map = self.index.weight_map
        nowhere: list[BadFile] = []
        elsewhere: list[BadFile] = []
        moved: set[str] = set()
        for name, strays in self.strays.items():
            unknown = [tensor for tensor in strays if tensor not in weight_map]
            if unknown:
                nowhere.append(BadFile(name, _some(f"{len(unknown)} not in the index:", unknown)))
            by_file: dict[str, list[str]] = {}
            for tensor in strays:
                if tensor in weight_map:
                    by_file.setdefault(weight_map[tensor], []).append(tensor)
            for other, tensors in by_file.items():
                there = self._names(other)
                twice = [tensor for tensor in tensors if tensor in there]
                away = [tensor for tensor in tensors if tensor not in there]
                if twice:
                    self.repeated_count += len(twice)
                    self.repeated.append(BadFile(name, _some(f"also in {other}:", twice)))
                if away:
                    moved.update(away)
                    elsewhere.append(BadFile(name, _some(f"the index says {other}:", away)))
        lacking = self._lacking(absent, moved) if self.matched < len(weight_map) else []
        fix = say.download_fix(self.source.origin, [self.index_file])
        cause = "Index and shards are of different builds, or a shard was written in part"
        found = []
        if lacking:
            title = f"{sum(_leading_number(item) for item in lacking)} tensors that the index names are in no file"
            again = say.download_fix(self.source.origin, [item.name for item in lacking], again=True)
            found.append(say.index_mismatch("weights-name-mismatch", "error", title, cause, lacking, again))
        if elsewhere:
            title = "The index puts tensors into other files than the ones that hold them"
            found.append(say.index_mismatch("config-invalid", "warning", title, cause, elsewhere, fix))
        if nowhere:
            title = "The files hold tensors that the index does not name"
            found.append(say.index_mismatch("config-invalid", "warning", title, cause, nowhere, fix))
        return found

    def _names(self, name: str) -> frozenset[str]:
        """The tensors of a file once more; empty when it cannot be read, which has its own finding."""
        size = self.source.files.get(name)
        if size is None:
            return frozenset()
        try:
            return frozenset(read_header(self.source, name, size)[0].tensors)
        except (ShardError, ReadError):
            return frozenset()

    def _lacking(self, absent: Mapping[str, int | None], moved: set[str]) -> list[BadFile]:
        assert self.index is not None
        lacking = []
        for name, tensors in self.named.items():
            state = self.files.get(name)
            if name in absent or state is None or state.tensors is None:
                continue  # the whole file has a finding of its own
            if state.tensors - len(self.strays.get(name, ())) == len(tensors):
                continue
            there = self._names(name)
            names = [tensor for tensor in tensors if tensor not in there and tensor not in moved]
            if names:
                lacking.append(BadFile(name, _some(f"{len(names)} not in the file:", names)))
        return lacking


def _leading_number(item: BadFile) -> int:
    return int(item.reason.split(" ", 1)[0])


def _some(words: str, names: Sequence[str]) -> str:
    shown = ", ".join(shorten(name) for name in names[:_EXAMPLES])
    return f"{words} {shown}" + (f" and {len(names) - _EXAMPLES} more" if len(names) > _EXAMPLES else "")


def read_weights(source: ModelSource, index: WeightIndex | None, index_file: str | None) -> WeightReport:
    """All weight files of a source. Never raises for what the files hold."""
    present = [name for name in source.files if name.endswith(".safetensors")]
    top = [name for name in present if "/" not in name]
    absent: dict[str, int | None] = {}
    unindexed: list[str] = []
    reader = _Reader(source, index, index_file)
    if index is not None:
        named = reader.named
        names = [name for name in present if name in named]
        unindexed = [name for name in top if name not in named]
        absent = {name: len(named[name]) for name in sorted(named) if source.files.get(name) is None}
        said_by = index_file or "the index"
    else:
        plain = [name for name in top if not name.startswith("consolidated")]
        names = plain or top
        unindexed = []
        absent = {name: None for name in names if source.files[name] is None}
        absent |= say.numbering_gaps(names)
        said_by = "the numbering of the other files" if say.numbering_gaps(names) else "a link"
    reader.read_all(names)
    groups = reader.groups.groups()
    findings = reader.findings(unindexed, absent, said_by)
    findings += say.group_findings(groups, source.origin)
    files = [reader.files[name] for name in names if name in reader.files]
    files += [ModelFile(name=name, bytes=0, kind="weights", status="missing") for name in absent]
    files += [
        ModelFile(name=name, bytes=source.files[name] or 0, kind="weights", status="not-indexed") for name in unindexed
    ]
    return WeightReport(groups, tuple(files), tuple(findings), reader.headers_read)
