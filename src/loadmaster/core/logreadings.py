"""Reads the facts of a launch out of its log: version, arguments, model, backends, memory per rank.

The wordings are data: ``core/data/log-readings.toml``.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from msgspec import Struct, convert
from msgspec.structs import fields, replace

from loadmaster.core.argv import launch_from_settings, normalise_argv
from loadmaster.core.facts import GIB, KIB, MIB, EngineFacts, LaunchArgs
from loadmaster.core.logarguments import is_whole, read_arguments
from loadmaster.core.logfacts import LogFacts, LogReadings
from loadmaster.core.logtext import LogLine
from loadmaster.core.secrets import HIDDEN, is_secret_name
from loadmaster.core.signatures import joined
from loadmaster.core.tables import load_toml

_UNITS = {"bytes": 1, "kib": KIB, "mib": MIB, "gib": GIB, "gb": GIB, "tib": 1024 * GIB}
_SIZE = re.compile(r"(-?[\d.]+) ?(\w+)?")
_RANK = re.compile(r"(?:^|[ _])(DP|PP|TP)(\d+)|\brank ?=?(\d+)")
_OLD_BLOCK = 16
_MOST_RANKS = 1024
_LONGEST_ARGUMENTS = 64_000
_RANKED = ("model_loading_bytes", "kv_available_bytes")
_PLAIN = tuple(item.name for item in fields(LogReadings) if item.name not in (*_RANKED, "kv_available_per_rank"))


class _Reading(Struct, frozen=True, forbid_unknown_fields=True):
    texts: tuple[str, ...]
    pattern: str
    source: str
    ranks: bool = False
    last: bool = False


class _Version(Struct, frozen=True, forbid_unknown_fields=True):
    engine: str
    texts: tuple[str, ...]
    pattern: str
    source: str


class _Engine(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    texts: tuple[str, ...]


class _Backend(Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    texts: tuple[str, ...]
    pattern: str
    source: str
    unless: tuple[str, ...] = ()


class _Mark(Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    engine: str
    whole: bool


class _Arguments(Struct, frozen=True, forbid_unknown_fields=True):
    marks: tuple[_Mark, ...]
    configuration: tuple[str, ...]
    configuration_mark: str
    defaults: dict[str, Any]


class _Table(Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    reading: tuple[_Reading, ...]
    version: tuple[_Version, ...]
    engine: tuple[_Engine, ...]
    backend: tuple[_Backend, ...]
    arguments: _Arguments


@cache
def _table() -> _Table:
    return convert(load_toml("log-readings.toml"), _Table)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def texts_of_facts() -> tuple[str, ...]:
    """Texts of which a line has one if it tells a fact."""
    table = _table()
    told = [*(entry.texts for entry in table.reading), *(entry.texts for entry in table.version)]
    told += [*(entry.texts for entry in table.engine), *(entry.texts for entry in table.backend)]
    marked = [*(mark.text for mark in table.arguments.marks), *table.arguments.configuration]
    return (*(text for texts in told for text in texts), *marked)


class FactsReader:
    """Collects the facts of one start."""

    def __init__(self) -> None:
        self.engine: str | None = None
        self.version: str | None = None
        self._values: dict[str, float] = {}
        self._ranks: dict[str, dict[tuple[int, int, int], int]] = {name: {} for name in _RANKED}
        self._speakers: dict[str, int] = {}
        self._backends: dict[str, str] = {}
        self._arguments: dict[str, Any] = {}
        self._configuration: dict[str, Any] = {}
        self._blocks: int | None = None
        self._open: tuple[str, str] | None = None  # arguments that go on in the next line: (mark, text)

    def read(self, line: LogLine, before: str = "") -> bool:
        """Whether the line told anything. ``before``: the text that it goes on from, if it is a rest of something."""
        if self._open is not None and not line.headed:
            return self._go_on(line.text)
        self._open = None
        told = self._engine_and_version(line.text)
        told |= self._readings(line.text, line.speaker)
        if not told and before:
            told = any(self._readings(text, line.speaker) for text in joined(before, line.text))
        told |= self._backend(line.text)
        return self._printed_arguments(line.text) or told

    @property
    def expects_more(self) -> bool:
        """Whether arguments were begun whose end has not come."""
        return self._open is not None

    def facts(self) -> LogFacts:
        """Counts, phases and how far it came are the caller's."""
        launch = self._launch()
        configured = self._configuration
        flags = launch.flags if launch is not None else {}

        def size(name: str) -> int | None:
            value = configured.get(name, flags.get("--" + name.replace("_", "-")))
            return value if isinstance(value, int) and not isinstance(value, bool) else None

        quantization = configured.get("quantization") or flags.get("--quantization")
        model = configured.get("model") or (launch.model if launch is not None else None)
        tensor, pipeline = size("tensor_parallel_size"), size("pipeline_parallel_size")
        return LogFacts(
            engine=EngineFacts(self.engine or "vllm", self.version),  # type: ignore[arg-type]
            launch=launch,
            model=model if isinstance(model, str) else None,
            quantization=str(quantization) if quantization else None,
            backends=dict(self._backends),
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            data_parallel_size=size("data_parallel_size"),
            readings=self._all_readings((tensor or 1) * (pipeline or 1)),
        )

    def _engine_and_version(self, text: str) -> bool:
        told = False
        table = _table()
        if self.engine is None:
            for engine in table.engine:
                if any(part in text for part in engine.texts):
                    self.engine, told = engine.name, True
                    break
        for version in table.version:
            if any(part in text for part in version.texts):
                found = _compiled(version.pattern).search(text)
                if found is not None and (self.version is None or self.engine in (None, version.engine)):
                    self.engine = self.engine or version.engine
                    if self.engine == version.engine:
                        self.version = found["version"].rstrip(".,-)")
                    told = True
        return told

    def _readings(self, text: str, speaker: str) -> bool:
        told = False
        for reading in _table().reading:
            if not any(part in text for part in reading.texts):
                continue
            found = _compiled(reading.pattern).search(text)
            if found is None:
                continue
            told = True
            for name, value in found.groupdict().items():
                if value is not None:
                    self._keep(name, value, reading, speaker)
        return told

    def _keep(self, name: str, text: str, reading: _Reading, speaker: str) -> None:
        if name == "blocks":
            self._blocks = int(text)
            return
        value = _number(name, text)
        if value is None or (name == "graph_bytes" and value < 0):  # printed where memory was freed meanwhile
            return
        if name in _RANKED and reading.ranks:
            if len(self._ranks[name]) < _MOST_RANKS:
                self._ranks[name][self._rank(speaker)] = int(value)
        elif reading.last or name not in self._values:
            self._values[name] = value

    def _rank(self, speaker: str) -> tuple[int, int, int]:
        """Data, pipeline and tensor rank as the process names itself, else by the order in which processes spoke."""
        named = {kind or "TP": int(number or rank) for kind, number, rank in _RANK.findall(speaker)}
        if named:
            return (named.get("DP", 0), named.get("PP", 0), named.get("TP", 0))
        return (0, 0, self._speakers.setdefault(speaker, len(self._speakers)))

    def _all_readings(self, world: int) -> LogReadings:
        values: dict[str, Any] = {}
        for name in _PLAIN:
            if name in self._values:
                value = self._values[name]
                values[name] = value if name == "max_concurrency" else int(value)
        if "kv_tokens" not in values and self._blocks is not None:
            block = self._arguments.get("block_size") or self._configuration.get("block_size") or _OLD_BLOCK
            values["kv_tokens"] = self._blocks * (block if isinstance(block, int) else _OLD_BLOCK)
        loading = _in_order(self._ranks["model_loading_bytes"], world)
        available = _in_order(self._ranks["kv_available_bytes"], world)
        said = [value for value in available if value is not None]
        return LogReadings(
            model_loading_bytes=loading,
            kv_available_bytes=min(said) if said else None,
            kv_available_per_rank=available,
            **values,
        )

    def _backend(self, text: str) -> bool:
        for backend in _table().backend:
            if not any(part in text for part in backend.texts) or any(part in text for part in backend.unless):
                continue
            found = _compiled(backend.pattern).search(text)
            name = next((value for value in found.groups() if value), None) if found is not None else None
            if name is not None:
                self._backends.setdefault(backend.what, name.strip())
                return True
        return False

    def _printed_arguments(self, text: str) -> bool:
        table = _table().arguments
        for mark in table.marks:
            place = text.find(mark.text)
            if place >= 0:
                begin = place + len(mark.text) - (1 if mark.text.endswith("(") else 0)
                self._begin(mark.text, text[begin:])
                return True
        if table.configuration_mark in text and any(part in text for part in table.configuration):
            self._begin(table.configuration_mark, text.split(table.configuration_mark, 1)[1])
            return True
        return False

    def _begin(self, mark: str, text: str) -> None:
        self._take(mark, text)
        self._open = None if is_whole(text) else (mark, text)

    def _go_on(self, text: str) -> bool:
        mark, before = self._open or ("", "")
        joined = before + text
        self._open = None
        if len(joined) > _LONGEST_ARGUMENTS:
            return False
        self._take(mark, joined)
        if not is_whole(joined):
            self._open = (mark, joined)
        return True

    def _take(self, mark: str, text: str) -> None:
        table = _table().arguments
        read = read_arguments(text)
        known = next((entry for entry in table.marks if entry.text == mark), None)
        if known is None:
            self._configuration = read
            return
        self.engine = self.engine or known.engine
        if known.whole:
            read = {
                name: value
                for name, value in read.items()
                if name in ("model", "model_tag", "model_path")
                or (name in table.defaults and value not in (None, table.defaults[name]))
            }
        self._arguments = {
            name: HIDDEN if is_secret_name("--" + name.replace("_", "-")) else value for name, value in read.items()
        }

    def _launch(self) -> LaunchArgs | None:
        """The launch that the printed arguments mean; the engine itself put some of them there."""
        if not self._arguments:
            return None
        settings = dict(self._arguments)
        model = settings.pop("model_tag", None)
        model = settings.pop("model", None) or settings.pop("model_path", None) or model
        if self.engine not in (None, "vllm"):
            words = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
            argv = [word for name, value in words.items() for word in ([name] if value is True else [name, str(value)])]
            return LaunchArgs(model=_text(model), flags=words, argv=tuple(argv), engine_version=self.version)
        named = settings.get("served_model_name")
        if named in (model, [model], None):
            settings.pop("served_model_name", None)
        for name, value in list(settings.items()):
            if value is None:
                del settings[name]
        read = replace(launch_from_settings(settings, engine_version=self.version), model=_text(model), kind="argv")
        return replace(read, argv=normalise_argv(read))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(name: str, text: str) -> float | None:
    found = _SIZE.fullmatch(text.replace(",", ""))
    if found is None:
        return None
    try:
        value = float(found[1])
    except ValueError:
        return None
    if not name.endswith("_bytes"):
        return value
    unit = _UNITS.get((found[2] or "GiB").lower())
    return None if unit is None else round(value * unit)


def _in_order(ranks: dict[tuple[int, int, int], int], world: int) -> tuple[int | None, ...]:
    """By data, pipeline and tensor rank; None for the ranks of ``world`` that said nothing."""
    if not ranks:
        return ()
    pipelines, tensors = (max(rank[place] for rank in ranks) + 1 for place in (1, 2))
    by_place = {(data * pipelines + pipe) * tensors + tensor: value for (data, pipe, tensor), value in ranks.items()}
    size = min(max(max(by_place) + 1, world), _MOST_RANKS)
    return tuple(by_place.get(place) for place in range(size))
