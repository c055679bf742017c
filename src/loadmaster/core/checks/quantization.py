"""--quantization, --dtype and the cards against the checkpoint's own format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loadmaster.core.checks.case import LaunchCase, is_placeholder
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.checks.spelling import method_history, newest_release, release_words
from loadmaster.core.engineversion import at_least
from loadmaster.core.facts import Confidence, Evidence, Finding, Fix, Quantization
from loadmaster.core.flagtable import quantization_methods
from loadmaster.core.releasetable import method_capability, method_dtypes, releases, scheme_capability
from loadmaster.core.tables import load_toml

_PINNED_UNTIL = {"awq": "0.24", "gptq": "0.22"}  # from here on the name means the class that takes Marlin
_FLOAT16 = ("half", "float16")
_BF16_CAPABILITY = (8, 0)
_LOWEST_CAPABILITY = (7, 0)
_BY_FORMAT = "compressed-tensors"  # asks by the scheme of its format, not as a method
_BY_ALGORITHM = "modelopt"  # and this one by its algorithm, whichever of its methods the flag names
_NOTHING = ("none", "null", "")


def check_quantization(case: LaunchCase) -> Iterator[Finding]:
    """Method, format, kernel, capability and data type; the shapes are another module's."""
    yield from _method(case)
    yield from _checkpoint_method(case)
    yield from _slow_kernel(case)
    yield from _capability(case)
    yield from _cache_capability(case)
    yield from _dtype(case)


def requested(case: LaunchCase) -> str | None:
    """The method that --quantization names, in lower case; None when there is none to speak of."""
    text = case.text("--quantization")
    if text is None or is_placeholder(text) or text.lower() in _NOTHING or text.lstrip().startswith("{"):
        return None
    return text.lower()


def declared(case: LaunchCase) -> str | None:
    """The method that the checkpoint declares, as the engine spells it; None for none or unknown."""
    if case.model is None:
        return None
    return case.model.quantization.method


def _methods() -> dict[str, Any]:
    return dict(load_toml("quantization-methods.toml")["methods"])


def _available(case: LaunchCase) -> tuple[str, ...]:
    """Methods of the launch's version; of the newest release when it is unknown."""
    return quantization_methods(case.version or newest_release())


# ------------------------------------------------------------------------------------------ the flag


def _method(case: LaunchCase) -> Iterator[Finding]:
    wanted = requested(case)
    if wanted is None:
        return
    evidence = case.evidence("--quantization")
    runs = method_history(wanted)
    if not runs:
        mistaken = load_toml("quantization-methods.toml")["mistaken"].get(wanted)
        yield finding(
            "quant-format-unsupported",
            f"No vLLM release has a method called {wanted}" + (f": {mistaken}." if mistaken else "."),
            evidence=evidence,
            fixes=[
                Fix("Without the flag the engine reads the method from the checkpoint.", remove=("--quantization",))
            ],
        )
        return
    if wanted not in _available(case):
        known = case.version is not None
        yield finding(
            "quant-format-unsupported",
            f"{case.version_words if known else 'The newest vLLM'} has no method {wanted}; vLLM has it "
            f"{release_words(runs)}.",
            evidence=evidence,
            fixes=_without_flag(case, wanted),
            severity="error" if known else "warning",
            confidence="certain" if known else "possible",
        )
        return
    yield from _deprecated(case, wanted)
    yield from _mismatch(case, wanted)


def _without_flag(case: LaunchCase, wanted: str) -> list[Fix]:
    if declared(case) is not None:
        return [Fix("The engine reads the method from the checkpoint.", remove=("--quantization",))]
    entry = _methods().get(wanted, {})
    if entry.get("online") and "fp8" in _available(case):
        return [Fix("Quantise to 8 bits while loading instead.", ("--quantization", "fp8"))]
    return [Fix("A checkpoint in a format of this version needs no flag.", remove=("--quantization",))]


