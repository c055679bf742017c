"""KV cache and recurrent state against public logs, and the laws that every layout obeys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadmaster.core.cache import bytes_for_context, cache_capacity, cache_layout, largest_context, request_blocks
from loadmaster.core.facts import GIB, CacheLayout, ModelFacts, Settings, TextConfig
from tests.core import published
from tests.core.published import facts

ALIGN = {"mamba_cache_mode": "align", "mamba_ssm_cache_dtype": "float32"}
NONE = {"mamba_cache_mode": "none", "mamba_ssm_cache_dtype": "float32"}
FP8 = {"kv_cache_dtype": "fp8", "kv_cache_dtype_bytes": 1}


def settings(version: str, ranks: int, length: int, **changes: object) -> Settings:
    return structs.replace(Settings(version=version, tensor_parallel_size=ranks, max_model_len=length), **changes)


# (config, settings, GiB that the log shows, tokens that it prints). The log rounds to 0.01 GiB.
LOGS = [
    # vLLM 0.24.0, 2 x H200: prefix caching off, so one block of state a request
    (published.QWEN_3_5_35B_A3B, settings("0.24.0", 2, 4096, **NONE), 8.26, 479_817),
    (published.QWEN_3_5_35B_A3B, settings("0.24.0", 2, 4096, **NONE), 7.59, 440_612),
    (published.QWEN_3_5_35B_A3B, settings("0.24.0", 2, 262144, **NONE), 8.05, 831_162),
    (published.QWEN_3_5_35B_A3B, settings("0.24.0", 2, 32768, **NONE), 7.25, 673_148),
    # https://github.com/noonghunna/club-3090/issues/612 (0.24.0, RTX 5090, fp8, prefix caching)
    (published.QWEN_3_5_35B_A3B, settings("0.24.0", 1, 131072, **ALIGN, **FP8), 5.98, 567_978),
    # https://github.com/noonghunna/club-3090/blob/HEAD/BENCHMARKS.md (2 x RTX 5090, fp8)
    (published.QWEN_3_5_35B_A3B, settings("0.27.1", 2, 262144, **ALIGN, **FP8), 17.02, 3_382_054),
    # vLLM 0.30.0, one GPU, bf16 cache
    (published.QWEN_3_5_35B_A3B, settings("0.30.0", 1, 8192, **ALIGN), 0.72, 20_480),
    (published.QWEN_3_5_9B, settings("0.30.0", 1, 8192, **ALIGN), 2.28, 52_503),
    # https://github.com/noonghunna/club-3090/issues/642 (27B, 2 x RTX 3090, fp8 cache, MTP with 3 tokens)
    (
        published.QWEN_3_5_27B,
        settings("0.24.0", 2, 262144, **ALIGN, **FP8, speculative_method="mtp", num_speculative_tokens=3),
        11.05,
        623_873,
    ),
    # public logs of 0.11.2, 0.13.0 (TP 4), 0.10.2, 0.18.1 (TP 4), 0.22.1, 0.26.1.dev
    (published.LLAMA_3_8B, settings("0.17", 1, 1024), 105.97, 868_080),
    (published.LLAMA_3_8B, settings("0.17", 4, 8192), 62.52, 2_048_704),
    (published.QWEN_2_5_3B, settings("0.17", 1, 4096), 15.31, 445_968),
    (published.QWEN_2_5_32B, settings("0.18.1", 4, 32768), 5.24, 85_760),
    (published.QWEN_3_30B_A3B, settings("0.22.1", 1, 8192), 42.54, 464_656),
    (published.QWEN_3_30B_A3B, settings("0.26", 1, 131072), 13.84, 151_216),
    # https://github.com/QwenLM/Qwen3-VL/issues/1684 (0.11.0, TP 8: one of four heads on every rank)
    (published.QWEN_3_VL_235B, settings("0.17", 8, 100000), 35.68, 796_000),
    # https://github.com/vllm-project/vllm/issues/10517
    (published.LLAMA_3_1_8B, settings("0.17", 1, 20000), 3.81, 31_232),
]


@pytest.mark.parametrize(("config", "launch", "gib", "printed"), LOGS)
def test_printed_tokens(config: published.Config, launch: Settings, gib: float, printed: int) -> None:
    layout = cache_layout(facts(config), launch)
    low, high = (cache_capacity(layout, launch, int((gib + rounding) * GIB)).tokens for rounding in (-0.006, 0.006))
    assert low is not None
    assert high is not None
    assert low <= printed <= high


@pytest.mark.parametrize(
    ("blocks", "printed"),
    [
        # https://github.com/noonghunna/club-3090/issues/295, /294: Qwen3.6-27B, 2 x RTX 3090, fp8, MTP with 3 tokens
        (424, 620_944),
        (425, 622_408),
    ],
)
def test_printed_tokens_of_known_block_counts(blocks: int, printed: int) -> None:
    launch = settings("0.22.1", 2, 262144, **ALIGN, **FP8, speculative_method="mtp", num_speculative_tokens=3)
    layout = cache_layout(facts(published.QWEN_3_5_27B), launch)
    assert cache_capacity(layout, launch, blocks * layout.pool_block_bytes).tokens == printed


def test_tokens_printed_until_0_20_0() -> None:
    # https://github.com/noonghunna/club-3090/blob/HEAD/models/qwen3.6-27b/CHANGELOG.md: TP 4, MTP, 6.77x and 483,200
    launch = settings("0.20.0", 4, 262144, **ALIGN, **FP8, speculative_method="mtp", num_speculative_tokens=3)
    layout = cache_layout(facts(published.QWEN_3_5_27B), launch)
    capacity = cache_capacity(layout, launch, 1211 * layout.pool_block_bytes)
    assert capacity.tokens == 483_200
    assert capacity.max_concurrency == pytest.approx(6.77, abs=0.005)
    newer = structs.replace(launch, version="0.20.1")
    assert cache_capacity(
        cache_layout(facts(published.QWEN_3_5_27B), newer), newer, 1211 * layout.pool_block_bytes
    ).tokens == int(1211 / 179 * 262144)


def test_tokens_printed_until_0_20_0_for_a_context_shorter_than_a_block() -> None:
    launch = settings("0.19", 2, 1000, **NONE)
    layout = cache_layout(facts(published.QWEN_3_5_35B_A3B), launch)
    assert cache_capacity(layout, launch, 80 * layout.pool_block_bytes).tokens == 20 * 1000


# ------------------------------------------------------------------------------------------ layouts


def shape(layout: CacheLayout) -> list[tuple[str, int]]:
    return [(group.kind, group.layers) for group in layout.groups]


def test_state_makes_the_block() -> None:
    # the log of 0.24.0: "Setting attention block size to 1056 tokens", "Padding mamba page size by 0.76%"
    layout = cache_layout(facts(published.QWEN_3_5_35B_A3B), settings("0.24.0", 2, 4096, **NONE))
    assert layout.block_tokens == 1056
    assert layout.padding_percent == pytest.approx(0.76, abs=0.005)
    assert shape(layout) == [("state", 10)] * 3 + [("full", 10)]
    assert layout.pool_block_bytes == 10_813_440
    assert layout.exact


@pytest.mark.parametrize(
    ("version", "given", "block"), [("0.19", 512, 1056), ("0.24.0", 512, 1536), ("0.24.0", 2048, 2048)]
)
def test_a_block_size_given_for_a_hybrid_model(version: str, given: int, block: int) -> None:
    launch = settings(version, 2, 4096, **NONE, block_size=given)
    assert cache_layout(facts(published.QWEN_3_5_35B_A3B), launch).block_tokens == block


@pytest.mark.parametrize(
    ("version", "capability", "backend", "mode", "block", "held"),
    [
        ("0.32", (9, 0), "auto", "align", 1056, 2),
        ("0.33", (9, 0), "auto", "align", 1088, 3),
        ("0.33", (12, 0), "auto", "align", 1088, 3),
        ("0.33", (9, 0), "triton", "align", 1056, 2),
        ("0.33", (8, 6), "auto", "align", 1056, 2),
        ("0.33", (9, 0), "auto", "none", 1056, 1),
    ],
)
def test_checkpoint_grid_of_flashinfer(
    version: str, capability: tuple[int, int], backend: str, mode: str, block: int, held: int
) -> None:
    launch = settings(
        version, 2, 4096, mamba_cache_mode=mode, mamba_ssm_cache_dtype="float32",
        compute_capability=capability, gdn_prefill_backend=backend,
    )  # fmt: skip
    layout = cache_layout(facts(published.QWEN_3_5_35B_A3B), launch)
    assert layout.block_tokens == block
    assert layout.groups[0].request_blocks == held


@pytest.mark.parametrize(
    ("version", "capability", "said"),
    [("0.33", None, True), ("0.33", (12, 0), True), ("0.33", (8, 6), False), ("0.32", None, False)],
)
def test_a_kernel_that_cannot_be_told_is_noted(version: str, capability: tuple[int, int] | None, said: bool) -> None:
    launch = settings(version, 2, 4096, **ALIGN, compute_capability=capability)
    notes = cache_layout(facts(published.QWEN_3_5_35B_A3B), launch).notes
    assert any("FlashInfer" in note for note in notes) == said


def test_prediction_head_has_a_cache_of_its_own() -> None:
    launch = settings("0.24.0", 2, 4096, **NONE, speculative_method="mtp", num_speculative_tokens=1)
    layout = cache_layout(facts(published.QWEN_3_5_35B_A3B), launch)
    assert shape(layout) == [("state", 10)] * 3 + [("full", 11)]
    assert any("3 padding layers" in note for note in layout.notes)
    drafted = cache_layout(
        facts(published.LLAMA_3_8B), settings("0.24.0", 1, 4096, speculative_method="eagle3", num_speculative_tokens=3)
    )
    assert any("draft" in note for note in drafted.notes)


def test_sliding_windows_beside_full_attention() -> None:
    model = facts(published.GEMMA_3_27B)
    launch = settings("0.24.0", 1, 32768, max_num_batched_tokens=2048)
    layout = cache_layout(model, launch)
    assert sorted(shape(layout)) == [("full", 10), *[("sliding", 8)] * 2, *[("sliding", 9)] * 4]
    assert layout.block_tokens == 16
    assert layout.pool_block_bytes == 10 * 16 * 2 * 16 * 128 * 2
    window = -(-(1024 - 1 + 2048) // 16) + 1
    assert request_blocks(layout, launch, 32768) == 2048 + 6 * window
    assert request_blocks(layout, launch, 100) == 7 + 6 * (7 + 1)
    later = structs.replace(launch, version="0.26")  # two batches are in flight
    assert request_blocks(layout, later, 32768) == 2048 + 6 * (-(-(1024 - 1 + 4096) // 16) + 1)
    without = structs.replace(later, async_scheduling=False)
    assert request_blocks(layout, without, 32768) == request_blocks(layout, launch, 32768)


def test_without_the_hybrid_manager_every_layer_keeps_all_tokens() -> None:
    launch = settings("0.24.0", 1, 32768, disable_hybrid_kv_cache_manager=True)
    layout = cache_layout(facts(published.GEMMA_3_27B), launch)
    assert shape(layout) == [("full", 62)]
    assert request_blocks(layout, launch, 32768) == 2048


def test_one_window_for_all_layers() -> None:
    text = structs.replace(facts(published.LLAMA_3_8B).text, sliding_window=4096, layer_types=())
    model = ModelFacts(name="mistral", architecture="MistralForCausalLM", text=text)
    assert shape(cache_layout(model, settings("0.24.0", 1, 32768))) == [("sliding", 32)]


@pytest.mark.parametrize("version", ["0.17", "0.18"])
def test_kinds_of_nearly_equal_number_share_the_longer_group(version: str) -> None:
    text = structs.replace(
        facts(published.LLAMA_3_8B).text, num_hidden_layers=55, sliding_window=128,
        layer_types=("sliding_attention",) * 25 + ("full_attention",) * 30,
    )  # fmt: skip
    layout = cache_layout(ModelFacts(name="x", architecture="LlamaForCausalLM", text=text), settings(version, 1, 4096))
    assert [group.layers for group in layout.groups] == [25, 30]
    forty = structs.replace(
        text, num_hidden_layers=59, layer_types=("sliding_attention",) * 25 + ("full_attention",) * 34
    )
    layout = cache_layout(ModelFacts(name="x", architecture="LlamaForCausalLM", text=forty), settings(version, 1, 4096))
    assert len(layout.groups) == (3 if version == "0.17" else 2)


def test_latent_attention_is_whole_on_every_rank() -> None:
    model = facts(published.DEEPSEEK_V3)
    layouts = [cache_layout(model, settings("0.24.0", ranks, 4096)) for ranks in (1, 8)]
    assert layouts[0] == layouts[1]
    assert layouts[0].groups[0].bytes_per_token == (512 + 64) * 2
    assert layouts[0].groups[0].kind == "mla"


@pytest.mark.parametrize(
    ("version", "capability", "changes", "block"),
    [
        ("0.17", (9, 0), {}, 64),
        ("0.17", (8, 0), {}, 16),
        ("0.24.0", (9, 0), {}, 16),
        ("0.24.0", (9, 0), FP8, 64),
        ("0.24.0", (10, 0), {}, 32),
        ("0.24.0", (12, 0), {}, 16),
        ("0.24.0", (10, 0), {"attention_backend": "CUTLASS_MLA"}, 128),
        ("0.24.0", (9, 0), {"block_size": 256}, 256),
    ],
)
def test_blocks_of_latent_attention(
    version: str, capability: tuple[int, int], changes: dict[str, object], block: int
) -> None:
    launch = settings(version, 8, 4096, compute_capability=capability, **changes)
    assert cache_layout(facts(published.DEEPSEEK_V3), launch).block_tokens == block


@pytest.mark.parametrize(
    ("context_ranks", "gib", "printed"),
    [
        # https://github.com/local-inference-lab/rtx6kpro, glm51-v2-full-68b3569f-20260514: 0.20.2, TP 8, fp8
        (1, 19.55, 341_504),
        (2, 19.47, 680_192),
    ],
)
def test_token_index_has_a_cache_in_every_layer(context_ranks: int, gib: float, printed: int) -> None:
    text = structs.replace(
        facts(published.DEEPSEEK_V3).text, num_hidden_layers=78, kv_lora_rank=512, qk_rope_head_dim=64
    )
    config = {"index_topk": 2048, "index_head_dim": 128}
    model = ModelFacts(name="sparse", architecture="GlmMoeDsaForCausalLM", text=text, config=config)
    launch = settings("0.20.2", 8, 202752, **FP8, decode_context_parallel_size=context_ranks)
    layout = cache_layout(model, launch)
    assert layout.block_tokens == 64
    low, high = (cache_capacity(layout, launch, int((gib + rounding) * GIB)).tokens for rounding in (-0.006, 0.006))
    assert low is not None
    assert high is not None
    assert low <= printed <= high


def test_decode_context_parallelism_divides_the_tokens() -> None:
    model, launch = facts(published.DEEPSEEK_V3), settings("0.24.0", 8, 65536, decode_context_parallel_size=8)
    layout = cache_layout(model, launch)
    assert request_blocks(layout, launch, 65536) == 65536 // 8 // layout.block_tokens


@pytest.mark.parametrize(
    ("changes", "per_token"),
    [
        ({}, 4096),
        (FP8, 2048),
        ({"kv_cache_dtype": "int8_per_token_head", "kv_cache_dtype_bytes": 1}, 2048 + 8 * 8),
        ({"kv_cache_dtype": "nvfp4", "kv_cache_dtype_bytes": 0.5}, 2 * 8 * (64 + 8)),
    ],
)
def test_bytes_of_a_token(changes: dict[str, object], per_token: int) -> None:
    layout = cache_layout(facts(published.LLAMA_3_8B), settings("0.33", 1, 4096, **changes))
    assert layout.groups[0].bytes_per_token == per_token
    assert layout.pool_block_bytes == 32 * 16 * per_token


def test_stages_of_a_pipeline() -> None:
    model = facts(published.QWEN_3_5_35B_A3B)
    launch = settings("0.24.0", 1, 4096, **NONE, pipeline_parallel_size=3)
    layouts = [cache_layout(model, launch, rank) for rank in range(3)]
    assert [sum(group.layers for group in layout.groups) for layout in layouts] == [13, 14, 13]
    assert [layout.pool_block_bytes // layout.groups[0].page_bytes for layout in layouts] == [4, 4, 4]
    assert len({layout.block_tokens for layout in layouts}) == 1


def test_number_of_blocks_given() -> None:
    launch = settings("0.33", 1, 4096, num_gpu_blocks_override=512)
    capacity = cache_capacity(cache_layout(facts(published.LLAMA_3_8B), launch), launch, GIB)
    assert (capacity.blocks, capacity.tokens) == (512, 8192)


def test_an_unknown_architecture_is_not_exact() -> None:
    text = facts(published.LLAMA_3_8B).text
    layout = cache_layout(ModelFacts(name="x", architecture="NobodysForCausalLM", text=text), settings("0.33", 1, 4096))
    assert not layout.exact
    assert "NobodysForCausalLM" in layout.notes[0]


def test_a_configuration_without_heads_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="does not say"):
        cache_layout(ModelFacts(name="x", text=TextConfig(num_hidden_layers=2)), settings("0.33", 1, 4096))


# ------------------------------------------------------------------------------------------ laws

CONFIGS = [
    published.LLAMA_3_8B,
    published.GEMMA_3_27B,
    published.QWEN_3_5_35B_A3B,
    published.QWEN_3_5_27B,
    published.DEEPSEEK_V3,
]
VERSIONS = st.sampled_from(["0.17", "0.20.0", "0.20.1", "0.24.0", "0.26", "0.29", "0.33"])


@st.composite
def launches(draw: st.DrawFn) -> tuple[CacheLayout, Settings]:
    model = facts(draw(st.sampled_from(CONFIGS)))
    launch = settings(
        draw(VERSIONS),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, 262144)),
        mamba_cache_mode=draw(st.sampled_from(["none", "align", "all"])),
        max_num_batched_tokens=draw(st.sampled_from([512, 2048, 8192])),
        **draw(st.sampled_from([{}, FP8])),
    )
    return cache_layout(model, launch), launch


@given(launches(), st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_a_longer_request_never_needs_less(case: tuple[CacheLayout, Settings], one: int, other: int) -> None:
    layout, launch = case
    shorter, longer = sorted((one, other))
    assert bytes_for_context(layout, launch, shorter) <= bytes_for_context(layout, launch, longer)


@given(launches(), st.integers(0, 1 << 36), st.integers(0, 1 << 36))
def test_more_bytes_never_hold_less(case: tuple[CacheLayout, Settings], one: int, other: int) -> None:
    layout, launch = case
    less, more = (cache_capacity(layout, launch, size) for size in sorted((one, other)))
    for smaller, larger in (
        (less.blocks, more.blocks),
        (less.tokens, more.tokens),
        (less.max_concurrency, more.max_concurrency),
        (less.largest_model_len, more.largest_model_len),
    ):
        assert smaller is not None
        assert larger is not None
        assert smaller <= larger


@given(launches(), st.integers(0, 1 << 36))
def test_the_longest_context_fits_and_the_next_does_not(case: tuple[CacheLayout, Settings], available: int) -> None:
    layout, launch = case
    longest = largest_context(layout, launch, available)
    if longest:
        assert bytes_for_context(layout, launch, longest) <= available
    if longest < 1 << 26:
        assert bytes_for_context(layout, launch, longest + 1) > available


@given(launches(), st.integers(1, 1 << 36))
def test_blocks_stay_within_the_bytes(case: tuple[CacheLayout, Settings], available: int) -> None:
    layout, launch = case
    capacity = cache_capacity(layout, launch, available)
    assert capacity.blocks is not None
    assert capacity.blocks * layout.pool_block_bytes <= available < (capacity.blocks + 1) * layout.pool_block_bytes
    assert (
        capacity.bytes_per_request_at_max_len
        == request_blocks(layout, launch, launch.max_model_len or 0) * layout.pool_block_bytes
    )
