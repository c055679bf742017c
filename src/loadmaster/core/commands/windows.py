"""How cmd and PowerShell read a text: carets and backticks, ``%X%`` and ``$env:X``. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from loadmaster.core.commands.found import CUT
from loadmaster.core.commands.parameters import Variables, joined
from loadmaster.core.commands.shell import Simple
from loadmaster.core.facts import Evidence

_CMD_SIGN = re.compile(
    r"\^[ \t]*$|^\s*(?:@?set\s+\"?[A-Za-z_]\w*=|@echo off)|%[A-Za-z_]\w*%", re.MULTILINE | re.IGNORECASE
)
_POWERSHELL_SIGN = re.compile(
    r"\s`[ \t]*$|\$env:\w+|^\s*PS [A-Za-z/][^>\n]*>|^\s*\$\w+\s*=", re.MULTILINE | re.IGNORECASE
)


_DRIVE = re.compile(r"(?:^|[\s=\"'])[A-Za-z]:\\[^\s>]", re.MULTILINE)


def dialect(text: str) -> str:
    """ "posix", "cmd" or "powershell", by what only they write."""
    if _POWERSHELL_SIGN.search(text):
        return "powershell"
    if _CMD_SIGN.search(text):
        return "cmd"
    if _DRIVE.search(text) and not re.search(r"\\[ \t]*$", text, re.MULTILINE):
        return "powershell" if re.search(r"'[^'\n]*\"[^'\n]*'", text) else "cmd"
    return "posix"


class Reading:
    """One reading of one text; ``variables`` and ``damage`` fill up as ``commands`` is walked."""

    def __init__(self, text: str, kind: str) -> None:
        self.text = text
        self.kind = kind
        self.variables = Variables()
        self.damage: list[Evidence] = []

    def commands(self) -> Iterator[Simple]:
        for number, line in self._lines():
            if self.kind == "cmd":
                yield from self._cmd(number, line)
            else:
                yield from self._powershell(number, line)

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Logical lines: those that end in the continuation mark are joined with the next."""
        mark = "^" if self.kind == "cmd" else "`"
        held = ""
        first = 1
        for number, line in enumerate(self.text.split("\n"), 1):
            if not held:
                first = number
            if line.endswith(mark):
                held += line[:-1] + " "
                continue
            if line.rstrip().endswith(mark) and len(self.damage) < 20:
                self.damage.append(
                    Evidence("command", f"a blank after the {mark}: the command ends here, and {CUT}", number)
                )
                line = line.rstrip()[:-1]
            yield first, held + line
            held = ""
        if held:
            yield first, held

    # ------------------------------------------------------------------------------------------ cmd

    def _cmd(self, number: int, line: str) -> Iterator[Simple]:
        for piece in _outside_quotes(line, r"&&|\|\||[&|]"):
            piece = self._percent(piece.strip().lstrip("@").strip("()").strip())
            if not piece or re.match(r"(?:rem\b|::)", piece, re.IGNORECASE):
                continue
            setting = re.match(r"set\s+(?:/[aA]\s+)?(\"?)([A-Za-z_]\w*)=(.*)$", piece, re.IGNORECASE)
            if setting:
                value = setting.group(3).strip()
                self.variables.assign(setting.group(2), value.rstrip('"') if setting.group(1) else value, export=True)
                continue
            words = _without_redirections(c_words(piece))
            if words and words[0].lower() == "call":
                words = words[1:]
            if words:
                yield Simple(number, words)

    def _percent(self, text: str) -> str:
        return _filled(_PERCENT, text, self._values())

    def _values(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.variables.values.items()}

    # ------------------------------------------------------------------------------------------ PowerShell

    def _powershell(self, number: int, line: str) -> Iterator[Simple]:
        if line.lstrip().startswith("#"):
            return
        for piece in _outside_quotes(line, r"&&|\|\||[;|]"):
            piece = piece.strip()
            setting = re.match(r"\$(env:)?([A-Za-z_]\w*)\s*=\s*(.*)$", piece, re.IGNORECASE | re.DOTALL)
            if setting:
                self._assign(setting.group(2), setting.group(3).strip(), export=bool(setting.group(1)))
                continue
            words = _without_redirections(self._powershell_words(piece))
            if words and words[0] in ("&", "."):
                words = words[1:]
            if words:
                yield Simple(number, words)

    def _assign(self, name: str, text: str, export: bool) -> None:
        if text.startswith("@(") and text.endswith(")"):
            words = self._powershell_words(re.sub(r",(?=\s|[\"'@$])", " ", text[2:-1]))
            self.variables.arrays[name] = words
            return
        words = self._powershell_words(text)
        self.variables.assign(name, " ".join(words), export)

    def _powershell_words(self, text: str) -> list[str]:
        words: list[str] = []
        current: list[str] = []
        begun = False
        at = 0
        while at < len(text):
            character = text[at]
            if character in " \t\n":
                if begun:
                    words.append("".join(current))
                current, begun = [], False
                at += 1
                continue
            if character == "#" and not begun:
                break
            if character == "@" and not begun and (splat := re.match(r"@([A-Za-z_]\w*)(?=\s|$)", text[at : at + 200])):
                words.extend(self.variables.arrays.get(splat.group(1), [splat.group()]))
                at += splat.end()
                continue
            begun = True
            if character == "'":
                end = text.find("'", at + 1)
                while end >= 0 and text[end + 1 : end + 2] == "'":
                    end = text.find("'", end + 2)
                end = len(text) if end < 0 else end
                current.append(text[at + 1 : end].replace("''", "'"))
                at = end + 1
            elif character == '"':
                content, at = _double_quoted(text, at)
                current.append(self._dollars(content))
            elif character == "`" and at + 1 < len(text):
                current.append(text[at + 1])
                at += 2
            elif character == "$":
                match = _POWERSHELL_VARIABLE.match(text, at)
                if match:
                    current.append(self._dollars(match.group()))
                    if len(current[-1]) > len(match.group()):
                        current = [joined(current)]
                    at = match.end()
                else:
                    current.append("$")
                    at += 1
            else:
                current.append(character)
                at += 1
        if begun:
            words.append("".join(current))
        # the C runtime of the program that is started takes \" for a quote
        return [word.replace('\\"', '"') for word in words]

    def _dollars(self, text: str) -> str:
        return _filled(_POWERSHELL_VARIABLE, text, self._values())


