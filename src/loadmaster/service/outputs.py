"""What an engine prints: passed on line by line, read for phases and failures, with secrets taken out."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from loadmaster.core.deployment import Deployment
from loadmaster.core.diagnosis import Diagnoser, Diagnosis, ExitSeen
from loadmaster.core.logfacts import LogReadings
from loadmaster.core.logreadings import FactsReader
from loadmaster.core.logtext import read_line
from loadmaster.core.secrets import HIDDEN, hide_in_text, is_secret_name
from loadmaster.engines.base import Engine
from loadmaster.service.keys import secrets_of_environment

_LONGEST_LINE = 64 * 1024
_SHORTEST_SECRET = 6  # shorter values stand in words of every log
_ENDS = re.compile(rb"[\r\n]")
_LAST_LINES = 40
_OWN_SIGNATURES = ("vllm", "llamacpp")  # any other program may print what any engine does


def secret_values(deployment: Deployment, api_key: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values that must not be shown, the longest first."""
    values = {value for name, value in deployment.engine.env.items() if is_secret_name(name)}
    values |= {value for name, value in environment.items() if is_secret_name(name)}
    if deployment.keys.environment is not None:
        given = environment.get(deployment.keys.environment, "")
        values |= {*given.replace(",", " ").split(), *(secret for _, secret in secrets_of_environment(given))}
    if api_key is not None:
        values.add(api_key)
    words = deployment.engine.flags
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if word.startswith("-") and is_secret_name(flag):
            values.add(value if equals else words[place + 1] if place + 1 < len(words) else "")
    return tuple(sorted((value for value in values if len(value) >= _SHORTEST_SECRET), key=len, reverse=True))


class Outputs:
    """Reads the pipe into which an engine and its children write, in a thread, until all of them have closed it.

    ``on_phase`` is called in that thread.
    """

    def __init__(self, engine: Engine, secrets: Iterable[str], on_phase: Callable[[str], None], sink: int = 1) -> None:
        self._engine = engine
        self._secrets = [value.encode() for value in secrets]
        self._on_phase = on_phase
        self._sink = sink
        self._rest = b""
        self._number = 0
        self._facts = FactsReader()
        self._diagnoser = Diagnoser(engine.name if engine.name in _OWN_SIGNATURES else None)
        self._lock = threading.Lock()
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._read, name="engine-output", daemon=True)

    def begin(self) -> None:
        """The engine has its end of the pipe: close ours, and read."""
        os.close(self.writer)
        self._thread.start()

    def abandon(self) -> None:
        """No engine was started."""
        os.close(self.writer)
        os.close(self._reader)

    def finish(self, timeout_s: float) -> None:
        """Wait until everything that was written is read, at most so long."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def readings(self) -> LogReadings:
        """Memory as the engine has printed it so far."""
        return self._facts.facts().readings

    def diagnosis(self, ended: ExitSeen | None = None) -> Diagnosis:
        """What the log says so far of why the engine ended, or does not answer; without secrets."""
        with self._lock:
            return self._diagnoser.close(ended)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._reader, 1 << 16)
            except OSError:
                break
            if not data:
                break
            self._take(data)
        if self._rest:
            self._line(self._rest, b"\n")
        with contextlib.suppress(OSError):
            os.close(self._reader)

    def _take(self, data: bytes) -> None:
        data = self._rest + data
        begin = 0
        for end in _ENDS.finditer(data):
            self._line(data[begin : end.start()], end.group())
            begin = end.end()
        self._rest = data[begin:]
        if len(self._rest) > _LONGEST_LINE:
            self._line(self._rest, b"\n")
            self._rest = b""

    def _line(self, raw: bytes, end: bytes) -> None:
        for secret in self._secrets:
            raw = raw.replace(secret, HIDDEN.encode())
        line = raw.decode("utf-8", "replace")
        shown = hide_in_text(line)
        # the reader of our output may be gone; the engine must not be stopped by that
        with contextlib.suppress(OSError):
            _write(self._sink, (raw if shown == line else shown.encode()) + end)
        number = self._number + 1  # a progress bar is written over within its line
        if end == b"\n":
            self._number = number
        with self._lock:
            self._diagnoser.feed(shown, number)
        if not shown.strip():
            return
        self.last.append(shown)
        self._facts.read(read_line(line))
        phase = self._engine.phase(line)
        if phase is not None:
            self._on_phase(phase)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