def _deprecated(case: LaunchCase, wanted: str) -> Iterator[Finding]:
    bounds = _methods().get(wanted, {}).get("deprecated")
    if bounds is None or case.switch("--allow-deprecated-quantization") or case.version is None:
        return
    first, last = bounds
    if not at_least(case.version, first) or at_least(case.version, _next(last)):
        return
    yield finding(
        "quant-format-unsupported",
        f"{case.version_words} takes {wanted} only with --allow-deprecated-quantization.",
        evidence=case.evidence("--quantization"),
        fixes=[Fix("It still works; it will be removed.", ("--allow-deprecated-quantization",))],
    )


def _next(version: str) -> str:
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) + 1}"


def _mismatch(case: LaunchCase, wanted: str) -> Iterator[Finding]:
    model = case.model
    if model is None or model.format == "gguf":
        return
    if model.format != "known" and not model.config and model.quantization.method is None:
        return  # without a configuration nobody can say that it declares nothing
    entry = _methods().get(wanted, {})
    accepted = set(entry.get("checkpoint", ()))
    assumed = case.assumed_format
    has = declared(case)
    fix = Fix("The engine reads the method from the checkpoint.", remove=("--quantization",))
    if has is None:
        if entry.get("online"):
            return
        yield finding(
            "quant-method-mismatch",
            f"--quantization {wanted} reads a checkpoint of that method, and this one declares no quantisation.",
            evidence=[*case.evidence("--quantization"), case.model_evidence("no quantization_config")],
            fixes=[fix],
            confidence=_sure(case),
        )
    elif has.lower() not in accepted and has.lower() != wanted:
        yield finding(
            "quant-method-mismatch",
            f"--quantization {wanted}, but the checkpoint is {case.format_label or has}.",
            evidence=[
                *case.evidence("--quantization"),
                case.model_evidence(f"quantization_config.quant_method: {has}" + (", by its name" if assumed else "")),
            ],
            fixes=[fix],
            severity="warning" if assumed and not case.is_hub_name else None,
            confidence="possible" if assumed and not case.is_hub_name else _sure(case),
        )


def _sure(case: LaunchCase) -> Confidence:
    return "certain" if case.model_confidence == "certain" and not case.assumed_format else "likely"


def _checkpoint_method(case: LaunchCase) -> Iterator[Finding]:
    """A checkpoint whose own method this version does not have."""
    has = declared(case)
    if has is None or case.model is None or case.model.format == "gguf":
        return
    accepting = {
        name for name, entry in _methods().items() if has.lower() in entry.get("checkpoint", ()) or name == has.lower()
    }
    if not accepting:
        yield finding(
            "quant-format-unsupported",
            f"The checkpoint is quantised with {has}, which no vLLM release reads.",
            evidence=[case.model_evidence(f"quantization_config.quant_method: {has}")],
            confidence="likely",
        )
        return
    if accepting & set(_available(case)) or requested(case) == has.lower():
        return
    runs = method_history(has.lower()) or tuple(run for name in sorted(accepting) for run in method_history(name))
    known = case.version is not None
    yield finding(
        "quant-format-unsupported",
        f"The checkpoint is quantised with {has}; vLLM reads that {release_words(runs)}.",
        evidence=[case.model_evidence(f"quantization_config.quant_method: {has}")],
        fixes=[Fix(f"An engine that reads it: vLLM {runs[0][0]} to {runs[-1][1]}.")],
        severity="error" if known else "warning",
        confidence=_sure(case) if known else "possible",
    )


# ------------------------------------------------------------------------------------------ slow kernels


