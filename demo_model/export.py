"""A checkpoint as files: ``python -m demo_model.export CHECKPOINT FOLDER`` writes

- ``hf/``: a checkpoint that transformers and vLLM load (safetensors in 32 bits, tokenizer, template, processor);
- ``demo-qwen35.gguf`` and ``mmproj-demo-qwen35.gguf`` for llama.cpp: matrices in 8 bits (Q8_0), the patch embedding
  in 16, the rest in 32.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demo_model import tokens
from demo_model.network import CONTEXT, MAX_PIXELS, MERGE, MIN_PIXELS, PATCH, SCALED_UP, Network, made

MODEL_FILE, PROJECTOR_FILE = "demo-qwen35.gguf", "mmproj-demo-qwen35.gguf"
NAME = "demo-qwen35"
_DESCRIPTION = "answers simple questions about simple pictures; trained on generated data alone, see docs/demo-model.md"
_LICENCE = "apache-2.0"
_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_F32, _F16, _Q8_0 = 0, 1, 8
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_ENDS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}

Metadata = dict[str, tuple[int, Any]]
Named = tuple[str, np.ndarray, int]


def q8_0(values: np.ndarray) -> bytes:
    """Blocks of 32 values: a 16-bit scale and 32 bytes, as ggml rounds them."""
    blocks = values.astype(np.float32).reshape(-1, 32)
    scale = np.abs(blocks).max(1) / 127
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = blocks * inverse[:, None]
    rounded = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)
    found = np.empty((len(blocks), 34), np.uint8)
    found[:, :2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    found[:, 2:] = rounded.astype(np.int8).view(np.uint8)
    return found.tobytes()


def _encoded(values: np.ndarray, kind: int) -> bytes:
    if kind == _Q8_0:
        return q8_0(values)
    return values.astype("<f2" if kind == _F16 else "<f4").tobytes()


# ------------------------------------------------------------------------------------------------ GGUF


def text_tensors(state: dict[str, np.ndarray], layers: int) -> Iterator[Named]:
    """The language model's tensors under llama.cpp's names for the architecture "qwen35"."""
    at = "model.language_model."
    yield "token_embd.weight", state[at + "embed_tokens.weight"], _Q8_0
    yield "output.weight", state["lm_head.weight"], _Q8_0
    yield "output_norm.weight", state[at + "norm.weight"] + 1, _F32
    for layer in range(layers):
        source, target = f"{at}layers.{layer}.", f"blk.{layer}."
        for name, other in _ENDS.items():
            yield f"{target}{other}.weight", state[f"{source}{name}.weight"] + 1, _F32
        for name in ("gate", "up", "down"):
            yield f"{target}ffn_{name}.weight", state[f"{source}mlp.{name}_proj.weight"], _Q8_0
        if f"{source}self_attn.q_proj.weight" in state:
            for name, other in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
                yield f"{target}{other}.weight", state[f"{source}self_attn.{name}_proj.weight"], _Q8_0
            for name in ("q", "k"):
                yield f"{target}attn_{name}_norm.weight", state[f"{source}self_attn.{name}_norm.weight"] + 1, _F32
            continue
        linear = source + "linear_attn."
        yield target + "attn_qkv.weight", state[linear + "in_proj_qkv.weight"], _Q8_0
        yield target + "attn_gate.weight", state[linear + "in_proj_z.weight"], _Q8_0
        yield target + "ssm_conv1d.weight", state[linear + "conv1d.weight"].squeeze(1), _F32
        yield target + "ssm_a", -np.exp(state[linear + "A_log"]), _F32
        yield target + "ssm_dt.bias", state[linear + "dt_bias"], _F32
        yield target + "ssm_alpha.weight", state[linear + "in_proj_a.weight"], _F32
        yield target + "ssm_beta.weight", state[linear + "in_proj_b.weight"], _F32
        yield target + "ssm_norm.weight", state[linear + "norm.weight"], _F32
        yield target + "ssm_out.weight", state[linear + "out_proj.weight"], _Q8_0


def vision_tensors(state: dict[str, np.ndarray], layers: int) -> Iterator[Named]:
    """The tower's and the merger's tensors under the names of "clip" with the projector "qwen3vl_merger"."""
    at = "model.visual."

    def linear(source: str, target: str) -> Iterator[Named]:
        yield f"{target}.weight", state[f"{at}{source}.weight"], _Q8_0
        yield f"{target}.bias", state[f"{at}{source}.bias"], _F32

    def norm(source: str, target: str) -> Iterator[Named]:
        for part in ("weight", "bias"):
            yield f"{target}.{part}", state[f"{at}{source}.{part}"], _F32

    kernel = state[at + "patch_embed.proj.weight"]
    yield "v.patch_embd.weight", kernel[:, :, 0], _F16
    yield "v.patch_embd.weight.1", kernel[:, :, 1], _F16
    yield "v.patch_embd.bias", state[at + "patch_embed.proj.bias"], _F32
    yield "v.position_embd.weight", state[at + "pos_embed.weight"], _F32
    for layer in range(layers):
        source, target = f"blocks.{layer}.", f"v.blk.{layer}."
        yield from norm(source + "norm1", target + "ln1")
        yield from norm(source + "norm2", target + "ln2")
        yield from linear(source + "attn.qkv", target + "attn_qkv")
        yield from linear(source + "attn.proj", target + "attn_out")
        yield from linear(source + "mlp.linear_fc1", target + "ffn_up")
        yield from linear(source + "mlp.linear_fc2", target + "ffn_down")
    yield from norm("merger.norm", "v.post_ln")
    yield from linear("merger.linear_fc1", "mm.0")
    yield from linear("merger.linear_fc2", "mm.2")


def _general(kind: str, architecture: str) -> Metadata:
    return {
        "general.architecture": (_STRING, architecture),
        "general.type": (_STRING, kind),
        "general.name": (_STRING, NAME),
        "general.description": (_STRING, _DESCRIPTION),
        "general.license": (_STRING, _LICENCE),
        "general.file_type": (_UINT32, 7),  # mostly Q8_0
    }


def text_metadata(config: Any) -> Metadata:
    text, arch = config.text_config, "qwen35"
    rope = text.rope_parameters
    known, words = tokens.tokens(), len(tokens.learned()["vocabulary"])
    kinds = [_NORMAL] * words + [_CONTROL] * len(tokens.CONTROLS) + [_USER_DEFINED] * len(tokens.MARKERS)
    kinds += [_UNUSED] * (len(known) - len(kinds))
    return {
        **_general("model", arch),
        f"{arch}.block_count": (_UINT32, text.num_hidden_layers),
        f"{arch}.context_length": (_UINT32, CONTEXT),
        f"{arch}.embedding_length": (_UINT32, text.hidden_size),
        f"{arch}.feed_forward_length": (_UINT32, text.intermediate_size),
        f"{arch}.attention.head_count": (_UINT32, text.num_attention_heads),
        f"{arch}.attention.head_count_kv": (_UINT32, text.num_key_value_heads),
        f"{arch}.attention.key_length": (_UINT32, text.head_dim),
        f"{arch}.attention.value_length": (_UINT32, text.head_dim),
        f"{arch}.attention.layer_norm_rms_epsilon": (_FLOAT32, text.rms_norm_eps),
        f"{arch}.rope.freq_base": (_FLOAT32, rope["rope_theta"]),
        f"{arch}.rope.dimension_count": (_UINT32, int(text.head_dim * rope["partial_rotary_factor"])),
        f"{arch}.rope.dimension_sections": (_ARRAY, (_INT32, (*rope["mrope_section"], 0))),
        f"{arch}.full_attention_interval": (_UINT32, 4),
        f"{arch}.ssm.conv_kernel": (_UINT32, text.linear_conv_kernel_dim),
        f"{arch}.ssm.state_size": (_UINT32, text.linear_key_head_dim),
        f"{arch}.ssm.group_count": (_UINT32, text.linear_num_key_heads),
        f"{arch}.ssm.time_step_rank": (_UINT32, text.linear_num_value_heads),
        f"{arch}.ssm.inner_size": (_UINT32, text.linear_num_value_heads * text.linear_value_head_dim),
        "tokenizer.ggml.model": (_STRING, "gpt2"),
        "tokenizer.ggml.pre": (_STRING, arch),
        "tokenizer.ggml.tokens": (_ARRAY, (_STRING, known)),
        "tokenizer.ggml.token_type": (_ARRAY, (_INT32, kinds)),
        "tokenizer.ggml.merges": (_ARRAY, (_STRING, [" ".join(pair) for pair in tokens.learned()["merges"]])),
        "tokenizer.ggml.eos_token_id": (_UINT32, tokens.number_of("<|im_end|>")),
        "tokenizer.ggml.padding_token_id": (_UINT32, tokens.number_of("<|endoftext|>")),
        "tokenizer.chat_template": (_STRING, tokens.TEMPLATE),
    }


def vision_metadata(config: Any) -> Metadata:
    vision = config.vision_config
    half = (_ARRAY, (_FLOAT32, (0.5, 0.5, 0.5)))
    return {
        **_general("mmproj", "clip"),
        "clip.has_vision_encoder": (_BOOL, True),
        "clip.projector_type": (_STRING, "qwen3vl_merger"),
        "clip.use_gelu": (_BOOL, True),
        "clip.vision.projection_dim": (_UINT32, vision.out_hidden_size),
        "clip.vision.image_size": (_UINT32, round(vision.num_position_embeddings**0.5) * PATCH),
        "clip.vision.image_min_pixels": (_UINT32, MIN_PIXELS),
        "clip.vision.image_max_pixels": (_UINT32, MAX_PIXELS),
        "clip.vision.patch_size": (_UINT32, PATCH),
        "clip.vision.embedding_length": (_UINT32, vision.hidden_size),
        "clip.vision.feed_forward_length": (_UINT32, vision.intermediate_size),
        "clip.vision.block_count": (_UINT32, vision.depth),
        "clip.vision.attention.head_count": (_UINT32, vision.num_heads),
        "clip.vision.attention.layer_norm_epsilon": (_FLOAT32, 1e-6),
        "clip.vision.image_mean": half,
        "clip.vision.image_std": half,
        "clip.vision.spatial_merge_size": (_UINT32, MERGE),
        "clip.vision.is_deepstack_layers": (_ARRAY, (_BOOL, (False,) * vision.depth)),
    }


def write_gguf(path: Path, metadata: Metadata, tensors: Sequence[Named]) -> None:
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, (kind, value) in metadata.items():
        head += _text(key) + struct.pack("<I", kind) + _value(kind, value)
    contents, offset = [], 0
    for name, values, kind in tensors:
        content = _encoded(values, kind)
        head += _text(name) + struct.pack("<I", values.ndim)
        head += struct.pack(f"<{values.ndim}QIQ", *reversed(values.shape), kind, offset)
        contents.append(content + bytes(-len(content) % _ALIGNMENT))
        offset += len(contents[-1])
    path.write_bytes(b"".join([bytes(head) + bytes(-len(head) % _ALIGNMENT), *contents]))


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    if kind == _STRING:
        return _text(value)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)


# ------------------------------------------------------------------------------------------------ transformers


def write_checkpoint(network: Network, folder: Path) -> None:
    """A folder that transformers and vLLM load."""
    folder.mkdir(parents=True, exist_ok=True)
    network.model.generation_config.eos_token_id = [tokens.number_of("<|im_end|>"), tokens.number_of("<|endoftext|>")]
    network.model.generation_config.pad_token_id = tokens.number_of("<|endoftext|>")
    network.model.save_pretrained(folder)
    tokens.tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(tokens.TEMPLATE, "utf-8")
    common = {
        "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": SCALED_UP, "longest_edge": MAX_PIXELS},
    }  # fmt: skip
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps(common | kind, indent=1) + "\n", "utf-8")


def loaded(checkpoint: Path, size: str) -> Network:
    network = Network(made(size, 0))
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    network.load_state_dict({name: weight.float() for name, weight in saved["network"].items()}, strict=True)
    return network.eval()


def write_ggufs(network: Network, folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    config = network.model.config
    state = {name: value.detach().float().cpu().numpy() for name, value in network.model.state_dict().items()}
    model, projector = folder / MODEL_FILE, folder / PROJECTOR_FILE
    write_gguf(model, text_metadata(config), list(text_tensors(state, config.text_config.num_hidden_layers)))
    write_gguf(projector, vision_metadata(config), list(vision_tensors(state, config.vision_config.depth)))
    return model, projector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="demo")
    options = parser.parse_args()
    network = loaded(options.checkpoint, options.size)
    write_checkpoint(network, options.folder / "hf")
    for path in write_ggufs(network, options.folder):
        print(f"{path} {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
