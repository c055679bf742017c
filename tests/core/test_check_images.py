"""Pictures against the profile, the context and the encoder's cache."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from loadmaster.core.facts import VisionConfig
from tests.launchcases import codes, dense, found, of, vision

SIZED = """--limit-mm-per-prompt '{"image": {"count": 4, "width": 512, "height": 512}}'"""


def test_profile_smaller_than_the_pictures() -> None:
    item = of(found(f"vllm serve m {SIZED}", vision()), "profile-below-images")
    assert (item.severity, item.confidence) == ("warning", "certain")
    assert "262,144" in item.cause and "12,845,056" in item.cause
    assert json.loads(item.fixes[0].argv[1]) == {"max_pixels": 262144}
    assert of(found(f"vllm serve /nowhere/m {SIZED}"), "profile-below-images").confidence == "likely"


def test_profile_with_a_pixel_cap_is_right() -> None:
    capped = f"""vllm serve m {SIZED} --mm-processor-kwargs '{{"max_pixels": 262144}}'"""
    assert "profile-below-images" not in codes(found(capped, vision()))
    loose = capped.replace('"max_pixels": 262144', '"max_pixels": 1048576, "fps": 1')
    item = of(found(loose, vision()), "profile-below-images")
    assert json.loads(item.fixes[0].argv[1]) == {"max_pixels": 262144, "fps": 1}
    assert "profile-below-images" not in codes(found("""vllm serve m --limit-mm-per-prompt '{"image": 4}'""", vision()))


def test_profile_of_models_where_size_does_not_matter() -> None:
    assert "profile-below-images" not in codes(found(f"vllm serve m {SIZED}", dense()))
    tower = VisionConfig(model_type="siglip_vision_model", image_size=896, tokens_per_image=256, patch_size=14)
    fixed = vision(vision=tower, model_type="gemma3")
    assert of(found(f"vllm serve m {SIZED}", fixed), "profile-below-images").severity == "note"
    assert "profile-below-images" not in codes(found(f"vllm serve m {SIZED} --language-model-only", vision()))


def test_skipped_profile_is_a_note() -> None:
    line = "vllm serve m --skip-mm-profiling"
    assert of(found(line, vision()), "profile-below-images").severity == "note"
    none = line + """ --limit-mm-per-prompt '{"image": 0, "video": 0}'"""
    assert "profile-below-images" not in codes(found(none, vision()))


def test_picture_longer_than_the_context() -> None:
    large = of(found("vllm serve m --max-model-len 4096", vision()), "image-tokens-exceed-context")
    assert large.severity == "warning" and "16,384 tokens" in large.cause
    assert large.cause.endswith("The largest that is served is 1960x1624 (4,060 tokens).")
    warning = of(found("vllm serve m --max-model-len 1024", vision()), "image-tokens-exceed-context")
    assert warning.severity == "warning" and "1024 x 1024" in warning.cause
    none = of(found("vllm serve m --max-model-len 32", vision()), "image-tokens-exceed-context")
    assert none.severity == "warning" and none.cause.endswith("none is served.")
    assert "image-tokens-exceed-context" not in codes(found("vllm serve m --max-model-len 32768", vision()))
    assert "image-tokens-exceed-context" not in codes(found("vllm serve m --max-model-len 4096", dense()))


def test_the_cap_of_the_fix_serves_every_picture() -> None:
    first = of(found("vllm serve m --max-model-len 4096", vision()), "image-tokens-exceed-context")
    flag, value = first.fixes[0].argv
    assert json.loads(value)["max_pixels"] == (4096 - 1024) * 28 * 28
    again = found(f"vllm serve m --max-model-len 4096 {flag} '{value}'", vision())
    assert "image-tokens-exceed-context" not in codes(again)


def test_several_pictures_together() -> None:
    line = """vllm serve m --max-model-len 32768 --limit-mm-per-prompt '{"image": 4}'"""
    item = of(found(line, vision()), "image-tokens-exceed-context")
    assert item.severity == "note" and "65,536 tokens together" in item.cause
    assert "image-tokens-exceed-context" not in codes(found(line.replace("32768", "65600"), vision()))


def test_picture_that_must_pass_in_one_step() -> None:
    line = "vllm serve m --disable-chunked-mm-input --max-num-batched-tokens 8192"
    item = of(found(line, vision()), "encoder-cache-too-small")
    assert "16,384" in item.cause and "8,192" in item.cause
    assert "encoder-cache-too-small" not in codes(found(line.replace("8192", "16384"), vision()))
    assert "encoder-cache-too-small" not in codes(found(line.replace("--disable-chunked-mm-input ", ""), vision()))


def test_a_cap_that_is_a_side() -> None:
    line = """vllm serve m --mm-processor-kwargs '{"max_pixels": 1024}'"""
    item = of(found(line, vision()), "flag-value-invalid")
    assert json.loads(item.fixes[0].argv[1]) == {"max_pixels": 1048576}
    assert "flag-value-invalid" not in codes(found(line.replace("1024", "1048576"), vision()))


def test_unknown_limits_say_nothing() -> None:
    unknown = vision()
    assert unknown.processor is not None
    unknown = replace(unknown, processor=replace(unknown.processor, max_pixels=None))
    assert "image-tokens-exceed-context" not in codes(found("vllm serve m --max-model-len 4096", unknown))


def test_caps_leave_room_for_text() -> None:
    line = """vllm serve m --max-model-len 8192 --limit-mm-per-prompt '{"image": 10}'"""
    value = of(found(line, vision()), "image-tokens-exceed-context").fixes[0].argv[1]
    assert json.loads(value)["max_pixels"] == (8192 - 1024) // 10 * 28 * 28
    short = of(found("vllm serve m --max-model-len 1024", vision()), "image-tokens-exceed-context")
    assert json.loads(short.fixes[0].argv[1])["max_pixels"] == (1024 - 256) * 28 * 28


@pytest.mark.parametrize("value", ["-5", '"1M"', "0", "1.5", "true", "[1]"])
def test_areas_are_whole_numbers(value: str) -> None:
    item = of(
        found(f"""vllm serve m --mm-processor-kwargs '{{"max_pixels": {value}}}'""", vision()), "flag-value-invalid"
    )
    assert item.severity == "error" and "max_pixels" in item.cause


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("maxpixels", "max_pixels"),
        ("max_pixel", "max_pixels"),
        ("Max-Pixels", "max_pixels"),
        ("num_frame", "num_frames"),
    ],
)
def test_misspelt_names(written: str, meant: str) -> None:
    line = f"""vllm serve m --mm-processor-kwargs '{{"{written}": 1003520}}'"""
    item = of(found(line, vision()), "flag-value-invalid")
    assert item.severity == "warning" and json.loads(item.fixes[0].argv[1]) == {meant: 1003520}


@pytest.mark.parametrize(
    "kwargs", ['{"max_pixels": 1003520, "fps": 2}', '{"hd_num": 12}', '{"size": {"longest_edge": 5}}']
)
def test_other_names_are_left_alone(kwargs: str) -> None:
    items = found(f"vllm serve m --mm-processor-kwargs '{kwargs}'", vision())
    assert not any("No processor" in item.cause or "is an area in" in item.cause for item in items)
