"""The tokens of a POSIX shell text: words of quoted and unquoted pieces, operators, redirections taken off.

Damage that copying does to continued lines is seen here and reported with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct, field

from loadmaster.core.commands.found import CUT, CommandError
from loadmaster.core.facts import Evidence

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?(\+?)=")
_OPERATORS = ("&&", "||", ";;", "|&", ";", "&", "|", "(", ")")
_BROKEN = re.compile(r"\\[ \t]+(#[^\n]*)?(?=\n|\Z)")
_REDIRECTION = re.compile(r"&?>>?[&|]?|<<<|<<-?|<&?")
_ONLY_BLANKS = re.compile(r"\s*\Z")
_CLOSED = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_MAX_BRACKETS = 20_000  # characters between a bracket and its partner
_ANSI = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"', "r": "\r", "0": "\0"}


class Part(Struct, frozen=True):
    """A piece of a word. ``kind``: "text", "parameter" (``text`` is what stands in the braces), "raw" (kept)."""

    kind: str
    text: str
    quoted: bool
    source: str = ""


class Token(Struct):
    """A word or an operator, with the line it begins on. ``items``: the words of an array assignment."""

    line: int
    parts: list[Part] = field(default_factory=list)
    operator: str = ""
    items: list[Token] | None = None


class Lexer:
    """Cuts a text into tokens. ``damage``, ``breaks`` and ``heredocs`` fill up as the tokens are walked.

    ``breaks``: line -> what cuts the command off there: "comment", or "trailing" for what stands after a backslash.

    ``bare``: the text is split into words without a shell (supervisor, systemd), so nothing ends the command, redirects
    it or assigns. ``plain_dollars``: a dollar is a character like any other.
    """

    def __init__(self, text: str, *, bare: bool = False, plain_dollars: bool = False) -> None:
        self.text = text
        self.bare = bare
        self.plain_dollars = plain_dollars or bare
        self.at = 0
        self.line = 1
        self.damage: list[Evidence] = []
        self.breaks: dict[int, str] = {}
        self.heredocs: list[str] = []
        self._awaited: list[tuple[str, bool]] = []
        self._continued = False  # the line being read continues the one before it

    # ------------------------------------------------------------------------------------------ tokens

    def tokens(self) -> Iterator[Token]:
        text = self.text
        while self.at < len(text):
            character = text[self.at]
            if character == "\n" and not self.bare:
                yield self._newline()
            elif character in " \t\r\f\v\n" and self.bare:
                self.line += character == "\n"
                self.at += 1
            elif self.bare and character != "\\":
                yield self._word()
            elif character in " \t\r\f\v":
                self.at += 1
            elif character == "#":
                yield from self._comment()
            elif character == "\\" and self._continuation():
                continue
            elif character == "\\" and self._broken_continuation():
                yield Token(self.line, operator="\n")
            elif character in "<>" or (character == "&" and text[self.at + 1 : self.at + 2] == ">"):
                if not self._redirection():
                    yield self._word()
            elif operator := next((o for o in _OPERATORS if text.startswith(o, self.at)), ""):
                self.at += len(operator)
                yield Token(self.line, operator=operator)
            else:
                token = self._word()
                if not self._is_descriptor(token):
                    yield token

    def _newline(self) -> Token:
        token = Token(self.line, operator="\n")
        self.at += 1
        self.line += 1
        self._continued = False
        for delimiter, strip in self._awaited:
            self._heredoc(delimiter, strip)
        self._awaited = []
        return token

    def _comment(self) -> Iterator[Token]:
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        if self._continued and self._rest_goes_on(end):
            self.breaks[self.line] = "comment"
            self._report(f"a comment among continued lines ends the command here, and {CUT}")
        self.at = end
        yield from ()

    def _rest_goes_on(self, end: int) -> bool:
        """Whether the line after ``end`` looks like a further part of the same command."""
        below = re.sub(r"^[ \t]*(?:#[^\n]*)?\n", "", self.text[end + 1 : end + 2000], flags=re.MULTILINE)
        return below.lstrip().startswith("-")

    def _continuation(self) -> bool:
        if self.text.startswith("\n", self.at + 1):
            self.at += 2
            self.line += 1
            self._continued = True
            return True
        if self.at + 1 >= len(self.text):
            self.at += 1
            return True
        return False

    def _broken_continuation(self) -> bool:
        """``\\`` and blanks, then a comment or the line's end: the command ends there. Taken if so."""
        match = _BROKEN.match(self.text, self.at)
        if match is None:
            return False
        if not _ONLY_BLANKS.match(self.text, match.end()):
            what = "a comment" if match.group(1) else "a blank"
            self.breaks[self.line] = "trailing"
            self._report(f"{what} after the backslash: the command ends here, and {CUT}")
        self.at = match.end()
        return True

    def _report(self, text: str) -> None:
        if len(self.damage) < 20:
            self.damage.append(Evidence("command", text, self.line))

    def _is_descriptor(self, token: Token) -> bool:
        """``2`` directly before ``>``."""
        return (
            self.at < len(self.text)
            and self.text[self.at] in "<>"
            and re.fullmatch(r"\d+", plain_word(token)) is not None
        )

    def _redirection(self) -> bool:
        """Takes a redirection with its target; False for ``<(...)``, which is a word."""
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            self.at += 1
            return True
        operator = match.group()
        if operator in ("<", ">") and self.text.startswith("(", match.end()):
            return False
        self.at = match.end()
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if self.at >= len(self.text) or self.text[self.at] in "\n;|()<":
            return True
        if self.text[self.at] == ">":  # > >(tee log)
            self._word()
            return True
        target = self._word()
        if operator in ("<<", "<<-"):
            self._awaited.append(("".join(part.text for part in target.parts), operator == "<<-"))
        return True

    def _heredoc(self, delimiter: str, strip: bool) -> None:
        lines: list[str] = []
        while self.at < len(self.text):
            end = self.text.find("\n", self.at)
            end = len(self.text) if end < 0 else end
            line = self.text[self.at : end]
            self.at = min(end + 1, len(self.text))
            self.line += 1
            if (line.lstrip("\t") if strip else line).strip() == delimiter:
                break
            lines.append(line)
        self.heredocs.append("\n".join(lines))

    # ------------------------------------------------------------------------------------------ words

    def _word(self) -> Token:
        text = self.text
        token = Token(self.line)
        literal: list[str] = []
        start = self.at

        def flush() -> None:
            if literal:
                token.parts.append(Part("text", "".join(literal), False))
                literal.clear()

        while self.at < len(text):
            character = text[self.at]
            if character in " \t\r\f\v\n":
                break
            if self.bare and character in ";|&()<>`#":
                literal.append(character)
                self.at += 1
                continue
            if character in ";|)" or (character == "&" and self.at > start):
                break
            if character in "<>" and (self.at > start or not text.startswith("(", self.at + 1)):
                break
            if character == "(":
                if self.at > start and ASSIGNMENT.fullmatch("".join(literal)) and not token.parts:
                    flush()
                    token.items = self._array()
                    break
                if self.at > start:
                    literal.append(self._balanced("(", ")"))
                    continue
                break
            if character in "<>":
                self.at += 1
                flush()
                token.parts.append(Part("raw", character + self._balanced("(", ")"), False))
            elif character == "\\":
                if not self._escape(literal, token):
                    break
            elif character == "'":
                flush()
                token.parts.append(Part("text", self._single(), True))
            elif character == '"':
                flush()
                self._double(token)
            elif character == "`":
                flush()
                token.parts.append(Part("raw", self._backquoted(), False))
            elif character == "$" and not self.plain_dollars:
                flush()
                self._dollar(token, quoted=False)
            else:
                literal.append(character)
                self.at += 1
        flush()
        if self.at == start:
            self.at += 1  # a character that begins nothing
        return token

    def _escape(self, literal: list[str], token: Token) -> bool:
        """A backslash inside a word; False when it ends the word."""
        text = self.text
        if self.at + 1 >= len(text):
            self.at += 1
            return False
        following = text[self.at + 1]
        if following == "\n":
            self.at += 2
            self.line += 1
            self._continued = True
            if self.at < len(text) and text[self.at] not in " \t\n" and (literal or token.parts):
                self.damage.append(
                    Evidence(
                        "command", "no blank before the backslash: the shell joins both lines' words", self.line - 1
                    )
                )
            return True
        if _BROKEN.match(text, self.at):
            return False
        if literal:
            literal.append(following)
        else:
            token.parts.append(Part("text", following, True))
        self.at += 2
        return True

    def _single(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            return self._unclosed("'")
        content = self.text[self.at + 1 : end]
        self.line += content.count("\n")
        self.at = end + 1
        return content

    def _unclosed(self, quote: str) -> str:
        self._report(f"a {quote} is opened here and never closed")
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        content = self.text[self.at + 1 : end].rstrip("\\ ")
        self.at = end
        return content

    def _double(self, token: Token) -> None:
        text = self.text
        if not _closed(text, self.at):
            token.parts.append(Part("text", self._unclosed('"'), True))
            return
        self.at += 1
        literal: list[str] = []
        token.parts.append(Part("text", "", True))
        while self.at < len(text) and text[self.at] != '"':
            character = text[self.at]
            if character == "\\" and self.at + 1 < len(text):
                following = text[self.at + 1]
                if following == "\n":
                    self.line += 1
                elif following in '$`"\\':
                    literal.append(following)
                else:
                    literal.append("\\" + following)
                self.at += 2
            elif character in "$`" and not self.plain_dollars:
                token.parts.append(Part("text", "".join(literal), True))
                literal.clear()
                if character == "`":
                    token.parts.append(Part("raw", self._backquoted(), True))
                else:
                    self._dollar(token, quoted=True)
            else:
                self.line += character == "\n"
                literal.append(character)
                self.at += 1
        token.parts.append(Part("text", "".join(literal), True))
        self.at += 1

    def _backquoted(self) -> str:
        end = self.text.find("`", self.at + 1)
        end = self.at if end < 0 else end
        content = self.text[self.at : end + 1]
        self.line += content.count("\n")
        self.at = end + 1
        return content

    def _balanced(self, opening: str, closing: str) -> str:
        """From ``opening`` at the current place to its partner, as written; to the line's end if there is none."""
        depth = 0
        for index in range(self.at, min(len(self.text), self.at + _MAX_BRACKETS)):
            character = self.text[index]
            if character == opening:
                depth += 1
                if depth > 200:
                    raise CommandError("brackets are too deeply nested", "give the command alone")
            elif character == closing:
                depth -= 1
                if depth == 0:
                    content = self.text[self.at : index + 1]
                    self.line += content.count("\n")
                    self.at = index + 1
                    return content
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        content = self.text[self.at : end]
        self.at = end
        return content

    def _dollar(self, token: Token, quoted: bool) -> None:
        text = self.text
        following = text[self.at + 1 : self.at + 2]
        if following == "{":
            start = self.at
            self.at += 1
            content = self._balanced("{", "}")
            token.parts.append(Part("parameter", content[1:-1], quoted, text[start : self.at]))
        elif following == "(":
            start = self.at
            self.at += 1
            self._balanced("(", ")")
            token.parts.append(Part("raw", text[start : self.at], True))
        elif following == "'" and not quoted:
            self.at += 1
            content = re.sub(r"\\(.)", lambda m: _ANSI.get(m.group(1), m.group()), self._single())
            token.parts.append(Part("text", content, True))
        elif following == '"' and not quoted:
            self.at += 1
        elif name := NAME.match(text, self.at + 1):
            self.at = name.end()
            token.parts.append(Part("parameter", name.group(), quoted, "$" + name.group()))
        elif following and following in "@*#?0123456789!-$":
            self.at += 2
            token.parts.append(Part("raw", "$" + following, True))
        else:
            self.at += 1
            token.parts.append(Part("text", "$", quoted))

    def _array(self) -> list[Token]:
        """The words of ``NAME=( ... )``, over lines, with comments."""
        self.at += 1
        items: list[Token] = []
        text = self.text
        while self.at < len(text) and text[self.at] != ")":
            character = text[self.at]
            if character == "\n":
                self.at += 1
                self.line += 1
            elif character in " \t\r;|&<>":
                self.at += 1
            elif character == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif character == "\\" and (self._continuation() or self._broken_continuation()):
                continue
            else:
                items.append(self._word())
        self.at += 1
        return items


def plain_word(token: Token) -> str:
    """The word if it is plain unquoted text, else nothing."""
    if len(token.parts) == 1 and token.parts[0].kind == "text" and not token.parts[0].quoted:
        return token.parts[0].text
    return ""


def literal_start(token: Token) -> str:
    return token.parts[0].text if token.parts and token.parts[0].kind == "text" and not token.parts[0].quoted else ""


def _closed(text: str, at: int) -> bool:
    """Whether the double quote at ``at`` has a partner."""
    return _CLOSED.match(text, at) is not None or "${" in text[at : at + _MAX_BRACKETS]
