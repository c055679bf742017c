"""The tensors that a linear layer of a published checkpoint consists of, by quantisation format.

For models that are known by their configuration only. Layouts: compressed-tensors, AutoAWQ, GPTQModel, the fp8 of
transformers, ModelOpt and bitsandbytes, as vLLM's loaders below model_executor/layers/quantization read them.
"""

from __future__ import annotations

import re
from functools import lru_cache

from loadmaster.core.facts import Quantization
from loadmaster.core.tensorlayout import up

# leaf, dtype, shape
Stored = tuple[str, str, tuple[int, ...]]

_ITEM_BYTES = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1}


def item_bytes(dtype: str) -> int:
    return _ITEM_BYTES[dtype]


def stored_linear(quantization: Quantization, out: int, into: int, dtype: str) -> tuple[Stored, ...] | None:
    """Leaves of a quantised layer of ``out`` x ``into`` parameters; None when the format has no known layout.

    ``dtype``: of the parts that stay floats.
    """
    method, bits = quantization.method, quantization.bits
    group = quantization.group_size or into
    groups = max(1, up(into, group))
    if method is None:
        return (("weight", dtype, (out, into)),)
    if method in ("awq", "awq_marlin"):
        return (
            ("qweight", "I32", (into, out // 8)),
            ("qzeros", "I32", (groups, out // 8)),
            ("scales", "F16", (groups, out)),
        )
    if method in ("gptq", "gptq_marlin", "auto-round", "inc") and bits in (2, 4, 8):
        packed = 32 // bits
        return (
            ("qweight", "I32", (into // packed, out)),
            ("qzeros", "I32", (groups, out // packed)),
            ("scales", "F16", (groups, out)),
            ("g_idx", "I32", (into,)),
        )
    if method == "fp8":
        if quantization.block_shape:
            rows, columns = quantization.block_shape
            return (("weight", "F8_E4M3", (out, into)), ("weight_scale_inv", "F32", (up(out, rows), up(into, columns))))
        return (("weight", "F8_E4M3", (out, into)), ("weight_scale", "F32", ()))
    if method == "compressed-tensors":
        return _compressed(quantization, out, into, groups, dtype)
    if method.startswith("modelopt"):
        if bits == 4:
            return _nvfp4("weight", "weight_scale_2", "input_scale", out, into)
        if bits == 8:
            return (("weight", "F8_E4M3", (out, into)), ("weight_scale", "F32", ()), ("input_scale", "F32", ()))
        return None  # MIXED_PRECISION: each layer has a format of its own, which only the tensors tell
    if method == "bitsandbytes" and bits == 4:
        codes = out * into // 2
        return (("weight", "U8", (codes, 1)), ("weight.absmax", "U8", (out * into // 64,)))
    return None


def _compressed(quantization: Quantization, out: int, into: int, groups: int, dtype: str) -> tuple[Stored, ...] | None:
    bits, format_ = quantization.bits, quantization.format
    if format_ == "nvfp4-pack-quantized":
        return _nvfp4("weight_packed", "weight_global_scale", "input_global_scale", out, into)
    if format_ in ("pack-quantized", None) and bits in (4, 8):
        packed = 32 // bits
        stored: list[Stored] = [
            ("weight_packed", "I32", (out, into // packed)),
            ("weight_scale", dtype, (out, groups)),
            ("weight_shape", "I64", (2,)),
        ]
        if quantization.symmetric is False:
            stored.append(("weight_zero_point", "I32", (out // packed, groups)))
        return tuple(stored)
    if format_ in ("float-quantized", "int-quantized", "naive-quantized"):
        code = "I8" if format_ == "int-quantized" else "F8_E4M3"
        if quantization.block_shape:
            rows, columns = quantization.block_shape
            return (("weight", code, (out, into)), ("weight_scale", dtype, (up(out, rows), up(into, columns))))
        return (("weight", code, (out, into)), ("weight_scale", dtype, (out, 1)))
    return None


def _nvfp4(codes: str, global_scale: str, input_scale: str, out: int, into: int) -> tuple[Stored, ...]:
    return (
        (codes, "U8", (out, into // 2)),
        ("weight_scale", "F8_E4M3", (out, into // 16)),
        (global_scale, "F32", (1,)),
        (input_scale, "F32", (1,)),
    )


class Exclusions:
    """Which modules a checkpoint leaves at 16 bits, from the names and patterns that it declares."""

    def __init__(self, quantization: Quantization) -> None:
        self._exact = frozenset(entry for entry in quantization.ignore if not entry.startswith(("re:", "-:")))
        patterns = [entry[3:] for entry in quantization.ignore if entry.startswith("re:")]
        patterns += [entry[2:] for entry in quantization.ignore if entry.startswith("-:")]
        dynamic = (quantization.declared or {}).get("dynamic")
        if isinstance(dynamic, dict):
            patterns += [key[2:] for key in dynamic if isinstance(key, str) and key.startswith("-:")]
        self._patterns = tuple(compiled for text in patterns if (compiled := _compiled(text)) is not None)
        # AutoAWQ, ModelOpt and transformers' fp8 exclude by a part of the name, with "*" as a wildcard
        self._parts = tuple(
            part for entry in self._exact if len(part := entry.strip("*").removesuffix(".")) > 0 and "{" not in part
        )

    def __contains__(self, module: str) -> bool:
        if module in self._exact:
            return True
        if any(pattern.match(module) for pattern in self._patterns):
            return True
        dotted = f".{module}."
        return any(f".{part}." in dotted or (part.startswith(".") and part in dotted) for part in self._parts)


@lru_cache(maxsize=512)
def _compiled(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text)
    except re.error:
        return None
