"""What is known of public models by name, for a check or a plan without their files.

``core/data/known-models.json`` holds the fields of their ``config.json`` that decide shapes and sizes; a field that
nobody verified is absent. ``core/data/model-names.toml`` says how names of rebuilt checkpoints are read: what stands
at the end of ``Qwen2.5-VL-7B-Instruct-AWQ`` tells the storage format, and then the format is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec

from loadmaster.core.architectures import family_of
from loadmaster.core.facts import ModelFacts, Quantization
from loadmaster.core.modelconfig import processor, text_config, vision_config
from loadmaster.core.quantization import CONFIG_KEYS, quantization
from loadmaster.core.tables import load_json, load_toml

_SEPARATORS = re.compile(r"[-_\s]+|(?<=quantized)\.|(?<=bit)\.")
_SNAPSHOT = re.compile(r"^[0-9a-f]{7,64}$")
# NAME-GGUF, NAME-GGUF:Q4_K_M, NAME-UD-Q4_K_XL.gguf, NAME.Q4_K_M-00001-of-00003.gguf
_GGUF = re.compile(
    r"^(?P<name>.+?)(?P<word>[-_.]gguf)?"
    r"(?:[-_.:](?:(?:ud|i1)[-_])?(?P<type>(?:i?q|tq)\d(?:_[a-z0-9]{1,3})*|b?f16|f32|mxfp4(?:_moe)?))?"
    r"(?:-\d{5}-of-\d{5})?(?P<file>\.gguf)?$",
    re.IGNORECASE,
)
_LONGEST_NAME = 4096
BY_NAME = ", by its name"  # ends the label of a quantisation that only the name tells


class KnownModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry: ``names`` (hub names of one shape), ``config`` (as in ``config.json``), ``source`` of its figures."""

    names: tuple[str, ...]
    config: dict[str, Any]
    source: tuple[str, ...]
    note: str | None = None
    build: bool = False  # one maker's rebuild of another entry: only that maker's name means it


