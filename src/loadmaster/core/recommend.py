"""The launch that fits with the most useful settings.

Searches over plans and returns only what was planned again. The search is deterministic and takes a few dozen
plans. What counts as useful, in this order: CUDA graphs, the whole context, room for sixteen sequences and a
picture of four million pixels, larger pictures, more sequences, videos.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, structs

from loadmaster.core.argv import parse_argv, with_flags
from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import order
from loadmaster.core.cleaning import cleaned
from loadmaster.core.facts import Change, EngineFacts, Fix, GpuFacts, LaunchArgs, LaunchPlan, LoadSheet, ModelFacts
from loadmaster.core.pictures import TEXT_AROUND, picture_rules
from loadmaster.core.remedy import fewer_bits, more_cards, with_fixes
from loadmaster.core.replanning import (
    SHORTEST_CONTEXT,
    Case,
    cards_that_run,
    longest_in,
    no_video,
    other_share,
    picture_cap,
    serving_peak,
)
from loadmaster.core.review import review, reviewed
from loadmaster.core.settings import model_context
from loadmaster.core.sheet import Plan
from loadmaster.core.verdict import gib
from loadmaster.core.wishes import Wishes, unmet, within_model

_SEQUENCES = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_SIDES = (4096, 3584, 3072, 2560, 2048, 1792, 1536, 1280, 1024, 768, 512, 384, 256)
_FLOORS = ((16, 2048**2), (4, 1024**2), (1, 256**2))  # sequences and pixels that each round insists on
_LENGTH_STEP = 1024
_LONG_ENOUGH = 8192  # a context from which on it is not worth giving up sequences or pixels for more


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
    asked = Wishes(context=context, concurrency=concurrency, pixels=max_image_pixels)
    granted = within_model(asked, model)
    clean, dropped = cleaned(LaunchCase(launch, model, gpus, engine, None))
    case = Case(model, tuple(gpus), clean, engine)
    search = _Search(case, granted.wishes)
    best = search.run()
    if search.strict and best.sheet.fits is not True:
        search.strict = False
        best = search.run()
    sheet = _with_changes(case, best, (*dropped, *search.reasons(best)))
    sheet = structs.replace(
        sheet, findings=order([*granted.findings, *sheet.findings]), notes=(*granted.notes, *sheet.notes)
    )
    final = parse_argv(sheet.launch.argv, engine_version=engine.version, env=clean.env)
    sheet = reviewed(sheet, review(LaunchCase(final, model, gpus, engine, None)), model)
    missed = unmet(structs.replace(asked, pixels=granted.wishes.pixels), sheet, model)
    if not missed:
        return sheet
    # A launch that fits is not what was asked for.
    fits = False if sheet.fits is True else sheet.fits
    return structs.replace(sheet, fits=fits, unmet=missed, notes=(*missed, *sheet.notes))


class _Search:
    def __init__(self, case: Case, wishes: Wishes) -> None:
        context, concurrency, pixels = wishes.context, wishes.concurrency, wishes.pixels
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
        """The best launch found; when none fits, the given one on cards that it can run on.

        Where the profile runs on a video that nobody asked for, launches that serve none count as well.
        """
        base = cards_that_run(self.case)
        plan, sheet = self.case.with_changes(base)
        best = self._best(base)
        silent = no_video(self.case.launch, sheet)
        if silent is not None:
            without = self._best({**base, **silent})
            if without is not None and (best is None or self._worth(without) > self._worth(best)):
                best = without
        return best if best is not None else _Try(base, plan, sheet)

    def _best(self, base: dict[str, Any]) -> _Try | None:
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
        return None

    def _worth(self, found: _Try) -> tuple[int, ...]:
        """How useful a launch is, the most important first."""
        settings = found.plan.settings
        generous_sequences, generous_pixels = _FLOORS[0]
        pixels = settings.max_pixels if settings.max_pixels is not None else self.most_pixels or 0
        return (
            settings.cudagraph_mode != "NONE",
            settings.max_model_len or 0,
            min(settings.max_num_seqs, generous_sequences),
            min(pixels, generous_pixels),
            pixels,
            settings.max_num_seqs,
        )

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
        least = (pixels or 0) // (self.unit * self.unit) + TEXT_AROUND
        length = max(SHORTEST_CONTEXT, -(-least // _LENGTH_STEP) * _LENGTH_STEP)
        found = self._fit(changes, length, sequences, pixels)
        if found is None:
            return None
        for _ in range(4):
            room = longest_in(found.plan)
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
            flags |= picture_cap(self.case.launch, pixels)
        return flags

    # ---------------------------------------------------------------------------------------- trying

    def _fit(self, base: dict[str, Any], length: int | None, sequences: int, pixels: int | None) -> _Try | None:
        """The launch with these settings, at the given share of the card or at the one that makes it fit."""
        changes = dict(base) | self._flags(length, sequences, pixels)
        plan, sheet = self.case.with_changes(changes)
        for _ in range(2):
            if sheet.fits is True and self._enough_at_once(plan):
                return _Try(changes, plan, sheet)
            share = other_share(plan, sheet, self.concurrency or 1)
            if share is None:
                return None
            changes = changes | share
            plan, sheet = self.case.with_changes(changes)
        return _Try(changes, plan, sheet) if sheet.fits is True and self._enough_at_once(plan) else None

    def _planned(self, changes: dict[str, Any]) -> _Try | None:
        plan, sheet = self.case.with_changes(changes)
        return _Try(changes, plan, sheet) if sheet.fits is True and self._enough_at_once(plan) else None

    def _with_share(self, changes: dict[str, Any]) -> _Try | None:
        """As planned, else with a smaller share of the card, as long as the requests asked for have a usual length:
        a cache for more requests than that is worth less than a larger picture."""
        for _ in range(3):
            plan, sheet = self.case.with_changes(changes)
            if sheet.fits is True:
                break
            share = other_share(plan, sheet, self.concurrency or 1)
            now = plan.settings.gpu_memory_utilization
            if share is None or share["--gpu-memory-utilization"] >= now:
                return None
            changes = changes | share
        if sheet.fits is not True or not self._enough_at_once(plan) or plan.kv_cache is None:
            return None
        length = plan.settings.max_model_len or 0
        held = (plan.kv_cache.max_concurrency or 0) * length
        return _Try(changes, plan, sheet) if held >= (self.concurrency or 1) * min(length, _LONG_ENOUGH) else None

    def _enough_at_once(self, plan: Plan) -> bool:
        if self.concurrency is None or not self.strict:
            return True
        cache = plan.kv_cache
        return cache is not None and cache.max_concurrency is not None and cache.max_concurrency >= self.concurrency

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
                changes |= picture_cap(self.case.launch, areas[middle])
            wider = self._with_share(changes) if self.concurrency is not None else self._planned(changes)
            if wider is not None:
                best, high = wider, middle
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
            freed = serving_peak(sheet) - serving_peak(best.sheet)
            why = self._why(flag, value, best, plan, sheet, freed)
            default = (
                getattr(self.settings, flag.removeprefix("--").replace("-", "_"), None) if before is None else None
            )
            changes.append(Change(flag, False if value is None else value, why, before, freed, default))
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
        if flag == "--limit-mm-per-prompt" and sheet.images is not None:
            video = f"the profile runs on a video of {sheet.images.profiled_tokens or 0:,} tokens"
            return f"no videos: {video}, {gib(max(0, left - before))} more for the cache without"
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


def _with_changes(case: Case, best: _Try, changes: tuple[Change, ...]) -> LoadSheet:
    launch = with_flags(case.launch, best.changes)
    plan = LaunchPlan(argv=launch.argv, changed=changes, env=launch.env)
    sheet = structs.replace(best.sheet, launch=plan)
    if sheet.fits is True:
        return sheet
    idle = _idle_cards(case)
    fixes = (*idle, *more_cards(case.model, case.gpus, case.launch, case.engine)) if sheet.fits is False else idle
    said = (_failure(case, best, fixes), *sheet.notes)
    sheet = structs.replace(sheet, notes=said)
    return with_fixes(sheet, (*fixes, *fewer_bits(case.model, case.launch, sheet)))


def _idle_cards(case: Case) -> tuple[Fix, ...]:
    """The size that fits where the given one leaves cards idle."""
    given = case.launch.flags.get("--tensor-parallel-size")
    if given is None or case.settings.tensor_parallel_size >= len(case.gpus):
        return ()
    free = structs.replace(case, launch=with_flags(case.launch, {"--tensor-parallel-size": None}))
    found = _Search(free, Wishes()).run()
    size = found.changes.get("--tensor-parallel-size")
    if found.sheet.fits is not True or size is None:
        return ()
    words = f"{size} of the {len(case.gpus)} cards, where {given} is given: planned, it fits with --recommend"
    return (Fix(words, argv=("--tensor-parallel-size", str(size)), replanned=True),)


def _failure(case: Case, best: _Try, fixes: Sequence[Fix]) -> str:
    """Why nothing fits, in one sentence with numbers, and what would."""
    ranks, loads = best.plan.ranks, best.sheet.gpus
    certain = best.sheet.fits is False
    words = "no settings make this launch fit" if certain else "no settings make this launch fit for certain"
    words += f" on {len(ranks)} card{'' if len(ranks) == 1 else 's'}"
    if loads:
        rank, load = max(zip(ranks, loads, strict=True), key=lambda pair: pair[0].weight_bytes)
        words += (
            f" of {gib(load.total_bytes)}: weights take {gib(rank.weight_bytes)} of it and the context "
            f"{gib(rank.context.bytes + rank.other_processes)}, which leaves "
            f"{gib(max(0, load.total_bytes - rank.weight_bytes - rank.context.bytes - rank.other_processes))} "
            "for everything else"
        )
    if fixes:
        words += f"; what would do: {fixes[0].why}"
    return words
