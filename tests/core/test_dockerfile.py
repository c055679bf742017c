"""Dockerfiles, Windows line ends and arithmetic in pasted text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.commands.arithmetic import with_arithmetic
from loadmaster.core.commands.dockerfile import read_dockerfile
from loadmaster.edge.commandfile import read_command

WANTED = {"--max-model-len": 4096}


@pytest.mark.parametrize(
    "text",
    [
        'FROM vllm/vllm-openai:v0.24.0\nENTRYPOINT ["vllm","serve"]\nCMD ["a/b","--max-model-len","4096"]\n',
        'FROM vllm/vllm-openai:v0.24.0\nCMD ["--model","a/b","--max-model-len","4096"]\n',
        "FROM vllm/vllm-openai:v0.24.0\nENTRYPOINT vllm serve a/b --max-model-len 4096\nCMD [\"--port\", \"1\"]\n",
        'FROM ubuntu:24.04 AS tools\nCMD ["bash"]\nFROM vllm/vllm-openai:v0.24.0\n# what runs\n'
        'ENTRYPOINT ["python3", "-m", \\\n  "vllm.entrypoints.openai.api_server"]\nCMD ["--model", "a/b", "--max-model-len=4096"]',
        'FROM vllm/vllm-openai:v0.24.0 AS base\nENTRYPOINT ["vllm","serve"]\nFROM base\nCMD ["a/b","--max-model-len","4096"]',
        'from vllm/vllm-openai:v0.24.0\nenv HF_HUB_OFFLINE=1\nentrypoint ["vllm"]\ncmd ["serve", "a/b", "--max-model-len", "4096"]',
    ],
)  # fmt: skip
def test_entry_point_and_command_are_one(text: str) -> None:
    launch = read_command(text, "Dockerfile")
    assert (launch.model, launch.flags) == ("a/b", WANTED)
    assert launch.engine_version == "0.24.0"


def test_variables_of_a_dockerfile() -> None:
    text = 'FROM vllm/vllm-openai\nENV A=1 B="2 3"\nENV OLD way\nENTRYPOINT ["vllm","serve","a/b"]'
    launch = read_command(text)
    assert launch.env == {"A": "1", "B": "2 3", "OLD": "way"} and launch.flags == {}


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_dockerfile_raises(first: str, second: str) -> None:
    read_dockerfile(f"FROM {first}\nENTRYPOINT {second}\nCMD {first}")


def test_windows_line_ends_behind_a_backslash() -> None:
    launch = read_command("vllm serve a/b \\\r\n --max-model-len 4096\r\n")
    assert launch.flags == WANTED
    assert any("carriage return" in item.text and item.line == 1 for item in launch.damage)
    assert read_command("vllm serve a/b \\\n --max-model-len 4096\r\n").damage == ()
    assert read_command("vllm serve a/b ^\r\n --max-model-len 4096\r\n").damage == ()


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$((32*1024))", "32768"),
        ("$(( (1 + 3) * 1024 - 7 / 2 ))", "4093"),
        ("$((-7 / 2))", "-3"),
        ("$((1/0))", "$((1/0))"),
        ("$((N*2))", "$((N*2))"),
        ("$((2**99))", "$((2**99))"),
        ("$((" + "(" * 150 + "))", "$((" + "(" * 150 + "))"),
    ],
)
def test_arithmetic(text: str, result: str) -> None:
    assert with_arithmetic(text) == result


def test_arithmetic_in_a_command() -> None:
    assert read_command("vllm serve a/b --max-model-len $((4*1024))").flags == WANTED
