"""GGUF files: what is read from their headers, and what is said of damaged ones."""

from __future__ import annotations

import random
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from loadmaster.core.facts import ModelFacts
from loadmaster.core.ggufconfig import ggml_types, template
from loadmaster.edge.gguf import find_projector, read_gguf
from loadmaster.edge.source import ModelError
from tests import gguf_writer as writer

ROOT = Path(__file__).resolve().parents[2]


def model(folder: Path, architecture: str = "qwen3", name: str = "model.gguf", **shape: Any) -> Path:
    return writer.write_gguf(folder / name, *writer.text_model(architecture, **shape))


def codes(facts: ModelFacts) -> set[str]:
    return {finding.code for finding in facts.findings}


# ------------------------------------------------------------------------------------------ what is read


def test_dense_model(tmp_path: Path) -> None:
    facts = read_gguf(model(tmp_path, "qwen3", vocab=600, layers=3))
    text = facts.text
    assert (facts.format, facts.architecture, facts.name) == ("gguf", "qwen3", "tiny qwen3")
    assert (text.vocab_size, text.hidden_size, text.intermediate_size, text.num_hidden_layers) == (600, 64, 128, 3)
    assert (text.num_attention_heads, text.num_key_value_heads, text.head_dim) == (4, 2, 32)
    assert text.max_position_embeddings == 4096
    assert text.layer_types == ("full_attention",) * 3
    assert text.tie_word_embeddings is False
    assert facts.has_chat_template is True
    assert facts.vision is None
    assert facts.findings == ()
    (file,) = facts.files
    assert (file.status, file.kind, file.tensors) == ("ok", "weights", 3 + 3 * 11)


def test_sums_agree(tmp_path: Path) -> None:
    _, tensors = writer.text_model("qwen3moe", experts=4, kind=writer.Q8_0)
    facts = read_gguf(model(tmp_path, "qwen3moe", experts=4, kind=writer.Q8_0))
    size = sum(writer.tensor_bytes(shape, kind) for shape, kind in tensors.values())
    assert facts.weight_bytes == size
    assert sum(group.total_bytes for group in facts.tensors) == size
    assert sum(part.bytes for part in facts.parts) == size
    assert sum(part.parameters for part in facts.parts) == facts.parameters
    assert sum(group.count for group in facts.tensors) == len(tensors)
    experts = next(group for group in facts.tensors if group.name == "blk.{l}.ffn_up_exps.weight")
    assert (experts.shape, experts.dtype, experts.count) == ((4, 64, 64), "Q8_0", 4)
    assert experts.nbytes == 4 * 64 * 64 // 32 * 34
    assert experts.layers == {0: 1, 1: 1, 2: 1, 3: 1}


def test_hybrid_model(tmp_path: Path) -> None:
    facts = read_gguf(model(tmp_path, "qwen35moe", experts=4, layers=8))
    assert facts.text.layer_types == ("linear_attention",) * 3 + ("full_attention",) + ("linear_attention",) * 3 + (
        "full_attention",
    )
    assert facts.text.linear_num_key_heads == 2
    assert facts.text.linear_num_value_heads == 4
    assert facts.text.linear_value_head_dim == 32
    assert facts.text.shared_expert_intermediate_size == 64
    names = {part.name for part in facts.parts}
    assert {"language.experts", "language.router", "language.linear_attention", "language.attention"} <= names
    linear = next(part for part in facts.parts if part.name == "language.linear_attention")
    assert linear.tensors == 6 * 9  # the fused matrix belongs to it


def test_prediction_layers_are_not_layers(tmp_path: Path) -> None:
    facts = read_gguf(model(tmp_path, "qwen35", predict_layers=1))
    assert (facts.text.num_hidden_layers, facts.text.num_mtp_layers) == (4, 1)
    assert "mtp" in {part.name for part in facts.parts}


def test_sliding_window_layers(tmp_path: Path) -> None:
    facts = read_gguf(model(tmp_path, "gemma3", layers=7, window=512))
    assert facts.text.sliding_window == 512
    assert facts.text.layer_types == ("sliding_attention",) * 5 + ("full_attention", "sliding_attention")


def test_latent_attention(tmp_path: Path) -> None:
    text = read_gguf(model(tmp_path, "deepseek2", latent=512, rope=64, head_size=192)).text
    assert (text.kv_lora_rank, text.qk_rope_head_dim, text.qk_nope_head_dim, text.v_head_dim) == (512, 64, 128, 192)


def test_tied_embeddings(tmp_path: Path) -> None:
    assert read_gguf(model(tmp_path, "llama", tied=True)).text.tie_word_embeddings is True


