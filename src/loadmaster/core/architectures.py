"""Which rule of data/architectures.toml a tensor falls under.

A tensor's name is cut into a module path and a leaf; the path is looked up in the rule sets of the
architecture's family, the leaf in the table of leaves.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

from msgspec import Struct

from loadmaster.core.engineversion import at_least
from loadmaster.core.tables import load_toml

_TABLE = "architectures.toml"


class Leaf(Struct, frozen=True):
    """What a tensor is within its layer. ``axes``: ``o`` output, ``i`` input, ``f`` flat."""

    kind: str
    axes: str
    dtype: str = "stored"
    keep: str = "always"


class Placement(Struct, frozen=True):
    """Where a tensor goes: ``component`` of the load sheet, ``part`` for people, ``split`` over the ranks.

    ``fused``: all experts in one tensor. ``known``: a rule matched the name.
    """

    module: str
    leaf: Leaf
    split: str
    part: str
    component: str
    linear: bool
    dtype: str | None = None
    absorbed: bool = False
    fused: bool = False
    known: bool = True


class Family(Struct, frozen=True):
    """An architecture family's entry of the table, with its expressions compiled once."""

    name: str
    exact: bool
    fields: dict[str, Any]
    vision: re.Pattern[str] | None
    mtp: re.Pattern[str] | None

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(key, default)


@cache
def family_of(architecture: str | None) -> Family:
    """The family that has ``architecture`` among its own, or the family ``unknown`` (``exact`` False)."""
    table = load_toml(_TABLE)
    for name, fields in table["families"].items():
        if architecture in fields["architectures"]:
            return _family(name, fields, exact=True)
    return _family("unknown", table["unknown"], exact=False)


def _family(name: str, fields: dict[str, Any], *, exact: bool) -> Family:
    vision, mtp = fields.get("vision"), fields.get("mtp")
    return Family(name, exact, fields, re.compile(vision) if vision else None, re.compile(mtp) if mtp else None)


@cache
def _rules(names: tuple[str, ...]) -> tuple[tuple[re.Pattern[str], dict[str, Any]], ...]:
    sets = load_toml(_TABLE)["rules"]
    return tuple((re.compile(rule["match"]), rule) for name in names for rule in sets[name])


@cache
def _leaves(method: str | None, version: str) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for entry in load_toml(_TABLE)["leaves"]:
        methods = entry.get("methods")
        if entry["name"] in leaves or (methods is not None and method not in methods):
            continue
        if "until" in entry and at_least(version, entry["until"]):
            continue
        leaves[entry["name"]] = Leaf(
            entry["kind"], entry["axes"], entry.get("dtype", "stored"), entry.get("keep", "always")
        )
    return leaves


_BARE = Leaf("data", "oi", "model")
_FUSED_MODULE = re.compile(r"^(.*\.experts\.(?:gate_up_proj|down_proj|gate_proj|up_proj|w13|w2))(_\w+)?$")


def split_name(name: str, method: str | None, version: str) -> tuple[str, Leaf]:
    """``(module path, leaf)`` of a tensor name with ``{l}`` and ``{e}`` in place of numbers."""
    leaves = _leaves(method, version)
    fused = _FUSED_MODULE.match(name)
    if fused is not None:
        suffix = fused.group(2)
        for entry in load_toml(_TABLE)["fused_leaves"] if suffix else ():
            if entry["suffix"] == suffix:
                axes = {"scalar": "", "bias": "o"}.get(entry["kind"], "oi")
                return fused.group(1), Leaf(entry["kind"], axes, entry["dtype"])
        return fused.group(1), _BARE
    at = name.find(".weight.")
    if at >= 0 and name[at + 1 :] in leaves:
        return name[:at], leaves[name[at + 1 :]]
    module, _, last = name.rpartition(".")
    if last in leaves:
        return module, leaves[last]
    return name, _BARE


@lru_cache(maxsize=1 << 14)
def place(family_name: str, architecture: str | None, name: str, method: str | None, version: str) -> Placement:
    """The placement of the tensor ``name``. ``method``: quantisation in force; ``version``: rules in use."""
    family = family_of(architecture)
    module, leaf = split_name(name, method, version)
    fused = ".experts.{e}" not in module
    vision = family.vision is not None and family.vision.search(name) is not None
    mtp = not vision and family.mtp is not None and family.mtp.search(name) is not None
    sets: list[str] = family.get("vision_rules", family.get("rules")) if vision else family.get("rules")
    component = "weights.vision" if vision else "weights.other" if mtp else "weights.language"
    for pattern, rule in _rules(tuple(sets)):
        if pattern.search(module) is None:
            continue
        split = rule["split"]
        replicated = rule.get("quantised_replicated")
        if replicated and method in replicated and at_least(version, rule["quantised_replicated_from"]):
            split = "replicated"
        part = "vision" if vision else "mtp" if mtp else rule["part"]
        linear = rule.get("linear", split in ("rows", "kv_rows", "columns", "experts"))
        return Placement(
            module, leaf, split, part, component, linear,
            dtype=rule.get("dtype"), absorbed=rule.get("absorbed", False), fused=fused and split == "experts",
        )  # fmt: skip
    part = "vision" if vision else "mtp" if mtp else "other"
    return Placement(module, leaf, "replicated", part, component, False, known=False)


def online_bytes_per_parameter(quantization: str | None) -> tuple[float, bool] | None:
    """Bytes of a linear layer's parameter under ``--quantization`` of an unquantised checkpoint, and whether only
    routed experts are quantised; None when the method does not quantise while loading."""
    for entry in load_toml(_TABLE)["online"]:
        if quantization in entry["names"]:
            return float(entry["bytes_per_parameter"]), bool(entry.get("experts_only", False))
    return None
