"""Raw configuration files of a model directory → :class:`TextConfig`, :class:`VisionConfig`, :class:`Processor`.

Reads the spellings of transformers' configuration classes, flat files and nested ones (``text_config``,
``vision_config``), and fills in what a class defaults to where a published file leaves a field out. Spellings
and defaults are data: ``core/data/config-defaults.toml``.

Nothing here raises on a hostile file. A value of the wrong type, out of bounds or not a number gives ``None``
for its field, and :func:`config_findings` names it with the code ``config-invalid``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from loadmaster.core.facts import Evidence, Finding, Processor, TextConfig, VisionConfig
from loadmaster.core.quantization import quantization
from loadmaster.core.rawobject import RawObject, number, shown
from loadmaster.core.tables import load_toml

__all__ = ["config_findings", "processor", "quantization", "text_config", "vision_config"]

TEXT_KEYS = ("text_config", "llm_config", "language_config", "language_model_config")
VISION_KEYS = ("vision_config", "visual", "vit_config", "vision_tower_config")
WRAPPER_KEYS = ("thinker_config",)

_DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "float64": "float64",
}


def text_config(config: Mapping[str, Any]) -> TextConfig:
    """The language model's configuration from a raw ``config.json``. Never raises; unknown is ``None``."""
    return _text(config, [])


def vision_config(config: Mapping[str, Any]) -> VisionConfig | None:
    """The vision tower's configuration, or ``None`` when the file describes none. Never raises."""
    return _vision(config, [])


