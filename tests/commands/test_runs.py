"""loadmaster runs: exit code, stdout, stderr, over a store that holds some starts of recorded launches."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from inline_snapshot import snapshot
from msgspec import structs

from loadmaster.commands.runs import runs
from loadmaster.core.reconcile import reconcile_host
from loadmaster.edge.runschema import FILE
from loadmaster.edge.runstore import RunStore
from loadmaster.render.units import size
from loadmaster.service.enginestate import EngineState, Pid, write_state
from tests.commands.transcript import Transcript, run
from tests.keptruns import EAGER, GRAPHS, LONG, STARTED, begin_runs, keep_runs, sheet_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for variable in [name for name in os.environ if name.startswith("LOADMASTER_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield tmp_path / "state"
    monkeypatch.undo()
    time.tzset()


def _runs(*words: str) -> Transcript:
    return run(runs, words, "runs")


def test_there_are_none_yet() -> None:
    assert _runs() == Transcript(0, "", "no runs are kept yet; loadmaster up NAME begins one\n")
    assert _runs("calibration") == Transcript(
        0, "", "nothing is learnt yet: it takes three runs of the same model, version and cards that agree\n"
    )
    assert json.loads(_runs("--json").out) == {"schema": 1, "runs": []}


def test_the_list(home: Path) -> None:
    keep_runs(home, (GRAPHS, LONG, EAGER))
    assert _runs() == snapshot(
        Transcript(
            code=0,
            out="RUN  DEPLOYMENT  STARTED              FOR\n3    demo        2026-09-21 16:13:20  30 min 0 s\n     vllm 0.24.0; held 24.18 GiB; unexplained +0.07 GiB; stopped: asked to stop\n2    demo        2026-09-21 15:13:20  30 min 0 s\n     vllm 0.24.0; held 25.52 GiB; unexplained +0.14 GiB; stopped: asked to stop\n1    demo        2026-09-21 14:13:20  30 min 0 s\n     vllm 0.24.0; held 24.47 GiB; unexplained +0.07 GiB; stopped: asked to stop\n",
            err="",
        )
    )
    assert _runs("demo", "--limit", "1").out.splitlines()[1:] == _runs().out.splitlines()[1:3]
    assert _runs("other") == Transcript(0, "", "no runs of other are kept yet; loadmaster up NAME begins one\n")
    document = json.loads(_runs("--json").out)
    assert document["schema"] == 1
    assert [one["number"] for one in document["runs"]] == [3, 2, 1]
    assert document["runs"][2] == snapshot(
        {
            "number": 1,
            "deployment": "demo",
            "started": 1790000000.0,
            "running": False,
            "ended": 1790001800.0,
            "message": "stopped: asked to stop",
            "exit_code": 0,
            "engine": {"name": "vllm", "version": "0.24.0"},
            "model": "owner/Qwen3.5-35B-A3B-AWQ",
            "architecture": "Qwen3_5MoeForConditionalGeneration",
            "quantization": "compressed-tensors w4 g32",
            "held_bytes": 26273388691,
            "unexplained_bytes": 72970831,
        }
    )


def test_one_run(home: Path) -> None:
    keep_runs(home, (LONG,))
    assert _runs("show", "1") == snapshot(
        Transcript(
            code=0,
            out="run 1 of demo\n  started      2026-09-21 14:13:20\n  ended        2026-09-21 14:43:20: stopped: asked to stop\n  engine       vllm 0.24.0\n  model        owner/Qwen3.5-35B-A3B-AWQ, Qwen3_5MoeForConditionalGeneration,\n               compressed-tensors w4 g32\n  cards        2 x NVIDIA H200\n  command      vllm serve owner/Qwen3.5-35B-A3B-AWQ --tensor-parallel-size 2\n               --gpu-memory-utilization 0.1545 --max-num-batched-tokens 2048\n               --max-model-len 262144 --max-num-seqs 16 --gdn-prefill-backend\n               triton\n\nGPU 0 (NVIDIA H200), when it was ready\n  GiB                     planned  expected   actual   off by\n  context                    1.92               1.92     0.00\n  weights                   11.30              11.30     0.00\n    weights.language        10.74\n    weights.other            0.14\n    weights.vision           0.42\n  workspace                  1.12                  -\n  sampler                    0.00                  -\n  CUDA graphs                0.11               0.12    +0.01\n  KV cache                   8.03               8.05    +0.02\n  activations                2.80      0.00        -\n  driver reserve                                0.60\n  held, driver count                           23.06\n  unexplained                                           -0.04\n\nGPU 1 (NVIDIA H200), when it was ready\n  GiB                     planned  expected   actual   off by\n  context                    1.92               1.92     0.00\n  weights                   11.30              11.30     0.00\n    weights.language        10.74\n    weights.other            0.14\n    weights.vision           0.42\n  workspace                  1.12                  -\n  sampler                    0.00                  -\n  CUDA graphs                0.11               0.12    +0.01\n  KV cache                   8.03               8.05    +0.02\n  activations                2.80      0.00        -\n  driver reserve                                0.60\n  held, driver count                           23.06\n  unexplained                                           -0.04\n\nGPU 0 (NVIDIA H200), at the highest point of serving\n  GiB                     planned  expected   actual   off by\n  context                    1.92               1.92     0.00\n  weights                   11.30              11.30     0.00\n    weights.language        10.74\n    weights.other            0.14\n    weights.vision           0.42\n  workspace                  1.12                  -\n  sampler                    0.00                  -\n  CUDA graphs                0.11               0.12    +0.01\n  KV cache                   8.03               8.05    +0.02\n  activations                2.80      2.27     2.45    +0.18\n  driver reserve                                0.60\n  held, driver count                           25.52\n  unexplained                                           +0.14\n  activations: actual is how much more the driver counts than when ready\n  activations: pictures or prompts that were larger than the plan knows came, or\n    came in an order that splits the allocator's segments\n\nGPU 1 (NVIDIA H200), at the highest point of serving\n  GiB                     planned  expected   actual   off by\n  context                    1.92               1.92     0.00\n  weights                   11.30              11.30     0.00\n    weights.language        10.74\n    weights.other            0.14\n    weights.vision           0.42\n  workspace                  1.12                  -\n  sampler                    0.00                  -\n  CUDA graphs                0.11               0.12    +0.01\n  KV cache                   8.03               8.05    +0.02\n  activations                2.80      2.27     2.45    +0.18\n  driver reserve                                0.60\n  held, driver count                           25.52\n  unexplained                                           +0.14\n  activations: actual is how much more the driver counts than when ready\n  activations: pictures or prompts that were larger than the plan knows came, or\n    came in an order that splits the allocator's segments\n\nfindings\n  warning[one-gpu-idle] 2026-09-21 14:30:00, for 1 min 0 s: GPU 1 does nothing\n    while GPU 0 works.\n",
            err="",
        )
    )
    document = json.loads(_runs("show", "1", "--json").out)["run"]
    assert {one["point"] for one in document["reconciliations"]} == {"ready", "serving"}
    assert document["plan"]["gpus"][0]["name"] == "NVIDIA H200"
    assert document["reconciliations"][1]["served"]["pictures"][-1] == [4096, 4096]
    assert document["findings"][0]["finding"]["code"] == "one-gpu-idle"


def test_two_runs(home: Path) -> None:
    keep_runs(home, (GRAPHS, EAGER))
    assert _runs("show", "1", "2") == snapshot(
        Transcript(
            code=0,
            out="run 1 against run 2\n\nfacts\n  the same\n\narguments\n  --enforce-eager: not given -> given\n\nplanned, GPU by GPU\n  GPU 0  workspace                                1.10 ->     0.97 GiB  -0.13\n  GPU 0  cuda_graphs                              0.81 ->        - GiB\n  GPU 0  kv_cache                                 7.64 ->     8.26 GiB  +0.61\n  GPU 0  headroom                               115.73 ->   116.05 GiB  +0.32\n  GPU 1  workspace                                1.10 ->     0.97 GiB  -0.13\n  GPU 1  cuda_graphs                              0.81 ->        - GiB\n  GPU 1  kv_cache                                 7.64 ->     8.26 GiB  +0.61\n  GPU 1  headroom                               115.73 ->   116.05 GiB  +0.32\n\nactual, GPU by GPU\n  GPU 0  cuda_graphs                              0.83 ->        - GiB\n  GPU 0  kv_cache                                 7.58 ->     8.26 GiB  +0.67\n  GPU 0  held when it was ready                  24.47 ->    24.17 GiB  -0.29\n  GPU 0  held at the highest point of serving    24.47 ->    24.18 GiB  -0.29\n  GPU 1  cuda_graphs                              0.83 ->        - GiB\n  GPU 1  kv_cache                                 7.58 ->     8.26 GiB  +0.67\n  GPU 1  held when it was ready                  24.46 ->    24.18 GiB  -0.28\n  GPU 1  held at the highest point of serving    24.46 ->    24.18 GiB  -0.28\n",
            err="",
        )
    )
    document = json.loads(_runs("show", "1", "2", "--json").out)
    assert document["differences"]["arguments"] == [{"flag": "--enforce-eager", "values": [None, ""]}]
    assert [one["number"] for one in document["runs"]] == [1, 2]
    assert _runs("show", "1", "1").out.count("  the same") == 4


def test_wrong_numbers(home: Path) -> None:
    keep_runs(home)
    assert _runs("show", "9") == snapshot(
        Transcript(code=2, out="", err="error: there is no run 9\nhint: loadmaster runs lists them\n")
    )
    assert _runs("drop", "1", "9").code == 2
    assert _runs("show", "1").code == 0
    assert _runs("show", "x").code == 2


def test_dropping(home: Path) -> None:
    keep_runs(home)
    assert _runs("drop", "1") == Transcript(0, "", "dropped: 1\n")
    assert [one["number"] for one in json.loads(_runs("--json").out)["runs"]] == [2]
    assert json.loads(_runs("drop", "2", "--json").out) == {"schema": 1, "dropped": [2]}


def test_what_was_learnt_is_shown_and_dropped(home: Path) -> None:
    keep_runs(home, (GRAPHS, GRAPHS, GRAPHS))
    assert _runs("calibration") == snapshot(
        Transcript(
            code=0,
            out="'2 x NVIDIA H200/vllm 0.24.0/Qwen3_5MoeForConditionalGeneration/context'\n  0.00 GiB (-0.02 to +0.01) on the plan's figure, learnt from runs 1, 2, 3, the\n  last on 2026-09-21\n'2 x NVIDIA H200/vllm 0.24.0/Qwen3_5MoeForConditionalGeneration/cuda_graphs'\n  +0.02 GiB (+0.01 to +0.04) on the plan's figure, learnt from runs 1, 2, 3, the\n  last on 2026-09-21\n'2 x NVIDIA H200/vllm 0.24.0/Qwen3_5MoeForConditionalGeneration/workspace'\n  +0.07 GiB (+0.04 to +0.08) on the plan's figure, learnt from runs 1, 2, 3, the\n  last on 2026-09-21\n\nPlans of just that use it and say so. To forget one, such as the first:\n  loadmaster runs calibration --drop '2 x NVIDIA H200/vllm 0.24.0/Qwen3_5MoeForConditionalGeneration/context'\n",
            err="",
        )
    )
    document = json.loads(_runs("calibration", "--json").out)
    keys = [one["key"] for one in document["learnt"]]
    assert _runs("calibration", "--drop", "nothing").code == 2
    assert _runs("calibration", "--drop", keys[0]).err == f"dropped: '{keys[0]}'\n"
    assert [one["key"] for one in json.loads(_runs("calibration", "--json").out)["learnt"]] == keys[1:]
    assert _runs("calibration", "--drop-all").code == 0
    assert json.loads(_runs("calibration", "--json").out)["learnt"] == []


def test_a_run_that_is_dropped_teaches_no_more(home: Path) -> None:
    keep_runs(home, (GRAPHS, GRAPHS, GRAPHS))
    assert json.loads(_runs("calibration", "--json").out)["learnt"]
    assert _runs("drop", "2").code == 0
    assert json.loads(_runs("calibration", "--json").out)["learnt"] == []


def test_a_damaged_file_is_said(home: Path) -> None:
    home.mkdir()
    (home / FILE).write_bytes(b"no database at all, and long enough for a header" * 4)
    for words in (("list",), ("show", "1"), ("drop", "1"), ("calibration",)):
        done = _runs(*words)
        assert (done.code, done.out) == (3, "")
        assert "file is not a database\nhint: loadmaster up NAME sets a damaged file aside" in done.err
        document = json.loads(_runs(*words, "--json").out)
        assert document["error"]["message"].endswith("file is not a database")


def test_a_newer_file_and_a_folder_are_left_alone(home: Path) -> None:
    keep_runs(home, (GRAPHS,))
    with contextlib.closing(sqlite3.connect(home / FILE)) as database:
        database.execute("PRAGMA user_version = 99")
    done = _runs()
    assert done.code == 3
    assert "written by a newer release of loadmaster; it is left alone\nhint: pip install --upgrade" in done.err
    for file in home.glob(f"{FILE}*"):
        file.unlink()
    (home / FILE).mkdir()
    done = _runs()
    assert (done.code, done.err.count("is a folder")) == (3, 1)
    assert f"hint: move it away: mv {home / FILE} {home / FILE}.away" in done.err


@pytest.mark.parametrize("words", [("show", "9" * 23), ("show", "1", "9" * 23), ("drop", "9" * 23)])
def test_a_number_beyond_all_runs(home: Path, words: tuple[str, ...]) -> None:
    keep_runs(home, (GRAPHS,))
    assert _runs(*words) == Transcript(2, "", f"error: there is no run {'9' * 23}\nhint: loadmaster runs lists them\n")
    assert json.loads(_runs(*words, "--json").out)["error"]["hint"] == "loadmaster runs lists them"
    assert len(json.loads(_runs("--limit", "9" * 23, "--json").out)["runs"]) == 1


def test_help_names_the_options_of_the_list() -> None:
    assert "--limit N" in _runs("--help").out
    assert "--json" in _runs("--help").out


def test_a_run_that_goes_on_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = begin_runs(home, 2)
    folder = home / "deployments" / "demo"
    folder.mkdir(parents=True)
    write_state(folder / "engine.json", EngineState(state="loading", runner=Pid.of(os.getpid()), run=second))
    monkeypatch.setenv("COLUMNS", "120")
    now, before = _runs().out.splitlines()[1:]
    assert now.startswith(f"{second} ")
    assert now.endswith("still runs")
    assert before.endswith("nobody saw it end")
    assert [run["running"] for run in json.loads(_runs("--json").out)["runs"]] == [True, False]
    assert "  ended        still runs\n" in _runs("show", str(second)).out
    assert "Nothing is compared yet" in _runs("show", str(second)).out
    assert "  ended        nobody saw it end\n" in _runs("show", str(first)).out
    assert "Nothing was compared: the run ended before it was ready" in _runs("show", str(first)).out
    write_state(folder / "engine.json", EngineState(state="exited", runner=Pid.of(os.getpid()), run=second))
    assert "still runs" not in _runs().out


def test_two_runs_that_were_never_compared_are_not_called_the_same(home: Path) -> None:
    begin_runs(home, 2)
    said = _runs("show", "1", "2").out
    assert said.endswith("actual, GPU by GPU\n  unknown: neither run was compared with its cards\n")
    assert "planned, GPU by GPU\n  the same\n" in said


def test_the_list_keeps_to_the_width(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_runs(home, (GRAPHS,))
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, _runs().out.splitlines())) <= 60
    monkeypatch.setenv("COLUMNS", "120")
    assert len(_runs().out.splitlines()) == 2


def test_a_run_in_host_memory(home: Path) -> None:
    (number,) = begin_runs(home, 1)
    sheet = sheet_of(GRAPHS)
    plan = structs.replace(sheet, gpus=sheet.gpus[:1])
    low, high = plan.gpus[0].peak_low_bytes["steady"], plan.gpus[0].peak_high_bytes["serving"]
    for held, words in (
        (high + 1, "hold more than the plan allows for"),
        (low - 1, "resident only as far as it was read"),
        (low, ""),
    ):
        found = reconcile_host(plan, held)
        assert found.host is not None
        assert (found.host.reason is None) == (words == "")
        store = RunStore(home / FILE, "demo")
        store.reconcile(number, STARTED, found)
        store.close()
        said = " ".join(_runs("show", str(number)).out.split())
        assert f"host memory, when it was ready planned {size(low)} when idle to {size(high)} when serving" in said
        assert f"resident {size(held)}, all processes of the engine" in said
        assert words in said
    assert json.loads(_runs("--json").out)["runs"][0]["held_bytes"] == low
    assert reconcile_host(plan, None).notes
