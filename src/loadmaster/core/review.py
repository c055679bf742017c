"""What stands against a launch besides memory: damaged files, and flags that the engine refuses.

A load sheet says how much memory a launch takes. Weights that are not all there are planned with too few bytes, and
a launch that the engine refuses takes none: both decide the sheet, whatever the bytes say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, structs

from loadmaster.core.checks.architecture import check_files, check_gguf
from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import order
from loadmaster.core.checks.context import check_context
from loadmaster.core.checks.flags import check_flags
from loadmaster.core.checks.machine import check_utilisation
from loadmaster.core.checks.parallel import check_parallel
from loadmaster.core.facts import Finding, LoadSheet, ModelFacts, Settings

_WITHOUT_BYTES = frozenset({"missing", "truncated", "lfs-pointer", "header-invalid", "unreadable"})
_ABOUT_WEIGHTS = ("weights-", "header-", "tensor-", "download-")
_REFUSED_VALUES = frozenset({"flag-value-invalid", "context-beyond-model"})
# the plan says these itself, with its own figures and fixes
_PLAN_SAYS = frozenset({"one-gpu-idle", "gpus-unequal", "tp-exceeds-gpus"})


class Review(Struct, frozen=True):
    """``files``: what is wrong with the checkpoint. ``launch``: what is wrong with the flags.

    ``void``: a value is refused, so what memory the launch would take says nothing about it.
    """

    files: tuple[Finding, ...] = ()
    launch: tuple[Finding, ...] = ()
    void: bool = False

    @property
    def refused(self) -> bool:
        """Whether the engine does not start with these flags."""
        return any(item.severity == "error" for item in self.launch)


def review(case: LaunchCase) -> Review:
    """Errors and warnings about files and flags; notes are left to the check of the launch."""
    launch = order(_distinct(item for item in _about_flags(case) if item.severity != "note"))
    files = order(item for item in check_files(case) if item.severity != "note")
    return Review(files, launch, any(_is_void(case, item) for item in launch))


def _about_flags(case: LaunchCase) -> Iterator[Finding]:
    yield from check_flags(case)
    yield from check_context(case)
    yield from check_gguf(case)
    yield from check_utilisation(case)
    yield from (item for item in check_parallel(case) if item.code not in _PLAN_SAYS)


def _distinct(findings: Iterable[Finding]) -> list[Finding]:
    kept: dict[tuple[str, str], Finding] = {}
    for item in findings:
        kept.setdefault((item.code, item.cause), item)
    return list(kept.values())


def _is_void(case: LaunchCase, item: Finding) -> bool:
    if item.severity != "error":
        return False
    if item.code == "util-out-of-range":
        share = case.number("--gpu-memory-utilization")
        return share is None or not 0 < share <= 1
    return item.code in _REFUSED_VALUES


def weights_are_whole(model: ModelFacts) -> bool:
    """Whether no weight file is known to be missing, cut short or unreadable."""
    if any(file.kind == "weights" and file.status in _WITHOUT_BYTES for file in model.files):
        return False
    return not any(item.severity == "error" and item.code.startswith(_ABOUT_WEIGHTS) for item in model.findings)


def damage_words(model: ModelFacts, findings: Iterable[Finding]) -> str | None:
    """What is wrong with the files, for a note; None when a plan over them can be trusted.

    ``findings``: those of the model that the launch does not make up for.
    """
    if not weights_are_whole(model):
        return "the checkpoint is damaged: the figures are of the weights that can be read, not of all"
    if any(item.severity == "error" for item in findings):
        return "the checkpoint is not complete: nobody can tell whether the engine starts with it"
    return None


def reviewed(sheet: LoadSheet, found: Review, model: ModelFacts) -> LoadSheet:
    """The sheet with the review's findings first, and the verdict that they leave.

    Never True over weights that are not whole; False for a launch that the engine refuses.
    """
    fits = sheet.fits
    damage = damage_words(model, found.files) if found.files else None
    if fits is True and damage is not None:
        fits = None
    if found.refused:
        fits = False
    own = () if found.void else sheet.findings
    said = {item.code for item in (*found.files, *found.launch)}
    if "util-out-of-range" in said:
        said.add("free-memory-below-request")
    rest = order([*found.launch, *(item for item in own if item.code not in said)])
    notes = [*_unused_values(sheet.settings), *sheet.notes]
    if damage is not None:
        notes.insert(0, damage)
    return structs.replace(sheet, fits=fits, findings=(*found.files, *rest), notes=tuple(dict.fromkeys(notes)))


def _unused_values(settings: Settings | None) -> list[str]:
    """Values that the plan does not use because the engine would not take them, and what it uses instead."""
    if settings is None:
        return []
    return [
        f"{origin.note}; planned with {origin.value}"
        for origin in settings.origins.values()
        if origin.note is not None and origin.note.endswith("cannot be used")
    ]