def test_version_2_reads_the_same(tmp_path: Path) -> None:
    metadata, tensors = writer.text_model("llama")
    new = read_gguf(writer.write_gguf(tmp_path / "new.gguf", metadata, tensors))
    old = read_gguf(writer.write_gguf(tmp_path / "old.gguf", metadata, tensors, version=2))
    assert new.tensors == old.tensors
    assert new.text == old.text


def test_long_lists_are_passed_over(tmp_path: Path) -> None:
    facts = read_gguf(model(tmp_path, vocab=50_000))
    assert facts.text.vocab_size == 50_000
    assert "tokenizer.ggml.tokens" not in facts.config["gguf"]
    assert facts.config["array_lengths"]["tokenizer.ggml.tokens"] == 50_000


def test_number_formats_have_sizes() -> None:
    kinds = ggml_types()
    assert kinds[12]["name"] == "Q4_K"
    assert (kinds[12]["block"], kinds[12]["bytes"]) == (256, 144)
    assert len({kind["name"] for kind in kinds.values()}) == len(kinds)
    assert set(range(43)) <= set(kinds)
    for number, (block, size) in writer.BLOCK.items():
        assert (kinds[number]["block"], kinds[number]["bytes"]) == (block, size)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blk.12.attn_q.weight", ("blk.{l}.attn_q.weight", 12)),
        ("blk.3.ffn_up.7.weight", ("blk.{l}.ffn_up.{e}.weight", 3)),
        ("v.blk.26.ln1.bias", ("v.blk.{l}.ln1.bias", 26)),
        ("mm.0.weight", ("mm.0.weight", None)),
        ("token_embd.weight", ("token_embd.weight", None)),
    ],
)
def test_templates(name: str, expected: tuple[str, int | None]) -> None:
    assert template(name) == expected


# ------------------------------------------------------------------------------------------ projector


def test_projector_beside_the_model(tmp_path: Path) -> None:
    path = model(tmp_path, "qwen3vl")
    writer.write_gguf(tmp_path / "mmproj-F16.gguf", *writer.projector())
    facts = read_gguf(path)
    assert facts.vision is not None
    assert (facts.vision.depth, facts.vision.hidden_size, facts.vision.patch_size) == (2, 64, 16)
    assert facts.vision.spatial_merge_size == 2
    assert facts.processor is not None
    assert facts.processor.max_pixels == 4096 * 32 * 32
    assert {"vision", "projector"} <= {part.name for part in facts.parts}
    assert [file.kind for file in facts.files] == ["weights", "processor"]


def test_projector_given(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    other = writer.write_gguf(tmp_path / "elsewhere" / "tower.gguf", *writer.projector())
    path = model(tmp_path, "qwen3vl")
    assert read_gguf(path).vision is None
    assert read_gguf(path, other).vision is not None


def test_projector_of_the_same_name_first_then_half_precision(tmp_path: Path) -> None:
    path = model(tmp_path, name="Qwen3-VL-4B-Q4_K_M.gguf")
    for name in ("mmproj-Other-F16.gguf", "mmproj-Qwen3-VL-4B-F32.gguf", "mmproj-Qwen3-VL-4B-F16.gguf"):
        writer.write_gguf(tmp_path / name, *writer.projector())
    found = find_projector(path)
    assert found is not None
    assert found.name == "mmproj-Qwen3-VL-4B-F16.gguf"


def test_projector_that_is_a_model(tmp_path: Path) -> None:
    path = model(tmp_path)
    other = model(tmp_path, "llama", name="other.gguf")
    assert "processor-missing" in codes(read_gguf(path, other))


def test_fixed_size_tower(tmp_path: Path) -> None:
    metadata, tensors = writer.projector("gemma3", patch=14, image_size=896)
    metadata.pop("clip.vision.spatial_merge_size")
    tower = writer.write_gguf(tmp_path / "mmproj.gguf", metadata, tensors)
    facts = read_gguf(model(tmp_path, "gemma3"), tower)
    assert facts.vision is not None
    assert (facts.vision.image_size, facts.vision.tokens_per_image) == (896, 256)


# ------------------------------------------------------------------------------------------ split models


def split(folder: Path, count: int = 3) -> list[Path]:
    metadata, tensors = writer.text_model("qwen3")
    names = list(tensors)
    paths = []
    for number in range(count):
        own = {name: tensors[name] for name in names[number::count]}
        keys = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        part = metadata | keys if number == 0 else keys
        paths.append(writer.write_gguf(folder / f"m-{number + 1:05d}-of-{count:05d}.gguf", part, own))
    return paths


@pytest.mark.parametrize("which", [0, 2])
def test_split_model_is_read_whole_from_any_part(tmp_path: Path, which: int) -> None:
    paths = split(tmp_path)
    whole = read_gguf(model(tmp_path, name="whole.gguf"))
    facts = read_gguf(paths[which])
    assert facts.findings == ()
    assert facts.weight_bytes == whole.weight_bytes
    assert facts.text == whole.text
    assert len(facts.files) == 3


def test_missing_part_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].unlink()
    facts = read_gguf(paths[0])
    assert codes(facts) == {"weights-missing-shard"}
    assert "m-00002-of-00003.gguf" in facts.findings[0].cause
    assert [file.status for file in facts.files] == ["ok", "ok", "missing"]


