"""Weights of a rebuilt checkpoint that is known by its name alone: bounds by what such builds leave at 16 bits.

The name tells the number format, not which layers have it. The two ends are the published builds that leave the
least and the most as it was; between them stands the usual practice of the family, which
:mod:`loadmaster.core.knownmodels` has put into the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from loadmaster.core.facts import Amount, ModelFacts, RankWeights, Settings
from loadmaster.core.knownmodels import format_by_name, left_alone, smallest_group
from loadmaster.core.shards import shard_weights

_INTEGER = ("awq", "gptq", "auto-round")
_NOTE = "which layers the build leaves at 16 bits is assumed"


def rank_weights(model: ModelFacts, settings: Settings) -> tuple[RankWeights, ...]:
    """As :func:`loadmaster.core.shards.shard_weights`, with bounds where only the name tells the format."""
    expected = shard_weights(model, settings)
    if not format_by_name(model):
        return expected
    least, most = left_alone(model)
    ends = [
        shard_weights(_variant(model, least), settings),
        shard_weights(_variant(model, most, finest=True), settings),
    ]
    return tuple(_bounded(rank, [end[at] for end in ends], model) for at, rank in enumerate(expected))


def _variant(model: ModelFacts, modules: Sequence[str], *, finest: bool = False) -> ModelFacts:
    """The model with these modules at 16 bits; ``finest``: and with the smallest groups of an integer format."""
    quantization = structs.replace(model.quantization, ignore=tuple(modules))
    group, integer = quantization.group_size, quantization.method in _INTEGER or quantization.format == "pack-quantized"
    if finest and integer and group is not None and group > smallest_group():
        quantization = structs.replace(quantization, group_size=smallest_group())
    return structs.replace(model, quantization=quantization)


def _bounded(expected: RankWeights, ends: Sequence[RankWeights], model: ModelFacts) -> RankWeights:
    components = {}
    for name, amount in expected.components.items():
        others = [end.components[name] for end in ends if name in end.components]
        low = min([amount.low, *(other.low for other in others)])
        high = max([amount.high, *(other.high for other in others)])
        if name == "weights.vision" and model.quantization.bits:
            low = min(low, amount.bytes * model.quantization.bits // 16)  # some builds pack the tower too
        basis = amount.basis if low == high else "assumed"
        components[name] = Amount(amount.bytes, low, high, basis, _NOTE if basis == "assumed" else amount.note)
    return structs.replace(expected, components=components)
