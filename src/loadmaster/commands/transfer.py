"""How far a long transfer is: a bar where stderr is a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from loadmaster.edge.hashes import Progress

LINE_EVERY_S = 15.0
GIB = 1 << 30


@contextmanager
def transfer_progress(label: str) -> Iterator[Progress]:
    """Gives a function of bytes done, bytes in all and a file's name; it may be called from any thread."""
    if sys.stderr.isatty():
        from loadmaster.terminal import progress

        with progress(True, label) as report:
            yield report or (lambda done, total, name: None)
    else:
        yield lines(label, lambda text: click.echo(text, err=True))


def lines(label: str, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Progress:
    """Progress as lines: one every quarter of a minute, and one for everything that is not a plain file name."""
    last = clock()
    said = ""

    def report(done: int, total: int, name: str) -> None:
        nonlocal last, said
        waits = ": " in name and name != said
        if waits or clock() - last >= LINE_EVERY_S:
            last, said = clock(), name
            write(f"{label} {done / GIB:.2f} of {total / GIB:.2f} GiB  {name}")

    return report
