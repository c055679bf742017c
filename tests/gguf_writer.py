"""Writes GGUF files with ``struct`` alone: small models that llama.cpp really loads, and damaged ones.

A tensor's data is zeros (a hole in the file where the file system can), except where a caller gives bytes,
so a large file costs no disk space and a tiny one no time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
F32, F16, Q4_0, Q8_0, Q2_K, Q4_K, Q5_K, Q6_K, IQ4_NL, BF16, MXFP4 = 0, 1, 2, 8, 10, 12, 13, 14, 20, 30, 39
BLOCK = {
    F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q8_0: (32, 34), Q2_K: (256, 84), Q4_K: (256, 144), Q5_K: (256, 176),
    Q6_K: (256, 210), IQ4_NL: (32, 18), BF16: (1, 2), MXFP4: (32, 17),
}  # fmt: skip

_SCALAR = {
    UINT8: "<B", INT8: "<b", UINT16: "<H", INT16: "<h", UINT32: "<I", INT32: "<i",
    FLOAT32: "<f", BOOL: "<?", UINT64: "<Q", INT64: "<q", FLOAT64: "<d",
}  # fmt: skip


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return UINT32 if 0 <= value < 1 << 32 else INT64
    if isinstance(value, float):
        return FLOAT32
    if isinstance(value, str):
        return STRING
    raise TypeError(type(value).__name__)


def _value(value: Any) -> bytes:
    """A value with its type in front; a tuple ``(type, value)`` says the type, a list is an array."""
    if isinstance(value, list):
        kind = _kind(value[0]) if value else INT32
        kind = INT32 if kind == UINT32 else kind
        body = b"".join(_string(item) if kind == STRING else struct.pack(_SCALAR[kind], item) for item in value)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + body
    if isinstance(value, tuple):
        kind, value = value
    else:
        kind = _kind(value)
    return struct.pack("<I", kind) + (_string(value) if kind == STRING else struct.pack(_SCALAR[kind], value))


def tensor_bytes(shape: Sequence[int], kind: int) -> int:
    """Bytes of a tensor. ``shape`` has the fastest dimension first, as the file does."""
    block, size = BLOCK[kind]
    count = 1
    for length in shape:
        count *= length
    return count // block * size


Tensors = Mapping[str, tuple[Sequence[int], int]]


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Tensors,
    *,
    data: Mapping[str, bytes] | None = None,
    version: int = 3,
    alignment: int = 32,
    offsets: Mapping[str, int] | None = None,
    cut: int = 0,
) -> Path:
    """Write a GGUF file: ``tensors`` maps name -> (shape, ggml type), ``cut`` drops bytes at the end."""
    header = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        header += [_string(key), _value(value)]
    position = 0
    places: list[tuple[str, int]] = []
    for name, (shape, kind) in tensors.items():
        offset = (offsets or {}).get(name, position)
        header.append(_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset))
        places.append((name, offset))
        position += -(-tensor_bytes(shape, kind) // alignment) * alignment
    raw = b"".join(header)
    raw += b"\0" * (-len(raw) % alignment)
    with path.open("wb") as file:
        file.write(raw)
        for name, offset in places:
            if data and name in data:
                file.seek(len(raw) + offset)
                file.write(data[name])
        file.truncate(len(raw) + position - cut)
    return path


# ------------------------------------------------------------------------------------------ models


def byte_alphabet() -> list[str]:
    """The 256 characters by which a byte-level vocabulary spells the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = {byte: chr(byte) for byte in shown}, 0
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + spare)
            spare += 1
    return [letters[byte] for byte in range(256)]


SPECIAL = [f"<|{word}|>" for word in ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad")]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary(size: int, pre: str = "qwen2") -> dict[str, Any]:
    """Tokenizer metadata of ``size`` tokens that llama.cpp accepts."""
    merges = ["t h", "th e", "i n", "a n"]
    tokens = byte_alphabet() + [merge.replace(" ", "") for merge in merges] + SPECIAL
    kinds = [1] * (256 + len(merges)) + [3] * len(SPECIAL)
    unused = size - len(tokens)
    if unused < 0:
        raise ValueError(f"a vocabulary has at least {len(tokens)} tokens")
    tokens += [f"[unused{number}]" for number in range(unused)]
    kinds += [5] * unused
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.chat_template": TEMPLATE,
    }


