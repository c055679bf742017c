"""The store of runs: what it keeps, what it loses when killed, and what it does on a bad disk."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.downsampling import Slots
from loadmaster.core.facts import EngineFacts
from loadmaster.core.reconcile import Reconciliation, RunActual
from loadmaster.core.runrecord import RunEnding, RunRecord
from loadmaster.edge import runschema, runstore
from loadmaster.edge.readingtiers import KEEP_SECONDS, TIERS, Tiers
from loadmaster.edge.runquery import RunObservation, RunQuery, RunsUnreadable
from loadmaster.edge.runschema import FILE, MIGRATIONS, connect
from loadmaster.edge.runstore import RunStore

_T0 = 1_790_000_000  # a time at which a block of each tier begins
_T0 -= _T0 % (48 * 3600)


def _record(started: float = _T0, deployment: str = "demo") -> RunRecord:
    return RunRecord(
        deployment=deployment, started=started, engine=EngineFacts("vllm", "0.24.0"), argv=("vllm", "serve")
    )


@contextlib.contextmanager
def _store(folder: Path, said: list[str] | None = None, deployment: str = "demo") -> Iterator[RunStore]:
    store = RunStore(folder / FILE, deployment, (said if said is not None else []).append)
    try:
        yield store
    finally:
        store.close()


# ---------------------------------------------------------------------------------------------- what is kept


def test_a_run_with_its_findings_comes_back(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        number = store.begin_run(_record())
        assert number == 1
        store.set_findings(_T0 + 5, [finding("one-gpu-idle", "GPU 1 does nothing.")])
        store.set_findings(_T0 + 9, [])
        store.finish_run(number, RunEnding(ended=_T0 + 60, message="stopped: asked to", code=0))
        assert store.begin_run(_record(_T0 + 100)) == 2
    query = RunQuery(tmp_path / FILE)
    runs = query.runs("demo")
    assert [run.number for run in runs] == [2, 1]
    assert runs[0].ending is None
    assert runs[1].ending == RunEnding(ended=_T0 + 60, message="stopped: asked to", code=0)
    assert runs[1].record == _record()
    [kept] = query.findings("demo")
    assert (kept.finding.code, kept.since, kept.until) == ("one-gpu-idle", _T0 + 5, _T0 + 9)
    assert query.findings("other") == []
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_dropped_run_is_gone_and_its_number_is_not_given_again(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        first = store.begin_run(_record())
        assert first is not None
        assert store.drop(first)
        assert not store.drop(first)
        assert store.begin_run(_record()) == 2
    assert [run.number for run in RunQuery(tmp_path / FILE).runs()] == [2]


def test_what_comes_for_a_dropped_run_is_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    with _store(tmp_path, said) as store:
        number = store.begin_run(_record())
        assert number is not None and store.drop(number)
        store.observe(number, RunObservation(actual=RunActual()))
        store.reconcile(number, _T0, Reconciliation(point="ready", cards=()))
        assert store.begin_run(_record()) == 2
    assert said == []
    assert RunQuery(tmp_path / FILE).reconciliations(number) == []


def test_the_oldest_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runstore, "_MOST_RUNS", 3)
    with _store(tmp_path) as store:
        for number in range(1, 6):
            store.begin_run(_record())
            store.reconcile(number, _T0, Reconciliation(point="ready", cards=()))
        store.begin_run(_record(deployment="other"))
    query = RunQuery(tmp_path / FILE)
    assert [run.number for run in query.runs("demo")] == [5, 4, 3]
    assert [run.number for run in query.runs("other")] == [6]
    assert [run.number for run, _ in query.reconciled_runs(9)] == [5, 4, 3]


def test_one_finding_of_two_cards_is_one_entry(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        both = [finding("card-near-limit", f"GPU {number} is nearly full.") for number in (0, 1)]
        store.set_findings(_T0, both)
        store.set_findings(_T0 + 5, both[1:])
        store.set_findings(_T0 + 9, [])
    [kept] = RunQuery(tmp_path / FILE).findings("demo")
    assert (kept.since, kept.until) == (_T0, _T0 + 9)
    assert kept.finding.cause == "GPU 1 is nearly full."


def test_an_error_of_its_own_stops_recording_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    with _store(tmp_path, said) as store:
        store.begin_run(_record())

        def fail(database: sqlite3.Connection) -> None:
            raise ZeroDivisionError("nobody expects it")

        store._hand_over(fail)
        assert store.begin_run(_record()) is None
        assert [run.number for run in store.query.runs()] == [1]
    assert said == ["recording is off: an error in loadmaster itself: ZeroDivisionError: nobody expects it"]


def test_a_broken_column_is_a_damaged_file(tmp_path: Path) -> None:
    database = connect(tmp_path / FILE)
    tiers = Tiers("demo")
    tiers.add(database, _T0, ("a",), array("f", [1.0]).tobytes())
    tiers.add(database, _T0 + 700, ("a",), array("f", [1.0]).tobytes())
    database.execute("UPDATE slots SET content = x'00'")
    database.close()
    with pytest.raises(RunsUnreadable, match="malformed slots"):
        RunQuery(tmp_path / FILE).readings("demo", _T0, _T0 + 700, points=70)
    said: list[str] = []
    with _store(tmp_path, said) as store:
        store.add_values(_T0 + 1300, {"a": 1.0})
        assert store.begin_run(_record()) == 1
    assert len(said) == 1 and "is set aside" in said[0]


def test_without_a_file_there_is_nothing(tmp_path: Path) -> None:
    query = RunQuery(tmp_path / FILE)
    assert query.runs() == []
    assert query.run(1) is None
    assert query.readings("demo", 0, 100).series == {}


def test_single_readings_come_back_with_their_times(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        for second in range(20):
            store.add_values(_T0 + second + 0.25, {"a": second, "b": None if second % 2 else 1.5})
    read = RunQuery(tmp_path / FILE).readings("demo", _T0 + 5, _T0 + 10, points=60)
    assert read.step_s == 1
    assert read.at == [_T0 + second + 0.25 for second in range(5, 10)]
    assert read.series["a"].mean == [5, 6, 7, 8, 9]
    assert read.series["b"].mean == [None, 1.5, None, 1.5, None]


def test_old_readings_are_kept_in_ever_wider_slots(tmp_path: Path) -> None:
    length = 30 * 3600
    database = connect(tmp_path / FILE)
    tiers = Tiers("demo")
    database.execute("BEGIN")
    for second in range(0, length, 5):
        content = array("f", [float(second), math.sin(second)]).tobytes()
        tiers.add(database, _T0 + second, ("a", "b"), content)
    database.execute("COMMIT")
    single = database.execute("SELECT min(at), max(at) FROM reading").fetchone()
    assert single[1] - single[0] <= KEEP_SECONDS + 600
    oldest = dict(database.execute("SELECT step, min(begin) FROM slots GROUP BY step").fetchall())
    assert oldest[10] > _T0 and oldest[60] == _T0 and oldest[600] == _T0
    database.close()
    query = RunQuery(tmp_path / FILE)
    whole = query.readings("demo", _T0, _T0 + length, points=180, names=["a"])
    assert list(whole.series) == ["a"]
    assert whole.step_s == 600 and len(whole.at) == 180
    assert [value is None for value in whole.series["a"].mean] == [False] * 180
    assert list(whole.series["a"].low) == [600 * slot for slot in range(180)]
    assert list(whole.series["a"].high) == [600 * slot + 595 for slot in range(180)]
    # an hour of the first day, that only the tier of a minute still has
    early = query.readings("demo", _T0 + 600, _T0 + 4200, points=360)
    assert len(early.at) == 360
    assert early.series["a"].mean[:7] == [627.5] * 6 + [687.5]
    # the newest, beyond what stands in any tier
    late = query.readings("demo", _T0 + length - 1000, _T0 + length + 1000, points=200)
    known = [value for value in late.series["a"].mean if value is not None]
    assert known[0] == length - 1000 + 2.5 and known[-1] == length - 7.5 and len(known) == 100


def test_a_gap_of_days_is_a_gap(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        for day in (0, 3):
            for second in range(0, 1800, 30):
                store.add_values(_T0 + day * 86400 + second, {"a": day})
    read = RunQuery(tmp_path / FILE).readings("demo", _T0, _T0 + 4 * 86400, points=600)
    known = {at: value for at, value in zip(read.at, read.series["a"].mean) if value is not None}
    assert set(known.values()) == {0, 3}
    assert len(known) == 6


def test_what_is_read_changes_with_time(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        store.add_values(_T0, {"a": 1.0})
        store.add_values(_T0 + 11, {"a": 2.0, "b": 5.0})
        store.add_values(_T0 + 700, {"b": 6.0})
    query = RunQuery(tmp_path / FILE)
    assert query.series("demo") == ["a", "b"]
    read = query.readings("demo", _T0, _T0 + 1200, points=120)
    assert [value for value in read.series["a"].mean if value is not None] == [1.0, 2.0]
    assert [value for value in read.series["b"].mean if value is not None] == [5.0, 6.0]


# ---------------------------------------------------------------------------------------------- size and speed

_CARDS, _PER_CARD, _OF_ENGINE = 8, 12, 14


def _fill_a_week(path: Path) -> list[str]:
    """All tiers as after a week of readings of eight cards, every value with noise in all its digits."""
    names = [f"card{card}.{number}" for card in range(_CARDS) for number in range(_PER_CARD)]
    names += [f"engine.{number}" for number in range(_OF_ENGINE)]
    noise = random.Random(1)
    pool = array("f", (noise.random() for _ in range(20_000)))
    database = connect(path)
    tiers = Tiers("demo")
    database.execute("BEGIN")
    end = _T0 + 7 * 86400
    for second in range(KEEP_SECONDS):
        content = pool[second : second + len(names)].tobytes()
        tiers.add(database, end - KEEP_SECONDS + second, names, content)
    source = database.execute("SELECT number FROM name WHERE text = 'demo'").fetchone()[0]
    for tier in TIERS:
        begin = max(_T0, end - tier.keep)
        begin -= begin % tier.block
        count = tier.block // tier.step
        for block in range(begin, end, tier.block):
            for name in names:
                number = tiers._number(database, name)
                tiers._register(database, source, number)
                columns = [pool[place : place + count] for place in noise.sample(range(len(pool) - count), 3)]
                slots = Slots(*columns)
                tiers._put(database, source, tier, number, block, slots)
        database.execute("UPDATE tier SET since = ?, until = ? WHERE step = ?", (begin, end - end % 600, tier.step))
    database.execute("COMMIT")
    database.close()
    return names


@pytest.mark.slow
def test_a_week_of_eight_cards_is_small_and_quickly_asked(tmp_path: Path) -> None:
    names = _fill_a_week(tmp_path / FILE)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size < 50e6, f"{size / 1e6:.1f} MB"
    query = RunQuery(tmp_path / FILE)
    end = _T0 + 7 * 86400
    page = [name for name in names if name.endswith((".0", ".1"))]  # memory and utilisation of each card, two of engine
    assert len(page) == 2 * (_CARDS + 1)
    for length in (7 * 86400, 86400, 6 * 3600, 3600, 600):
        seconds = []
        for _ in range(3):
            begin = time.thread_time()
            read = query.readings("demo", end - length, end, points=300, names=page)
            seconds.append(time.thread_time() - begin)
        assert len(read.series) == len(page) and 30 <= len(read.at) <= 600
        assert min(seconds) < 0.05, f"{length} s: {min(seconds) * 1e3:.0f} ms"


# ---------------------------------------------------------------------------------------------- bad days

_WRITER = """
import sys, time
from pathlib import Path
from loadmaster.edge.runstore import RunStore
store = RunStore(Path(sys.argv[1]), "demo")
print("ready", flush=True)
while True:
    store.add_values(time.time(), {"a": 1.0})
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_killed_writer_loses_less_than_five_seconds(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path / FILE)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert writer.stdout is not None
    with writer.stdout:
        writer.stdout.readline()
        time.sleep(4)
        killed = time.time()
        os.killpg(writer.pid, signal.SIGKILL)
        writer.wait()
    query = RunQuery(tmp_path / FILE)
    newest = query.newest("demo")
    assert newest is not None and killed - newest < 5
    with _store(tmp_path) as store:  # and the next one goes on
        store.add_values(killed + 1, {"a": 2.0})
    assert query.newest("demo") == pytest.approx(killed + 1)


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from loadmaster.edge.runstore import RunStore\n"
        "store = RunStore(Path(sys.argv[1]), sys.argv[2], print)\n"
        f"[store.add_values({_T0} + second, {{'a': second}}) for second in range(800)]\n"
        "store.close()\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / FILE), name], stdout=subprocess.PIPE)
        for name in ("one", "two")
    ]
    for writer in writers:
        said, _ = writer.communicate(timeout=60)
        assert (writer.returncode, said) == (0, b"")
    query = RunQuery(tmp_path / FILE)
    for name in ("one", "two"):
        assert query.newest(name) == _T0 + 799
        read = query.readings(name, _T0, _T0 + 800, points=800)
        assert list(read.series["a"].mean) == list(range(800))


