"""The context against the model's positions, and steps against cache blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import Evidence, Finding, Fix

# rope types whose factor does not lengthen max_position_embeddings (vLLM config/model.py, _get_and_verify_max_len)
_NO_FACTOR = frozenset({"su", "longrope", "llama3", "default", "mrope", "linear_default"})
_YARN_TYPES = frozenset({"yarn", "deepseek_yarn", "deepseek_llama_scaling"})
_YARN_KEEPS_SINCE = "0.30"  # from here on yarn leaves the positions of config.json as they are
_PREFIX = ("rope_scaling", "rope_parameters")


def check_context(case: LaunchCase) -> Iterator[Finding]:
    """--max-model-len against the model, batched tokens against the block of a hybrid model's cache."""
    yield from _beyond(case)
    yield from _blocks(case)


def model_length(case: LaunchCase) -> tuple[int, str] | None:
    """The longest context that the engine derives, with the words that say from what; None when unknown.

    Overrides of the launch (--hf-overrides, --rope-scaling) count. Lenient: of the readings that different
    versions make of a yarn entry, the longer one counts when the version is unknown.
    """
    if case.model is None:
        return None
    positions = case.model.text.max_position_embeddings
    said = f"max_position_embeddings {positions:,}" if positions is not None else ""
    overrides = _overrides(case)
    given = _deep(overrides, "max_position_embeddings")
    if isinstance(given, int) and not isinstance(given, bool):
        positions, said = given, f"max_position_embeddings {given:,} from --hf-overrides"
    if positions is None:
        return None
    rope = _rope(case, overrides)
    length = positions
    if rope:
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        factor = rope.get("factor")
        original = rope.get("original_max_position_embeddings")
        if isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor > 0:
            if kind in _YARN_TYPES:
                base = original if isinstance(original, int) else positions
                if case.since(_YARN_KEEPS_SINCE) is not True or kind != "yarn":
                    length = max(length, int(base * factor))
                    said += f", {kind} by {factor:g} from {base:,}"
            elif kind not in _NO_FACTOR and "gemma3" not in (case.model.model_type or ""):
                length = int(positions * factor)
                said += f", {kind} by {factor:g}"
    alternative = case.model.config.get("model_max_length")
    if isinstance(alternative, int) and alternative > length:
        length, said = alternative, f"model_max_length {alternative:,}"
    return length, said


def _overrides(case: LaunchCase) -> Mapping[str, Any]:
    return case.table("--hf-overrides") or {}


def _deep(tree: Mapping[str, Any], key: str) -> Any:
    if key in tree:
        return tree[key]
    inner = tree.get("text_config")
    return inner.get(key) if isinstance(inner, dict) else None


def _rope(case: LaunchCase, overrides: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for key in _PREFIX:
        value = _deep(overrides, key)
        if isinstance(value, dict):
            return value
    given = case.table("--rope-scaling")
    if given:
        return given
    return case.model.text.rope_scaling if case.model else None


def _beyond(case: LaunchCase) -> Iterator[Finding]:
    wanted = case.integer("--max-model-len")
    derived = model_length(case)
    if wanted is None or derived is None or case.model is None:
        return
    length, said = derived
    if wanted <= length:
        return
    forced = case.launch.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").lower() in ("1", "true")
    extended = bool(_rope(case, _overrides(case)) and _overrides(case)) or case.has("--rope-scaling")
    if forced and extended:
        return
    evidence = [*case.evidence("--max-model-len"), case.model_evidence(said)]
    if forced:
        yield finding(
            "context-beyond-model",
            f"VLLM_ALLOW_LONG_MAX_MODEL_LEN lets {wanted:,} tokens pass, and the model has {length:,} positions: "
            "what lies beyond is nonsense or nan.",
            evidence=[*evidence, *case.env_evidence("VLLM_ALLOW_LONG_MAX_MODEL_LEN")],
            fixes=[Fix("The model's own length.", ("--max-model-len", str(length)))],
            severity="warning",
            confidence=case.model_confidence,
        )
        return
    fixes = [Fix("The model's own length.", ("--max-model-len", str(length)))]
    if not extended and wanted <= 4 * length:
        factor = -(-wanted // length)
        fixes.append(
            Fix(
                "Or stretch the positions, if the model's authors say that it bears yarn; short prompts may get worse.",
                (
                    "--hf-overrides",
                    _yarn(case, factor, length),
                ),
                env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"} if case.newest_or_since(_YARN_KEEPS_SINCE) else {},
            )
        )
    yield finding(
        "context-beyond-model",
        f"The model has {length:,} positions, the command wants {wanted:,}, and nothing stretches them.",
        evidence=evidence,
        fixes=fixes,
        confidence=case.model_confidence,
    )


def _yarn(case: LaunchCase, factor: int, length: int) -> str:
    import json

    key = "rope_parameters" if case.newest_or_since("0.12.0") else "rope_scaling"
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": length}
    text = case.model.text if case.model else None
    if key == "rope_parameters" and text is not None and text.rope_theta is not None:
        rope["rope_theta"] = text.rope_theta
    nested = case.model is not None and isinstance(case.model.config.get("text_config"), dict)
    return json.dumps({"text_config": {key: rope}} if nested else {key: rope})


# ------------------------------------------------------------------------------------------ blocks of hybrid models


def _blocks(case: LaunchCase) -> Iterator[Finding]:
    if case.model is None or case.since("0.27") is not False or case.settings is None:
        return
    settings = case.settings
    if settings.mamba_cache_mode != "align" or "linear_attention" not in case.model.text.layer_types:
        return
    from loadmaster.core.cache import cache_layout

    block = cache_layout(case.model, settings).block_tokens
    tokens = settings.max_num_batched_tokens
    if block <= tokens:
        return
    yield finding(
        "batched-tokens-below-block",
        f"A block of this model's cache is {block:,} tokens long with these settings, a step has room for {tokens:,}.",
        evidence=[
            Evidence(
                "plan",
                f"block of {block:,} tokens at tensor parallel {settings.tensor_parallel_size}, "
                f"cache in {settings.kv_cache_dtype}",
            ),
            *case.evidence("--max-num-batched-tokens", "--enable-prefix-caching"),
        ],
        fixes=[
            Fix("A step of at least a block.", ("--max-num-batched-tokens", str(-(-block // 256) * 256))),
            Fix("Or no prefix caching.", ("--no-enable-prefix-caching",), ("--enable-prefix-caching",)),
        ],
        confidence=case.model_confidence,
    )
