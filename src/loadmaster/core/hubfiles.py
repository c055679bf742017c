"""Which files of a repository a deployment needs, by their names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

# The same weights once more, for other programs: not needed where safetensors files are.
_OTHER_WEIGHTS = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.tflite",
    "*.gguf",
)
_OTHER_FOLDERS = ("original/*", "onnx/*", "openvino/*", "coreml/*", "gguf/*", "metal/*")
_NEVER = (".gitattributes", ".gitignore", ".git/*")


class ManyModelsError(Exception):
    """A repository of several GGUF models, and none was chosen. ``names``: the models."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"{len(names)} GGUF files, which are different models or sizes of one")
        self.names = tuple(names)


def needed_files(names: Collection[str], include: Sequence[str] = ()) -> tuple[str, ...]:
    """The files to fetch, sorted. ``include``: patterns of names to take instead of what is needed as a rule.

    Raises :class:`ManyModelsError` when the repository holds several GGUF models and ``include`` names none.
    """
    if include:
        return tuple(sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in include)))
    kept = [name for name in names if not _matches(name, _NEVER)]
    if any(name.endswith(".safetensors") for name in kept):
        return tuple(sorted(name for name in kept if not _matches(name, _OTHER_WEIGHTS + _OTHER_FOLDERS)))
    models = [name for name in kept if name.lower().endswith(".gguf") and "mmproj" not in name.lower()]
    if len(_whole_models(models)) > 1:
        raise ManyModelsError(sorted(models))
    return tuple(sorted(kept))


def _whole_models(names: Sequence[str]) -> set[str]:
    """Models of one file, and split ones by their first part."""
    return {name for name in names if "-of-" not in name or "00001-of-" in name}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)
