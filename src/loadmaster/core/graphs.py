"""CUDA graphs: which sizes are captured, what they take, and what capturing on trial needs for a while.

Sizes follow vllm/config/vllm.py, _set_cudagraph_sizes; the bytes are measured constants of
``data/calibration.toml`` times what is counted here.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadmaster.core.calibration import constant
from loadmaster.core.enginerules import EngineRules
from loadmaster.core.facts import Amount, CacheLayout, Settings

_LARGEST = 1 << 16  # tokens of one graph; more is refused by every card


def capture_sizes(
    rules: EngineRules,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    query_len: int,
    blackwell: bool,
    given: Sequence[int] | None,
    largest: int | None,
    mode: str,
) -> tuple[int, ...]:
    """Numbers of tokens that graphs are captured for, ascending; empty when there are no graphs.

    ``query_len``: tokens a sequence decodes at once (1 + speculative tokens). ``given`` and ``largest``: the
    sizes and the limit that flags set.
    """
    if mode == "NONE":
        return ()
    limit = rules.capture_limit_blackwell if blackwell else rules.capture_limit
    extra: list[int] = []
    top = largest
    if top is None:
        top = min(max_num_seqs * query_len * 2, limit)
        if rules.capture_max_num_seqs:
            extra = _decode_sizes(max_num_seqs, query_len, limit, top)
    top = max(1, min(top, max_num_batched_tokens, _LARGEST))
    if given is not None:
        return tuple(sorted({size for size in given if size <= max_num_batched_tokens}))
    sizes = {size for size in (1, 2, 4) if size <= top}
    sizes.update(range(8, min(top + 1, 256), 8))
    sizes.update(range(256, top + 1, 16))
    if rules.capture_max_num_batched_tokens and max_num_batched_tokens <= top:
        sizes.add(max_num_batched_tokens)
    sizes.update(size for size in extra if size <= max_num_batched_tokens)
    return tuple(sorted(sizes))


def _decode_sizes(max_num_seqs: int, query_len: int, limit: int, top: int) -> list[int]:
    if query_len == 1:
        return [max_num_seqs] if max_num_seqs <= top else []
    most = min(max_num_seqs, limit)
    counts = {count for count in (1, 2, 4, most) if count <= most}
    counts.update(range(8, min(most + 1, 256), 8))
    counts.update(range(256, most + 1, 16))
    return [count * query_len for count in counts if count * query_len <= top]


def captured(settings: Settings) -> tuple[int, int]:
    """How many graphs of pieces and how many whole ones are captured."""
    sizes, mode = settings.cudagraph_capture_sizes, settings.cudagraph_mode
    query_len = 1 + settings.num_speculative_tokens
    whole = sum(1 for size in sizes if size <= settings.max_num_seqs * query_len)
    if mode == "FULL_AND_PIECEWISE":
        return len(sizes), whole
    if mode == "FULL_DECODE_ONLY":
        return 0, whole
    if mode == "FULL":
        return 0, len(sizes)
    return (len(sizes), 0) if mode == "PIECEWISE" else (0, 0)


def kind_of(group: bool) -> str:
    """How constants name one card and a group of cards that run collectives."""
    return "group" if group else "single"


def taken(settings: Settings, layers: int, group: bool) -> Amount | None:
    """Bytes of the captured graphs on a rank with ``layers`` decoder layers; None: none are captured."""
    count = sum(captured(settings))
    if count == 0:
        return None
    return constant(f"graph_per_layer_{kind_of(group)}").times(count * layers, f"{count} graphs of {layers} layers")


def profiled(settings: Settings, rules: EngineRules) -> bool:
    """Whether graphs are captured on trial before the cache is sized."""
    return rules.graph_profiler and (rules.second_runner_profiles_graphs or not settings.second_model_runner)


def estimated(settings: Settings, rules: EngineRules, layers: int, hybrid: bool, group: bool) -> Amount:
    """What the engine itself expects the graphs to take, and subtracts from the cache; zero where it does not."""
    pieces, whole = captured(settings)
    count = pieces + whole
    if count == 0 or not profiled(settings, rules) or not rules.graph_estimate_subtracted:
        return Amount.exact(0)
    first = constant(f"graph_first_capture_{kind_of(group)}")
    rest = count - (pieces > 0) - (whole > 0)
    each = constant("graph_estimate_per_layer")
    floor = 1 << 20  # the engine counts at least 1 MiB for every further graph
    low, mid, high = (max(floor, int(value * layers)) * rest for value in (each.low, each.value, each.high))
    top = first.high + high
    if hybrid and rules.budget == "consumed":
        # A long-context sample is charged to the graphs on models with recurrent state (vLLM issue 50780).
        top += int(constant("graph_long_sample").high)
    return Amount(
        int(first.value + mid), int(first.low + low), int(top), "assumed", f"the engine's estimate for {count} graphs"
    )


def trial_pool(settings: Settings, rules: EngineRules, layout: CacheLayout) -> int:
    """Bytes of the temporary cache that exists while graphs are captured on trial; 0: none.

    Not made with ``--kv-cache-memory-bytes``, which skips the profile.
    """
    sizes = settings.cudagraph_capture_sizes
    if not profiled(settings, rules) or not sizes or settings.kv_cache_memory_bytes is not None:
        return 0
    blocks = max(sizes)
    if rules.graph_pool_blocks.startswith("smaller"):
        blocks = min(blocks, settings.max_num_seqs)
    return blocks * layout.pool_block_bytes