def _slow_kernel(case: LaunchCase) -> Iterator[Finding]:
    wanted = requested(case)
    bound = _PINNED_UNTIL.get(wanted or "")
    if wanted is None or bound is None or case.since(bound):
        return
    has = declared(case)
    if case.model is not None and has is not None and has.lower() != wanted:
        return
    if case.model is not None and has is None and case.model.config:
        return
    if wanted == "gptq" and case.model is not None and case.model.quantization.bits not in (4, 8, None):
        return
    if wanted == "gptq" and case.model is not None and case.model.quantization.symmetric is False:
        return  # Marlin takes symmetric GPTQ only
    needed = (7, 5) if case.newest_or_since("0.14.0") else (8, 0)
    if case.capability is not None and case.capability < needed:
        return
    remove = ["--quantization"]
    also = []
    if (case.text("--dtype") or "") in _FLOAT16:
        remove.append("--dtype")
        also.append("--dtype")
    if case.switch("--enforce-eager"):
        remove.append("--enforce-eager")
        also.append("--enforce-eager")
    until = f"up to {_before(bound)}"
    yield finding(
        "slow-awq-kernel",
        f"{until.capitalize()} the word {wanted} pins the old kernel; without it the engine takes {wanted}_marlin "
        "where the card can."
        + (
            f" {' and '.join(also)} are not needed either."
            if len(also) > 1
            else f" {also[0]} is not needed either."
            if also
            else ""
        ),
        evidence=case.evidence("--quantization", *also),
        fixes=[Fix("The engine then picks the fast kernel.", remove=tuple(remove))],
        confidence="certain"
        if case.version is not None and has is not None and case.capability is not None
        else "likely",
    )


def _before(bound: str) -> str:
    major, minor = bound.split(".")[:2]
    return f"{major}.{int(minor) - 1}"


# ------------------------------------------------------------------------------------------ capability


def _capability(case: LaunchCase) -> Iterator[Finding]:
    if case.capability is None or case.used_gpus is None:
        return
    has_number = case.capability[0] * 10 + case.capability[1]
    card = next(gpu for gpu in case.used_gpus if gpu.compute_capability == case.capability)
    has = f"{case.capability[0]}.{case.capability[1]}"
    words = f"card {card.index}{f' ({card.name})' if card.name else ''}: compute capability {has}"
    if case.capability < _LOWEST_CAPABILITY:
        yield finding(
            "sm-unsupported",
            "vLLM's builds have kernels for compute capability 7.0 and later.",
            evidence=[Evidence("gpu", words)],
            fixes=[Fix("Another engine: llama.cpp runs on this card.")],
        )
        return
    needed, what, sources = _needed_capability(case)
    if needed is None or has_number >= needed:
        return
    yield finding(
        "quant-compute-capability",
        f"{what} needs compute capability {needed // 10}.{needed % 10}"
        + (f" in {case.version_words}" if case.version else "")
        + f", the card has {has}.",
        evidence=[*sources, Evidence("gpu", words)],
        fixes=_capability_fixes(case, has_number),
        confidence=_sure(case) if declared(case) is not None else "certain",
    )


def _needed_capability(case: LaunchCase) -> tuple[int | None, str, tuple[Evidence, ...]]:
    """Lowest capability for what will run: the method of the flag, else what can run the checkpoint in some way."""
    wanted, has = requested(case), declared(case)
    by_checkpoint = has is not None and has.lower() in (_BY_FORMAT, _BY_ALGORITHM)
    if wanted is not None and wanted in _available(case) and wanted != _BY_FORMAT and not by_checkpoint:
        accepted = _methods().get(wanted, {}).get("checkpoint", ())
        if has is None or has.lower() in accepted or has.lower() == wanted:
            return method_capability(wanted, case.version), f"--quantization {wanted}", case.evidence("--quantization")
    if has is None or case.model is None:
        return None, "", ()
    label = case.format_label or has
    sources = (case.model_evidence(f"quantization_config: {label}"),)
    return _checkpoint_capability(case, case.version), f"The checkpoint ({label})", sources


def _checkpoint_capability(case: LaunchCase, version: str | None) -> int | None:
    """Lowest capability on which a version runs the checkpoint in some way; None: not known."""
    has = (declared(case) or "").lower()
    tables = load_toml("quantization-methods.toml")
    if has == _BY_FORMAT and case.model is not None:
        return _groups_capability(case.model.quantization, version)
    if has == _BY_ALGORITHM and case.model is not None:
        reader = _reader(case)
        return None if reader is None else method_capability(reader, version)
    needed = method_capability(has, version)
    return needed if needed is not None else method_capability(tables["merged"].get(has, ""), version)


