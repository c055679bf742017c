"""A line of a log apart from what stands around it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.logarguments import is_whole, read_arguments
from loadmaster.core.logtext import LogLine, Tracebacks, read_line

INNER = "(Worker_TP1 pid=12) ERROR 11-30 09:32:14 [gpu_worker.py:27] ValueError: x"


@pytest.mark.parametrize(
    ("line", "text", "speaker", "source", "level"),
    [
        (INNER, "ValueError: x", "Worker_TP1 pid=12", "gpu_worker.py:27", "ERROR"),
        ("INFO 12-27 08:52:17 config.py:350] x", "x", "", "config.py:350", "INFO"),
        ("ERROR [core.py:1330] x", "x", "", "core.py:1330", "ERROR"),
        ("[multiproc_executor.py:492] ValueError: x", "ValueError: x", "", "multiproc_executor.py:492", ""),
        ("VllmWorkerProcess pid=214) ERROR 09-27 05:20:38 a.py:2] x", "x", "VllmWorkerProcess pid=214", "a.py:2", "ERROR"),
        ("(VllmWorker TP2) ERROR 08-11 21:42:14 [a.py:559] x", "x", "VllmWorker TP2", "a.py:559", "ERROR"),
        ("(APIServer pid=1) (DPEngineCoreActor pid=2) ERROR 12-23 23:04:22 [c.py:1]     x", "    x", "DPEngineCoreActor pid=2", "c.py:1", "ERROR"),
        ("[1;36m(APIServer pid=9)[0;0m INFO:     Started server process [9]", "Started server process [9]", "APIServer pid=9", "", "INFO"),
        ("[rank0]:     main()", "    main()", "rank0", "", ""),
        ("[rank1]:[W1227 08:52:18.060131299 ProcessGroupNCCL.cpp:1250] x", "x", "rank1", "ProcessGroupNCCL.cpp:1250", "WARNING"),
        ("[2025-01-01 10:00:00 DP0 TP1] Load weight end.", "Load weight end.", "DP0 TP1", "", ""),
        ("2025-01-01 10:00:00,123 - lmdeploy - ERROR - engine.py:12 - x", "x", "", "engine.py:12", "ERROR"),
        ("0.00.004.104 E gguf_init_from_file: x", "gguf_init_from_file: x", "", "", "ERROR"),
        ("no prefix: at all", "no prefix: at all", "", "", ""),
    ],
)  # fmt: skip
def test_what_engines_write_in_front(line: str, text: str, speaker: str, source: str, level: str) -> None:
    read = read_line(line)
    assert (read.text, read.speaker, read.source, read.level) == (text, speaker, source, level)


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "\x1b[36m{}\x1b[0m",
        "vllm-1  | {}",
        "> {}",
        "> > {}",
        "Nov 30 09:48:14 host vllm[123]: {}",
        "2026-11-30T09:48:14+0100 host vllm[123]: {}",
        "2026-11-30T09:48:14.123456789Z {}",
        "2026-11-30T09:48:14.123456789Z stderr F {}",
        "[pod/vllm-6d5f4/vllm] {}",
        "[pod/vllm-6d5f4/vllm] 2026-11-30T09:48:14.123456789Z {}",
        "2026-11-30 09:48:14,123 {}",
        "2026-11-30 09:48:14 | ERROR | stderr | {}",
        "INFO 2026-11-30T09:48:14.123456789Z [resource.labels.containerName: vllm] {}",
        "11月 30 09:48:14 host bash[123]: {}",
    ],
)
def test_what_other_programs_write_around(around: str) -> None:
    read, inner = read_line(around.format(INNER)), read_line(INNER)
    assert (read.text, read.speaker, read.source, read.at) == (inner.text, inner.speaker, inner.source, inner.at)


@pytest.mark.parametrize("key", ["log", "MESSAGE", "message"])
def test_lines_in_json(key: str) -> None:
    assert read_line(json.dumps({key: INNER + "\n", "stream": "stderr"})).text == "ValueError: x"


def test_a_line_that_was_copied_as_html() -> None:
    assert (
        read_line("  File &quot;/opt/a.py&quot;, line 2, in &lt;lambda&gt;").text
        == '  File "/opt/a.py", line 2, in <lambda>'
    )
    assert read_line("a && b &amp c").text == "a && b &amp c"


def test_a_line_that_the_container_runtime_has_cut() -> None:
    assert read_line("2026-11-30T09:48:14.1Z stderr P half").partial
    assert not read_line("2026-11-30T09:48:14.1Z stderr F half").partial


def test_times_differ_by_seconds() -> None:
    first, second = (read_line(f"INFO 11-30 09:{minute}:14 [a.py:1] x").at for minute in ("48", "50"))
    assert first is not None and second is not None
    assert second - first == 120
    assert read_line("INFO 13-45 99:99:99 [a.py:1] x").at is None


def test_frames_broken_over_lines_and_without_their_indentation() -> None:
    tracebacks = Tracebacks()
    frames: list[str] = []
    for line in (
        '(Worker pid=1) ERROR 11-30 09:48:14 [a.py:1]   File "/x/worker.py", line 3, in determine_num_av',
        "ailable_blocks",
        '(Worker pid=1) ERROR 11-30 09:48:14 [a.py:1] File "/x/m.py", line 9, in forward',
        "(Worker pid=1) ERROR 11-30 09:48:14 [a.py:1] self.vision_model(pixel_values)",
        "(Worker pid=1) ERROR 11-30 09:48:14 [a.py:1] torch.OutOfMemoryError: x",
    ):
        frames = list(tracebacks.above(read_line(line)))
    assert "determine_num_available_blocks" in frames[0]
    assert "self.vision_model(pixel_values)" in frames[1]
    assert not any("OutOfMemoryError" in frame for frame in frames)


@given(st.text(max_size=400))
def test_any_line_is_read(line: str) -> None:
    assert isinstance(read_line(line), LogLine)


def test_a_very_long_line_is_cut_in_its_middle() -> None:
    read = read_line("a" * 1_000_000 + " at the end")
    assert len(read.text) < 30_000
    assert read.text.endswith(" at the end")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{'a': 1, 'b': ['x', 'y'], 'c': {'d': True}}", {"a": 1, "b": ["x", "y"], "c": {"d": True}}),
        ("Namespace(host=None, port=8000, model='/m', f=<function x at 0x7f>, dtype='half')", {"host": None, "port": 8000, "model": "/m", "f": "<function x at 0x7f>", "dtype": "half"}),
        ("model='/m', dtype=torch.bfloat16, kv=CacheConfig(a=1, b=[2]), seed=0, ", {"model": "/m", "dtype": "torch.bfloat16", "kv": "CacheConfig(a=1, b=[2])", "seed": 0}),
        ("{'kind': <LoadFormat.AUTO: 'auto'>, 'n': 2}", {"kind": "auto", "n": 2}),
        ("{'a': 'it''s', 'cut': [1, 2", {"a": "its"}),
        ("", {}),
    ],
)  # fmt: skip
def test_printed_arguments(text: str, found: dict[str, object]) -> None:
    assert read_arguments(text) == found


@given(st.text(alphabet="{}[]()<>'\"=,: ab1\\", max_size=80))
def test_any_printed_arguments_are_read(text: str) -> None:
    read_arguments(text)
    is_whole(text)
