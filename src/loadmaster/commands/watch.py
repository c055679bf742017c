"""loadmaster watch"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.commands.deploymentname import DeploymentName
from loadmaster.commands.options import json_option
from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, USAGE, Failure
from loadmaster.terminal import terminal_paint, write_result

if TYPE_CHECKING:
    from loadmaster.core.alerts import AlertChange
    from loadmaster.core.observation import Snapshot
    from loadmaster.core.watchlimits import WatchLimits
    from loadmaster.core.watchview import WatchView
    from loadmaster.edge.recording import RecordingWriter
    from loadmaster.service.sampler import Sampler

_LINE_EVERY_S = 10.0
_REPLAY_S = 0.05
_WIDEST = 160
_FIRST_S = 1.0


@click.command()
@click.argument("name", type=DeploymentName(), required=False)
@click.option("--once", is_flag=True, help="One look, over a second, then end.")
@json_option
@click.option("--record", type=click.Path(dir_okay=False, path_type=Path), help="Also write each look into a new file.")
@click.option(
    "--replay", type=click.Path(dir_okay=False, path_type=Path), help="Show what a recording holds, on any machine."
)
@click.option(
    "--interval",
    type=click.FloatRange(0.0, 3600.0),
    help="Seconds between looks (1); with --replay between its steps on a terminal.",
)
def watch(
    name: str | None,
    once: bool,
    as_json: bool,
    record: Path | None,
    replay: Path | None,
    interval: float | None,
) -> None:
    """Cards and engine together, now, with the plan's lines drawn in: planned, reached, left.

    NAME is a deployment; it may be left out where there is one only. Without any, the cards alone are shown. On a
    terminal the view is drawn anew each second; elsewhere there is a line each ten seconds and for each alert, with
    --json an object a line. Ctrl-C ends it. Exit code of --once, also with --replay: 0 all is well, 1 the engine is
    down, an alert holds or --record could not be written, 3 nothing could be read.
    """
    import asyncio

    if replay is not None:
        if name is not None or record is not None:
            raise Failure("--replay shows a file alone", "leave NAME and --record out")
        sys.exit(_replay(replay, once, as_json, _REPLAY_S if interval is None else interval))
    if interval is not None and interval < 0.1:
        raise Failure(f"--interval {interval:g}: at least 0.1 s lie between looks")
    try:
        code = asyncio.run(_live(name, once, as_json, record, interval))
    except KeyboardInterrupt:
        code = OK
    sys.exit(code)


async def _live(name: str | None, once: bool, as_json: bool, record: Path | None, interval: float | None) -> int:
    from loadmaster.core.watchview import WatchView
    from loadmaster.edge.recording import RecordingError

    name, sampler, limits = _opened(name)
    view = WatchView(limits, name)
    writer = _writer(record, name, interval or 1.0, limits) if record is not None else None
    outlet = _Once(view, as_json) if once else _outlet(view, as_json, interval)
    try:
        with outlet:
            async for snapshot in _looks(sampler, _FIRST_S if once else interval or 1.0, 2 if once else None):
                changes = view.take(snapshot)
                outlet.show(changes)
                if writer is not None:
                    try:
                        writer.add(snapshot)
                    except RecordingError as error:
                        writer = None
                        _say(f"{error.message}: the recording ends here, the view goes on")
    finally:
        if writer is not None:
            writer.close()
        await sampler.close()
    code = _code(view)
    return PROBLEM if code == OK and record is not None and writer is None else code


def _say(text: str) -> None:
    """Beside the result: what became of the recording."""
    from loadmaster.render.visible import visible

    click.echo(f"warning: {visible(text)}", err=True)


async def _looks(sampler: Sampler, interval_s: float, most: int | None) -> AsyncIterator[Snapshot]:
    import asyncio

    loop = asyncio.get_running_loop()
    due = loop.time()
    done = 0
    while most is None or done < most:
        yield await sampler.look()
        done += 1
        if done != most:
            due = max(due + interval_s, loop.time())
            await asyncio.sleep(due - loop.time())


def _opened(name: str | None) -> tuple[str | None, Sampler, WatchLimits]:
    """The deployment that is meant, its readings, and what they are held against."""
    from loadmaster.config import load_deployment
    from loadmaster.core.watchlimits import WatchLimits, limits_of
    from loadmaster.edge.statehome import StateError, list_deployments
    from loadmaster.service.places import Places
    from loadmaster.service.planfile import read_plan
    from loadmaster.service.sampler import Sampler

    try:
        if name is None:
            names = list_deployments()
            if len(names) > 1:
                raise Failure(
                    f"there are several deployments: {', '.join(names)}", f"loadmaster watch {names[0]}", USAGE
                )
            if not names:
                return None, Sampler(None, None), WatchLimits()
            name = names[0]
        loaded = load_deployment(name)
    except StateError as error:
        raise Failure(error.message, error.hint, USAGE) from None
    places = Places(loaded.path.parent)
    limits = limits_of(read_plan(places.plan), loaded.deployment.supervision.stuck_after_s)
    return name, Sampler(loaded.deployment, places), limits


def _writer(path: Path, name: str | None, interval_s: float, limits: WatchLimits) -> RecordingWriter:
    import time

    from loadmaster import __version__
    from loadmaster.edge.recording import Header, RecordingError, RecordingWriter

    header = Header(loadmaster=__version__, deployment=name, began=time.time(), interval_s=interval_s, limits=limits)
    try:
        return RecordingWriter(path, header)
    except RecordingError as error:
        raise Failure(error.message, error.hint, USAGE) from None


def _replay(path: Path, once: bool, as_json: bool, interval_s: float) -> int:
    """All of a recording; ``once``: its end alone, judged by the exit code."""
    import time

    from loadmaster.core.watchview import WatchView
    from loadmaster.edge.recording import RecordingError, open_recording

    try:
        header, snapshots = open_recording(path)
        view = WatchView(header.limits, header.deployment)
        outlet = _Last(view, as_json) if once else _outlet(view, as_json, None)
        paced = isinstance(outlet, _Screen)
        try:
            with outlet:
                for snapshot in snapshots:
                    outlet.show(view.take(snapshot))
                    if paced:
                        time.sleep(interval_s)
                outlet.end()
        except KeyboardInterrupt:
            return OK
    except RecordingError as error:
        if as_json and not once:
            _end_objects(error.message, error.hint)
        raise Failure(error.message, error.hint, USAGE) from None
    if view.latest is None:
        raise Failure(f"{path} has no readings", exit_code=COULD_NOT_TELL)
    if snapshots.cut_line is not None:
        _say(f"{path}: line {snapshots.cut_line} is cut, as by a writer that was killed: it is left out")
    return _code(view) if once else OK


def _end_objects(message: str, hint: str | None) -> None:
    """After the objects of the readings one of the error; where there are none, the command line writes it."""
    import msgspec

    from loadmaster.render.documents import error_document
    from loadmaster.terminal import result_begun

    if result_begun():
        write_result(msgspec.json.encode(error_document(message, hint)).decode() + "\n")


def _code(view: WatchView) -> int:
    snapshot = view.latest
    if snapshot is None or (snapshot.cards is None and snapshot.engine is None):
        return COULD_NOT_TELL
    state = snapshot.engine.state if snapshot.engine is not None else None
    bad = any(finding.severity != "note" for finding in view.findings)
    return PROBLEM if bad or state in ("stuck", "failed", "exited") else OK


# ------------------------------------------------------------------------------------------ where it is shown


def _outlet(view: WatchView, as_json: bool, interval: float | None) -> _Outlet:
    if as_json:
        return _Objects(view)
    if sys.stdout.isatty():
        return _Screen(view)
    return _Lines(view, interval if interval is not None else _LINE_EVERY_S)


class _Outlet:
    """Shows the view after each look."""

    def __init__(self, view: WatchView) -> None:
        self.view = view

    def __enter__(self) -> _Outlet:
        return self

    def __exit__(self, *problem: object) -> None:
        """Nothing is to be put back."""

    def show(self, changes: tuple[AlertChange, ...]) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """There is no further look."""


class _Objects(_Outlet):
    """An object a line."""

    def show(self, changes: tuple[AlertChange, ...]) -> None:
        import msgspec

        from loadmaster.render.watch import watch_document

        write_result(msgspec.json.encode(watch_document(self.view, changes)).decode() + "\n")


class _Lines(_Outlet):
    """A line each so many seconds of the readings' own time, and for each alert."""

    def __init__(self, view: WatchView, every_s: float) -> None:
        super().__init__(view)
        self._every_s = every_s
        self._last: float | None = None
        self._missing: tuple[str, ...] = ()

    def show(self, changes: tuple[AlertChange, ...]) -> None:
        from loadmaster.render.visible import visible
        from loadmaster.render.watch import change_line, snapshot_line

        snapshot = self.view.latest
        if snapshot is None:
            return
        if self._last is None or snapshot.at - self._last >= self._every_s - 0.05:
            self._last = snapshot.at
            write_result(snapshot_line(self.view) + "\n")
        if snapshot.missing != self._missing:
            self._missing = snapshot.missing
            for text in snapshot.missing:
                write_result(f"          not read: {visible(text)}\n")
        for change in changes:
            write_result(change_line(change) + "\n")


