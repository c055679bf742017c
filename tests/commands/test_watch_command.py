"""loadmaster watch: replays, recordings, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from loadmaster.commands.watch import watch
from loadmaster.edge.recording import Header, RecordingError, RecordingWriter, open_recording
from tests.commands.transcript import Transcript, run
from tests.watchcases import FOLDER, PLAN, shot


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def watched(*arguments: str) -> Transcript:
    return run(watch, arguments, "watch")


def test_a_replay_in_lines() -> None:
    done = watched("--replay", str(FOLDER / "foreign-process.jsonl"))
    assert (done.code, done.err) == (0, "")
    assert done.out == snapshot("""\
14:13:20  ready, 2 running, 0 waiting, cache 31%  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:13:30  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:13:40  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:13:50  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:14:00  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:14:05  warning[foreign-process] began: Another process came onto the card: card 0: process 4711 /usr/bin/python3 (2.00 GiB)
14:14:10  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:14:20  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:14:30  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:14:40  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:14:50  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:15:00  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:15:00  warning[foreign-process] ended: Another process came onto the card
14:15:10  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:15:20  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:15:30  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
14:15:40  ready, 2 running, 0 waiting, cache 31%, 150 tokens/s  GPU 0 21.00 of 24.00 GiB 80% 66 °C  GPU 1 21.00 of 24.00 GiB 80% 66 °C
""")


def test_the_end_of_a_replay_as_json() -> None:
    done = watched("--replay", str(FOLDER / "xid-error.jsonl"), "--once", "--json")
    found = json.loads(done.out)
    assert [item["code"] for item in found["findings"]] == ["xid-error"]
    assert found["name"] == "xid-error"


def test_a_replay_as_objects_names_what_changes() -> None:
    done = watched("--replay", str(FOLDER / "ecc-error.jsonl"), "--json")
    objects = [json.loads(line) for line in done.out.splitlines()]
    assert len(objects) == 24
    assert [change["code"] for one in objects for change in one["changes"]] == ["ecc-error"]


def test_one_look_where_nothing_can_be_read() -> None:
    done = watched("--once")
    assert done.code == 3
    assert "not read: the cards: " in done.out


def test_a_recording_that_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    assert watched("--once", "--record", str(path)).code == 3
    header, series = open_recording(path)
    assert header.interval_s == 1.0
    assert len(list(series)) == 2
    again = watched("--once", "--record", str(path))
    assert again.code == 2
    assert "exists already" in again.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "its first line is not a header"),
        (b'{"at":1}\n', "has no readings"),
        (b'{"kind":"x"}\n', "it is a 'x'"),
        (b'{"schema":2}\n', "has schema 2, only 1 is known"),
        (b'{"schema":1}\n{"at":2}\nnonsense\n', "line 3"),
        (b'{"schema":1}\n{"at":2}\n{"at":2}\n', "line 3 is not later than the line before it"),
    ],
)
def test_files_that_are_no_recordings(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    done = watched("--replay", str(path))
    assert done.code in (2, 3)
    assert said in done.err


def test_the_line_that_a_killed_writer_left_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    writer = RecordingWriter(path, Header(limits=PLAN))
    writer.add(shot(0))
    writer.add(shot(1))
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    header, series = open_recording(path)
    assert header.limits == PLAN
    assert list(series) == [shot(0)]


def test_a_recording_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text("kept", encoding="utf-8")
    with pytest.raises(RecordingError, match="exists already"):
        RecordingWriter(path, Header())
    assert path.read_text(encoding="utf-8") == "kept"


def test_what_does_not_go_together() -> None:
    assert watched("one", "--replay", "x").code == 2
    assert watched("no-such-deployment", "--once").code == 2
    assert watched("--interval", "0").code == 2
