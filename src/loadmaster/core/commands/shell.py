"""A POSIX shell's reading of a text: quotes, continuations, comments, variables. Nothing is run.

``commands`` yields the simple commands of a text one by one, with the variables that the text has set by then filled
in. What a shell would have to run (``$(...)``) or know (a variable that the text does not set) stays as written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct, field

from loadmaster.core.commands.found import MAX_DEPTH, CommandError
from loadmaster.core.commands.parameters import MAX_VALUE, Variables, expand_parameter, expand_text, joined
from loadmaster.core.commands.shelllexer import ASSIGNMENT, NAME, Lexer, Part, Token, literal_start, plain_word

_MAX_FIELDS = 20_000


class Simple(Struct):
    """One simple command: ``words`` with variables filled in, ``assigned`` in front of it, and where it stands."""

    line: int
    words: list[str]
    assigned: dict[str, str] = field(default_factory=dict)
    after: str = "\n"  # the operator that ended the command before it


class Shell(Lexer):
    """One reading of one text, with the variables that it sets."""

    def __init__(
        self,
        text: str,
        variables: Variables | None = None,
        depth: int = 0,
        *,
        bare: bool = False,
        plain_dollars: bool = False,
    ) -> None:
        if depth > MAX_DEPTH:
            raise CommandError("the command is too deeply nested", "give the inner command alone")
        super().__init__(text, bare=bare, plain_dollars=plain_dollars)
        self.variables = variables if variables is not None else Variables()
        self.depth = depth

    # ------------------------------------------------------------------------------------------ commands

    def commands(self) -> Iterator[Simple]:
        """The simple commands in order. Assignments and exports take effect as they are passed."""
        tokens: list[Token] = []
        after = "\n"
        for token in self.tokens():
            if not token.operator:
                tokens.append(token)
                continue
            if tokens:
                yield from self._simple(tokens, after)
                tokens = []
            after = token.operator
        if tokens:
            yield from self._simple(tokens, after)

    def _simple(self, tokens: list[Token], after: str) -> Iterator[Simple]:
        while tokens and plain_word(tokens[0]) in _RESERVED and not self.bare:
            tokens = tokens[1:]
        assigned: dict[str, str] = {}
        arrays: list[Token] = []
        while tokens and not self.bare:
            match = ASSIGNMENT.match(literal_start(tokens[0]))
            if match is None:
                break
            if tokens[0].items is not None:
                arrays.append(tokens[0])
            else:
                name, value = self._assignment(tokens[0], match)
                assigned[name] = value
                if len(tokens) == 1 or all(ASSIGNMENT.match(literal_start(t)) for t in tokens[1:]):
                    self.variables.assign(name, value)
            tokens = tokens[1:]
        for token in arrays:
            self._assign_array(token)
        if not tokens:
            return
        hidden = {name: value for name, value in assigned.items() if name not in self.variables.values}
        self.variables.values.update(hidden)  # "X=1 program $X": the text gives the value, so it is filled in
        words = self._words(tokens)
        for name in hidden:
            del self.variables.values[name]
        if words and (self.bare or not self._builtin(words)):
            yield Simple(tokens[0].line, words, assigned, after)

    def _assignment(self, token: Token, match: re.Match[str]) -> tuple[str, str]:
        value = self._joined(token)[match.end() :]
        name = match.group(1)
        if match.group(3):
            value = joined((self.variables.values.get(name, ""), value))
        return name, value

    def _assign_array(self, token: Token) -> None:
        match = ASSIGNMENT.match(literal_start(token))
        if match is None:
            return
        before = self.variables.arrays.get(match.group(1), []) if match.group(3) else []
        words = self._words(token.items or [])
        if len(before) + len(words) > _MAX_FIELDS:
            raise CommandError("the command has too many words", "give the command alone")
        self.variables.arrays[match.group(1)] = [*before, *words]
        self.variables.values.pop(match.group(1), None)

    def _builtin(self, words: list[str]) -> bool:
        """Commands that only change variables; True if this was one."""
        name = words[0]
        if name in ("export", "declare", "typeset", "local", "readonly"):
            export = name == "export" or any(re.fullmatch(r"-\w*x\w*", word) for word in words[1:])
            for word in words[1:]:
                key, equals, value = word.partition("=")
                if equals and NAME.fullmatch(key):
                    # "export A=1 B=$A": the text gives A, though a shell fills in all words first
                    self.variables.assign(key, expand_text(value, self.variables, unquote=False), export)
                elif export and NAME.fullmatch(key) and key in self.variables.values:
                    self.variables.exported.add(key)
            return True
        if name == "setenv" and len(words) >= 3:
            self.variables.assign(words[1], words[2], True)
            return True
        if name == "unset":
            for word in words[1:]:
                self.variables.values.pop(word, None)
                self.variables.exported.discard(word)
            return True
        if name == "set":
            return self._set(words)
        return name in (":", "true")

    def _set(self, words: list[str]) -> bool:
        if len(words) >= 4 and re.fullmatch(r"-\w*x\w*", words[1]) and NAME.fullmatch(words[2]):  # fish
            self.variables.assign(words[2], " ".join(words[3:]), True)
        elif "-a" in words or "allexport" in words:
            self.variables.export_all = "+o" not in words
        elif "+a" in words:
            self.variables.export_all = False
        return True

    # ------------------------------------------------------------------------------------------ variables

    def _joined(self, token: Token) -> str:
        """The word as one string, nothing split."""
        return joined(part.text if part.kind != "parameter" else self._one(part) for part in token.parts)

    def _one(self, part: Part) -> str:
        value = self._parameter(part)
        return joined(" ".join(value)) if isinstance(value, list) else value

    def _fields(self, token: Token) -> list[str]:
        """The words that this one becomes."""
        if ASSIGNMENT.match(literal_start(token)):
            return [self._joined(token)]
        fields = _Fields()
        for part in token.parts:
            value = self._parameter(part) if part.kind == "parameter" else part.text
            if isinstance(value, list):
                for index, item in enumerate(value):
                    fields.end(index > 0)
                    fields.add(item, True)
            elif part.kind == "parameter" and not part.quoted and value != part.source:
                fields.end(value[:1].isspace())
                for index, piece in enumerate(value.split()):
                    fields.end(index > 0)
                    fields.add(piece, True)
                fields.end(value[-1:].isspace())
            else:
                fields.add(value, part.quoted or bool(value))
        fields.end(True)
        return fields.done

    def _words(self, tokens: list[Token]) -> list[str]:
        """What all these words become. Raises :class:`CommandError` when that is too much."""
        words: list[str] = []
        length = 0
        for token in tokens:
            fields = self._fields(token)
            words.extend(fields)
            length += sum(map(len, fields))
            if len(words) > _MAX_FIELDS or length > 2 * MAX_VALUE:
                raise CommandError("the command has too many words", "give the command alone")
        return words

    def _parameter(self, part: Part) -> str | list[str]:
        array = re.fullmatch(r"([A-Za-z_]\w*)\[[@*]\](:-.*|\+.*)?", part.text, re.DOTALL)
        if array:
            if array.group(1) in self.variables.arrays:
                return list(self.variables.arrays[array.group(1)])
            if array.group(1) in self.variables.values:
                return [self.variables.values[array.group(1)]]
            return part.source
        return expand_parameter(part.text, part.source, self.variables, self.depth)


class _Fields:
    """The fields that one word becomes, as they are gathered."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.pieces: list[str] = []
        self.length = 0
        self.begun = False  # an empty quote begins a field too

    def add(self, piece: str, begins: bool) -> None:
        self.length += len(piece)
        if self.length > MAX_VALUE:
            raise CommandError("variables make a word too long", "give the command with its values")
        self.pieces.append(piece)
        self.begun = self.begun or begins

    def end(self, really: bool) -> None:
        if really and self.begun:
            self.done.append("".join(self.pieces))
            self.pieces = []
            self.begun = False


_RESERVED = {
    "if",
    "then",
    "elif",
    "else",
    "fi",
    "for",
    "while",
    "until",
    "do",
    "done",
    "{",
    "}",
    "!",
    "time",
    "case",
    "esac",
}
