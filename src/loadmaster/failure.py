"""The error that a user can cause."""

from __future__ import annotations

import click

OK, PROBLEM, USAGE, COULD_NOT_TELL = 0, 1, 2, 3


class Failure(Exception):
    """What happened, a hint what to do about it, and the exit code of the command."""

    def __init__(self, message: str, hint: str | None = None, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def show(self) -> None:
        from loadmaster.render.visible import visible

        click.echo(f"error: {visible(self.message, lines=True)}", err=True)
        if self.hint:
            click.echo(f"hint: {visible(self.hint, lines=True)}", err=True)