def _reader(case: LaunchCase) -> str | None:
    """The method whose class reads the checkpoint: for Model Optimizer that of its algorithm."""
    has = declared(case)
    if has is None or case.model is None or has.lower() != _BY_ALGORITHM:
        return has
    algorithm = (case.model.quantization.format or "").upper()
    readers = load_toml("quantization-methods.toml")["modelopt"]
    return next((name for part, name in readers.items() if part in algorithm), None)


def _groups_capability(declared: Quantization, version: str | None) -> int | None:
    """What compressed-tensors asks for: every config group has to run, each in the scheme that asks for least."""
    tables = load_toml("quantization-methods.toml")
    groups = (declared.declared or {}).get("config_groups")
    needed = []
    for group in groups.values() if isinstance(groups, dict) else ():
        if not isinstance(group, dict):
            continue
        weights, inputs = (_number_format(group.get(name)) for name in ("weights", "input_activations"))
        stored = group.get("format") if isinstance(group.get("format"), str) else declared.format
        schemes = tables["groups"].get(f"{weights} x {inputs}") or tables["formats"].get(stored, ())
        needed.append(scheme_capability(schemes, version))
    if not needed:
        return scheme_capability(tables["formats"].get(declared.format, ()), version)
    return max((number for number in needed if number is not None), default=None)


def _number_format(arguments: Any) -> str | None:
    """``int4`` or ``float8``: the type and bits of a config group's weights or activations."""
    if not isinstance(arguments, dict):
        return None
    return f"{arguments.get('type')}{arguments.get('num_bits')}"


def _capability_fixes(case: LaunchCase, has_number: int) -> list[Fix]:
    fixes = []
    wanted = requested(case)
    if wanted in ("awq_marlin", "gptq_marlin") and case.since("0.14.0") is False:
        fixes.append(Fix("The old kernel runs on this card.", ("--quantization", wanted.removesuffix("_marlin"))))
    later = _later(case, has_number)
    if later:
        fixes.append(Fix(f"vLLM {later} and newer run it on this card."))
    fixes.append(Fix("Or a checkpoint in AutoAWQ (7.5) or GPTQ (6.0) format."))
    return fixes


def _later(case: LaunchCase, has_number: int) -> str | None:
    """The first release after the launch's that runs the checkpoint on the card."""
    for release in releases():
        if case.since(release) is False:
            needed = _checkpoint_capability(case, release)
            if needed is not None and needed <= has_number:
                return release
    return None


def _cache_capability(case: LaunchCase) -> Iterator[Finding]:
    """fp8 caches on cards without fp8 units: some backends convert, old ones refuse."""
    kind = case.text("--kv-cache-dtype")
    if kind is None or not kind.startswith(("fp8", "nvfp4")) or case.capability is None:
        return
    needed = (10, 0) if kind.startswith("nvfp4") else (8, 9)
    if case.capability >= needed:
        return
    impossible = case.capability < (8, 0)
    yield finding(
        "quant-compute-capability",
        f"A cache in {kind} wants compute capability {needed[0]}.{needed[1]}; below it only some attention backends "
        "take it, and they convert in software.",
        evidence=[
            *case.evidence("--kv-cache-dtype"),
            Evidence("gpu", f"compute capability {case.capability[0]}.{case.capability[1]}"),
        ],
        fixes=[Fix("The cache in the model's own type.", ("--kv-cache-dtype", "auto"))],
        severity="warning" if impossible else "note",
        confidence="likely" if impossible else "possible",
    )


# ------------------------------------------------------------------------------------------ data type


