"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")(command)


def engine_version_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--engine-version", metavar="V", help="vLLM release, such as 0.24.0; the newest rules if left out."
    )(command)
