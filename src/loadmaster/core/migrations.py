"""A configuration of an older schema → the current one: numbered steps, each a pure function.

``MIGRATIONS[n]`` turns what schema ``n`` wrote into what schema ``n + 1`` reads. Schema 1 is the first that was
released, so there is no step yet; a file without a number counts as schema 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loadmaster.core.deployment import SCHEMA

Migration = Callable[[dict[str, Any]], dict[str, Any]]

MIGRATIONS: dict[int, Migration] = {}
FIRST = 1


class SchemaError(Exception):
    """The file's schema cannot be read by this release; the message says why, ``hint`` what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def schema_of(raw: Mapping[str, Any]) -> int:
    """Raises :class:`SchemaError` when the file's own statement is no number."""
    schema = raw.get("schema", FIRST)
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 0:
        raise SchemaError("schema: expected a whole number, 0 or more")
    return schema


def migrate(
    raw: Mapping[str, Any], migrations: Mapping[int, Migration] | None = None, newest: int = SCHEMA
) -> dict[str, Any]:
    """``raw`` in schema ``newest``; it is not changed itself. Raises :class:`SchemaError`."""
    steps = MIGRATIONS if migrations is None else migrations
    schema = schema_of(raw)
    if schema > newest:
        raise SchemaError(f"schema: the file has {schema}, this release reads up to {newest}", "update loadmaster")
    result = dict(raw)
    for number in range(schema, newest):
        if number not in steps:
            raise SchemaError(f"schema: the file has {schema}, this release reads from {number + 1} on")
        result = {**steps[number](result), "schema": number + 1}
    return result
