"""Sentences broken into lines."""

from __future__ import annotations

import re
import textwrap

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def wrap(text: str, width: int, first: str, rest: str | None = None) -> list[str]:
    """Lines of at most ``width`` that begin with ``first``, then with ``rest`` (``first`` if None).

    Colour codes in ``first`` take no room. Long words (paths, JSON) are left whole.
    """
    rest = first if rest is None else rest
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        indent = first if not lines else rest
        visible = len(_COLOUR.sub("", indent))
        wrapped = textwrap.wrap(
            paragraph,
            max(width, visible + 20),
            initial_indent=" " * visible,
            subsequent_indent=" " * len(rest),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
        lines.append(indent + wrapped[0][visible:])
        lines += [rest + line[len(rest) :] for line in wrapped[1:]]
    return lines
