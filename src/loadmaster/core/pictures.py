"""Which pictures a launch serves, how many tokens they are, and which picture the profile runs on.

Rules of transformers' Qwen2-VL image processor and of vLLM's dummy inputs: sides are rounded to whole merged
patches, the area is clamped to the processor's limits, a fixed-size tower makes every picture the same.
Sources: vllm/model_executor/models/qwen2_vl.py and qwen3_vl.py (get_image_size_with_most_features,
get_max_video_tokens), vllm/multimodal/encoder_budget.py, 0.17.0-0.33.0.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from loadmaster.core.facts import ImagePlan, ModelFacts, Settings

# A chat template and one short sentence around a picture, and one token of answer: 287 tokens for a picture
# of 256, 1,055 for 1,024, 3,875 for 3,844 (recorded requests).
TEXT_AROUND = 32
_TEXT_BESIDE = 1024  # tokens of prompt and answer that a request with the largest pictures should have room for
_MAX_VIDEO_FRAMES = 14  # vllm/model_executor/models/qwen2_vl.py: _MAX_FRAMES_PER_VIDEO
_MOST_TOKENS = 1 << 24  # no context is as long
_EVERYDAY_SIDES = (512, 1024, 1448, 2048, 2896, 4096)


class PictureRules(Struct, frozen=True, kw_only=True):
    """How one picture becomes tokens. ``side``: pixels of a token's side; areas are in pixels."""

    side: int | None  # None: every picture becomes the same number of tokens
    merge: int  # patches of one token
    min_pixels: int | None
    max_pixels: int | None
    tokens_per_picture: int | None = None
    patches_per_picture: int | None = None
    video_tokens: int | None = None  # largest dummy video

    def tokens(self, width: int, height: int) -> int:
        """Tokens of a picture of this size, after the processor has resized it."""
        if self.side is None:
            return self.tokens_per_picture or 0
        columns, rows = self.grid(width, height)
        return columns * rows

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Merged patches across and down after resizing."""
        side = self.side or 1
        columns, rows = max(1, round(width / side)), max(1, round(height / side))
        area = columns * rows * side * side
        if self.max_pixels is not None and area > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            columns = max(1, math.floor(width / shrink / side))
            rows = max(1, math.floor(height / shrink / side))
        elif self.min_pixels is not None and area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            columns, rows = math.ceil(width * grow / side), math.ceil(height * grow / side)
        return columns, rows

    @property
    def largest_tokens(self) -> int | None:
        """Tokens of the largest picture that the processor makes; None: it has no known limit."""
        if self.side is None:
            return self.tokens_per_picture
        if self.max_pixels is None:
            return None
        return _most_tokens(max(1, self.max_pixels // (self.side * self.side)))

    def patches(self, tokens: int) -> int:
        if self.side is None and self.tokens_per_picture:
            return tokens * (self.patches_per_picture or self.tokens_per_picture) // self.tokens_per_picture
        return tokens * self.merge


def picture_rules(
    model: ModelFacts, max_pixels: int | None, min_pixels: int | None, max_model_len: int | None = None
) -> PictureRules | None:
    """Rules of the model's processor under the launch's pixel limits; None: no tower, or sizes are unknown."""
    vision, processor = model.vision, model.processor
    if vision is None:
        return None
    if vision.tokens_per_image is not None:
        patches = (vision.image_size // vision.patch_size) ** 2 if vision.image_size and vision.patch_size else None
        return PictureRules(
            side=None,
            merge=1,
            min_pixels=None,
            max_pixels=vision.image_size**2 if vision.image_size else None,
            tokens_per_picture=vision.tokens_per_image,
            patches_per_picture=patches,
        )
    if vision.patch_size is None:
        return None
    merge = vision.spatial_merge_size or 1
    side = vision.patch_size * merge
    largest = max_pixels if max_pixels is not None else processor.max_pixels if processor else None
    smallest = min_pixels if min_pixels is not None else processor.min_pixels if processor else None
    rules = PictureRules(side=side, merge=merge * merge, min_pixels=smallest, max_pixels=largest)
    video = _video_tokens(model, rules, max_pixels, max_model_len)
    return PictureRules(side=side, merge=merge * merge, min_pixels=smallest, max_pixels=largest, video_tokens=video)


def text_room(context: int) -> int:
    """Tokens of a context that pictures should leave to prompt and answer: 1,024, or a quarter if that is less."""
    return max(TEXT_AROUND, min(_TEXT_BESIDE, context // 4))


def largest_picture_tokens(model: ModelFacts, max_pixels: int | None) -> int | None:
    rules = picture_rules(model, max_pixels, None)
    return rules.largest_tokens if rules else None


class Profile(Struct, frozen=True, kw_only=True):
    """What the engine encodes at once: in its profile, and at most while it serves."""

    modality: Literal["image", "video"]
    tokens: int  # of one item
    items: int
    pixels: int | None
    budget: int  # tokens that may be encoded in one step, and kept


def profile_of(rules: PictureRules, settings: Settings) -> Profile | None:
    """The dummy items of the memory profile; None: pictures are off, or their size is unknown."""
    tokens = _dummy_tokens(rules, settings)
    pictures_on = settings.image_limit != 0
    if settings.language_model_only or (not pictures_on and settings.video_limit == 0):
        return None
    videos_on = settings.video_limit != 0 and rules.video_tokens is not None
    modality: Literal["image", "video"] = "image"
    if not pictures_on or (videos_on and (rules.video_tokens or 0) > (tokens or 0)):
        tokens, modality = rules.video_tokens, "video"
    if tokens is None or tokens < 1:
        return None
    largest = max(filter(None, (tokens, rules.largest_tokens if pictures_on else 0)))
    budget = max(settings.max_num_batched_tokens, largest)
    limit = 999 if settings.image_limit is None else max(1, settings.image_limit)
    per_prompt = max(1, min(limit, (settings.max_model_len or tokens) // tokens))
    items = max(1, min(budget // tokens, settings.max_num_seqs * per_prompt))
    area = tokens * rules.side * rules.side if rules.side else rules.max_pixels
    return Profile(modality=modality, tokens=tokens, items=items, pixels=area, budget=budget)


def image_plan(rules: PictureRules, settings: Settings) -> ImagePlan | None:
    """The largest picture that processor, context and caps admit, and which everyday sizes are refused."""
    if settings.language_model_only or settings.image_limit == 0:
        return None
    profile = profile_of(rules, settings)
    context = settings.max_model_len
    room = None if context is None else context - TEXT_AROUND
    if rules.side is None:
        return _fixed_plan(rules, profile, room, context)
    area = rules.side * rules.side
    most = rules.largest_tokens
    admitted = most if room is None else room if most is None else min(most, room)
    refused = tuple(_refusals(rules, room, context))
    base = ImagePlan(
        tokens_per_pixel=1 / area,
        profiled_tokens=profile.tokens if profile else None,
        profiled_pixels=profile.pixels if profile else None,
        profiled_modality=profile.modality if profile else None,
        refused=refused,
    )
    if admitted is None or admitted < 1:
        return base
    columns, rows = _squarish(admitted)
    return ImagePlan(
        tokens_per_pixel=base.tokens_per_pixel,
        profiled_tokens=base.profiled_tokens,
        profiled_pixels=base.profiled_pixels,
        profiled_modality=base.profiled_modality,
        largest_pixels=columns * rows * area,
        largest_size=(columns * rules.side, rows * rules.side),
        largest_tokens=columns * rows,
        refused=refused,
    )


def _fixed_plan(rules: PictureRules, profile: Profile | None, room: int | None, context: int | None) -> ImagePlan:
    tokens = rules.tokens_per_picture or 0
    refused: tuple[str, ...] = ()
    if room is not None and tokens > room:
        refused = (f"a picture of any size is {tokens:,} tokens > {context}",)
    side = math.isqrt(rules.max_pixels) if rules.max_pixels else None
    return ImagePlan(
        profiled_tokens=profile.tokens if profile else None,
        profiled_pixels=profile.pixels if profile else None,
        profiled_modality=profile.modality if profile else None,
        largest_pixels=None if refused else rules.max_pixels,
        largest_size=None if refused or side is None else (side, side),
        largest_tokens=None if refused else tokens,
        refused=refused,
    )


def _refusals(rules: PictureRules, room: int | None, context: int | None) -> list[str]:
    if room is None:
        return []
    sentences = []
    for side in reversed(_EVERYDAY_SIDES):
        if rules.max_pixels is not None and side * side > rules.max_pixels:
            continue  # the processor shrinks it first
        tokens = rules.tokens(side, side)
        if tokens <= room:
            break
        over = f"> {context}" if context is not None and tokens > context else f"and the text exceeds {context}"
        sentences.append(f"a {side}x{side} picture is refused: {tokens:,} tokens {over}")
    return sentences


def _dummy_tokens(rules: PictureRules, settings: Settings) -> int | None:
    largest = rules.largest_tokens
    if settings.dummy_image_size is None or rules.side is None:
        return largest
    width, height = settings.dummy_image_size
    tokens = rules.tokens(width, height)
    return tokens if largest is None else min(tokens, largest)


def _most_tokens(limit: int) -> int:
    """Most merged patches within a limit whose rectangle is not longer than 200 to 1; at most 2^24."""
    for tokens in range(min(limit, _MOST_TOKENS), 0, -1):
        short = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
        if tokens // short <= 200 * short:
            return tokens
    return 1


def _squarish(limit: int) -> tuple[int, int]:
    """Columns and rows of the largest rectangle of at most ``limit`` patches, no longer than 4 to 3."""
    best = (1, 1)
    for rows in range(math.isqrt(limit), 0, -1):
        columns = limit // rows
        if columns * 3 > rows * 4:
            columns = rows * 4 // 3
        if columns * rows > best[0] * best[1]:
            best = (columns, rows)
        if rows * rows * 4 // 3 <= best[0] * best[1]:
            break
    return best


def _video_tokens(
    model: ModelFacts, rules: PictureRules, max_pixels: int | None, max_model_len: int | None
) -> int | None:
    """Tokens of the largest dummy video: of two frames, or of up to 14 full pictures on Qwen2-VL and 2.5-VL."""
    vision, processor = model.vision, model.processor
    if vision is None or rules.side is None:
        return None
    kind = vision.model_type or model.model_type or ""
    if kind.startswith(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni")):
        frame_pair = rules.largest_tokens
        if frame_pair is None or max_model_len is None:
            return None
        return frame_pair * max(1, min(max_model_len // frame_pair, _MAX_VIDEO_FRAMES // 2))
    total = max_pixels if max_pixels is not None else processor.video_max_pixels if processor else None
    if total is None:
        return None
    pair = total // (vision.temporal_patch_size or 2)
    return _most_tokens(max(1, pair // (rules.side * rules.side)))
