"""The error that a user can cause."""

from __future__ import annotations

from typing import IO, Any

import click

OK, PROBLEM, USAGE, COULD_NOT_TELL = 0, 1, 2, 3


class Failure(click.ClickException):
    """An error that a user can cause: what happened, a hint what to do, and the exit code."""

    def __init__(self, message: str, hint: str | None = None, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", err=True)
        if self.hint:
            click.echo(f"hint: {self.hint}", err=True)
