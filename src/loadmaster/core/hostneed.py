"""What a launch of llama.cpp needs of a host's memory: its components when it serves, and the peaks before."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from loadmaster.core import hostmemory
from loadmaster.core.facts import GIB, Amount, Component, EngineFacts, ImagePlan, ModelFacts
from loadmaster.core.hostsettings import HostSettings
from loadmaster.core.tables import load_toml


class HostNeed(Struct, frozen=True, kw_only=True):
    """Components when serving, the two earlier peaks as (expected, low, high), and sentences.

    ``kept_prompts``: bytes of past prompts in the upper bound of the process.
    """

    components: tuple[Component, ...]
    start: tuple[int, int, int]
    steady: tuple[int, int, int]
    known: bool
    cache: hostmemory.Cache | None
    images: ImagePlan | None
    kept_prompts: int
    notes: tuple[str, ...]

    @property
    def serving(self) -> tuple[int, int, int]:
        parts = self.components
        return sum(c.bytes for c in parts), sum(c.low for c in parts), sum(c.high for c in parts)

    @property
    def high(self) -> int:
        return max(self.start[2], self.steady[2], self.serving[2])

    @property
    def low(self) -> int:
        return max(self.start[1], self.steady[1], self.serving[1])


def host_need(model: ModelFacts, settings: HostSettings, engine: EngineFacts) -> HostNeed:
    """Everything that is in memory with these settings. ``known`` False: something that decides is missing."""
    table = load_toml("llamacpp.toml")
    notes: list[str] = []
    components: list[Component] = []
    known = True

    loaded, skipped = hostmemory.language_weights(model)
    repacked = hostmemory.repacked_weights(model) if settings.repack else 0
    components.append(_component("weights.language", Amount.exact(loaded, "read")))
    if skipped:
        notes.append(f"prediction layers of {skipped / GIB:.2f} GiB in the file are not loaded")
    if repacked:
        notes.append(
            f"up to {repacked / GIB:.2f} GiB of the weights are rearranged for the processor; the file's pages of them "
            "are not needed after that, so they count once"
        )
    with_projector = settings.projector and model.vision is not None
    if with_projector:
        components.append(_component("weights.vision", Amount.exact(hostmemory.projector_weights(model), "read")))

    cache = hostmemory.cache(model, settings)
    if cache is None:
        known = False
        notes.append("KV cache: unknown, the file does not say the heads or the layers")
    elif cache.exact:
        components.append(_component("kv_cache", Amount.exact(cache.total)))
    else:
        components.append(
            _component("kv_cache", Amount(cache.total, cache.total // 2, cache.total * 2, "assumed", cache.note))
        )

    older = _older(engine.version, table["compute"]["logits_per_token_before"])
    workspace = hostmemory.compute_buffer(model, settings, logits_per_token=older)
    if workspace is None:
        known = False
        notes.append("graph buffer: unknown, the file does not say the model's width")
    else:
        components.append(_component("workspace", workspace))

    images, warm = None, Amount.exact(0)
    if with_projector:
        images, warm, picture = _images(model, settings)
        if picture is None:
            known = False
            notes.append(f"projector buffer: unknown, no rule for {model.vision.model_type if model.vision else None}")
        else:
            components.append(_component("activations.vision", picture))

    sampler = hostmemory.logits(model, settings)
    if sampler is not None:
        components.append(_component("sampler", Amount.exact(sum(sampler))))
    process, kept = hostmemory.process(model), _kept_prompts(settings, cache)
    note = "process, libraries and vocabulary"
    if kept:
        note += f"; the high holds {kept / GIB:.2f} GiB of past prompts that llama-server may keep"
    components.append(Component("context", process.bytes, process.low, process.high + kept, "assumed", note))

    serving = {c.name: c for c in components}
    steady = _sum(
        serving,
        {
            "activations.vision": warm,
            "sampler": Amount.exact(sampler[0] if sampler is not None else 0),
            "context": process,
        },
    )
    start_high = steady[2]
    if settings.lock:
        start_high += repacked  # the file's pages are pinned beside their rearranged copies
        steady = (steady[0], steady[1], steady[2] + repacked)
    if not settings.memory_map:
        start_high += hostmemory.largest_tensor(model)  # read into a buffer before it is rearranged
    return HostNeed(
        components=tuple(components),
        start=(steady[0], steady[1], start_high),
        steady=steady,
        known=known,
        cache=cache,
        images=images,
        kept_prompts=kept,
        notes=tuple(notes),
    )


def _component(name: str, amount: Amount) -> Component:
    return Component(name, amount.bytes, amount.low, amount.high, amount.basis, amount.note)


def _sum(serving: Mapping[str, Component], instead: Mapping[str, Amount]) -> tuple[int, int, int]:
    """Expected, low and high over the components, some of them in an earlier state."""
    total = [0, 0, 0]
    for name, component in serving.items():
        other = instead.get(name)
        values = (
            (component.bytes, component.low, component.high) if other is None else (other.bytes, other.low, other.high)
        )
        for at, value in enumerate(values):
            total[at] += value
    return total[0], total[1], total[2]


def _older(version: str | None, build: int) -> bool:
    """Whether a version ("b6123", "2026.10.11549") names a build before ``build``; an unknown one does not."""
    numbers = re.findall(r"\d+", version or "")
    return bool(numbers) and int(numbers[-1]) < build


def _kept_prompts(settings: HostSettings, cache: hostmemory.Cache | None) -> int:
    """Upper bound of the prompts and states that llama-server keeps beside its cache."""
    table = load_toml("llamacpp.toml")["defaults"]
    kept = settings.cache_ram_bytes
    if kept is None:
        kept = 0 if cache is None else cache.total
    if cache is None:
        return kept
    each = cache.state_bytes_per_slot + cache.window_bytes_per_slot
    states: int = min(settings.checkpoints, settings.context_per_slot // table["checkpoint_step"] + 2)
    return kept + settings.slots * states * each


def _images(model: ModelFacts, settings: HostSettings) -> tuple[ImagePlan | None, Amount, Amount | None]:
    """What pictures cost: the plan, the buffer after the warm-up, and with the largest picture."""
    vision, processor = model.vision, model.processor
    unknown = Amount.exact(0)
    if vision is None or not (vision.patch_size and vision.spatial_merge_size):
        return None, unknown, None
    side = vision.patch_size * vision.spatial_merge_size
    rules = load_toml("llamacpp.toml")["projector"].get(vision.model_type or "", {})
    limit = settings.image_max_tokens
    if vision.tokens_per_image is not None:
        limit = vision.tokens_per_image
    elif limit is None and processor is not None and processor.max_pixels:
        limit = processor.max_pixels // side**2
    if limit is None:
        return None, unknown, None
    served = min(limit, settings.context_per_slot)
    warm_tokens = min(limit, rules.get("warmup_tokens", limit))
    largest, warm = (hostmemory.projector_buffer(model, settings, tokens) for tokens in (served, warm_tokens))
    # the buffer does not shrink again, so the warm-up counts even where the context is shorter
    kept = max(served, warm_tokens) if settings.warm_up else served
    serving = hostmemory.projector_buffer(model, settings, kept)
    if largest is None or warm is None or serving is None:
        return None, unknown, None
    refused: tuple[str, ...] = ()
    if served < limit and vision.tokens_per_image is None:
        refused = (f"pictures of more than {served:,} tokens do not go into the context of {served:,} tokens",)
    edge = int(served**0.5) * side
    pixels = vision.image_size**2 if vision.image_size else served * side**2
    prepared = hostmemory.picture_preparation(settings, pixels)
    serving = Amount(
        serving.bytes + prepared.bytes,
        serving.low + prepared.low,
        serving.high + prepared.high,
        "assumed",
        f"{serving.note}, graph and preparation",
    )
    plan = ImagePlan(
        tokens_per_pixel=1 / side**2,
        profiled_tokens=warm_tokens if settings.warm_up else None,
        profiled_pixels=warm_tokens * side**2 if settings.warm_up else None,
        largest_pixels=pixels,
        largest_size=(vision.image_size, vision.image_size) if vision.image_size else (edge, edge),
        largest_tokens=served,
        refused=refused,
        peak_bytes=largest.bytes + prepared.bytes,
    )
    return plan, (warm if settings.warm_up else unknown), serving
