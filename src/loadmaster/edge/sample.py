"""Writes checkpoints with real tensor names, shapes and file sizes, and holes instead of weights.

For the demo, the benchmark and the tests: a 24 GB checkpoint takes a few MB on disk, since the data area of each
sparse safetensors file is never written. Layouts are data (``core/data/sample-layouts.toml``), configurations
published ones (``core/data/sample-configs``).

    python -m loadmaster.edge.sample NAME FORMAT DIRECTORY
"""

from __future__ import annotations

import copy
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

from loadmaster.core.facts import GIB, TextConfig
from loadmaster.core.modelconfig import processor, text_config, text_section, vision_config
from loadmaster.core.tables import load_json, load_toml
from loadmaster.core.tensorheaders import expected_bytes

Tensor = tuple[str, tuple[int, ...]]  # data type and shape
SHARD_BYTES = 5 * GIB
_FILE = "model-{:05d}-of-{:05d}.safetensors"
_INDEX = "model.safetensors.index.json"
_CLASSES = ("qkv", "o", "gdn", "mlp", "expert", "shared", "plain")


def sample_names() -> tuple[str, ...]:
    """The models that can be written."""
    folder = resources.files("loadmaster.core.data").joinpath("sample-configs")
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def sample_formats() -> tuple[str, ...]:
    """Names of quantisations; ``awq-g128-all`` is ``awq-g128`` with the first layer quantised too."""
    return (*load_toml("sample-layouts.toml")["formats"], "awq-g128-all")


def sample_config(name: str) -> dict[str, Any]:
    """The published configuration, without its provenance. Raises :class:`ValueError` for an unknown name."""
    if name not in sample_names():
        raise ValueError(f"no sample of {name!r}; there are {', '.join(sample_names())}")
    config = copy.deepcopy(load_json(f"sample-configs/{name}.json"))
    config.pop("_provenance", None)
    return config


