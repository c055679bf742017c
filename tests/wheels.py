"""Writes tiny wheels into a folder that pip takes as an index: no network, no build."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def write_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], scripts: dict[str, str] | None = None
) -> Path:
    """A pure Python wheel with these modules; ``scripts``: console script → ``module:function``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    content = dict(files)
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if scripts:
        lines = "".join(f"{script} = {target}\n" for script, target in scripts.items())
        content[f"{info}/entry_points.txt"] = f"[console_scripts]\n{lines}"
    rows = [f"{file},sha256={_digest(text)},{len(text.encode())}" for file, text in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in content.items():
            archive.writestr(file, text)
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def write_vllm(folder: Path, version: str, *, says: str | None = None, fails: bool = False) -> Path:
    """Something that is called vllm and tells a version, ``says`` if not its own, or fails when it is imported."""
    body = f"__version__ = {says or version!r}\n" + (
        "raise ImportError('libcudart.so.13 is missing')\n" if fails else ""
    )
    main = "import vllm\ndef main():\n    print(vllm.__version__)\n"
    files = {"vllm/__init__.py": body, "vllm/entrypoints/__init__.py": "", "vllm/entrypoints/cli.py": main}
    return write_wheel(folder, "vllm", version, files, {"vllm": "vllm.entrypoints.cli:main"})
