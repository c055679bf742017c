"""The load sheet of a GGUF model that llama.cpp serves from host memory.

The host stands in the sheet as one "gpu" named "cpu". Its components: the weights of the language model and of the
projector, the KV cache with the recurrent state, the graph's buffer (workspace), the projector's buffer
(activations.vision), the logits (sampler), and the process itself (context), whose upper bound holds what
llama-server keeps of past prompts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from loadmaster.core import hostmemory
from loadmaster.core.checks.catalogue import order
from loadmaster.core.facts import (
    GIB,
    Component,
    EngineFacts,
    Evidence,
    Finding,
    Fix,
    GpuLoad,
    HostFacts,
    KvCache,
    LaunchArgs,
    LaunchPlan,
    LoadSheet,
    ModelFacts,
    ModelSummary,
)
from loadmaster.core.hostneed import HostNeed, host_need
from loadmaster.core.hostsettings import HostFlags, HostSettings, host_settings, launch_flags
from loadmaster.core.review import damage_words
from loadmaster.core.tables import load_toml

_PEAKS = ("start", "steady", "serving")


def make_host_plan(model: ModelFacts, host: HostFacts, launch: LaunchArgs, engine: EngineFacts) -> LoadSheet:
    """Plan host memory for ``llama-server`` with this launch.

    The flags come from ``launch.flags``, else from the tokens in ``launch.argv``. ``fits`` is about the memory that is
    available now (all of it, when that is not known): True when the high of every peak is within, False when a low
    is above, None when it lies between or something that decides is unknown.
    """
    flags = launch_flags(launch)
    settings = _fitted(model, host_settings(flags, model), flags, host, engine)
    notes = [] if engine.version else ["engine version unknown: planned by the rules of the newest known build"]
    flaws = _flag_findings(flags)
    findings = list(order(model.findings)) + flaws
    need = host_need(model, settings, engine) if settings is not None else None
    total, room = host.memory_total_bytes, _room(host)
    fits: bool | None = None
    if need is not None and need.known and room is not None:
        fits = True if need.high <= room else (False if need.low > room else None)
    if settings is not None and need is not None:
        if settings.shortened_from is not None:
            notes.append(
                f"without -c the engine shortens the context itself, from {settings.shortened_from:,} to "
                f"{settings.context:,} tokens, to leave 1 GiB of all memory"
            )
        notes += need.notes
        flaws += (own := _setting_findings(model, settings))
        findings += own
        if room is not None and fits is not True and need.known:
            findings.append(_does_not_fit(model, flags, settings, need, room, total, engine))
    else:
        findings.append(_cannot_plan(model))
    damage = damage_words(model, model.findings)
    if damage is not None:
        fits = None if fits is True else fits
        notes.insert(0, damage)
    if any(item.severity == "error" for item in flaws):
        fits = False  # the engine does not start
    if total is None:
        notes.append("the host's memory is unknown, so whether it fits cannot be told")
    return LoadSheet(
        fits=fits,
        engine=engine,
        model=ModelSummary(
            architecture=model.architecture,
            quantization=model.quantization.label,
            parameters=model.parameters,
            name=model.name,
            weight_bytes=model.weight_bytes,
        ),
        gpus=(_load(need, host),) if need is not None else (),
        kv_cache=_kv_cache(model, flags, settings, need, room, engine),
        launch=LaunchPlan(argv=_command(model, launch, settings)),
        findings=tuple(findings),
        images=need.images if need is not None else None,
        notes=tuple(notes),
    )


def _fitted(
    model: ModelFacts, settings: HostSettings | None, flags: HostFlags, host: HostFacts, engine: EngineFacts
) -> HostSettings | None:
    """The settings with the context that the engine picks when none is given: it counts all host memory as free."""
    rule = load_toml("llamacpp.toml")["fit"]
    total = host.memory_total_bytes
    if settings is None or settings.context_given or not settings.fit or total is None:
        return settings

    def sum_with(tokens: int) -> int | None:
        other = host_settings(flags, model, context=tokens)
        if other is None:
            return None
        cache, buffer = hostmemory.cache(model, other), hostmemory.compute_buffer(model, other)
        if cache is None or buffer is None:
            return None
        loaded, _ = hostmemory.language_weights(model)
        return loaded + cache.total + buffer.bytes + int(rule["margin_bytes"])

    whole = sum_with(settings.context)
    if whole is None or whole <= total:
        return settings
    step = load_toml("llamacpp.toml")["padding"]["context"]

    def holds(steps: int) -> bool:
        needed = sum_with(steps * step)
        return needed is not None and needed <= total

    tokens = _last(holds, settings.context // step) * step
    if tokens < rule["least_context"]:
        return settings
    fitted = host_settings(flags, model, context=tokens)
    if fitted is None:
        return settings
    return structs.replace(fitted, context_given=False, shortened_from=settings.context)


def _room(host: HostFacts) -> int | None:
    return host.memory_available_bytes if host.memory_available_bytes is not None else host.memory_total_bytes


# ------------------------------------------------------------------------------------------ the sheet


def _load(need: HostNeed, host: HostFacts) -> GpuLoad:
    peaks = {"start": need.start, "steady": need.steady, "serving": need.serving}
    total = host.memory_total_bytes or 0
    room = _room(host) or 0
    left = max(0, room - need.serving[0])
    headroom = (
        Component("headroom", left, max(0, room - need.serving[2]), max(0, room - need.serving[1]), "computed"),
    )
    return GpuLoad(
        index=0,
        name="cpu",
        total_bytes=total,
        free_bytes=host.memory_available_bytes,
        budget_bytes=room,
        components=need.components + (headroom if room else ()),
        peak_bytes={name: peaks[name][0] for name in _PEAKS},
        peak_low_bytes={name: peaks[name][1] for name in _PEAKS},
        peak_high_bytes={name: peaks[name][2] for name in _PEAKS},
    )


def _kv_cache(
    model: ModelFacts,
    flags: HostFlags,
    settings: HostSettings | None,
    need: HostNeed | None,
    room: int | None,
    engine: EngineFacts,
) -> KvCache | None:
    if settings is None or need is None or need.cache is None:
        return None
    largest = _largest_context(model, flags, room, engine) if room is not None and need.known else None
    request = need.cache.total // settings.streams if not settings.unified else need.cache.total
    return KvCache(
        available_bytes=need.cache.total,
        block_tokens=None,
        blocks=None,
        tokens=settings.context,
        max_concurrency=_at_once(settings, need, room, largest),
        bytes_per_request_at_max_len=request,
        max_model_len=settings.context_per_slot,
        largest_model_len=largest,
        notes=(
            (f"{settings.slots} slots share {settings.context:,} tokens",)
            if settings.unified and settings.slots > 1
            else (f"{settings.context_per_slot:,} tokens for each of {settings.slots} slots",)
        ),
    )


def _at_once(settings: HostSettings, need: HostNeed, room: int | None, largest: int | None) -> float | None:
    """Requests of the full length that memory holds: as many as there are streams, else the share that fits."""
    if room is None or not need.known or need.high <= room:
        return float(settings.streams)
    return None if largest is None else min(1.0, largest / settings.context_per_slot) * settings.streams


def _largest_context(model: ModelFacts, flags: HostFlags, room: int, engine: EngineFacts) -> int | None:
    """Longest context of a request, up to the model's own, that surely fits; None when not even the shortest does."""
    step = load_toml("llamacpp.toml")["padding"]["context"]
    longest = model.text.max_position_embeddings
    sample = host_settings(flags, model, context=step)
    if not longest or sample is None:
        return None

    def fits(steps: int) -> bool:
        settings = host_settings(flags, model, context=steps * step * sample.streams)
        return settings is not None and host_need(model, settings, engine).high <= room

    count = _last(fits, max(1, longest // step))
    return min(count * step, longest) if count else None


def _last(holds: Callable[[int], bool], limit: int) -> int:
    """Largest number in 1..limit for which it holds, by halving; 0 when it holds for none."""
    if not holds(1):
        return 0
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _command(model: ModelFacts, launch: LaunchArgs, settings: HostSettings | None) -> tuple[str, ...]:
    flags = tuple(token for token in (launch.argv or launch.extra) if token != "llama-server")
    words = ["llama-server"]
    if not any(token in ("-m", "--model") for token in flags):
        words += ["-m", model.path or launch.model or model.name]
    projector = next((f.name for f in model.files if f.kind == "processor"), None)
    given = any(token in ("-mm", "--mmproj", "--no-mmproj") for token in flags)
    if projector is not None and not given and settings is not None and settings.projector and model.path:
        words += ["--mmproj", model.path[: len(model.path) - len(re.split(r"[/\\]", model.path)[-1])] + projector]
    return (*words, *flags)


# ------------------------------------------------------------------------------------------ findings


def _flag_findings(flags: HostFlags) -> list[Finding]:
    found = [
        Finding(
            code="unknown-flag",
            severity="warning",
            title=f"{name} is not in the table of flags",
            cause="It is kept as it is; what it does to memory is not counted.",
            evidence=(Evidence("command", name),),
            confidence="possible",
        )
        for name in flags.unknown
    ]
    found += [
        Finding(
            code="flag-value-invalid",
            severity="error",
            title=f"{name} wants {wanted}",
            cause=f"{name} {value}".strip() + f" is not {wanted}, and the engine does not start with it.",
            evidence=(Evidence("command", f"{name} {value}".strip()),),
            fixes=_number_fixes(name, value) if wanted == "a whole number" else (),
        )
        for name, value, wanted in flags.bad
    ]
    return found


def _number_fixes(name: str, value: str) -> tuple[Fix, ...]:
    """``32k`` and ``32K`` in full: llama.cpp reads digits only, and a context is counted in 1024s."""
    match = re.fullmatch(r"(\d{1,9})([kKmM])", value)
    if match is None:
        return ()
    number = int(match[1]) * (1024 if match[2] in "kK" else 1024**2)
    return (Fix("llama.cpp reads no units.", argv=(name, str(number))),)


def _setting_findings(model: ModelFacts, settings: HostSettings) -> list[Finding]:
    found = []
    longest = model.text.max_position_embeddings
    if settings.context_given and longest is not None and settings.context_per_slot > -(-longest // 256) * 256:
        found.append(
            Finding(
                code="context-beyond-model",
                severity="warning",
                title="the context is longer than the model's",
                cause=f"A slot gets {settings.context_per_slot:,} tokens, and the model was made for {longest:,}; "
                "the engine takes the memory and then does not use it.",
                evidence=(Evidence("plan", f"{settings.context_per_slot:,} > {longest:,}"),),
                fixes=(
                    Fix(
                        "The model's own length.", argv=("-c", str(longest * settings.streams)), remove=("--ctx-size",)
                    ),
                ),
            )
        )
    if not settings.flash_attention and settings.cache_type_v not in ("F32", "F16", "BF16"):
        found.append(
            Finding(
                code="quant-format-unsupported",
                severity="error",
                title="a quantised V cache needs flash attention",
                cause=f"The V cache is {settings.cache_type_v.lower()}, flash attention is off: no start.",
                evidence=(Evidence("command", f"-ctv {settings.cache_type_v.lower()} -fa off"),),
                fixes=(Fix("Flash attention, which the processor has too.", argv=("-fa", "on")),),
            )
        )
    return found


def _cannot_plan(model: ModelFacts) -> Finding:
    return Finding(
        code="config-invalid",
        severity="error",
        title="the file does not say how long its context is",
        cause="Without a context length in the file and without -c nothing can be planned.",
        evidence=(Evidence("file", f"{model.architecture or 'architecture'}.context_length", path=model.path),),
        fixes=(Fix("Give the context.", argv=("-c", "4096")),),
    )


def _does_not_fit(
    model: ModelFacts,
    flags: HostFlags,
    settings: HostSettings,
    need: HostNeed,
    room: int,
    total: int | None,
    engine: EngineFacts,
) -> Finding:
    surely = need.low > room
    names = ", ".join(f"{c.name} {c.bytes / GIB:.2f}" for c in sorted(need.components, key=lambda c: -c.bytes)[:3])
    value, low, high = need.serving
    span = f"between {low / GIB:.2f} and {high / GIB:.2f} GiB" if low != high else f"{value / GIB:.2f} GiB"
    cause = f"It needs {span} of host memory, and {room / GIB:.2f} GiB are available ({names} GiB). "
    if total is not None and room < total and need.high <= total:
        cause += f"Other programs hold {(total - room) / GIB:.2f} GiB. "
    if need.kept_prompts and need.high - need.kept_prompts <= room and not surely:
        cause += "Only the prompts that llama-server keeps while it serves would go beyond it. "
    return Finding(
        code="host-ram-killed",
        severity="error" if surely else "warning",
        title="host memory does not suffice" if surely else "host memory may not suffice",
        cause=cause.strip(),
        evidence=(Evidence("plan", f"serving {high / GIB:.2f} GiB at most, available {room / GIB:.2f} GiB"),),
        fixes=_fixes(model, flags, settings, need, room, engine),
        confidence="certain" if surely else "possible",
    )


def _fixes(
    model: ModelFacts, flags: HostFlags, settings: HostSettings, need: HostNeed, room: int, engine: EngineFacts
) -> tuple[Fix, ...]:
    """Changes that make the plan hold, each planned again; the least one first."""
    fixes: list[Fix] = []

    def high(values: Mapping[str, Any]) -> int | None:
        changed = structs.replace(flags, values={**flags.values, **values})
        other = host_settings(changed, model)
        return host_need(model, other, engine).high if other is not None else None

    def offer(values: Mapping[str, Any], argv: tuple[str, ...], why: str) -> None:
        result = high(values)
        if result is not None and result <= room:
            fixes.append(Fix(why=f"{why} Then it needs {result / GIB:.2f} GiB at most.", argv=argv, replanned=True))

    spare = room - (need.high - (settings.cache_ram_bytes or 0))
    if settings.cache_ram_bytes and spare >= 0:
        mib = min(settings.cache_ram_bytes, spare) >> 20
        offer({"--cache-ram": mib}, ("--cache-ram", str(mib)), "Keep less of past prompts.")
    without = {"--cache-ram": 0, "--ctx-checkpoints": 0}
    quiet = ("--cache-ram", "0", "--ctx-checkpoints", "0")
    if not fixes:
        offer(without, quiet, "Keep nothing of past prompts.")
    if not fixes and settings.cache_type_k in ("F16", "BF16", "F32") and settings.flash_attention:
        types = {"--cache-type-k": "Q8_0", "--cache-type-v": "Q8_0"}
        offer({**without, **types}, (*quiet, "-ctk", "q8_0", "-ctv", "q8_0"), "A KV cache of 8 bits as well.")
    if not any(fix.argv[:1] == ("--cache-ram",) and len(fix.argv) == 2 for fix in fixes):
        fewer = structs.replace(flags, values={**flags.values, **without})
        length = _largest_context(model, fewer, room, engine)
        if length is not None and length < settings.context_per_slot:
            tokens = length * settings.streams
            offer({**without, "--ctx-size": tokens}, ("-c", str(tokens), *quiet), f"A context of {length:,} tokens.")
    if not fixes:
        fixes.append(
            Fix("A file with fewer bits per weight, or more memory: the weights and buffers alone are too large.")
        )
    return tuple(fixes)