def test_renamed_part_lacks_the_others(tmp_path: Path) -> None:
    renamed = split(tmp_path)[0].rename(tmp_path / "model.gguf")
    assert "weights-missing-shard" in codes(read_gguf(renamed))


def test_part_with_tensors_of_another(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    assert "tensor-duplicate" in codes(read_gguf(paths[0]))


def test_directory_with_one_model(tmp_path: Path) -> None:
    split(tmp_path)
    writer.write_gguf(tmp_path / "mmproj-F16.gguf", *writer.projector())
    assert read_gguf(tmp_path).text.num_hidden_layers == 4


def test_directory_with_two_models_is_refused(tmp_path: Path) -> None:
    model(tmp_path, name="a.gguf")
    model(tmp_path, name="b.gguf")
    with pytest.raises(ModelError, match=r"2: a\.gguf, b\.gguf"):
        read_gguf(tmp_path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no file"):
        read_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(ModelError, match="there is no projector"):
        read_gguf(model(tmp_path), tmp_path / "nothing.gguf")


# ------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"", "weights-truncated", "empty"),
        (b"GG", "weights-truncated", "ends after 2 bytes"),
        (b"GGUF\x03\0\0\0", "weights-truncated", "ends after 8 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "weights-lfs-pointer", "pointer"),
        (b"<!DOCTYPE html><html>not found</html>", "header-invalid", "web page"),
        (bytes(4096), "header-invalid", "zeros"),
        (b"PK\x03\x04" + bytes(40), "header-invalid", "ZIP"),
        (struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}}', "header-invalid", "safetensors"),
        (b"tjgg" + bytes(40), "header-invalid", "before GGUF"),
        (b"junk" * 20, "header-invalid", "begin with GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64), "header-invalid", "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 1) + bytes(64), "header-invalid", "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 9, 1, 1) + bytes(64), "header-invalid", "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1) + bytes(64), "header-invalid", "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 60) + bytes(64), "header-invalid", "metadata keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1000, 0) + bytes(64), "weights-truncated", "1,000 tensors"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 50) + bytes(64), "header-invalid", "bytes long"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1000) + bytes(64), "weights-truncated", "metadata key 1"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + bytes(64), "header-invalid", "value type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 2) + bytes(64), "header-invalid", "arrays"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 40) + bytes(64), "header-invalid", "items"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 20) + bytes(64),
            "weights-truncated",
            "items",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 20) + bytes(64), "weights-truncated", "more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_model_is_named(tmp_path: Path, content: bytes, code: str, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    facts = read_gguf(path)
    finding = next(f for f in facts.findings if f.code == code)
    assert words in finding.cause
    assert finding.severity == "error"
    assert finding.fixes
    assert facts.weight_bytes is None
    assert facts.files[0].status != "ok"


def test_cut_file(tmp_path: Path) -> None:
    metadata, tensors = writer.text_model("qwen3")
    facts = read_gguf(writer.write_gguf(tmp_path / "m.gguf", metadata, tensors, cut=5000))
    (finding,) = facts.findings
    assert finding.code == "weights-truncated"
    assert "5,000" in finding.cause or "bytes are missing" in finding.cause
    assert facts.files[0].status == "truncated"
    assert facts.weight_bytes is not None


def test_overlap_and_gap(tmp_path: Path) -> None:
    metadata, tensors = writer.text_model("qwen3")
    inside = read_gguf(writer.write_gguf(tmp_path / "a.gguf", metadata, tensors, offsets={"output.weight": 32}))
    assert codes(inside) == {"tensor-overlap"}
    assert "begins inside" in inside.findings[0].cause
    first = {"token_embd.weight": ((32, 1), writer.F32)}
    gap = writer.write_gguf(tmp_path / "b.gguf", metadata, first, offsets={"token_embd.weight": 64})
    assert {"tensor-overlap", "weights-truncated"} <= codes(read_gguf(gap))


