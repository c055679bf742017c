"""A load sheet as one SVG picture, for a report or a README. No script, no font to load, both themes."""

from __future__ import annotations

from html import escape

from loadmaster.core.facts import GpuLoad, KvCache, LoadSheet
from loadmaster.render.sheet import alike, engine_line, ordered
from loadmaster.render.units import bare_gib, gib
from loadmaster.render.visible import shown

_COLOURS = {
    "context": "#8a8f98",
    "weights.language": "#3b6fb6",
    "weights.vision": "#3fa7c4",
    "weights.other": "#7f9fd1",
    "workspace": "#b79ad8",
    "activations.language": "#a06cc5",
    "activations.vision": "#c986c4",
    "sampler": "#d8a7ce",
    "cuda_graphs": "#e0a83c",
    "kv_cache": "#4fa66a",
    "headroom": "#d9dde3",
}
_WIDTH, _MARGIN, _BAR, _ROW = 900, 24, 30, 20
_VERDICT = {True: ("fits", "#2e7d46"), False: ("does not fit", "#b3382c"), None: ("could not tell", "#9a7412")}


def sheet_svg(sheet: LoadSheet) -> str:
    """An SVG document; one bar and legend for each kind of card, the card's end marked. Figures are GiB."""
    sheet = shown(sheet, lines=False)
    body: list[str] = []
    title = ", ".join(part for part in (sheet.model.architecture, sheet.model.quantization) if part)
    y = _MARGIN + 14
    body.append(_text(_MARGIN, y, title, 17, weight="600"))
    word, colour = _VERDICT[sheet.fits]
    body.append(_text(_WIDTH - _MARGIN, y, word, 17, weight="600", anchor="end", fill=colour))
    y += 20
    body.append(_text(_MARGIN, y, engine_line(sheet), 12, fill="#596273"))
    y += 10
    for loads in alike(sheet.gpus):
        y = _card(body, loads, y)
    if sheet.kv_cache is not None:
        y += 10
        body.append(_text(_MARGIN, y, _cache(sheet.kv_cache), 13))
        y += 18
    note = "GiB = 2^30 bytes. The red line is the card's end, the grey part is free. In brackets: low to high."
    body.append(_text(_MARGIN, y, note, 11, fill="#596273"))
    height = y + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title, quote=True)}: {word}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _cache(cache: KvCache) -> str:
    if cache.available_bytes is not None and cache.available_bytes < 0:
        return f"KV cache none: the budget is {gib(-cache.available_bytes)} short before the first block"
    line = f"KV cache {gib(cache.available_bytes)}"
    if cache.tokens is not None:
        line += f": {cache.tokens:,} tokens"
    if cache.max_concurrency is not None and cache.max_model_len is not None:
        line += f", {cache.max_concurrency:.2f} requests of {cache.max_model_len:,} tokens"
    return line


def _card(body: list[str], loads: list[GpuLoad], y: int) -> int:
    gpu = loads[0]
    label = "host memory" if gpu.name == "cpu" else "GPU " + ", ".join(str(load.index) for load in loads)
    facts = f"{gib(gpu.total_bytes)}" + (f", {gpu.name}" if gpu.name and gpu.name != "cpu" else "")
    y += 18
    body.append(_text(_MARGIN, y, f"{label}   {facts}", 14, weight="600"))
    serving = gpu.peak_bytes.get("serving", 0)
    low, high = gpu.peak_low_bytes.get("serving", serving), gpu.peak_high_bytes.get("serving", serving)
    peak = f"serving peak {gib(serving)} ({bare_gib(low)}-{bare_gib(high)})"
    if gpu.name != "cpu":
        peak += f", budget {bare_gib(gpu.budget_bytes)}"
    body.append(_text(_WIDTH - _MARGIN, y, peak, 13, anchor="end"))
    y += 8
    scale = (_WIDTH - 2 * _MARGIN) / max(gpu.total_bytes, serving, 1)
    x = float(_MARGIN)
    used = [c for c in ordered(gpu.components) if c.name != "headroom" and c.bytes > 0]
    for component in used:
        width = component.bytes * scale
        tip = f"{component.name} {gib(component.bytes)} ({component.basis})"
        body.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_colour(component.name)}">'
            f"<title>{escape(tip)}</title></rect>"
        )
        x += width
    end = _MARGIN + gpu.total_bytes * scale
    if x < end:
        body.append(f'<rect x="{x:.1f}" y="{y}" width="{end - x:.1f}" height="{_BAR}" fill="{_COLOURS["headroom"]}"/>')
    body.append(
        f'<line x1="{end:.1f}" y1="{y - 4}" x2="{end:.1f}" y2="{y + _BAR + 4}" stroke="#b3382c" stroke-width="2">'
        f"<title>the card ends here: {gib(gpu.total_bytes)}</title></line>"
    )
    y += _BAR + 18
    columns, column = 3, (_WIDTH - 2 * _MARGIN) // 3
    for at, component in enumerate(used):
        left, top = _MARGIN + (at % columns) * column, y + (at // columns) * _ROW
        body.append(f'<rect x="{left}" y="{top - 10}" width="11" height="11" fill="{_colour(component.name)}"/>')
        span = "" if component.low == component.high else f" ({bare_gib(component.low)}-{bare_gib(component.high)})"
        body.append(_text(left + 16, top, f"{component.name} {bare_gib(component.bytes)}{span} {component.basis}", 11))
    return y + -(-len(used) // columns) * _ROW


def _colour(name: str) -> str:
    return _COLOURS.get(name, "#cc4466")


def _text(
    x: int, y: int, text: str, size: int, *, weight: str = "400", anchor: str = "start", fill: str = "#1d2330"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(text)}</text>"
    )