def text_model(
    architecture: str = "qwen3",
    *,
    width: int = 64,
    feed_forward: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 32,
    vocab: int = 512,
    context: int = 4096,
    kind: int = F32,
    experts: int = 0,
    experts_used: int = 2,
    expert_feed_forward: int = 64,
    shared_expert_feed_forward: int = 64,
    window: int = 0,
    full_attention_interval: int = 4,
    key_heads: int = 2,
    value_heads: int = 4,
    state: int = 32,
    tied: bool = False,
    predict_layers: int = 0,
    latent: int = 64,
    rope: int = 16,
) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int]]]:
    """Metadata and tensors of a model that llama.cpp loads; shapes fastest dimension first."""
    a = architecture
    meta: dict[str, Any] = {
        "general.architecture": a,
        "general.type": "model",
        "general.name": f"tiny {a}",
        "general.file_type": 0,
        f"{a}.block_count": layers + predict_layers,
        f"{a}.context_length": context,
        f"{a}.embedding_length": width,
        f"{a}.feed_forward_length": feed_forward,
        f"{a}.attention.head_count": heads,
        f"{a}.attention.head_count_kv": kv_heads,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{a}.rope.freq_base": 10000.0,
    }
    if a == "deepseek2":
        meta |= {
            f"{a}.attention.head_count_kv": 1,
            f"{a}.attention.key_length": latent + rope,
            f"{a}.attention.value_length": latent,
            f"{a}.attention.key_length_mla": head_size,
            f"{a}.attention.value_length_mla": head_size,
            f"{a}.attention.kv_lora_rank": latent,
            f"{a}.leading_dense_block_count": layers,
            f"{a}.expert_shared_count": 1,
            f"{a}.expert_weights_scale": 1.0,
            f"{a}.attention.q_lora_rank": latent,
            f"{a}.vocab_size": vocab,
        }
    else:
        meta |= {f"{a}.attention.key_length": head_size, f"{a}.attention.value_length": head_size}
    hybrid = a in ("qwen35", "qwen35moe")
    if hybrid or "vl" in a:
        meta[f"{a}.rope.dimension_sections"] = [2, 1, 1, 0] if hybrid else [4, 6, 6, 0]
    meta[f"{a}.rope.dimension_count"] = rope if a == "deepseek2" else head_size // 4 if hybrid else head_size
    if predict_layers:
        meta[f"{a}.nextn_predict_layers"] = predict_layers
    if hybrid:
        meta |= {
            f"{a}.ssm.conv_kernel": 4,
            f"{a}.ssm.state_size": state,
            f"{a}.ssm.group_count": key_heads,
            f"{a}.ssm.time_step_rank": value_heads,
            f"{a}.ssm.inner_size": value_heads * state,
            f"{a}.full_attention_interval": full_attention_interval,
        }
    if window:
        meta[f"{a}.attention.sliding_window"] = window
    if experts or a == "deepseek2":
        meta |= {
            f"{a}.expert_count": experts or 4,
            f"{a}.expert_used_count": experts_used,
            f"{a}.expert_feed_forward_length": expert_feed_forward,
        }
        if a == "qwen35moe":
            meta[f"{a}.expert_shared_feed_forward_length"] = shared_expert_feed_forward
    pre = {"qwen35": "qwen35", "qwen35moe": "qwen35", "llama": "llama-bpe", "mistral3": "llama-bpe"}.get(a, "qwen2")
    meta |= vocabulary(vocab, pre)
    tensors: dict[str, tuple[tuple[int, ...], int]] = {"token_embd.weight": ((width, vocab), kind)}
    if not tied:
        tensors["output.weight"] = ((width, vocab), kind)
    tensors["output_norm.weight"] = ((width,), F32)

    def add(name: str, *shape: int, number_type: int | None = None) -> None:
        norm = len(shape) == 1
        tensors[name] = (shape, F32 if norm else (kind if number_type is None else number_type))

    gate = 2 if hybrid else 1
    for layer in range(layers + predict_layers):
        block = f"blk.{layer}."
        if layer >= layers:
            add(block + "nextn.eh_proj.weight", 2 * width, width)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                add(f"{block}nextn.{name}.weight", width)
        add(block + "attn_norm.weight", width)
        if hybrid:
            add(block + "post_attention_norm.weight", width)
        else:
            add(block + "ffn_norm.weight", width)
        if a == "gemma3":
            add(block + "post_attention_norm.weight", width)
            add(block + "post_ffw_norm.weight", width)
        if a == "deepseek2":
            add(block + "attn_q_a.weight", width, latent)
            add(block + "attn_q_a_norm.weight", latent)
            add(block + "attn_q_b.weight", latent, heads * head_size)
            add(block + "attn_kv_a_mqa.weight", width, latent + rope)
            add(block + "attn_kv_a_norm.weight", latent)
            add(block + "attn_k_b.weight", head_size - rope, latent, heads)
            add(block + "attn_v_b.weight", latent, head_size, heads)
            add(block + "attn_output.weight", heads * head_size, width)
        elif hybrid and layer < layers and (layer + 1) % full_attention_interval:
            mixed = 2 * key_heads * state + value_heads * state
            add(block + "attn_qkv.weight", width, mixed)
            add(block + "attn_gate.weight", width, value_heads * state)
            add(block + "ssm_conv1d.weight", 4, mixed, number_type=F32)
            add(block + "ssm_a", value_heads)
            add(block + "ssm_dt.bias", value_heads)
            add(block + "ssm_alpha.weight", width, value_heads)
            add(block + "ssm_beta.weight", width, value_heads)
            add(block + "ssm_norm.weight", state)
            add(block + "ssm_out.weight", value_heads * state, width)
        else:
            add(block + "attn_q.weight", width, gate * heads * head_size)
            add(block + "attn_k.weight", width, kv_heads * head_size)
            add(block + "attn_v.weight", width, kv_heads * head_size)
            add(block + "attn_output.weight", heads * head_size, width)
            if a in ("qwen2", "qwen2vl"):
                add(block + "attn_q.bias", heads * head_size)
                add(block + "attn_k.bias", kv_heads * head_size)
                add(block + "attn_v.bias", kv_heads * head_size)
            elif a not in ("llama", "mistral3"):
                add(block + "attn_q_norm.weight", head_size)
                add(block + "attn_k_norm.weight", head_size)
        if experts and a != "deepseek2":
            add(block + "ffn_gate_inp.weight", width, experts, number_type=F32)
            add(block + "ffn_gate_exps.weight", width, expert_feed_forward, experts)
            add(block + "ffn_up_exps.weight", width, expert_feed_forward, experts)
            add(block + "ffn_down_exps.weight", expert_feed_forward, width, experts)
            if a == "qwen35moe":
                add(block + "ffn_gate_inp_shexp.weight", width)
                add(block + "ffn_gate_shexp.weight", width, shared_expert_feed_forward)
                add(block + "ffn_up_shexp.weight", width, shared_expert_feed_forward)
                add(block + "ffn_down_shexp.weight", shared_expert_feed_forward, width)
        else:
            add(block + "ffn_gate.weight", width, feed_forward)
            add(block + "ffn_up.weight", width, feed_forward)
            add(block + "ffn_down.weight", feed_forward, width)
    return meta, tensors


