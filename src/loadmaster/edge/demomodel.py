"""The demonstration's model, as the package carries it: a tiny Qwen3.5 that answers questions about simple pictures.

Two GGUF files, the language model and its projector, made as docs/demo-model.md tells. Their bytes are known here,
so a package that was damaged or changed is found out before anything is served from it.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

MODEL_FILE, PROJECTOR_FILE = "demo-qwen35.gguf", "mmproj-demo-qwen35.gguf"
DIGESTS = {
    MODEL_FILE: "c1f95ce0b2ba49615cff9ede084fc70baa38c5edfd019041172766cb743cfab1",
    PROJECTOR_FILE: "fe1cb37354c8309db233ff1acf046ebba0b5db6467a448f61af98c2f170fa010",
}


class DamagedModel(Exception):
    """A file of the package is not the one that belongs to it; the message names the file."""


def write_demo_model(directory: Path) -> tuple[Path, Path]:
    """Write the model and its projector into ``directory``, which is made if need be.

    Returns the paths (model, projector). Raises OSError, and :class:`DamagedModel` if the package's are not whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, digest in DIGESTS.items():
        content = files("loadmaster").joinpath("data", name).read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != digest:
            raise DamagedModel(f"{name} of this installation has the SHA-256 {found[:16]}..., not {digest[:16]}...")
        (directory / name).write_bytes(content)
    return directory / MODEL_FILE, directory / PROJECTOR_FILE
