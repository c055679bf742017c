#!/usr/bin/env python3
"""Write core/data/architecture-versions.toml from vLLM releases: python -m scripts.architecture_versions FOLDER.

FOLDER holds VERSION/vllm/**/*.py. Only tables of classes that a release has itself count, not those of models that
it once had.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from scripts.vllm_sources import releases_in

TABLE = Path(__file__).resolve().parent.parent / "src" / "loadmaster" / "core" / "data" / "architecture-versions.toml"
PLACES = ("vllm/model_executor/models/registry.py", "vllm/model_executor/models/__init__.py")
NOT_NATIVE = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")
HEAD = """# First and last vLLM release with a class of its own for an architecture; no last: still there in {newest}.
# Read from releases {oldest} to {newest} by scripts/architecture_versions.py: "{oldest}" means that or earlier.

source = "vLLM model_executor/models/registry.py, the tables of native classes, releases {oldest} to {newest}"
releases = [{releases}]

[architectures]
"""


def architectures(folder: Path) -> set[str]:
    """The names in a release's tables of model classes; empty when it has no such table."""
    for place in PLACES:
        if not (folder / place).is_file():
            continue
        found = set()
        for node in ast.walk(ast.parse((folder / place).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = target.id if isinstance(target, ast.Name) else ""
            if name.startswith("_") and name.endswith("MODELS") and name not in NOT_NATIVE:
                found |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        if found:
            return {name for name in found if isinstance(name, str)}
    return set()


def page(folder: Path) -> str:
    releases: list[str] = []
    runs: dict[str, tuple[str, str]] = {}
    for release in releases_in(folder):
        found = architectures(release.folder)
        if not found:
            continue
        releases.append(release.version)
        for name in found:
            runs[name] = (runs.get(name, (release.version, ""))[0], release.version)
    newest = releases[-1]
    listed = ", ".join(f'"{version}"' for version in releases)
    lines = [
        f'{name} = ["{first}"]' if last == newest else f'{name} = ["{first}", "{last}"]'
        for name, (first, last) in sorted(runs.items())
    ]
    return HEAD.format(oldest=releases[0], newest=newest, releases=listed) + "\n".join(lines) + "\n"


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    TABLE.write_text(page(Path(sys.argv[1])), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
