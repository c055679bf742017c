"""``quantization_config`` of a checkpoint → :class:`Quantization`, for every method that has one.

What a file declares, not what the tensors show: :mod:`loadmaster.core.parts` reads those. The declared object is
kept verbatim in ``declared``. Formats are those of compressed-tensors, AutoAWQ, GPTQModel, fp8 (per tensor and
block), ModelOpt (also its ``hf_quant_config.json``), MXFP4, bitsandbytes, AutoRound, Quark and torchao.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from loadmaster.core.facts import Quantization
from loadmaster.core.rawobject import RawObject

CONFIG_KEYS = ("quantization_config", "compression_config")


def quantization(
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None = None,
    problems: list[str] | None = None,
) -> Quantization:
    """What the checkpoint declares; an empty :class:`Quantization` when it declares nothing.

    ``hf_quant_config`` is ModelOpt's own file, read when ``config.json`` has no quantisation. Values that cannot
    be used are written into ``problems`` and read as ``None``. Never raises.
    """
    problems = [] if problems is None else problems
    declared = _declared(config, hf_quant_config, problems)
    if declared is None:
        return Quantization()
    raw = RawObject(declared, {}, problems, "quantization_config.")
    method = raw.text("quant_method")
    if method is None:
        method = _unnamed_method(declared)
    if method is None:
        return Quantization(declared=dict(declared), label="of an unnamed method")
    method = _ALIASES.get(method, method)
    return _METHODS.get(method, _generic)(method, raw)


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The raw object that declares the quantisation, also from inside the language model's section."""
    for owner in (config, config.get("text_config"), config.get("llm_config"), config.get("language_config")):
        if not isinstance(owner, dict):
            continue
        for key in CONFIG_KEYS:
            value = owner.get(key)
            if isinstance(value, dict) and value:
                return value
    return None


def _declared(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, problems: list[str]
) -> Mapping[str, Any] | None:
    section = quantization_section(config)
    if section is not None:
        return section
    for key in CONFIG_KEYS:
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            problems.append(f"{key} is no object")
    inner = (hf_quant_config or {}).get("quantization")
    if isinstance(inner, dict) and inner:
        return {"quant_method": "modelopt", **inner}
    return None


def _unnamed_method(declared: Mapping[str, Any]) -> str | None:
    """Some writers leave ``quant_method`` out; their own keys tell."""
    if "config_groups" in declared:
        return "compressed-tensors"
    if "quant_algo" in declared or isinstance(declared.get("quantization"), dict):
        return "modelopt"
    if declared.get("load_in_4bit") or declared.get("load_in_8bit"):
        return "bitsandbytes"
    if "w_bit" in declared or "q_group_size" in declared:
        return "awq"
    return None


def _names(declared: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    for key in keys:
        value = declared.get(key)
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list):
            return tuple(item for item in value if isinstance(item, str))
    return ()


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _group(raw: RawObject, *names: str) -> int | None:
    """A group size; -1 and 0 are how the writers say "the whole channel"."""
    if any(raw.raw.get(name) in (-1, 0) and not isinstance(raw.raw.get(name), bool) for name in names):
        return None
    return raw.integer("group_size", names)


def _block(value: Any) -> tuple[int, int] | None:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,6})x(\d{1,6})", value)):
        value = [int(match[1]), int(match[2])]
    if not isinstance(value, list) or len(value) != 2:
        return None
    rows, columns = value
    if any(isinstance(side, bool) or not isinstance(side, int) or not 0 < side <= 1 << 20 for side in value):
        return None
    return rows, columns


def _scheme_label(bits: int | None, group: int | None, asymmetric: bool) -> str:
    width = f"w{bits}" if bits else "width not stated"
    grouping = f" g{group}" if group else " per channel"
    return width + grouping + (" zero points" if asymmetric else "")


# ------------------------------------------------------------------------------------------------------- methods


