"""Runs of real processes: found whole, ended whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadmaster.edge import process
from loadmaster.edge.process import Child, Exit, Identity, ProcessError, end, leftovers, orphans, read_process
from loadmaster.engines.base import EngineCommand
from tests.running import until

Start = Callable[..., Child]
SLEEP = "import time; time.sleep(300)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); {SLEEP}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts Python programs; what they leave is ended after the test."""
    children: list[Child] = []

    def begin(code: str, *words: str, marker: str | None = None, **more: object) -> Child:
        command = EngineCommand(argv=(sys.executable, "-c", code, *words), **more)  # type: ignore[arg-type]
        children.append(Child.start(command, tmp_path / "log", marker=marker))
        return children[-1]

    yield begin
    for child in children:
        child.stop(term_s=0.0)
        assert child.members() == ()


def family(*starts: str) -> str:
    """A program that starts others (each an argument list for Popen as text) and says ``ready``."""
    lines = ["import subprocess, sys, time"]
    lines += [f"subprocess.Popen({arguments})" for arguments in starts]
    return "\n".join([*lines, "print('ready', flush=True)", "time.sleep(300)"])


def child_of(code: str, more: str = "") -> str:
    return f"[sys.executable, '-c', {code!r}], stdin=subprocess.DEVNULL{more}"


def ready(tmp_path: Path, words: int = 1) -> None:
    until(lambda: (tmp_path / "log").read_text().count("ready") >= words, "the programs' start")


# --------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        ("raise SystemExit(3)", Exit(code=3), "exit code 3"),
        ("pass", Exit(code=0), "exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", Exit(signal=9), "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", Exit(signal=11), "killed by SIGSEGV"),
    ],
)
def test_how_it_ended(start: Start, code: str, expected: Exit, words: str) -> None:
    child = start(code)
    assert child.wait(20) == expected
    assert expected.words == words
    assert child.members() == ()


def test_it_runs_until_it_ends(start: Start) -> None:
    child = start(SLEEP)
    assert child.poll() is None
    assert child.wait(0.05) is None
    assert [member.pid for member in child.members()] == [child.pid]
    stopped = child.stop()
    assert stopped.exit == Exit(signal=signal.SIGTERM)
    assert (stopped.killed, stopped.left) == ((), ())
    assert child.stop().exit == Exit(signal=signal.SIGTERM), "a second stop changes nothing"


def test_output_environment_and_folder(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTTEN", "apple")
    (tmp_path / "log").write_text("before\n")
    code = (
        "import os, sys\n"
        "print(os.environ.get('ROTTEN'), os.environ['FRESH'], os.getcwd(), os.getsid(0) == os.getpid(), flush=True)\n"
        "print(os.environ['LOADMASTER_RUN'], file=sys.stderr)\n"
        "print(repr(sys.stdin.read()))"
    )
    child = start(code, env={"FRESH": "pear"}, drop=("ROTTEN",), cwd=str(tmp_path), marker="m1")
    child.wait(20)
    assert (tmp_path / "log").read_text() == f"before\nNone pear {tmp_path} True\nm1\n''\n"
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0o044, "a log that exists keeps its mode"


def test_a_new_log_is_the_owners_alone(start: Start, tmp_path: Path) -> None:
    start("pass").wait(20)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_output_to_an_open_descriptor() -> None:
    read, write = os.pipe()
    child = Child.start(EngineCommand(argv=(sys.executable, "-c", "print('through')")), write)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "through\n"
    assert child.stop().left == ()


@pytest.mark.parametrize(
    ("argv", "cwd", "said"),
    [
        (("/no/such/program",), None, "cannot start '/no/such/program': No such file or directory"),
        (("/etc/passwd",), None, "Permission denied"),
        ((), None, "there is no program"),
        ((sys.executable,), "/no/such/folder", "/no/such/folder"),
        ((sys.executable, "a\0b"), None, "cannot start"),
    ],
)
def test_what_cannot_be_started(tmp_path: Path, argv: tuple[str, ...], cwd: str | None, said: str) -> None:
    with pytest.raises(ProcessError, match=r"cannot start|no program") as caught:
        Child.start(EngineCommand(argv=argv, cwd=cwd), tmp_path / "log")
    assert said in caught.value.message


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="cannot write the log"):
        Child.start(EngineCommand(argv=(sys.executable,)), tmp_path / "no" / "log")


