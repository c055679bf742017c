"""vLLM's own YAML configuration (``--config FILE``), parsed -> the launch that it means."""

from __future__ import annotations

from typing import Any

from loadmaster.core.commands.found import Found
from loadmaster.core.flagtable import flag_table


def is_settings(document: Any) -> bool:
    """Whether the mapping's keys are flags of vLLM, at least for the greater part."""
    if not isinstance(document, dict) or not document:
        return False
    options = flag_table(None).options
    known = sum("--" + str(key).strip().lstrip("-").replace("_", "-") in options for key in document)
    return known * 2 > len(document) or (known >= 1 and "model" in document)


def read_settings(document: dict[Any, Any]) -> Found:
    """``document`` with the types that YAML gives: text, numbers, truth values, lists, mappings."""
    return Found(kind="yaml", settings={str(key): value for key, value in document.items()})
