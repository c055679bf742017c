"""Tensor groups → parts of the model, schemes per module class, and parameters.

Parts are named in ``core/data/tensor-parts.toml``. A quantised weight and its scales, zero points and shapes are
one thing here: they share a module name and differ in a suffix. Parameters are counted unpacked, so a 4-bit
weight stored eight to an integer counts eight times its elements; scales count none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

from msgspec import Struct

from loadmaster.core.facts import ClassQuantization, Part, Quantization, TensorGroup
from loadmaster.core.tables import load_toml
from loadmaster.core.tensorheaders import DTYPE_BITS

_PLAIN = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class Module(Struct, frozen=True):
    """One quantised or plain weight pattern with everything stored beside it."""

    name: str  # pattern without suffix
    part: str
    weight: TensorGroup
    companions: tuple[tuple[str, TensorGroup], ...]  # suffix, group
    scheme: str
    parameters: int  # of ONE such weight
    bits: float | None  # stored bits of one parameter, scales not counted
    group_size: int | None = None
    layout: str = "plain"  # how the weight is stored; names in core/data/tensor-parts.toml, [layouts]

    @property
    def quantised(self) -> bool:
        return self.layout != "plain"

    @property
    def bytes(self) -> int:
        return self.weight.total_bytes + sum(group.total_bytes for _, group in self.companions)


@lru_cache(maxsize=4096)
def part_of(name: str) -> str:
    """The part that a tensor name belongs to, ``"other"`` when no rule knows it."""
    for part, pattern, unless in _part_rules():
        if pattern.search(name) and not (unless and unless.search(name)):
            return part
    return "other"


@lru_cache(maxsize=1)
def _part_rules() -> tuple[tuple[str, re.Pattern[str], re.Pattern[str] | None], ...]:
    return tuple(
        (rule["name"], re.compile(rule["pattern"]), re.compile(rule["not"]) if "not" in rule else None)
        for rule in load_toml("tensor-parts.toml")["parts"]
    )


@lru_cache(maxsize=1)
def _suffixes() -> tuple[tuple[str, str], ...]:
    rows = ((row["suffix"], row["role"]) for row in load_toml("tensor-parts.toml")["suffixes"])
    return tuple(sorted(rows, key=lambda row: -len(row[0])))


@lru_cache(maxsize=4096)
def split_suffix(name: str) -> tuple[str, str, str]:
    """``(module, suffix, role)``; role ``"weight"``, ``"companion"``, or ``"plain"`` for a tensor of its own."""
    for suffix, role in _suffixes():
        if name.endswith(suffix):
            return name[: -len(suffix)], suffix, role
    return name, "", "plain"


def find_modules(
    groups: Iterable[TensorGroup], declared: Quantization, num_hidden_layers: int | None = None
) -> tuple[Module, ...]:
    """Weights with their companions. Groups whose layers lie beyond the decoder's are split off as ``mtp``."""
    weights: dict[tuple[str, bool], list[tuple[str, TensorGroup]]] = {}
    companions: dict[tuple[str, bool], list[tuple[str, TensorGroup]]] = {}
    for group, beyond in _split_beyond(groups, num_hidden_layers):
        module, suffix, role = split_suffix(group.name)
        (companions if role == "companion" else weights).setdefault((module, beyond), []).append((suffix, group))
    modules: list[Module] = []
    for (module, beyond), found in weights.items():
        part = "mtp" if beyond else part_of(found[0][1].name)
        beside = companions.pop((module, beyond), [])
        for suffix, group in found:
            packed = suffix in (".qweight", ".weight_packed", "_blocks") or group.dtype not in _PLAIN
            own = tuple(beside) if packed and beside else ()
            if own:
                beside = []
            modules.append(_module(module, part, suffix, group, own, declared))
        for suffix, group in beside:  # scales beside an unquantised weight, as KV cache scales are
            modules.append(_bare(module + suffix, part, group))
    for (module, beyond), orphans in companions.items():
        for suffix, group in orphans:
            part = "mtp" if beyond else part_of(group.name)
            modules.append(_bare(module + suffix, part, group))
    return tuple(modules)


def _split_beyond(groups: Iterable[TensorGroup], num_hidden_layers: int | None) -> Iterable[tuple[TensorGroup, bool]]:
    """DeepSeek keeps its MTP layer behind the last decoder layer, under the decoder's own names."""
    for group in groups:
        layers = group.layers
        if (
            not layers
            or num_hidden_layers is None
            or max(layers) < num_hidden_layers
            or not part_of(group.name).startswith("language.")
        ):
            yield group, False
            continue
        for beyond in (False, True):
            own = {layer: count for layer, count in layers.items() if (layer >= num_hidden_layers) is beyond}
            if own:
                count = sum(own.values())
                yield TensorGroup(group.name, group.dtype, group.shape, group.nbytes, count, own), beyond


