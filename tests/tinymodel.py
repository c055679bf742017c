"""A tiny vision-language model as GGUF files, made on the spot: the shape of Qwen3.5, random weights, about 2 MB.

For tests that need an engine which takes pictures of any size and writes on until it is stopped.

It takes every path that a real model takes in llama.cpp (linear and full attention, the vision tower, its projector,
the chat template with pictures), and what it answers is noise: printable letters, the same for the same question.
The layout of the files is docs/gguf.md of ggml; tensor names and shapes are those that llama.cpp loads for the
architectures "qwen35" and "clip" with the projector "qwen3vl_merger".
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

from msgspec import Struct

MODEL_FILE, PROJECTOR_FILE = "tiny-qwen35-random.gguf", "mmproj-tiny-qwen35-random.gguf"
NAME = "tiny-qwen35-random"
RANDOM_KEY = "loadmaster.random_weights"  # true in files whose answers mean nothing
CONTEXT = 16384  # tokens

_SEED = 35
_WIDTH, _FEED_FORWARD, _LAYERS = 64, 128, 4
_HEADS, _KV_HEADS, _HEAD_SIZE = 4, 2, 32
_FULL_ATTENTION_EVERY = 4
_LINEAR_KEY_HEADS, _LINEAR_VALUE_HEADS, _LINEAR_SIZE, _CONVOLUTION = 2, 4, 32, 4
_VISION_LAYERS, _VISION_HEADS, _PATCH, _MERGE, _IMAGE = 2, 4, 16, 2, 256
_SPREAD = 0.15  # standard deviation of a weight; keeps activations near one at these widths
# Logits spread by 8 x this: wide enough that letters win over the tokens whose logit is fixed at zero.
_OUTPUT_SPREAD = 0.5
_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_F32 = 0
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_CONTROLS = (
    *(f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end")),
    *(f"<|{name}|>" for name in ("box_start", "box_end", "quad_start", "quad_end")),
    *(f"<|{name}|>" for name in ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")),
)
_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_MERGES = ("t h", "th e", "i n", "a n")

# ChatML with the picture's place and Qwen's switch for thinking, off by default as in the smallest models.
_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role }}"
    "{%- if message.content is string %}{{ '\n' + message.content }}"
    "{%- else %}{{ '\n' }}{%- for part in message.content -%}"
    "{%- if part.type == 'image' or part.type == 'image_url' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>{{ '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is true -%}<think>{{ '\n' }}"
    "{%- else -%}<think>{{ '\n\n' }}</think>{{ '\n\n' }}{%- endif -%}"
    "{%- endif -%}"
)


class _Tensor(Struct, frozen=True):
    """``shape`` has the fastest dimension first, as the file does; ``values`` are 32-bit floats in that order."""

    name: str
    shape: tuple[int, ...]
    values: array[float]


def write_tiny_model(directory: Path) -> tuple[Path, Path]:
    """Write the model and its projector into ``directory``, which is made if need be.

    Returns the paths (model, projector). The bytes are the same on every machine. Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model, projector = directory / MODEL_FILE, directory / PROJECTOR_FILE
    random = Random(_SEED)
    tokens, kinds = _vocabulary()
    _write(model, _model_metadata(tokens, kinds), list(_model_tensors(random, tokens)))
    _write(projector, _projector_metadata(), list(_projector_tensors(random)))
    return model, projector


# ------------------------------------------------------------------------------------------- the vocabulary


def _byte_letters() -> list[str]:
    """The 256 letters in which a byte-level vocabulary (GPT-2's) writes the bytes."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, next_spare = [], 256
    for byte in range(256):
        letters.append(chr(byte if byte in shown else next_spare))
        next_spare += byte not in shown
    return letters


def _vocabulary() -> tuple[list[str], list[int]]:
    """Tokens and their kinds: bytes, merges, Qwen's special tokens, and unused ones up to a multiple of 32."""
    words = [*_byte_letters(), *(merge.replace(" ", "") for merge in _MERGES)]
    tokens = [*words, *_CONTROLS, *_MARKERS]
    kinds = [_NORMAL] * len(words) + [_CONTROL] * len(_CONTROLS) + [_USER_DEFINED] * len(_MARKERS)
    while len(tokens) % 32:
        tokens.append(f"[unused{len(tokens)}]")
        kinds.append(_UNUSED)
    return tokens, kinds


# -------------------------------------------------------------------------------------------- what is in it