def _compressed_tensors(method: str, raw: RawObject) -> Quantization:
    """``config_groups`` names schemes and the modules that they hold for; the widest-used one is the label."""
    declared = raw.raw
    groups = [group for group in _object(declared.get("config_groups")).values() if isinstance(group, dict)]
    schemes = []
    for group in groups:
        weights = RawObject(_object(group.get("weights")), {}, raw.problems, raw.where + "config_groups.weights.")
        format_ = RawObject(group, {}, raw.problems, raw.where).text("format") or raw.text("format")
        schemes.append((weights, format_, _object(group.get("input_activations"))))
    kv_cache = declared.get("kv_cache_scheme")
    common: dict[str, Any] = {
        "method": method,
        "ignore": _names(declared, "ignore"),
        "kv_cache_scheme": kv_cache if isinstance(kv_cache, dict) else None,
        "declared": dict(declared),
    }
    if not schemes:
        return Quantization(**common, format=raw.text("format"), label=method)
    weights, format_, _ = schemes[0]
    bits = weights.integer("num_bits")
    strategy = weights.text("strategy")
    group_size = _group(weights, "group_size") if strategy in (None, "group", "tensor_group") else None
    symmetric = weights.flag("symmetric")
    block = _block(weights.raw.get("block_structure")) if strategy == "block" else None
    labels = sorted({_compressed_label(*scheme) for scheme in schemes})
    return Quantization(
        **common,
        format=format_,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        zero_point=None if symmetric is None else not symmetric,
        block_shape=block,
        label=f"{method} {' + '.join(labels)}",
    )


def _compressed_label(weights: RawObject, format_: str | None, activations: Mapping[str, Any]) -> str:
    quiet = RawObject(weights.raw, {}, [], "")
    bits, group = quiet.integer("num_bits"), _group(quiet, "group_size")
    strategy = quiet.text("strategy")
    if format_ and format_.startswith(("nvfp4", "mxfp4", "mxfp8")):
        return format_.split("-")[0] + (f" g{group}" if group else "")
    if quiet.text("type") == "float" and bits == 8:
        block = _block(weights.raw.get("block_structure"))
        return f"fp8 block {block[0]}x{block[1]}" if block else f"fp8 per {strategy or 'tensor'}"
    if activations.get("num_bits") == 8 and bits:
        return f"w{bits}a8 " + (f"g{group}" if group and strategy == "group" else f"per {strategy or 'channel'}")
    return _scheme_label(bits, group, quiet.flag("symmetric") is False)


def _awq(method: str, raw: RawObject) -> Quantization:
    bits = raw.integer("bits", ("bits", "w_bit"))
    group = _group(raw, "group_size", "q_group_size")
    zero_point = raw.flag("zero_point")
    return Quantization(
        method=method,
        format=raw.text("version"),
        bits=bits,
        group_size=group,
        symmetric=None if zero_point is None else not zero_point,
        zero_point=zero_point,
        ignore=_names(raw.raw, "modules_to_not_convert"),
        declared=dict(raw.raw),
        label=f"{method} {_scheme_label(bits, group, False)}",
    )


def _gptq(method: str, raw: RawObject) -> Quantization:
    bits, group = raw.integer("bits"), _group(raw, "group_size")
    symmetric = raw.flag("sym")
    # GPTQModel: a key "-:REGEX" of `dynamic` leaves matching modules alone
    skipped = tuple(key[2:] for key in _object(raw.raw.get("dynamic")) if isinstance(key, str) and key.startswith("-:"))
    return Quantization(
        method=method,
        format=raw.text("checkpoint_format") or "gptq",
        bits=bits,
        group_size=group,
        symmetric=symmetric,
        desc_act=raw.flag("desc_act"),
        ignore=skipped or _names(raw.raw, "modules_to_not_convert"),
        declared=dict(raw.raw),
        label=f"{method} {_scheme_label(bits, group, False)}"
        + (" act-order" if raw.raw.get("desc_act") is True else ""),
    )


def _fp8(method: str, raw: RawObject) -> Quantization:
    stated = raw.raw.get("weight_block_size")
    block = _block(stated)
    if stated is not None and block is None:
        raw.problems.append(f"{raw.where}weight_block_size is no pair of sizes")
    how = f"block {block[0]}x{block[1]}" if block else "per channel" if method == "fbgemm_fp8" else "per tensor"
    return Quantization(
        method=method,
        format=raw.text("fmt"),
        bits=8,
        block_shape=block,
        ignore=_names(raw.raw, "modules_to_not_convert", "ignored_layers"),
        declared=dict(raw.raw),
        label=f"fp8 {how}",
    )


