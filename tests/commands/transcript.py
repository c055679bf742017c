"""Runs commands as the command line does, and keeps what a terminal of 80 columns would show."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

import click
from msgspec import Struct

from loadmaster.failure import Failure


class Transcript(Struct):
    code: int
    out: str
    err: str

    def without(self, **texts: str) -> tuple[int, str, str]:
        """As a tuple, with each of these texts replaced by its name in capitals."""
        out, err = self.out, self.err
        for name, text in texts.items():
            out, err = out.replace(text, name.upper()), err.replace(text, name.upper())
        return self.code, out, err


def run(command: click.Command, arguments: Sequence[str], program: str) -> Transcript:
    """The command as ``loadmaster PROGRAM ARGUMENTS``, with no terminal anywhere."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    stdin, sys.stdin = sys.stdin, io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            try:
                command.main(list(arguments), prog_name=f"loadmaster {program}", standalone_mode=False)
            except (Failure, click.ClickException) as error:
                error.show()
                code = error.exit_code
            except click.Abort:
                code = 130
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else 0
    finally:
        sys.stdin = stdin
    return Transcript(code, out.getvalue(), err.getvalue())
