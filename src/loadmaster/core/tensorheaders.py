"""The JSON header of a safetensors file: typed parse, checks, and tensors folded into groups.

A large checkpoint has 100,000 tensors, nearly all of them experts that differ in a number. So a header is parsed
once into typed objects, folded into :class:`TensorGroups` a whole run of experts at a time, and dropped.

Format: https://github.com/huggingface/safetensors (8 bytes little-endian length, JSON, data; offsets count from
the end of the JSON).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

import msgspec
from msgspec import Struct

from loadmaster.core.facts import TensorGroup

# Bits of one element, by the format's names. Source: safetensors' Dtype enum.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


_NOWHERE = (-1, -1)


class TensorHeader(Struct, gc=False):
    """One tensor of a header: ``data_offsets`` are bytes from the start of the data area."""

    # a closed set decodes without a new string per tensor
    dtype: Literal[
        "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "I16", "U16", "F16",
        "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64", "F4", "F6_E2M3", "F6_E3M2",
    ] = "BOOL"  # fmt: skip
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = _NOWHERE


class LooseTensorHeader(Struct, gc=False):
    """As :class:`TensorHeader`, for a file with a data type that the format does not know."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


AnyTensorHeader = TensorHeader | LooseTensorHeader


class HeaderError(Exception):
    """The header is not one; the message says why, in words for people."""


class Extents(Struct):
    """Where the tensors of one file lie. ``end``: bytes of data that the header describes."""

    sizes: Sequence[int]  # in the order of the header's tensors
    end: int
    overlaps: tuple[str, ...] = ()  # sentences, at most a handful
    overlap_count: int = 0


class Header(Struct):
    """A parsed header. ``unreadable`` are entries that describe no tensor, ``repeated`` keys that occur twice."""

    tensors: Mapping[str, AnyTensorHeader]
    extents: Extents
    unreadable: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()


_FAST = msgspec.json.Decoder(dict[str, TensorHeader])
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LOOSE = msgspec.json.Decoder(LooseTensorHeader)
_LIMIT = 1 << 62  # no file is larger; larger numbers are damage


def parse_header(raw: bytes) -> Header:
    """The tensors of a header's JSON text, in file order. Raises :class:`HeaderError`."""
    try:
        tensors: dict[str, Any] = _FAST.decode(raw)
    except msgspec.DecodeError:
        tensors, unreadable = _parse_slowly(raw)
        return Header(tensors, _measure(tensors), tuple(unreadable), _repeated_keys(raw))
    except (RecursionError, UnicodeDecodeError) as error:
        raise HeaderError("its JSON does not parse") from error
    tensors.pop("__metadata__", None)
    extents = _measure_tiling(tensors)
    if extents is not None:
        # Ranges that tile the data leave no room for a second tensor under a name that occurs twice.
        return Header(tensors, extents)
    unreadable = [name for name, tensor in tensors.items() if tensor.data_offsets == _NOWHERE]
    for name in unreadable:
        del tensors[name]
    return Header(tensors, _measure(tensors), tuple(unreadable), _repeated_keys(raw))


def _parse_slowly(raw: bytes) -> tuple[dict[str, AnyTensorHeader], list[str]]:
    """Entry by entry, so that one bad entry is named instead of failing the file."""
    try:
        entries = _RAW.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise HeaderError(f"its JSON does not parse ({error})") from error
    tensors: dict[str, AnyTensorHeader] = {}
    unreadable = []
    for name, text in entries.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name] = _LOOSE.decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            unreadable.append(name)
    return tensors, unreadable


