"""What a change of a launch costs, in words: the limits that become tighter, each with its value before and after."""

from __future__ import annotations

from collections.abc import Iterator

from loadmaster.core.facts import Settings
from loadmaster.core.sheet import Plan
from loadmaster.core.verdict import gib

_NOTABLE = 0.03  # a smaller loss of room is none


def costs(before: Plan, after: Plan) -> tuple[str, ...]:
    """Sentences without a full stop; none where nothing becomes tighter."""
    return (*_limits(before.settings, after.settings), *_cache(before, after))


def _limits(old: Settings, new: Settings) -> Iterator[str]:
    if _less(new.max_model_len, old.max_model_len):
        yield f"prompt and answer together have at most {new.max_model_len:,} tokens, not {old.max_model_len:,}"
    if new.max_num_seqs < old.max_num_seqs:
        yield f"at most {_requests(new.max_num_seqs)} at once, not {old.max_num_seqs:,}; further ones wait"
    if new.max_num_batched_tokens < old.max_num_batched_tokens:
        yield (
            f"long prompts are read in steps of {new.max_num_batched_tokens:,} tokens, not "
            f"{old.max_num_batched_tokens:,}, so their first token comes later"
        )
    if new.max_pixels is not None and (old.max_pixels is None or new.max_pixels < old.max_pixels):
        side = int(new.max_pixels**0.5)
        yield f"larger pictures are scaled down to the area of {side}x{side}"
    if new.video_limit == 0 and old.video_limit != 0:
        yield "no videos are served"
    if new.cudagraph_mode == "NONE" != old.cudagraph_mode:
        yield "without CUDA graphs decoding is several times slower"
    elif _less(max(new.cudagraph_capture_sizes, default=0), max(old.cudagraph_capture_sizes, default=0)):
        largest = max(new.cudagraph_capture_sizes, default=0)
        if new.max_num_seqs >= old.max_num_seqs:
            yield f"steps of more than {largest:,} tokens run without CUDA graphs, more slowly"
    if new.kv_cache_dtype_bytes < old.kv_cache_dtype_bytes:
        yield "the cache keeps 8-bit values, which answers slightly less exactly"
    ranks = new.tensor_parallel_size * new.pipeline_parallel_size
    if ranks > old.tensor_parallel_size * old.pipeline_parallel_size:
        yield f"it takes {ranks} cards"
    if new.gpu_memory_utilization > old.gpu_memory_utilization:
        yield "less of the card is left beside the budget, for other programs and for what no profile sees"


def _cache(before: Plan, after: Plan) -> Iterator[str]:
    """The room for requests, where it shrinks: against requests of the same length."""
    old, new = before.kv_cache, after.kv_cache
    if old is None or new is None or not old.available_bytes or not new.available_bytes:
        return
    if old.available_bytes <= 0 or new.available_bytes >= old.available_bytes * (1 - _NOTABLE):
        return
    words = f"the cache is {gib(new.available_bytes)}, not {gib(old.available_bytes)}"
    length = after.settings.max_model_len
    if old.max_concurrency and new.max_concurrency and length and length == before.settings.max_model_len:
        words += f": room for {new.max_concurrency:.1f} requests of {length:,} tokens, not {old.max_concurrency:.1f}"
    yield words


def _less(new: int | None, old: int | None) -> bool:
    return new is not None and old is not None and new < old


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"
