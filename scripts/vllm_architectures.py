"""Writes ``core/data/vllm-architectures.json``: which release serves which architecture and quantisation.

    python -m scripts.vllm_architectures FOLDER... [--output FILE]      (in the repository's root)

Each FOLDER holds unpacked releases, ``VERSION/vllm/**/*.py``; the sources are read as syntax trees, never imported.

Format (compact JSON)::

    {"source": str, "releases": [version...],
     "architectures": {name: {"in": RANGES, "table": TABLE, "multimodal": bool}},
     "removed": {name: last version, as the newest registry itself says},
     "quantization": {method: [{"in": RANGES, "min_capability": 75, "dtypes": ["bfloat16", "float16"]}]},
     "schemes": {class: [{"in": RANGES, "min_capability": 80}]}}

RANGES is a list of ``[first, last]`` indices into ``releases``, both inclusive. The first release looked at means "at
most", the last one "at least". TABLE, of the newest release that has the name: ``text``, ``multimodal``, ``embedding``,
``cross-encoder``, ``reward``, ``classification``, ``speculative``, or ``transformers`` (served through that library, no
class of vLLM's own). ``multimodal`` is true when any release lists the name among its multimodal models.
``min_capability`` is ten times the compute capability (75 is 7.5), null when the release computes it; ``schemes`` are
those inside compressed-tensors, which ask for more than the method itself. ``dtypes`` are activation types.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from typing import Any

from scripts.vllm_flags import DATA, quantization_methods, ranges
from scripts.vllm_sources import Module, Release, write_table

OUTPUT = DATA / "vllm-architectures.json"

TABLES = {
    "_MODELS": "text",
    "_GENERATION_MODELS": "text",
    "_TEXT_GENERATION_MODELS": "text",
    "_CONDITIONAL_GENERATION_MODELS": "text",
    "_DECODER_ONLY_MODELS": "text",
    "_ENCODER_DECODER_MODELS": "text",
    "_EMBEDDING_MODELS": "embedding",
    "_LATE_INTERACTION_MODELS": "embedding",
    "_CROSS_ENCODER_MODELS": "cross-encoder",
    "_REWARD_MODELS": "reward",
    "_TOKEN_CLASSIFICATION_MODELS": "classification",
    "_SEQUENCE_CLASSIFICATION_MODELS": "classification",
    "_MULTIMODAL_MODELS": "multimodal",
    "_SPECULATIVE_DECODING_MODELS": "speculative",
    "_TRANSFORMERS_MODELS": "transformers",
    "_TRANSFORMERS_SUPPORTED_MODELS": "transformers",
    "_TRANSFORMERS_BACKEND_MODELS": "transformers",
}
# Tables of names, not of models that a release serves.
ASIDE = {"_VLLM_MODELS", "_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS", "_OOT_MODELS"}
DTYPES = {"half": "float16", "float": "float32", "double": "float64"}


def registry(release: Release) -> Module:
    for name in ("vllm.model_executor.models.registry", "vllm.model_executor.models"):
        module = release.module(name)
        if module is not None and any(table in module.names for table in TABLES):
            return module
    raise AssertionError(f"{release.version}: no registry found")


def dict_keys(module: Module, name: str) -> dict[str, ast.expr]:
    statement = module.names.get(name)
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.Dict):
        return {}
    return {
        key.value: item
        for key, item in zip(value.keys, value.values)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def architectures(release: Release) -> dict[str, set[str]]:
    """name -> the tables that list it."""
    module = registry(release)
    unknown = {
        name
        for name in module.names
        if re.fullmatch(r"_[A-Z_]*MODELS", name)
        and "ROCM" not in name
        and "NEURON" not in name
        and name not in TABLES
        and name not in ASIDE
    }
    assert not unknown, f"{release.version}: tables of unknown meaning {sorted(unknown)}"
    found: dict[str, set[str]] = {}
    for name, table in TABLES.items():
        for architecture in dict_keys(module, name):
            found.setdefault(architecture, set()).add(table)
    return found


def removed(release: Release) -> dict[str, str]:
    keys = dict_keys(registry(release), "_PREVIOUSLY_SUPPORTED_MODELS")
    return {name: str(node.value) for name, node in keys.items() if isinstance(node, ast.Constant)}


# ---------------------------------------------------------------------------------------------- quantisation


def quantization_classes(release: Release) -> dict[str, tuple[Module, ast.ClassDef]]:
    """method -> the class that reads its configuration."""
    module = release.module("vllm.model_executor.layers.quantization")
    assert module is not None
    tables: list[ast.Dict] = []
    for statement in module.names.values():
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Dict):
            tables.append(statement.value)
    reader = module.names.get("get_quantization_config")
    if isinstance(reader, ast.FunctionDef):
        for node in ast.walk(reader):
            if isinstance(node, ast.ImportFrom):
                Module._import_from(module, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                tables.append(node.value)
    found: dict[str, tuple[Module, ast.ClassDef]] = {}
    for table in tables:
        for key, value in zip(table.keys, table.values):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Name):
                where = release.find(module, value.id)
                if where is not None and isinstance(where[1], ast.ClassDef):
                    found[str(key.value)] = (where[0], where[1])
    online = release.find(module, "OnlineQuantizationConfig")
    if online is not None and isinstance(online[1], ast.ClassDef):
        for method in quantization_methods(release):
            found.setdefault(method, (online[0], online[1]))
    return found


def returned(release: Release, module: Module, node: ast.ClassDef, method: str) -> Iterator[ast.expr]:
    found = release.method(module, node, method)
    for inner in ast.walk(found[2]) if found else ():
        if isinstance(inner, ast.Return) and inner.value is not None:
            yield inner.value


def capability(release: Release, module: Module, node: ast.ClassDef) -> int | None:
    """The least number that ``get_min_capability`` returns, None when it returns no plain number."""
    numbers = []
    for value in returned(release, module, node, "get_min_capability"):
        if not (isinstance(value, ast.Constant) and isinstance(value.value, int)):
            return None
        numbers.append(value.value)
    return min(numbers) if numbers else None


def dtypes(release: Release, module: Module, node: ast.ClassDef) -> list[str]:
    found = set()
    for value in returned(release, module, node, "get_supported_act_dtypes"):
        for name in re.findall(r"\btorch\.(\w+)", ast.unparse(value)):
            found.add(DTYPES.get(name, name))
    return sorted(found)


def schemes(release: Release) -> dict[str, int]:
    """Scheme classes of compressed-tensors -> least compute capability."""
    found: dict[str, int] = {}
    folder = release.folder / "vllm/model_executor/layers/quantization/compressed_tensors/schemes"
    for path in sorted(folder.glob("*.py")) if folder.is_dir() else ():
        module = release.module(f"vllm.model_executor.layers.quantization.compressed_tensors.schemes.{path.stem}")
        for name, statement in module.names.items() if module is not None and path.stem != "__init__" else ():
            if module is not None and isinstance(statement, ast.ClassDef):
                number = capability(release, module, statement)
                if number is not None:
                    found[name] = number
    return found


# ---------------------------------------------------------------------------------------------- all releases


class Variants:
    """Entries by name, with the releases that have each."""

    def __init__(self) -> None:
        self.entries: dict[str, list[tuple[dict[str, Any], list[int]]]] = {}

    def add(self, name: str, entry: dict[str, Any], index: int) -> None:
        variants = self.entries.setdefault(name, [])
        for known, indices in variants:
            if known == entry:
                indices.append(index)
                return
        variants.append((entry, [index]))

    def table(self) -> dict[str, list[dict[str, Any]]]:
        return {
            name: [
                {"in": ranges(indices), **entry} for entry, indices in sorted(variants, key=lambda item: item[1][-1])
            ]
            for name, variants in sorted(self.entries.items())
        }


def table(releases: list[Release]) -> dict[str, Any]:
    present: dict[str, list[int]] = {}
    newest: dict[str, str] = {}
    pictures: set[str] = set()
    methods, inner = Variants(), Variants()
    for index, release in enumerate(releases):
        for name, tables in architectures(release).items():
            present.setdefault(name, []).append(index)
            own = sorted(tables - {"transformers"}) or ["transformers"]
            newest[name] = "multimodal" if "multimodal" in tables else own[-1]
            if "multimodal" in tables:
                pictures.add(name)
        classes = quantization_classes(release)
        for method in quantization_methods(release):
            if method in classes:
                entry = {
                    "min_capability": capability(release, *classes[method]),
                    "dtypes": dtypes(release, *classes[method]),
                }
                methods.add(method, entry, index)
        for name, number in schemes(release).items():
            inner.add(name, {"min_capability": number}, index)
    return {
        "source": "read by scripts/vllm_architectures.py from the Python sources of the listed releases (Apache-2.0)",
        "releases": [release.version for release in releases],
        "architectures": {
            name: {"in": ranges(indices), "table": newest[name], "multimodal": name in pictures}
            for name, indices in sorted(present.items())
        },
        "removed": dict(sorted(removed(releases[-1]).items())),
        "quantization": methods.table(),
        "schemes": inner.table(),
    }


def main() -> int:
    return write_table(
        __doc__,
        OUTPUT,
        table,
        lambda found: f"{len(found['architectures'])} architectures, {len(found['quantization'])} methods",
    )


if __name__ == "__main__":
    sys.exit(main())
