"""Cleans a pasted text before it is read: prompts, fences, typographic quotes and dashes, blanks of other scripts.

What a shell would have stumbled over is put right and reported as damage with its line number; what never was part of
the command (a prompt, a code fence) is taken off without a word.
"""

from __future__ import annotations

import re

from loadmaster.core.commands.found import MAX_LINE, MAX_LINES, MAX_TEXT, CommandError
from loadmaster.core.facts import Evidence

_MAX_REPORTS = 20
_BLANKS = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_INVISIBLE = re.compile("[\u200b-\u200f\u2028-\u202e\u2060-\u2064\ufeff\u00ad]")
_DOUBLE = "\u201c\u201d\u201e\u201f\u2033\uff02\u00ab\u00bb"
_SINGLE = "\u2018\u2019\u201a\u201b\u2032\uff07"
_QUOTE = re.compile(f"(?<![^\\W\\d_])[{_DOUBLE}{_SINGLE}]|[{_DOUBLE}{_SINGLE}](?![^\\W\\d_])|[{_DOUBLE}]")
_DASHES = "\u2010-\u2015\u2212\ufe58\ufe63\uff0d"
_DASH_FLAG = re.compile(f"(?<!\\S)(-?[{_DASHES}][-{_DASHES}]*)(?=[A-Za-z])")
_FLAG_DASH = re.compile(f"(?<!\\S)--?[\\w.-]*[{_DASHES}][\\w.{_DASHES}-]*")
_SHORT = re.compile(r"(?:tp|pp|dp|dcp|pcp|q|cc|ac|sc|asc|dp[a-z]|O\d?)(?=[\s=.]|$)")
_FENCE = re.compile(r"\s*(?:```|~~~)[\w+. -]{0,40}\s*")
_MAGIC = re.compile(r"\s*%%(?:bash|sh|script\b.*|capture.*)\s*")

_ENVIRONMENT = r"(?:\([\w .:@/+\\-]{1,60}\)\s*)"
_PROMPTS = tuple(
    re.compile(pattern)
    for pattern in (
        # (venv) root@host:/app# , user@host ~ % , [root@host ~]$ , bash-5.1# , host:/dir#
        rf"\s*{_ENVIRONMENT}*(?:[\w.-]+@[\w.-]+[: ]?[^\s#$%>]*|\[[^\]\n]{{1,80}}\]|(?:bash|sh|zsh)-[\d.]+"
        r"|[\w.-]+:[~/][^\s#$%]*)\s?[#$%]\s+",
        rf"\s*{_ENVIRONMENT}+[#$%❯➜>]\s+",
        rf"\s*{_ENVIRONMENT}*[$%❯»]\s+(?=\S)",
        rf"\s*{_ENVIRONMENT}*➜\s+\S+\s+(?:git:\(\S+\)\s*)?(?:✗\s*)?",
        rf"\s*{_ENVIRONMENT}*[\w.-]+@[\w.-]+ [~/]\S*>\s+",
        rf"\s*{_ENVIRONMENT}*PS [^>\n]{{1,120}}>\s?",
        rf"\s*{_ENVIRONMENT}*[A-Za-z]:\\[^>\n\"]{{0,120}}>\s?",
        r"\s*In \[\d*\]:\s*!?",
        r"\s*!\s*(?=\w)",
        r"\++ (?=\S)",
        r"\s*\((?:base|venv|\.venv|vllm|env|conda|[\w.-]*(?:env|vllm)[\w.-]*)\)\s+(?=[\w./])",
    )
)
_REDIRECTION = re.compile(r">>?\s*\S+\.(?:log|txt|out|err)\b|>>?\s*/dev/null|>>?\s*[\"']?[$/.~]\S*\s*(?:2>|&|$)")


