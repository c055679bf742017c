"""The engine in an image against the version that is checked."""

from __future__ import annotations

import pytest

from loadmaster.core.check import check_launch
from loadmaster.core.facts import EngineFacts
from loadmaster.edge.commandfile import read_command


@pytest.mark.parametrize(
    ("tag", "version", "differs"),
    [
        ("v0.33.0", "0.24.0", True),
        ("v0.33.0", "0.33.1", True),
        ("v0.33.0", "0.33", False),
        ("v0.33.0", "0.33.0", False),
        ("v0.33.0", None, False),
        ("latest", "0.24.0", False),
    ],
)
def test_the_image_and_the_version(tag: str, version: str | None, differs: bool) -> None:
    line = f"docker run --gpus all vllm/vllm-openai:{tag} --model a/b"
    launch = read_command(line, engine_version=version)
    engine = EngineFacts("vllm", version or launch.engine_version)
    items = check_launch(launch, model=None, gpus=None, engine=engine)
    assert any(item.code == "flag-conflict" and "image" in item.cause for item in items) == differs