class _Once(_Outlet):
    """The second of two looks: the first one has no rates yet."""

    def __init__(self, view: WatchView, as_json: bool) -> None:
        super().__init__(view)
        self._as_json = as_json
        self._looks = 0

    def show(self, changes: tuple[AlertChange, ...]) -> None:
        self._looks += 1
        if self._looks == 2:
            _write_view(self.view, self._as_json)


class _Last(_Outlet):
    """The end of a recording."""

    def __init__(self, view: WatchView, as_json: bool) -> None:
        super().__init__(view)
        self._as_json = as_json

    def show(self, changes: tuple[AlertChange, ...]) -> None:
        """Only the end is shown."""

    def end(self) -> None:
        if self.view.latest is not None:
            _write_view(self.view, self._as_json)


def _write_view(view: WatchView, as_json: bool) -> None:
    from loadmaster.render.documents import encode
    from loadmaster.render.watch import watch_document, watch_text

    text = encode(watch_document(view)) if as_json else watch_text(view, _width(), terminal_paint()) + "\n"
    write_result(text)


class _Screen(_Outlet):
    """Drawn anew in the same place."""

    def __init__(self, view: WatchView) -> None:
        super().__init__(view)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False, no_color=terminal_paint_is_plain())
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> _Outlet:
        self._live.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, changes: tuple[AlertChange, ...]) -> None:
        from rich.text import Text

        from loadmaster.render.watch import watch_text

        width = min(self._console.width, _WIDEST)
        text = watch_text(self.view, width, terminal_paint(), self._console.height - 1)
        self._live.update(Text.from_ansi(text, no_wrap=True), refresh=True)


def terminal_paint_is_plain() -> bool:
    from loadmaster.render.paint import plain

    return terminal_paint() is plain


def _width() -> int:
    import os
    import shutil

    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        return 80
    return min(max(shutil.get_terminal_size((80, 24)).columns, 60), _WIDEST)
