"""What failures look like in a log: one grammar for a finished log and for one that is being written.

The knowledge is data: ``core/data/signatures/FAMILY.toml``, one file a family of causes, read in the order of
:data:`FAMILIES`. A file has ``source`` (what the entries were compared with), ``[wordings]`` (names for lists of texts
that several signatures use) and ``[[signature]]`` entries::

    [wordings]
    out-of-memory = ["CUDA out of memory. Tried to allocate", "CUDA error: out of memory"]

    [[signature]]
    code = "oom-weights"                     # a code of findings.toml
    engines = ["vllm"]                       # vllm, sglang, lmdeploy, llamacpp; left out: any of them prints it
    versions = "0.6-0.33"                    # of the engine, as far as compared; for people
    texts = ["@out-of-memory"]               # any of them in the message
    pattern = 'allocate (?P<size>[\\d.]+ \\w+)'   # and this, if given; named groups go to ``says`` (see below)
    numbers = '(?P<total>[\\d.]+) GiB'       # optional: more named groups, no condition
    phases = ["", "loading"]                 # only while the start was in one of these ("": none was seen yet)
    frames = ["load_model"]                  # any of them in the traceback of the same process above the message,
    under = ["init_device"]                  #   and any of these
    unless = ["CPU"]                         # none of these in the message
    unless_frames = ["profile_run"]          # nor in the traceback
    stuck = true                             # only where the start went no further: no phase began after it
    group = "out-of-memory"                  # of one group, the first entry that holds for a message counts
    kind = "cause"
    yields_to = ["shm-too-small"]            # not reported where one of these codes was found, symptoms too
    severity = "warning"                     # left out: the catalogue's
    repeats = true                           # whether the same launch would fail with it again
    confidence = "likely"                    # left out: "certain", for a hint "likely"
    says = "Loading the weights asked for {size} more than was free."
    source = "vllm/model_executor/model_loader/base_loader.py"

``kind``:

``cause``    ends the start or the server, and names why.
``request``  a request was refused for this reason; the server lives on.
``hint``     points at a cause that no line names; counts only where no cause was found.
``symptom``  only says that something died or waits; counts only where nothing else was found.
``remark``   a warning, or a line that looks worse than it is; never makes a log a failed one.

Texts are compared without regard to case, blanks, line breaks and quotation marks, so that a wording that a terminal
has wrapped, an issue tracker has reformatted or JSON has escaped is still the same wording. ``pattern`` and
``numbers`` are regular expressions (ignoring case) on the message with its blanks as written, wrapped lines joined.
``frames`` and ``under`` are compared with traceback lines: file names, functions and source lines.

A sentence in ``says`` is used as the finding's cause when all of its groups were found; else the message itself is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Literal

from msgspec import Struct, convert

from loadmaster.core.facts import Confidence, Severity
from loadmaster.core.tables import load_toml

Kind = Literal["cause", "request", "hint", "symptom", "remark"]

FAMILIES = (
    "memory",
    "quantization",
    "files",
    "command",
    "images",
    "machine",
    "running",
    "sglang",
    "lmdeploy",
    "llamacpp",
)
_DROPPED = b" \t\r\n\f\v`'\"\\*"
_DROPPED_WIDE = tuple(char.encode() for char in "\u00a0\u200b‘’“”")
_ENTITIES = (b"&quot;", b"&#39;", b"&#x27;", b"&#34;")  # quotation marks of a log that was copied as HTML
_GROUP = re.compile(r"\{(\w+)\}")


class Signature(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wording of one cause; the fields are described in the module's text."""

    code: str
    texts: tuple[str, ...]
    source: str
    engines: tuple[str, ...] = ()
    versions: str | None = None
    pattern: str | None = None
    numbers: str | None = None
    phases: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    unless_frames: tuple[str, ...] = ()
    stuck: bool = False
    group: str | None = None
    kind: Kind = "cause"
    yields_to: tuple[str, ...] = ()
    severity: Severity | None = None
    repeats: bool = True
    confidence: Confidence | None = None
    says: str | None = None