class _Scheme(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parts: tuple[str, ...]
    source: str
    declared: dict[str, Any]
    makers: tuple[str, ...] = ()


class _Parts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    storage: frozenset[str]
    role: frozenset[str]
    generic: frozenset[str]
    source: str


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    families: frozenset[str]
    experts: bool
    most_bits: int
    methods: frozenset[str]
    modules: tuple[str, ...]
    words: str
    source: str


class _LeftAlone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    least: tuple[str, ...]
    smallest_group: int
    most_with_experts: tuple[str, ...]
    most_without_experts: tuple[str, ...]
    kept: tuple[_Kept, ...]


class _Names(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parts: _Parts
    dtype: dict[str, str]
    scheme: tuple[_Scheme, ...]
    left_alone: _LeftAlone


@lru_cache(maxsize=1)
def entries() -> tuple[KnownModel, ...]:
    """The whole table, in the order of the file."""
    return msgspec.convert(load_json("known-models.json")["entries"], tuple[KnownModel, ...])


@lru_cache(maxsize=1)
def _names() -> _Names:
    return msgspec.convert(load_toml("model-names.toml"), _Names)


def _words(name: str) -> list[str]:
    return [word for word in _SEPARATORS.split(name.lower()) if word]


def _key(words: Iterable[str]) -> str:
    """``qwen35-27b`` and ``Qwen3.5-27B`` are one name: letters and digits count."""
    return re.sub(r"[^a-z0-9]", "", "".join(words))


@lru_cache(maxsize=1)
def _index() -> tuple[dict[str, KnownModel], dict[str, KnownModel | None]]:
    """By full name, and by name without its role; a family of more than one shape is ``None``."""
    full: dict[str, KnownModel] = {}
    family: dict[str, KnownModel | None] = {}
    for entry in (entry for entry in entries() if not entry.build):
        for name in entry.names:
            words = _words(name.rpartition("/")[2])
            full.setdefault(_key(words), entry)
            short = _key(word for word in words if word not in _names().parts.role)
            known = family.setdefault(short, entry)
            if known is not entry and (known is None or not _one_shape(known, entry)):
                family[short] = None
    return full, family


@lru_cache(maxsize=1)
def _builds() -> dict[tuple[str, str], KnownModel]:
    """Rebuilds whose published file is in the table, by maker and name."""
    split = ((entry, name.partition("/")) for entry in entries() if entry.build for name in entry.names)
    return {(maker.lower(), _key(_words(last))): entry for entry, (maker, _, last) in split}


def _one_shape(first: KnownModel, second: KnownModel) -> bool:
    """Whether two entries differ at most in the context that they were trained for."""
    return _shape(first.config) == _shape(second.config)


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    ignored = {"max_position_embeddings", "rope_scaling", "rope_theta", "rope_parameters", "seq_length"}
    return {
        key: _shape(value) if isinstance(value, dict) else value for key, value in config.items() if key not in ignored
    }


def known_model(name: str) -> ModelFacts | None:
    """What is known of the model that ``name`` means, or None when it is not in the table or could be several.

    ``name`` is a hub name with or without its owner, a path that ends in one, or a Hugging Face or ModelScope cache
    directory. Upper and lower case, ``___`` for a dot and missing separators do not matter. Storage parts at the end
    (AWQ, GPTQ-Int4, FP8, NVFP4, bnb-4bit, w4a16, ...) select a usual quantisation, said to be assumed in ``notes``.
    A GGUF build (``-GGUF``, ``-GGUF:Q4_K_M``, ``Q4_K_M.gguf``) is found too; the number formats in it stay unknown.
    The result has format ``known`` and no tensors.
    """
    owner, last = _last_part(name)
    build = _GGUF.match(last)
    if build is not None and (build["file"] or build["word"] or "q" in (build["type"] or "").lower()):
        entry = _find(_words(build["name"]))
        return None if entry is None else _gguf_facts(name, entry, build["type"])
    words = _words(last)
    if not words or "gguf" in words:
        return None
    if owner is not None and (built := _builds().get((owner.lower(), _key(words)))) is not None:
        return _facts(name, built, owner, [])
    entry = _find(words)
    stored: list[str] = []
    while entry is None and words and words[-1] in _names().parts.storage:
        stored.insert(0, words.pop())
        entry = _find(words)
    return None if entry is None else _facts(name, entry, owner, stored)


def _find(words: list[str]) -> KnownModel | None:
    full, family = _index()
    key = _key(words)
    if key in full:
        return full[key]
    return family.get(_key(word for word in words if word not in _names().parts.role))


def _last_part(name: str) -> tuple[str | None, str]:
    """Owner and name out of a path: ``models--OWNER--NAME/snapshots/HASH``, ``.../OWNER/NAME/``, ``OWNER/NAME``."""
    if len(name) > _LONGEST_NAME:
        return None, ""
    parts = [part for part in name.strip().replace("\\", "/").replace("___", ".").split("/") if part]
    for part in parts:
        if part.startswith("models--"):
            owner, _, rest = part.removeprefix("models--").partition("--")
            return (owner, rest) if rest else (None, owner)
    while parts and (parts[-1].lower() in _names().parts.generic or _SNAPSHOT.match(parts[-1])):
        parts.pop()
    if not parts:
        return None, ""
    return (parts[-2] if len(parts) > 1 else None), parts[-1]


def _facts(name: str, entry: KnownModel, owner: str | None, stored: list[str]) -> ModelFacts:
    config = dict(entry.config)
    notes = [f"no files: taken as {entry.names[0]} of the table of public models"]
    if entry.note is not None:
        notes.append(entry.note)
    scheme = _scheme(stored, owner)
    dtype = next((_names().dtype[word] for word in stored if word in _names().dtype), None)
    if scheme is not None or dtype is not None:
        config = _without_quantization(config)
    if dtype is not None and scheme is None:
        config["torch_dtype"] = dtype
        config.pop("dtype", None)
    if scheme is not None:
        config["quantization_config"] = dict(scheme.declared)
    declared = quantization(config)
    if scheme is not None:
        notes.append(f"quantisation assumed from the name: {'-'.join(stored)} is read as {declared.label}")
        declared = msgspec.structs.replace(declared, label=f"{declared.label}{BY_NAME}")
    architectures = config.get("architectures")
    facts = ModelFacts(
        name=name,
        format="known",
        architecture=architectures[0] if architectures else None,
        model_type=config.get("model_type"),
        text=text_config(config),
        vision=vision_config(config),
        processor=processor(None, None, config),
        quantization=declared if declared.method is not None else Quantization(),
        auto_map=bool(config.get("auto_map")),
        config=config,
        notes=tuple(notes),
    )
    return facts if scheme is None else _usual_build(facts)


def _usual_build(facts: ModelFacts) -> ModelFacts:
    """With what builds of this family usually leave at 16 bits, said to be assumed."""
    family, experts = family_of(facts.architecture).name, bool(facts.text.num_experts)
    bits, method = facts.quantization.bits, facts.quantization.method
    kept = next(
        (
            entry
            for entry in _names().left_alone.kept
            if family in entry.families
            and experts is entry.experts
            and method in entry.methods
            and bits is not None
            and bits <= entry.most_bits
        ),
        None,
    )
    ends = "all linear layers but the head" + (" and the routed experts alone" if experts else " and the MLPs alone")
    words = kept.words if kept is not None else "nothing but the head"
    note = f"the build is taken to leave {words} at 16 bits; the bounds of the weights are builds that pack {ends}"
    ignore = facts.quantization.ignore
    if kept is not None:
        ignore = tuple(dict.fromkeys([*ignore, "lm_head", *kept.modules]))
    changed = msgspec.structs.replace(facts.quantization, ignore=ignore)
    return msgspec.structs.replace(facts, quantization=changed, notes=(*facts.notes, note))


def format_by_name(model: ModelFacts) -> bool:
    """Whether the checkpoint's quantisation is only read off its name."""
    return model.format == "known" and (model.quantization.label or "").endswith(BY_NAME)


def smallest_group() -> int:
    """Weights that share a scale in the finest integer builds that are published."""
    return _names().left_alone.smallest_group


def left_alone(model: ModelFacts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules that builds of few bits leave at 16 bits: the fewest, and the most that are published."""
    table = _names().left_alone
    return table.least, table.most_with_experts if model.text.num_experts else table.most_without_experts


def _gguf_facts(name: str, entry: KnownModel, number_format: str | None) -> ModelFacts:
    """The language model of a GGUF build: its projector is a file of its own, and code of its own is not in it."""
    facts = _facts(name, entry, None, [])
    kind = f"gguf {number_format.upper()}" if number_format is not None else "gguf"
    notes = [*facts.notes, f"a GGUF build by its name: {kind}"]
    if facts.vision is not None:
        notes.append("the vision tower of a GGUF build is a file of its own (mmproj)")
    return msgspec.structs.replace(
        facts,
        vision=None,
        processor=None,
        auto_map=False,
        config=_without_quantization(facts.config),
        quantization=Quantization(method="gguf", label=f"{kind}{BY_NAME}"),
        notes=tuple(notes),
    )


def _scheme(stored: list[str], owner: str | None) -> _Scheme | None:
    makers = None if owner is None else owner.lower()
    for scheme in _names().scheme:
        if all(part in stored for part in scheme.parts) and (
            not scheme.makers or makers in {maker.lower() for maker in scheme.makers}
        ):
            return scheme
    return None


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """The base model's configuration; a rebuilt checkpoint replaces what the original declares."""
    return {
        key: _without_quantization(value) if key in ("text_config", "llm_config", "language_config") else value
        for key, value in config.items()
        if key not in CONFIG_KEYS
    }
