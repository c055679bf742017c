"""Pictures that are made here are pictures."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from loadmaster.engines.png import data_url, gradient


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (640, 361)])
def test_any_size_is_a_picture(size: tuple[int, int]) -> None:
    with Image.open(io.BytesIO(gradient(*size))) as picture:
        picture.load()
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", size)


def test_colours_run_over_the_whole_picture() -> None:
    with Image.open(io.BytesIO(gradient(50, 40))) as picture:
        corners = [picture.getpixel(place) for place in ((0, 0), (49, 0), (0, 39), (49, 39))]
    assert corners == [(0, 0, 96), (255, 0, 96), (0, 255, 96), (255, 255, 96)]


def test_no_area() -> None:
    with pytest.raises(ValueError, match="no area"):
        gradient(0, 5)


def test_data_url() -> None:
    url = data_url(b"abc")
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == b"abc"
