"""The search for a launch that fits: steps of a table, each with less than the one before.

``data/recommendation.toml`` has the steps in the order in which things are given up, with the reason. The first
step that fits is taken, and then what fits beyond it: a longer context, more sequences, larger pictures. What the
user fixed holds: a wish or a flag is met exactly, and released only when no step fits with it (flags before wishes,
and before both the promise that all requests have room at once). One flag is no such limit: steps of many tokens
cost memory and only shorten the reading of long prompts, so a launch that does not fit is looked for with small ones,
and gets back as much of the given number as still fits. Only what was planned again is returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs

from loadmaster.core.facts import LoadSheet
from loadmaster.core.pictures import TEXT_AROUND, picture_rules, text_room
from loadmaster.core.replanning import (
    SMALL_BATCH,
    Case,
    cards_that_run,
    divides,
    least_batch,
    longest_in,
    no_video,
    other_share,
    picture_cap,
)
from loadmaster.core.settings import model_context
from loadmaster.core.sheet import Plan
from loadmaster.core.tables import load_toml
from loadmaster.core.wishes import Wishes

_SEQUENCES = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_BATCHES = (32768, 16384, 12288, 8192, 6144, 4096, 3072)
_SIDES = (4096, 3584, 3072, 2560, 2048, 1792, 1536, 1280, 1024, 768, 512, 384, 256)
_LENGTH_STEP = 1024
_BATCH = "--max-num-batched-tokens"
_ROPE_FLAGS = ("--hf-overrides", "--rope-scaling")


class Step(Struct, frozen=True):
    """What a launch must have: tokens, sequences, area of a picture, videos, graphs."""

    context: int
    sequences: int
    pixels: int
    video: bool
    graphs: bool
    few_cards: bool = False
    source: str = ""


class Policy(Struct, frozen=True):
    """The steps in the order in which things are given up, and what counts as useful."""

    useful_context: int
    usual_request: int
    small_picture: int
    small_context: int
    step: tuple[Step, ...]
    schema: int = 1


class Found(Struct, frozen=True):
    """A launch, planned: ``changes`` are the flags that make it from the given one."""

    changes: dict[str, Any]
    plan: Plan
    sheet: LoadSheet


class _Hold(Struct, frozen=True):
    """What of the user's is not to be touched: flags, wishes, and that all requests have room at once."""

    flags: bool
    at_once: bool
    wishes: bool


_HOLDS = (_Hold(True, True, True), _Hold(True, False, True), _Hold(False, False, True), _Hold(False, False, False))


def policy() -> Policy:
    return msgspec.convert(load_toml("recommendation.toml"), Policy)


