"""Keys, tokens and passwords in what is shown: known by the names of variables and flags, and in addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "(hidden)"

# "tokens" is left out: flags of that name count them
_NAME = re.compile(
    r"(?:^|[_-])(?:api[_-]?keys?|keys?|token|secrets?|passwd|password|credentials?|auth)(?:$|[_-])", re.IGNORECASE
)
_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]*(?=@)|(?<=://)[^/\s:@]+(?=@)")
_BEARER = re.compile(r"\b(?:Bearer\s+\S+|hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,})")


def is_secret_name(name: str) -> bool:
    """Whether a variable or flag of this name holds a secret, as far as names tell."""
    return _NAME.search(name.lstrip("-")) is not None


def hide_in_text(text: str) -> str:
    """``text`` with the user information of addresses and the well-known shapes of tokens taken out."""
    return _BEARER.sub(HIDDEN, _ADDRESS.sub(HIDDEN, text))


def hide_in_words(words: Sequence[str]) -> list[str]:
    """A command line: the values of secret flags taken out, in both spellings (``--flag value``, ``--flag=value``)."""
    shown: list[str] = []
    secret = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if word.startswith("-"):
            secret = is_secret_name(flag) and not equals
            shown.append(f"{flag}={HIDDEN}" if equals and is_secret_name(flag) else hide_in_text(word))
        else:
            shown.append(HIDDEN if secret else hide_in_text(word))  # such a flag may have several values
    return shown


def hide_in_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: HIDDEN if is_secret_name(name) and value else hide_in_text(value) for name, value in environment.items()
    }