def processor(
    preprocessor: Mapping[str, Any] | None, video: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> Processor | None:
    """Pixel limits of the image and video processor.

    ``preprocessor`` is ``preprocessor_config.json`` or ``processor_config.json`` (then its ``image_processor`` and
    ``video_processor`` are read), ``video`` is ``video_preprocessor_config.json``. What the files leave out comes
    from the processor's class. Without any file it is what the family's published files say, else the class that
    ``model_type`` implies. ``source`` says which it was.
    Returns ``None`` for a model without a vision tower.
    """
    return _processor(preprocessor, video, config, [])


def config_findings(
    config: Mapping[str, Any],
    preprocessor: Mapping[str, Any] | None = None,
    video: Mapping[str, Any] | None = None,
    more: Iterable[str] = (),
) -> tuple[Finding, ...]:
    """One finding ``config-invalid`` per file that holds values which cannot be used, each value in the evidence.

    ``more``: problems of ``config.json`` that others found in it.
    """
    problems: list[str] = []
    _text(config, problems)
    _vision(config, problems)
    problems += more
    findings = [_invalid("config.json", problems)] if problems else []
    problems = []
    _processor(preprocessor, video, config, problems)
    if problems:
        findings.append(_invalid("preprocessor_config.json", problems))
    return tuple(findings)


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object of ``config.json`` that describes the language model; the whole of it for a flat file."""
    return _section(config, TEXT_KEYS) or config


def vision_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object of ``config.json`` that describes the vision tower."""
    return _section(config, VISION_KEYS)


def _invalid(path: str, problems: list[str]) -> Finding:
    shown = problems[:20]
    evidence = tuple(Evidence(source="file", path=path, text=text) for text in shown)
    more = f" and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
    plural = "values" if len(problems) > 1 else "value"
    return Finding(
        code="config-invalid",
        severity="error",
        title=f"{path} holds {len(problems)} {plural} that cannot be used{more}",
        cause="A value has the wrong type, is out of bounds or not a number; its field is treated as unknown",
        evidence=evidence,
    )


def _section(config: Mapping[str, Any], keys: tuple[str, ...]) -> Mapping[str, Any] | None:
    for outer in (config, *(config.get(key) for key in WRAPPER_KEYS)):
        if not isinstance(outer, dict):
            continue
        for key in keys:
            inner = outer.get(key)
            if isinstance(inner, dict) and inner:
                return inner
    return None


def _defaults(kind: str, *model_types: Any) -> Mapping[str, Any]:
    table = load_toml("config-defaults.toml")[kind]
    for name in model_types:
        if isinstance(name, str):
            entry = table["defaults"].get(table["same_as"].get(name, name))
            if entry is not None:
                return dict(entry)
    return {}


# ------------------------------------------------------------------------------------------------ language model


def _text(config: Mapping[str, Any], problems: list[str]) -> TextConfig:
    table = load_toml("config-defaults.toml")["text"]
    nested = _section(config, TEXT_KEYS)
    raw = nested or config
    where = "text_config." if nested else ""
    defaults = _defaults("text", raw.get("model_type"), config.get("model_type"))
    read = RawObject(raw, defaults, problems, where)
    top = RawObject(config, {}, problems, "")
    zero = table["zero_allowed"]["fields"]
    values: dict[str, Any] = {
        field: read.integer(field, names, low=0 if field in zero else 1)
        for field, names in table["spellings"].items()
        if field != "source"
    }
    values["model_type"] = read.text("model_type") or top.text("model_type")
    values["dtype"] = _dtype(config, raw, problems)
    values["tie_word_embeddings"] = _tied(config, raw, defaults, problems)
    values["attn_output_gate"] = read.flag("attn_output_gate") or False
    values["mamba_ssm_dtype"] = read.take(("mamba_ssm_dtype",), _dtype_name, None)

    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    if values["num_key_value_heads"] is None and not _invalid_field(raw, table, "num_key_value_heads"):
        null = any(name in raw for name in table["spellings"]["num_key_value_heads"])
        if defaults or not null:  # every class without a number of its own has one per query head
            values["num_key_value_heads"] = heads
        if raw.get("multi_query") is True and raw.get("new_decoder_architecture") is not True:
            values["num_key_value_heads"] = 1  # Falcon and GPT-BigCode
    if values["head_dim"] is None and heads and hidden and not _invalid_field(raw, table, "head_dim"):
        values["head_dim"] = hidden // heads

    _experts(values, raw, defaults, problems, where)
    rope = _rope(raw)
    values["rope_scaling"] = rope
    values["rope_theta"] = _theta(read, rope)
    values["uses_mrope"] = bool(rope and "mrope_section" in rope)
    values["rotary_dim"] = _rotary_dim(values, read, rope)
    values["layer_types"], values["sliding_window"] = _layer_types(values, read, raw, problems, where)
    return TextConfig(**values)


def _invalid_field(raw: Mapping[str, Any], table: Mapping[str, Any], field: str) -> bool:
    """The file does state the field, so a missing value means that it could not be used."""
    return any(raw.get(name) is not None for name in table["spellings"][field])


def _dtype_name(value: Any) -> str | None:
    return _DTYPES.get(value.removeprefix("torch.").lower()) if isinstance(value, str) else None


def _dtype(config: Mapping[str, Any], raw: Mapping[str, Any], problems: list[str]) -> str | None:
    for owner in (config, raw):
        for name in ("dtype", "torch_dtype"):
            value = owner.get(name)
            if value is None or value == "auto":
                continue
            result = _dtype_name(value)
            if result is None:
                problems.append(f"{name} = {shown(value)}")
            return result
    return None


def _tied(
    config: Mapping[str, Any], raw: Mapping[str, Any], defaults: Mapping[str, Any], problems: list[str]
) -> bool | None:
    for owner in (raw, config, defaults):
        value = owner.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
        if value is not None:
            problems.append(f"tie_word_embeddings = {shown(value)}")
            return None
    return None


def _experts(
    values: dict[str, Any], raw: Mapping[str, Any], defaults: Mapping[str, Any], problems: list[str], where: str
) -> None:
    """Widths that some classes state indirectly: Mixtral's experts, DeepSeek's shared ones."""
    for field in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if values[field] == 0:
            values[field] = None  # how dense builds of a mixed class say that there are none
    if not values["num_experts"]:
        return
    source = defaults.get("expert_width_from")
    if values["moe_intermediate_size"] is None and isinstance(source, str):
        values["moe_intermediate_size"] = values.get(source)
    source = defaults.get("shared_expert_width_from")
    if values["shared_expert_intermediate_size"] is None and isinstance(source, str):
        values["shared_expert_intermediate_size"] = values.get(source)
    shared = RawObject(raw, defaults, problems, where).integer("n_shared_experts", low=0)
    if values["shared_expert_intermediate_size"] is None and shared and values["moe_intermediate_size"]:
        values["shared_expert_intermediate_size"] = shared * values["moe_intermediate_size"]


def _rope(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rope settings; where each layer kind has its own (Gemma 3 in transformers 5), those of full attention."""
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if isinstance(value, dict) and value:
            full = value.get("full_attention")
            return dict(full) if isinstance(full, dict) else dict(value)
    return None


def _theta(read: RawObject, rope: Mapping[str, Any] | None) -> float | None:
    inner = rope.get("rope_theta") if rope else None
    if inner is not None:
        return RawObject(rope or {}, {}, read.problems, "rope_parameters.").number("rope_theta")
    return read.number("rope_theta")


def _rotary_dim(values: Mapping[str, Any], read: RawObject, rope: Mapping[str, Any] | None) -> int | None:
    if values["qk_rope_head_dim"]:
        return int(values["qk_rope_head_dim"])
    if not values["head_dim"]:
        return None
    inner = rope.get("partial_rotary_factor") if rope else None
    factor = number(inner) if inner is not None else read.number("partial_rotary_factor")
    if factor is None:
        stated = inner is not None or read.raw.get("partial_rotary_factor") is not None
        return None if stated else int(values["head_dim"])
    return int(values["head_dim"] * min(factor, 1.0))


# Nemotron-H names a layer by one letter (vllm/model_executor/models/nemotron_h.py: ALL_DECODER_LAYER_TYPES).
_LAYER_LETTERS = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}


def _layer_types(
    values: Mapping[str, Any], read: RawObject, raw: Mapping[str, Any], problems: list[str], where: str
) -> tuple[tuple[str, ...], int | None]:
    """One kind per decoder layer, and the window that is in force. ``()`` when the number of layers is unknown."""
    layers, window = values["num_hidden_layers"], values["sliding_window"]
    stated = raw.get("layer_types")
    if stated is not None:
        if isinstance(stated, list) and all(isinstance(kind, str) for kind in stated) and len(stated) <= 4096:
            return tuple(stated), window if "sliding_attention" in stated else None
        problems.append(f"{where}layer_types = {shown(stated)}")
        return (), None
    letters = raw.get("hybrid_override_pattern")
    if letters is not None:
        if isinstance(letters, str) and len(letters) <= 4096 and set(letters) <= set(_LAYER_LETTERS):
            return tuple(_LAYER_LETTERS[letter] for letter in letters), None
        problems.append(f"{where}hybrid_override_pattern = {shown(letters)}")
        return (), None
    if not layers:
        return (), None
    pattern = read.defaults.get("layer_pattern")
    interval = read.integer("full_attention_interval")
    if interval and (pattern == "full-interval" or "full_attention_interval" in raw):
        kinds = ("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))
        return tuple(kinds), None
    full = ("full_attention",) * layers
    if not window:
        return full, None
    period = read.integer("sliding_window_pattern")
    if period and (pattern == "sliding-interval" or "sliding_window_pattern" in raw):
        kinds = ("full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers))
        return tuple(kinds), window
    if pattern == "max-window-layers":
        first = read.integer("max_window_layers", low=0)
        if raw.get("use_sliding_window") is not True or first is None or first >= layers:
            return full, None
        return ("full_attention",) * first + ("sliding_attention",) * (layers - first), window
    # vLLM's attention layers take the configuration's window unless their class has a pattern of its own
    return (full, None) if raw.get("use_sliding_window") is False else (("sliding_attention",) * layers, window)


# --------------------------------------------------------------------------------------------------- vision tower


def _vision(config: Mapping[str, Any], problems: list[str]) -> VisionConfig | None:
    raw = _section(config, VISION_KEYS)
    if raw is None:
        return None
    table = load_toml("config-defaults.toml")
    names = table["vision"]
    model_type = config.get("model_type")
    kind = raw.get("model_type") if isinstance(raw.get("model_type"), str) else model_type
    kind = kind if isinstance(kind, str) else None
    defaults = _defaults("vision", kind, model_type)
    read = RawObject(raw, defaults, problems, "vision_config.")
    own = names["spellings_of"].get(names["same_as"].get(kind, kind), {})
    values: dict[str, Any] = {
        field: read.integer(field, own.get(field, spellings))
        for field, spellings in names["spellings"].items()
        if field != "source"
    }
    values["deepstack_layers"] = read.integers("deepstack_visual_indexes")
    values["fullatt_block_indexes"] = read.integers("fullatt_block_indexes")
    if values["intermediate_size"] is None and values["hidden_size"]:
        ratio = read.number("mlp_ratio")
        values["intermediate_size"] = int(values["hidden_size"] * ratio) if ratio and ratio < 1024 else None
    fixed = table["tokens_per_image"].get(model_type) if isinstance(model_type, str) else None
    if fixed is not None:
        top = RawObject(config, {fixed["field"]: fixed["default"]}, problems, "")
        values["tokens_per_image"] = top.integer(fixed["field"])
    return VisionConfig(model_type=kind, **values)


# ------------------------------------------------------------------------------------------------------ processor


def _processor(
    preprocessor: Mapping[str, Any] | None,
    video: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    problems: list[str],
) -> Processor | None:
    if preprocessor is None and _section(config, VISION_KEYS) is None:
        return None
    table = load_toml("config-defaults.toml")
    model_type = config.get("model_type")
    implied = table["processor_of"].get(model_type, []) if isinstance(model_type, str) else []
    source = "preprocessor_config.json" if preprocessor is not None else None
    image: Mapping[str, Any] = preprocessor or {}
    if isinstance(image.get("image_processor"), dict):
        source = "processor_config.json"
        nested_video = image.get("video_processor")
        video = video if video is not None else nested_video if isinstance(nested_video, dict) else None
        image = image["image_processor"]
    stated = image.get("image_processor_type") or image.get("feature_extractor_type")
    name = stated if isinstance(stated, str) else implied[0] if implied else None
    entry = table["processor"].get(_class_name(name), {}) if name else {}
    if preprocessor is None and isinstance(model_type, str) and model_type in table["published_processor"]:
        published = table["published_processor"][model_type]
        source, image = "published with this model_type", {key: published[key] for key in ("min_pixels", "max_pixels")}
        entry = {**entry, **published}
    low, high = _areas(image, problems, f"{source or 'preprocessor'}: ")
    if high is None and low is None and not entry and not video:
        return Processor(image_processor_type=name, source=source) if source else None
    if low is None:
        low = entry.get("min_pixels")
    if high is None:
        high, source = entry.get("max_pixels"), "class default"
    video_name = (video or {}).get("video_processor_type")
    if not isinstance(video_name, str):
        video_name = implied[1] if len(implied) > 1 else None
    video_high = _areas(video or {}, problems, "video_preprocessor_config.json: ")[1]
    if video_high is None:
        video_high = entry.get("video_max_pixels")
    if video_high is None and video_name:
        video_high = table["processor"].get(_class_name(video_name), {}).get("video_max_pixels")
    return Processor(
        image_processor_type=name, min_pixels=low, max_pixels=high, video_max_pixels=video_high, source=source
    )


def _class_name(name: str) -> str:
    """A processor class without the suffix of its implementation."""
    return name.removesuffix("Fast").removesuffix("Pil")


def _areas(raw: Mapping[str, Any], problems: list[str], where: str) -> tuple[int | None, int | None]:
    """Smallest and largest area in pixels. ``min_pixels`` and ``max_pixels`` win over ``size``, as in transformers."""
    read = RawObject(raw, {}, problems, where)
    low, high = read.integer("min_pixels"), read.integer("max_pixels")
    size = raw.get("size")
    if not isinstance(size, dict):
        return low, high
    inner = RawObject(size, {}, problems, where + "size.")
    height, width = inner.integer("height"), inner.integer("width")
    if height and width:
        return low or height * width, high or height * width
    shortest, longest = inner.integer("shortest_edge"), inner.integer("longest_edge")
    if raw.get("image_processor_type") and not _edges_are_areas(raw):
        return low, high
    return low or shortest, high or longest


def _edges_are_areas(raw: Mapping[str, Any]) -> bool:
    """Whether this class keeps areas under ``size.shortest_edge`` and ``size.longest_edge``; most keep lengths."""
    name = raw.get("image_processor_type") or raw.get("video_processor_type")
    entry = load_toml("config-defaults.toml")["processor"].get(_class_name(name)) if isinstance(name, str) else None
    return bool(entry and entry["areas"])