def test_while_another_process_holds_the_file_what_fits_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runschema, "BUSY_S", 0.05)
    monkeypatch.setattr(runstore, "_QUEUE", 20)
    monkeypatch.setattr(runstore, "_COMMIT_S", 0.05)
    said: list[str] = []
    with _store(tmp_path, said) as store:
        store.begin_run(_record())
        holder = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        store.add_values(_T0, {"a": 0.0})
        time.sleep(0.3)  # the writer has taken it and waits
        for second in range(1, 100):
            store.add_values(_T0 + second, {"a": second})
        assert store.problem is None
        holder.execute("COMMIT")
        holder.close()
        deadline = time.monotonic() + 20
        while store.query.newest("demo") is None and time.monotonic() < deadline:
            time.sleep(0.05)
        store.add_values(_T0 + 200, {"a": 1.0})
    assert said == ["recording is behind: readings are left out while another process holds the file"]
    read = RunQuery(tmp_path / FILE).readings("demo", _T0, _T0 + 300, points=300)
    assert len(read.at) == 22  # the one in hand, twenty in the queue, and the one after


@contextlib.contextmanager
def _tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A small file system of its own; skips the test where none can be mounted."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(store: RunStore) -> None:
    names = [f"series{number}" for number in range(400)]
    noise = random.Random(1)
    for second in range(3000):
        store.add_values(_T0 + second, {name: noise.random() for name in names})
        if store.problem is not None:
            return
        if second % 300 == 0:
            time.sleep(0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_stops_recording_with_one_message(tmp_path: Path) -> None:
    said: list[str] = []
    with _tmpfs(tmp_path / "small", "1m") as folder, _store(folder, said) as store:
        number = store.begin_run(_record())
        _fill(store)
        deadline = time.monotonic() + 15
        while store.problem is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert said == [f"recording is off: {store.problem}"]
        assert store.problem is not None and "the disk is full; make room" in store.problem
        # nothing else is harmed
        store.add_values(_T0 + 9000, {"a": 1.0})
        assert store.begin_run(_record()) is None
        assert [run.number for run in store.query.runs()] == [number]
    assert len(said) == 1


def test_a_file_that_may_not_grow_stops_recording_with_one_message(tmp_path: Path) -> None:
    code = f"""
import resource, signal, sys, time
from pathlib import Path
from loadmaster.edge.runstore import RunStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
store = RunStore(Path(sys.argv[1]), "demo", lambda text: print(text, flush=True))
for second in range(2000):
    store.add_values({_T0} + second, {{f"s{{n}}": second * 1.1 + n for n in range(400)}})
    if second % 300 == 0: time.sleep(0.05)
store.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / FILE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    off = [line for line in done.stdout.splitlines() if line.startswith("recording is off: cannot write")]
    assert len(off) == 1
    assert done.stderr == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_read_only_disk_stops_recording_but_can_be_read(tmp_path: Path) -> None:
    said: list[str] = []
    with _tmpfs(tmp_path / "ro", "4m") as folder:
        with _store(folder) as store:
            store.begin_run(_record())
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with _store(folder, said) as store:
            store.add_values(_T0, {"a": 1.0})
            assert store.begin_run(_record()) is None
            assert [run.number for run in store.query.runs()] == [1]
    assert said == [f"recording is off: cannot write {folder / FILE}: it is read-only"]


def test_a_folder_that_cannot_be_made_stops_recording(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    with _store(tmp_path / "file", said) as store:
        assert store.begin_run(_record()) is None
    assert len(said) == 1 and said[0].startswith("recording is off: cannot write ")


@pytest.mark.parametrize("content", [b"this is no database, and long enough for a header of one " * 4, None])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / FILE
    if content is None:
        with _store(tmp_path) as store:
            for second in range(300):
                store.add_values(_T0 + second, {f"s{number}": number * second for number in range(50)})
        data = bytearray(path.read_bytes())
        data[4096 * 3 : 4096 * 12] = b"\xff" * 4096 * 9
        path.write_bytes(bytes(data))
    else:
        path.write_bytes(content)
    said: list[str] = []
    with _store(tmp_path, said) as store:
        assert store.begin_run(_record()) == 1
        assert store.problem is None
    [text] = said
    assert text.startswith(f"{FILE} is damaged") and "a new one is begun" in text
    assert len(list(tmp_path.glob(f"{FILE}.damaged-*"))) == 1
    assert [run.number for run in RunQuery(path).runs()] == [1]


def test_a_question_to_a_damaged_file_says_so(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database at all, and long enough for a header" * 4)
    with pytest.raises(RunsUnreadable, match=r"cannot be read: file is not a database"):
        RunQuery(tmp_path / FILE).runs()


def test_a_file_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    database = connect(tmp_path / FILE)
    database.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    database.close()
    before = (tmp_path / FILE).read_bytes()
    said: list[str] = []
    with _store(tmp_path, said) as store:
        assert store.begin_run(_record()) is None
    assert len(said) == 1 and "of a newer release" in said[0]
    assert (tmp_path / FILE).read_bytes() == before
    with pytest.raises(RunsUnreadable, match="newer release"):
        RunQuery(tmp_path / FILE).runs()


def test_each_migration_leads_to_the_next_schema(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    try:
        for number, script in enumerate(MIGRATIONS):
            assert database.execute("PRAGMA user_version").fetchone()[0] == number
            database.executescript(script)
            database.execute(f"PRAGMA user_version = {number + 1}")
    finally:
        database.close()
    with _store(tmp_path) as store:
        assert store.begin_run(_record()) == 1