def _model_metadata(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, tuple[int, Any]]:
    arch = "qwen35"
    return {
        "general.architecture": (_STRING, arch),
        "general.type": (_STRING, "model"),
        "general.name": (_STRING, NAME),
        "general.description": (_STRING, "random weights: for trying out a service, its answers are noise"),
        "general.file_type": (_UINT32, 0),
        RANDOM_KEY: (_BOOL, True),
        f"{arch}.block_count": (_UINT32, _LAYERS),
        f"{arch}.context_length": (_UINT32, CONTEXT),
        f"{arch}.embedding_length": (_UINT32, _WIDTH),
        f"{arch}.feed_forward_length": (_UINT32, _FEED_FORWARD),
        f"{arch}.attention.head_count": (_UINT32, _HEADS),
        f"{arch}.attention.head_count_kv": (_UINT32, _KV_HEADS),
        f"{arch}.attention.key_length": (_UINT32, _HEAD_SIZE),
        f"{arch}.attention.value_length": (_UINT32, _HEAD_SIZE),
        f"{arch}.attention.layer_norm_rms_epsilon": (_FLOAT32, 1e-6),
        f"{arch}.rope.freq_base": (_FLOAT32, 10000.0),
        f"{arch}.rope.dimension_count": (_UINT32, _HEAD_SIZE // 4),
        f"{arch}.rope.dimension_sections": (_ARRAY, (_INT32, (2, 1, 1, 0))),
        f"{arch}.full_attention_interval": (_UINT32, _FULL_ATTENTION_EVERY),
        f"{arch}.ssm.conv_kernel": (_UINT32, _CONVOLUTION),
        f"{arch}.ssm.state_size": (_UINT32, _LINEAR_SIZE),
        f"{arch}.ssm.group_count": (_UINT32, _LINEAR_KEY_HEADS),
        f"{arch}.ssm.time_step_rank": (_UINT32, _LINEAR_VALUE_HEADS),
        f"{arch}.ssm.inner_size": (_UINT32, _LINEAR_VALUE_HEADS * _LINEAR_SIZE),
        "tokenizer.ggml.model": (_STRING, "gpt2"),
        "tokenizer.ggml.pre": (_STRING, arch),
        "tokenizer.ggml.tokens": (_ARRAY, (_STRING, tokens)),
        "tokenizer.ggml.token_type": (_ARRAY, (_INT32, kinds)),
        "tokenizer.ggml.merges": (_ARRAY, (_STRING, _MERGES)),
        "tokenizer.ggml.eos_token_id": (_UINT32, tokens.index("<|im_end|>")),
        "tokenizer.ggml.padding_token_id": (_UINT32, tokens.index("<|endoftext|>")),
        "tokenizer.chat_template": (_STRING, _TEMPLATE),
    }


def _projector_metadata() -> dict[str, tuple[int, Any]]:
    half = (_ARRAY, (_FLOAT32, (0.5, 0.5, 0.5)))
    return {
        "general.architecture": (_STRING, "clip"),
        "general.type": (_STRING, "mmproj"),
        "general.name": (_STRING, NAME),
        "general.file_type": (_UINT32, 0),
        RANDOM_KEY: (_BOOL, True),
        "clip.has_vision_encoder": (_BOOL, True),
        "clip.projector_type": (_STRING, "qwen3vl_merger"),
        "clip.use_gelu": (_BOOL, True),
        "clip.vision.projection_dim": (_UINT32, _WIDTH),
        "clip.vision.image_size": (_UINT32, _IMAGE),
        "clip.vision.patch_size": (_UINT32, _PATCH),
        "clip.vision.embedding_length": (_UINT32, _WIDTH),
        "clip.vision.feed_forward_length": (_UINT32, _FEED_FORWARD),
        "clip.vision.block_count": (_UINT32, _VISION_LAYERS),
        "clip.vision.attention.head_count": (_UINT32, _VISION_HEADS),
        "clip.vision.attention.layer_norm_epsilon": (_FLOAT32, 1e-6),
        "clip.vision.image_mean": half,
        "clip.vision.image_std": half,
        "clip.vision.spatial_merge_size": (_UINT32, _MERGE),
        "clip.vision.is_deepstack_layers": (_ARRAY, (_BOOL, (False,) * _VISION_LAYERS)),
    }


def _model_tensors(random: Random, tokens: Sequence[str]) -> Iterator[_Tensor]:
    def drawn(name: str, *shape: int) -> _Tensor:
        return _Tensor(name, shape, _random_values(random, shape))

    letters = {tokens.index(_byte_letters()[byte]) for byte in range(ord(" "), ord("~") + 1)}
    keys, values = _LINEAR_KEY_HEADS * _LINEAR_SIZE, _LINEAR_VALUE_HEADS * _LINEAR_SIZE
    yield drawn("token_embd.weight", _WIDTH, len(tokens))
    yield _Tensor("output.weight", (_WIDTH, len(tokens)), _output(random, letters, len(tokens)))
    yield _constant("output_norm.weight", 1.0, _WIDTH)
    for layer in range(_LAYERS):
        at = f"blk.{layer}."
        yield _constant(at + "attn_norm.weight", 1.0, _WIDTH)
        yield _constant(at + "post_attention_norm.weight", 1.0, _WIDTH)
        yield drawn(at + "ffn_gate.weight", _WIDTH, _FEED_FORWARD)
        yield drawn(at + "ffn_up.weight", _WIDTH, _FEED_FORWARD)
        yield drawn(at + "ffn_down.weight", _FEED_FORWARD, _WIDTH)
        if (layer + 1) % _FULL_ATTENTION_EVERY == 0:
            yield drawn(at + "attn_q.weight", _WIDTH, 2 * _HEADS * _HEAD_SIZE)  # queries and the output's gate
            yield drawn(at + "attn_k.weight", _WIDTH, _KV_HEADS * _HEAD_SIZE)
            yield drawn(at + "attn_v.weight", _WIDTH, _KV_HEADS * _HEAD_SIZE)
            yield drawn(at + "attn_output.weight", _HEADS * _HEAD_SIZE, _WIDTH)
            yield _constant(at + "attn_q_norm.weight", 1.0, _HEAD_SIZE)
            yield _constant(at + "attn_k_norm.weight", 1.0, _HEAD_SIZE)
            continue
        yield drawn(at + "attn_qkv.weight", _WIDTH, 2 * keys + values)
        yield drawn(at + "attn_gate.weight", _WIDTH, values)
        yield drawn(at + "ssm_conv1d.weight", _CONVOLUTION, 2 * keys + values)
        yield _constant(at + "ssm_a", -1.0, _LINEAR_VALUE_HEADS)
        yield _constant(at + "ssm_dt.bias", -4.0, _LINEAR_VALUE_HEADS)  # a slow decay: early tokens are remembered
        yield drawn(at + "ssm_alpha.weight", _WIDTH, _LINEAR_VALUE_HEADS)
        yield drawn(at + "ssm_beta.weight", _WIDTH, _LINEAR_VALUE_HEADS)
        yield _constant(at + "ssm_norm.weight", 1.0, _LINEAR_SIZE)
        yield drawn(at + "ssm_out.weight", values, _WIDTH)


def _projector_tensors(random: Random) -> Iterator[_Tensor]:
    def drawn(name: str, *shape: int) -> _Tensor:
        return _Tensor(name, shape, _random_values(random, shape))

    def linear(name: str, inputs: int, outputs: int) -> Iterator[_Tensor]:
        yield drawn(f"{name}.weight", inputs, outputs)
        yield drawn(f"{name}.bias", outputs)

    def norm(name: str) -> Iterator[_Tensor]:
        yield _constant(f"{name}.weight", 1.0, _WIDTH)
        yield _constant(f"{name}.bias", 0.0, _WIDTH)

    # two kernels: a still picture fills both frames of the patch in time
    yield drawn("v.patch_embd.weight", _PATCH, _PATCH, 3, _WIDTH)
    yield drawn("v.patch_embd.weight.1", _PATCH, _PATCH, 3, _WIDTH)
    yield drawn("v.patch_embd.bias", _WIDTH)
    yield drawn("v.position_embd.weight", _WIDTH, (_IMAGE // _PATCH) ** 2)
    for layer in range(_VISION_LAYERS):
        at = f"v.blk.{layer}."
        yield from norm(at + "ln1")
        yield from norm(at + "ln2")
        yield from linear(at + "attn_qkv", _WIDTH, 3 * _WIDTH)
        yield from linear(at + "attn_out", _WIDTH, _WIDTH)
        yield from linear(at + "ffn_up", _WIDTH, _FEED_FORWARD)
        yield from linear(at + "ffn_down", _FEED_FORWARD, _WIDTH)
    yield from norm("v.post_ln")
    merged = _WIDTH * _MERGE**2
    yield from linear("mm.0", merged, merged)
    yield from linear("mm.2", merged, _WIDTH)


def _random_values(random: Random, shape: Sequence[int], spread: float = _SPREAD) -> array[float]:
    """Evenly distributed values of this standard deviation, the same everywhere: no function of the C library."""
    count = 1
    for length in shape:
        count *= length
    step = spread * 1.7320508 / 32768  # an even distribution over ±a has the deviation a / sqrt(3)
    return array("f", [value * step for (value,) in struct.iter_unpack("<h", random.randbytes(2 * count))])


def _output(random: Random, letters: set[int], rows: int) -> array[float]:
    """Rows for printable letters alone; all others are zero, so that every answer can be shown."""
    values = array("f")
    for row in range(rows):
        drawn = _random_values(random, (_WIDTH,), _OUTPUT_SPREAD)
        values.extend(drawn if row in letters else array("f", bytes(4 * _WIDTH)))
    return values


def _constant(name: str, value: float, length: int) -> _Tensor:
    return _Tensor(name, (length,), array("f", [value]) * length)


# -------------------------------------------------------------------------------------------------- the file


def _write(path: Path, metadata: dict[str, tuple[int, Any]], tensors: Sequence[_Tensor]) -> None:
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, (kind, value) in metadata.items():
        head += _text(key) + struct.pack("<I", kind) + _encoded(kind, value)
    offset = 0
    for tensor in tensors:
        head += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, _F32, offset)
        offset += _padded(4 * len(tensor.values))
    with path.open("wb") as file:
        _put(file, bytes(head))
        for tensor in tensors:
            if sys.byteorder == "big":
                tensor.values.byteswap()
            _put(file, tensor.values.tobytes())


def _put(file: BinaryIO, content: bytes) -> None:
    file.write(content + bytes(_padded(len(content)) - len(content)))


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _encoded(kind: int, value: Any) -> bytes:
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_encoded(inner, item) for item in items)
    if kind == _STRING:
        return _text(value)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)
