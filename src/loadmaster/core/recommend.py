"""The launch that fits with the most useful settings, and the smallest change that makes a launch fit.

Both search over plans and return only what was planned again. The search is deterministic and takes a few dozen
plans. What counts as useful, in this order: the whole context, CUDA graphs, room for sixteen sequences and a
picture of four million pixels, more sequences, larger pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from loadmaster.core.argv import with_flags
from loadmaster.core.cache import largest_context
from loadmaster.core.facts import (
    Change,
    EngineFacts,
    Fix,
    GpuFacts,
    LaunchArgs,
    LaunchPlan,
    LoadSheet,
    ModelFacts,
    Settings,
)
from loadmaster.core.pictures import TEXT_AROUND, picture_rules
from loadmaster.core.settings import effective_settings, model_context
from loadmaster.core.sheet import Plan, load_sheet, plan_of
from loadmaster.core.verdict import gib

_SEQUENCES = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_SIDES = (4096, 3584, 3072, 2560, 2048, 1792, 1536, 1280, 1024, 768, 512, 384, 256)
_FLOORS = ((16, 2048**2), (4, 1024**2), (1, 256**2))  # sequences and pixels that each round insists on
_LENGTH_STEP = 1024
_SHORTEST = 2048
_SMALL_BATCH = 2048  # the engine's own choice for small cards
_LONG_ENOUGH = 8192  # a context from which on it is not worth giving up sequences or pixels for more

Flags = Mapping[str, Any]


class _Case(Struct, frozen=True):
    """What is planned again and again: the model, the cards, the launch as given, the engine."""

    model: ModelFacts
    gpus: tuple[GpuFacts, ...]
    launch: LaunchArgs
    engine: EngineFacts

    def with_changes(self, changes: Flags) -> tuple[Plan, LoadSheet]:
        plan = plan_of(self.model, self.gpus, with_flags(self.launch, changes), self.engine)
        return plan, load_sheet(plan)

    @property
    def settings(self) -> Settings:
        return effective_settings(self.launch, self.model, self.gpus, self.engine)


class _Try(Struct, frozen=True):
    changes: dict[str, Any]
    plan: Plan
    sheet: LoadSheet


def recommend(
    model: ModelFacts,
    gpus: Sequence[GpuFacts],
    launch: LaunchArgs,
    engine: EngineFacts,
    *,
    context: int | None = None,
    concurrency: int | None = None,
    max_image_pixels: int | None = None,
) -> LoadSheet:
    """The load sheet of the launch that fits with the most useful settings.

    ``context``: tokens that a request must have room for (default: the model's). ``concurrency``: sequences that
    run at once. ``max_image_pixels``: area of the largest picture that must be served. ``launch.changed`` of the
    result names each flag that was set, with its reason in bytes. When nothing fits, the launch as given is
    returned with its findings, on as many cards as it can use.
    """
    case = _Case(model, tuple(gpus), launch, engine)
    search = _Search(case, context, concurrency, max_image_pixels)
    best = search.run()
    notes: tuple[str, ...] = ()
    if search.strict and best.sheet.fits is not True:
        search.strict = False
        best = search.run()
        cache = best.plan.kv_cache
        if best.sheet.fits is True and cache is not None and cache.max_concurrency is not None:
            notes = (
                f"{concurrency} requests of {best.plan.settings.max_model_len:,} tokens have no room at once: "
                f"the cache holds {cache.max_concurrency:.1f} of them, shorter ones run together",
            )
    return _with_changes(case, best, search.reasons(best), notes)


class _Search:
    def __init__(self, case: _Case, context: int | None, concurrency: int | None, pixels: int | None) -> None:
        self.case = case
        self.settings = case.settings
        self.concurrency = concurrency
        self.given = case.launch.flags
        rules = picture_rules(case.model, self.settings.max_pixels, self.settings.min_pixels)
        self.most_pixels = rules.max_pixels if rules is not None and rules.side is not None else None
        self.unit = rules.side or 1 if rules is not None else 1
        self.wanted_pixels = pixels
        self.declared = model_context(case.model)
        self.context = context or self.declared or self.settings.max_model_len
        # All sequences that were asked for must have room for the context that was asked for.
        self.strict = context is not None and concurrency is not None

    def run(self) -> _Try:
        """The best launch found; when none fits, the given one on cards that it can run on."""
        base = self._cards()
        for graphs in (True, False):
            changes = dict(base)
            if graphs:
                self._graphs_on(changes)
            else:
                changes["--enforce-eager"] = True
            for floor, length in self._goals(changes):
                if length is not None or self.context is None:
                    found = self._most_sequences(changes, length, floor)
                    if found is not None:
                        return self._widest_picture(found, self._pixels(floor[1]))
        plan, sheet = self.case.with_changes(base)
        return _Try(base, plan, sheet)

    def _goals(self, changes: dict[str, Any]) -> Iterator[tuple[tuple[int, int], int | None]]:
        """Sequences and pixels to insist on, with a context to reach, most useful first."""
        generous, modest, least = _FLOORS
        yield generous, self.context
        yield modest, self.context
        if self.strict:
            yield least, self.context
            return
        longest = self._longest(changes, modest)
        if longest is not None and longest >= _LONG_ENOUGH:
            yield modest, longest
        yield least, self.context
        yield least, self._longest(changes, least)

    def _most_sequences(self, base: dict[str, Any], length: int | None, floor: tuple[int, int]) -> _Try | None:
        """The most sequences that fit with this context and picture; None when not even the floor does."""
        pixels = self._pixels(floor[1])
        if self.concurrency is not None:
            return self._fit(base, length, self.concurrency, pixels)
        most = self.settings.max_num_seqs
        counts = [most, *(count for count in _SEQUENCES if floor[0] <= count < most)]
        best = self._fit(base, length, counts[-1], pixels)
        if best is None:
            return None
        low, high = 0, len(counts) - 1  # counts[high:] fit
        while low < high:
            middle = (low + high) // 2
            found = self._fit(base, length, counts[middle], pixels)
            if found is not None:
                best, high = found, middle
            else:
                low = middle + 1
        return best

    # ---------------------------------------------------------------------------------------- what is tried

    def _cards(self) -> dict[str, Any]:
        """Tensor parallel size: as given when it can run, else the largest that the cards and shapes allow."""
        settings, cards = self.settings, len(self.case.gpus)
        world = settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size
        size = settings.tensor_parallel_size
        if "--tensor-parallel-size" in self.given and world <= cards and divides(self.case.model, size):
            return {}
        changes: dict[str, Any] = {}
        others = settings.pipeline_parallel_size * settings.data_parallel_size
        if others > cards:
            changes |= {"--pipeline-parallel-size": None, "--data-parallel-size": None}
            others = 1
        size = next(size for size in range(max(1, cards // others), 0, -1) if divides(self.case.model, size))
        if size != settings.tensor_parallel_size:
            changes["--tensor-parallel-size"] = size
        return changes

    def _graphs_on(self, changes: dict[str, Any]) -> None:
        if self.given.get("--enforce-eager"):
            changes["--enforce-eager"] = None
        if self.given.get("--optimization-level") == 0:
            changes["--optimization-level"] = None

    def _longest(self, changes: dict[str, Any], floor: tuple[int, int]) -> int | None:
        """The longest context that fits with the sequences and pixels of a floor, in whole steps.

        A longer context can admit larger pictures and videos, which leave less cache: found by trying again.
        """
        sequences = self.concurrency or min(floor[0], self.settings.max_num_seqs)
        pixels = self._pixels(floor[1])
        length = max(_SHORTEST, (pixels or 0) // (self.unit * self.unit) + TEXT_AROUND)
        found = self._fit(changes, length, sequences, pixels)
        if found is None:
            return None
        for _ in range(4):
            room = _longest_in(found.plan)
            longest = min(room, self.context or room) // _LENGTH_STEP * _LENGTH_STEP
            if longest <= length:
                break
            longer = self._fit(changes, longest, sequences, pixels)
            if longer is not None:
                return longest
            _, sheet = self.case.with_changes(dict(changes) | self._flags(longest, sequences, pixels))
            cache = sheet.kv_cache
            shorter = (cache.largest_model_len or 0) if cache is not None else 0
            longest = min(shorter, int(longest * 0.8)) // _LENGTH_STEP * _LENGTH_STEP
            if longest <= length:
                break
            nearer = self._fit(changes, longest, sequences, pixels)
            if nearer is not None:
                found, length = nearer, longest
        return length if length % _LENGTH_STEP == 0 else length // _LENGTH_STEP * _LENGTH_STEP or None

    def _pixels(self, area: int) -> int | None:
        if self.most_pixels is None:
            return None
        if self.wanted_pixels is not None:
            return min(self.wanted_pixels, self.most_pixels)
        return min(area, self.most_pixels)

    def _flags(self, length: int | None, sequences: int, pixels: int | None) -> dict[str, Any]:
        flags: dict[str, Any] = {}
        if length is not None and length != self.settings.max_model_len:
            flags["--max-model-len"] = length
        if sequences != self.settings.max_num_seqs:
            flags["--max-num-seqs"] = sequences
        if pixels is not None and self.most_pixels is not None and pixels < self.most_pixels:
            flags["--mm-processor-kwargs"] = self._processor(pixels)
        return flags

    def _processor(self, pixels: int) -> dict[str, Any]:
        given = self.given.get("--mm-processor-kwargs")
        kept = dict(given) if isinstance(given, dict) else {}
        if isinstance(kept.get("size"), dict):
            kept["size"] = {**kept["size"], "longest_edge": pixels}
            return kept
        return {**kept, "max_pixels": pixels}

    # ---------------------------------------------------------------------------------------- trying

    def _fit(self, base: dict[str, Any], length: int | None, sequences: int, pixels: int | None) -> _Try | None:
        """The launch with these settings, at the given share of the card or at the one that makes it fit."""
        changes = dict(base) | self._flags(length, sequences, pixels)
        plan, sheet = self.case.with_changes(changes)
        for _ in range(2):
            if sheet.fits is True and self._enough_at_once(plan):
                return _Try(changes, plan, sheet)
            adjusted = self._other_share(plan, sheet, changes)
            if adjusted is None:
                return None
            changes = adjusted
            plan, sheet = self.case.with_changes(changes)
        return _Try(changes, plan, sheet) if sheet.fits is True and self._enough_at_once(plan) else None

    def _enough_at_once(self, plan: Plan) -> bool:
        if self.concurrency is None or not self.strict:
            return True
        cache = plan.kv_cache
        return cache is not None and cache.max_concurrency is not None and cache.max_concurrency >= self.concurrency

    def _other_share(self, plan: Plan, sheet: LoadSheet, changes: dict[str, Any]) -> dict[str, Any] | None:
        """``--gpu-memory-utilization`` moved down by the overshoot, or up by what the cache lacks."""
        if plan.settings.kv_cache_memory_bytes is not None or not plan.ranks:
            return None
        now = plan.settings.gpu_memory_utilization
        over = max(
            (high - load.total_bytes) / load.total_bytes
            for load in sheet.gpus
            for high in load.peak_high_bytes.values()
        )
        most = min(
            (rank.gpu.total_bytes - rank.other_processes - rank.context.high) / rank.gpu.total_bytes
            for rank in plan.ranks
        )
        share = now
        if over > 0:
            share = now - over
        elif plan.request_bytes is not None and plan.kv_cache is not None:
            wanted = plan.request_bytes * max(1.0, self.concurrency or 1)
            lacking = wanted - (plan.kv_cache.available_low_bytes or 0)
            if lacking > 0:
                share = now + max(lacking / rank.gpu.total_bytes for rank in plan.ranks) + 0.005
        share = math.floor(min(share, most) * 100) / 100
        if over <= 0 and share < now < most:
            share = min(math.floor(most * 100) / 100, math.ceil(now * 100) / 100)
        if share == now or share <= 0.05:
            return None
        return {**changes, "--gpu-memory-utilization": share}

    def _widest_picture(self, found: _Try, floor: int | None) -> _Try:
        """The same launch with the largest pixel cap that still fits, none if none is needed."""
        if self.most_pixels is None or self.wanted_pixels is not None or floor is None or floor >= self.most_pixels:
            return found
        sides = [side for side in _SIDES if floor < side * side < self.most_pixels]
        areas = [self.most_pixels, *(side * side for side in sides)]  # descending
        low, high = 0, len(areas)  # areas[high:] fit
        best = found
        while low < high:
            middle = (low + high) // 2
            changes = dict(found.changes)
            changes.pop("--mm-processor-kwargs", None)
            if areas[middle] < self.most_pixels:
                changes["--mm-processor-kwargs"] = self._processor(areas[middle])
            plan, sheet = self.case.with_changes(changes)
            if sheet.fits is True and self._enough_at_once(plan):
                best, high = _Try(changes, plan, sheet), middle
            else:
                low = middle + 1
        return best

    # ---------------------------------------------------------------------------------------- reasons

    def reasons(self, best: _Try) -> tuple[Change, ...]:
        """Each changed flag, with what it frees or costs on the tightest card: planned with and without it."""
        changes = []
        for flag, value in best.changes.items():
            before = self.given.get(flag)
            if value == before or (value is None and before is None):
                continue
            without = dict(best.changes)
            del without[flag]
            plan, sheet = self.case.with_changes(without)
            freed = _highest(sheet) - _highest(best.sheet)
            why = self._why(flag, value, best, plan, sheet, freed)
            changes.append(Change(flag, False if value is None else value, why, before, freed))
        return tuple(changes)

    def _why(self, flag: str, value: Any, best: _Try, plan: Plan, sheet: LoadSheet, freed: int) -> str:
        cache, other = best.plan.kv_cache, plan.kv_cache
        left = (cache.available_bytes or 0) if cache is not None else 0
        before = (other.available_bytes or 0) if other is not None else 0
        if flag == "--tensor-parallel-size":
            weights = max((rank.weight_bytes for rank in best.plan.ranks), default=0)
            return f"each of {value} cards holds {gib(weights)} of weights"
        if flag == "--enforce-eager":
            if value is None:
                graphs = max((rank.graphs.bytes for rank in best.plan.ranks if rank.graphs is not None), default=0)
                return f"graphs decode many times faster and take {gib(graphs)}"
            return f"without graphs {gib(max(0, left - before))} more are left for the cache"
        if flag == "--max-model-len":
            need = best.plan.request_bytes or 0
            words = "the model's whole context" if value == self.declared else "the longest that fits"
            if value == self.context != self.declared:
                words = "the context that was asked for"
            return f"{words}: one request takes {gib(need)} of the cache's {gib(left)}"
        if flag == "--mm-processor-kwargs":
            picture = best.sheet.images.largest_size if best.sheet.images is not None else None
            size = f"{picture[0]}x{picture[1]}" if picture else "the capped size"
            return f"the largest picture is {size}: {gib(max(0, freed))} less at the serving peak"
        if flag == "--max-num-seqs":
            gained = left - before
            if freed > 0 or gained > 0:
                return f"{gib(max(0, freed))} less at the serving peak, {gib(max(0, gained))} more cache"
            return f"{value} sequences fit at once: {gib(-freed)} at the serving peak"
        if flag == "--gpu-memory-utilization":
            total = min(gpu.total_bytes for gpu in self.case.gpus)
            if freed >= 0:
                return f"keeps the serving peak below {gib(total)}: {gib(freed)} less"
            return f"{gib(max(0, left - before))} more for the cache"
        return f"{gib(abs(freed))} {'less' if freed >= 0 else 'more'} at the serving peak"


def _with_changes(case: _Case, best: _Try, changes: tuple[Change, ...], notes: tuple[str, ...]) -> LoadSheet:
    launch = with_flags(case.launch, best.changes)
    plan = LaunchPlan(argv=launch.argv, changed=changes, env=launch.env)
    return structs.replace(best.sheet, launch=plan, notes=(*best.sheet.notes, *notes))


def _longest_in(plan: Plan) -> int:
    """Tokens of the longest request that has room for certain."""
    if plan.tightest is None or not plan.layouts:
        return 0
    rank = plan.ranks[plan.tightest]
    return largest_context(plan.layouts[rank.pipeline_rank], plan.settings, max(0, rank.left.low))


def _highest(sheet: LoadSheet) -> int:
    return max((load.peak_bytes["serving"] for load in sheet.gpus), default=0)


def divides(model: ModelFacts, size: int) -> bool:
    """Whether heads, expert widths and quantisation groups can be divided over ``size`` ranks."""
    text, vision = model.text, model.vision
    if text.num_attention_heads is not None and text.num_attention_heads % size:
        return False
    if vision is not None and vision.num_heads is not None and vision.num_heads % size:
        return False
    if text.linear_num_key_heads is not None and text.linear_num_key_heads % size:
        return False
    kv = text.num_key_value_heads
    if kv is not None and kv % size and size % kv:
        return False
    group = model.quantization.group_size
    if model.quantization.block_shape is not None:
        group = model.quantization.block_shape[1]
    if group is not None and group > 0 and size > 1:
        widths = (text.moe_intermediate_size, text.intermediate_size if not text.num_experts else None)
        if any(width is not None and width % (size * group) for width in widths):
            return False
    return True


# ------------------------------------------------------------------------------------------------ the smallest change


def smallest_fix(
    model: ModelFacts, gpus: Sequence[GpuFacts], launch: LaunchArgs, engine: EngineFacts, sheet: LoadSheet
) -> tuple[Fix, ...]:
    """The smallest change, of one flag or of two, that makes a launch fit: planned again, with what it is for.

    Empty when the launch fits already or nothing of the kind helps. The order of trying is that of harm: cards
    that lie idle, a smaller picture, another share of the card, fewer sequences, a shorter context, no graphs.
    """
    if sheet.fits is True:
        return ()
    case = _Case(model, tuple(gpus), launch, engine)
    plan = plan_of(model, gpus, launch, engine)
    singles = list(_single_changes(case, plan, sheet))
    if any(rank.weight_bytes + rank.context.low > rank.gpu.total_bytes for rank in plan.ranks):
        singles = [change for change in singles if "--tensor-parallel-size" in change[0]]
    for changes, why in singles:
        if case.with_changes(changes)[1].fits is True:
            return (_fix(changes, why),)
    tried: set[tuple[str, ...]] = set()
    for first, why in singles:
        flags = tuple(first)
        if flags in tried:
            continue  # one of each kind as the first of two
        tried.add(flags)
        after, then = case.with_changes(first)
        for second, also in _single_changes(case, after, then):
            if set(first) & set(second):
                continue
            if case.with_changes({**first, **second})[1].fits is True:
                return (_fix({**first, **second}, f"{why}; {also}"),)
    return ()


def _single_changes(case: _Case, plan: Plan, sheet: LoadSheet) -> Iterator[tuple[dict[str, Any], str]]:
    """Candidates in the order of harm, few of each kind; cards that lie idle come first."""
    search = _Search(case, None, None, None)
    settings = plan.settings
    cards = search._cards()
    usable = [size for size in range(len(case.gpus), 0, -1) if divides(case.model, size)]
    if not cards and usable and usable[0] > settings.tensor_parallel_size and settings.pipeline_parallel_size == 1:
        cards = {"--tensor-parallel-size": usable[0]}
    if cards:
        yield cards, "as many cards as the model divides over"
    if search.most_pixels is not None and not settings.language_model_only:
        for side in (3072, 2048, 1536, 1024):
            if side * side < search.most_pixels:
                flags = {"--mm-processor-kwargs": search._processor(side * side)}
                yield flags, f"pictures of at most {side}x{side}"
    share = search._other_share(plan, sheet, {}) if plan.ranks else None
    if share is not None:
        value = share["--gpu-memory-utilization"]
        yield share, f"{'a smaller' if value < settings.gpu_memory_utilization else 'a larger'} share of the card"
    for count in (64, 16, 4):
        if count < settings.max_num_seqs:
            yield {"--max-num-seqs": count}, f"at most {count} sequences at once"
    if settings.max_num_batched_tokens > _SMALL_BATCH:
        yield {"--max-num-batched-tokens": _SMALL_BATCH}, f"steps of at most {_SMALL_BATCH:,} tokens"
    if settings.max_model_len is not None:
        longest = _longest_in(plan)
        if _SHORTEST <= longest < settings.max_model_len:
            yield {"--max-model-len": longest}, "the longest context that fits"
    if settings.cudagraph_mode != "NONE":
        yield {"--enforce-eager": True}, "no CUDA graphs: slower, but without their memory"


def _fix(changes: Flags, why: str) -> Fix:
    words: list[str] = []
    for flag, value in changes.items():
        if value is None:
            continue
        words.append(flag)
        if value is not True:
            words.append(_text(value))
    removed = tuple(flag for flag, value in changes.items() if value is None)
    return Fix(why, argv=tuple(words), remove=removed, replanned=True)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f'"{name}": {_text(item)}' for name, item in value.items())
        return "{" + inner + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)
