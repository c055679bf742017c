"""Pipes, sockets and devices where a file is meant: refused with words, never waited for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadmaster.edge.commandfile import CommandError, read_command_file
from loadmaster.edge.gpus import GpuSpecError, read_recording
from loadmaster.edge.regularfile import open_to_read, write_text
from loadmaster.edge.resolve import resolve
from loadmaster.edge.source import ModelError


@pytest.fixture(params=["pipe", "socket", "device", "directory"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "special"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "directory":
        path.mkdir()
    elif request.param == "device":
        path = Path("/dev/null")
    if request.param == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            yield path
    else:
        yield path


def test_nothing_waits(special: Path) -> None:
    with pytest.raises(OSError):
        open_to_read(special)
    with pytest.raises(OSError, match="not a file"):
        write_text(special, "text")
    with pytest.raises(CommandError, match="cannot read"):
        read_command_file(special)
    with pytest.raises(GpuSpecError, match="cannot read"):
        read_recording(special)


@pytest.mark.parametrize("name", ["model", "model.gguf", "config.json"])
def test_no_model_is_a_pipe(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="is a pipe"):
        resolve(str(tmp_path / name))


def test_regular_files_and_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    write_text(path, "one")
    write_text(path, "two")
    with open_to_read(path) as file:
        assert file.read() == b"two"


def test_what_the_shell_hands_over_is_read(tmp_path: Path) -> None:
    """``--command-file <(command)`` is a pipe whose other end is there."""
    code = (
        "from loadmaster.edge.commandfile import read_command_file as read; import sys; print(read(sys.argv[1]).model)"
    )
    line = f"{sys.executable} -c '{code}' <(echo vllm serve a/b)"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "a/b\n", done.stderr
