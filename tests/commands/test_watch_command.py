"""loadmaster watch: replays, recordings, what it refuses, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import IO, Any, cast

import pytest
from inline_snapshot import snapshot

from loadmaster.cli import main
from loadmaster.commands.watch import watch
from loadmaster.core.observation import Snapshot
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


HEAD = b'{"kind":"loadmaster-recording","schema":1}\n'
NONE = "its first line is not a header"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", NONE),
        (b'{"at":1}\n', NONE),
        (b'{"a":1}\n{"at":1}\n', NONE),
        (b'{"at":1}\n{"at":2}\n', NONE),
        (b'{"schema":1}\n{"at":2}\n', NONE),
        (b'{"kind":"x","schema":1}\n', "it is a 'x'"),
        (HEAD.replace(b"1", b"2"), "has schema 2, only 1 is known"),
        (HEAD[:-2] + b',"limits":{"kv_tokens":1' + b"0" * 400 + b"}}\n", "line 1: "),
        (HEAD[:-2] + b',"limits":{"kv_tokens":-1}}\n', "line 1: kv_tokens is under 0"),
        (HEAD + b'{"at":2}\nnonsense\n', "line 3"),
        (HEAD + b'{"at":2}\n{"at":2}\n', "line 3 is not later than the line before it"),
        (HEAD + b'{"at":2,"cards":[{"index":0,"used_bytes":1' + b"0" * 400 + b"}]}\n", "line 2: "),
        (
            HEAD + b'{"at":2,"cards":[{"index":0,"used_bytes":1' + b"0" * 30 + b"}]}\n",
            "line 2: used_bytes is too large",
        ),
        (HEAD + b'{"at":2,"cards":[{"index":0,"used_bytes":-1}]}\n', "line 2: used_bytes is under 0"),
        (HEAD + b'{"at":2,"cards":[{"index":0},{"index":0}]}\n', "line 2: two cards have the index 0"),
        (HEAD + b'{"at":2,"engine":{"since":1e30}}\n', "line 2: since is too large"),
        (HEAD + b'{"at":1e30}\n', "line 2: at is too large"),
        (HEAD + b'{"at":-1}\n', "line 2: at is under 0"),
    ],
)
def test_files_that_are_no_recordings(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    done = watched("--replay", str(path))
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\nhint: ") == (said == NONE or "'x'" in said)


def test_a_header_alone_has_no_readings(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_bytes(HEAD)
    done = watched("--replay", str(path))
    assert (done.code, done.out) == (3, "")
    assert "has no readings" in done.err


def test_damage_after_readings_ends_the_objects_with_one_of_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(HEAD + b'{"at":1}\n{"at":2,"cards":[{"index":0,"used_bytes":-1}]}\n')
    with pytest.raises(SystemExit) as ended:
        main(["watch", "--replay", str(path), "--json"])
    assert ended.value.code == 2
    said = f"{path}: line 3: used_bytes is under 0"
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert objects[0]["at"] == 1
    assert objects[1:] == [{"schema": 1, "error": {"message": said, "hint": None}}]


def test_the_end_of_a_replay_is_judged() -> None:
    assert watched("--replay", str(FOLDER / "xid-error.jsonl"), "--once").code == 1
    assert watched("--replay", str(FOLDER / "xid-error.jsonl")).code == 0
    assert watched("--replay", str(FOLDER / "calm.jsonl"), "--once").code == 0


class _FullDisk:
    """A file that takes so many bytes more and then none."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self._file, self.room, self.tries = file, room, 0

    def write(self, data: bytes) -> int:
        self.tries += 1
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._file.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_disk_that_fills_up_ends_the_recording_and_not_the_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "full.jsonl"
    disks: list[_FullDisk] = []
    add = RecordingWriter.add

    def fills(writer: RecordingWriter, snapshot: Snapshot) -> None:
        if not disks:
            disks.append(_FullDisk(writer._file, 40))
            writer._file = disks[0]  # type: ignore[assignment]
        add(writer, snapshot)

    monkeypatch.setattr(RecordingWriter, "add", fills)
    done = watched("--once", "--record", str(path))
    assert "not read: the cards: " in done.out
    assert done.err.count("warning: ") == 1
    assert "No space left on device: the recording ends here, the view goes on" in done.err
    assert disks[0].tries == 2  # the first look's line alone: the second is not tried
    _, series = open_recording(path)
    assert list(series) == []
    assert series.cut_line is None


def test_a_disk_that_is_full_from_the_start_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "full.jsonl"
    fdopen = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda *given, **named: _FullDisk(cast("IO[bytes]", fdopen(*given, **named)), 0))
    with pytest.raises(RecordingError, match="No space left on device"):
        RecordingWriter(path, Header())
    assert not path.exists()


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
    assert series.cut_line == 3
    done = watched("--replay", str(path))
    assert done.code == 0
    assert f"{path}: line 3 is cut" in done.err


def test_a_last_line_that_lacks_its_end_alone_counts(tmp_path: Path) -> None:
    path = tmp_path / "whole.jsonl"
    path.write_bytes(HEAD + b'{"at":1}\n{"at":2}')
    _, series = open_recording(path)
    assert [snapshot.at for snapshot in series] == [1, 2]
    assert series.cut_line is None


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
