"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from loadmaster.failure import Failure

_MOVING = ("latest", "nightly", "main", "dev")


class FlagsAfterDashes(click.Command):
    """A command whose last words are the engine's and follow ``--``; says so where the two dashes are missing.

    ``before_dashes`` and ``after_dashes``: an example of both sides.
    """

    def __init__(self, *arguments: Any, before_dashes: str, after_dashes: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before_dashes = before_dashes
        self.after_dashes = after_dashes

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            from loadmaster.core.flagtable import flag_table

            own = {name for option in self.params for name in option.opts}
            words = [word.partition("=")[0] for word in given[: given.index("--") if "--" in given else None]]
            flag = next((word for word in words if word in flag_table(None).options and word not in own), None)
            if flag is None:
                raise
            example = f"loadmaster {self.before_dashes} -- {self.after_dashes}"
            message = error.format_message() if flag in error.format_message() else f"No such option: {flag}"
            raise Failure(message, f"vLLM flags go after --: {example}") from None


def token_count(text: str) -> int:
    """A number of tokens as vLLM writes it: 32768, 32k (1000s), 32K (1024s). Raises :class:`click.BadParameter`."""
    found = re.fullmatch(r"(\d{1,15})([kKmM]?)", text.strip())
    if found is None or not int(found.group(1)):
        raise click.BadParameter(f"{text!r} is no number of tokens; write 32768, 32k (32,000) or 32K (32,768)")
    return int(found.group(1)) * {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[found.group(2)]


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")(command)


def engine_version_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--engine-version",
        metavar="V",
        callback=_engine_version,
        help="vLLM release, such as 0.24.0; the newest rules if left out.",
    )(command)


def _engine_version(ctx: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """A version that can be compared, or one of the names of a moving one."""
    if value is None or value.lower() in _MOVING or re.match(r"v?\d+\.\d+|b?\d{3,}$", value):
        return value
    raise click.BadParameter(f"{value!r} is no version; give a release such as 0.24.0, or leave it out")
