"""The program that holds llama.cpp: loads one GGUF model, serves it on one address, ends on SIGTERM.

    python -m loadmaster.engines.llamacpp_server --model FILE --port N [--mmproj FILE] [--set NAME=VALUE ...]

A process of its own because the engine holds the interpreter's lock while it loads, and says why it failed on stderr
alone. Standard library and xllamacpp only: it also runs as a file, under an interpreter that has no loadmaster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FAILED, USAGE = 1, 2
_PARENT_EVERY_S = 1.0
_SIGNAL_EVERY_S = 0.2
_TRUE, _FALSE = ("true", "1", "on", "yes"), ("false", "0", "off", "no")


class SettingError(Exception):
    """A ``--set`` that the engine's parameters cannot take."""


def say(text: str) -> None:
    sys.stderr.write(f"loadmaster: {text}\n")
    sys.stderr.flush()


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llamacpp_server", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mmproj")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    return parser.parse_args(words)


def processors() -> int:
    """Processors that this process may use: the affinity, less where the container's quota is smaller."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:
        usable = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            usable = min(usable, max(1, int(quota) // int(period)))
    return max(1, usable)


def put(parameters: Any, name: str, text: str, engine: Any) -> None:
    """Set one field, named with dots, to the value that the text means for the field's type."""
    *owners, field = name.split(".")
    try:
        for owner in owners:
            parameters = getattr(parameters, owner)
        now = getattr(parameters, field)
    except AttributeError as error:
        raise SettingError(f"the engine has no parameter {name!r}") from error
    try:
        setattr(parameters, field, _value(now, text, engine))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise SettingError(f"{name}={text}: {error}") from error


def _value(now: Any, text: str, engine: Any) -> Any:
    if isinstance(now, bool):
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError("has to be true or false")
    if isinstance(now, str):
        return text
    if isinstance(now, float):
        return float(text)
    if isinstance(now, (set, list)):
        return type(now)([text])
    if hasattr(engine, type(now).__name__):  # an enumeration
        return getattr(getattr(engine, type(now).__name__), text)
    return int(text)


def build(options: argparse.Namespace, engine: Any) -> Any:
    """The engine's parameters: what was asked for, on top of what a server behind a gateway needs."""
    parameters = engine.CommonParams()
    parameters.model.path = options.model
    if options.mmproj:
        parameters.mmproj.path = options.mmproj
    parameters.hostnames = [options.host]
    parameters.port = options.port
    parameters.model_alias = {options.alias}
    parameters.n_parallel = -1  # as llama-server: slots that share one cache
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = False  # it shows the prompts of others
    parameters.ui = False
    parameters.offline = True
    parameters.cors_origins = f"http://{options.host}:{options.port}"  # by default every page may ask
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = processors()
    for setting in options.set:
        name, equals, text = setting.partition("=")
        if not equals:
            raise SettingError(f"--set {setting}: has to be NAME=VALUE")
        put(parameters, name, text, engine)
    return parameters


def follow_parent(parent: int) -> None:
    """End when the process that started this one has gone: nobody would stop it any more."""
    while os.getppid() == parent:
        time.sleep(_PARENT_EVERY_S)
    say("the process that started the engine has gone")
    os._exit(0)


def load_library() -> Any:
    try:
        import xllamacpp
    except ImportError as error:
        if "libgomp" in str(error):
            say("error: the system library libgomp.so.1 is missing")
            say("hint: install it: apt-get install libgomp1, or dnf install libgomp")
        else:
            say(f"error: the engine llama.cpp cannot be loaded: {error}")
            say("hint: install it with: pip install 'loadmaster[cpu]'")
        raise SystemExit(USAGE) from error
    return xllamacpp


def let_the_log_end(quiet_s: float = 0.4, most_s: float = 5.0) -> None:
    """Return once nothing more is written to stderr: the engine logs from a thread that an exit would cut off."""
    began = since = time.monotonic()
    size = -1
    while time.monotonic() - since < quiet_s and time.monotonic() - began < most_s:
        now = os.fstat(2).st_size  # of a pipe always 0: then this waits once
        if now != size:
            size, since = now, time.monotonic()
        time.sleep(0.02)


def main(words: Sequence[str] | None = None) -> int:
    parent = os.getppid()
    options = arguments(sys.argv[1:] if words is None else words)
    for what, path in (("model", options.model), ("projector", options.mmproj)):
        if path and not Path(path).is_file():
            say(f"error: there is no {what} at {path!r}")
            return USAGE
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when the library is loaded
    engine = load_library()
    try:
        parameters = build(options, engine)
    except SettingError as error:
        say(f"error: {error}")
        return USAGE
    threading.Thread(target=follow_parent, args=(parent,), daemon=True).start()
    # no handler of Python's runs while the engine loads; the default ends the process at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    say(f"loading {options.model}")
    try:
        server = engine.Server(parameters)
    except Exception as error:  # a RuntimeError for every cause
        let_the_log_end()
        say(f"error: the engine did not start ({error}); what it said stands above")
        return FAILED
    say(f"listening on {server.listening_address}")
    ending: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: ending.append(received))
    while not ending:  # a signal that another thread takes wakes nobody here
        time.sleep(_SIGNAL_EVERY_S)
    say(f"ending on {signal.Signals(ending[0]).name}")
    # taking the engine apart waits for requests that run; leaving drops them
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
