"""Which rules of vLLM hold for which version.

The rules are data (``data/engine-versions.toml``), each with its source. A version newer than the newest
rules is planned by the newest, an older one by the oldest, and the answer says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from msgspec import Struct

from loadmaster.core.facts import GIB, EngineFacts, ModelFacts
from loadmaster.core.tables import load_toml

_TABLE = "engine-versions.toml"
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


class EngineRules(Struct, frozen=True, kw_only=True):
    """The rules of one version. ``note`` is set when they are not certain to hold; bounds are wide then."""

    version: str  # "0.24.0", or "0.33" when the version itself has no rules
    note: str | None
    gpu_memory_utilization: float
    graph_profiler: bool
    graph_estimate_subtracted: bool
    graph_pool_blocks: str
    budget: str
    hybrid_prefix_caching: bool
    capture_limit: int
    capture_limit_blackwell: int
    capture_max_num_seqs: bool
    capture_max_num_batched_tokens: bool
    split_limited_while_loading: bool
    split_limited_while_profiling: bool
    align_within_batch: bool
    optimization_level: int
    model_runner: str
    second_runner_architectures: tuple[str, ...]
    second_runner_profiles_pictures: bool
    second_runner_profiles_graphs: bool
    outside: bool = False  # older than the oldest rules or newer than the newest: nobody read this version


def version_pair(text: str | None) -> tuple[int, int] | None:
    """Major and minor number of a version as people write it ("0.24.0", "v0.26.1rc1.dev156"); None: none in it."""
    found = _VERSION.search(text) if text else None
    return (int(found[1]), int(found[2])) if found else None


def rules_for(engine: EngineFacts) -> EngineRules:
    """The rules for an engine; an unknown version gets the newest."""
    return _rules(engine.version)


@lru_cache(maxsize=64)
def _rules(version: str | None) -> EngineRules:
    table = load_toml(_TABLE)
    oldest, newest = _pair(table["oldest"]), _pair(table["newest"])
    asked = version_pair(version)
    note, name, outside = None, None, False
    if asked is None:
        used = newest
        said = "not given" if version is None else f"{version!r}, which has no number"
        note = f"engine version {said}: the rules of {table['newest']} are used"
    elif asked > newest:
        outside = True
        used, note = newest, f"engine {version} is newer than the newest rules ({table['newest']}), which are used"
    elif asked < oldest:
        outside = True
        used, note = oldest, f"engine {version} is older than the oldest rules ({table['oldest']}), which are used"
    else:
        used, name = asked, _plain(version)
    values = {
        name: _value(rule["steps"], used) for name, rule in table.items() if isinstance(rule, dict) and "steps" in rule
    }
    values["second_runner_architectures"] = tuple(values["second_runner_architectures"])
    return EngineRules(version=name or f"{used[0]}.{used[1]}", note=note, outside=outside, **values)


def batch_defaults(rules: EngineRules, total_bytes: int, card_name: str | None) -> tuple[int, int]:
    """Default ``max_num_batched_tokens`` and ``max_num_seqs`` of the server for a card of this size."""
    used = version_pair(rules.version) or _pair(load_toml(_TABLE)["newest"])
    for row in load_toml(_TABLE)["batch"]["rows"]:
        if used < _pair(row["since"]) or total_bytes < row["at_least_gib"] * GIB:
            continue
        if "except_name" in row and row["except_name"] in (card_name or "").lower():
            continue
        return row["tokens"], row["seqs"]
    raise AssertionError("the last row holds for every card")


def uses_second_runner(rules: EngineRules, model: ModelFacts, env: Mapping[str, str]) -> bool:
    """Whether the second model runner ("V2") serves this model: it samples, profiles and keeps other buffers."""
    asked = env.get("VLLM_USE_V2_MODEL_RUNNER")
    if asked is not None and rules.model_runner != "none":
        return asked.strip().lower() in ("1", "true")
    if rules.model_runner in ("none", "all"):
        return rules.model_runner == "all"
    text = model.text
    listed = model.architecture in rules.second_runner_architectures
    if rules.model_runner == "listed":
        return listed
    if rules.model_runner.startswith("listed, or"):
        return listed or not (text.num_experts or "linear_attention" in text.layer_types)
    return listed and not text.num_experts and model.quantization.method is None


def is_prefix_language_model(model_type: str | None) -> bool:
    """Whether one picture has to fit one batch (pictures attend to each other in both directions)."""
    return model_type in load_toml(_TABLE)["prefix_language_models"]["model_types"]


def _plain(version: str | None) -> str | None:
    """The release that a version belongs to: "0.26.1" for "v0.26.1rc1.dev156"."""
    found = _VERSION.search(version) if version else None
    return ".".join(part for part in found.groups() if part is not None) if found else None


def _pair(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _value(steps: list[dict[str, Any]], used: tuple[int, int]) -> Any:
    value = steps[0]["value"]
    for step in steps:
        if used >= _pair(step["since"]):
            value = step["value"]
    return value