class Family(Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    wordings: dict[str, tuple[str, ...]] = {}
    signature: tuple[Signature, ...] = ()


class Hit(Struct, frozen=True):
    """A signature that holds for a message. ``values``: what its named groups caught."""

    signature: Signature
    values: dict[str, str]

    @property
    def sentence(self) -> str | None:
        """``says`` with its numbers; None where one of them was not caught."""
        said = self.signature.says
        if said is None or any(name not in self.values for name in _GROUP.findall(said)):
            return None
        return _GROUP.sub(lambda found: self.values[found.group(1)], said)


@cache
def family(name: str) -> Family:
    """``core/data/signatures/NAME.toml``, with the names of wordings replaced by their texts."""
    read = convert(load_toml(f"signatures/{name}.toml"), Family)
    entries = tuple(_expanded(entry, read.wordings) for entry in read.signature)
    return Family(read.source, read.wordings, entries)


@cache
def signatures(engine: str | None = None) -> tuple[Signature, ...]:
    """All that ``engine`` may print, in the order of the files; None: of every engine."""
    every = (entry for name in FAMILIES for entry in family(name).signature)
    return tuple(entry for entry in every if engine is None or not entry.engines or engine in entry.engines)


def squeezed(text: str) -> str:
    """The text as texts are compared: lower case, no blanks, no quotation marks."""
    return squeezed_bytes(text.encode("utf-8", "replace")).decode()


def squeezed_bytes(text: bytes) -> bytes:
    """The same for UTF-8."""
    text = text.lower().translate(None, _DROPPED)
    if b"&" in text:
        for entity in _ENTITIES:
            text = text.replace(entity, b"")
    if not text.isascii():
        for char in _DROPPED_WIDE:
            text = text.replace(char, b"")
    return text


class Match(Struct, frozen=True):
    """``hits``: the signatures that hold. ``waiting``: those whose ``pattern`` may come with the next line."""

    hits: tuple[Hit, ...] = ()
    waiting: tuple[Signature, ...] = ()


class Matcher:
    """Finds the signatures that hold for a message."""

    def __init__(self, engine: str | None = None) -> None:
        self._rules = tuple(_Rule(entry) for entry in signatures(engine))
        by_text: dict[str, list[tuple[int, _Rule]]] = {}
        for place, rule in enumerate(self._rules):
            for text in rule.texts:
                by_text.setdefault(text, []).append((place, rule))
        self._by_text = tuple(by_text.items())
        self._longest = max((len(text) for text in by_text), default=1)

    def match(
        self,
        text: str,
        *,
        before: str = "",
        rest: bool = False,
        phase: str | None,
        frames: Iterable[str],
        source: str = "",
    ) -> Match:
        """``before``: what the same process wrote before; a wording may begin there, but ends in ``text``.

        ``rest``: the text goes on from there, as far as can be seen. ``frames``: the traceback above; ``source``: the
        file that wrote the line, which counts as a frame.
        """
        new = squeezed(text)
        old = squeezed(before)[-self._longest :] if before else ""
        whole = old + new
        found: dict[int, _Rule] = {}
        for wording, rules in self._by_text:
            if wording in whole and (not old or whole.rfind(wording) + len(wording) > len(old)):
                found.update(rules)
        if not found:
            return _NONE
        above = (*frames, source) if source else tuple(frames)
        messages = (text,) if not before else (text, *joined(before, text))
        hits: list[Hit] = []
        waiting: list[Signature] = []
        groups: set[str] = set()
        for _, rule in sorted(found.items()):
            group = rule.signature.group
            if (group is not None and group in groups) or not rule.holds(whole if rest else new, phase or "", above):
                continue
            values = rule.values(messages)
            if values is None:
                waiting.append(rule.signature)
                continue
            hits.append(Hit(rule.signature, values))
            if group is not None:
                groups.add(group)
        return Match(tuple(hits), tuple(waiting))

    @property
    def wordings(self) -> tuple[str, ...]:
        """Every text that is looked for."""
        return tuple(text for rule in self._rules for text in rule.signature.texts)

    def completed(self, signature: Signature, message: str) -> Hit | None:
        """The hit of a waiting signature, or of one with more of its numbers, now that the message is longer."""
        rule = next(rule for rule in self._rules if rule.signature is signature)
        values = rule.values((message, *joined("", message)))
        return None if values is None else Hit(signature, values)


@cache
def matcher(engine: str | None = None) -> Matcher:
    """One for all readers of an engine's logs: it keeps nothing of what it reads."""
    return Matcher(engine)


class _Rule:
    """A signature made ready for comparison."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.texts = tuple(squeezed(text) for text in signature.texts)
        self._unless = tuple(squeezed(text) for text in signature.unless)
        self._pattern = re.compile(signature.pattern, re.IGNORECASE) if signature.pattern else None
        self._numbers = re.compile(signature.numbers, re.IGNORECASE) if signature.numbers else None

    def holds(self, text: str, phase: str, frames: Sequence[str]) -> bool:
        """Whether all but the pattern holds. ``text``: the message as it is compared."""
        entry = self.signature
        if entry.phases and phase not in entry.phases:
            return False
        if any(part in text for part in self._unless):
            return False
        if any(parts and not _any_in(parts, frames) for parts in (entry.frames, entry.under)):
            return False
        return not (entry.unless_frames and _any_in(entry.unless_frames, frames))

    def values(self, messages: Sequence[str]) -> dict[str, str] | None:
        """What the named groups caught in the first message that has them; None where the pattern is in none."""
        values: dict[str, str] = {}
        if self._pattern is not None:
            found = _first(self._pattern, messages)
            if found is None:
                return None
            values |= _caught(found)
        if self._numbers is not None and (found := _first(self._numbers, messages)) is not None:
            values |= _caught(found)
        return values


def joined(before: str, text: str) -> tuple[str, str]:
    """A message in several lines as one: broken between words, and broken anywhere."""
    whole = f"{before}\n{text}" if before else text
    return whole.replace("\n", " "), whole.replace("\n", "")


def _first(pattern: re.Pattern[str], messages: Sequence[str]) -> re.Match[str] | None:
    return next((found for message in messages if (found := pattern.search(message)) is not None), None)


_NONE = Match()


def _caught(found: re.Match[str]) -> dict[str, str]:
    return {name: value for name, value in found.groupdict().items() if value is not None}


def _any_in(parts: Iterable[str], frames: Iterable[str]) -> bool:
    return any(part in frame for frame in frames for part in parts)


def _expanded(entry: Signature, wordings: Mapping[str, tuple[str, ...]]) -> Signature:
    if not any(text.startswith("@") for text in entry.texts):
        return entry
    texts = [part for text in entry.texts for part in (wordings[text[1:]] if text.startswith("@") else (text,))]
    values = {name: getattr(entry, name) for name in entry.__struct_fields__}
    return Signature(**(values | {"texts": tuple(texts)}))
