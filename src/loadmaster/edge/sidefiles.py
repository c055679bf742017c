"""The small files of a model directory: configuration, processor, tokenizer, chat template, generation settings."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from loadmaster.core.facts import Evidence, Finding
from loadmaster.core.integrity import (
    BadFile,
    bad_json,
    bad_shards,
    download_fix,
    foreign_content,
    is_pointer,
    missing_file,
    pointer_reason,
)
from loadmaster.core.modelconfig import text_config, vision_section
from loadmaster.edge.source import ModelSource, ReadError

SMALL_LIMIT = 16 << 20  # bytes of a configuration file; the largest published one has some hundred KB
TOKENIZER_LIMIT = 64 << 20  # bytes of tokenizer.json; the largest published ones have about 35 MB

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_KINDS = {
    "config.json": "config",
    "params.json": "config",
    "generation_config.json": "config",
    "hf_quant_config.json": "config",
    "quantize_config.json": "config",
    "quant_config.json": "config",
    "preprocessor_config.json": "processor",
    "video_preprocessor_config.json": "processor",
    "processor_config.json": "processor",
    "chat_template.jinja": "template",
    "chat_template.json": "template",
    "tokenizer_config.json": "tokenizer",
    "special_tokens_map.json": "tokenizer",
    "added_tokens.json": "tokenizer",
    "merges.txt": "tokenizer",
    **dict.fromkeys(TOKENIZER_FILES, "tokenizer"),
}


class SideFiles(Struct):
    """What was read. A file that is missing or no JSON object is ``None``, the latter with a finding."""

    config: dict[str, Any] | None = None
    preprocessor: dict[str, Any] | None = None
    video_preprocessor: dict[str, Any] | None = None
    hf_quant_config: dict[str, Any] | None = None
    has_chat_template: bool | None = None
    findings: tuple[Finding, ...] = ()


class _Tokenizer(Struct):
    """The part of ``tokenizer.json`` that is looked at; the parse checks the syntax of the rest."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    added_tokens: list[_Token] = []


class _Token(Struct):
    id: int


def kind_of(name: str) -> str:
    """The kind of :class:`ModelFile` by name."""
    base = name.rsplit("/", 1)[-1]
    if base in _KINDS:
        return _KINDS[base]
    if base.endswith(".index.json"):
        return "index"
    if base.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf")):
        return "weights"
    if base.endswith(".py"):
        return "code"
    if base.endswith(".jinja"):
        return "template"
    if base.endswith(".tiktoken"):
        return "tokenizer"
    return "other"


def bad_index(source: ModelSource, name: str, reason: str) -> Finding:
    return bad_json(name, reason, source.files.get(name) or 0, "config-invalid", source.origin)


class _Files:
    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.findings: list[Finding] = []
        self.broken: set[str] = set()

    def object(self, name: str, code: str = "config-invalid") -> dict[str, Any] | None:
        """A JSON object, ``None`` when the file is not there or is none (then with a finding)."""
        size = self.source.files.get(name)
        if size is None:
            return None
        value = self.decode(name, SMALL_LIMIT, Any, code)
        if isinstance(value, dict):
            return value
        if name not in self.broken:
            self.report(name, f"it holds a {type(value).__name__}", code)
        return None

    def decode(self, name: str, limit: int, kind: Any, code: str) -> Any:
        """The file as ``kind``; ``None``, with a finding, when it cannot be."""
        raw = b""
        try:
            raw = self.source.read(name, limit)
            return msgspec.json.decode(raw, type=kind)
        except RecursionError:
            reason = "it is nested too deeply"
        except (msgspec.DecodeError, UnicodeDecodeError, ReadError) as error:
            reason = foreign_content(raw[:512]) or str(error)
        if is_pointer(raw):
            self.broken.add(name)
            pointer = BadFile(name, pointer_reason(raw, len(raw)))
            self.findings.append(bad_shards("lfs-pointer", [pointer], self.source.origin))
        else:
            self.report(name, reason, code)
        return None

    def report(self, name: str, reason: str, code: str) -> None:
        self.broken.add(name)
        size = self.source.files.get(name) or 0
        self.findings.append(bad_json(name, reason, size, code, self.source.origin))

    def missing(self, code: str, name: str, title: str, cause: str, severity: Any) -> None:
        self.findings.append(missing_file(code, name, title, cause, severity, self.source.origin))


