"""What the allocator adds to the parameters of a loaded model.

"Model loading took" counts the blocks that PyTorch's caching allocator has handed out, and a block can be up to
2 MiB larger than the tensor in it. Rules of c10/cuda/CUDACachingAllocator: sizes are rounded to 512 bytes; up to
10 MiB comes from 20 MiB segments, more gets a segment of its own rounded to 2 MiB; a block is cut when more than
1 MiB of it is left. From vLLM 0.21 on loading runs with max_split_size_mb:20, under which a tensor of 20 MiB or
more keeps its whole segment (v1/worker/gpu_worker.py: load_model).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from loadmaster.core.facts import MIB

_ROUND = 512
_SMALL = MIB
_OWN_SEGMENT = 10 * MIB
_SEGMENT = 20 * MIB
_SEGMENT_STEP = 2 * MIB
SPLIT_LIMIT = 20 * MIB


def allocated_bytes(sizes: Iterable[int], split_limit: int | None = None) -> int:
    """Bytes of the blocks that hold tensors of these ``sizes``, allocated in this order and all kept.

    ``split_limit``: requests of this size or more leave their block whole. None: no limit.
    """
    free: list[int] = []
    total = 0
    for size in sizes:
        size = -(-size // _ROUND) * _ROUND
        if size <= _SMALL:  # cut to the byte within their own segments
            total += size
            continue
        limited = split_limit is not None and size >= split_limit
        at = bisect_left(free, size)
        if at < len(free) and (split_limit is None or limited or free[at] < split_limit):
            block = free.pop(at)
        else:
            block = _SEGMENT if size < _OWN_SEGMENT else -(-size // _SEGMENT_STEP) * _SEGMENT_STEP
        rest = block - size
        if rest > _SMALL and not limited:
            insort(free, rest)
            block = size
        total += block
    return total
