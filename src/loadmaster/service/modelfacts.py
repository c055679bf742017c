"""What the page tells of a model: its context, and what a picture costs in it."""

from __future__ import annotations

import math
from typing import Any

from loadmaster.core.facts import LoadSheet


def context_tokens(card: dict[str, Any], plan: LoadSheet | None) -> int | None:
    """Tokens of a model's context: as the engine says, else as planned; None: unknown."""
    length = card.get("max_model_len")
    if isinstance(length, int):
        return length
    return plan.kv_cache.max_model_len if plan is not None and plan.kv_cache is not None else None


def tokens_of_picture(plan: LoadSheet | None, width: int, height: int) -> int | None:
    """Tokens of a picture of this size as it goes to the engine, computed; None: the plan does not say."""
    images = plan.images if plan is not None else None
    if images is None:
        return None
    if images.tokens_per_pixel is None:
        return images.largest_tokens  # every picture becomes as many
    return math.ceil(width * height * images.tokens_per_pixel)