def _bare(name: str, part: str, group: TensorGroup) -> Module:
    return Module(name, part, group, (), "scales without a weight", 0, None)


def _module(
    name: str,
    part: str,
    suffix: str,
    weight: TensorGroup,
    companions: tuple[tuple[str, TensorGroup], ...],
    declared: Quantization,
) -> Module:
    elements = prod(weight.shape)
    beside = {kind.removeprefix(".").removeprefix("weight").lstrip("._"): group for kind, group in companions}
    width = DTYPE_BITS.get(weight.dtype)
    if suffix == ".qweight":
        return _integer_packed(name, part, weight, companions, declared)
    if suffix == ".weight_packed":
        return _compressed(name, part, weight, companions, declared)
    if suffix == "_blocks":
        return Module(name, part, weight, companions, "mxfp4 g32", elements * 2, 4, 32, "mxfp4")
    if weight.dtype == "U8" and "absmax" in beside:
        return Module(name, part, weight, companions, "4 bits, blocks of 64", elements * 2, 4, 64, "bitsandbytes")
    if weight.dtype == "I8" and ("SCB" in beside or "scale" in beside):
        return Module(name, part, weight, companions, _scaled("int8", weight, beside, 1)[0], elements, 8, None, "int8")
    if weight.dtype == "U8" and "scale" in beside:
        scheme, group = _scaled("nvfp4" if beside["scale"].dtype.startswith("F8") else "4 bits", weight, beside, 2)
        return Module(name, part, weight, companions, scheme, elements * 2, 4, group, "float4")
    if weight.dtype.startswith("F8"):
        scheme, group = _scaled("fp8", weight, beside, 1)
        return Module(name, part, weight, companions, scheme, elements, 8, group, "fp8")
    return Module(name, part, weight, companions, _PLAIN.get(weight.dtype, weight.dtype), elements, width)


def _scaled(kind: str, weight: TensorGroup, beside: dict[str, TensorGroup], pack: int) -> tuple[str, int | None]:
    """The scheme's name from the shape of the scales: per tensor, channel, group or block."""
    scale = beside.get("scale") or beside.get("scale_inv") or beside.get("SCB")
    if scale is None:
        return f"{kind} without scales", None
    rows, columns = _matrix(weight.shape)
    columns *= pack
    scale_rows, scale_columns = _matrix(scale.shape)
    if scale_rows * scale_columns <= 1:
        return f"{kind} per tensor", None
    if scale_columns == 1 or (scale_rows == 1 and scale_columns == rows):
        return f"{kind} per channel", None
    if scale_rows == rows and columns % scale_columns == 0:
        group = columns // scale_columns
        return f"{kind} g{group}", group
    if not rows or not columns:
        return kind, None
    return f"{kind} block {_block_side(rows, scale_rows)}x{_block_side(columns, scale_columns)}", None


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """The last two sides; a vector is a column."""
    if not shape:
        return 1, 1
    if len(shape) == 1:
        return shape[0], 1
    return shape[-2], shape[-1]


def _block_side(width: int, blocks: int) -> int:
    """Blocks are powers of two; the last one may be cut, so round the mean up to one."""
    if blocks <= 0:
        return width
    side = 1
    while side * blocks < width:
        side *= 2
    return side


def _integer_packed(
    name: str,
    part: str,
    weight: TensorGroup,
    companions: tuple[tuple[str, TensorGroup], ...],
    declared: Quantization,
) -> Module:
    """AutoAWQ packs along the output, GPTQ along the input; the scales tell which, and the widths."""
    beside = dict(companions)
    scales, zeros = beside.get(".scales"), beside.get(".qzeros")
    rows, columns = _matrix(weight.shape)
    bits, group, layout = declared.bits, None, "gptq" if declared.method == "gptq" else "awq"
    if scales is not None and len(scales.shape) >= 2 and rows and columns:
        groups, outputs = _matrix(scales.shape)
        if outputs == columns:
            layout = "gptq"
            if zeros is not None and outputs and 32 * _matrix(zeros.shape)[1] % outputs == 0:
                bits = 32 * _matrix(zeros.shape)[1] // outputs or bits
            if bits and groups:
                group = rows * 32 // bits // groups
        elif outputs > columns and 32 * columns % outputs == 0:
            layout = "awq"
            bits = 32 * columns // outputs
            group = rows // groups if groups else None
    parameters = prod(weight.shape) * 32 // bits if bits else prod(weight.shape)
    words = f"w{bits}" if bits else "packed integers"
    scheme = f"{words}{f' g{group}' if group else ''}{' zero points' if layout == 'awq' and zeros is not None else ''}"
    return Module(name, part, weight, companions, scheme, parameters, bits, group, layout)


