"""The JSON objects of ``--json``. One object a command, ``"schema": 1``, sizes in bytes, unknown is null."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from loadmaster.core.facts import Finding, LaunchArgs, LoadSheet, ModelFacts

SCHEMA = 1
_HIDDEN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def encode(document: Any) -> str:
    """Indented JSON with a line end. Characters that a terminal obeys or hides are escaped, as JSON may."""
    text = msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def error_document(message: str, hint: str | None) -> dict[str, Any]:
    """What stands in a result's place when there is none."""
    return {"schema": SCHEMA, "error": {"message": message, "hint": hint}}


def plan_document(sheet: LoadSheet) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(sheet)
    return {"schema": SCHEMA, **built}


def inspect_document(model: ModelFacts) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "ok": not any(finding.severity == "error" for finding in model.findings),
        "model": model_document(model),
        "findings": msgspec.to_builtins(model.findings),
    }


def model_document(model: ModelFacts) -> dict[str, Any]:
    quantization = {
        name: value for name, value in msgspec.to_builtins(model.quantization).items() if name != "declared"
    }
    return {
        "name": model.name,
        "path": model.path,
        "format": model.format,
        "architecture": model.architecture,
        "model_type": model.model_type,
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes,
        "parts": msgspec.to_builtins(model.parts),
        "quantization": quantization,
        "quantization_by_class": msgspec.to_builtins(model.quantization_by_class),
        "text": msgspec.to_builtins(model.text),
        "vision": msgspec.to_builtins(model.vision),
        "processor": msgspec.to_builtins(model.processor),
        "has_chat_template": model.has_chat_template,
        "auto_map": model.auto_map,
        "files": msgspec.to_builtins(model.files),
    }


def check_document(
    launch: LaunchArgs, findings: Sequence[Finding], ok: bool | None, not_checked: Sequence[str]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "ok": ok,
        "launch": {
            "model": launch.model,
            "flags": launch.flags,
            "env": launch.env,
            "unknown_flags": list(launch.unknown_flags),
            "argv": list(launch.argv),
        },
        "not_checked": list(not_checked),
        "findings": msgspec.to_builtins(tuple(findings)),
    }
