"""What the allocator grows by: pictures one after the other, segments that expand."""

from __future__ import annotations

from msgspec import structs

from loadmaster.core.activations import growth_after, replay
from loadmaster.core.facts import MIB, EngineFacts
from loadmaster.core.sheet import plan_of
from tests.core.launches import DENSE_9B, MOE_35B, TEXT_8B, cards, launch, plan


def test_pictures_that_grow_leave_more_behind_than_the_largest_alone() -> None:
    flags = "--tensor-parallel-size 2 --max-num-seqs 16 --max-num-batched-tokens 2048"
    whole = plan_of(MOE_35B, cards(139.8, 139.8), launch(flags), EngineFacts("vllm", "0.24.0"))
    load = whole.ranks[0].load
    full = load.serving_patches
    alone, series = growth_after(load, [full]), growth_after(load, [full // 4, full // 2, full])
    assert replay(load).vision_growth_alone == alone < series
    assert growth_after(load, [full, full // 2, full // 4]) - alone < series - alone
    assert growth_after(load, []) == 0


def test_expandable_segments_grow_less_and_pin_a_page_for_each_rearranged_layer() -> None:
    flags, card = "--max-num-seqs 64 --max-num-batched-tokens 2048", cards(139.8)
    engine = EngineFacts("vllm", "0.24.0")
    usual = launch(flags)
    expandable = structs.replace(usual, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    for model, pages in ((MOE_35B, 40), (DENSE_9B, 0)):
        before, after = (plan_of(model, card, given, engine).ranks[0] for given in (usual, expandable))
        assert before.vision is not None and after.vision is not None
        assert after.vision.low < after.vision.bytes < before.vision.bytes
        assert after.slack.bytes - before.slack.bytes == pages * 20 * MIB


def test_a_note_about_the_cache_is_said_once() -> None:
    sheet = plan(MOE_35B, cards(24, 24), "--tensor-parallel-size 2")
    assert sheet.kv_cache is not None
    assert not set(sheet.kv_cache.notes) & set(sheet.notes)


def test_layers_that_only_feed_forward_cache_nothing() -> None:
    engine, card = EngineFacts("vllm", "0.24.0"), cards(139.8)
    half = tuple("full_attention" if at % 2 else "mlp" for at in range(TEXT_8B.text.num_hidden_layers or 0))
    lighter = structs.replace(TEXT_8B, text=structs.replace(TEXT_8B.text, layer_types=half))
    whole, part = (plan_of(model, card, launch(""), engine).layouts[0] for model in (TEXT_8B, lighter))
    assert part.pool_block_bytes * 2 == whole.pool_block_bytes
