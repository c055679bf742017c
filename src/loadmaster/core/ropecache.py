"""Tables of cosines and sines that every rank keeps whole.

Source: vLLM model_executor/layers/rotary_embedding. One table for each distinct set of parameters, shared by
the layers: rows x rotary dimension x element size. It depends on the model's positions, not on --max-model-len.
"""

from __future__ import annotations

from typing import Any

from loadmaster.core.architectures import Family
from loadmaster.core.engineversion import at_least
from loadmaster.core.facts import Settings, TextConfig


def rope_cache_bytes(text: TextConfig, family: Family, settings: Settings, element_bytes: int) -> int | None:
    """Bytes of all rope tables of a rank; None when the configuration does not say enough."""
    positions = text.max_position_embeddings
    width = text.qk_rope_head_dim if text.kv_lora_rank else text.rotary_dim or text.head_dim
    if positions is None or width is None:
        return None
    scaling = text.rope_scaling or {}
    nested = [value for value in scaling.values() if isinstance(value, dict)]
    if nested:  # one set of parameters for each kind of layer
        tables = [_rows(positions, parameters) for parameters in nested]
    elif family.get("local_rope"):  # the local layers have an unscaled table of their own
        tables = [_rows(positions, scaling), positions]
    else:
        tables = [_rows(positions, scaling)]
    factor = _mrope_factor(family, settings) if text.uses_mrope else 1
    if family.get("rope_float32"):
        element_bytes = 4
    return sum(rows * factor * width * element_bytes for rows in tables)


def _rows(positions: int, parameters: dict[str, Any]) -> int:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    factor = parameters.get("factor")
    original = parameters.get("original_max_position_embeddings")
    if kind == "linear" and factor:
        return int(positions * factor)
    if kind in ("yarn", "deepseek_yarn") and factor:
        return int((original or positions) * factor)
    if kind == "longrope" and original:
        return int(positions + original)
    if kind == "dynamic" and factor:
        return int(positions * factor)
    return positions


def _mrope_factor(family: Family, settings: Settings) -> int:
    if not family.exact:
        return 4  # get_rope's default
    factor = 1
    for since, value in family.get("mrope_factor", ()):
        if at_least(settings.version, since):
            factor = int(value)
    # Pruning video tokens keeps the positions of those it drops.
    return 4 if settings.video_pruning else factor