def _filled(pattern: re.Pattern[str], text: str, values: dict[str, str]) -> str:
    """``text`` with the variables of ``values`` (lower-case names) filled in; an unknown one stays as written."""

    def pieces() -> Iterator[str]:
        at = 0
        for match in pattern.finditer(text):
            yield text[at : match.start()]
            name = next(group for group in match.groups() if group is not None and not group.lower().startswith("env:"))
            yield values.get(name.lower(), match.group())
            at = match.end()
        yield text[at:]

    return joined(pieces())


_PERCENT = re.compile(r"[%!]([A-Za-z_]\w*)[%!]")
_POWERSHELL_VARIABLE = re.compile(r"\$(?:(env:)?([A-Za-z_]\w*)|\{(?:env:)?([A-Za-z_]\w*)\})", re.IGNORECASE)


def _double_quoted(text: str, at: int) -> tuple[str, int]:
    """(content, where it ends) of PowerShell's double quotes: `` `" `` and ``""`` are quotes inside."""
    out: list[str] = []
    at += 1
    while at < len(text):
        character = text[at]
        if character == "`" and at + 1 < len(text):
            out.append(text[at + 1])
            at += 2
        elif character == "\\" and text[at + 1 : at + 2] == '"' and not re.match(r'\\"(?:\s|$)', text[at : at + 3]):
            out.append('\\"')
            at += 2
        elif character == '"':
            if text[at + 1 : at + 2] != '"':
                return "".join(out), at + 1
            out.append('"')
            at += 2
        else:
            out.append(character)
            at += 1
    return "".join(out), at


def _outside_quotes(line: str, separators: str) -> list[str]:
    """The line cut at separators that stand in no quotes."""
    pattern = re.compile(rf"\"(?:\\.|[^\"\\])*\"?|'[^']*'|({separators})")
    pieces: list[str] = []
    start = 0
    for match in pattern.finditer(line):
        if match.group(1) is not None and not line[: match.start()].rstrip().endswith((">", "2>")):
            pieces.append(line[start : match.start()])
            start = match.end()
    pieces.append(line[start:])
    return pieces


def c_words(text: str) -> list[str]:
    """The words as a Windows program gets them: only ``"`` quotes, ``\\"`` is a quote, ``^`` escapes outside quotes."""
    words: list[str] = []
    current: list[str] = []
    begun = quoted = False
    at = 0
    while at < len(text):
        character = text[at]
        if character in " \t" and not quoted:
            if begun:
                words.append("".join(current))
            current, begun = [], False
        elif character == "\\":
            run = len(text[at:]) - len(text[at:].lstrip("\\"))
            begun = True
            if text[at + run : at + run + 1] == '"':
                current.append("\\" * (run // 2))
                if run % 2:
                    current.append('"')
                    at += 1
            else:
                current.append("\\" * run)
            at += run
            continue
        elif character == '"':
            begun = True
            quoted = not quoted
        elif character == "^" and not quoted and at + 1 < len(text):
            at += 1
            current.append(text[at])
            begun = True
        else:
            current.append(character)
            begun = True
        at += 1
    if begun:
        words.append("".join(current))
    return words


def _without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif re.fullmatch(r"\d?>>?|<|\*>", word):
            skip = True
        elif not re.match(r"\d?>>?(?:&\d|\S)", word):
            kept.append(word)
    return kept
