"""What a picture may be, and the error of one that is not."""

from __future__ import annotations

import msgspec

from loadmaster.service import errors


class ImageError(errors.ImageError):
    """A picture that cannot be passed on; an OpenAI error object of status ``status`` is made of it.

    ``code`` is one of OpenAI's codes where there is one (``image_too_large``, ``invalid_base64_image``, ...);
    ``message`` is a sentence for the person who sent the picture; ``param`` is where it stands in the request.
    """

    def __init__(self, code: str, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(code, message)
        self.status = status
        self.param = param


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one service for the pictures in a request.

    ``max_pixels``: larger ones are scaled down; None: size is left alone. ``min_side``: pixels of the shorter side,
    after scaling; by default 4, since image processors guess which axis holds the colours by its length, 1 or 3.
    ``max_aspect_ratio``: longer to shorter side; by default 200, the most that Qwen's image processors take.
    ``max_images``: the newest of a conversation that are kept; None: all; 0: pictures are refused.
    ``max_bytes``: of one encoded picture as it comes. ``max_source_pixels``: of one picture before scaling; more is
    refused before it is decoded. ``timeout_s``: decoding and scaling of one picture, and its download.
    ``engine_formats``: Pillow's names of the formats that reach the engine as they come; by default the two that
    vLLM and llama.cpp both read.
    """

    max_pixels: int | None = None
    min_side: int = 4
    max_aspect_ratio: float = 200.0
    max_images: int | None = None
    max_bytes: int = 32 << 20
    max_source_pixels: int = 64_000_000
    timeout_s: float = 10.0
    allow_urls: bool = False
    engine_formats: tuple[str, ...] = ("JPEG", "PNG")

    def __post_init__(self) -> None:
        if self.max_pixels is not None and self.max_pixels < 1:
            raise ValueError("max_pixels must be at least 1, or None")
        if self.max_images is not None and self.max_images < 0:
            raise ValueError("max_images must be at least 0, or None")
        for name in ("min_side", "max_bytes", "max_source_pixels", "timeout_s", "max_aspect_ratio"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0")