def projector(
    kind: str = "qwen3vl_merger",
    *,
    width: int = 64,
    feed_forward: int = 128,
    layers: int = 2,
    heads: int = 4,
    patch: int = 16,
    image_size: int = 256,
    language_width: int = 64,
    number_type: int = F32,
) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int]]]:
    """Metadata and tensors of a Qwen3-VL projector that llama.cpp loads."""
    meta: dict[str, Any] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": "tiny projector",
        "general.file_type": 0,
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.vision.projection_dim": language_width,
        "clip.vision.image_size": image_size,
        "clip.vision.patch_size": patch,
        "clip.vision.embedding_length": width,
        "clip.vision.feed_forward_length": feed_forward,
        "clip.vision.block_count": layers,
        "clip.vision.attention.head_count": heads,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
        "clip.use_gelu": True,
        "clip.vision.spatial_merge_size": 2,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.is_deepstack_layers": [False] * layers,
    }
    positions = (image_size // patch) ** 2
    tensors: dict[str, tuple[tuple[int, ...], int]] = {
        "v.patch_embd.weight": ((patch, patch, 3, width), F32),
        "v.patch_embd.weight.1": ((patch, patch, 3, width), F32),
        "v.patch_embd.bias": ((width,), F32),
        "v.position_embd.weight": ((width, positions), F32),
    }
    for layer in range(layers):
        for name, out, inside in (
            ("attn_qkv", 3 * width, width),
            ("attn_out", width, width),
            ("ffn_up", feed_forward, width),
            ("ffn_down", width, feed_forward),
        ):
            tensors[f"v.blk.{layer}.{name}.weight"] = ((inside, out), number_type)
            tensors[f"v.blk.{layer}.{name}.bias"] = ((out,), F32)
        for name in ("ln1", "ln2"):
            tensors[f"v.blk.{layer}.{name}.weight"] = ((width,), F32)
            tensors[f"v.blk.{layer}.{name}.bias"] = ((width,), F32)
    tensors |= {
        "v.post_ln.weight": ((width,), F32),
        "v.post_ln.bias": ((width,), F32),
        "mm.0.weight": ((4 * width, 4 * width), number_type),
        "mm.0.bias": ((4 * width,), F32),
        "mm.2.weight": ((4 * width, language_width), number_type),
        "mm.2.bias": ((language_width,), F32),
    }
    return meta, tensors
