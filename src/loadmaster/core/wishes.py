"""What somebody wants of a launch: a context, requests at once, a picture; and what of it a launch reaches.

No wish is dropped without a word: what cannot be had is said before the search, what was not reached after it.
"""

from __future__ import annotations

from msgspec import Struct, structs

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import Evidence, Finding, LoadSheet, ModelFacts
from loadmaster.core.pictures import TEXT_AROUND, picture_rules
from loadmaster.core.settings import model_context


class Wishes(Struct, frozen=True, kw_only=True):
    """``context``: tokens of a request. ``concurrency``: requests at once. ``pixels``: area of a picture."""

    context: int | None = None
    concurrency: int | None = None
    pixels: int | None = None


class Granted(Struct, frozen=True):
    """What of the wishes the model can grant at all, and words about the rest."""

    wishes: Wishes
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def within_model(wishes: Wishes, model: ModelFacts) -> Granted:
    """The wishes cut to the model's positions and to the largest picture that its processor makes."""
    longest = model_context(model)
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    if wishes.context is not None and longest is not None and wishes.context > longest:
        refused = finding(
            "context-beyond-model",
            f"A context of {wishes.context:,} tokens was asked for, and the model has {longest:,} positions: "
            "the launch is for these.",
            evidence=[Evidence("command", f"--context {wishes.context}"), Evidence("config", f"{longest:,} positions")],
            severity="warning",
        )
        findings = (refused,)
        wishes = structs.replace(wishes, context=longest)
    rules = picture_rules(model, None, None)
    limit = rules.max_pixels if rules is not None else None
    if wishes.pixels is not None and limit is not None and wishes.pixels > limit:
        notes = (
            f"a picture of {wishes.pixels:,} pixels was asked for: the processor scales pictures down to {limit:,}, "
            "and one of this size is planned",
        )
        wishes = structs.replace(wishes, pixels=limit)
    return Granted(wishes, findings, notes)


def unmet(wishes: Wishes, sheet: LoadSheet, model: ModelFacts) -> tuple[str, ...]:
    """A sentence for each wish that the launch of the sheet does not meet, with the number that it reaches."""
    settings = sheet.settings
    if settings is None:
        return ()
    missed = []
    length = settings.max_model_len
    if wishes.context is not None and length is not None and length < wishes.context:
        missed.append(f"a context of {wishes.context:,} tokens was asked for, {length:,} are reached")
    missed += _requests_missed(wishes, sheet, length)
    if wishes.pixels is not None:
        missed += _pixels_missed(wishes.pixels, sheet, model)
    return tuple(missed)


def _requests_missed(wishes: Wishes, sheet: LoadSheet, length: int | None) -> list[str]:
    settings, wanted = sheet.settings, wishes.concurrency
    if wanted is None or settings is None:
        return []
    if settings.max_num_seqs < wanted:
        return [f"{wanted} requests at once were asked for, {settings.max_num_seqs} are reached"]
    held = sheet.kv_cache.max_concurrency if sheet.kv_cache is not None else None
    if wishes.context is None or held is None or held >= wanted or length is None:
        return []
    return [
        f"{wanted} requests of {length:,} tokens have no room at once: the cache holds {held:.1f} of them, "
        "shorter ones run together"
    ]


def _pixels_missed(wanted: int, sheet: LoadSheet, model: ModelFacts) -> list[str]:
    settings = sheet.settings
    words = f"a picture of {wanted:,} pixels was asked for"
    if settings is None:
        return []
    if model.vision is None or settings.language_model_only or settings.image_limit == 0:
        return [f"{words}, and this launch serves none"]
    rules = picture_rules(model, settings.max_pixels, settings.min_pixels)
    if rules is None:
        return [f"{words}, and how the model sizes pictures is not known"]
    if rules.side is None:
        return []
    if rules.max_pixels is not None and rules.max_pixels < wanted:
        return [f"{words}, {rules.max_pixels:,} are reached"]
    area = rules.side * rules.side
    length = settings.max_model_len
    if length is not None and wanted // area + TEXT_AROUND > length:
        room = max(0, length - TEXT_AROUND) * area
        return [f"{words}: it is {wanted // area:,} tokens, and a context of {length:,} has room for {room:,} pixels"]
    return []
