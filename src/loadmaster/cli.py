"""The command table, and the only place where errors become exit codes.

Exit codes: 0 fits, passed, healthy; 1 does not fit, failed, a problem was found; 2 wrong usage;
3 could not tell. Results go to stdout, all else to stderr. A command's module is imported when the
command runs, so that ``--help`` works at once, offline and without a GPU.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence

import click

from loadmaster import __version__
from loadmaster.failure import COULD_NOT_TELL, PROBLEM, USAGE, Failure
from loadmaster.terminal import begin_result, close_stdout, result_begun, write_result

# name -> (module, what it does in one line); the module has a click command of the same name
TABLE = {
    "inspect": ("inspect", "Read a checkpoint: what it is, what each part weighs, whether it is whole"),
    "plan": ("plan", "The load sheet: where each card's memory goes, and whether it fits"),
    "check": ("check", "The checklist before launch: read a command as people paste it"),
    "diagnose": ("diagnose", "What an engine's log really says: the root cause, and fixes"),
    "gpus": ("gpus", "The cards of this machine, or of a specification"),
    "demo": ("demo", "A tiny model served on this machine: no GPU, no network"),
    "init": ("deployments", "Write the configuration of a deployment"),
    "fetch": ("fetch", "Plan a model, check the disk, then download it"),
    "engine": ("engine", "Install, list and remove vLLM in environments of its own"),
    "up": ("serve", "Start a deployment under supervision and wait until it truly answers"),
    "verify": ("verify", "Prove end to end that a service sees and answers"),
    "status": ("serve", "What is true now: engine, gateway and supervisor of a deployment, or of all"),
    "runs": ("runs", "What was planned and what was really held, run by run"),
    "watch": ("watch", "Cards and engine together, now: planned, reached, left"),
    "logs": ("serve", "The log of the engine and of what supervises it"),
    "restart": ("serve", "Stop a deployment and start it again with its configuration as it is now"),
    "down": ("serve", "Stop a deployment and everything that it started"),
    "list": ("listing", "The deployments side by side"),
    "config": ("deployments", "Every value of a deployment's configuration and where it comes from"),
    "keys": ("keys", "The keys of a gateway"),
    "remove": ("deployments", "Remove a deployment and everything that it left"),
    "doctor": ("doctor", "Look at this machine, and write a report to paste into a bug"),
    "completion": ("deployments", "Shell completion for bash, zsh or fish"),
}
# what supervisor runs; not listed
HIDDEN = {
    "run-engine": ("serve", "Run the engine of a deployment"),
    "run-web": ("serve", "Run the gateway of a deployment"),
}


_OUTPUT_ERRORS = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EFBIG, errno.EDQUOT)


class Table(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(TABLE)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = TABLE.get(cmd_name) or HIDDEN.get(cmd_name)
        if found is None:
            return None
        module = importlib.import_module(f"loadmaster.commands.{found[0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in TABLE and name not in HIDDEN:
            from difflib import get_close_matches

            near = get_close_matches(name, TABLE, 1)
            ctx.fail(f"no command {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in TABLE.items()])


@click.command(cls=Table, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="loadmaster")
def commands() -> None:
    """Weight and balance for vision-language models on your own GPUs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    words = list(arguments) if arguments is not None else sys.argv[1:]
    begin_result()
    try:
        commands.main(words, prog_name="loadmaster", standalone_mode=False)
    except (Failure, click.ClickException) as error:
        show(error)
        asked = words[: words.index("--")] if "--" in words else words
        if "--json" in asked and error.exit_code in (USAGE, COULD_NOT_TELL) and not result_begun():
            show_as_json(error)
        sys.exit(error.exit_code)
    except OSError as error:
        # help and version are written by click itself
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        close_stdout()
        if error.errno != errno.EPIPE:
            Failure(f"cannot write the result: {error.strerror}").show()
        sys.exit(PROBLEM)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)


def show(error: Failure | click.ClickException) -> None:
    """The error on stderr; the words of the command line in it are made visible."""
    if isinstance(error, Failure):
        error.show()
        return
    from io import StringIO

    from loadmaster.render.visible import visible

    text = StringIO()
    error.show(text)
    click.echo(visible(text.getvalue(), lines=True), nl=False, err=True)


def show_as_json(error: Failure | click.ClickException) -> None:
    """The error on stdout too, for the program that reads the result."""
    from loadmaster.render.documents import encode, error_document

    message = error.message if isinstance(error, Failure) else error.format_message()
    write_result(encode(error_document(message, error.hint if isinstance(error, Failure) else None)))


if __name__ == "__main__":
    main()
