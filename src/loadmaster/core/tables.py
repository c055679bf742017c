"""The package's own data files, read once.

The one place in ``core`` that reads anything: package data is part of the program, so the same
version of loadmaster always returns the same tables.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

import msgspec


def _read(name: str) -> bytes:
    return resources.files("loadmaster.core.data").joinpath(name).read_bytes()


@cache
def load_toml(name: str) -> dict[str, Any]:
    """The TOML table ``core/data/NAME``. Callers must not change what they get."""
    return tomllib.loads(_read(name).decode("utf-8"))


@cache
def load_json(name: str) -> dict[str, Any]:
    """The JSON table ``core/data/NAME``. Callers must not change what they get."""
    table: dict[str, Any] = msgspec.json.decode(_read(name))
    return table
