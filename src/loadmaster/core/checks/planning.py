"""What the load sheet says about the launch, and whether eager mode is worth its price."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import structs

from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import GIB, Evidence, Finding, Fix, LaunchArgs, LoadSheet
from loadmaster.core.pictures import picture_rules

_OLDEST_RULES = "0.17"  # the first version whose memory rules were read


def check_plan(case: LaunchCase) -> Iterator[Finding]:
    """The plan's findings, the smallest change that makes it fit, and the price of --enforce-eager."""
    sheet = case.sheet
    if sheet is not None:
        yield from _of_the_plan(case, sheet)
    yield from _eager(case)


def _of_the_plan(case: LaunchCase, sheet: LoadSheet) -> Iterator[Finding]:
    """The plan's findings. The first error carries what makes all fit; the others' own fixes are planned too."""
    for item in sheet.findings:
        if item.severity == "error":
            item = structs.replace(item, fixes=tuple(_planned(case, item, fix) for fix in item.fixes))
        unsure_pictures = item.code in ("image-tokens-exceed-context", "profile-below-images")
        if not (unsure_pictures and _pictures_unbounded(case)):
            yield _tempered(case, item)


def _tempered(case: LaunchCase, item: Finding) -> Finding:
    """A finding of the plan as unsure as the facts under the plan are; as severe as the plan has it."""
    assert case.model is not None
    unsure = (
        case.ahead or case.since(_OLDEST_RULES) is False or case.model_confidence != "certain" or case.assumed_format
    )
    if unsure and item.confidence == "certain":
        return structs.replace(item, confidence="likely")
    return item


def _pictures_unbounded(case: LaunchCase) -> bool:
    """Whether nobody knows the largest picture that the processor makes."""
    if case.model is None or case.settings is None or case.model.vision is None or case.text_only:
        return False
    rules = picture_rules(case.model, case.settings.max_pixels, case.settings.min_pixels)
    return rules is None or rules.largest_tokens is None


def _planned(case: LaunchCase, item: Finding, fix: Fix) -> Fix:
    """The fix, marked as planned when a plan with its flags no longer has the finding."""
    if fix.replanned or not fix.argv:
        return fix
    from loadmaster.core.argv import parse_argv, with_flags

    changes = parse_argv(["vllm", "serve", "m", *fix.argv], engine_version=case.version).flags
    sheet = case.plan(with_flags(case.launch, {**dict.fromkeys(fix.remove), **changes}))
    still = any(other.code == item.code and other.severity == "error" for other in sheet.findings)
    return fix if still else structs.replace(fix, replanned=True)


# ------------------------------------------------------------------------------------------ eager mode


def without(launch: LaunchArgs, *flags: str) -> LaunchArgs:
    """The launch without these flags."""
    from loadmaster.core.argv import with_flags

    changes: dict[str, Any] = dict.fromkeys(flags)
    return with_flags(launch, changes)


def _eager(case: LaunchCase) -> Iterator[Finding]:
    if not case.switch("--enforce-eager"):
        return
    evidence = list(case.evidence("--enforce-eager"))
    drop = Fix("Graphs stay on, as by default.", remove=("--enforce-eager",))
    if case.sheet is None:
        yield finding(
            "eager-mode-cost",
            "Without CUDA graphs decoding is several times slower; they take 0.1 to 0.8 GiB. Whether they fit cannot "
            "be said without model and cards.",
            evidence=evidence,
            fixes=[drop],
            confidence="possible",
        )
        return
    sheet = case.plan(without(case.launch, "--enforce-eager"))
    if sheet.fits is not False or case.sheet.fits is False:
        graphs = _graph_bytes(sheet)
        size = (
            f"CUDA graphs take {graphs / GIB:.2f} GiB a card" if graphs is not None else "CUDA graphs are switched off"
        )
        if sheet.fits is True:
            words = f"{size} and fit"
        elif case.sheet.fits is False:
            words = f"{size}, and eager mode does not make this launch fit either"
        else:
            words = f"{size}; by the expected figures they fit, by the highest nobody can tell"
        yield finding(
            "eager-mode-cost",
            words + ". Without them decoding is several times slower.",
            evidence=[*evidence, *_plan_evidence(sheet)],
            fixes=[Fix(drop.why, remove=drop.remove, replanned=sheet.fits is True)],
            confidence="certain" if sheet.fits is True else "likely",
        )
        return
    for sequences in (64, 32, 16, 8):
        if case.settings is not None and sequences >= case.settings.max_num_seqs:
            continue
        from loadmaster.core.argv import with_flags

        fewer = case.plan(with_flags(without(case.launch, "--enforce-eager"), {"--max-num-seqs": sequences}))
        if fewer.fits is True:
            yield finding(
                "eager-mode-cost",
                f"CUDA graphs do not fit beside the rest as it stands; with {sequences} sequences they do, and "
                "decoding is several times faster.",
                evidence=[*evidence, *_plan_evidence(fewer)],
                fixes=[
                    Fix(
                        "Fewer sizes are captured.",
                        ("--max-num-seqs", str(sequences)),
                        ("--enforce-eager",),
                        replanned=True,
                    )
                ],
            )
            return


def _graph_bytes(sheet: LoadSheet) -> int | None:
    sizes = [part.bytes for gpu in sheet.gpus for part in gpu.components if part.name == "cuda_graphs"]
    return max(sizes) if sizes else None


def _plan_evidence(sheet: LoadSheet) -> list[Evidence]:
    found = []
    for gpu in sheet.gpus[:1]:
        peak = gpu.peak_bytes.get("serving")
        if peak is not None:
            found.append(
                Evidence(
                    "plan",
                    f"card {gpu.index} with graphs: {peak / GIB:.2f} of {gpu.total_bytes / GIB:.2f} GiB while serving",
                )
            )
    return found
