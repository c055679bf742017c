"""``quantization_config`` against the tensors: method, widths, groups, data types, and what is left out.

Engines believe the configuration. Where it does not describe the tensors they stop with a KeyError or an
assertion about shapes, or load nothing into a layer and go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from loadmaster.core.facts import Evidence, Finding, Fix, Quantization, Severity, TextConfig
from loadmaster.core.parts import Module
from loadmaster.core.tables import load_toml
from loadmaster.core.tensorheaders import layer_pattern, shorten

_SHOWN = 6
_MATCHING_TOOL = Fix(why="Use a checkpoint whose configuration was written by the tool that wrote its tensors")
_LINEAR = re.compile(r"(_proj|_proj_\w+|qkv|o_proj|out_proj|gate_up_proj)$")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.|$)")


def quantization_findings(modules: Sequence[Module], declared: Quantization) -> list[Finding]:
    """Everything that the declaration says and the tensors do not bear out."""
    quantised = [module for module in modules if module.quantised]
    if not modules:
        return []
    if declared.method is None:
        return _undeclared(quantised) if declared.declared is None else []
    findings = _methods(quantised, declared)
    if not findings:
        findings = [*_widths(quantised, declared), *_zero_points(quantised, declared), *_left_out(modules, declared)]
    return [*findings, *_types(quantised)]


def structure_findings(modules: Sequence[Module], text: TextConfig) -> list[Finding]:
    """Layers and experts that the configuration has and the tensors have not, and doubled prefixes."""
    findings = []
    doubled = [module for module in modules if re.search(r"(^|\.)(language_model|model|visual)\.\2\.", module.name)]
    if doubled:
        findings.append(
            _finding(
                "weights-name-mismatch",
                f"{sum(module.weight.count for module in doubled)} tensor names have a doubled prefix",
                "A conversion put one prefix before another; the engine skips such tensors or stops with a KeyError",
                [module.name for module in doubled],
                confidence_likely=True,
            )
        )
    language = [module for module in modules if module.part.startswith("language.") and module.weight.layers]
    expected = text.num_hidden_layers
    if language and expected:
        there: set[int] = set()
        for module in language:
            there.update(module.weight.layers or ())
        missing = [layer for layer in range(expected) if layer not in there]
        if missing:
            findings.append(
                _finding(
                    "weights-name-mismatch",
                    f"{len(missing)} of {expected} decoder layers have no tensors",
                    "Files are missing that nothing names, or config.json belongs to another size of the model",
                    [f"layers without tensors: {_ranges(missing)}", f"config.json: num_hidden_layers = {expected}"],
                )
            )
    if text.num_experts:
        findings += _experts(language, text.num_experts)
    return findings


def _experts(language: Sequence[Module], expected: int) -> list[Finding]:
    """Each layer's experts, summed over the schemes that one name has."""
    counts: dict[str, dict[int, int]] = {}
    for module in language:
        if "{e}" in module.name and module.weight.layers:
            layers = counts.setdefault(module.name, {})
            for layer, count in module.weight.layers.items():
                layers[layer] = layers.get(layer, 0) + count
    wrong = [
        f"{name}: layer {layer} has {count}"
        for name, layers in counts.items()
        for layer, count in layers.items()
        if count != expected
    ]
    if not wrong:
        return []
    return [
        _finding(
            "weights-name-mismatch",
            f"Layers do not have the {expected} experts that config.json says",
            "Experts were left out of the files, or config.json belongs to another model",
            wrong,
        )
    ]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:20]]
    return ", ".join(words) + (" …" if len(runs) > 20 else "")


