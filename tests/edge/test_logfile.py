"""New lines of a log that others write, cut and replace."""

from __future__ import annotations

from pathlib import Path

from loadmaster.edge.logfile import LogFile, rotate


def add(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def test_whole_lines_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path)
    assert log.new_lines() == []
    add(path, "one\ntw")
    assert log.new_lines() == ["one"]
    add(path, "o\nthree\n")
    assert log.new_lines() == ["two", "three"]
    add(path, "the end")
    assert log.new_lines() == []
    assert log.new_lines(last=True) == ["the end"]
    assert log.new_lines(last=True) == []


def test_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "old\n")
    log = LogFile(path, from_end=True)
    add(path, "new\n")
    assert log.new_lines() == ["new"]


def test_a_progress_bar_is_many_lines_and_bytes_are_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, b"10%\r20%\r\n\xff\xfe\n")
    assert LogFile(path).new_lines() == ["10%", "20%", "\ufffd\ufffd"]


def test_a_file_that_was_cut_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path)
    add(path, "first line\n")
    assert log.new_lines() == ["first line"]
    path.write_text("cut\n")
    assert log.new_lines() == ["cut"]
    other = tmp_path / "other"
    other.write_text("replaced it\n")
    other.replace(path)
    assert log.new_lines() == ["replaced it"]
    path.unlink()
    assert log.new_lines() == []


def test_a_line_without_an_end_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, b"x" * 3_000_000)
    log = LogFile(path)
    lengths = [len(line) for _ in range(5) for line in log.new_lines()]
    assert sum(lengths) == 3_000_000
    assert len(log._rest) == 0


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert not rotate(path, most_bytes=10, keep=2)
    log = LogFile(path)
    with path.open("ab", buffering=0) as writer:
        for number in range(1, 5):
            writer.write(f"line number {number}\n".encode())
            assert log.new_lines() == [f"line number {number}"]
            assert rotate(path, most_bytes=10, keep=2)
        writer.write(b"last\n")
    assert log.new_lines() == ["last"]
    assert path.read_text() == "last\n"
    assert [(tmp_path / f"log.{n}").read_text() for n in (1, 2)] == ["line number 4\n", "line number 3\n"]
    assert not (tmp_path / "log.3").exists()
    assert not rotate(path, most_bytes=10, keep=2)
