"""--num-gpu-blocks-override: the number of blocks decides what fits, from 0.20.1 on alone."""

import pytest

from tests.core.launches import TEXT_8B, cards, plan


@pytest.mark.parametrize("version", ["0.17.0", "0.20.0", "0.20.1", "0.24.0", "0.33.0"])
def test_too_few_blocks_do_not_fit(version: str) -> None:
    sheet = plan(TEXT_8B, cards(48), "--num-gpu-blocks-override 100 --max-model-len 8192", version)
    assert sheet.fits is False
    assert sheet.kv_cache is not None
    assert sheet.kv_cache.largest_model_len in (1600, 1584)  # 100 blocks of 16, from 0.29 on one is kept back
    finding = sheet.findings[0]
    assert (finding.code, finding.severity) == ("seq-too-long-for-memory", "error")
    assert finding.fixes[0].remove == ("--num-gpu-blocks-override",)
    assert finding.fixes[0].replanned
    kept = plan(TEXT_8B, cards(48), "--num-gpu-blocks-override 600 --max-model-len 8192", version)
    assert kept.fits is True


def test_more_blocks_than_memory_exceed_the_card() -> None:
    for version in ("0.17.0", "0.33.0"):
        sheet = plan(TEXT_8B, cards(24), "--num-gpu-blocks-override 100000 --max-model-len 8192", version)
        assert sheet.fits is False
        assert max(sheet.gpus[0].peak_low_bytes.values()) > sheet.gpus[0].total_bytes


def test_before_0_20_1_what_is_left_is_asked_too() -> None:
    from loadmaster.core.cache import cache_layout, cached_bytes
    from loadmaster.core.facts import Settings

    for version, given in (("0.20.0", False), ("0.20.1", True)):
        settings = Settings(version=version, num_gpu_blocks_override=1000, max_model_len=8192)
        layout = cache_layout(TEXT_8B, settings)
        held = 1000 * layout.pool_block_bytes
        assert cached_bytes(layout, settings, 2 * held) == held
        assert cached_bytes(layout, settings, held // 2) == (held if given else held // 2)