def read_side_files(source: ModelSource) -> SideFiles:
    """Reads and checks them. Never raises for what they hold."""
    files = _Files(source)
    config = files.object("config.json")
    if config is None and "config.json" not in files.broken:
        config = files.object("params.json")
        if config is None:
            files.missing(
                "config-invalid",
                "config.json",
                "config.json is missing",
                "Nothing else says what the model is",
                "error",
            )
    vision = config is not None and vision_section(config) is not None
    nested = files.object("processor_config.json", "processor-missing")
    preprocessor = files.object("preprocessor_config.json", "processor-missing")
    video = files.object("video_preprocessor_config.json", "processor-missing")
    has_nested = nested is not None and isinstance(nested.get("image_processor"), dict)
    if preprocessor is None and has_nested:
        preprocessor = nested
    if vision and preprocessor is None and "preprocessor_config.json" not in files.broken and not _mistral(source):
        files.missing(
            "processor-missing",
            "preprocessor_config.json",
            "The image processor's configuration is missing",
            "The model has a vision tower; the engine cannot prepare pictures without it",
            "error",
        )
    tokenizer_config = files.object("tokenizer_config.json", "tokenizer-broken")
    _check_tokenizer(files, config)
    has_template = _check_template(files, tokenizer_config, nested, vision)
    if files.object("generation_config.json") is None and "generation_config.json" not in files.broken:
        files.missing(
            "config-invalid",
            "generation_config.json",
            "generation_config.json is missing",
            "Stop tokens and sampling defaults then come from config.json and the engine",
            "note",
        )
    return SideFiles(
        config, preprocessor, video, files.object("hf_quant_config.json"), has_template, tuple(files.findings)
    )


def _mistral(source: ModelSource) -> bool:
    """Mistral's own format has tokenizer, template and processor in tekken.json and params.json."""
    return "tekken.json" in source.files and "params.json" in source.files


def _check_tokenizer(files: _Files, config: dict[str, Any] | None) -> None:
    source = files.source
    names = [name for name in TOKENIZER_FILES if source.files.get(name)]
    names += [name for name in source.files if name.endswith(".tiktoken") and "/" not in name]
    if not names:
        files.missing(
            "tokenizer-broken",
            "tokenizer.json",
            "No tokenizer",
            "None of " + ", ".join(TOKENIZER_FILES) + " is there with content",
            "error",
        )
        return
    if "tokenizer.json" not in names:
        return
    tokenizer: _Tokenizer | None = files.decode("tokenizer.json", TOKENIZER_LIMIT, _Tokenizer, "tokenizer-broken")
    if tokenizer is None:
        return
    vocabulary = text_config(config).vocab_size if config is not None else None
    beyond = [token.id for token in tokenizer.added_tokens if vocabulary is not None and token.id >= vocabulary]
    if beyond:
        files.findings.append(
            Finding(
                code="tokenizer-broken",
                severity="error",
                title=f"The tokenizer has token ids beyond the vocabulary of {vocabulary}",
                cause="Tokenizer and configuration belong to different models",
                evidence=(
                    Evidence(source="file", path="tokenizer.json", text=f"{len(beyond)} ids up to {max(beyond)}"),
                    Evidence(source="file", path="config.json", text=f"vocab_size = {vocabulary}"),
                ),
                fixes=(download_fix(source.origin, ["tokenizer.json", "config.json"]),),
                confidence="likely",
            )
        )


def _check_template(
    files: _Files, tokenizer_config: dict[str, Any] | None, processor: dict[str, Any] | None, vision: bool
) -> bool:
    source = files.source
    texts: list[tuple[str, str]] = []
    for name in source.files:
        if name == "chat_template.jinja" or (name.startswith("additional_chat_templates/") and name.endswith(".jinja")):
            try:
                texts.append((name, source.read(name, SMALL_LIMIT).decode("utf-8", "replace")))
            except ReadError:
                continue
    for name, owner in (
        ("tokenizer_config.json", tokenizer_config),
        ("chat_template.json", files.object("chat_template.json", "chat-template-missing")),
        ("processor_config.json", processor),
    ):
        value = owner.get("chat_template") if owner else None
        if isinstance(value, list):  # named templates
            value = " ".join(str(item.get("template")) for item in value if isinstance(item, dict))
        if isinstance(value, str):
            texts.append((name, value))
    texts = [(name, text) for name, text in texts if text.strip()]
    if not texts:
        if _mistral(source):
            return True
        files.missing(
            "chat-template-missing",
            "chat_template.jinja",
            "No chat template",
            "Chat requests are refused" + (", and pictures need the template's placeholders" if vision else ""),
            "error" if vision else "warning",
        )
        return False
    if vision and not any("image" in text or "img" in text.lower() for _, text in texts):
        files.findings.append(
            Finding(
                code="chat-template-missing",
                severity="error",
                title="The chat template has no branch for pictures",
                cause="The model has a vision tower, and the template never writes an image placeholder",
                evidence=tuple(Evidence(source="file", path=name, text="no word of images") for name, _ in texts),
                fixes=(download_fix(source.origin, ["chat_template.jinja"]),),
                confidence="likely",
            )
        )
    return True