def test_unknown_and_removed_number_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, tensors = writer.text_model("qwen3")
    monkeypatch.setitem(writer.BLOCK, 99, (1, 4))
    monkeypatch.setitem(writer.BLOCK, 31, (32, 18))
    tensors["output.weight"] = ((64, 512), 99)
    unknown = read_gguf(writer.write_gguf(tmp_path / "a.gguf", metadata, tensors))
    assert codes(unknown) == {"quant-format-unsupported"}
    group = next(group for group in unknown.tensors if group.name == "output.weight")
    assert (group.dtype, group.nbytes) == ("ggml type 99", 64 * 512 * 4)  # up to the next tensor
    tensors["output.weight"] = ((64, 512), 31)
    removed = read_gguf(writer.write_gguf(tmp_path / "b.gguf", metadata, tensors))
    assert codes(removed) == {"quant-format-unsupported"}
    assert "Q4_0_4_4" in removed.findings[0].cause


def test_missing_template_and_architecture(tmp_path: Path) -> None:
    metadata, tensors = writer.text_model("qwen3")
    plain = {key: value for key, value in metadata.items() if key != "tokenizer.chat_template"}
    facts = read_gguf(writer.write_gguf(tmp_path / "a.gguf", plain, tensors))
    assert codes(facts) == {"chat-template-missing"}
    assert facts.has_chat_template is False
    nameless = {key: value for key, value in metadata.items() if key != "general.architecture"}
    assert "config-invalid" in codes(read_gguf(writer.write_gguf(tmp_path / "b.gguf", nameless, tensors)))


def test_projector_named_as_the_model(tmp_path: Path) -> None:
    path = writer.write_gguf(tmp_path / "mmproj.gguf", *writer.projector())
    facts = read_gguf(path)
    assert "config-invalid" in codes(facts)
    assert "projector" in facts.findings[0].cause


def test_leftover_of_a_download(tmp_path: Path) -> None:
    path = model(tmp_path)
    (tmp_path / "model.gguf.part").write_bytes(b"x")
    assert "download-incomplete" in codes(read_gguf(path))


@pytest.mark.parametrize(
    "offsets",
    [{"output.weight": (1 << 63) + 32}, {"output.weight": 1 << 62}],
)
def test_offsets_beyond_everything(tmp_path: Path, offsets: dict[str, int]) -> None:
    metadata, tensors = writer.text_model("qwen3")
    path = tmp_path / "m.gguf"
    writer.write_gguf(path, metadata, tensors)
    raw = path.read_bytes()
    name = b"output.weight"
    at = raw.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 16 + 4
    path.write_bytes(raw[:at] + struct.pack("<Q", offsets["output.weight"]) + raw[at + 8 :])
    assert "weights-truncated" in codes(read_gguf(path))


def mutations(raw: bytes, header: int, count: int) -> list[bytes]:
    """Seeded damage to the header: bits, numbers, cuts, repeats, removals."""
    dice = random.Random(20261130)
    extremes = [0, 1, 7, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    results = []
    for number in range(count):
        data = bytearray(raw)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(4, header)
            kind = number % 6
            if kind == 0:
                data[at] ^= 1 << dice.randrange(8)
            elif kind == 1:
                data[at : at + 8] = struct.pack("<Q", dice.choice(extremes))
            elif kind == 2:
                data[at : at + 4] = struct.pack("<I", dice.choice(extremes) & 0xFFFFFFFF)
            elif kind == 3:
                del data[at:]
            elif kind == 4:
                data[at:at] = data[dice.randrange(4, header) :][: dice.randint(1, 64)]
            else:
                del data[at : at + dice.randint(1, 64)]
            header = min(header, max(len(data), 5))
        results.append(bytes(data))
    return results


def test_two_hundred_mutations(tmp_path: Path) -> None:
    path = model(tmp_path, "qwen35moe", experts=4, vocab=600)
    raw = path.read_bytes()
    header = raw.index(b"blk.3.attn_k_norm.weight")
    damaged = tmp_path / "damaged.gguf"
    named = 0
    begin = time.monotonic()
    for data in mutations(raw, header, 200):
        damaged.write_bytes(data)
        facts = read_gguf(damaged)
        named += bool(facts.findings)
        for finding in facts.findings:
            assert finding.cause
            assert finding.title
    assert named > 100
    assert time.monotonic() - begin < 20


def test_hostile_header_stays_small(tmp_path: Path) -> None:
    """Counts and lengths as large as they may be, in a file that is large (and empty): little time, little memory."""
    path = tmp_path / "hostile.gguf"
    items = 1 << 22
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1 << 17, 1 << 16))
        for number in range(64):
            file.write(struct.pack("<Q2sIIQ", 2, b"%02d" % number, 9, 8, items))
            file.seek(8 * items, 1)
        file.truncate(64 << 30)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from loadmaster.edge.gguf import read_gguf\n"
        "facts = read_gguf(Path(sys.argv[1]))\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(facts.findings[0].code, status.split('VmHWM:')[1].split()[0])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT / "src")},
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
    )
    finding, peak = run.stdout.split()
    assert finding in ("header-invalid", "weights-truncated")
    assert int(peak) * 1024 < 200 << 20
