"""loadmaster runs"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from loadmaster.commands.deploymentname import DeploymentName
from loadmaster.commands.options import json_option
from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, USAGE, Failure
from loadmaster.terminal import terminal_paint, terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.edge.runquery import RunQuery
    from loadmaster.edge.runstore import RunStore
    from loadmaster.render.runs import ShownRun


class _NameOrCommand(click.Group):
    """A group whose first word is one of its commands, or else the name of a deployment for ``list``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        records = [param.get_help_record(ctx) for param in self.commands["list"].params]
        with formatter.section("Options of the list"):
            formatter.write_dl([record for record in records if record is not None])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not any(word in self.commands for word in args) and not any(word in ("-h", "--help") for word in args):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_NameOrCommand, subcommand_metavar="[NAME] | COMMAND [ARGS]...")
def runs() -> None:
    """The starts of engines that were kept: what was planned and what was really held.

    Without a command, lists the runs of all deployments, or of NAME.
    """


@runs.command(name="list")
@click.argument("name", type=DeploymentName(), required=False)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, metavar="N", help="The newest N.")
@json_option
def list_(name: str | None, limit: int, as_json: bool) -> None:
    """The runs, the newest first."""
    import time

    from loadmaster.render.documents import encode
    from loadmaster.render.runs import runs_document, runs_text
    from loadmaster.service.runningruns import running_among

    with _run_errors(as_json):
        query = _query()
        kept = [(run, query.reconciliations(run.number)) for run in query.runs(name, limit)]
        running = running_among([run for run, _ in kept])
    if as_json:
        write_result(encode(runs_document(kept, running)))
    elif kept:
        write_result(runs_text(kept, running, time.time(), terminal_width()) + "\n")
    else:
        of = f" of {name}" if name is not None else ""
        click.echo(f"no runs{of} are kept yet; loadmaster up NAME begins one", err=True)
    sys.exit(OK)


@runs.command()
@click.argument("number", type=click.IntRange(min=1), metavar="N")
@click.argument("other", type=click.IntRange(min=1), metavar="[M]", required=False)
@json_option
def show(number: int, other: int | None, as_json: bool) -> None:
    """Run N, its plan against what was held; with M, what differs between the two."""
    from loadmaster.render.documents import encode
    from loadmaster.render.runs import compared_document, compared_text, run_document, run_text

    with _run_errors(as_json):
        query = _query()
        first = _shown(query, number)
        second = None if other is None else _shown(query, other)
    if second is None:
        text = encode(run_document(first)) if as_json else run_text(first, terminal_width(), terminal_paint()) + "\n"
    elif as_json:
        text = encode(compared_document(first, second))
    else:
        text = compared_text(first, second, terminal_width(), terminal_paint()) + "\n"
    write_result(text)
    sys.exit(OK)


@runs.command()
@click.argument("numbers", type=click.IntRange(min=1), metavar="N...", nargs=-1, required=True)
@json_option
def drop(numbers: tuple[int, ...], as_json: bool) -> None:
    """Forget runs; what was learnt from them is then not learnt any more."""
    from loadmaster.render.documents import SCHEMA, encode

    with _run_errors(as_json):
        query = _query()
        for number in numbers:
            if query.run(number) is None:
                raise _no_run(number)
        with _store() as store:
            for number in numbers:
                if not store.drop(number):
                    raise Failure(store.problem or f"run {number} cannot be dropped now", exit_code=PROBLEM)
    if as_json:
        write_result(encode({"schema": SCHEMA, "dropped": list(numbers)}))
    else:
        click.echo(f"dropped: {', '.join(map(str, numbers))}", err=True)
    sys.exit(OK)


@runs.command()
@click.option("--drop", "key", metavar="KEY", help="Forget one of them: later runs alone can teach it again.")
@click.option("--drop-all", is_flag=True, help="Forget all of them.")
@json_option
def calibration(key: str | None, drop_all: bool, as_json: bool) -> None:
    """What agreeing runs on this machine have taught the plan, and how to undo it."""
    import shlex
    import time

    from loadmaster.core.learning import learn
    from loadmaster.edge.learnt import read_samples
    from loadmaster.render.documents import encode
    from loadmaster.render.runs import calibration_document, calibration_text

    if key is not None and drop_all:
        raise Failure("--drop and --drop-all exclude each other")
    with _run_errors(as_json):
        query = _query()
        samples = read_samples(query)
        learnt = learn(samples, query.forgotten())
        dropped = [one.key for one in learnt if drop_all or one.key == key]
        if key is not None and not dropped:
            raise Failure(f"nothing was learnt as {key}", "loadmaster runs calibration lists the keys")
        if dropped:
            with _store() as store:
                for one in dropped:
                    if not store.forget_calibration(one, time.time()):
                        raise Failure(store.problem or f"{one} cannot be dropped now", exit_code=PROBLEM)
            learnt = tuple(one for one in learnt if one.key not in dropped)
    if as_json:
        write_result(encode(calibration_document(learnt, dropped)))
    else:
        for one in dropped:
            click.echo(f"dropped: {shlex.quote(one)}", err=True)
        if learnt:
            write_result(calibration_text(learnt, terminal_width()) + "\n")
        elif not dropped:
            click.echo(
                "nothing is learnt yet: it takes three runs of the same model, version and cards that agree", err=True
            )
    sys.exit(OK)


@contextmanager
def _run_errors(as_json: bool) -> Iterator[None]:
    """Say what is wrong; with ``--json`` as an object as well. A file that cannot be read leaves the answer open."""
    from loadmaster.edge.runquery import RunsUnreadable
    from loadmaster.edge.statehome import StateError, WriteError

    try:
        try:
            yield
        except RunsUnreadable as error:
            raise Failure(str(error), error.hint, COULD_NOT_TELL) from None
        except StateError as error:
            raise Failure(error.message, error.hint, PROBLEM if isinstance(error, WriteError) else USAGE) from None
    except Failure as failure:
        if as_json:
            from loadmaster.render.documents import encode, error_document

            write_result(encode(error_document(failure.message, failure.hint)))
        raise


@contextmanager
def _store() -> Iterator[RunStore]:
    from loadmaster.edge.learnt import runs_file
    from loadmaster.edge.runstore import RunStore

    store = RunStore(runs_file(), "")
    try:
        yield store
    finally:
        store.close()


def _query() -> RunQuery:
    from loadmaster.edge.learnt import runs_file
    from loadmaster.edge.runquery import RunQuery

    return RunQuery(runs_file())


def _shown(query: RunQuery, number: int) -> ShownRun:
    from loadmaster.render.runs import ShownRun
    from loadmaster.service.runningruns import running_among

    run = query.run(number)
    if run is None:
        raise _no_run(number)
    until = run.ending.ended if run.ending is not None else float("inf")
    return ShownRun(
        run=run,
        plan=query.plan(number),
        found=tuple(query.reconciliations(number)),
        findings=tuple(query.findings(run.record.deployment, run.record.started, until)),
        running=bool(running_among([run])),
    )


def _no_run(number: int) -> Failure:
    return Failure(f"there is no run {number}", "loadmaster runs lists them")