class Search:
    """One search; the launch of ``case`` is without flags that the engine refuses."""

    def __init__(self, case: Case, wishes: Wishes) -> None:
        self.case, self.wishes = case, wishes
        self.policy = policy()
        self.settings = case.settings
        self.given = case.launch.flags
        self._planned: dict[str, tuple[Plan, LoadSheet]] = {}
        self.accept_undecided = False
        rules = picture_rules(case.model, self.settings.max_pixels, self.settings.min_pixels)
        self.most_pixels = rules.max_pixels if rules is not None and rules.side is not None else None
        self.unit = rules.side or 1 if rules is not None else 1
        self.declared = model_context(case.model)
        self.given_context = self._context_given()
        self.cards = cards_that_run(case)
        plan, sheet = self._with(self.cards)
        self.improving = wishes == Wishes() and sheet.fits is True
        self.base = self.cards if sheet.fits is True else self.cards | self._small_batch(plan)
        self.context = self._ceiling()

    # ---------------------------------------------------------------------------------------- what is fixed

    def _small_batch(self, plan: Plan) -> dict[str, Any]:
        """Steps of few tokens in place of the many that a flag gives; nothing where the engine needs as many."""
        if _BATCH not in self.given or not least_batch(plan) <= SMALL_BATCH < plan.settings.max_num_batched_tokens:
            return {}
        return {_BATCH: SMALL_BATCH}

    def _context_given(self) -> int | None:
        """The context that a flag gives; None: none, or it is left to the engine."""
        given = self.given.get("--max-model-len")
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            return None
        stretched = self.case.launch.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
        if self.declared is None or stretched or any(flag in self.given for flag in _ROPE_FLAGS):
            return given
        return min(given, self.declared)

    def _ceiling(self) -> int | None:
        """The longest context that counts: the one asked for, else the one given, else the model's.

        A given one is raised in two cases: for a picture that was asked for and is longer than it, and where the
        launch fits as given and nothing is asked for, for then a recommendation can only be about more.
        """
        if self.wishes.context is not None:
            return self.wishes.context
        if self.given_context is None or self.improving:
            return self.declared or self.settings.max_model_len
        if self.wishes.pixels is None or self.most_pixels is None:
            return self.given_context
        tokens = min(self.wishes.pixels, self.most_pixels) // (self.unit * self.unit)
        if tokens + TEXT_AROUND <= self.given_context:
            return self.given_context
        needed = -(-(tokens + text_room(2 * tokens)) // _LENGTH_STEP) * _LENGTH_STEP
        return min(needed, self.declared or needed)

    def _resolved(self, step: Step, hold: _Hold) -> Step:
        """The step with what is fixed put in; -1 stands for a context that nobody knows."""
        ceiling = self.context if self.context is not None else -1
        context = ceiling if step.context == 0 else min(step.context, ceiling)
        if (hold.wishes and self.wishes.context) or (hold.flags and self.given_context and not self.improving):
            context = ceiling
        if self.improving and self.given_context is not None:
            context = max(context, min(self.given_context, ceiling))
        most = self.settings.max_num_seqs
        sequences = most if hold.flags and "--max-num-seqs" in self.given else min(step.sequences, most)
        if self.wishes.concurrency is not None:
            sequences = self.wishes.concurrency
        pixels = 0
        if self.most_pixels is not None:
            capped = hold.flags and self.settings.max_pixels is not None
            pixels = self.most_pixels if capped else min(step.pixels, self.most_pixels)
            if self.wishes.pixels is not None:
                wanted = min(self.wishes.pixels, self.most_pixels)
                pixels = wanted if hold.wishes else min(step.pixels, wanted)
        return structs.replace(step, context=context, sequences=sequences, pixels=pixels, source="")

    def _steps(self, hold: _Hold) -> list[Step]:
        return list(dict.fromkeys(self._resolved(step, hold) for step in self.policy.step))

    # ---------------------------------------------------------------------------------------- the search

    def run(self) -> Found:
        """The best launch that fits; else one that may fit; else the given one on cards that it can run on."""
        plan, sheet = self._with(self.cards)
        if not plan.weights_known or too_heavy(plan):
            return Found(self.cards, plan, sheet)
        return self.certain() or self._undecided() or Found(self.cards, plan, sheet)

    def certain(self) -> Found | None:
        """The best launch that fits for certain: on as few cards as give all, else on all of them."""
        if too_heavy(self._with(self.base)[0]):
            return None
        return self._on_few_cards() or self._on_all_cards()

    def _on_few_cards(self) -> Found | None:
        """On fewer cards than are there, where that costs nothing of the context and the pictures."""
        whole = self.base.get("--tensor-parallel-size")
        if not isinstance(whole, int):
            return None
        for size in range(1, whole):
            if len(self.case.gpus) % size or not divides(self.case.model, size):
                continue
            cards = dict(self.base) | {"--tensor-parallel-size": None if size == 1 else size}
            if size == 1 and "--tensor-parallel-size" not in self.given:
                del cards["--tensor-parallel-size"]
            for step in self._steps(_HOLDS[0]):
                found = self._at(cards, step, _HOLDS[0]) if step.few_cards else None
                if found is not None:
                    return self._more(found, cards, step, step, _HOLDS[0])
        return None

    def _on_all_cards(self) -> Found | None:
        seen: set[tuple[Step, ...]] = set()
        for hold in self._holds():
            steps = self._steps(hold)
            if (key := (*steps, structs.replace(steps[0], sequences=int(hold.at_once)))) in seen:
                continue
            seen.add(key)
            for before, step in zip([steps[0], *steps], steps, strict=False):
                found = self._at(self.base, step, hold)
                if found is not None:
                    return self._more(found, self.base, step, before, hold)
        return None

    def _holds(self) -> Iterator[_Hold]:
        for hold in _HOLDS:
            if any(self._at(self.base, step, hold) for step in self._steps(hold)[-2:]):  # else not even the least
                yield hold

    def _undecided(self) -> Found | None:
        """The first useful step that fits by the expected figures. What misses even these is no recommendation."""
        self.accept_undecided = True
        for hold in _HOLDS:
            for step in self._steps(hold):
                found = self._at(self.base, step, hold) if self._useful(step) else None
                if found is not None and not _missing(found):
                    return found
        return None

    def _useful(self, step: Step) -> bool:
        """Whether a step is worth a try that may fail: nothing below what the user asks for or a chat needs."""
        context = min(self.policy.useful_context, self.context or 0)
        pixels = min(self.policy.small_picture, self.most_pixels or 0, self.wishes.pixels or self.policy.small_picture)
        return step.context >= context and step.pixels >= pixels

    def _at(self, cards: dict[str, Any], step: Step, hold: _Hold) -> Found | None:
        """The launch of one step, at the given share of the card or at the one that makes it fit."""
        length = None if step.context < 0 else step.context
        return self._fit(self._graphs(cards, step.graphs), length, step, step.sequences, hold)

    def _more(self, found: Found, cards: dict[str, Any], step: Step, before: Step, hold: _Hold) -> Found:
        """What fits beyond a step: pictures first where the step gave up of them; the longest context, the most
        sequences, the largest picture. ``before``: the step that did not fit."""
        base = self._graphs(cards, step.graphs)
        if step.pixels < before.pixels:
            found = self._widest_picture(found, step, hold)
            step = structs.replace(step, pixels=found.plan.settings.max_pixels or self.most_pixels or step.pixels)
        length = None if step.context < 0 else step.context
        most = self.context or length or 0
        small = self.policy.small_picture
        if 0 < step.pixels < small <= (self.most_pixels or 0) and self.wishes.pixels is None:
            most = min(most, max(length or 0, self.policy.small_context))
        if length is not None and length < most:
            found, length = self._longest(found, base, step, length, most, hold)
        found = self._most_sequences(found, base, step, length, hold)
        found = self._widest_picture(found, step, hold)
        return self._without_idle_changes(found, hold)

    def _longest(
        self, found: Found, base: dict[str, Any], step: Step, length: int, most: int, hold: _Hold
    ) -> tuple[Found, int]:
        """A longer context can admit larger pictures and videos, which leave less cache: found by trying again."""
        low, high = length, min(most, max(length, longest_in(found.plan)))
        whole = self._fit(base, most, step, step.sequences, hold) if high == most else None
        if whole is not None:
            return whole, most
        for _ in range(5):
            high = high // _LENGTH_STEP * _LENGTH_STEP
            if high <= low:
                break
            longer = self._fit(base, high, step, step.sequences, hold)
            if longer is not None:
                found, low = longer, high
                high = min(most, longest_in(longer.plan))
                if high <= low * 1.05:
                    break
            else:
                high = (low + high) // 2
        return found, low

    def _most_sequences(self, found: Found, base: dict[str, Any], step: Step, length: int | None, hold: _Hold) -> Found:
        most = self.settings.max_num_seqs
        if self.wishes.concurrency is not None or step.sequences >= most:
            return found
        counts = [most, *(count for count in _SEQUENCES if step.sequences < count < most)]
        low, high = 0, len(counts)  # counts[high:] fit
        while low < high:
            middle = (low + high) // 2
            more = self._fit(base, length, step, counts[middle], hold)
            if more is not None:
                found, high = more, middle
            else:
                low = middle + 1
        return found

    def _widest_picture(self, found: Found, step: Step, hold: _Hold) -> Found:
        """The same launch with the largest pixel cap that still fits, none if none is needed."""
        if self.most_pixels is None or self.wishes.pixels is not None or step.pixels >= self.most_pixels:
            return found
        sides = [side for side in _SIDES if step.pixels < side * side < self.most_pixels]
        areas = [self.most_pixels, *(side * side for side in sides)]  # descending
        low, high = 0, len(areas)  # areas[high:] fit
        best = found
        while low < high:
            middle = (low + high) // 2
            changes = dict(found.changes)
            changes.pop("--mm-processor-kwargs", None)
            if areas[middle] < self.most_pixels:
                changes |= picture_cap(self.case.launch, areas[middle])
            wider = self._with_share(changes, hold)
            if wider is not None:
                best, high = wider, middle
            else:
                low = middle + 1
        return best

    def _without_idle_changes(self, found: Found, hold: _Hold) -> Found:
        """Without a change that nothing needs any more."""
        for flag in ("--limit-mm-per-prompt", "--enforce-eager"):
            if found.changes.get(flag) is None or flag in self.given:
                continue
            changes = {name: value for name, value in found.changes.items() if name != flag}
            plan, sheet = self._with(changes)
            if sheet.fits is True and self._enough(plan, hold):
                found = Found(changes, plan, sheet)
        return self._with_largest_batch(found, hold)

    def _with_largest_batch(self, found: Found, hold: _Hold) -> Found:
        """With the number of tokens in a step that was given, else the largest below it that still fits."""
        if _BATCH not in found.changes:
            return found
        given = self.settings.max_num_batched_tokens
        for tokens in (given, *(size for size in _BATCHES if size < given)):
            changes = {name: value for name, value in found.changes.items() if name != _BATCH}
            if tokens < given:
                changes[_BATCH] = tokens
            plan, sheet = self._with(changes)
            if sheet.fits is True and self._enough(plan, hold):
                return Found(changes, plan, sheet)
        return found

    # ---------------------------------------------------------------------------------------- trying

    def _with(self, changes: dict[str, Any]) -> tuple[Plan, LoadSheet]:
        key = repr(sorted(changes.items(), key=lambda item: item[0]))
        if key not in self._planned:
            self._planned[key] = self.case.with_changes(changes)
        return self._planned[key]

    def _graphs(self, cards: dict[str, Any], graphs: bool) -> dict[str, Any]:
        changes = dict(cards)
        if not graphs:
            if not self.given.get("--enforce-eager"):
                changes["--enforce-eager"] = True
            return changes
        if self.given.get("--enforce-eager"):
            changes["--enforce-eager"] = None
        if self.given.get("--optimization-level") == 0:
            changes["--optimization-level"] = None
        return changes

    def _flags(self, length: int | None, sequences: int, pixels: int) -> dict[str, Any]:
        flags: dict[str, Any] = {}
        if length is not None and length != self.settings.max_model_len:
            flags["--max-model-len"] = length
        if sequences != self.settings.max_num_seqs:
            flags["--max-num-seqs"] = sequences
        if self.most_pixels is not None and 0 < pixels < self.most_pixels:
            flags |= picture_cap(self.case.launch, pixels)
        return flags

    def _fit(self, base: dict[str, Any], length: int | None, step: Step, sequences: int, hold: _Hold) -> Found | None:
        changes = dict(base) | self._flags(length, sequences, step.pixels)
        plan, sheet = self._with(changes)
        if not step.video:
            silent = no_video(plan.launch, sheet)
            if silent is not None:
                changes |= silent
                plan, sheet = self._with(changes)
        best = None
        for _ in range(3):
            if sheet.fits is True and self._enough(plan, hold):
                return Found(changes, plan, sheet)
            if self.accept_undecided and sheet.fits is None:
                maybe = Found(changes, plan, sheet)
                best = maybe if best is None or _missing(maybe) < _missing(best) else best
            wanted = self.wishes.concurrency if hold.at_once and self.wishes.concurrency else 1
            share = _expected_share(plan, sheet) if self.accept_undecided else other_share(plan, sheet, wanted)
            if share is None:
                break
            changes = changes | share
            plan, sheet = self._with(changes)
        return best

    def _with_share(self, changes: dict[str, Any], hold: _Hold) -> Found | None:
        """As planned, else with a smaller share of the card, as long as the requests asked for have a usual length:
        a cache for more requests than that is worth less than a larger picture."""
        plan, sheet = self._with(changes)
        for _ in range(3):
            if sheet.fits is True or self.wishes.concurrency is None:
                break
            share = other_share(plan, sheet, self.wishes.concurrency)
            now = plan.settings.gpu_memory_utilization
            if share is None or share["--gpu-memory-utilization"] >= now:
                return None
            changes = changes | share
            plan, sheet = self._with(changes)
        return Found(changes, plan, sheet) if sheet.fits is True and self._enough(plan, hold) else None

    def _enough(self, plan: Plan, hold: _Hold) -> bool:
        """Whether all requests that were asked for have room at once: of the length that somebody fixed, else of a
        usual one."""
        wanted = self.wishes.concurrency
        if wanted is None or not hold.at_once:
            return True
        cache, length = plan.kv_cache, plan.settings.max_model_len
        if cache is None or cache.max_concurrency is None or length is None:
            return False
        if self.wishes.context is None and self.given_context is None:
            return cache.max_concurrency * length >= wanted * min(length, self.policy.usual_request)
        return cache.max_concurrency >= wanted


def too_heavy(plan: Plan) -> bool:
    """Whether no setting helps: the weights alone do not fit a card."""
    return any(
        sum(amount.low for amount in rank.weights.values()) + rank.context.low + rank.other_processes
        > rank.gpu.total_bytes
        for rank in plan.ranks
    )


def _expected_share(plan: Plan, sheet: LoadSheet) -> dict[str, Any] | None:
    """``--gpu-memory-utilization`` moved down by what the expected peaks are too high, up by what the cache lacks."""
    if plan.settings.kv_cache_memory_bytes is not None or not plan.ranks:
        return None
    now = plan.settings.gpu_memory_utilization
    over = max((peak - load.total_bytes) / load.total_bytes for load in sheet.gpus for peak in load.peak_bytes.values())
    free = min(
        (rank.gpu.total_bytes - rank.other_processes - rank.context.bytes) / rank.gpu.total_bytes for rank in plan.ranks
    )
    share = now - over if over > 0 else now
    cache = plan.kv_cache
    if over < 0 and cache is not None and plan.request_bytes is not None:
        lacking = max(0, plan.request_bytes - (cache.available_bytes or 0))
        share += min(-over, lacking / min(rank.gpu.total_bytes for rank in plan.ranks) + (0.005 if lacking else 0))
    share = math.floor(min(share, free) * 100) / 100
    return {"--gpu-memory-utilization": share} if 0 < share != math.floor(now * 100) / 100 else None


def _missing(found: Found) -> int:
    """Bytes by which a launch misses its cards by the expected figures: of the peaks, or of one request's cache."""
    over = max((peak - load.total_bytes for load in found.sheet.gpus for peak in load.peak_bytes.values()), default=0)
    cache, wanted = found.plan.kv_cache, found.plan.request_bytes or 0
    short = wanted - (cache.available_bytes or 0) if cache is not None else 0
    return max(0, over, short)


def useful_card(case: Case, sizes: Sequence[int]) -> int | None:
    """The first of these sizes, in bytes, on which a context of everyday use fits with pictures of 1024x1024."""
    everyday = next(step for step in reversed(policy().step) if step.context >= policy().small_context)
    for size in sizes:
        cards = tuple(
            structs.replace(gpu, total_bytes=size, driver_total_bytes=None, free_bytes=None) for gpu in case.gpus
        )
        search = Search(structs.replace(case, gpus=cards), Wishes())
        if search._at(search.base, search._resolved(everyday, _HOLDS[-1]), _HOLDS[-1]) is not None:
            return size
    return None


__all__ = ["Found", "Policy", "Search", "Step", "policy", "too_heavy", "useful_card"]
