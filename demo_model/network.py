"""The model: Qwen3.5's dense architecture as transformers builds it, small, and a forward pass that trains it fast.

transformers runs the vision tower picture by picture and, without its kernels, linear attention row by row. Here
pictures of one grid go through the tower together, and linear attention inverts its triangular matrices by halves.
tests/demo_model/test_training.py holds this pass equal to transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb, rotate_half
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from demo_model.tokens import VOCABULARY, number_of
from demo_model.world import CENTRES, COLOURS

PATCH, MERGE = 16, 2
CELL = PATCH * MERGE
MIN_PIXELS, MAX_PIXELS = 128 * 128, 320 * 320
SCALED_UP = 70 * CELL**2  # pixels; smaller pictures are scaled up where the model is served: small digits get legible
CONTEXT = 16384

SIZES: dict[str, dict[str, int]] = {
    "demo": {
        "width": 256, "feed": 640, "layers": 8, "heads": 4, "kv_heads": 2, "head": 64,
        "linear_key_heads": 4, "linear_value_heads": 4, "linear": 64,
        "vision_width": 256, "vision_feed": 768, "vision_layers": 7, "vision_heads": 4, "positions": 400,
    },
    "smoke": {
        "width": 64, "feed": 96, "layers": 4, "heads": 2, "kv_heads": 1, "head": 32,
        "linear_key_heads": 2, "linear_value_heads": 2, "linear": 32,
        "vision_width": 64, "vision_feed": 128, "vision_layers": 2, "vision_heads": 2, "positions": 100,
    },
}  # fmt: skip


def configuration(size: str) -> Qwen3_5Config:
    s = SIZES[size]
    rotated = s["head"] // 8  # pairs that carry a position: a quarter of the head, time, height and width interleaved
    section = [rotated - 2 * (rotated // 3), rotated // 3, rotated // 3]
    return Qwen3_5Config(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": s["width"],
            "intermediate_size": s["feed"],
            "num_hidden_layers": s["layers"],
            "num_attention_heads": s["heads"],
            "num_key_value_heads": s["kv_heads"],
            "head_dim": s["head"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": s["linear"],
            "linear_value_head_dim": s["linear"],
            "linear_num_key_heads": s["linear_key_heads"],
            "linear_num_value_heads": s["linear_value_heads"],
            "full_attention_interval": 4,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": section,
                "mrope_interleaved": True,
            },
            "eos_token_id": number_of("<|im_end|>"),
            "pad_token_id": number_of("<|endoftext|>"),
        },
        vision_config={
            "depth": s["vision_layers"],
            "hidden_size": s["vision_width"],
            "intermediate_size": s["vision_feed"],
            "num_heads": s["vision_heads"],
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": s["width"],
            "num_position_embeddings": s["positions"],
        },
        image_token_id=number_of("<|image_pad|>"),
        video_token_id=number_of("<|video_pad|>"),
        vision_start_token_id=number_of("<|vision_start|>"),
        vision_end_token_id=number_of("<|vision_end|>"),
        tie_word_embeddings=False,
    )


def made(size: str, seed: int) -> Qwen3_5ForConditionalGeneration:
    torch.manual_seed(seed)
    return Qwen3_5ForConditionalGeneration(configuration(size)).float()


# ------------------------------------------------------------------------------------------- linear attention


class _UnitLowerInverse(torch.autograd.Function):
    """inverse(1 + strictly lower part) of matrices (..., n, n), n a power of two of at least 4, in 32 bits."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        precise = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        size = matrix.shape[-1]
        flat = matrix.float().tril(-1).reshape(-1, size, size)
        count = flat.shape[0]
        step = 4
        blocks = flat.view(count, size // step, step, size // step, step).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        one = torch.eye(step, device=matrix.device)
        below = -blocks  # strictly lower, so that its fourth power is nothing
        inverse = (one + below) @ (one + below @ below)
        while step < size:
            wide = 2 * step
            parts = size // wide
            blocks = flat.view(count, parts, wide, parts, wide).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
            pairs = inverse.view(count, parts, 2, step, step)
            corner = -pairs[:, :, 1] @ blocks[:, :, step:, :step] @ pairs[:, :, 0]
            inverse = flat.new_zeros(count, parts, wide, wide)
            inverse[:, :, :step, :step] = pairs[:, :, 0]
            inverse[:, :, step:, step:] = pairs[:, :, 1]
            inverse[:, :, step:, :step] = corner
            step = wide
        inverse = inverse.view(matrix.shape)
        torch.backends.cuda.matmul.allow_tf32 = precise
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ gradients[0] @ turned).tril(-1)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """transformers' ``torch_chunk_gated_delta_rule`` from an empty state: (batch, tokens, heads, size).

    Decays and the inverse are in 32 bits, products in the type of the query. ``decay`` comes in 32 bits.
    """
    kind, length = query.dtype, query.shape[1]
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    query, key, value, decay, beta = (x.transpose(1, 2) for x in (query, key, value, decay, beta))
    missing = -length % chunk
    if missing:
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
        decay, beta = F.pad(decay, (0, missing)), F.pad(beta, (0, missing))
    query, key, value = (x.unflatten(2, (-1, chunk)) for x in (query, key, value))
    decay, beta = decay.unflatten(2, (-1, chunk)).cumsum(-1), beta.unflatten(2, (-1, chunk)).unsqueeze(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    turned = key.transpose(-1, -2)
    weighted = key * beta
    inverse = _UnitLowerInverse.apply(key.float() @ turned.float() * beta.float() * between).to(kind)
    values = inverse @ (value * beta)
    grown = decay.exp().unsqueeze(-1).to(kind)
    keys = inverse @ (weighted * grown)
    inner = (query @ turned) * between.to(kind)
    query = query * grown
    late = (key * (decay[..., -1:] - decay).exp().unsqueeze(-1).to(kind)).transpose(-1, -2)
    kept = decay[..., -1].exp()[..., None, None]
    state: Tensor | None = None
    found = []
    for at in range(query.shape[2]):
        fresh = values[:, :, at]
        if state is None:
            found.append(inner[:, :, at] @ fresh)
            state = (late[:, :, at] @ fresh).float()
            continue
        known = state.to(kind)
        fresh = fresh - keys[:, :, at] @ known
        found.append(query[:, :, at] @ known + inner[:, :, at] @ fresh)
        if at + 1 < query.shape[2]:
            state = state * kept[:, :, at] + late[:, :, at] @ fresh
    return torch.stack(found, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length one, as ``l2norm`` makes them: x / sqrt(sum(x * x) + 1e-6)."""
    size = x.shape[-1]
    return F.rms_norm(x, (size,), None, 1e-6 / size) * size**-0.5


def _normed(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], 1.0 + norm.weight, norm.eps)


def _convolved(weight: Tensor, x: Tensor) -> Tensor:
    """The causal convolution of each channel, (batch, tokens, channels), its taps one after the other."""
    taps = weight.squeeze(1).t()  # (taps, channels), the last one for the token itself
    found = x * taps[-1]
    for back in range(1, len(taps)):
        found = found + F.pad(x[:, :-back], (0, 0, back, 0)) * taps[-1 - back]
    return found


def _linear_attention(layer: Any, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    mixed = F.silu(_convolved(layer.conv1d.weight, layer.in_proj_qkv(x)))
    query, key, value = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    query = query.reshape(batch, length, -1, layer.head_k_dim)
    key = key.reshape(batch, length, -1, layer.head_k_dim)
    value = value.reshape(batch, length, -1, layer.head_v_dim)
    decay = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(x).float() + layer.dt_bias.float())
    found = gated_delta_rule(query, key, value, decay, layer.in_proj_b(x).sigmoid())
    gate = layer.in_proj_z(x).view(batch, length, -1, layer.head_v_dim)
    found = F.rms_norm(found, found.shape[-1:], layer.norm.weight, layer.norm.variance_epsilon) * F.silu(gate)
    return layer.out_proj(found.flatten(2))


def _full_attention(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, _ = x.shape
    query, gate = layer.q_proj(x).view(batch, length, -1, 2 * layer.head_dim).chunk(2, -1)
    query = _normed(layer.q_norm, query).transpose(1, 2)
    key = _normed(layer.k_norm, layer.k_proj(x).view(batch, length, -1, layer.head_dim)).transpose(1, 2)
    value = layer.v_proj(x).view(batch, length, -1, layer.head_dim).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    key, value = (t.repeat_interleave(layer.num_key_value_groups, 1) for t in (key, value))
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return layer.o_proj(found.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid())


def text_layer(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    normed = _normed(layer.input_layernorm, x)
    if layer.block_type == "linear_attention":
        x = x + _linear_attention(layer.linear_attn, normed)
    else:
        x = x + _full_attention(layer.self_attn, normed, cos, sin)
    return x + layer.mlp(_normed(layer.post_attention_layernorm, x))


def vision_layer(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, _ = x.shape
    query, key, value = layer.attn.qkv(layer.norm1(x)).view(batch, length, 3, layer.attn.num_heads, -1).unbind(2)
    query, key = (t * cos + rotate_half(t) * sin for t in (query, key))
    found = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, key, value)))
    x = x + layer.attn.proj(found.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.norm2(x))


class Network(nn.Module):
    """transformers' model with the fast pass, and the head that is used in training alone.

    ``centres``: for every merged cell of a picture, the kind and the colour of what has its centre there.
    """

    def __init__(self, model: Qwen3_5ForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        width = model.config.text_config.hidden_size
        self.centres = nn.Linear(width, len(CENTRES) + 1 + len(COLOURS))
        self.grids: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def _grid(self, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Position embedding's corners and their weights, cosines and sines of a picture's patches."""
        if (rows, columns) not in self.grids:
            tower = self.model.model.visual
            device = tower.pos_embed.weight.device
            sizes = torch.tensor([[1, rows, columns]], device=device)
            corners, weights = get_vision_interpolation_indices_and_weights(
                sizes,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=MERGE,
                kwargs={},
            )
            places = get_vision_position_ids(sizes, MERGE, kwargs={})
            cos, sin = tower.rotary_pos_emb(tower.pos_embed.weight, places)
            kind = tower.pos_embed.weight.dtype
            self.grids[rows, columns] = (
                corners,
                weights.to(kind),
                cos[None, :, None].to(kind),
                sin[None, :, None].to(kind),
            )
        return self.grids[rows, columns]

    def see(self, pixels: Tensor) -> Tensor:
        """Pictures of one size (batch, height, width, 3), values from -1 to 1: (batch, cells, width of the text)."""
        tower = self.model.model.visual
        batch, height, width, _ = pixels.shape
        rows, columns = height // PATCH, width // PATCH
        corners, weights, cos, sin = self._grid(rows, columns)
        patches = pixels.view(batch, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
        patches = patches.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(batch, rows * columns, -1)
        kernel = tower.patch_embed.proj.weight.sum(2).flatten(1)  # a still picture fills both frames
        x = F.linear(patches, kernel, tower.patch_embed.proj.bias)
        x = x + (tower.pos_embed(corners) * weights[:, :, None]).sum(1)
        for layer in tower.blocks:
            x = vision_layer(layer, x, cos, sin)
        merger = tower.merger
        x = merger.norm(x).view(batch, -1, merger.hidden_size)
        return merger.linear_fc2(F.gelu(merger.linear_fc1(x)))

    def forward(self, numbers: Tensor, places: Tensor, pictures: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Last hidden states (batch, tokens, width), and the head's findings for each picture.

        ``numbers``: token numbers, padded at the end. ``places``: (3, batch, tokens) positions in time, height, width.
        """
        text = self.model.model.language_model
        x = text.embed_tokens(numbers)
        found = []
        if pictures:
            seen = [self.see(pixels) for pixels in pictures]
            found = [self.centres(cells) for cells in seen]
            mask = (numbers == self.model.config.image_token_id).unsqueeze(-1)
            x = x.masked_scatter(mask, torch.cat(seen, 1).to(x.dtype))
        cos, sin = text.rotary_emb(x, places)
        for layer in text.layers:
            x = text_layer(layer, x, cos, sin)
        return _normed(text.norm, x), found
