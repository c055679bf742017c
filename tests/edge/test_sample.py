"""Samples have the parameters and bytes of the published checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadmaster.edge.modeldir import read_model
from loadmaster.edge.sample import main, write_sample


# Parameters as the hub counts them from the published safetensors headers. Qwen3.5's count has the MTP head.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Mistral-7B-v0.3", 7_248_023_552),
        ("Qwen3-8B", 8_190_735_360),
        ("Gemma-3-12B", 12_187_325_040),
        ("Qwen2.5-VL-7B", 8_292_166_656),
        ("Qwen3.5-9B", 9_653_104_368),
        ("Qwen3-VL-30B-A3B", 31_070_754_032),
        ("Qwen3.5-35B-A3B", 35_951_822_704),
    ],
)
def test_parameters(name: str, parameters: int, tmp_path: Path) -> None:
    facts = read_model(str(write_sample(name, "bf16", tmp_path / "m")))
    assert sum(part.parameters for part in facts.parts) == parameters
    assert facts.weight_bytes == pytest.approx(2 * parameters, rel=1e-5)


@pytest.mark.slow
def test_a_whole_mixture_in_four_bits(tmp_path: Path) -> None:
    directory = write_sample("Qwen3.5-35B-A3B", "ct-w4-g32", tmp_path / "m")
    facts = read_model(str(directory))
    assert sum(file.tensors or 0 for file in facts.files) == 95_427
    assert facts.weight_bytes == 24_441_414_752  # 22.76 GiB; the published build has 22.78 with its metadata
    assert len(facts.tensors) < 100
    taken = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    assert taken < 64 << 20


def test_an_mtp_layer_behind_the_decoder(tmp_path: Path) -> None:
    facts = read_model(str(write_sample("DeepSeek-V3", "fp8-block", tmp_path / "m", layers=4, shard_bytes=64 << 30)))
    sizes = {part.name: part.parameters for part in facts.parts}
    assert sizes["language.mlp"] == 3 * 3 * 7168 * 18432
    assert sizes["language.experts"] == 256 * 3 * 7168 * 2048
    assert sizes["mtp"] > sizes["language.experts"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["Qwen3.5-9B", "bf16", str(tmp_path / "m"), "truncated"]) == 0
    assert "GiB of holes" in capsys.readouterr().err
    assert main(["Qwen3.5-9B", "bf16", str(tmp_path / "m")]) == 2
    assert "is not empty" in capsys.readouterr().err
    for arguments in (["x"], ["Nobody-7B", "bf16", str(tmp_path / "a")], ["Qwen3.5-9B", "w3", str(tmp_path / "b")]):
        assert main(arguments) == 2
    assert main(["Qwen3.5-9B", "bf16", str(tmp_path / "c"), "melted"]) == 2
    assert "no damage 'melted'" in capsys.readouterr().err