def _dtype(case: LaunchCase) -> Iterator[Finding]:
    asked = (case.text("--dtype") or "auto").lower()
    own = case.model.text.dtype if case.model else None
    evidence = list(case.evidence("--dtype"))
    capability = case.capability
    if asked == "bfloat16" and capability is not None and capability < _BF16_CAPABILITY:
        yield finding(
            "quant-dtype",
            f"bfloat16 needs compute capability 8.0, the card has {capability[0]}.{capability[1]}.",
            evidence=evidence,
            fixes=[Fix("The type that the card has.", ("--dtype", "half"))],
        )
        return
    kernel = list(_kernel_dtype(case, asked, own))
    if (
        not kernel
        and asked == "auto"
        and own == "bfloat16"
        and capability is not None
        and capability < _BF16_CAPABILITY
    ):
        yield finding(
            "quant-dtype",
            "The model is bfloat16 and the card has none: the engine changes to float16, which some models overflow.",
            evidence=[
                case.model_evidence("dtype: bfloat16"),
                Evidence("gpu", f"compute capability {capability[0]}.{capability[1]}"),
            ],
            fixes=[Fix("Says the same in the command.", ("--dtype", "half"))],
            severity="note",
        )
    yield from kernel
    if (
        asked in _FLOAT16
        and own == "bfloat16"
        and not (capability is not None and capability < _BF16_CAPABILITY)
        and not _kernel_wants_float16(case)
    ):
        yield finding(
            "dtype-downcast",
            "The checkpoint is bfloat16; float16 has the same size and a range that ends at 65,504.",
            evidence=[*evidence, case.model_evidence("dtype: bfloat16")],
            fixes=[Fix("The model's own type.", remove=("--dtype",))],
            confidence="certain" if capability is not None else "likely",
        )


def _kernel_wants_float16(case: LaunchCase) -> bool:
    return method_dtypes(requested(case) or "", case.version) == ("float16",)


def _kernel_dtype(case: LaunchCase, asked: str, own: str | None) -> Iterator[Finding]:
    """The kernel that runs takes one type only."""
    by_algorithm = (declared(case) or "").lower() == _BY_ALGORITHM
    wanted = ((None if by_algorithm else requested(case)) or _reader(case) or "").lower()
    allowed = method_dtypes(wanted, case.version)
    if not allowed or (wanted in _PINNED_UNTIL and requested(case) is None):
        return  # without the flag the engine takes the kernel with both types
    names = {"half": "float16", "bfloat16": "bfloat16", "float16": "float16", "float": "float32", "float32": "float32"}
    capable = case.capability is None or case.capability >= _BF16_CAPABILITY
    effective = names.get(asked) if asked != "auto" else (own if capable else "float16")
    if effective is None or effective in allowed:
        return
    if not capable and not {"float16", "float32"} & set(allowed):
        assert case.capability is not None
        yield finding(
            "quant-dtype",
            f"The {wanted} kernel takes {' or '.join(allowed)} only, and the card, of compute capability "
            f"{case.capability[0]}.{case.capability[1]}, has none: no --dtype helps.",
            evidence=[*case.evidence("--dtype", "--quantization")],
            fixes=[Fix("A card of compute capability 8.0 or later, or a checkpoint whose kernels take float16.")],
            confidence="certain" if case.version else "likely",
        )
        return
    if not capable:
        allowed = tuple(name for name in allowed if name != "bfloat16")
    flag = "half" if "float16" in allowed and own not in allowed else own if own in allowed else allowed[0]
    yield finding(
        "quant-dtype",
        f"The {wanted} kernel takes {' or '.join(allowed)}, and the launch runs in {effective}"
        + ("" if asked != "auto" else ", the checkpoint's type")
        + ".",
        evidence=[*case.evidence("--dtype", "--quantization")],
        fixes=[
            Fix("Without the flag the engine takes a kernel for both types.", remove=("--quantization",))
            if wanted in _PINNED_UNTIL
            else Fix("A type that the kernel takes.", ("--dtype", flag)),
        ],
        confidence="certain" if asked != "auto" and case.version else "likely",
    )
