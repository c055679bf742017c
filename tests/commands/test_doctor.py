"""``loadmaster doctor`` as a process: the summary, the report file, the object."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loadmaster.core.deployment import Deployment
from loadmaster.edge.libraries import copy_between_cards, read_libraries

SECRETS = {
    "HF_TOKEN": "hf_plantedplantedplanted",
    "VLLM_API_KEY": "planted value with spaces",
    "NCCL_SOCKET_IFNAME": "eth0",
    "LD_LIBRARY_PATH": "/home/planted/lib",
    "https_proxy": "http://planted:planted@proxy.planted.example:3128",
}


def doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | SECRETS | {"LOADMASTER_HOME": str(folder / "state"), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "loadmaster", "doctor", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_report_is_a_file_without_names(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--output", "report.md")
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.splitlines()[-1] == "report: report.md"
    text = (tmp_path / "report.md").read_text()
    for heading in ("Findings", "System", "Cards", "Limits and disks", "Engines and libraries", "Ports", "Environment"):
        assert f"\n## {heading}\n" in text
    assert "NCCL_SOCKET_IFNAME=eth0" in text
    for word in ("planted", str(tmp_path), socket.gethostname() if len(socket.gethostname()) > 9 else "planted"):
        assert word not in text
    user = getpass.getuser()
    assert user in ("root", "runner", "ubuntu", "user") or user not in text


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.md").write_text("mine")
    done = doctor(tmp_path, "--output", "mine.md")
    assert done.returncode == 2
    assert "report:" not in done.stdout
    assert done.stderr == (
        "looking at the machine\nerror: mine.md exists already\nhint: name another file with --output, or remove it\n"
    )
    assert (tmp_path / "mine.md").read_text() == "mine"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--output", "no/where.md")
    assert done.returncode == 1
    assert done.stdout.split("\n")[0]  # what was found is not lost
    assert done.stderr.splitlines()[-2:] == [
        "error: cannot write no/where.md: No such file or directory",
        "hint: name a file in another folder with --output, or - for stdout",
    ]


def test_the_object(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json")
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    assert set(document) == {"schema", "machine", "findings", "report"}
    assert document["machine"]["environment"]["HF_TOKEN"] == "(hidden)"
    assert "planted" not in done.stdout
    assert list(tmp_path.glob("*.md")) == []


def test_a_deployment_brings_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path / "state"))
    from loadmaster.config import write_deployment

    path = write_deployment(Deployment(name="shop", model="/home/planted/model"))
    logs = path.parent / "logs"
    logs.mkdir()
    (logs / "backend.log").write_text("INFO reading /home/planted/model from 10.20.30.40\nERROR it broke\n")
    done = doctor(tmp_path, "--deployment", "shop", "--output", "-")
    assert done.returncode in (0, 1), done.stderr
    assert "ERROR it broke" in done.stdout and "## Deployment" in done.stdout
    assert "planted" not in done.stdout and "10.20.30.40" not in done.stdout


def test_libraries_are_asked_without_import(tmp_path: Path) -> None:
    found = read_libraries("here", sys.executable)
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert "Pillow" in found.versions
    assert read_libraries("nowhere", str(tmp_path / "python")).python is None


def test_copies_need_two_cards_and_torch(tmp_path: Path) -> None:
    assert copy_between_cards(sys.executable, 1).detail == "there are not two cards"
    assert copy_between_cards(str(tmp_path / "python"), 2).status == "not run"


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ('{"cards": 2, "bad": [], "peers": 2}', "passed"),
        ('{"cards": 2, "bad": ["card 0 to card 1"], "peers": 2}', "failed"),
        ('{"cards": 1, "bad": [], "peers": 0}', "not run"),
        ("nonsense", "not run"),
    ],
)
def test_what_the_copy_test_says(tmp_path: Path, said: str, status: str) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    assert copy_between_cards(str(program), 2).status == status
