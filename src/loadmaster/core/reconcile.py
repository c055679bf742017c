"""Plan against actual, component by component."""

from __future__ import annotations

from msgspec import Struct


class Reconciliation(Struct, frozen=True, kw_only=True):
    """Plan against actual of one run at one point: "ready" or "serving"."""

    point: str
