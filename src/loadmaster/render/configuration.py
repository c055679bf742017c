"""Configurations for people and for scripts: each value with its origin, deployments side by side."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from loadmaster.core.deployment import Deployment
from loadmaster.core.deploymentfile import setting_keys, setting_value
from loadmaster.core.secrets import HIDDEN, hide_in_environment, hide_in_text, hide_in_words
from loadmaster.render.visible import shown, visible


def shown_value(deployment: Deployment, key: str) -> Any:
    """The value of a key without secrets."""
    value = setting_value(deployment, key)
    if key == "alerts.webhook" and value is not None:
        parts = urlsplit(value)
        return f"{parts.scheme}://{parts.hostname}/{HIDDEN}"  # the path of such an address is its key
    if key in ("engine.flags", "engine.command", "alerts.command"):
        return hide_in_words(value)
    if key == "engine.env":
        return hide_in_environment(value)
    return hide_in_text(value) if isinstance(value, str) else value


def config_document(deployment: Deployment, origins: Mapping[str, str], path: str) -> dict[str, Any]:
    values = {key: {"value": shown_value(deployment, key), "origin": origins[key]} for key in setting_keys()}
    return {"schema": 1, "name": deployment.name, "path": path, "values": values}


def config_text(deployment: Deployment, origins: Mapping[str, str], path: str, width: int) -> str:
    """The file's path, then one line a value: key, value, origin (a line is one of that file)."""
    rows = [
        (key, visible(_words(shown_value(deployment, key))), visible(_short(origins[key]))) for key in setting_keys()
    ]
    left = max(len(key) for key, _, _ in rows) + 2
    right = max(len(origin) for _, _, origin in rows)
    middle = max(width - left - right - 2, 20)
    lines = [visible(path), ""]
    for key, value, origin in rows:
        # texts that cannot be broken reach below the origin's column rather than into the next line
        first, *others = textwrap.wrap(value, middle, break_long_words=False, break_on_hyphens=False) or [""]
        if len(first) > middle:
            first, others = "", textwrap.wrap(value, width - left, break_long_words=False, break_on_hyphens=False)
        lines.append(f"{key:{left}}{first:{middle}}  {origin}")
        lines += [f"{'':{left}}{part}" for part in others]
    return "\n".join(line.rstrip() for line in lines)


def _short(origin: str) -> str:
    return origin.removeprefix("file loadmaster.toml").removeprefix(", ").strip() if origin != "default" else origin


def _words(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        value = [f"{name}={text}" for name, text in value.items()]
    if isinstance(value, list):
        return shlex.join(value).replace("\n", "\\n") if value else "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


class ListedDeployment(Struct, frozen=True, kw_only=True):
    """One line of ``loadmaster list``; ``broken``: why its configuration cannot be read."""

    name: str
    deployment: Deployment | None = None
    broken: str | None = None


def list_text(listed: Sequence[ListedDeployment], collisions: Sequence[str]) -> str:
    """Deployments side by side, those with an unreadable configuration and the colliding ports below."""
    listed, collisions = shown(listed, lines=False), shown(collisions)
    header = ("name", "engine", "model", "gpus", "gateway", "engine port")
    rows = [header]
    for entry in listed:
        if entry.deployment is not None:
            one = entry.deployment
            address = f"{one.gateway.host}:{one.gateway.port}"
            model = hide_in_text(one.model)
            rows.append((entry.name, one.engine.kind, _end(model), one.gpus, address, str(one.engine.port)))
    lines = []
    if len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines += ["  ".join(f"{cell:{size}}" for cell, size in zip(row, widths)).rstrip() for row in rows]
    notes = [f"{entry.name}: {entry.broken}" for entry in listed if entry.broken is not None]
    if notes or collisions:
        lines += [""] * bool(lines) + notes + list(collisions)
    return "\n".join(lines)


def list_document(listed: Sequence[ListedDeployment], collisions: Sequence[str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "deployments": [
            {
                "name": entry.name,
                "model": hide_in_text(entry.deployment.model),
                "engine": entry.deployment.engine.kind,
                "gpus": entry.deployment.gpus,
                "gateway": {"host": entry.deployment.gateway.host, "port": entry.deployment.gateway.port},
                "engine_port": entry.deployment.engine.port,
                "problem": None,
            }
            if entry.deployment is not None
            else {"name": entry.name, "problem": entry.broken}
            for entry in listed
        ],
        "collisions": list(collisions),
    }


def _end(model: str, most: int = 32) -> str:
    """The end of a long path: the model's own name."""
    return model if len(model) <= most else "…" + model[len(model) - most + 1 :]