# --------------------------------------------------------------------------------------- a whole run


def test_members_are_found_by_each_sign(start: Start, tmp_path: Path) -> None:
    wiped = ", env={}"
    away = ", start_new_session=True"
    child = start(
        family(
            child_of(SLEEP),
            child_of(SLEEP, wiped),  # found by the session
            child_of(SLEEP, away),  # found by the mark
            child_of(SLEEP, wiped + away),  # found as a descendant
        )
    )
    ready(tmp_path)
    assert len(child.members()) == 5
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: child.poll() is not None)
    left = child.members()
    assert len(left) == 4, "whoever was seen as a descendant is not lost with its parent"
    stopped = child.stop()
    assert stopped.exit == Exit(signal=signal.SIGKILL)
    assert set(stopped.pids) == {child.pid, *(member.pid for member in left)}
    assert child.members() == ()
    assert all(read_process(member.pid) is None or read_process(member.pid) != member for member in left)


def test_stop_kills_whoever_does_not_listen(start: Start, tmp_path: Path) -> None:
    child = start(family(child_of(DEAF), child_of(DEAF, ", start_new_session=True")))
    ready(tmp_path, words=3)
    stopped = child.stop(term_s=0.5)
    assert len(stopped.killed) == 2
    assert stopped.left == ()
    assert stopped.exit == Exit(signal=signal.SIGTERM)
    assert child.members() == ()


def test_stop_of_a_deaf_first_process(start: Start, tmp_path: Path) -> None:
    child = start(DEAF)
    ready(tmp_path)
    stopped = child.stop(term_s=0.3)
    assert stopped.exit == Exit(signal=signal.SIGKILL)
    assert stopped.killed == (child.pid,)
    assert 0.3 <= stopped.seconds < 10


def test_stop_of_a_frozen_run(start: Start) -> None:
    child = start(SLEEP)
    os.kill(child.pid, signal.SIGSTOP)
    status = Path(f"/proc/{child.pid}/stat")
    until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")  # the signal takes effect in its own time
    assert child.stop(term_s=0.2).exit == Exit(signal=signal.SIGKILL)


def test_a_graceful_first_process_may_end_the_others(start: Start, tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        f"other = subprocess.Popen([sys.executable, '-c', {DEAF!r}])\n"
        "def leave(*_):\n    other.kill(); other.wait(); raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('ready', flush=True)\ntime.sleep(300)"
    )
    child = start(code)
    ready(tmp_path, words=2)
    stopped = child.stop()
    assert stopped.exit == Exit(code=0)
    assert stopped.killed == ()


def test_cleanup_runs_after_the_stop(start: Start, tmp_path: Path) -> None:
    mark = tmp_path / "cleaned"
    child = start(SLEEP, cleanup=(sys.executable, "-c", f"open({str(mark)!r}, 'w')"))
    assert not mark.exists()
    assert child.stop().cleanup_failed is None
    assert mark.exists()


@pytest.mark.parametrize(
    ("cleanup", "said"),
    [
        ((sys.executable, "-c", "raise SystemExit('no such container')"), "no such container"),
        ((sys.executable, "-c", "raise SystemExit(7)"), "exit code 7"),
        (("/no/such/program",), "No such file"),
    ],
)
def test_a_cleanup_that_fails_is_told(start: Start, cleanup: tuple[str, ...], said: str) -> None:
    assert said in (start(SLEEP, cleanup=cleanup).stop().cleanup_failed or "")


# --------------------------------------------------------------------------------------- runs of others


def test_leftovers_after_the_first_process_was_killed(start: Start, tmp_path: Path) -> None:
    child = start(family(child_of(SLEEP), child_of(SLEEP, ", start_new_session=True"), child_of(SLEEP, ", env={}")))
    ready(tmp_path)
    identity = child.identity
    assert len(leftovers(identity)) == 4
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: child.poll() is not None)
    assert len(leftovers(identity)) == 3
    assert len(orphans(identity.marker)) == 2, "without the session, one that has no environment is not known"
    assert end(identity, term_s=1.0) == ()
    assert leftovers(identity) == ()


