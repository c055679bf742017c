"""A load sheet as text: one table and one bar per card, readable at 80 columns and in a pipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from itertools import groupby

from msgspec import structs

from loadmaster.core.facts import Change, Component, GpuLoad, ImagePlan, KvCache, LoadSheet, Settings
from loadmaster.render.findings import findings_text
from loadmaster.render.lines import wrap
from loadmaster.render.paint import Paint, plain
from loadmaster.render.units import bare_gib, count, gib, parameters, pixels, plural
from loadmaster.render.visible import shown

# Order from the bottom of the card to the top, the letter in the bar, and its colour.
COMPONENTS: dict[str, tuple[str, str]] = {
    "context": ("c", "dim"),
    "weights.language": ("W", "blue"),
    "weights.vision": ("V", "cyan"),
    "weights.other": ("o", "blue"),
    "workspace": ("w", "magenta"),
    "activations.language": ("a", "magenta"),
    "activations.vision": ("v", "magenta"),
    "sampler": ("s", "magenta"),
    "cuda_graphs": ("g", "yellow"),
    "kv_cache": ("K", "green"),
    "headroom": (".", "dim"),
}
# flags or values that the engine does not take, whatever the memory
_REFUSALS = {"unknown-flag", "flag-value-invalid", "flag-conflict", "util-out-of-range", "context-beyond-model"}
_WIDE = 1 << 30  # bounds further apart than this are explained
_WHY_DIFFERENT = (
    "(each kind of layer takes blocks of its own, and state takes some for every request: blocks x tokens, "
    "printed tokens and the longest request differ)"
)
_VERDICT = {
    True: ("FITS", "bold", "green"),
    False: ("DOES NOT FIT", "bold", "red"),
    None: ("COULD NOT TELL", "bold", "yellow"),
}


def sheet_text(sheet: LoadSheet, width: int = 80, paint: Paint = plain) -> str:
    """The whole load sheet; the verdict is its last paragraph."""
    sheet = structs.replace(shown(sheet), launch=shown(sheet.launch, lines=False))
    blocks = [_head(sheet, width, paint)]
    for loads in alike(sheet.gpus):
        blocks.append(_card(loads, width, paint))
    if sheet.kv_cache is not None:
        blocks.append(_cache(sheet.kv_cache, width, paint))
    if sheet.images is not None:
        blocks.append(_images(sheet.images, width, paint))
    if sheet.notes:
        blocks.append("\n".join(line for note in sheet.notes for line in wrap(note, width, "note: ", "      ")))
    if sheet.launch.changed:
        blocks.append(_changes(sheet.launch.changed, width, paint))
    if sheet.findings:
        blocks.append(findings_text(sheet.findings, width, paint))
    blocks.append(_verdict(sheet, paint))
    return "\n\n".join(blocks)


def alike(gpus: Sequence[GpuLoad]) -> list[list[GpuLoad]]:
    """Neighbouring cards with the same load, so that eight equal cards are one table."""

    def key(gpu: GpuLoad) -> object:
        return (
            gpu.name, gpu.total_bytes, gpu.budget_bytes, gpu.pipeline_rank, gpu.free_bytes,
            tuple((c.name, c.bytes) for c in gpu.components), tuple(gpu.peak_bytes.items()),
        )  # fmt: skip

    return [list(group) for _, group in groupby(gpus, key)]


def bar(gpu: GpuLoad, cells: int) -> list[tuple[str, str]]:
    """The card as ``cells`` (letter, colour) pairs; what passes the card's end is marked ``!``.

    A component of any size gets at least one cell, taken from the largest one.
    """
    shown = [c for c in ordered(gpu.components) if c.name != "headroom" and c.bytes > 0]
    scale = max(gpu.total_bytes, gpu.peak_bytes.get("serving", 0), 1)
    widths = [max(1, round(c.bytes * cells / scale)) for c in shown]
    capacity = max(1, round(gpu.total_bytes * cells / scale))
    while shown and sum(widths) > cells:
        widths[widths.index(max(widths))] -= 1
    drawn = [COMPONENTS.get(c.name, ("?", "red")) for c, n in zip(shown, widths, strict=True) for _ in range(n)]
    drawn += [COMPONENTS["headroom"]] * (cells - len(drawn))
    return [pair if at < capacity else ("!", "red") for at, pair in enumerate(drawn)]


def ordered(components: Sequence[Component]) -> list[Component]:
    place = {name: at for at, name in enumerate(COMPONENTS)}
    return sorted(components, key=lambda c: place.get(c.name, len(place)))


def _head(sheet: LoadSheet, width: int, paint: Paint) -> str:
    model = sheet.model
    title = [model.architecture or "architecture unknown", model.quantization or "quantization unknown"]
    if model.parameters is not None:
        title.append(f"{parameters(model.parameters)} parameters")
    lines = [paint(model.name, "bold")] if model.name else []
    lines += wrap(", ".join(title), width, "")
    lines += wrap(engine_line(sheet), width, "")
    return "\n".join(lines)


def engine_line(sheet: LoadSheet) -> str:
    """``vLLM 0.24.0: tensor parallel 2, context 262,144, ...``"""
    name = {"vllm": "vLLM", "llamacpp": "llama.cpp"}[sheet.engine.name]
    line = f"{name} {sheet.engine.version or 'version unknown'}"
    return line if sheet.settings is None else f"{line}: {settings_line(sheet.settings)}"


def settings_line(s: Settings) -> str:
    parts = []
    for number, label in (
        (s.tensor_parallel_size, "tensor parallel"),
        (s.pipeline_parallel_size, "pipeline parallel"),
        (s.data_parallel_size, "data parallel"),
    ):
        if number > 1 or label == "tensor parallel":
            parts.append(f"{label} {number}")
    parts.append(f"context {count(s.max_model_len)}")
    parts.append(plural(s.max_num_seqs, "sequence"))
    parts.append(f"{count(s.max_num_batched_tokens)} batched tokens")
    parts.append("eager" if s.enforce_eager or s.cudagraph_mode == "NONE" else "CUDA graphs")
    return ", ".join(parts)


def _card(loads: list[GpuLoad], width: int, paint: Paint) -> str:
    gpu = loads[0]
    which = "GPU " + ", ".join(str(load.index) for load in loads) if gpu.name != "cpu" else "host memory"
    facts = [gib(gpu.total_bytes) + (" each" if len(loads) > 1 else "")]
    if gpu.name and gpu.name != "cpu":
        facts.insert(0, gpu.name)
    if gpu.free_bytes is not None:
        facts.append(f"{gib(gpu.free_bytes)} free now")
    if gpu.name != "cpu":
        facts.append(f"budget {gib(gpu.budget_bytes)}")
    lines = [f"{paint(which, 'bold')}  " + ", ".join(facts)]
    cells = bar(gpu, width - 4)
    lines.append("  [" + "".join(paint("".join(c for c, _ in run), colour) for colour, run in _runs(cells)) + "]")
    if any(letter == "!" for letter, _ in cells):
        lines.append("  ! beyond the card's end")
    lines.append(f"    {'component':<23}{'GiB':>8}  {'low - high':>15}  basis")
    for component in ordered(gpu.components):
        letter, colour = COMPONENTS.get(component.name, ("?", "red"))
        span = "" if component.low == component.high else f"{bare_gib(component.low)} - {bare_gib(component.high)}"
        figures = f"{bare_gib(component.bytes):>8}  {span:>15}  {component.basis}"
        lines.append(f"  {paint(letter, colour)} {component.name:<23}{figures}")
        if component.note and component.basis == "assumed" and component.high - component.low > _WIDE:
            lines += wrap(component.note, width, "      ")
    lines.append(f"    {'peak':<23}{'GiB':>8}  {'low - high':>15}  against {bare_gib(gpu.total_bytes)}")
    for name in ("start", "steady", "serving"):
        if name in gpu.peak_bytes:
            lines.append("    " + _peak_line(gpu, name, paint))
    return "\n".join(lines)


def _peak_line(gpu: GpuLoad, name: str, paint: Paint) -> str:
    value = gpu.peak_bytes[name]
    low, high = gpu.peak_low_bytes.get(name, value), gpu.peak_high_bytes.get(name, value)
    span = "" if low == high else f"{bare_gib(low)} - {bare_gib(high)}"
    if low > gpu.total_bytes:
        verdict = paint(f"{bare_gib(low - gpu.total_bytes)} over at least", "red")
    elif high > gpu.total_bytes:
        verdict = paint(f"may be {bare_gib(high - gpu.total_bytes)} over", "yellow")
    else:
        verdict = f"{bare_gib(gpu.total_bytes - high)} left at least"
    return f"{name:<23}{bare_gib(value):>8}  {span:>15}  {verdict}"


def _runs(cells: list[tuple[str, str]]) -> list[tuple[str, list[tuple[str, str]]]]:
    return [(colour, list(run)) for colour, run in groupby(cells, key=lambda cell: cell[1])]


def _cache(cache: KvCache, width: int, paint: Paint) -> str:
    line = f"{paint('KV cache', 'bold')}  "
    if cache.available_bytes is not None and cache.available_bytes < 0:
        line += f"none: the budget is {gib(-cache.available_bytes)} short before the first block"
        return "\n".join([line, *(part for note in cache.notes for part in wrap(note, width, "  "))])
    line += gib(cache.available_bytes)
    if cache.available_bytes is not None and cache.available_low_bytes is not None:
        line += f" ({bare_gib(cache.available_low_bytes)} - {bare_gib(cache.available_high_bytes)})"
    lines = [line]
    if cache.blocks is not None and cache.block_tokens is not None:
        blocks = f"{count(cache.blocks)} blocks of {count(cache.block_tokens)} tokens"
        lines.append(f"  {blocks}; the engine prints {count(cache.tokens)} tokens")
    if cache.max_concurrency is not None and cache.max_model_len is not None:
        each = f", {gib(cache.bytes_per_request_at_max_len)} each" if cache.bytes_per_request_at_max_len else ""
        lines.append(f"  {cache.max_concurrency:.2f} requests of {count(cache.max_model_len)} tokens at once{each}")
    if cache.largest_model_len is not None:
        line = f"  longest single request that fits: {count(cache.largest_model_len)} tokens"
        if cache.max_model_len is not None and cache.largest_model_len > cache.max_model_len:
            line += f" (the launch takes {count(cache.max_model_len)})"
        lines.append(line)
    if None not in (cache.blocks, cache.block_tokens, cache.tokens) and _differ(cache):
        lines += wrap(_WHY_DIFFERENT, width, "  ")
    for note in cache.notes:
        lines += wrap(note, width, "  ")
    return "\n".join(lines)


def _differ(cache: KvCache) -> bool:
    """Whether blocks x tokens is another number than the one that the engine prints."""
    return abs((cache.blocks or 0) * (cache.block_tokens or 0) - (cache.tokens or 0)) > (cache.block_tokens or 0)


def _images(images: ImagePlan, width: int, paint: Paint) -> str:
    lines = []
    if images.largest_size is not None:
        line = f"{paint('Pictures', 'bold')}  largest served {pixels(images.largest_size)}"
        if images.largest_tokens is not None:
            line += f", {count(images.largest_tokens)} tokens"
        lines.append(line)
        if images.peak_bytes is not None:
            lines.append(f"  it takes {gib(images.peak_bytes)} of vision activations on each card")
    else:
        lines.append(f"{paint('Pictures', 'bold')}  none are served")
    if images.profiled_tokens is not None:
        what = "video" if images.profiled_modality == "video" else "picture"
        lines.append(f"  profiled at start: one {what} of {count(images.profiled_tokens)} tokens")
    for sentence in images.refused:
        lines += wrap(sentence, width, "  ")
    return "\n".join(lines)


def _changes(changes: Sequence[Change], width: int, paint: Paint) -> str:
    lines = [paint("Changed", "bold")]
    for change in changes:
        before = _value(change.from_)
        if change.from_ is None:
            before = "not set" if change.default is None else f"default {_value(change.default)}"
        elif change.from_ is True:
            before = "given"
        after = "dropped" if change.to is None or change.to is False else _value(change.to)
        lines.append(f"  {change.flag}: {before} -> {after}")
        lines += wrap(change.why, width, "      ")
    return "\n".join(lines)


def _value(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _verdict(sheet: LoadSheet, paint: Paint) -> str:
    word, *styles = _VERDICT[sheet.fits]
    label = "launch"
    if sheet.fits is False:
        errors = {item.code for item in sheet.findings if item.severity == "error"}
        if sheet.unmet and not errors:
            word = "DOES NOT FIT AS WISHED"
        elif errors & _REFUSALS:
            word, label = "DOES NOT START", "refused"
        else:
            label = "does not fit"
    lines = [paint(word, *styles)]
    if sheet.launch.argv:
        env = "".join(f"{name}={shlex.quote(value)} " for name, value in sheet.launch.env.items())
        lines.append(f"{label}: {env}{shlex.join(sheet.launch.argv)}")
    return "\n".join(lines)