def _modelopt(method: str, raw: RawObject) -> Quantization:
    inner = raw.raw.get("quantization")
    if isinstance(inner, dict):
        raw = RawObject({**raw.raw, **inner}, {}, raw.problems, raw.where)
    algorithm = raw.text("quant_algo") or ("NVFP4" if method == "modelopt_fp4" else None)
    bits = {"NVFP4": 4, "W4A16_NVFP4": 4, "W4A8_AWQ": 4, "FP8": 8, "FP8_PER_CHANNEL_PER_TOKEN": 8, "FP8_PB_WO": 8}
    group = _group(raw, "group_size")
    if group is None and algorithm and "NVFP4" in algorithm:
        group = 16  # the format's only block
    kv_cache = raw.raw.get("kv_cache_scheme")
    kv_algorithm = raw.raw.get("kv_cache_quant_algo")
    if not isinstance(kv_cache, dict):
        kv_cache = {"algorithm": kv_algorithm} if isinstance(kv_algorithm, str) else None
    name = (algorithm or "algorithm not stated").lower()
    return Quantization(
        method="modelopt",
        format=algorithm,
        bits=bits.get(algorithm or ""),
        group_size=group,
        ignore=_names(raw.raw, "exclude_modules", "ignore", "modules_to_not_convert"),
        kv_cache_scheme=kv_cache,
        declared=dict(raw.raw),
        label=f"modelopt {name}" + (f" g{group}" if group else ""),
    )


def _mxfp4(method: str, raw: RawObject) -> Quantization:
    return Quantization(
        method=method,
        bits=4,
        group_size=32,  # OCP Microscaling: one shared exponent for 32 values
        ignore=_names(raw.raw, "modules_to_not_convert"),
        declared=dict(raw.raw),
        label="mxfp4 g32",
    )


def _bitsandbytes(method: str, raw: RawObject) -> Quantization:
    four = raw.raw.get("load_in_4bit") is True
    eight = raw.raw.get("load_in_8bit") is True and not four
    kind = raw.text("bnb_4bit_quant_type") or "fp4"
    return Quantization(
        method=method,
        format=kind if four else "int8" if eight else None,
        bits=4 if four else 8 if eight else None,
        group_size=64 if four else None,  # the library's block of one absolute maximum
        ignore=_names(raw.raw, "llm_int8_skip_modules"),
        declared=dict(raw.raw),
        label=f"{method} {kind if four else 'int8' if eight else 'width not stated'}",
    )


def _auto_round(method: str, raw: RawObject) -> Quantization:
    bits, group = raw.integer("bits"), _group(raw, "group_size")
    symmetric = raw.flag("sym")
    plain = tuple(
        name
        for name, value in _object(raw.raw.get("extra_config")).items()
        if isinstance(value, dict) and isinstance(value.get("bits"), int) and value["bits"] >= 16
    )
    return Quantization(
        method=method,
        format=raw.text("packing_format"),
        bits=bits,
        group_size=group,
        symmetric=symmetric,
        ignore=plain or _names(raw.raw, "modules_to_not_convert"),
        declared=dict(raw.raw),
        label=f"{method} {_scheme_label(bits, group, symmetric is False)}",
    )


def _generic(method: str, raw: RawObject) -> Quantization:
    """A method whose file says no more than bits and group, or names its type in words (torchao, Quark, HQQ)."""
    bits = raw.integer("bits", ("bits", "num_bits", "nbits", "w_bit"))
    group = _group(raw, "group_size", "q_group_size")
    kind = raw.raw.get("quant_type") if isinstance(raw.raw.get("quant_type"), str) else None
    words = [method, f"w{bits}" if bits else "", f"g{group}" if group else "", kind or ""]
    return Quantization(
        method=method,
        format=kind,
        bits=bits,
        group_size=group,
        ignore=_names(raw.raw, "modules_to_not_convert", "ignore", "exclude", "ignored_layers"),
        declared=dict(raw.raw),
        label=" ".join(word for word in words if word),
    )


_ALIASES = {
    "compressed_tensors": "compressed-tensors",
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "gpt_oss_mxfp4": "mxfp4",
}

_METHODS: dict[str, Callable[[str, RawObject], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "auto-round": _auto_round,
}