# A title is written over the arguments and the beginning of the environment behind them.
TITLED = """
import os, sys, time
fields = open('/proc/self/stat').read().rpartition(')')[2].split()
start, end = int(fields[47]), int(fields[48])
with open('/proc/self/mem', 'r+b', buffering=0) as memory:
    memory.seek(start)
    memory.write(bytes((end - start) * int(sys.argv[1]) // 100))
print('ready', flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("percent", [60, 100])
def test_leftovers_that_have_written_a_title_over_their_mark(start: Start, tmp_path: Path, percent: int) -> None:
    """As vLLM's workers do; the mark of this test stands in front, the padding behind it."""
    environment = f"{{'LOADMASTER_RUN': 'titled', 'PADDING': {'x' * 100!r}}}"
    other = f"[sys.executable, '-c', {TITLED!r}, {str(percent)!r}], env={environment}"
    child = start(family(other), marker="titled")
    ready(tmp_path, words=2)
    assert len(orphans("titled")) == 2, "the second is a descendant of the first"
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: child.poll() is not None)
    assert orphans("titled") == ()
    assert len(leftovers(child.identity)) == 1
    assert end(child.identity, term_s=1.0) == ()
    assert leftovers(child.identity) == ()


def test_end_kills_the_deaf(start: Start, tmp_path: Path) -> None:
    child = start(family(child_of(DEAF)))
    ready(tmp_path, words=2)
    assert end(child.identity, term_s=0.2) == ()
    assert child.members() == ()


def test_a_number_that_was_given_to_another_is_not_touched(start: Start) -> None:
    other = start(SLEEP)
    assert other.identity.started is not None
    stale = Identity(other.pid, other.identity.started - 1, "another-mark")
    assert leftovers(stale) == ()
    assert end(stale) == ()
    assert other.poll() is None


def test_another_runs_processes_in_the_same_session_are_not_touched(start: Start, tmp_path: Path) -> None:
    child = start(family(child_of(SLEEP, ", env={'LOADMASTER_RUN': 'another'}")), marker="mine")
    ready(tmp_path)
    assert [member.pid for member in leftovers(Identity(-1, None, "mine"))][:1] == [child.pid]
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: child.poll() is not None)
    assert leftovers(child.identity) == ()
    assert len(orphans("another")) == 1


def test_orphans_leave_the_asking_process_out(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "from loadmaster.edge.process import orphans\n"
        f"other = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        "print([member.pid for member in orphans('shared')] == [other.pid])\n"
        "other.kill(); other.wait()\n"
        "print(orphans('shared'))"
    )
    environment = os.environ | {"LOADMASTER_RUN": "shared"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout == "True\n()\n", done.stderr


def test_without_a_table_of_processes(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = start(family(child_of(DEAF)))
    ready(tmp_path, words=2)
    other = next(member for member in child.members() if member.pid != child.pid)
    monkeypatch.setattr(process, "_PROC", tmp_path / "nothing")
    monkeypatch.setattr(process, "_KILL_S", 0.2)
    assert [member.pid for member in child.members()] == [child.pid]
    os.kill(child.pid, signal.SIGSTOP)
    assert child.stop(term_s=0.1).left == ()
    monkeypatch.undo()
    until(lambda: read_process(other.pid) is None or read_process(other.pid) != other)


def test_a_thousand_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names with brackets and blanks, files that vanish, lines that are none: the table bears them."""
    for pid, line in {
        1: "1 (a) b) (c) S 0 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 42 0 0",
        2: "no line at all",
        3: "",
        4: "4 (x) R 1",
    }.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(line)
    (tmp_path / "self").mkdir()
    (tmp_path / "77").mkdir()
    monkeypatch.setattr(process, "_PROC", tmp_path)
    table = process.read_processes()
    assert list(table) == [1]
    assert (table[1].name, table[1].started, table[1].state, table[1].session) == ("a) b) (c", 42, "S", 1)
