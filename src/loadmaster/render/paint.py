"""Colour that can be switched off: every text is complete without it."""

from __future__ import annotations

from collections.abc import Callable

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}

Paint = Callable[..., str]


def plain(text: str, *styles: str) -> str:
    """The text as it is."""
    return text


def ansi(text: str, *styles: str) -> str:
    """The text in ANSI styles; unknown styles are a programming error (KeyError)."""
    if not styles or not text:
        return text
    return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"