def _compressed(
    name: str,
    part: str,
    weight: TensorGroup,
    companions: tuple[tuple[str, TensorGroup], ...],
    declared: Quantization,
) -> Module:
    """compressed-tensors: packed along the input; I32 for integers, U8 for 4-bit floats."""
    beside = dict(companions)
    scale = beside.get(".weight_scale")
    rows, columns = _matrix(weight.shape)
    if weight.dtype == "U8":
        kind = "mxfp4" if scale is not None and scale.dtype == "U8" else "nvfp4"
        group = columns * 2 // _matrix(scale.shape)[1] if scale is not None and _matrix(scale.shape)[1] else None
        words = f"{kind} g{group}" if group else kind
        return Module(name, part, weight, companions, words, prod(weight.shape) * 2, 4, group, "packed-float")
    groups = _matrix(scale.shape)[1] if scale is not None else 0
    bits = _packed_bits(declared, 32 * columns // groups if groups > 1 else None)
    if bits is None:
        return Module(
            name, part, weight, companions, "packed integers", prod(weight.shape), None, None, "packed-integer"
        )
    width = columns * 32 // bits
    group = width // groups if groups > 1 else None
    words = f"w{bits}" + (f" g{group}" if group else " per channel" if scale is not None else " without scales")
    if ".weight_zero_point" in beside:
        words += " zero points"
    return Module(
        name, part, weight, companions, words, rows * width * _leading(weight.shape), bits, group, "packed-integer"
    )


def _packed_bits(declared: Quantization, group_bits: int | None) -> int | None:
    """The width of packed integers. Shapes give bits x group size; the declared schemes tell which product it is."""
    groups = (declared.declared or {}).get("config_groups")
    schemes = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    widths = []
    for scheme in schemes:
        if isinstance(scheme, dict) and scheme.get("num_bits") in (2, 4, 8) and scheme.get("type", "int") == "int":
            size = scheme.get("group_size")
            if group_bits is not None and isinstance(size, int) and scheme["num_bits"] * size == group_bits:
                return int(scheme["num_bits"])
            widths.append(int(scheme["num_bits"]))
    if widths:
        return widths[0]
    return declared.bits if declared.bits in (2, 4, 8) else None


def _leading(shape: Sequence[int]) -> int:
    return prod(shape[:-2]) if len(shape) > 2 else 1


# ----------------------------------------------------------------------------------------------------------- sums

_ORDER = (
    "language.embeddings", "language.mlp", "language.experts", "language.shared_experts", "language.router",
    "language.attention", "language.linear_attention", "language.norms", "language.lm_head", "vision", "projector",
    "audio", "mtp", "other",
)  # fmt: skip


def sum_parts(modules: Iterable[Module]) -> tuple[Part, ...]:
    """Parameters, file bytes and tensors of each part that the checkpoint has."""
    sums: dict[str, list[int]] = {}
    for module in modules:
        entry = sums.setdefault(module.part, [0, 0, 0])
        entry[0] += module.parameters * module.weight.count
        entry[1] += module.bytes
        entry[2] += module.weight.count + sum(group.count for _, group in module.companions)
    return tuple(
        Part(name=name, parameters=sums[name][0], bytes=sums[name][1], tensors=sums[name][2])
        for name in sorted(sums, key=_ORDER.index)
    )


def sum_classes(modules: Iterable[Module]) -> tuple[ClassQuantization, ...]:
    """One entry per module class and scheme; ``tensors`` counts weights with what is stored beside them."""
    sums: dict[tuple[str, str], list[int]] = {}
    for module in modules:
        name = module.part.removeprefix("language.")
        entry = sums.setdefault((name, module.scheme), [0, 0, 0])
        entry[0] += module.weight.count + sum(group.count for _, group in module.companions)
        entry[1] += module.bytes
        entry[2] += module.parameters * module.weight.count
    order = [name.removeprefix("language.") for name in _ORDER]
    return tuple(
        ClassQuantization(module_class=name, scheme=scheme, tensors=tensors, bytes=size, parameters=parameters)
        for (name, scheme), (tensors, size, parameters) in sorted(
            sums.items(), key=lambda item: (order.index(item[0][0]), -item[1][1], item[0][1])
        )
    )
