"""Results to stdout, progress to stderr, and what the terminal can show."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from loadmaster.failure import PROBLEM, Failure

if TYPE_CHECKING:
    from loadmaster.render.paint import Paint


_state = {"written": False}


def begin_result() -> None:
    """Nothing of this command's result is on stdout yet."""
    _state["written"] = False


def result_begun() -> bool:
    return _state["written"]


def write_result(text: str) -> None:
    """Writes a part of the result. Raises :class:`Failure` when stdout takes none; a reader that has gone is none."""
    _state["written"] = True
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has gone: keep Python from complaining when it flushes again at exit
        close_stdout()
    except OSError as error:
        close_stdout()
        raise Failure(f"cannot write the result: {error.strerror or error}", exit_code=PROBLEM) from None


def close_stdout() -> None:
    """Sends what is still to be flushed nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminal_width() -> int:
    import shutil

    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        return 80
    return min(max(shutil.get_terminal_size((80, 24)).columns, 60), 120)


def terminal_paint() -> Paint:
    from loadmaster.render.paint import ansi, plain

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return ansi if coloured else plain


@contextmanager
def progress(shown: bool, label: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """A progress bar on stderr for work that takes more than a second; nothing where stderr is no terminal."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None)

        def report(done: int, total: int, name: str) -> None:
            bars.update(task, completed=done, total=total, description=f"{label} {name}")

        yield report


@contextmanager
def after_a_second(words: str) -> Iterator[None]:
    """One line on stderr when the work takes more than a second or so."""
    import threading

    timer = threading.Timer(1.5, lambda: sys.stderr.write(f"{words} ...\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}", exit_code=PROBLEM) from None
