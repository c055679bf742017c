"""Ends an engine when run-engine was killed and could not: ``python -m loadmaster.service.guard``.

It reads, line by line, which engine runs. When the other end of the pipe is closed, run-engine has ended; what is left
of the engine is ended then, whoever supervises or does not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from loadmaster.core.deployment import RUN_VARIABLE
from loadmaster.edge.process import end
from loadmaster.service.enginestate import EngineRun

_TERM_S = 2.0
_CLEANUP_S = 30.0


class Guard:
    """The guard of one run-engine. It lives in a session of its own, so that signals for the others miss it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._run: EngineRun | None = None

    def watch(self, run: EngineRun | None) -> None:
        """Tell which engine runs now; None: none."""
        self._run = run
        if self._process is None or self._process.poll() is not None:
            self.close()
            environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "loadmaster.service.guard"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env=environment,
                )
            except OSError:
                return  # the next run-engine ends what is left, as it does after a guard was killed
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(msgspec.json.encode(run) + b"\n")
                self._process.stdin.flush()

    def keep(self) -> None:
        """Start another one when it was killed."""
        if self._process is not None and self._process.poll() is not None:
            self.watch(self._run)

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERM_S)
        self._process = None


def end_run(run: EngineRun, term_s: float = _TERM_S) -> bool:
    """End what is left of a run and remove what is no process. Whether nothing is left."""
    left = end(run.identity, term_s=term_s)
    clean_up(run.cleanup)
    return not left


def clean_up(argv: Sequence[str]) -> None:
    if argv:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=_CLEANUP_S, check=False)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run: EngineRun | None = None
    for line in sys.stdin.buffer:
        with contextlib.suppress(msgspec.MsgspecError):
            run = msgspec.json.decode(line, type=EngineRun | None)
    if run is not None:
        end_run(run)


if __name__ == "__main__":
    main()
