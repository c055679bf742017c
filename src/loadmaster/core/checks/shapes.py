"""Widths of quantised layers on one rank against groups, FP8 blocks and kernel tiles."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.engineversion import at_least
from loadmaster.core.facts import Finding, Fix, ModelFacts

# vLLM layers/quantization/utils/marlin_utils.py: tiles, and since when a layer is padded to them
_TILE_INPUT, _TILE_OUTPUT = 128, 64
_TILES_PADDED_SINCE = "0.24"
# vLLM fused_moe/oracle/fp8.py: blocks of experts may be cut down to this since then
_SMALLEST_EXPERT_BLOCK, _EXPERT_BLOCKS_CUT_SINCE = 32, "0.29"
# vLLM layers/linear.py: layers that join several weights (gate and up, query, key and value) pass since then
_MERGED_PASS_SINCE = "0.14"
# vLLM layers/quantization/moe_wna16.py: groups of experts are halved down to this
_SMALLEST_EXPERT_GROUP = 32
_QUANTISED_LEAVES = (".weight_packed", ".qweight", ".weight_scale_inv", ".weight_scale", ".scales", "_scale_inv")
_PACKED = ("awq", "gptq", "compressed-tensors", "auto-round", "quark")


@dataclass(frozen=True)
class Layer:
    """One kind of linear layer: ``name`` for people, a module path to match, and its divided width.

    ``split``: "input" (row-parallel), "output" (column-parallel) or "expert" (both at once).
    ``width``: the whole width that is divided; ``least``: what a rank has at least (replicated key-value heads).
    """

    name: str
    path: str
    split: str
    width: int
    least: int = 1


@dataclass(frozen=True)
class Problem:
    """A layer that a parallel size cuts badly. ``hard``: no version or kernel takes it."""

    layer: Layer
    part: int
    unit: int
    hard: bool
    words: str


def check_shapes(case: LaunchCase) -> Iterator[Finding]:
    """quant-group-vs-tp and fp8-block-vs-tp for the launch's parallel sizes."""
    model, size = case.model, case.tensor_parallel
    if model is None or model.format == "gguf":
        return
    heads = model.text.num_attention_heads
    if heads is not None and heads % size:
        return  # said already, and no width is whole then
    whole_experts = bool(case.switch("--enable-expert-parallel"))
    block = model.quantization.block_shape is not None
    problems = problems_at(model, size, whole_experts, case.version, case.text("--dtype"))
    if not problems:
        return
    code = "fp8-block-vs-tp" if block else "quant-group-vs-tp"
    worst = [problem for problem in problems if problem.hard] or problems
    hard = worst[0].hard
    yield finding(
        code,
        "; ".join(dict.fromkeys(problem.words for problem in worst[:3])) + ".",
        evidence=[
            *case.evidence("--tensor-parallel-size"),
            *(
                case.model_evidence(f"{problem.layer.name}: {problem.layer.width:,} wide, {_unit_words(model)}")
                for problem in worst[:3]
            ),
        ],
        fixes=_fixes(case, model, worst),
        severity=None if hard else "warning",
        confidence="certain" if hard and model.format == "safetensors" and model.tensors else "likely",
    )


def _unit_words(model: ModelFacts) -> str:
    block = model.quantization.block_shape
    return f"blocks of {block[0]} x {block[1]}" if block else f"groups of {model.quantization.group_size}"


# ------------------------------------------------------------------------------------------ layers


