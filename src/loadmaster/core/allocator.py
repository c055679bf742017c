"""PyTorch's caching allocator, replayed on a list of allocations.

A card runs full by what the allocator has reserved, not by what tensors use: a block freed by one step serves a
later one only if it is large enough, so phases with different tensor sizes keep segments of their own. The
rules are those of c10/cuda/CUDACachingAllocator with its default settings: sizes are rounded to 512 bytes; up to
1 MiB comes from 2 MiB segments, up to 10 MiB from 20 MiB segments, larger requests get a segment of their own
rounded to 2 MiB; the smallest free block that is large enough is taken, and split when more than 1 MiB is left
(512 bytes for small ones); neighbouring free blocks of a segment join.
"""

from __future__ import annotations

from collections.abc import Iterable

from loadmaster.core.facts import MIB

_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_OWN_SEGMENT = 10 * MIB
_LARGE_SEGMENT = 20 * MIB
_ROUND = 512

# (name, bytes): allocate; (name, None): free.
Step = tuple[str, int | None]


class _Block:
    __slots__ = ("free", "next", "previous", "size", "small")

    def __init__(self, size: int, small: bool) -> None:
        self.size = size
        self.small = small
        self.free = False
        self.previous: _Block | None = None
        self.next: _Block | None = None


class Allocator:
    """State of the allocator: named live blocks, free blocks, and the two counters that matter.

    ``reserved``: bytes taken from the driver. ``live``: bytes in blocks that are in use; ``live_peak`` its highest.
    ``max_split``: blocks of this size and more are neither split nor given to smaller requests (``max_split_size_mb``).
    """

    def __init__(self, max_split: int | None = None) -> None:
        self.max_split = max_split
        self._free: list[_Block] = []
        self._named: dict[str, _Block] = {}
        self.reserved = 0
        self.reserved_peak = 0
        self.live = 0
        self.live_peak = 0

    def copy(self) -> Allocator:
        """An independent state with the same segments. Live blocks keep their names."""
        twin = Allocator(self.max_split)
        seen: dict[int, _Block] = {}
        everything = [*self._free, *self._named.values()]
        for block in everything:
            if id(block) not in seen:
                new = _Block(block.size, block.small)
                new.free = block.free
                seen[id(block)] = new
        for block in everything:
            new = seen[id(block)]
            new.previous = seen.get(id(block.previous)) if block.previous else None
            new.next = seen.get(id(block.next)) if block.next else None
        twin._free = [seen[id(block)] for block in self._free]
        twin._named = {name: seen[id(block)] for name, block in self._named.items()}
        twin.reserved, twin.reserved_peak = self.reserved, self.reserved_peak
        twin.live, twin.live_peak = self.live, self.live_peak
        return twin

    def reset_peaks(self) -> None:
        self.live_peak, self.reserved_peak = self.live, self.reserved

    def run(self, steps: Iterable[Step]) -> None:
        """Replay steps in order. A name allocated twice is an error; freeing an unknown one is ignored."""
        for name, size in steps:
            if size is None:
                self.release(name)
            elif size > 0:
                self.take(name, size)

    def take(self, name: str, size: int) -> None:
        if name in self._named:
            raise ValueError(f"{name} is allocated already")
        size = -(-size // _ROUND) * _ROUND
        small = size <= _SMALL
        block = self._best(size, small) or self._segment(size, small)
        left = block.size - size
        whole = self.max_split is not None and size >= self.max_split
        if not whole and (left >= _ROUND if small else left > _SMALL):
            rest = _Block(left, small)
            rest.previous, rest.next, rest.free = block, block.next, True
            if block.next is not None:
                block.next.previous = rest
            block.next, block.size = rest, size
            self._free.append(rest)
        block.free = False
        self._named[name] = block
        self.live += block.size
        self.live_peak = max(self.live_peak, self.live)

    def release(self, name: str) -> None:
        block = self._named.pop(name, None)
        if block is None:
            return
        self.live -= block.size
        block.free = True
        before, after = block.previous, block.next
        if before is not None and before.free:
            self._free.remove(before)
            block.size += before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.free:
            self._free.remove(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
        self._free.append(block)

    def empty_cache(self) -> None:
        """Give whole free segments back to the driver; what a live block pins stays."""
        kept = [block for block in self._free if block.previous is not None or block.next is not None]
        self.reserved -= sum(block.size for block in self._free) - sum(block.size for block in kept)
        self._free = kept

    def _best(self, size: int, small: bool) -> _Block | None:
        best: _Block | None = None
        limit = self.max_split
        for block in self._free:
            if block.small == small and block.size >= size and (best is None or block.size < best.size):
                if limit is not None and block.size >= limit and (size < limit or block.size >= size + _LARGE_SEGMENT):
                    continue
                best = block
        if best is not None:
            self._free.remove(best)
        return best

    def _segment(self, size: int, small: bool) -> _Block:
        if small:
            total = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            total = _LARGE_SEGMENT
        else:
            total = -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += total
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return _Block(total, small)