def check_size(text: str) -> None:
    """Raises :class:`CommandError` for a text that no launch command is."""
    if "\0" in text:
        raise CommandError("the text holds NUL bytes, so it is no command", "give the command as plain text")
    if len(text) > MAX_TEXT:
        raise CommandError(f"the text has {len(text):,} characters, more than {MAX_TEXT:,}", "give the command alone")
    if text.count("\n") > MAX_LINES:
        raise CommandError(f"the text has more than {MAX_LINES:,} lines", "give the command alone")
    if any(len(line) > MAX_LINE for line in text.split("\n")):
        raise CommandError(f"a line has more than {MAX_LINE:,} characters", "give the command alone")


def clean(text: str) -> tuple[str, list[Evidence]]:
    """The text with typographic damage put right, and the damage. Line numbers stay."""
    check_size(text)
    text = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    if text.isascii():
        return text, []
    damage: list[Evidence] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.isascii() or (line.lstrip().startswith("#") and not line.rstrip().endswith("\\")):
            lines[number - 1] = _BLANKS.sub(" ", _INVISIBLE.sub("", line))
            continue
        repaired, words = _repair(line)
        lines[number - 1] = repaired
        for word in words:
            if len(damage) < _MAX_REPORTS:
                damage.append(Evidence("command", word, number))
    return "\n".join(lines), damage


def _repair(line: str) -> tuple[str, list[str]]:
    words: list[str] = []
    repaired = _INVISIBLE.sub("", line)
    if repaired != line:
        words.append("invisible characters, which a shell would take for part of a word")
    plain = _BLANKS.sub(" ", repaired)
    if plain != repaired:
        words.append("blanks that are no ASCII spaces (a no-break space), which a shell does not split at")
    dashed = _FLAG_DASH.sub(lambda m: re.sub(f"[{_DASHES}]", "-", m.group()), _DASH_FLAG.sub(_dashes(plain), plain))
    if dashed != plain:
        words.append("a typographic dash in place of the hyphens of a flag")
    quoted = _QUOTE.sub(lambda m: '"' if m.group() in _DOUBLE else "'", dashed)
    if quoted != dashed:
        words.append("typographic quotes, which a shell does not take for quotes")
    return quoted, words


def _dashes(line: str) -> _Dashes:
    return _Dashes(line)


class _Dashes:
    """``–max-model-len`` -> ``--max-model-len``, ``–tp`` -> ``-tp``."""

    def __init__(self, line: str) -> None:
        self.line = line

    def __call__(self, match: re.Match[str]) -> str:
        return "-" if _SHORT.match(self.line, match.end()) else "--"


def without_prompts(text: str, continuation: str = "\\") -> str:
    """The text with prompts, continuation prompts, code fences and quoting ``>`` taken off; line numbers stay."""
    lines = text.split("\n")
    filled = [line for line in lines if line.strip()]
    if len(filled) > 1 and all(line.lstrip().startswith("> ") or line.strip() == ">" for line in filled):
        lines = [line.lstrip()[1:].removeprefix(" ") for line in lines]
    lines = [" " if _FENCE.fullmatch(line) or _MAGIC.fullmatch(line) else line for line in lines]
    index = 0
    while index < len(lines):
        lines[index] = _without_prompt(lines[index])
        last = index
        while last + 1 < len(lines) and lines[last].rstrip().endswith(continuation):
            last += 1
        _strip_continuation(lines, index + 1, last + 1)
        index = last + 1
    return "\n".join(lines)


def _without_prompt(line: str) -> str:
    for prompt in _PROMPTS:
        found = prompt.match(line)
        if found:
            return line[found.end() :]
    return line


def _strip_continuation(lines: list[str], start: int, stop: int) -> None:
    """Takes ``> `` off the lines of one continued command if all of them begin so."""
    block = [line for line in lines[start:stop] if line.strip()]
    if not block or not all(line.lstrip().startswith(">") for line in block):
        return
    if len(block) == 1 and _REDIRECTION.match(block[0].lstrip()):
        return
    for index in range(start, stop):
        lines[index] = re.sub(r"^\s*>{1,2} ?", "", lines[index])