def write_sample(
    name: str,
    quantization: str,
    directory: str | os.PathLike[str],
    damage: str | None = None,
    *,
    layers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes a model directory and returns it. ``damage``: a key of :data:`DAMAGE`. ``layers``: fewer than published.

    Raises :class:`ValueError` for an unknown name, format or damage, or for a directory that is not empty.
    """
    if damage is not None and damage not in DAMAGE:
        raise ValueError(f"no damage {damage!r}; there are {', '.join(DAMAGE)}")
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise ValueError(f"{target} is not empty")
    config = sample_config(name)
    if layers is not None:
        text_section(config)["num_hidden_layers"] = layers  # type: ignore[index]
    layout = _Layout(name, config, quantization)
    tensors = dict(layout.tensors())
    config.update(layout.declaration())
    _dump(target / "config.json", config)
    files = split_shards(tensors, shard_bytes)
    for file, part in files.items():
        write_shard(target / file, part)
    write_index(target / _INDEX, files)
    _write_side_files(target, config)
    if damage is not None:
        DAMAGE[damage](target)
    return target


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file: length and header written, the data area a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = expected_bytes(dtype, shape)
        assert size is not None, dtype
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    write_header(path, json.dumps(header, separators=(",", ":")).encode(), position)


def write_header(path: Path, raw: bytes, data_bytes: int) -> None:
    """A file with this header text, padded to eight bytes, and a hole of ``data_bytes`` behind it."""
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + data_bytes)


def write_index(path: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """The index of a set of shards, as transformers writes it."""
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    sizes = (expected_bytes(*tensor) or 0 for tensors in files.values() for tensor in tensors.values())
    _dump(path, {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(weight_map.items()))})


def split_shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> dict[str, dict[str, Tensor]]:
    """File name → its tensors, cut when a file would pass ``shard_bytes``."""
    parts: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = expected_bytes(*tensor) or 0
        if filled + size > shard_bytes and parts[-1]:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += size
    return {_FILE.format(number, len(parts)): part for number, part in enumerate(parts, 1)}


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------------------------------------- layouts


class _Layout:
    """The tensors of one model in one format."""

    def __init__(self, name: str, config: dict[str, Any], quantization: str) -> None:
        table = load_toml("sample-layouts.toml")
        self.format = quantization.removesuffix("-all")
        if self.format not in table["formats"] or quantization not in sample_formats():
            raise ValueError(f"no format {quantization!r}; there are {', '.join(sample_formats())}")
        self.text = text_config(config)
        self.dimensions = _dimensions(config, self.text)
        model_type = config["model_type"]
        self.family = table["families"][table["families_of"][model_type]]
        self.vision = table["families"].get(self.family.get("vision_of"), self.family)
        self.pieces = table["pieces"]
        self.stored = table["formats"][self.format]
        rules = table["quantised"].get(model_type, table["quantised"]["other"])
        self.rule = dict(rules.get(self.format.split("-")[0], rules["default"]))
        if quantization.endswith("-all"):
            self.rule["first_layer"] = True
        self.fused_mtp = self.format == "bf16" and name.startswith("Qwen3.6")  # 3.5 keeps them per expert
        self.plain: list[str] = []
        self.quantised: set[str] = set()
        self.depth = vision.depth or 0 if (vision := vision_config(config)) else 0
        self.deepstack = len(vision.deepstack_layers) if vision else 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        prefix = self.family["layers"]
        yield from self.rows("embed_tokens.weight BF16 vocabulary hidden", prefix)
        for layer in range(self.text.num_hidden_layers or 0):
            yield from self.decoder(f"{prefix}layers.{layer}.", layer)
        yield from self.rows("norm.weight BF16 hidden", prefix)
        if not self.text.tie_word_embeddings:
            yield from self.rows("lm_head plain vocabulary hidden", "")
        yield from self.tower()
        yield from self.multi_token_prediction(prefix)

    def decoder(self, prefix: str, layer: int, mtp: bool = False) -> Iterator[tuple[str, Tensor]]:
        family, where = self.family, ("mtp" if mtp else layer)
        kinds = self.text.layer_types
        full = mtp or layer >= len(kinds) or kinds[layer] != "linear_attention"
        pieces = [*family["layer"], *family.get("full" if full else "linear", ())]
        sparse = self.text.num_experts and (mtp or layer >= (self.text.first_k_dense_replace or 0))
        pieces += family.get("sparse" if sparse else "dense", ())
        for piece in pieces:
            fused = family.get("fused", {}).get(self.format)
            if piece == "expert" and fused and (not mtp or self.fused_mtp):
                yield from self.rows(self.pieces[fused], prefix, where)
            elif piece == "expert":
                for expert in range(self.text.num_experts or 0):
                    yield from self.rows(self.pieces[piece].replace("{e}", str(expert)), prefix, where)
            else:
                yield from self.rows(self.pieces[piece], prefix, where)

    def tower(self) -> Iterator[tuple[str, Tensor]]:
        if not self.depth:
            return
        yield from self.rows(self.vision["vision"], "")
        for block in range(self.depth):
            yield from self.rows(self.vision["block"], f"{self.vision['blocks']}{block}.")
        for number in range(self.deepstack):
            yield from self.rows(self.vision["deepstack"].replace("{d}", str(number)), "")

    def multi_token_prediction(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        count = self.text.num_mtp_layers or 0
        if count and "mtp" in self.family:
            yield from self.rows(self.family["mtp"], "")
            for layer in range(count):
                yield from self.decoder(f"mtp.layers.{layer}.", layer, mtp=True)
        for layer in range(count if "mtp_beyond" in self.family else 0):
            own = f"{prefix}layers.{(self.text.num_hidden_layers or 0) + layer}."
            yield from self.decoder(own, layer, mtp=True)
            yield from self.rows(self.family["mtp_beyond"], own)

    def rows(self, text: str, prefix: str, layer: int | str | None = None) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a piece of the table."""
        for row in text.strip().splitlines():
            name, kind, *sizes = row.split()
            if kind.rstrip("+") in _CLASSES:
                outputs, inputs = (_size(size, self.dimensions) for size in sizes)
                yield from self.linear(prefix + name, kind, outputs, inputs, layer)
            else:
                yield prefix + name, (kind, tuple(_size(size, self.dimensions) for size in sizes))

    def linear(
        self, name: str, kind: str, outputs: int, inputs: int, layer: int | str | None
    ) -> Iterator[tuple[str, Tensor]]:
        rule = self.rule
        quantised = (
            self.format != "bf16"
            and kind.rstrip("+") in rule["classes"]
            and (layer != 0 or rule["first_layer"])
            and (layer != "mtp" or rule["mtp"])
        )
        if quantised:
            self.quantised.add(_tail(name))
        else:
            self.plain.append(name)
        sides = {"out": outputs, "in": inputs}
        for row in (self.stored["rows"] if quantised else "weight BF16 out in").strip().splitlines():
            suffix, dtype, *sizes = row.split()
            if suffix == "weight_scale_inv":
                dtype = self.family.get("scales", dtype)
            yield f"{name}.{suffix}", (dtype, tuple(_size(size, sides) for size in sizes))
        if kind.endswith("+"):
            yield f"{name}.bias", ("BF16", (outputs,))

    def declaration(self) -> dict[str, Any]:
        """What ``config.json`` says of the format; to be called after :meth:`tensors` was walked."""
        if "config" not in self.stored:
            return {}
        declared = copy.deepcopy(self.stored["config"])
        key = self.stored["ignore"]
        never = sorted({_tail(name) for name in self.plain} - self.quantised)
        if key == "dynamic":
            declared[key] = {f"-:.*{re.escape(tail)}$": {} for tail in never}
            if not self.rule["mtp"]:
                declared[key]["-:.*mtp.*"] = {}
        elif key == "modules_to_not_convert" and self.format.startswith("awq"):
            declared[key] = [*never, *([] if self.rule["mtp"] else ["mtp."])]
            declared[key] += [] if self.rule["first_layer"] else [f"{self.family['layers']}layers.0."]
        else:
            declared[key] = sorted(self.plain)
        changes: dict[str, Any] = {"quantization_config": declared}
        if "dtype" in self.stored:
            changes["dtype"] = self.stored["dtype"]
        return changes


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _size(text: str, dimensions: Mapping[str, int]) -> int:
    """``2*hidden``, ``in/128``: a product, divided by a number and rounded up."""
    product, _, divisor = text.partition("/")
    value = prod(int(factor) if factor.isdigit() else dimensions[factor] for factor in product.split("*"))
    return -(-value // int(divisor)) if divisor else value


def _dimensions(config: Mapping[str, Any], text: TextConfig) -> dict[str, int]:
    heads, head_dim = text.num_attention_heads or 0, text.head_dim or 0
    key_heads, value_heads = text.linear_num_key_heads or 0, text.linear_num_value_heads or 0
    value = value_heads * (text.linear_value_head_dim or 0)
    sizes = {
        "hidden": text.hidden_size,
        "vocabulary": text.vocab_size,
        "intermediate": text.intermediate_size,
        "heads": heads,
        "head_dim": head_dim,
        "query": heads * head_dim * (2 if text.attn_output_gate else 1),
        "key": (text.num_key_value_heads or 0) * head_dim,
        "experts": text.num_experts,
        "width": text.moe_intermediate_size,
        "shared_width": text.shared_expert_intermediate_size,
        "value_heads": value_heads,
        "value_head": text.v_head_dim or text.linear_value_head_dim,
        "value": value,
        "mixed": 2 * key_heads * (text.linear_key_head_dim or 0) + value,
        "kernel": text.linear_conv_kernel_dim,
        "q_rank": text.q_lora_rank,
        "kv_rank": text.kv_lora_rank,
        "kv_rank_rope": (text.kv_lora_rank or 0) + (text.qk_rope_head_dim or 0),
        "query_head": (text.qk_nope_head_dim or 0) + (text.qk_rope_head_dim or 0),
        "key_value_head": (text.qk_nope_head_dim or 0) + (text.v_head_dim or 0),
    }
    vision = vision_config(config)
    if vision is not None:
        hidden, side = vision.hidden_size or 0, (vision.image_size or 0) // (vision.patch_size or 1)
        sizes |= {
            "v_hidden": hidden,
            "v_intermediate": vision.intermediate_size,
            "v_patch": vision.patch_size,
            "v_temporal": vision.temporal_patch_size,
            "v_merged": hidden * (vision.spatial_merge_size or 1) ** 2,
            "v_out": vision.out_hidden_size,
            "v_positions": vision.num_position_embeddings or side * side,
        }
    return {name: size for name, size in sizes.items() if size is not None}


# ------------------------------------------------------------------------------------------------------ side files

_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part.type == 'text' %}{{ part.text }}{% endif %}{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


def _write_side_files(target: Path, config: Mapping[str, Any]) -> None:
    text, vision = text_config(config), vision_config(config)
    last = (text.vocab_size or len(_SPECIAL)) - 1
    image = config.get("image_token_id", config.get("image_token_index", last))
    ids = {token: image if token == "<|image_pad|>" else last - place for place, token in enumerate(_SPECIAL)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {character: number for number, character in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    _dump(
        target / "tokenizer.json",
        {
            "version": "1.0",
            "added_tokens": [{"id": number, "content": token, **flags} for token, number in ids.items()],
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        },
    )
    _dump(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    _dump(target / "generation_config.json", {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]})
    (target / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    limits = processor(None, None, config)
    if vision is None or limits is None:
        return
    size = (
        {"height": vision.image_size, "width": vision.image_size}
        if vision.image_size
        else {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
    )
    _dump(target / "preprocessor_config.json", {"image_processor_type": limits.image_processor_type, "size": size})
    if limits.video_max_pixels and not vision.image_size:
        video = {"size": {"shortest_edge": 4096, "longest_edge": limits.video_max_pixels}}
        _dump(target / "video_preprocessor_config.json", video)


# ---------------------------------------------------------------------------------------------------------- damage


def _victim(target: Path) -> Path:
    shards = sorted(target.glob("*.safetensors"))
    return shards[len(shards) // 2]


def _truncate(target: Path) -> None:
    path = _victim(target)
    os.truncate(path, path.stat().st_size // 2)


def _pointer(target: Path) -> None:
    path = _victim(target)
    size = path.stat().st_size
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {size}\n")


def _junk_length(target: Path) -> None:
    with _victim(target).open("r+b") as file:
        file.write(b"\xff" * 8)


def _twice(target: Path) -> None:
    shards = sorted(target.glob("*.safetensors"))
    index = json.loads((target / _INDEX).read_text())["weight_map"]
    name = next(name for name, file in sorted(index.items()) if file == shards[0].name)
    headers = []
    for path in (shards[0], shards[-1]):
        with path.open("rb") as file:
            headers.append(json.loads(file.read(struct.unpack("<Q", file.read(8))[0])))
    tensors = {
        key: (value["dtype"], tuple(value["shape"])) for key, value in headers[1].items() if key != "__metadata__"
    }
    write_shard(shards[-1], {**tensors, name: (headers[0][name]["dtype"], tuple(headers[0][name]["shape"]))})


def _remove(*names: str) -> Callable[[Path], None]:
    def remove(target: Path) -> None:
        for name in names:
            (target / name).unlink(missing_ok=True)

    return remove


def _cut_config(target: Path) -> None:
    path = target / "config.json"
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "missing": lambda target: _victim(target).unlink(),
    "lfs": _pointer,
    "header": _junk_length,
    "dup": _twice,
    "no-processor": _remove("preprocessor_config.json", "video_preprocessor_config.json"),
    "no-template": _remove("chat_template.jinja"),
    "bad-json": _cut_config,
}


def main(arguments: Iterable[str]) -> int:
    words = list(arguments)
    if len(words) not in (3, 4):
        sys.stderr.write(
            "usage: python -m loadmaster.edge.sample NAME FORMAT DIRECTORY [DAMAGE]\n"
            f"names: {', '.join(sample_names())}\nformats: {', '.join(sample_formats())}\n"
            f"damages: {', '.join(DAMAGE)}\n"
        )
        return 2
    try:
        target = write_sample(words[0], words[1], words[2], words[3] if len(words) == 4 else None)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    shards = list(target.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in shards)
    sys.stderr.write(f"{words[0]} {words[1]}: {len(shards)} files, {size / GIB:.2f} GiB of holes in {target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
