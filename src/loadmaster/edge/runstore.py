"""Runs, their readings, findings and reconciliations, kept in SQLite by a thread of its own.

Recording must never harm what is recorded: a caller hands over and goes on; what cannot be written is said once, and
then recording is off. A killed process loses what it handed over in the last two seconds.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loadmaster.core.facts import Finding, LoadSheet
from loadmaster.core.observation import Snapshot
from loadmaster.core.reconcile import Reconciliation
from loadmaster.core.runrecord import RunEnding, RunRecord
from loadmaster.core.series import values_of
from loadmaster.edge.readingtiers import Tiers
from loadmaster.edge.runquery import RunObservation, RunQuery, move_away
from loadmaster.edge.runschema import SchemaTooNew, connect, is_damaged, set_aside
from loadmaster.edge.statehome import StateError, make_folder

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]

_COMMIT_S = 2.0  # what a killed process loses at most
_QUEUE = 900  # readings of a quarter of an hour, while another process holds the file
_ANSWER_S = 10.0
_CLOSE_S = 4.0
_MOST_RUNS = 200  # of a deployment; older ones go when one begins
_MOST_FINDINGS = 2000


class RunStore:
    """Writes for one deployment. ``report`` is called once, with a sentence, when recording has to stop.

    Every method returns at once, but ``begin_run``, ``drop`` and ``close``, which wait for the writer, some seconds at
    most.
    Nothing raises for what a disk can do; ``problem`` says why recording is off.
    """

    def __init__(self, path: Path, deployment: str, report: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self.deployment = deployment
        self.problem: str | None = None
        self.query = RunQuery(path)
        self._report = report
        self._said: set[str] = set()
        self._before: Snapshot | None = None
        self._work: queue.Queue[tuple[Work, Future[Any] | None] | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._write, name="run-store", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ what is kept

    def begin_run(self, run: RunRecord, plan: LoadSheet | None = None) -> int | None:
        """Keep a run and return its number; None when nothing can be written."""
        values = (
            run.deployment,
            run.started,
            _json(run),
            None if plan is None else _json(plan),
        )

        def work(database: sqlite3.Connection) -> int | None:
            number = database.execute(
                "INSERT INTO run (deployment, started, record, plan) VALUES (?, ?, ?, ?)", values
            ).lastrowid
            _drop_oldest(database, run.deployment)
            return number

        return self._ask(work)

    def finish_run(self, number: int, ending: RunEnding) -> None:
        values = (ending.ended, ending.message, ending.code, number)
        self._hand_over(
            lambda database: database.execute(
                "UPDATE run SET ended = ?, message = ?, code = ? WHERE number = ?", values
            )
        )

    def add(self, snapshot: Snapshot) -> None:
        """Keep the readings of one moment."""
        values = values_of(snapshot, self._before)
        self._before = snapshot
        if values:
            self.add_values(snapshot.at, values)

    def add_values(self, at: float, values: Mapping[str, float | None]) -> None:
        """Keep one reading of all series, by their names; None: not read."""
        names = tuple(values)
        numbers = array("f", (float("nan") if value is None else value for value in values.values()))
        content = numbers.tobytes()
        self._hand_over(lambda database: self._tiers.add(database, at, names, content))

    def set_findings(self, at: float, findings: Sequence[Finding]) -> None:
        """Which findings hold from ``at`` on; those that held before and are not among them have ended."""
        held = tuple(findings)
        self._hand_over(lambda database: _set_findings(database, self.deployment, at, held))

    def observe(self, run: int, observation: RunObservation) -> None:
        """Keep what was read of a ready engine, for who reconciles its highest point later."""
        values = (_json(observation), run)
        self._hand_over(
            lambda database: database.execute(
                "INSERT OR REPLACE INTO observation (run, content) SELECT number, ? FROM run WHERE number = ?", values
            )
        )

    def reconcile(self, run: int, at: float, reconciliation: Reconciliation) -> None:
        """Keep plan against actual of a run at its point; replaces an earlier one. A dropped run stays dropped."""
        values = (reconciliation.point, at, _json(reconciliation), run)
        self._hand_over(
            lambda database: database.execute(
                "INSERT OR REPLACE INTO reconciliation (run, point, at, content)"
                " SELECT number, ?, ?, ? FROM run WHERE number = ?",
                values,
            )
        )

    def drop(self, number: int) -> bool:
        """Forget a run with its reconciliations. Whether there was such a run, and it is gone."""
        return bool(
            self._ask(lambda database: database.execute("DELETE FROM run WHERE number = ?", (number,)).rowcount > 0)
        )

    def forget_calibration(self, key: str, at: float) -> bool:
        """What was learnt under ``key`` is learnt no more from runs up to ``at``."""
        return bool(
            self._ask(
                lambda database: (
                    database.execute("INSERT OR REPLACE INTO forgotten (key, at) VALUES (?, ?)", (key, at)).rowcount > 0
                )
            )
        )

    def close(self) -> None:
        """Write what was handed over, and end."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._work.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    # ------------------------------------------------------------------------------------------ the writer

    def _hand_over(self, work: Work) -> None:
        if self.problem is not None:
            return
        try:
            self._work.put_nowait((work, None))
        except queue.Full:
            self._say("recording is behind: readings are left out while another process holds the file")

    def _ask(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        if self.problem is not None:
            return None
        future: Future[T] = Future()
        try:
            self._work.put((work, future), timeout=_ANSWER_S)
            return future.result(_ANSWER_S)
        except (queue.Full, TimeoutError):
            return None

    def _write(self) -> None:
        self._tiers = Tiers(self.deployment)
        database = self._open()
        ended = False
        while not ended:
            batch, ended = self._batch()
            if database is not None:
                database = self._commit(database, batch)
            if database is None:
                for _, future in batch:
                    if future is not None and not future.done():
                        future.set_result(None)
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    def _batch(self) -> tuple[list[tuple[Work, Future[Any] | None]], bool]:
        """What is handed over until somebody waits for an answer, or the time to commit has come."""
        batch: list[tuple[Work, Future[Any] | None]] = []
        deadline: float | None = None
        while True:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                item = self._work.get(timeout=wait_s)
            except queue.Empty:
                return batch, False
            if item is None:
                return batch, True
            batch.append(item)
            if item[1] is not None:
                return batch, False
            if deadline is None:
                deadline = time.monotonic() + _COMMIT_S

    def _open(self) -> sqlite3.Connection | None:
        for again in (True, False):
            try:
                make_folder(self.path.parent)
                return connect(self.path)
            except StateError as error:
                self._off(error.message)
                return None
            except SchemaTooNew as error:
                self._off(f"{self.path} has {error}")
                return None
            except sqlite3.Error as error:
                if not (again and is_damaged(error) and self._set_aside(error)):
                    self._off(_words(error, self.path))
                    return None
            except OSError as error:
                self._off(f"cannot write {self.path}: {(error.strerror or str(error)).lower()}")
                return None
        return None

    def _commit(
        self, database: sqlite3.Connection, batch: list[tuple[Work, Future[Any] | None]]
    ) -> sqlite3.Connection | None:
        """Write a batch whole or not at all. None: recording is off."""
        while True:
            try:
                database.execute("BEGIN IMMEDIATE")
                results = [work(database) for work, _ in batch]
                database.execute("COMMIT")
            except Exception as error:
                with contextlib.suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
                if not isinstance(error, sqlite3.Error):
                    database.close()
                    self._off(f"an error in loadmaster itself: {type(error).__name__}: {error}")
                    return None
                if "locked" in str(error) or "busy" in str(error):
                    continue  # another process writes; the queue is what bounds the wait
                database.close()
                self._tiers.forget()
                if is_damaged(error) and self._set_aside(error):
                    reopened = self._open()
                    if reopened is not None:
                        database = reopened
                        continue
                    return None
                self._off(_words(error, self.path))
                return None
            for (_, future), result in zip(batch, results):
                if future is not None and not future.done():
                    future.set_result(result)
            return database

    def _set_aside(self, error: sqlite3.Error) -> bool:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        if "damaged" in self._said:
            return False
        self._said.add("damaged")
        try:
            target = set_aside(self.path, stamp)
        except OSError:
            return False
        self._report(f"{self.path.name} is damaged ({error}): it is set aside as {target.name}, a new one is begun")
        return True

    def _off(self, why: str) -> None:
        self.problem = why
        self._report(f"recording is off: {why}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._report(text)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _words(error: sqlite3.Error, path: Path) -> str:
    text = str(error)
    if path.is_dir():
        return f"cannot write {path}: it is a folder; move it away: {move_away(path)}"
    if "full" in text:
        return f"cannot write {path}: the disk is full; make room on the file system of {path.parent}"
    if "readonly" in text or "unable to open" in text:
        return f"cannot write {path}: it is read-only"
    return f"cannot write {path}: {text}"


def _drop_oldest(database: sqlite3.Connection, deployment: str) -> None:
    database.execute(
        "DELETE FROM run WHERE deployment = ? AND number NOT IN"
        " (SELECT number FROM run WHERE deployment = ? ORDER BY number DESC LIMIT ?)",
        (deployment, deployment, _MOST_RUNS),
    )
    database.execute(
        "DELETE FROM finding WHERE deployment = ? AND until IS NOT NULL AND number NOT IN"
        " (SELECT number FROM finding WHERE deployment = ? ORDER BY number DESC LIMIT ?)",
        (deployment, deployment, _MOST_FINDINGS),
    )


def _set_findings(database: sqlite3.Connection, deployment: str, at: float, findings: Sequence[Finding]) -> None:
    rows = database.execute(
        "SELECT number, code FROM finding WHERE deployment = ? AND until IS NULL", (deployment,)
    ).fetchall()
    open_ = {code: number for number, code in rows}
    now: dict[str, Finding] = {}
    for finding in findings:  # of several cards: one entry that names them all
        first = now.get(finding.code)
        cause = finding.cause if first is None else f"{first.cause} {finding.cause}"
        now[finding.code] = msgspec.structs.replace(first or finding, cause=cause)
    for code, number in open_.items():
        if code not in now:
            database.execute("UPDATE finding SET until = ? WHERE number = ?", (at, number))
    for code, finding in now.items():
        if code in open_:
            database.execute("UPDATE finding SET content = ? WHERE number = ?", (_json(finding), open_[code]))
        else:
            database.execute(
                "INSERT INTO finding (deployment, code, since, content) VALUES (?, ?, ?, ?)",
                (deployment, code, at, _json(finding)),
            )
