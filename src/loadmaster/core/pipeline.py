"""How decoder layers are cut into pipeline stages.

Source: vLLM distributed/utils.py, get_pp_indices, the same rule in 0.17 to 0.33: equal parts, and each
layer left over goes to one of the stages before the last, from the back.
"""

from __future__ import annotations

from loadmaster.core.facts import Settings


def layer_ranges(layers: int, stages: int, partition: tuple[int, ...] | None = None) -> tuple[range, ...]:
    """The layers of each stage. ``partition``: the VLLM_PP_LAYER_PARTITION that replaces the rule.

    Raises ValueError when the partition does not add up to ``layers`` or names another number of stages.
    """
    if stages < 1:
        raise ValueError(f"a pipeline needs at least one stage, not {stages}")
    if partition is not None:
        if len(partition) != stages or sum(partition) != layers:
            raise ValueError(f"the layer partition {partition} does not cut {layers} layers into {stages} stages")
        sizes = list(partition)
    else:
        sizes = [layers // stages] * stages
        for back in range(2, layers % stages + 2):
            sizes[-back] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def stage_layers(layers: int, settings: Settings) -> tuple[tuple[range, ...], str | None]:
    """The layers of each stage under these settings, and a note when a given partition cannot be used."""
    stages, partition = settings.pipeline_parallel_size, settings.pipeline_layer_partition
    try:
        return layer_ranges(layers, stages, partition), None
    except ValueError as problem:
        return layer_ranges(layers, stages), f"{problem}; the engine would not start, equal parts are planned."
