"""Sentences broken into lines."""

from __future__ import annotations

import textwrap


def wrap(text: str, width: int, first: str, rest: str | None = None) -> list[str]:
    """Wrapped text; long words (paths, JSON) are left whole."""
    indent = first if rest is None else rest
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        # the first indent may carry colour codes, so its visible width is that of the following lines
        wrapped = textwrap.wrap(
            paragraph, max(width - len(indent), 20), break_long_words=False, break_on_hyphens=False
        ) or [""]
        for line in wrapped:
            lines.append((first if not lines else indent) + line)
    return lines
