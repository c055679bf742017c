"""loadmaster plan on a machine whose kept runs have taught it something: it uses that, says so, and can be told not to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from loadmaster.commands.plan import plan
from loadmaster.commands.runs import runs
from loadmaster.edge.gpus import record
from loadmaster.edge.runschema import FILE
from loadmaster.edge.sample import write_sample
from tests.commands.transcript import Transcript, run
from tests.keptruns import GRAPHS, cards_of, keep_runs
from tests.recordedruns import RECORDS

_SAID = "local calibration, cuda_graphs of NVIDIA H200: learnt from 3 runs on this machine, the last on 2026-09-21"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in [name for name in os.environ if name.startswith("LOADMASTER_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path / "state"))
    sample = RECORDS[GRAPHS]["sample"]
    write_sample(sample["name"], sample["quantization"], tmp_path / "model")
    (tmp_path / "cards.json").write_text(json.dumps(record(cards_of(GRAPHS))))
    return tmp_path / "state"


def _plan(home: Path, *words: str, version: str = "0.24.0") -> Transcript:
    model, cards = str(home.parent / "model"), str(home.parent / "cards.json")
    flags = RECORDS[GRAPHS]["flags"]
    return run(plan, [model, "--gpus", cards, "--engine-version", version, *words, "--", *flags], "plan")


def _sheet(home: Path, version: str = "0.24.0") -> Any:
    return json.loads(_plan(home, "--json", version=version).out)


def test_a_plan_says_when_it_uses_what_runs_taught_and_dropping_undoes_it(home: Path) -> None:
    before = _sheet(home)
    keep_runs(home, (GRAPHS, GRAPHS))
    assert _sheet(home) == before  # two runs are not enough
    keep_runs(home, (GRAPHS,))
    taught = _sheet(home)
    assert _SAID in taught["notes"]
    graphs = next(part for part in taught["gpus"][0]["components"] if part["name"] == "cuda_graphs")
    assert graphs["basis"] == "measured"
    assert graphs["note"] == "learnt from 3 runs on this machine, the last on 2026-09-21"
    assert abs(graphs["bytes"] - round(0.83 * (1 << 30))) <= 1
    assert "local calibration, cuda_graphs" in " ".join(_plan(home).out.split())
    assert run(runs, ["calibration", "--drop-all"], "runs").code == 0
    assert _sheet(home) == before


def test_another_version_is_planned_as_ever(home: Path) -> None:
    before = _sheet(home, "0.26.0")
    keep_runs(home, (GRAPHS, GRAPHS, GRAPHS))
    assert _sheet(home, "0.26.0") == before


def test_a_file_that_cannot_be_read_is_said_and_harms_no_plan(home: Path) -> None:
    before = _plan(home)
    home.mkdir()
    (home / FILE).write_bytes(b"no database at all, and long enough for a header" * 4)
    after = _plan(home)
    assert (after.code, after.out) == (before.code, before.out)
    assert after.err.startswith("earlier runs do not count: ") and "file is not a database" in after.err
