"""How large the weights of a model are when neither its files nor its tensors are known.

The number of parameters is the one that is declared, else the one in the model's name ("70B", "8x7B", "450M"),
else a count of the matrices that every decoder has. The result is assumed, with wide bounds, or None.
"""

from __future__ import annotations

import re

from loadmaster.core.facts import Amount, ModelFacts
from loadmaster.core.tensorlayout import MODEL_DTYPE_BYTES

# 70B, 0.5b, 450M, 1T, 8x7B, between separators; not the active share of A3B, nor the effective size of E4B
_IN_NAME = re.compile(r"(?:^|[-_/])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)([bmt])(?=$|[-_.:])(?!-\d+e\b)", re.IGNORECASE)
_UNITS = {"m": 10**6, "b": 10**9, "t": 10**12}
# A name rounds, leaves out the tower or counts the embeddings twice; experts of "8x7B" share all but their own part.
_NAMED = (0.75, 1.35)
_NAMED_EXPERTS = (0.6, 1.1)
# Beside the counted matrices: heads of other widths, gates, towers, shared and dense parts, prediction heads.
_COUNTED = (0.5, 2.0)


def declared_weights(model: ModelFacts) -> Amount | None:
    """Bytes of all weights, assumed from the declared number of parameters; None when nothing declares it."""
    found = _parameters(model)
    if found is None:
        return None
    (count, low, high), source = found
    stored = MODEL_DTYPE_BYTES.get(model.text.dtype or "", 2)
    quantization = model.quantization
    packed: float = stored
    if quantization.method is not None:
        if not quantization.bits:
            packed, smallest = stored / 2, stored / 8
        else:
            packed = smallest = min(stored, quantization.bits / 8)
    else:
        smallest = stored
    note = f"size assumed: {source}, {packed:g} bytes each"
    return Amount(int(count * packed), int(low * smallest), int(high * stored), "assumed", note)


def _parameters(model: ModelFacts) -> tuple[tuple[float, float, float], str] | None:
    """Expected, least and most parameters, and what says so."""
    if model.parameters:
        count = float(model.parameters)
        return (count, count, count), f"{count / 1e9:.1f} billion parameters are declared"
    last = model.name.rstrip("/").replace("\\", "/").rpartition("/")[2]
    named = _IN_NAME.search(last)
    if named is not None and float(named[2]) > 0:
        experts = int(named[1] or 1)
        count = experts * float(named[2]) * _UNITS[named[3].lower()]
        low, high = _NAMED if experts == 1 else _NAMED_EXPERTS
        return (count, count * low, count * high), f"the name says {named[0].strip('-_/')} parameters"
    counted = _counted(model)
    if counted is None:
        return None
    low, high = _COUNTED
    return (
        counted,
        counted * low,
        counted * high,
    ), f"about {counted / 1e9:.1f} billion parameters by the configuration"


def _counted(model: ModelFacts) -> float | None:
    """Parameters of embedding, attention and feed-forward layers."""
    text = model.text
    layers = text.num_hidden_layers or len(text.layer_types)
    if not text.hidden_size or not layers:
        return None
    hidden = float(text.hidden_size)
    if text.num_experts:
        width = text.moe_intermediate_size or text.intermediate_size
        feed_forward = None if width is None else 3 * hidden * width * text.num_experts
    else:
        feed_forward = None if text.intermediate_size is None else 3 * hidden * text.intermediate_size
    if feed_forward is None:
        return None
    heads = text.num_attention_heads or 0
    size = text.head_dim or (hidden / heads if heads else 0)
    attention = 2 * hidden * size * (heads + (text.num_key_value_heads or heads))
    embeddings = (text.vocab_size or 0) * hidden * (1 if text.tie_word_embeddings else 2)
    return float(layers * (attention + feed_forward) + embeddings)