def layers_of(model: ModelFacts) -> list[Layer]:
    """The divided linear layers of the language model that the checkpoint has quantised, from its configuration."""
    text = model.text
    found: list[Layer] = []

    def add(name: str, path: str, split: str, width: int | None, least: int = 1) -> None:
        if width and _is_quantised(model, path):
            found.append(Layer(name, path, split, width, least))

    heads, width = text.num_attention_heads, text.head_dim
    if heads and text.hidden_size and "head_dim" not in _raw_text(model):
        width = text.hidden_size // heads if text.hidden_size % heads == 0 else None
    if heads and width and text.kv_lora_rank is None:
        add("attention output", "self_attn.o_proj", "input", heads * width)
        add("attention query", "self_attn.q_proj", "output", heads * width)
        if text.num_key_value_heads:
            add("attention key and value", "self_attn.k_proj", "output", text.num_key_value_heads * width, width)
    elif heads and text.v_head_dim:
        add("attention output", "self_attn.o_proj", "input", heads * text.v_head_dim)
    if text.num_experts is None or (text.first_k_dense_replace or 0) > 0:
        add("feed-forward down", "mlp.down_proj", "input", text.intermediate_size)
        add("feed-forward gate and up", "mlp.up_proj", "output", text.intermediate_size)
    if text.num_experts:
        add("expert", "mlp.experts.0.down_proj", "expert", text.moe_intermediate_size)
    # which builds quantise the shared expert, only the tensors tell
    shared = text.shared_expert_intermediate_size if model.tensors else None
    add("shared expert down", "mlp.shared_expert.down_proj", "input", shared)
    add("shared expert gate and up", "mlp.shared_expert.up_proj", "output", shared)
    if text.linear_num_value_heads and text.linear_value_head_dim:
        add(
            "linear attention output",
            "linear_attn.out_proj",
            "input",
            text.linear_num_value_heads * text.linear_value_head_dim,
        )
    return found


def _raw_text(model: ModelFacts) -> dict[str, Any]:
    """The language model's part of config.json as it stands there."""
    inner = model.config.get("text_config")
    return inner if isinstance(inner, dict) else model.config


def _is_quantised(model: ModelFacts, path: str) -> bool:
    """Whether the checkpoint has this layer quantised: from the tensors if they were read, else by the ignore list."""
    quantised = False
    if model.tensors:
        pattern = _tensor_pattern(path)
        for group in model.tensors:
            if pattern.search(group.name) and group.name.endswith(_QUANTISED_LEAVES):
                quantised = True
                break
        return quantised
    return not any(_ignores(pattern, f"model.layers.0.{path}") for pattern in model.quantization.ignore)


def _tensor_pattern(path: str) -> re.Pattern[str]:
    *modules, leaf = path.split(".")
    if leaf == "q_proj" or leaf == "k_proj":
        leaf = "(qkv_proj|" + leaf + ")"
    elif leaf == "up_proj":
        leaf = "(gate_up_proj|up_proj)"
    modules = [r"(\{e\}|\d+)" if part == "0" else re.escape(part) for part in modules]
    if "experts" in modules:
        return re.compile(r"\.experts(\.(\{e\}|\d+))?\.(down_proj|w2)")
    if "shared_expert" in modules:
        return re.compile(r"\.shared_experts?\." + leaf)
    return re.compile(r"\." + r"\.".join(modules) + r"\." + leaf)


def _ignores(pattern: str, name: str) -> bool:
    """Whether an entry of an ignore list names the layer: a regular expression after ``re:``, else a part of its path.

    An entry for one layer ("model.layers.7...") does not speak of the kind.
    """
    if pattern.startswith("re:"):
        try:
            return (
                re.match(pattern[3:], name) is not None or re.match(pattern[3:], "model.language_" + name) is not None
            )
        except re.error:
            return False
    if re.search(r"layers\.\d+\.", pattern) or not pattern:
        return False
    return pattern.strip(".") in name


# ------------------------------------------------------------------------------------------ rules


def problems_at(
    model: ModelFacts, size: int, whole_experts: bool, version: str | None, dtype: str | None
) -> list[Problem]:
    """The layers that ``size`` tensor-parallel ranks cut badly. ``version`` None means the newest rules."""
    quantization = model.quantization
    if quantization.block_shape is not None:
        return _block_problems(model, quantization.block_shape, size, whole_experts, version)
    if quantization.group_size is None or quantization.method not in _PACKED or quantization.desc_act:
        return []
    if size == 1:
        return []
    return _group_problems(model, quantization.group_size, size, whole_experts, version, dtype)


