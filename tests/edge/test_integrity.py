"""Every kind of damage is found, under the code that names its cause, with numbers and a remedy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadmaster.core.facts import Finding, ModelFacts
from loadmaster.edge.modeldir import read_model
from loadmaster.edge.sample import (
    DAMAGE,
    sample_formats,
    sample_names,
    split_shards,
    write_header,
    write_index,
    write_sample,
    write_shard,
)
from loadmaster.edge.source import ModelError

SMALL = {"layers": 4, "shard_bytes": 300 << 20}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample("Qwen3-8B", "awq-g128", tmp_path_factory.mktemp("pristine") / "model", None, **SMALL)


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    """A sound checkpoint of four layers in several files, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "model", copy_function=_copy_with_holes))


def _copy_with_holes(source: str, target: str) -> None:
    """Header and length; the data area stays a hole."""
    with Path(source).open("rb") as old, Path(target).open("wb") as new:
        new.write(old.read(4 << 20))
        new.truncate(Path(source).stat().st_size)


def codes(facts: ModelFacts) -> list[str]:
    return [finding.code for finding in facts.findings]


def only(facts: ModelFacts) -> Finding:
    (finding,) = facts.findings
    return finding


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def read_json_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), length


def edit_json_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites a header in place; it must not grow."""
    header, length = read_json_header(path)
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= length
    with path.open("r+b") as file:
        file.seek(8)
        file.write(text.ljust(length))


def read_shard(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    header, _ = read_json_header(path)
    return {name: (v["dtype"], tuple(v["shape"])) for name, v in header.items() if name != "__metadata__"}


@pytest.mark.parametrize("name", sample_names())
@pytest.mark.parametrize("quantization", ["bf16", "ct-w4-g32", "awq-g128", "gptq-g128", "fp8-block"])
def test_sound_checkpoints_have_no_findings(name: str, quantization: str, tmp_path: Path) -> None:
    layers = 4 if "DeepSeek" in name or "VL-30B" in name or "35B" in name else 8
    facts = read_model(str(write_sample(name, quantization, tmp_path / "m", layers=layers, shard_bytes=2 << 30)))
    assert facts.findings == ()
    assert facts.weight_bytes == sum(part.bytes for part in facts.parts) == sum(g.total_bytes for g in facts.tensors)
    assert facts.parameters == sum(part.parameters for part in facts.parts if part.name != "mtp")
    assert {file.status for file in facts.files} == {"ok"}
    assert "other" not in {part.name for part in facts.parts}


@pytest.mark.parametrize("quantization", [name for name in sample_formats() if name != "bf16"])
def test_parameters_are_the_same_in_every_format(quantization: str, tmp_path: Path) -> None:
    plain = read_model(str(write_sample("Qwen3-8B", "bf16", tmp_path / "plain", layers=2)))
    packed = read_model(str(write_sample("Qwen3-8B", quantization, tmp_path / "packed", layers=2)))
    assert packed.findings == ()
    assert packed.parameters == plain.parameters
    assert (packed.weight_bytes or 0) < (plain.weight_bytes or 0)
    schemes = {entry.scheme for entry in packed.quantization_by_class if entry.module_class == "mlp"}
    assert "bfloat16" not in schemes or quantization == "awq-g128"


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        ("truncated", "weights-truncated"),
        ("missing", "weights-missing-shard"),
        ("lfs", "weights-lfs-pointer"),
        ("header", "header-invalid"),
        ("dup", "tensor-duplicate"),
        ("no-processor", "processor-missing"),
        ("no-template", "chat-template-missing"),
        ("bad-json", "config-invalid"),
    ],
)
def test_each_damage_has_its_code(damage: str, code: str, tmp_path: Path) -> None:
    assert damage in DAMAGE
    directory = write_sample("Qwen3.5-9B", "bf16", tmp_path / "m", damage, layers=8)
    finding = only(read_model(str(directory)))
    assert finding.code == code
    assert finding.severity == "error"
    assert finding.evidence
    assert finding.evidence[0].path
    assert finding.fixes


def test_truncated_says_how_much_is_missing(model: Path) -> None:
    size = shards(model)[1].stat().st_size
    os.truncate(shards(model)[1], size - 1000)
    facts = read_model(str(model))
    finding = only(facts)
    assert finding.code == "weights-truncated"
    assert "1,000 are missing" in finding.evidence[0].text
    assert f"{size:,}" in finding.evidence[0].text
    assert next(file.status for file in facts.files if file.name == shards(model)[1].name) == "truncated"


def test_a_file_that_is_too_long(model: Path) -> None:
    with shards(model)[0].open("ab") as file:
        file.write(b"\0" * 77)
    finding = only(read_model(str(model)))
    assert finding.code == "weights-truncated"
    assert "77 too many" in finding.evidence[0].text


def test_missing_shard_says_how_many_bytes(model: Path) -> None:
    victim = shards(model)[1]
    tensors = read_shard(victim)
    victim.unlink()
    finding = only(read_model(str(model)))
    assert finding.code == "weights-missing-shard"
    assert f"{len(tensors)} tensors" in finding.evidence[0].text
    assert "bytes of tensors are missing" in finding.title


def test_numbering_tells_what_is_missing_without_an_index(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    names = [path.name for path in shards(model)]
    shards(model)[1].unlink()
    finding = next(f for f in read_model(str(model)).findings if f.code == "weights-missing-shard")
    assert [item.path for item in finding.evidence] == [names[1]]


def test_a_tensor_twice_without_an_index(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    first, last = shards(model)[0], shards(model)[-1]
    name, tensor = next(iter(read_shard(first).items()))
    write_shard(last, {**read_shard(last), name: tensor})
    finding = only(read_model(str(model)))
    assert finding.code == "tensor-duplicate"
    assert name in finding.evidence[0].text


def test_overlap_and_gap(model: Path) -> None:
    def shift(header: dict[str, Any]) -> None:
        victim = [name for name in header if name != "__metadata__"][2]
        begin, end = header[victim]["data_offsets"]
        header[victim]["data_offsets"] = [begin - 4, end - 4]

    edit_json_header(shards(model)[1], shift)
    finding = only(read_model(str(model)))
    assert finding.code == "tensor-overlap"
    assert any("4 bytes before" in item.text for item in finding.evidence)
    assert any("4 bytes of no tensor" in item.text for item in finding.evidence)


def test_extent_that_is_not_shape_times_type(tmp_path: Path) -> None:
    model = write_sample("Llama-3.1-8B", "bf16", tmp_path / "m", layers=1)
    edit_json_header(shards(model)[0], lambda header: header["model.norm.weight"].update(shape=[2048]))
    finding = only(read_model(str(model)))
    assert finding.code == "tensor-overlap"
    expected = "model.norm.weight (1 tensor): 8,192 bytes, but shape [2048] of BF16 is 4,096"
    assert finding.evidence[0].text == expected


def test_an_entry_twice_in_one_header(model: Path) -> None:
    path = shards(model)[1]
    header, length = read_json_header(path)
    text = json.dumps(header, separators=(",", ":"))
    name, entry = list(header.items())[1]
    size = path.stat().st_size - length - 8
    twice = json.dumps({**entry, "data_offsets": [size, size + 4]}, separators=(",", ":"))
    write_header(path, f'{text[:-1]},"{name}":{twice}}}'.encode(), size + 4)
    found = codes(read_model(str(model)))
    assert "tensor-duplicate" in found


def test_index_names_a_tensor_that_no_file_has(model: Path) -> None:
    def add(index: dict[str, Any]) -> None:
        index["weight_map"]["model.layers.9.extra.weight"] = shards(model)[0].name

    edit(model / "model.safetensors.index.json", add)
    finding = only(read_model(str(model)))
    assert finding.code == "weights-name-mismatch"
    assert "model.layers.9.extra.weight" in finding.evidence[0].text


def test_index_leaves_a_tensor_out_and_moves_another(model: Path) -> None:
    first, second = shards(model)[1:3]
    moved, left_out = list(read_shard(first))[:2]

    def change(index: dict[str, Any]) -> None:
        index["weight_map"][moved] = second.name
        del index["weight_map"][left_out]

    edit(model / "model.safetensors.index.json", change)
    facts = read_model(str(model))
    assert codes(facts) == ["config-invalid", "config-invalid"]
    assert {finding.severity for finding in facts.findings} == {"warning"}
    text = " ".join(item.text for finding in facts.findings for item in finding.evidence)
    assert moved in text
    assert left_out in text
    assert second.name in text


def test_files_outside_the_index_are_said_and_left_out(model: Path) -> None:
    before = read_model(str(model))
    write_shard(model / "stray.safetensors", {"x.weight": ("BF16", (4,))})
    facts = read_model(str(model))
    assert codes(facts) == ["config-invalid"]
    assert facts.tensors == before.tensors
    assert next(file.status for file in facts.files if file.name == "stray.safetensors") == "not-indexed"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 5}}', "null"])
def test_an_index_that_is_none(model: Path, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text)
    facts = read_model(str(model))
    assert codes(facts) == ["config-invalid"]
    assert facts.weight_bytes


@pytest.mark.parametrize(
    "name",
    ["model-00001.safetensors.incomplete", "x.part", "y.aria2", "z.lock", ".cache/huggingface/download/a.incomplete"],
)
def test_leftovers_of_downloads(model: Path, name: str) -> None:
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).write_bytes(b"1234")
    finding = only(read_model(str(model)))
    assert (finding.code, finding.severity) == ("download-incomplete", "warning")
    assert finding.evidence[0].path == name
    assert "4 bytes" in finding.evidence[0].text


@pytest.mark.parametrize(
    ("leftover", "severity"), [("x.safetensors.incomplete", "error"), ("y.aria2", "error"), ("z.lock", "warning")]
)
def test_leftovers_beside_a_missing_shard(model: Path, leftover: str, severity: str) -> None:
    shard = min(model.glob("*.safetensors"))
    shard.unlink()
    (model / leftover).write_bytes(b"1234")
    found = {item.code: item for item in read_model(str(model)).findings}
    assert found["weights-missing-shard"].severity == "error"
    assert found["download-incomplete"].severity == severity
    assert ("1 weight file is not there" in found["download-incomplete"].cause) == (severity == "error")


def test_missing_small_files(model: Path) -> None:
    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        (model / name).unlink()
    found = {(f.code, f.severity, f.evidence[0].path) for f in read_model(str(model)).findings}
    assert found == {
        ("config-invalid", "error", "config.json"),
        ("tokenizer-broken", "error", "tokenizer.json"),
        ("config-invalid", "note", "generation_config.json"),
    }


def test_tokenizer_cut_short_or_of_another_model(model: Path) -> None:
    whole = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(whole[:-40])
    assert codes(read_model(str(model))) == ["tokenizer-broken"]
    value = json.loads(whole)
    value["added_tokens"][0]["id"] = 999_999
    (model / "tokenizer.json").write_text(json.dumps(value))
    finding = only(read_model(str(model)))
    assert finding.code == "tokenizer-broken"
    assert "999999" in finding.evidence[0].text


def test_a_template_without_pictures(tmp_path: Path) -> None:
    model = write_sample("Qwen2.5-VL-7B", "bf16", tmp_path / "m", layers=1)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    finding = only(read_model(str(model)))
    assert finding.code == "chat-template-missing"
    (model / "chat_template.jinja").unlink()
    edit(model / "tokenizer_config.json", lambda value: value.update(chat_template="{{ '<|image_pad|>' }}"))
    assert read_model(str(model)).findings == ()


def test_weights_of_another_kind_and_none(model: Path) -> None:
    for path in shards(model):
        path.unlink()
    (model / "model.safetensors.index.json").unlink()
    facts = read_model(str(model))
    assert codes(facts) == ["weights-missing-shard"]
    assert facts.format == "config"
    assert facts.weight_bytes is None
    shutil.rmtree(model)
    model.mkdir()
    with pytest.raises(ModelError):
        read_model(str(model))


# ---------------------------------------------------------------------------- the declaration against the tensors


def declare(model: Path, **changes: Any) -> ModelFacts:
    edit(model / "config.json", lambda config: config["quantization_config"].update(changes))
    return read_model(str(model))


def test_another_method_than_the_tensors(model: Path) -> None:
    finding = only(declare(model, quant_method="gptq", sym=True))
    assert finding.code == "weights-name-mismatch"
    assert "gptq" in finding.title
    assert "AutoAWQ" in finding.title


def test_awq_declared_and_compressed_tensors_stored(tmp_path: Path) -> None:
    model = write_sample("Qwen3-8B", "ct-w4-g32", tmp_path / "m", layers=2)
    edit(
        model / "config.json",
        lambda c: c.update(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32}),
    )
    finding = only(read_model(str(model)))
    assert finding.code == "weights-name-mismatch"
    assert "weight_packed" in finding.title


def test_other_groups_widths_and_zero_points(model: Path) -> None:
    finding = only(declare(model, group_size=64))
    assert finding.code == "config-invalid"
    assert "every 128 values, group size 64 declared" in finding.evidence[0].text
    finding = only(declare(model, group_size=128, bits=8))
    assert "4 bits by its shapes, 8 declared" in finding.evidence[0].text


def test_zero_points_that_are_not_there(tmp_path: Path) -> None:
    model = write_sample("Qwen3-8B", "ct-w4-g32", tmp_path / "m", layers=2)
    edit(
        model / "config.json",
        lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(symmetric=False),
    )
    finding = only(read_model(str(model)))
    assert finding.code == "weights-name-mismatch"
    assert "zero points" in finding.title


def test_quantised_and_not_declared_and_the_reverse(tmp_path: Path) -> None:
    model = write_sample("Qwen3-8B", "fp8-block", tmp_path / "a", layers=2)
    edit(model / "config.json", lambda config: config.pop("quantization_config"))
    assert "declares no quantisation" in only(read_model(str(model))).title
    model = write_sample("Qwen3-8B", "bf16", tmp_path / "b", layers=2)
    edit(model / "config.json", lambda config: config.update(quantization_config={"quant_method": "awq", "bits": 4}))
    assert "no tensor is quantised" in only(read_model(str(model))).title


def test_modules_left_out_and_quantised_all_the_same(tmp_path: Path) -> None:
    model = write_sample("Qwen3-8B", "ct-w4-g32", tmp_path / "a", layers=2)

    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"] += ["model.layers.1.mlp.gate_proj", "re:.*self_attn.*"]

    edit(model / "config.json", change)
    finding = only(read_model(str(model)))
    assert finding.code == "weights-name-mismatch"
    assert [item.text for item in finding.evidence] == [
        "model.layers.{l}.self_attn.q_proj",
        "model.layers.{l}.self_attn.k_proj",
        "model.layers.{l}.self_attn.v_proj",
        "model.layers.{l}.self_attn.o_proj",
        "model.layers.{l}.mlp.gate_proj",
    ]


def test_modules_plain_and_not_left_out(tmp_path: Path) -> None:
    model = write_sample("Qwen3.5-9B", "ct-w4-g32", tmp_path / "a", layers=4)
    edit(
        model / "config.json", lambda config: config["quantization_config"].update(ignore=["lm_head", "re:.*visual.*"])
    )
    finding = only(read_model(str(model)))
    assert finding.severity == "warning"
    assert {item.text for item in finding.evidence} == {
        "model.language_model.layers.{l}.linear_attn.in_proj_a",
        "model.language_model.layers.{l}.linear_attn.in_proj_b",
    }


def test_packed_weights_of_the_wrong_type(tmp_path: Path) -> None:
    model = write_sample("Qwen3-8B", "awq-g128", tmp_path / "m", layers=2)
    path = shards(model)[0]
    changed = {
        name: ("U32", shape) if name.endswith("qweight") else (dtype, shape)
        for name, (dtype, shape) in read_shard(path).items()
    }
    write_shard(path, changed)
    assert codes(read_model(str(model))) == ["quant-format-unsupported"]


def test_layers_and_experts_that_are_not_there(tmp_path: Path) -> None:
    model = write_sample("Qwen3.5-35B-A3B", "ct-w4-g32", tmp_path / "m", layers=4)
    edit(model / "config.json", lambda config: config["text_config"].update(num_hidden_layers=6, num_experts=128))
    facts = read_model(str(model))
    assert codes(facts) == ["weights-name-mismatch"] * 2
    assert facts.findings[0].evidence[0].text == "layers without tensors: 4-5"
    assert "layer 0 has 256" in facts.findings[1].evidence[0].text


def test_doubled_prefix(tmp_path: Path) -> None:
    model = write_sample("Qwen3-8B", "bf16", tmp_path / "m", layers=1)
    files = split_shards({f"model.{name}": tensor for name, tensor in read_shard(shards(model)[0]).items()}, 1 << 40)
    shards(model)[0].unlink()
    for file, tensors in files.items():
        write_shard(model / file, tensors)
    write_index(model / "model.safetensors.index.json", files)
    finding = only(read_model(str(model)))
    assert finding.code == "weights-name-mismatch"
    assert "doubled prefix" in finding.title


@pytest.mark.parametrize(
    ("name", "content", "code", "words"),
    [
        (
            "tokenizer.json",
            "version https://git-lfs.github.com/spec/v1\nsize 11422654\n",
            "weights-lfs-pointer",
            "11,422,654",
        ),
        ("config.json", "<!DOCTYPE html><html>", "config-invalid", "web page"),
        ("preprocessor_config.json", "{", "processor-missing", "truncated"),
        ("generation_config.json", "[1]", "config-invalid", "holds a list"),
    ],
)
def test_small_files_that_are_something_else(name: str, content: str, code: str, words: str, tmp_path: Path) -> None:
    model = write_sample("Qwen2.5-VL-7B", "bf16", tmp_path / "m", layers=1)
    (model / name).write_text(content)
    finding = only(read_model(str(model)))
    assert finding.code == code
    assert words in finding.evidence[0].text


def test_pytorch_files_are_said_to_be_closed(model: Path) -> None:
    for path in (*shards(model), model / "model.safetensors.index.json"):
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"PK")
    finding = only(read_model(str(model)))
    assert (finding.code, finding.severity) == ("weights-missing-shard", "warning")
    assert finding.evidence[0].path == "pytorch_model.bin"


@pytest.mark.parametrize("depth", [500, 100_000])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors.index.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_deep_nesting_is_no_traceback(name: str, depth: int, tmp_path: Path) -> None:
    model = write_sample("Qwen2.5-VL-7B", "bf16", tmp_path / "m", layers=1)
    text = (model / name).read_text().rstrip()[:-1]
    (model / name).write_text(f'{text}, "deep": {"[" * depth}{"]" * depth}}}')
    facts = read_model(str(model))
    assert len(facts.findings) == (depth > 1000)


def test_what_a_file_says_cannot_write_to_the_terminal(model: Path) -> None:
    def add(index: dict[str, Any]) -> None:
        index["weight_map"]["evil\x1b[2J"] = "\x1b]0;x\x07.safetensors"

    edit(model / "model.safetensors.index.json", add)
    edit(model / "config.json", lambda config: config.update(architectures=["A\x1b[31m"], model_type="\x1b[2J"))
    facts = read_model(str(model))
    assert facts.architecture is None
    assert facts.model_type is None
    assert "weights-missing-shard" in codes(facts)
    assert "\x1b" not in repr([(f.title, f.evidence, f.fixes) for f in facts.findings]).replace("\\x1b", "")
    assert all(item.text.isprintable() for finding in facts.findings for item in finding.evidence)