def _finding(
    code: str,
    title: str,
    cause: str,
    lines: Iterable[str],
    *,
    severity: Severity = "error",
    confidence_likely: bool = False,
) -> Finding:
    lines = list(lines)
    shown = [Evidence(source="file", text=shorten(line)) for line in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        shown.append(Evidence(source="file", text=f"and {len(lines) - _SHOWN} more"))
    return Finding(
        code=code,
        severity=severity,
        title=title,
        cause=cause,
        evidence=tuple(shown),
        fixes=(_MATCHING_TOOL,),
        confidence="likely" if confidence_likely else "certain",
    )


def _undeclared(quantised: Sequence[Module]) -> list[Finding]:
    if not quantised:
        return []
    return [
        _finding(
            "weights-name-mismatch",
            "The tensors are quantised, and config.json declares no quantisation",
            "The engine looks for plain weights: it stops with a KeyError, or takes packed numbers for plain ones",
            [f"{module.name}: {module.scheme}" for module in quantised],
        )
    ]


def _methods(quantised: Sequence[Module], declared: Quantization) -> list[Finding]:
    table = load_toml("tensor-parts.toml")["layouts"]
    loads = table["loads"].get(declared.method)
    if loads is None:
        return []
    if not quantised:
        if declared.method not in table["stored"]["methods"]:
            return []
        return [
            _finding(
                "weights-name-mismatch",
                f"config.json declares {declared.method}, and no tensor is quantised",
                "The engine looks for packed weights that the files do not have",
                [f"quant_method = {declared.method}", "all weights are plain"],
            )
        ]
    foreign = [module for module in quantised if module.layout not in loads]
    if not foreign:
        return []
    names = sorted({table["names"][module.layout] for module in foreign})
    return [
        _finding(
            "weights-name-mismatch",
            f"config.json declares {declared.method}, the tensors are {' and '.join(names)}",
            "The engine builds its layers for the declared method and finds other parameters: a KeyError",
            [f"{module.name}: {module.scheme}, {module.weight.dtype}" for module in foreign],
        )
    ]


def _one_scheme(declared: Quantization) -> bool:
    """The declaration holds for every quantised module, with no exceptions by name."""
    raw = declared.declared or {}
    groups, dynamic = raw.get("config_groups"), raw.get("dynamic")
    if isinstance(groups, dict) and len(groups) > 1:
        return False
    if isinstance(dynamic, dict) and any(isinstance(key, str) and key.startswith("+:") for key in dynamic):
        return False
    return not raw.get("extra_config") and not raw.get("quantized_layers")


def _widths(quantised: Sequence[Module], declared: Quantization) -> list[Finding]:
    if not _one_scheme(declared):
        return []
    wrong = []
    for module in quantised:
        if module.layout in ("awq", "gptq") and declared.bits and module.bits and module.bits != declared.bits:
            wrong.append(f"{module.name}: {module.bits:g} bits by its shapes, {declared.bits} declared")
        elif module.layout in ("awq", "gptq", "packed-integer", "packed-float", "float4"):
            if declared.group_size and module.group_size and module.group_size != declared.group_size:
                found = f"a scale for every {module.group_size} values"
                wrong.append(f"{module.name}: {found}, group size {declared.group_size} declared")
        elif module.layout == "fp8" and declared.block_shape and not _block_fits(module, declared.block_shape):
            rows, columns = declared.block_shape
            wrong.append(f"{module.name}: {module.scheme} by its scales, blocks of {rows}x{columns} declared")
    if not wrong:
        return []
    return [
        _finding(
            "config-invalid",
            "quantization_config has other widths or groups than the tensors",
            "The engine makes its parameters from the configuration; the shapes then do not fit",
            wrong,
        )
    ]


def _block_fits(module: Module, block: tuple[int, int]) -> bool:
    scales = [
        group
        for suffix, group in module.companions
        if suffix.endswith(("weight_scale_inv", "_scale_inv", "weight_scale"))
    ]
    if not scales or len(module.weight.shape) < 2:
        return True  # another check speaks of missing scales
    expected = [-(-side // part) for side, part in zip(module.weight.shape[-2:], block)]
    return list(scales[0].shape[-2:]) == expected


def _zero_points(quantised: Sequence[Module], declared: Quantization) -> list[Finding]:
    if declared.method not in ("compressed-tensors", "awq") or declared.zero_point is None or not _one_scheme(declared):
        return []
    wrong = []
    for module in quantised:
        if module.layout not in ("packed-integer", "awq"):
            continue
        there = any(suffix in (".weight_zero_point", ".qzeros") for suffix, _ in module.companions)
        if there is not declared.zero_point and not (there and declared.method == "awq"):
            wrong.append(f"{module.name}: {'has' if there else 'has no'} zero points")
    if not wrong:
        return []
    said = "has" if declared.zero_point else "has no"
    return [
        _finding(
            "weights-name-mismatch",
            f"quantization_config says that the checkpoint {said} zero points, the tensors say otherwise",
            "The engine stops with a KeyError about weight_zero_point, or reads wrong values",
            wrong,
        )
    ]


def _types(quantised: Sequence[Module]) -> list[Finding]:
    """Packed integers are I32 in every format that vLLM loads; packed floats are bytes."""
    allowed = {"awq": ("I32",), "gptq": ("I32",), "packed-integer": ("I32",), "mxfp4": ("U8",), "bitsandbytes": ("U8",)}
    wrong = [
        f"{module.name}: {module.weight.dtype} instead of {' or '.join(allowed[module.layout])}"
        for module in quantised
        if module.layout in allowed and module.weight.dtype not in allowed[module.layout]
    ]
    lonely = [
        f"{module.name}: {module.scheme}"
        for module in quantised
        if module.scheme.endswith("without scales") and module.layout != "bitsandbytes"
    ]
    findings = []
    if wrong:
        findings.append(
            _finding(
                "quant-format-unsupported",
                "Packed weights have a data type that the method does not use",
                "The engine's parameters are of another type; copying fails or changes the numbers",
                wrong,
            )
        )
    if lonely:
        findings.append(
            _finding(
                "weights-name-mismatch",
                "Quantised weights lack their scales",
                "A shard with the scales is missing, or the conversion dropped them; such layers compute nonsense",
                lonely,
            )
        )
    return findings


# --------------------------------------------------------------------------------------------------- what is left out


def _left_out(modules: Sequence[Module], declared: Quantization) -> list[Finding]:
    if not declared.ignore or len(declared.ignore) > 200_000:
        return []
    findings = []
    left_out = _LeftOut(declared)
    caught = [module.name for module in modules if module.quantised and left_out.names(module)]
    if caught:
        findings.append(
            _finding(
                "weights-name-mismatch",
                f"{len(caught)} module patterns are quantised although quantization_config leaves them out",
                "The engine makes plain layers for them and does not find their weights",
                caught,
                severity="warning",
                confidence_likely=True,
            )
        )
    if declared.method in ("compressed-tensors", "fp8") and any(module.quantised for module in modules):
        left = [
            module.name
            for module in modules
            if not module.quantised
            and module.part.startswith("language.")
            and len(module.weight.shape) >= 2
            and _LINEAR.search(module.name)
            and not left_out.may_mean(module)
        ]
        if left:
            findings.append(
                _finding(
                    "weights-name-mismatch",
                    f"{len(left)} module patterns are plain although quantization_config does not leave them out",
                    "The engine makes quantised layers for them and finds no packed weights",
                    left,
                    severity="warning",
                    confidence_likely=True,
                )
            )
    return findings


def _bare(name: str) -> str:
    """A module name without an expert's number and the prefixes that releases and engines put on and take off."""
    if ".experts." in name:
        name = _EXPERT.sub("{e}", name)
    while name.startswith(("model.", "language_model.", "thinker.")):
        name = name.partition(".")[2]
    return name


def _example(module: Module) -> str:
    layers = module.weight.layers
    name = module.name.replace("{e}", "0")
    return name.replace("{l}", str(min(layers))) if layers else name


class _LeftOut:
    """What ``quantization_config`` leaves plain. Entries of one pattern are kept once, with their layers."""

    def __init__(self, declared: Quantization) -> None:
        self.exact: dict[str, set[int | None]] = {}
        self.patterns: list[re.Pattern[str]] = []
        self.substrings: list[str] = []
        for entry in declared.ignore:
            if declared.method == "gptq" or entry.startswith("re:"):
                if (pattern := _safe_pattern(entry)) is not None:
                    self.patterns.append(pattern)
            elif declared.method in ("awq", "auto-round"):
                self.substrings.append(entry)
            else:
                stem, layer = layer_pattern(entry)
                self.exact.setdefault(_bare(stem), set()).add(layer)

    def names(self, module: Module) -> bool:
        """The module is left out by its exact name, or as the method's patterns and substrings say."""
        layers = self.exact.get(_bare(module.name))
        if layers is not None and (None in layers or not layers.isdisjoint(module.weight.layers or ())):
            return True
        example = _example(module)
        return any(pattern.match(example) for pattern in self.patterns) or any(
            text in example for text in self.substrings
        )

    def may_mean(self, module: Module) -> bool:
        """As :meth:`names`, or an entry contains the name or the name an entry."""
        name = _bare(module.name)
        return self.names(module) or any(text in name or name in text for text in self.exact)


def _safe_pattern(entry: str) -> re.Pattern[str] | None:
    """A pattern that cannot run for ever: short, few repetitions, none of a group. Others are left alone."""
    text = entry.removeprefix("re:").removeprefix(":")
    if len(text) > 300 or len(re.findall(r"[*+{]", text)) > 4 or re.search(r"\)[*+{]", text):
        return None
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return None