def _repeated_keys(raw: bytes) -> tuple[str, ...]:
    """Names that occur more than once in an object; JSON parsers keep the last silently."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> int:
        seen: set[str] = set()
        for name, _ in items:
            if name in seen:
                repeated.append(name)
            seen.add(name)
        return 0

    try:
        json.loads(raw, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return ()
    return tuple(dict.fromkeys(repeated))


def _measure_tiling(tensors: Mapping[str, AnyTensorHeader]) -> Extents | None:
    """Sizes in header order; ``None`` unless each range begins where the one before it ends."""
    sizes: list[int] = []
    append = sizes.append
    position = 0
    for tensor in tensors.values():
        begin, end = tensor.data_offsets
        if begin != position or end < begin:
            return None
        append(end - begin)
        position = end
    return Extents(sizes, position)


def _measure(tensors: Mapping[str, AnyTensorHeader]) -> Extents:
    """The same for ranges in any order, with what overlaps and what is left out."""
    sizes = [end - begin for begin, end in (tensor.data_offsets for tensor in tensors.values())]
    problems: list[str] = []
    count = 0
    end = 0
    last = "the start"
    for begin, stop, name in sorted((*tensor.data_offsets, name) for name, tensor in tensors.items()):
        text = ""
        if begin < 0 or stop < begin or stop > _LIMIT:
            text = f"{shorten(name)}: offsets {begin} to {stop} are no range"
        elif begin < end:
            text = f"{shorten(name)} starts at byte {begin}, {end - begin} bytes before {shorten(last)} ends"
        elif begin > end:
            text = f"{begin - end} bytes of no tensor between {shorten(last)} and {shorten(name)}"
        if text:
            count += 1
            if len(problems) < 8:
                problems.append(text)
        if stop <= _LIMIT and stop > end:
            end, last = stop, name
    return Extents([max(0, min(size, _LIMIT)) for size in sizes], end, tuple(problems), count)


def shorten(name: str) -> str:
    """A tensor name as it can be shown: printable and of bearable length."""
    name = name if name.isprintable() else ascii(name)[1:-1]
    return name if len(name) <= 160 else name[:157] + "..."


def expected_bytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Shape x data type in bytes; ``None`` for an unknown data type or an impossible shape."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None or any(side < 0 or side > _LIMIT for side in shape) or len(shape) > 64:
        return None
    return (prod(shape) * bits + 7) // 8


# --------------------------------------------------------------------------------------------------------- groups

_EXPERTS = ".experts."
_DIGITS = "0123456789"
_LAYER = re.compile(r"(?:^|(?<=\.))(layers|blocks|h)\.(\d{1,6})(?=\.|$)")

# head up to ".experts.", tail from the dot behind the expert's number; no number: tail "" and the whole name as head
_Key = tuple[str, str, str, tuple[int, ...], int]


class TensorGroups:
    """Folds headers, one file after another, into :class:`TensorGroup` values."""

    def __init__(self) -> None:
        self._counts: dict[_Key, int] = {}

    def add(self, tensors: Mapping[str, AnyTensorHeader], sizes: Sequence[int]) -> None:
        """Counts one file's tensors; ``sizes`` in the same order."""
        names = list(tensors)
        values = list(tensors.values())
        counts = self._counts
        position, total = 0, len(names)
        while position < total:
            name = names[position]
            head, found, rest = name.partition(_EXPERTS)
            tail = rest.lstrip(_DIGITS) if found else ""
            if found and tail != rest and tail.startswith("."):
                end = self._add_experts(head, names, values, sizes, position, len(name) - len(tail))
                if end:
                    position = end
                    continue
            else:
                head, tail = name, ""
            value = values[position]
            key = (head, tail, value.dtype, value.shape, sizes[position])
            counts[key] = counts.get(key, 0) + 1
            position += 1

    def _add_experts(
        self,
        head: str,
        names: list[str],
        values: list[AnyTensorHeader],
        sizes: Sequence[int],
        start: int,
        prefix_length: int,
    ) -> int:
        """Counts a run of experts at once: the same tails, in the same order, for one expert after another.

        Returns the position behind the run, 0 when ``start`` begins no run that is longer than one expert. A run is
        compared name by name and value by value, only by comparisons that run in C.
        """
        prefix = names[start][:prefix_length] + "."
        period = 1
        while start + period < len(names) and names[start + period].startswith(prefix):
            period += 1
        stem = head + _EXPERTS
        end = _run_end(names, stem, start, period)
        experts = (end - start) // period
        if experts < 2:
            return 0
        end = start + experts * period
        stem_length, first_tail = len(stem), names[start][prefix_length:]
        numbers = [name[stem_length : -len(first_tail)] for name in names[start:end:period]]
        if not "".join(numbers).isdigit() or "" in numbers:
            return 0
        found: list[_Key] = []
        for offset in range(start, start + period):
            tail, value, size = names[offset][prefix_length:], values[offset], sizes[offset]
            dtype, shape, column = value.dtype, value.shape, values[offset:end:period]
            if (
                "\n".join(names[offset:end:period]) != stem + f"{tail}\n{stem}".join(numbers) + tail
                or [each.shape for each in column].count(shape) != experts
                or [each.dtype for each in column].count(dtype) != experts
                or sizes[offset:end:period].count(size) != experts
            ):
                return 0
            found.append((head, tail, dtype, shape, size))
        counts = self._counts
        for key in found:
            counts[key] = counts.get(key, 0) + experts
        return end

    def groups(self) -> tuple[TensorGroup, ...]:
        """All groups so far, in the order in which their first tensor came."""
        folded: dict[_Key, tuple[dict[int, int], list[int]]] = {}
        patterns: dict[str, tuple[str, int | None]] = {}
        for (head, tail, dtype, shape, size), count in self._counts.items():
            pattern = patterns.get(head)
            if pattern is None:
                pattern = patterns[head] = layer_pattern(head)
            stem, layer = pattern
            key = (stem, tail, dtype, shape, size)
            entry = folded.get(key)
            if entry is None:
                entry = folded[key] = ({}, [0])
            entry[1][0] += count
            if layer is not None:
                entry[0][layer] = entry[0].get(layer, 0) + count
        return tuple(
            TensorGroup(
                name=f"{stem}.experts.{{e}}{tail}" if tail else stem,
                dtype=dtype,
                shape=shape,
                nbytes=size,
                count=total[0],
                layers=layers or None,
            )
            for (stem, tail, dtype, shape, size), (layers, total) in folded.items()
        )


def layer_pattern(name: str) -> tuple[str, int | None]:
    """A tensor or module name with ``{l}`` for its layer's number, and the number."""
    match = _LAYER.search(name)
    if match is None:
        return name, None
    return f"{name[: match.start(2)]}{{l}}{name[match.end(2) :]}", int(match[2])


def _run_end(names: list[str], stem: str, start: int, period: int) -> int:
    """Behind the last name of the run that begins with ``stem``: doubling steps, then halving."""
    step, inside = period, start
    while inside + step < len(names) and names[inside + step].startswith(stem):
        inside += step
        step *= 2
    low, high = inside, min(inside + step, len(names))
    while high - low > 1:
        middle = (low + high) // 2
        if names[middle].startswith(stem):
            low = middle
        else:
            high = middle
    return high
