"""Fixes that the engine's own numbers decide, with no plan of the model: arithmetic on what the log printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from loadmaster.core.facts import MIB, Fix
from loadmaster.core.logcase import LogCase
from loadmaster.core.verdict import gib

_BLOCK = 16  # tokens
_ROUNDING = 0.005  # of a figure with two decimals
_SPARE = 128 * MIB  # beyond what could not be allocated, for the allocations that would have come next
_MOST_SHARE = 0.97
_USEFUL_CONTEXT = 512  # tokens; an engine with less answers nothing


def reading_fixes(case: LogCase) -> tuple[Fix, ...]:
    """``replanned`` where the numbers decide all that the change touches; what it costs is in its ``why``."""
    compute = _BY_CODE.get(case.finding.code)
    return () if compute is None else tuple(compute(case))


def _context(case: LogCase) -> Iterator[Fix]:
    said = case.figures
    length, needed, available = said.whole("length"), said.number("needed"), said.number("available")
    longest = said.whole("estimate") or said.whole("tokens")
    basis = "the engine's own estimate"
    if longest is None and length and needed and available and available > 0:
        # of bytes that grow with the context; models that keep a state for each request need a little more
        share = (available - _ROUNDING) / (needed + _ROUNDING)
        longest = int(length * share) // _BLOCK * _BLOCK
        basis = f"{gib(said.gib('available') or 0)} at {needed:g} GiB for {length:,} tokens"
    if longest and longest >= _USEFUL_CONTEXT and (length is None or longest < length):
        cost = f", not {length:,}" if length else ""
        yield Fix(
            f"{longest:,} tokens are what the cache holds ({basis}). It costs: prompt and answer together have at "
            f"most {longest:,} tokens{cost}.",
            argv=("--max-model-len", str(longest)),
            replanned=True,
        )
    if needed and available is not None:
        yield from _larger_share(case, needed - available)
        if needed / 2 <= available - _ROUNDING and "--kv-cache-dtype" not in case.launch.flags:
            yield Fix(
                f"Values of 8 bits halve the {needed:g} GiB of a request; {available:g} GiB are there. It costs a "
                "little exactness, and some cards and backends refuse it.",
                argv=("--kv-cache-dtype", "fp8"),
            )


def _larger_share(case: LogCase, lacking_gib: float) -> Iterator[Fix]:
    """A share that leaves so many GiB more for the cache. It holds where the log says that so much was free."""
    total = case.card_bytes
    if total is None:
        return
    now = case.share
    share = math.ceil((now + (lacking_gib + 2 * _ROUNDING) * (1 << 30) / total) * 100) / 100
    free = case.readings.free_bytes
    most = free / total if free is not None else _MOST_SHARE
    if not now < share <= most:
        return
    sure = free is not None
    words = f"{gib(round((share - now) * total))} more for the cache, which lacks {lacking_gib:.2f} GiB"
    words += f"; {gib(free)} of the card were free at the start" if free is not None else "; if that much is free"
    yield Fix(
        f"{words}. It costs: less is left beside the budget, for other programs and for large requests.",
        argv=("--gpu-memory-utilization", f"{share:g}"),
        replanned=sure,
    )


def _states(case: LogCase) -> Iterator[Fix]:
    blocks, sequences = case.figures.whole("blocks"), case.figures.whole("sequences")
    if blocks:
        cost = f", not {sequences:,}" if sequences else ""
        yield Fix(
            f"The cache has {blocks:,} blocks of state and each request takes one. It costs: at most {blocks:,} "
            f"requests at once{cost}; further ones wait.",
            argv=("--max-num-seqs", str(blocks)),
            replanned=True,
        )


def largest_free_share(case: LogCase) -> float | None:
    """The largest ``--gpu-memory-utilization`` that what was free at the start admits, two decimals; None: unknown."""
    free, total = case.figures.number("free"), case.figures.number("total")
    if free is None or not total:
        readings = case.readings
        if readings.free_bytes is None or not readings.total_bytes:
            return None
        free, total = readings.free_bytes / (1 << 30), readings.total_bytes / (1 << 30)
    share = math.floor((free - _ROUNDING) / (total + _ROUNDING) * 100) / 100
    return share if share > 0 else None


def _lower_share(case: LogCase) -> Iterator[Fix]:
    """Memory ran out after the cache was made: a smaller budget leaves what was missing beside it."""
    readings, total = case.readings, case.card_bytes
    tried, free, cache = readings.tried_to_allocate_bytes, readings.card_free_bytes, readings.kv_available_bytes
    if tried is None or free is None or total is None:
        return
    missing = max(0, tried - free) + _SPARE
    now = case.share
    share = math.floor((now - missing / total) * 100 + 1e-9) / 100
    if share <= 0:
        return
    words = f"{gib(tried)} were asked for and {gib(free)} free; this leaves {gib(round((now - share) * total))} more"
    if not case.share_known:
        words = f"Where {now:g}, the default, was in force, which the log does not show: {words}"
    if cache is None:
        yield Fix(
            f"{words} beside the budget. What is left for the cache is not known: the log does not say how large it "
            "was.",
            argv=("--gpu-memory-utilization", f"{share:g}"),
        )
        return
    after = cache - round((now - share) * total)
    if after <= 0:
        return
    cost = f"the cache is {gib(after)}, not {gib(cache)}"
    holds = False
    if readings.max_concurrency:
        room = readings.max_concurrency * after / cache
        length = readings.max_model_len
        tokens = f" of {length:,} tokens" if length else ""
        cost += f": room for {room:.1f} requests{tokens}, not {readings.max_concurrency:.1f}"
        holds = room >= 1
        if not holds:
            return
    yield Fix(
        f"{words} beside the budget. It costs: {cost}.",
        argv=("--gpu-memory-utilization", f"{share:g}"),
        replanned=holds,
    )


def _sampler(case: LogCase) -> Iterator[Fix]:
    if case.readings.kv_available_bytes is not None:
        yield from _lower_share(case)
    sequences = case.figures.whole("sequences") or case.launch.flags.get("--max-num-seqs")
    if isinstance(sequences, int) and sequences > 1:
        half = max(1, sequences // 2)
        yield Fix(
            f"The sampler's memory grows with the number of requests at once; {half:,} take half of what {sequences:,} "
            f"do. It costs: at most {half:,} at once.",
            argv=("--max-num-seqs", str(half)),
        )


def _nothing_left(case: LogCase) -> Iterator[Fix]:
    left = case.readings.kv_available_bytes
    if left is not None and left <= 0:
        for fix in _larger_share(case, -left / (1 << 30)):
            yield Fix(f"It takes at least this to have any cache at all: {fix.why}", argv=fix.argv, remove=fix.remove)


_BY_CODE: dict[str, Callable[[LogCase], Iterator[Fix]]] = {
    "context-exceeds-kv": _context,
    "mamba-blocks": _states,
    "oom-runtime": _lower_share,
    "oom-cudagraph-capture": _lower_share,
    "oom-kv-cache": _lower_share,
    "oom-sampler-warmup": _sampler,
    "no-kv-memory": _nothing_left,
}
