"""An engine's command line + version <-> :class:`LaunchArgs`.

Reads as vLLM's own argument parser does: underscores are hyphens, ``=`` or a space, unique prefixes, aliases,
dotted parts (``--a.b c``, ``-cc.mode none``, ``--a.b+ c``), ``-O3``, JSON, ``--no-x``. With a known version by the
flags of that version, else by those of all. What is not known stays verbatim and in place.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from loadmaster.core.facts import Evidence, LaunchArgs
from loadmaster.core.flagtable import Flag, FlagTable, Option, flag_table
from loadmaster.core.flagvalues import JSON_KINDS, dotted_value, read_value, write_value
from loadmaster.core.registeredvalues import unregistered

_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
_PROGRAM = re.compile(r"(?:.*[/\\])?vllm(?:\.exe)?")
_TRUTH = ("true", "false")
_ALL_ARGUMENTS = ("$@", "$*", "${@}", "${*}")  # a script's own arguments, which the text does not give
_UNFILLED = re.compile(r"\$|%\w+%")


def parse_argv(
    tokens: Sequence[str], *, engine_version: str | None = None, env: Mapping[str, str] | None = None
) -> LaunchArgs:
    """The launch that ``tokens`` mean: flags of ``vllm serve``, with or without ``vllm serve`` and the model.

    Never raises on what stands in the tokens: a value that the engine would refuse stays text and is named in
    ``refused``, a flag that this version does not have is kept in ``extra`` and named in ``unknown_flags``.
    """
    reader = _Reader(flag_table(engine_version))
    reader.read(_without_program(list(tokens)))
    return reader.launch(engine_version, dict(env or {}))


def launch_from_settings(
    settings: Mapping[str, Any], *, engine_version: str | None = None, env: Mapping[str, str] | None = None
) -> LaunchArgs:
    """The launch that a vLLM YAML configuration means: names without dashes -> values (text, numbers, lists, maps)."""
    reader = _Reader(flag_table(engine_version))
    for key, value in settings.items():
        reader.read_setting("--" + str(key).strip().lstrip("-"), value)
    reader.finish()
    return reader.launch(engine_version, dict(env or {}), kind="yaml")


def normalise_argv(launch: LaunchArgs) -> tuple[str, ...]:
    """The same launch as one canonical command: long names, a space before the value, unknown parts in place."""
    table = flag_table(launch.engine_version)
    words = ["vllm", "serve"]
    if launch.model is not None:
        words.append(f"--model={launch.model}" if _looks_like_option(launch.model) else launch.model)
    groups = list(_extra_groups(launch))
    for place, group in groups:
        if place < 0:
            words.extend(group)
    for index, (name, value) in enumerate(launch.flags.items()):
        for place, group in groups:
            if place == index:
                words.extend(group)
        words.extend(_flag_words(table, name, value))
    for place, group in groups:
        if place >= len(launch.flags):
            words.extend(group)
    return tuple(words)


def with_flags(launch: LaunchArgs, changes: Mapping[str, Any | None]) -> LaunchArgs:
    """The launch with flags set (long name -> value) or removed (None), normalised again."""
    flags = dict(launch.flags)
    places = list(launch.extra_places)
    for name, value in changes.items():
        if value is not None:
            flags[name] = value
        elif name in flags:
            position = list(flags).index(name)
            del flags[name]
            places = [place - 1 if place > position else place for place in places]
    changed = msgspec.structs.replace(launch, flags=flags, extra_places=tuple(places))
    return msgspec.structs.replace(changed, argv=normalise_argv(changed))


def _extra_groups(launch: LaunchArgs) -> Iterator[tuple[int, list[str]]]:
    """(number of flags before it or -1 for right after the model, words) of each unknown part."""
    places = launch.extra_places or (len(launch.flags),) * len(launch.extra)
    group: list[str] = []
    at = -1
    for word, place in zip(launch.extra, places):
        if group and place != at:
            yield at, group
            group = []
        at = place
        group.append(word)
    if group:
        yield at, group


def _flag_words(table: FlagTable, name: str, value: Any) -> list[str]:
    option = table.options.get(name) or table.elsewhere.get(name)
    flag = option.flag if option is not None else Flag(name=name, kind="str")
    if isinstance(value, bool) and flag.kind not in JSON_KINDS and flag.nargs not in ("+", "append"):
        if value:
            return [name]
        if flag.kind == "truth":
            return [name, "false"]
        return [flag.negations[0]] if flag.negations else []
    if isinstance(value, list | tuple) and flag.nargs is not None:
        texts = [write_value(flag, item) for item in value]
        if flag.nargs == "append":
            return [word for text in texts for word in _joined(name, text)]
        if texts and not any(_looks_like_option(text) for text in texts):
            return [name, *texts]
        return [f"{name}={texts[0]}", *texts[1:]] if texts else []
    return _joined(name, write_value(flag, value))


def _joined(name: str, text: str) -> list[str]:
    return [f"{name}={text}"] if _looks_like_option(text) else [name, text]


def _looks_like_option(text: str) -> bool:
    """Whether the word must be joined to its flag by ``=`` to be taken as its value."""
    return len(text) > 1 and text.startswith("-") and not _NEGATIVE.fullmatch(text)


def _without_program(tokens: list[str]) -> list[str]:
    if tokens and _PROGRAM.fullmatch(tokens[0]):
        tokens = tokens[1:]
        if tokens and tokens[0] == "serve":
            tokens = tokens[1:]
    elif tokens and tokens[0] == "serve":
        tokens = tokens[1:]
    return tokens


def hyphenated(word: str) -> str:
    """``--a_b.c_d=e_f`` -> ``--a-b.c_d=e_f``: only the name before the first dot changes."""
    if not word.startswith("--"):
        return word
    head, equals, tail = word.partition("=")
    name, dot, keys = head.partition(".")
    return name.replace("_", "-") + dot + keys + equals + tail


class _Reader:
    """Walks the words once; what it has read so far is its state."""

    def __init__(self, table: FlagTable) -> None:
        self.table = table
        self.flags: dict[str, Any] = {}
        self.dotted: dict[str, dict[str, Any]] = {}
        self.positional: str | None = None
        self.model: str | None = None
        self.strays: list[str] = []
        self.extra: list[tuple[str, int]] = []
        self.unknown: list[str] = []
        self.refused: list[Evidence] = []
        self.words: list[str] = []
        self.at = 0
        self.start = 0  # position of the option being read
        self.lone_values: list[int] = []  # positions in extra of the single value of an unknown flag
        self.written: list[str] = []
        self.model_words: set[int] = set()  # positions in written of the model and its flag

    # ------------------------------------------------------------------------------------------ words

    def read(self, tokens: list[str]) -> None:
        self.written = [word for token in tokens if token != "--" for word in self._apart(token)]
        self.words = [hyphenated(token) for token in self.written]
        while self.at < len(self.words):
            word = self.words[self.at]
            self.start = self.at
            self.at += 1
            if not self._is_option(word):
                self._stray(word)
            elif word.startswith("-O") and self._optimization(word):
                continue
            else:
                self._option(word)
        self.finish()

    def finish(self) -> None:
        """Dotted parts stand as if their JSON came last: they replace what the flag had before."""
        self.flags.update(self.dotted)
        if self.positional is None and self.model is None:
            self._model_after_unknown()

    def launch(self, version: str | None, env: dict[str, str], kind: str = "argv") -> LaunchArgs:
        for name, reason in unregistered(self.flags, self.table):
            self._refuse(name, reason)
        launch = LaunchArgs(
            model=self.model if self.positional is None else self.positional,
            flags=self.flags,
            env=env,
            unknown_flags=tuple(dict.fromkeys(self.unknown)),
            extra=(*self.strays, *(word for word, _ in self.extra)),
            raw=tuple(word for index, word in enumerate(self.written) if index not in self.model_words),
            extra_places=(*(-1 for _ in self.strays), *(place for _, place in self.extra)),
            kind=kind,
            engine_version=version,
            refused=tuple(self.refused),
        )
        return msgspec.structs.replace(launch, argv=normalise_argv(launch))

    def _apart(self, token: str) -> list[str]:
        """``"--dtype auto"`` given as one word is two; the engine would not know it."""
        head, blank, _ = token.partition(" ")
        if not blank or not head.startswith("-") or hyphenated(head) not in self.table.options:
            return [token]
        self._refuse(head, f"and its value are one word, {token[:80]!r}; the engine needs two")
        try:
            return shlex.split(token)
        except ValueError:
            return token.split(" ", 1)

    def _is_option(self, word: str) -> bool:
        if len(word) < 2 or not word.startswith("-"):
            return False
        if word in self.table.options or word in self.table.elsewhere:
            return True
        if _NEGATIVE.fullmatch(word):
            return False
        head = word.partition("=")[0]
        return " " not in head and "\n" not in head

    def _next_value(self) -> str | None:
        """The following word if it is a value, taken."""
        if self.at < len(self.words) and not self._is_option(self.words[self.at]):
            self.at += 1
            return self.words[self.at - 1]
        return None

    def _stray(self, word: str) -> None:
        if self.positional is None and self.model is None and word not in _ALL_ARGUMENTS:
            self.positional = word
            self.model_words.add(self.at - 1)
        else:
            self.strays.append(word)
            if not _UNFILLED.search(word):
                self._refuse("", f"{word[:80]!r} belongs to no flag")

    def _refuse(self, name: str, reason: str) -> None:
        self.refused.append(Evidence("command", f"{name} {reason}".strip()))

    # ------------------------------------------------------------------------------------------ options

    def _option(self, word: str) -> None:
        head, equals, explicit = word.partition("=")
        if "." in head:
            self._dotted(word, head, explicit if equals else None)
            return
        option, value = self._resolve(head, explicit if equals else None)
        if option is None:
            self._unknown(word, head, bool(equals))
            return
        self._take(option, head, value, word)

    def _resolve(self, head: str, explicit: str | None) -> tuple[Option | None, str | None]:
        """The option that ``head`` names: exactly, by a unique prefix, or a one-letter alias with its value."""
        options = self.table.options
        if head in options:
            return options[head], explicit
        if head in self.table.elsewhere:
            return None, explicit
        matches = {name: option for name, option in options.items() if name.startswith(head)}
        meanings = {(option.flag.name, option.negated) for option in matches.values()}
        if len(meanings) > 1 and self.table.version is None:
            newest = flag_table(_NEWEST).options
            matches = {name: option for name, option in newest.items() if name.startswith(head)}
            meanings = {(option.flag.name, option.negated) for option in matches.values()}
            matches = {name: options.get(name, option) for name, option in matches.items()}
        if len(meanings) == 1 and len(head) > 1 and head != "--":
            return next(iter(matches.values())), explicit
        if len(meanings) > 1 and head.startswith("--"):
            self._refuse(head, "is ambiguous: " + ", ".join(sorted(matches)[:6]))
        if not head.startswith("--") and head[:2] in options and options[head[:2]].flag.takes_value:
            return options[head[:2]], head[2:] + ("" if explicit is None else "=" + explicit)
        return None, explicit

    def _take(self, option: Option, head: str, explicit: str | None, word: str) -> None:
        flag = option.flag
        if option.negated or not flag.takes_value:
            self._switch(option, head, explicit)
        elif flag.kind == "truth":
            text = explicit if explicit is not None else self._next_truth(flag)
            self._set(flag, True if text is None else self._value(flag, text))
        elif flag.nargs == "+" and explicit is None:
            texts = list(iter(self._next_value, None))
            self._several(flag, texts, word)
        elif flag.nargs == "?" and explicit is None:
            text = self._next_value()
            self._set(flag, True if text is None else self._value(flag, text))
        else:
            first = self.at - 1
            text = explicit if explicit is not None else self._next_value()
            if flag.name == "--model" and text is not None:
                self.model_words.update(range(first, self.at))
            if text is None:
                self._keep(self._as_written(word))
                self._refuse(flag.name, "has no value")
            elif flag.nargs == "append" and flag.name in self.flags:
                before = self.flags[flag.name]
                self.flags[flag.name] = [*(before if isinstance(before, list) else [before]), self._value(flag, text)]
            else:
                self._set(flag, self._value(flag, text))

    def _several(self, flag: Flag, texts: list[str], word: str) -> None:
        if not texts:
            self._keep(self._as_written(word))
            self._refuse(flag.name, "has no value")
            return
        values = [self._value(flag, text) for text in texts]
        self._set(flag, values if len(values) > 1 else values[0])

    def _switch(self, option: Option, head: str, explicit: str | None) -> None:
        """A flag without a value; ``--x False`` is understood, though only some versions take it."""
        flag = option.flag
        text = explicit
        if explicit is None and (flag.negations or "truth" in flag.kinds or option.negated):
            text = self._next_truth(flag)
        elif explicit is None and self._peek_truth() == "true":
            text = self._next_value()
        truth = True
        if text is not None:
            if text.lower() in _TRUTH:
                truth = text.lower() == "true"
            if self.table.version is not None or "truth" not in flag.kinds:
                self._refuse(head, f"takes no value, {text[:60]!r} was given")
        self._set(flag, truth is not option.negated)

    def _peek_truth(self) -> str | None:
        if self.at < len(self.words) and self.words[self.at].lower() in _TRUTH:
            return self.words[self.at].lower()
        return None

    def _next_truth(self, flag: Flag) -> str | None:
        return self._next_value() if self._peek_truth() is not None else None

    def _value(self, flag: Flag, text: str) -> Any:
        value, reason = read_value(flag, text, self.table.features)
        understood = self.table.version is None and not isinstance(value, str)  # some version takes it
        if reason is not None and not understood and not _UNFILLED.search(text):
            self._refuse(flag.name, reason)
        elif flag.choices and value not in flag.choices and not _UNFILLED.search(text):
            self._refuse(flag.name, f"takes {', '.join(map(str, flag.choices))}; {str(value)[:60]!r} was given")
        return value

    def _set(self, flag: Flag, value: Any) -> None:
        if flag.name == "--model":
            self.model = value
        else:
            self.flags[flag.name] = value

    # ------------------------------------------------------------------------------------------ dotted, -O

    def _dotted(self, word: str, head: str, text: str | None) -> None:
        name, *keys = head.split(".")
        append = bool(keys) and keys[-1].endswith("+")
        if append:
            keys[-1] = keys[-1][:-1]
        option = self._resolve(name, None)[0]
        if option is None or option.negated or not all(keys) or len(keys) > 20:
            self._unknown(word, name, text is not None)
            return
        if text is None:
            if self.at >= len(self.words) or self.words[self.at].startswith("--"):
                self._keep(self._as_written(word))
                self._refuse(head, "has no value")
                return
            text = self.words[self.at]
            self.at += 1
            given = [self.written[self.at - 1]]
        else:
            given = []
        if option.flag.kind not in JSON_KINDS or option.flag.nargs is not None:
            self._keep(self._as_written(word), *given)
            self._refuse(head, "has a dot, but the flag takes no object")
            return
        if self.table.version is not None and "dotted" not in self.table.features:
            self._refuse(head, "has a dot, which this version does not understand")
        value = list(text.split(",")) if append else dotted_value(text, "dotted-human" in self.table.features)
        part: Any = value
        for key in reversed(keys):
            part = {key: part}
        target = self.dotted.setdefault(option.flag.name, {})
        _merge(target, part)
        self.flags[option.flag.name] = target

    def _optimization(self, word: str) -> bool:
        """``-O3``, ``-O=3``, ``-O 3`` and ``-O.mode x``, which mean different things by version; True if read."""
        features = self.table.features
        unknown = self.table.version is None
        if word == "-O":
            if self.at >= len(self.words) or self.words[self.at] not in ("0", "1", "2", "3"):
                return False
            level = self.words[self.at]
        elif word[2] == "." and (unknown or "optimization-level" not in features):
            return False
        else:
            level = word[3:] if word[2] == "=" else word[2:]
        if unknown and level[:1] in ("{", "["):
            return False
        if "optimization-level" in features:
            option = self.table.options["--optimization-level"]
            rewritten = ["--optimization-level", level]
        elif "optimization-dotted" in features or "optimization-mode" in features:
            option = self.table.options["-O"]
            key = "level" if "optimization-dotted" in features else "mode"
            rewritten = [f"-O.{key}={level}"]
        elif "optimization-short" in features:
            option = self.table.options["-O"]
            rewritten = ["-O", level]
        else:
            return False
        if word == "-O":
            self.at += 1
        if len(rewritten) == 1:
            self._option(rewritten[0])
        else:
            self._take(option, word, rewritten[1], word)
        return True

    # ------------------------------------------------------------------------------------------ not known

    def _as_written(self, word: str) -> str:
        return self.written[self.start] if self.start < len(self.written) else word

    def _keep(self, *words: str) -> None:
        self.extra.extend((word, len(self.flags)) for word in words)

    def _unknown(self, word: str, head: str, has_value: bool) -> None:
        """An unknown flag with the values that seem to be its own."""
        self.unknown.append(head.partition(".")[0])
        elsewhere = self.table.elsewhere.get(head)
        self._keep(self._as_written(word))
        if has_value or (elsewhere is not None and (elsewhere.negated or not elsewhere.flag.takes_value)):
            return
        several = self.positional is not None or self.model is not None
        if elsewhere is not None:
            several = elsewhere.flag.nargs == "+"
        first = len(self.extra)
        while (text := self._next_value()) is not None:
            self._keep(text)
            if not several:
                break
        if elsewhere is None and len(self.extra) == first + 1:
            self.lone_values.append(first)

    def _model_after_unknown(self) -> None:
        """``--unknown org/model``: when nothing else is the model, that value is."""
        for position in self.lone_values:
            word = self.extra[position][0]
            if "/" in word and "=" not in word and "{" not in word:
                self.positional = word
                del self.extra[position]
                self.model_words.add(len(self.written) - 1 - self.written[::-1].index(word))
                return

    # ------------------------------------------------------------------------------------------ settings

    def read_setting(self, word: str, value: Any) -> None:
        """One entry of a YAML configuration."""
        head = hyphenated(word)
        if head not in _MODEL_SETTINGS:
            self.written += [word] if value is True or value is None else [word, _text(value)]
        option = self._resolve(head, None)[0]
        if option is None:
            self.unknown.append(head)
            self._keep(head, *([] if value is True or value is None else [_text(value)]))
            return
        if value is None:
            return
        flag = option.flag
        if isinstance(value, bool):
            if option.negated or not flag.takes_value or flag.kind == "truth":
                self._set(flag, value is not option.negated)
            else:
                self._set(flag, value if flag.nargs == "?" else self._value(flag, str(value)))
        elif isinstance(value, list) and flag.nargs is not None:
            self._several(flag, [_text(item) for item in value], head)
        elif isinstance(value, dict | list):
            self._set(flag, value)
        elif option.negated or not flag.takes_value:
            self._switch(option, head, str(value))
        else:
            self._set(flag, self._value(flag, _text(value)))


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)


def _merge(target: dict[str, Any], update: dict[str, Any]) -> None:
    """Later parts win, objects are merged, lists are joined."""
    for key, value in update.items():
        before = target.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            _merge(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            before.extend(value)
        else:
            target[key] = value


_MODEL_SETTINGS = ("--model", "--model-tag")
_NEWEST = "9999.0"  # beyond the last release looked at, so its flags
