"""Headers into groups: runs of experts, ranges, and entries that describe no tensor."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.facts import TensorGroup
from loadmaster.core.tensorheaders import HeaderError, TensorGroups, expected_bytes, layer_pattern, parse_header


def header(tensors: list[tuple[str, str, list[int]]], **more: Any) -> bytes:
    position = 0
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}, **more}
    for name, dtype, shape in tensors:
        size = expected_bytes(dtype, shape) or 0
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    return json.dumps(entries).encode()


def groups_of(raw: bytes) -> tuple[TensorGroup, ...]:
    groups = TensorGroups()
    parsed = parse_header(raw)
    groups.add(parsed.tensors, parsed.extents.sizes)
    return groups.groups()


def one_by_one(raw: bytes) -> set[tuple[Any, ...]]:
    """The same groups by a plain loop over the JSON, as the reference."""
    counts: dict[tuple[Any, ...], dict[int | None, int]] = {}
    for name, entry in json.loads(raw).items():
        if name == "__metadata__":
            continue
        stem, layer = layer_pattern(name)
        head, dot, tail = stem.partition(".experts.")
        number, point, rest = tail.partition(".")
        if dot and point and number.isdigit():
            stem = f"{head}.experts.{{e}}.{rest}"
        begin, end = entry["data_offsets"]
        layers = counts.setdefault((stem, entry["dtype"], tuple(entry["shape"]), end - begin), {})
        layers[layer] = layers.get(layer, 0) + 1
    return {
        (*key, sum(layers.values()), None if None in layers else tuple(sorted(layers.items())))
        for key, layers in counts.items()
    }


def as_set(groups: tuple[TensorGroup, ...]) -> set[tuple[Any, ...]]:
    return {
        (g.name, g.dtype, g.shape, g.nbytes, g.count, tuple(sorted(g.layers.items())) if g.layers else None)
        for g in groups
    }


def experts(layer: int, numbers: list[int], width: int = 4) -> list[tuple[str, str, list[int]]]:
    stem = f"model.layers.{layer}.mlp.experts."
    return [
        (f"{stem}{number}.{part}.{suffix}", dtype, shape)
        for number in numbers
        for part in ("gate_proj", "down_proj")
        for suffix, dtype, shape in (("weight_packed", "I32", [width, 2]), ("weight_scale", "BF16", [width, 1]))
    ]


def test_experts_and_layers_fold_into_patterns() -> None:
    raw = header([("model.embed_tokens.weight", "BF16", [10, 4]), *experts(0, [0, 1, 2]), *experts(7, [0, 1, 2])])
    found = {group.name: group for group in groups_of(raw)}
    assert len(found) == 5
    packed = found["model.layers.{l}.mlp.experts.{e}.gate_proj.weight_packed"]
    assert (packed.count, packed.layers, packed.nbytes, packed.shape) == (6, {0: 3, 7: 3}, 32, (4, 2))
    assert packed.total_bytes == 192
    assert found["model.embed_tokens.weight"].layers is None


def test_an_odd_expert_leaves_its_run() -> None:
    wide = experts(0, [3], width=8)
    raw = header([*experts(0, [0, 1, 2]), *wide, *experts(0, [4, 5])])
    assert as_set(groups_of(raw)) == one_by_one(raw)
    assert {group.shape for group in groups_of(raw)} == {(4, 2), (4, 1), (8, 2), (8, 1)}


def test_fused_and_shared_experts_are_no_numbers() -> None:
    raw = header(
        [
            ("model.layers.1.mlp.experts.gate_up_proj", "BF16", [2, 4, 4]),
            ("model.layers.1.mlp.shared_expert.gate_proj.weight", "BF16", [4, 4]),
            ("model.visual.blocks.3.attn.qkv.weight", "BF16", [4, 4]),
            ("model.visual.deepstack_merger_list.0.norm.weight", "BF16", [4]),
        ]
    )
    assert [group.name for group in groups_of(raw)] == [
        "model.layers.{l}.mlp.experts.gate_up_proj",
        "model.layers.{l}.mlp.shared_expert.gate_proj.weight",
        "model.visual.blocks.{l}.attn.qkv.weight",
        "model.visual.deepstack_merger_list.0.norm.weight",
    ]


@given(st.integers(0, 2**32), st.booleans())
def test_runs_count_what_a_plain_loop_counts(seed: int, shuffled: bool) -> None:
    pick = random.Random(seed)
    tensors: list[tuple[str, str, list[int]]] = []
    for layer in range(pick.randint(1, 3)):
        numbers = list(range(pick.randint(0, 12)))
        if pick.random() < 0.3:
            numbers.sort(key=str)
        block = experts(layer, numbers)
        if block and pick.random() < 0.5:  # one tensor differs, or is not there
            place = pick.randrange(len(block))
            name, dtype, shape = block[place]
            block[place : place + 1] = pick.choice([[], [(name, "F16", shape)], [(name, dtype, [1, *shape])]])
        tensors += [(f"model.layers.{layer}.input_layernorm.weight", "BF16", [4]), *block]
    if shuffled:
        pick.shuffle(tensors)
    raw = header(tensors)
    assert as_set(groups_of(raw)) == one_by_one(raw)


def test_a_cut_run_goes_on_in_the_next_file() -> None:
    groups = TensorGroups()
    for part in (experts(0, [0, 1]), experts(0, [2, 3, 4])):
        parsed = parse_header(header(part))
        groups.add(parsed.tensors, parsed.extents.sizes)
    assert {group.count for group in groups.groups()} == {5}


# ---------------------------------------------------------------------------------------------------------- damage


def test_overlap_gap_and_impossible_ranges_are_named() -> None:
    def entry(begin: int, end: int) -> dict[str, Any]:
        return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}

    overlap = parse_header(json.dumps({"a": entry(0, 8), "b": entry(6, 10)}).encode()).extents
    assert overlap.overlap_count == 1
    assert overlap.overlaps == ("b starts at byte 6, 2 bytes before a ends",)
    gap = parse_header(json.dumps({"b": entry(12, 14), "a": entry(0, 8)}).encode()).extents
    assert gap.overlaps == ("4 bytes of no tensor between a and b",)
    assert gap.end == 14
    backwards = parse_header(json.dumps({"a": entry(8, 0)}).encode()).extents
    assert backwards.overlap_count == 1
    assert list(backwards.sizes) == [0]
    assert parse_header(json.dumps({"b": entry(8, 10), "a": entry(0, 8)}).encode()).extents.overlap_count == 0


def test_an_entry_twice_and_an_entry_that_is_none() -> None:
    one = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    two = '"a":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}'
    parsed = parse_header(f"{{{one},{two}}}".encode())
    assert parsed.repeated == ("a",)
    assert parsed.extents.overlap_count == 1  # what the first copy held belongs to nobody
    for bad in ('"b":{"dtype":"U8"}', '"b":3', '"b":{"dtype":"U8","shape":"x","data_offsets":[4,5]}'):
        parsed = parse_header(f"{{{one},{bad}}}".encode())
        assert parsed.unreadable == ("b",)
        assert list(parsed.tensors) == ["a"]


def test_metadata_may_hold_anything() -> None:
    raw = header([("a", "U8", [4])], __metadata__={"shape": "a string", "dtype": "none", "data_offsets": "[]"})
    assert list(parse_header(raw).tensors) == ["a"]


def test_an_unknown_data_type_keeps_its_size() -> None:
    raw = b'{"a":{"dtype":"Q5","shape":[2],"data_offsets":[0,7]}}'
    (group,) = groups_of(raw)
    assert (group.dtype, group.nbytes) == ("Q5", 7)
    assert expected_bytes("Q5", [2]) is None


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"a":', b"\xff\xfe", b'{"a":' * 5000, b"[" * 100_000])
def test_no_json_object(raw: bytes) -> None:
    with pytest.raises(HeaderError):
        parse_header(raw)


def test_extents_by_data_type() -> None:
    assert expected_bytes("F4", [3]) == 2
    assert expected_bytes("BF16", []) == 2
    assert expected_bytes("F32", [0, 5]) == 0
    assert expected_bytes("F32", [-1]) is None