def _part(layer: Layer, size: int) -> int:
    return max(layer.width // size, layer.least)


def _block_problems(
    model: ModelFacts, block: tuple[int, int], size: int, whole_experts: bool, version: str | None
) -> list[Problem]:
    rows, columns = block
    merged_pass = version is None or at_least(version, _MERGED_PASS_SINCE)
    found = []
    for layer in layers_of(model):
        ranks = 1 if layer.split == "expert" and whole_experts else size
        part = _part(layer, ranks)
        if layer.split == "expert":
            bad = part % rows != 0 or (ranks > 1 and part % columns != 0)
            if bad and (version is None or at_least(version, _EXPERT_BLOCKS_CUT_SINCE)):
                common = math.gcd(rows, columns, part, model.text.hidden_size or rows)
                bad = common < _SMALLEST_EXPERT_BLOCK
        elif ranks == 1 or (layer.split == "output" and merged_pass):
            bad = False
        else:
            bad = part % (columns if layer.split == "input" else rows) != 0
        if bad:
            words = (
                f"{layer.name}: {layer.width:,} on {ranks} ranks is {part:,} a rank, no multiple of the block of {rows}"
            )
            found.append(Problem(layer, part, rows, True, words))
    return found


def _group_problems(
    model: ModelFacts, group: int, size: int, whole_experts: bool, version: str | None, dtype: str | None
) -> list[Problem]:
    method = model.quantization.method
    padded = version is None or at_least(version, _TILES_PADDED_SINCE)
    runs_bf16 = dtype == "bfloat16" or (dtype in (None, "auto") and model.text.dtype == "bfloat16")
    found = []
    for layer in layers_of(model):
        ranks = 1 if layer.split == "expert" and whole_experts else size
        part = _part(layer, ranks)
        if ranks == 1:
            continue
        on_ranks = f"{layer.name}: {layer.width:,} on {ranks} ranks is {part:,} a rank"
        if layer.split == "expert":
            if part % group == 0:
                continue
            halved = method in ("awq", "gptq")
            if halved and part % _SMALLEST_EXPERT_GROUP == 0:
                continue
            limit = _SMALLEST_EXPERT_GROUP if halved else group
            found.append(Problem(layer, part, limit, True, f"{on_ranks}, no multiple of {limit}"))
        elif layer.split == "input" and group < layer.width and part % group:
            found.append(Problem(layer, part, group, True, f"{on_ranks}, no multiple of the group of {group}"))
        elif not padded:
            tile = _TILE_INPUT if layer.split == "input" else _TILE_OUTPUT
            if part % tile == 0:
                continue
            if method == "awq" or not runs_bf16:
                words = f"{on_ranks}, no multiple of Marlin's tile of {tile}: a slower kernel takes the layer"
                found.append(Problem(layer, part, tile, False, words))
            else:
                words = f"{on_ranks}, no multiple of Marlin's tile of {tile}, and no other kernel takes bfloat16"
                found.append(Problem(layer, part, tile, True, words))
    return found


def _fixes(case: LaunchCase, model: ModelFacts, problems: list[Problem]) -> list[Fix]:
    fixes = []
    dtype = case.text("--dtype")
    experts_only = all(problem.layer.split == "expert" for problem in problems)
    whole_would_do = not problems_at(model, case.tensor_parallel, True, case.version, dtype)
    if experts_only and not case.switch("--enable-expert-parallel") and whole_would_do:
        fixes.append(Fix("Experts stay whole, each rank holds some of them.", ("--enable-expert-parallel",)))
    heads = model.text.num_attention_heads
    whole = bool(case.switch("--enable-expert-parallel"))
    good = [
        n
        for n in range(1, max(case.tensor_parallel, case.cards or 0) + 1)
        if (heads is None or heads % n == 0) and not problems_at(model, n, whole, case.version, dtype)
    ]
    below = [n for n in good if n < case.tensor_parallel]
    if below:
        n = below[-1]
        words = f"Sizes that divide: {', '.join(map(str, good))}."
        fixes.append(Fix(words, ("--tensor-parallel-size", str(n))))
        rest = case.tensor_parallel // n
        if rest > 1:
            fixes.append(
                Fix(
                    "The same cards, the rest of them in stages.",
                    ("--tensor-parallel-size", str(n), "--pipeline-parallel-size", str(rest * case.pipeline_parallel)),
                )
            )
    if not fixes:
        fixes.append(Fix("A checkpoint with smaller groups or in another format."))
    return fixes
