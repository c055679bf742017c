"""Pictures against the profile, the context and the encoder's cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from loadmaster.core.checks.case import LaunchCase, count_limit
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import Finding, Fix, Settings, Severity
from loadmaster.core.pictures import TEXT_AROUND, PictureRules, image_plan, picture_rules, text_room
from loadmaster.core.tables import load_toml

_EVERYDAY_SIDE = 1024  # a picture of a megapixel, which every client sends
_PIXEL_CAPPED = ("qwen", "glm4", "glm_ocr", "mimo", "keye", "paddleocr")  # towers whose processor takes max_pixels
_AREAS = ("max_pixels", "min_pixels")
_SMALLEST_MINIMUM = 3136  # 56 x 56: the smallest min_pixels of the public Qwen-VL processors


def check_images(case: LaunchCase) -> Iterator[Finding]:
    """Everything that the picture settings decide; silent for models without a tower and for text-only launches."""
    if case.text_only or _no_tower(case):
        return
    yield from _profile(case)
    yield from _context(case)
    yield from _encoder_cache(case)
    yield from _cap(case)
    yield from _kwargs(case)


def _no_tower(case: LaunchCase) -> bool:
    """Whether the model is known to read text only; a table without a vision configuration does not say so alone."""
    model = case.model
    if model is None or model.vision is not None:
        return False
    return model.format in ("safetensors", "gguf") or (model.architecture or "").endswith("ForCausalLM")


def pixel_cap(case: LaunchCase) -> tuple[int | None, int | None]:
    """Largest and smallest area in pixels that --mm-processor-kwargs sets."""
    kwargs = case.table("--mm-processor-kwargs") or {}
    inner = kwargs.get("images_kwargs")
    size = kwargs.get("size")
    sources: list[dict[str, Any]] = [kwargs]
    if isinstance(inner, dict):
        sources.append(inner)
    largest = next((s["max_pixels"] for s in sources if _whole(s.get("max_pixels"))), None)
    smallest = next((s["min_pixels"] for s in sources if _whole(s.get("min_pixels"))), None)
    if isinstance(size, dict):
        largest = largest or (size["longest_edge"] if _whole(size.get("longest_edge")) else None)
        smallest = smallest or (size["shortest_edge"] if _whole(size.get("shortest_edge")) else None)
    return largest, smallest


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _rules(case: LaunchCase) -> PictureRules | None:
    if case.model is None:
        return None
    largest, smallest = pixel_cap(case)
    return picture_rules(case.model, largest, smallest)


def _capped(case: LaunchCase, pixels: int) -> str:
    """--mm-processor-kwargs of the launch with this cap added."""
    kwargs = dict(case.table("--mm-processor-kwargs") or {})
    kwargs["max_pixels"] = pixels
    return json.dumps(kwargs)


def _cap_fixes(case: LaunchCase, pixels: int) -> list[Fix]:
    """A pixel cap, for processors that take one by this name."""
    tower = case.model.vision.model_type if case.model is not None and case.model.vision is not None else None
    if tower is not None and not tower.startswith(_PIXEL_CAPPED):
        return [Fix("Cap real pictures by --mm-processor-kwargs, in the terms of this model's processor.")]
    words = "Bounds real pictures and the dummy alike: larger ones are scaled down."
    return [Fix(words, ("--mm-processor-kwargs", _capped(case, pixels)))]


# ------------------------------------------------------------------------------------------ the dummy picture


def _profile(case: LaunchCase) -> Iterator[Finding]:
    limits = case.table("--limit-mm-per-prompt") or {}
    cap, _ = pixel_cap(case)
    rules = _rules(case)
    one_size = rules is not None and rules.side is None
    for modality in ("image", "video"):
        given = limits.get(modality)
        if not isinstance(given, dict) or given.get("count") == 0:
            continue
        sides = [side for side in (given.get("width"), given.get("height")) if isinstance(side, int) and _whole(side)]
        if not sides:
            continue
        width, height = sides[0], sides[-1]
        dummy = width * height
        if one_size:
            yield finding(
                "profile-below-images",
                f"Width and height of the {modality} change nothing here: the tower makes every picture one size.",
                evidence=case.evidence("--limit-mm-per-prompt"),
                severity="note",
                confidence=case.model_confidence,
            )
            return
        largest = cap if cap is not None else rules.max_pixels if rules else None
        if largest is not None and largest <= dummy:
            continue
        if modality == "video" and (cap is not None or rules is None):
            continue
        real = (
            f"pictures are served up to {largest:,} pixels" if largest is not None else "nothing bounds real pictures"
        )
        yield finding(
            "profile-below-images",
            f"The {modality} of the memory profile has {width} x {height} = {dummy:,} pixels; {real}.",
            evidence=[
                *case.evidence("--limit-mm-per-prompt", "--mm-processor-kwargs"),
                *(
                    [case.model_evidence(f"processor max_pixels: {largest:,}")]
                    if case.model is not None and largest is not None and cap is None
                    else []
                ),
            ],
            fixes=_cap_fixes(case, dummy),
            confidence="certain" if case.model is not None and largest is not None else "likely",
        )
        return
    if case.switch("--skip-mm-profiling") and cap is None and count_limit(limits, "image") != 0:
        yield finding(
            "profile-below-images",
            "No picture is measured at all, so the memory for the largest one is given to the cache.",
            evidence=case.evidence("--skip-mm-profiling"),
            fixes=[Fix("Measure as by default.", remove=("--skip-mm-profiling",))],
            severity="note",
            confidence="likely",
        )


# ------------------------------------------------------------------------------------------ tokens


def _context(case: LaunchCase) -> Iterator[Finding]:
    rules, length = _rules(case), case.integer("--max-model-len")
    if rules is None or length is None or length < 1 or case.model is None:
        return
    most = rules.largest_tokens
    count = count_limit(case.table("--limit-mm-per-prompt") or {}, "image") or 1
    if most is None or most * count + TEXT_AROUND <= length:
        return
    least = rules.tokens(1, 1)
    everyday = rules.tokens(_EVERYDAY_SIDE, _EVERYDAY_SIDE)
    severity: Severity = "warning"
    if least + TEXT_AROUND > length:
        words = f"Even the smallest picture has {least:,} tokens, and the context has {length:,}: none is served."
    elif everyday + TEXT_AROUND > length:
        words = (
            f"A picture of {_EVERYDAY_SIDE} x {_EVERYDAY_SIDE} has {everyday:,} tokens, and the context has "
            f"{length:,}: requests with it are refused." + _largest_served(case, rules)
        )
    elif most + TEXT_AROUND > length:
        words = (
            f"The largest picture that the processor makes has {most:,} tokens, and the context has {length:,}: "
            "requests with it are refused." + _largest_served(case, rules)
        )
    else:
        severity = "note"  # each picture alone is served
        words = (
            f"{count} of the largest pictures have {most * count:,} tokens together, and the context has {length:,}: "
            "such a request is refused."
        )
    fixes = []
    if rules.side is not None and least + TEXT_AROUND <= length:
        room = max(1, (length - text_room(length)) // count) * rules.side * rules.side
        smallest = rules.min_pixels or 0
        if room > smallest:
            fixes.append(Fix("Larger pictures are scaled down to fit.", ("--mm-processor-kwargs", _capped(case, room))))
    positions = case.model.text.max_position_embeddings
    wanted = most * count + text_room(most * count)
    if positions is not None and wanted <= positions:
        longer = min(positions, -(-wanted // 1024) * 1024)
        fixes.append(Fix("Or a context that holds them, if the memory allows it.", ("--max-model-len", str(longer))))
    yield finding(
        "image-tokens-exceed-context",
        words,
        evidence=[
            *case.evidence("--max-model-len", "--limit-mm-per-prompt", "--mm-processor-kwargs"),
            case.model_evidence(
                f"{most:,} tokens a picture at most"
                + (f", a token is {rules.side} x {rules.side} pixels" if rules.side else "")
            ),
        ],
        fixes=fixes,
        severity=severity,
        confidence=case.model_confidence,
    )


def _largest_served(case: LaunchCase, rules: PictureRules) -> str:
    """The largest picture of the load sheet, as a sentence."""
    settings = case.settings or Settings(version="", max_model_len=case.integer("--max-model-len"))
    images = image_plan(rules, settings)
    if images is None or images.largest_size is None or images.largest_tokens is None:
        return ""
    width, height = images.largest_size
    return f" The largest that is served is {width}x{height} ({images.largest_tokens:,} tokens)."


def _encoder_cache(case: LaunchCase) -> Iterator[Finding]:
    if not case.switch("--disable-chunked-mm-input") or case.model is None:
        return
    rules = _rules(case)
    tokens = case.integer("--max-num-batched-tokens")
    if tokens is None and case.settings is not None:
        tokens = case.settings.max_num_batched_tokens
    most = rules.largest_tokens if rules else None
    if tokens is None or most is None or most <= tokens:
        return
    assert rules is not None
    fixes = [Fix("Let a picture pass in parts.", remove=("--disable-chunked-mm-input",))]
    if rules.side is not None:
        fixes.append(
            Fix("Or no picture larger than a step.", ("--mm-processor-kwargs", _capped(case, tokens * rules.side**2)))
        )
    fixes.append(Fix("Or a step that holds the largest picture.", ("--max-num-batched-tokens", str(most))))
    yield finding(
        "encoder-cache-too-small",
        f"A picture has up to {most:,} tokens and must pass in one step, which has room for {tokens:,}.",
        evidence=case.evidence("--disable-chunked-mm-input", "--max-num-batched-tokens", "--mm-processor-kwargs"),
        fixes=fixes,
        confidence=case.model_confidence,
    )


def _cap(case: LaunchCase) -> Iterator[Finding]:
    cap, smallest = pixel_cap(case)
    if cap is None:
        return
    least = smallest
    if least is None and case.model is not None and case.model.processor is not None:
        least = case.model.processor.min_pixels
    if least is None:
        least = _SMALLEST_MINIMUM
    if cap >= least:
        return
    side = int(cap**0.5)
    yield finding(
        "flag-value-invalid",
        f"max_pixels {cap:,} is an area, about {side} x {side}: smaller than the smallest picture, {least:,} pixels.",
        evidence=case.evidence("--mm-processor-kwargs"),
        fixes=[Fix("If a side was meant, its square.", ("--mm-processor-kwargs", _capped(case, cap * cap)))],
        severity="warning",
        confidence="likely",
    )


def _kwargs(case: LaunchCase) -> Iterator[Finding]:
    """--mm-processor-kwargs whose values are no areas, or whose names the processors do not know."""
    kwargs = case.table("--mm-processor-kwargs")
    if kwargs is None:
        return
    known = load_toml("flag-hints.toml")["processor_kwargs"]["names"]
    inner = [kwargs[name] for name in ("images_kwargs", "videos_kwargs") if isinstance(kwargs.get(name), dict)]
    for table in (kwargs, *inner):
        for name, value in table.items():
            if name in _AREAS and value is not None and not _whole(value):
                yield finding(
                    "flag-value-invalid",
                    f"{name} is an area in pixels, a whole number above 0, and not {json.dumps(value)[:60]}.",
                    evidence=case.evidence("--mm-processor-kwargs"),
                    confidence="likely",
                )
            elif name not in known and (meant := _meant(name, known)) is not None:
                renamed = {meant if key == name else key: item for key, item in table.items()}
                fixes = [Fix(f"The name is {meant}.", ("--mm-processor-kwargs", json.dumps(renamed)))]
                yield finding(
                    "flag-value-invalid",
                    f"No processor has {name!r}, so it changes nothing or is refused; did you mean {meant}?",
                    evidence=case.evidence("--mm-processor-kwargs"),
                    fixes=fixes if table is kwargs else (),
                    severity="warning",
                    confidence="likely",
                )


def _meant(name: str, known: list[str]) -> str | None:
    """The known name that looks like this one; None when none does, for each processor has names of its own."""
    bare = {other.replace("_", ""): other for other in known}
    near = get_close_matches(name.lower().replace("_", "").replace("-", ""), bare, 1, 0.85)
    return bare[near[0]] if near else None
