"""The header of one GGUF file, read as a stream with every count and length bounded.

Layout (docs/gguf.md of ggml), little-endian: magic "GGUF", version u32, tensor count u64, key count u64; per key a
string, a type u32 and the value; per tensor its name, dimension count u32, dimensions u64 (fastest first), type u32,
offset u64; then the data, aligned. A string is a length u64 and bytes. An array is a type u32, a length u64, values.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from loadmaster.core.ggufconfig import ggml_types

MAGIC = b"GGUF"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
VERSIONS = (2, 3)

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 16  # keys; the specification's bound
MAX_KEPT_TEXT_BYTES = 1 << 20  # longer strings are passed over
MAX_TEXT_BYTES = 1 << 28
MAX_KEPT_ITEMS = 4096  # longer arrays are passed over: tokenizer lists
MAX_ARRAY_ITEMS = 1 << 22
MAX_TEXTS = 1 << 22  # strings in all arrays together
MAX_KEPT_BYTES = 1 << 24  # of all keys and values together
MAX_ALIGNMENT = 1 << 20
TENSOR_NAME_BYTES = 63  # what llama.cpp accepts
_CHUNK = 1 << 20

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_U32, _U64, _TENSOR_END = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")


class HeaderError(Exception):
    """A header that cannot be read further. ``code`` is the finding's, ``args[0]`` a sentence without full stop."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TensorInfo(Struct, frozen=True):
    """One tensor: ``shape`` rows first; ``offset`` from the start of the data; ``nbytes`` None: type unknown."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int | None


class Header(Struct, frozen=True, kw_only=True):
    """``metadata``: scalars, short strings, and short arrays as tuples. ``array_lengths``: of every array."""

    version: int
    metadata: dict[str, Any]
    array_lengths: dict[str, int]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_start: int
    file_bytes: int
    problem: str | None = None  # what is wrong with a tensor's description, though it could be read


def read_header(path: Path) -> Header:
    """Read the header of ``path``.

    Raises HeaderError for what is no GGUF file or cannot be read to its end, OSError from the file system.
    """
    with path.open("rb", buffering=_CHUNK) as file:
        size = file.seek(0, 2)
        file.seek(0)
        return _Reader(file, size).header()


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size
        self.position = 0
        self.kept = 0
        self.texts = 0
        self.what = "the header"

    # -------------------------------------------------------------------------------- bytes

    def take(self, count: int) -> bytes:
        raw = self.file.read(count)
        if len(raw) != count:
            raise HeaderError("weights-truncated", f"the file ends inside its header, in {self.what}")
        self.position += count
        return raw

    def skip(self, count: int) -> None:
        if count > self.size - self.position:
            raise HeaderError(
                "weights-truncated",
                f"{self.what} says that {count:,} bytes follow, but the file has {self.left:,} more",
            )
        self.file.seek(count, 1)
        self.position += count

    @property
    def left(self) -> int:
        return self.size - self.position

    def u32(self) -> int:
        value: int = _U32.unpack(self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack(self.take(8))[0]
        return value

    def text(self, limit: int) -> str:
        length = self.u64()
        if length > limit:
            raise HeaderError("header-invalid", f"{self.what} is said to be {length:,} bytes long, more than {limit:,}")
        self.keep(length)
        return self.take(length).decode("utf-8", "replace")

    def keep(self, count: int) -> None:
        self.kept += count + 64
        if self.kept > MAX_KEPT_BYTES:
            raise HeaderError("header-invalid", f"the metadata is larger than {MAX_KEPT_BYTES >> 20} MiB")

    # -------------------------------------------------------------------------------- parts

    def header(self) -> Header:
        version, tensor_count, key_count = self.start()
        metadata: dict[str, Any] = {}
        lengths: dict[str, int] = {}
        for number in range(key_count):
            self.what = f"metadata key {number + 1} of {key_count}"
            key = self.text(MAX_NAME_BYTES)
            if key in metadata or key in lengths:
                raise HeaderError("header-invalid", f"metadata key {key[:80]!r} is there twice")
            self.what = f"metadata key {key[:80]!r}"
            kind = self.u32()
            if kind == _ARRAY:
                items, count = self.array()
                lengths[key] = count
                if items is not None:
                    metadata[key] = items
            else:
                metadata[key] = self.scalar(kind)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise HeaderError("header-invalid", f"general.alignment is {alignment!r:.40}, not a power of two")
        tensors, problem = self.tensors(tensor_count)
        start = -(-self.position // alignment) * alignment
        return Header(
            version=version,
            metadata=metadata,
            array_lengths=lengths,
            tensors=tensors,
            alignment=alignment,
            data_start=start,
            file_bytes=self.size,
            problem=problem,
        )

    def start(self) -> tuple[int, int, int]:
        first = self.file.read(24)
        self.position = len(first)
        if first[:4] != MAGIC:
            raise _not_gguf(first + self.file.read(256), self.size)
        if len(first) < 24:
            raise HeaderError("weights-truncated", f"the file ends after {len(first)} bytes, inside its header")
        version, tensor_count, key_count = struct.unpack_from("<IQQ", first, 4)
        if version & 0xFFFF == 0 and version != 0:
            raise HeaderError(
                "header-invalid", "the file is big-endian, and llama.cpp on a little-endian machine does not load it"
            )
        if version not in VERSIONS:
            known = " and ".join(str(number) for number in VERSIONS)
            raise HeaderError("header-invalid", f"GGUF version {version} is not known ({known} are)")
        for count, limit, what, least in (
            (key_count, MAX_KEYS, "metadata keys", 13),
            (tensor_count, MAX_TENSORS, "tensors", 32),
        ):
            if count > limit:
                raise HeaderError(
                    "header-invalid", f"the header says that {count:,} {what} follow, more than {limit:,}"
                )
            if count * least > self.left:
                raise HeaderError(
                    "weights-truncated",
                    f"the header says that {count:,} {what} follow, and the file has {self.left:,} bytes more",
                )
        return version, tensor_count, key_count

    def scalar(self, kind: int) -> Any:
        if kind == _STRING:
            length = self.u64()
            if length > MAX_TEXT_BYTES:
                raise HeaderError("header-invalid", f"{self.what} holds a text of {length:,} bytes")
            if length > MAX_KEPT_TEXT_BYTES:
                self.skip(length)
                return None
            self.keep(length)
            return self.take(length).decode("utf-8", "replace")
        layout = _SCALARS.get(kind)
        if layout is None:
            raise HeaderError("header-invalid", f"{self.what} has the unknown value type {kind}")
        self.keep(layout.size)
        return layout.unpack(self.take(layout.size))[0]

    def array(self) -> tuple[tuple[Any, ...] | None, int]:
        """Items of a short array, None for a long one, and the length."""
        kind, count = self.u32(), self.u64()
        if kind == _ARRAY:
            raise HeaderError("header-invalid", f"{self.what} is an array of arrays, which llama.cpp does not read")
        layout = _SCALARS.get(kind)
        if layout is None and kind != _STRING:
            raise HeaderError("header-invalid", f"{self.what} is an array of the unknown type {kind}")
        if count > MAX_ARRAY_ITEMS:
            raise HeaderError("header-invalid", f"{self.what} has {count:,} items, more than {MAX_ARRAY_ITEMS:,}")
        if layout is None:
            if count <= 64:
                return tuple(self.scalar(_STRING) for _ in range(count)), count
            self.skip_texts(count)
            return None, count
        if count > MAX_KEPT_ITEMS:
            self.skip(count * layout.size)
            return None, count
        self.keep(count * 32)
        raw = self.take(count * layout.size)
        return tuple(item for (item,) in layout.iter_unpack(raw)), count

    def skip_texts(self, count: int) -> None:
        """Pass over ``count`` strings, a chunk of the file at a time."""
        if count * 8 > self.left:
            raise HeaderError(
                "weights-truncated", f"{self.what} has {count:,} items, and the file {self.left:,} bytes more"
            )
        self.texts += count
        if self.texts > MAX_TEXTS:
            raise HeaderError("header-invalid", f"the metadata holds more than {MAX_TEXTS:,} strings")
        unpack = _U64.unpack_from
        chunk, at = b"", 0
        while count:
            if len(chunk) - at < 8:
                chunk = chunk[at:] + self.file.read(_CHUNK)
                at = 0
                if len(chunk) < 8:
                    raise HeaderError("weights-truncated", f"the file ends inside {self.what}")
            (length,) = unpack(chunk, at)
            self.position += 8 + length
            if length > MAX_TEXT_BYTES:
                raise HeaderError("header-invalid", f"{self.what} holds a text of {length:,} bytes")
            if self.position > self.size:
                raise HeaderError("weights-truncated", f"the file ends inside {self.what}")
            at += 8 + length
            if at > len(chunk):
                self.file.seek(at - len(chunk), 1)
                chunk, at = b"", 0
            count -= 1
        self.file.seek(self.position)

    def tensors(self, count: int) -> tuple[tuple[TensorInfo, ...], str | None]:
        found: list[TensorInfo] = []
        names: set[str] = set()
        problem: str | None = None
        for number in range(count):
            self.what = f"tensor {number + 1} of {count}"
            name = self.text(1024)
            self.what = f"tensor {name[:80]!r}"
            dimensions = self.u32()
            if not 0 < dimensions <= 4:
                raise HeaderError("header-invalid", f"{self.what} has {dimensions:,} dimensions, not 1 to 4")
            shape = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))
            type_id, offset = _TENSOR_END.unpack(self.take(12))
            if name in names:
                raise HeaderError("tensor-duplicate", f"{self.what} is there twice")
            names.add(name)
            if len(name.encode()) > TENSOR_NAME_BYTES and problem is None:
                problem = f"{self.what} has a name longer than the {TENSOR_NAME_BYTES} bytes that llama.cpp accepts"
            info, bad = _tensor(name, type_id, shape, offset)
            found.append(info)
            problem = problem or bad
        return tuple(found), problem


def _tensor(name: str, type_id: int, shape: tuple[int, ...], offset: int) -> tuple[TensorInfo, str | None]:
    """The tensor and what is wrong with it. ``shape`` comes with the fastest dimension first."""
    count = 1
    for length in shape:
        count *= length
    if not 0 < count < 1 << 60:
        raise HeaderError("header-invalid", f"tensor {name[:80]!r} has the impossible shape {list(shape)}")
    rows_first = tuple(reversed(shape))
    kind = ggml_types().get(type_id)
    if kind is None:
        return TensorInfo(name, type_id, rows_first, offset, None), None
    block = kind["block"]
    if shape[0] % block:
        size = -(-count // block) * kind["bytes"]
        problem = (
            f"tensor {name[:80]!r} has rows of {shape[0]:,} weights, and {kind['name']} needs a multiple of {block}"
        )
        return TensorInfo(name, type_id, rows_first, offset, size), problem
    return TensorInfo(name, type_id, rows_first, offset, count // block * kind["bytes"]), None


def _not_gguf(first: bytes, size: int) -> HeaderError:
    if size == 0:
        return HeaderError("weights-truncated", "the file is empty")
    if first.startswith(LFS_POINTER):
        return HeaderError("weights-lfs-pointer", f"the file is a Git LFS pointer of {size} bytes, not weights")
    if MAGIC.startswith(first):
        return HeaderError("weights-truncated", f"the file ends after {size} bytes, inside its header")
    if first[:4] in (b"ggjt", b"tjgg", b"lmgg", b"ggml", b"fmgg", b"ggmf"):
        return HeaderError("header-invalid", "the file is of a format before GGUF, which llama.cpp no longer loads")
    text = first.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return HeaderError("header-invalid", "the file is a web page, not weights: the download failed")
    if not first.strip(b"\0"):
        return HeaderError("header-invalid", "the file begins with zeros: the download was not written out")
    if first[:2] == b"PK":
        return HeaderError("header-invalid", "the file is a ZIP archive (a PyTorch checkpoint?), not GGUF")
    if first[8:9] == b"{":
        return HeaderError("header-invalid", "the file is safetensors, not GGUF")
    return HeaderError("header-invalid", f"the file does not begin with GGUF but with {first[:4]!r}")
