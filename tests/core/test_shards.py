"""Weights per rank against public logs, and the laws that every split obeys."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadmaster.core.facts import GIB, Amount, ModelFacts, Quantization, RankWeights, Settings, TensorGroup, TextConfig
from loadmaster.core.shards import shard_weights
from loadmaster.core.tensors import synthesise
from tests.core import published
from tests.core.published import facts


def settings(version: str, ranks: int = 1, **changes: object) -> Settings:
    return structs.replace(Settings(version=version, tensor_parallel_size=ranks), **changes)


def with_headers(model: ModelFacts) -> ModelFacts:
    return structs.replace(model, format="safetensors", tensors=synthesise(model))


# "Model loading took N GiB". The engines of the older logs load as 0.17 does.
@pytest.mark.parametrize(
    ("config", "launch", "logged"),
    [
        # https://github.com/vllm-project/vllm/issues/10517 (0.6, 1 x RTX 3090)
        (published.LLAMA_3_1_8B, settings("0.17"), 14.9888),
        # public logs of 0.11.2 (1 GPU) and 0.13.0 (TP 4)
        (published.LLAMA_3_8B, settings("0.17"), 14.9596),
        (published.LLAMA_3_8B, settings("0.17", 4), 3.7418),
        # public logs of 0.10.2 (1 GPU, tied embeddings) and 0.18.1 (TP 4)
        (published.QWEN_2_5_3B, settings("0.17"), 5.7916),
        (published.QWEN_2_5_32B, settings("0.18.1", 4), 15.39),
        # public logs of 0.26.1.dev (bf16) and 0.22.1 (bf16 checkpoint, --quantization fp8)
        (published.QWEN_3_30B_A3B, settings("0.26"), 56.93),
        (published.QWEN_3_30B_A3B, settings("0.22.1", quantization="fp8"), 29.08),
        # https://github.com/vllm-project/vllm/pull/34051
        (published.QWEN_3_VL_2B, settings("0.17"), 4.24),
        # https://github.com/gpustack/gpustack/issues/2489
        (published.QWEN_2_5_VL_3B, settings("0.17"), 7.1557),
        # https://github.com/QwenLM/Qwen3-VL/issues/1057 (0.8.2, 1 x H100)
        (published.QWEN_2_5_VL_7B, settings("0.17"), 15.6271),
        # https://github.com/vllm-project/vllm/issues/16199 (0.8.3, 1 x 24 GB, AutoAWQ group 32)
        (published.GEMMA_3_27B_AWQ, settings("0.17", dtype="float16"), 17.611),
        # vLLM 0.30.0, language model only
        (published.QWEN_3_5_9B, settings("0.30.0", language_model_only=True), 16.80),
        (published.QWEN_3_5_35B_GPTQ, settings("0.30.0", language_model_only=True), 20.27),
        # vLLM 0.24.0, 2 x H200, compressed-tensors 4 bits group 32: tower divided, tower whole
        (published.QWEN_3_5_35B_W4, settings("0.24.0", 2), 11.30),
        (published.QWEN_3_5_35B_W4, settings("0.24.0", 2, mm_encoder_tp_mode="data"), 11.71),
    ],
)
def test_public_logs(config: published.Config, launch: Settings, logged: float) -> None:
    for rank in shard_weights(facts(config), launch):
        assert rank.total / GIB == pytest.approx(logged, rel=0.001)


def exact(weights: RankWeights) -> int:
    """Bytes of the tensors alone: no tables, buffers or allocator blocks."""
    return sum(
        size
        for part, size in weights.detail.items()
        if part not in ("rope caches", "allocator rounding", "deepstack buffer", "lora slots")
    )


# ------------------------------------------------------------------------------------------ laws of the split

DIVIDED = {"experts", "mlp", "embeddings", "lm_head"}
MODELS = [
    published.LLAMA_3_8B,
    published.QWEN_3_30B_A3B,
    published.QWEN_3_VL_2B,
    published.QWEN_2_5_VL_7B,
    published.GEMMA_3_27B_AWQ,
    published.QWEN_3_5_9B,
    published.QWEN_3_5_35B_GPTQ,
    published.QWEN_3_5_35B_W4,
    published.DEEPSEEK_V3,
]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config["architectures"][0])
@given(ranks=st.sampled_from([2, 4]), version=st.sampled_from(["0.17", "0.24.0", "0.33"]))
def test_ranks_hold_the_whole_of_what_is_divided(config: published.Config, ranks: int, version: str) -> None:
    model = facts(config)
    one = shard_weights(model, settings(version))[0].detail
    many = shard_weights(model, settings(version, ranks))
    assert len(many) == ranks
    for part in DIVIDED & one.keys():
        together = sum(rank.detail[part] for rank in many)
        padding = 64 * (model.text.hidden_size or 0) * 2
        assert one[part] <= together <= one[part] + padding


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config["architectures"][0])
def test_norms_and_routers_are_counted_on_every_rank(config: published.Config) -> None:
    model = facts(config)
    one, two = (shard_weights(model, settings("0.24.0", ranks))[0].detail for ranks in (1, 2))
    assert one["norms"] == two["norms"]
    if "rope caches" in one:
        assert one["rope caches"] == two["rope caches"]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config["architectures"][0])
@given(stages=st.integers(1, 5), ranks=st.sampled_from([1, 2]))
def test_stages_add_up_to_the_whole(config: published.Config, stages: int, ranks: int) -> None:
    model = facts(config)
    whole = shard_weights(model, settings("0.33", ranks))[0]
    parts = shard_weights(model, settings("0.33", ranks, pipeline_parallel_size=stages))
    assert [(rank.pipeline_rank, rank.tensor_rank) for rank in parts] == [
        (stage, rank) for stage in range(stages) for rank in range(ranks)
    ]
    for part, size in whole.detail.items():
        if part in ("rope caches", "allocator rounding", "embeddings"):
            continue
        assert sum(rank.detail.get(part, 0) for rank in parts if rank.tensor_rank == 0) == size
    assert sum(exact(rank) for rank in parts if rank.tensor_rank == 0) >= exact(whole)


@given(
    experts=st.sampled_from([128, 256]),
    ranks=st.sampled_from([2, 4, 8]),
    replicas=st.sampled_from([1, 2]),
)
def test_experts_take_the_same_bytes_whole_or_divided(experts: int, ranks: int, replicas: int) -> None:
    model = facts(published.qwen_3_5(2048, 8, 16, 2, 32, experts=experts, moe=512))
    by_size = shard_weights(model, settings("0.33", ranks, data_parallel_size=replicas))
    whole = shard_weights(model, settings("0.33", ranks, data_parallel_size=replicas, expert_parallel=True))
    assert [rank.detail["experts"] for rank in by_size] == [rank.detail["experts"] for rank in whole]


def test_experts_that_do_not_divide_go_to_the_first_ranks() -> None:
    model = facts(published.qwen_3_5(2048, 4, 15, 3, 30, experts=128, moe=384))
    whole = shard_weights(model, settings("0.33", 3, expert_parallel=True))
    sizes = [rank.detail["experts"] for rank in whole]
    one = shard_weights(model, settings("0.33"))[0].detail["experts"]
    assert sizes == [one * 43 // 128, one * 43 // 128, one * 42 // 128]
    assert sum(sizes) == one


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config["architectures"][0])
def test_components_add_up_to_the_parts(config: published.Config) -> None:
    for rank in shard_weights(facts(config), settings("0.33", 2, pipeline_parallel_size=2)):
        assert sum(amount.bytes for amount in rank.components.values()) == pytest.approx(
            sum(rank.detail.values()), abs=64
        )
        assert all(amount.low <= amount.bytes <= amount.high for amount in rank.components.values())


# ------------------------------------------------------------------------------------------ single rules


def test_key_value_heads_are_replicated_when_there_are_fewer_than_ranks() -> None:
    model = with_headers(facts(published.QWEN_3_5_35B_A3B))  # 2 key/value heads of 256, 10 full attention layers
    two, eight = (shard_weights(model, settings("0.33", ranks))[0].detail["attention"] for ranks in (2, 8))
    query_and_output = 10 * (16 * 256 * 2 + 16 * 256) * 2048 * 2
    one_head_each = 10 * 2 * 256 * 2048 * 2
    norms = 10 * 2 * 256 * 2
    assert two == query_and_output // 2 + one_head_each + norms
    assert eight == query_and_output // 8 + one_head_each + norms


def test_tied_embeddings_are_held_once_and_by_both_ends_of_the_pipeline() -> None:
    tied, untied = facts(published.QWEN_2_5_3B), facts({**published.QWEN_2_5_3B, "tie_word_embeddings": False})
    assert "lm_head" not in shard_weights(tied, settings("0.33"))[0].detail
    assert shard_weights(untied, settings("0.33"))[0].detail["lm_head"] == 151936 * 2048 * 2
    ends = [
        rank.detail.get("embeddings", 0) for rank in shard_weights(tied, settings("0.33", pipeline_parallel_size=3))
    ]
    assert ends == [151936 * 2048 * 2, 0, 151936 * 2048 * 2]
    first = [
        rank.detail.get("embeddings", 0) for rank in shard_weights(untied, settings("0.33", pipeline_parallel_size=2))
    ]
    assert first == [151936 * 2048 * 2, 0]


def test_a_head_that_the_files_lack_is_allocated_all_the_same() -> None:
    model = with_headers(facts(published.LLAMA_3_8B))
    without = structs.replace(model, tensors=tuple(group for group in model.tensors if "lm_head" not in group.name))
    assert shard_weights(without, settings("0.33"))[0].detail["lm_head"] == 128256 * 4096 * 2


def test_vocabulary_rows_are_padded_to_64() -> None:
    model = facts({**published.LLAMA_3_8B, "vocab_size": 128257})
    assert shard_weights(model, settings("0.33", 4))[0].detail["embeddings"] == 128320 // 4 * 4096 * 2


def test_prediction_head_is_loaded_only_for_speculation() -> None:
    for config in (published.QWEN_3_5_35B_A3B, published.DEEPSEEK_V3):
        plain = shard_weights(facts(config), settings("0.33", 8))[0]
        drafting = shard_weights(
            facts(config), settings("0.33", 8, speculative_method="mtp", num_speculative_tokens=1)
        )[0]
        assert "mtp" not in plain.detail
        assert drafting.detail["mtp"] > 0
        assert drafting.detail["embeddings"] == plain.detail["embeddings"]
    # 0.845 billion parameters of the 35B's head, half of them on each of two cards
    rank = shard_weights(
        facts(published.QWEN_3_5_35B_A3B), settings("0.33", 2, speculative_method="mtp", num_speculative_tokens=3)
    )[0]
    assert rank.detail["mtp"] / GIB == pytest.approx(0.79, abs=0.005)


def test_speculation_without_what_it_needs_is_said() -> None:
    model = facts(published.LLAMA_3_8B)
    for method, word in (("mtp", "no prediction head"), ("eagle3", "draft model (eagle3)")):
        launch = settings("0.33", speculative_method=method, num_speculative_tokens=2)
        assert any(word in note for note in shard_weights(model, launch)[0].notes)
    for config in (published.QWEN_3_5_9B, published.DEEPSEEK_V3):
        launch = settings("0.33", speculative_method="mtp", num_speculative_tokens=2)
        assert shard_weights(facts(config), launch)[0].notes == ()
    assert shard_weights(model, settings("0.33", speculative_method="ngram", num_speculative_tokens=2))[0].notes == ()


def test_expandable_segments_leave_nothing_over() -> None:
    model = facts(published.QWEN_2_5_VL_7B)
    assert "allocator rounding" in shard_weights(model, settings("0.33"))[0].detail
    assert "allocator rounding" not in shard_weights(model, settings("0.33", expandable_segments=True))[0].detail


def test_shared_experts_are_whole_under_sequence_parallel_experts() -> None:
    model = facts(published.QWEN_3_5_35B_A3B)
    divided = shard_weights(model, settings("0.33", 2, data_parallel_size=2))[0].detail["shared expert and router"]
    whole = shard_weights(model, settings("0.33", 2, data_parallel_size=2, expert_parallel=True))[0]
    assert whole.detail["shared expert and router"] - divided == 40 * 3 * 2048 * 512 * 2 // 2


def test_tower_left_out() -> None:
    model = facts(published.QWEN_3_5_9B)
    assert "weights.vision" not in shard_weights(model, settings("0.33", language_model_only=True))[0].components
    assert "weights.vision" not in shard_weights(model, settings("0.33", image_limit=0, video_limit=0))[0].components
    assert "weights.vision" in shard_weights(model, settings("0.33", image_limit=0))[0].components


def test_tower_on_later_stages_until_0_33() -> None:
    model = facts(published.QWEN_3_5_9B)
    for version, expected in (("0.32", [True, True]), ("0.33", [True, False])):
        ranks = shard_weights(model, settings(version, pipeline_parallel_size=2))
        assert ["weights.vision" in rank.components for rank in ranks] == expected


@pytest.mark.parametrize(("version", "mib"), [("0.31", 128), ("0.32", 32)])
def test_rope_table_of_multimodal_positions(version: str, mib: int) -> None:
    assert shard_weights(facts(published.QWEN_3_5_9B), settings(version))[0].detail["rope caches"] == mib << 20


def test_small_gated_projections_are_whole_with_gptq_from_0_22() -> None:
    model = facts(published.QWEN_3_5_35B_GPTQ)
    old, new = (
        shard_weights(model, settings(version, 4))[0].detail["linear attention"] for version in ("0.21", "0.22")
    )
    assert new - old == 30 * 2 * 32 * 2048 * 2 * 3 // 4


def test_dtype_conversion() -> None:
    single = facts({**published.LLAMA_3_8B, "torch_dtype": "float32"})
    assert exact(shard_weights(single, settings("0.33", dtype="bfloat16"))[0]) * 2 == exact(
        shard_weights(single, settings("0.33", dtype="float32"))[0]
    )
    half = with_headers(facts({**published.LLAMA_3_8B, "torch_dtype": "float16"}))
    assert exact(shard_weights(half, settings("0.33"))[0]) == half_bytes(half)


def half_bytes(model: ModelFacts) -> int:
    return sum(group.total_bytes for group in model.tensors)


def test_state_parameters_stay_in_32_bits() -> None:
    model = facts(published.QWEN_3_5_9B)
    detail = shard_weights(model, settings("0.33", dtype="float16"))[0].detail
    assert detail == shard_weights(model, settings("0.33"))[0].detail


def test_quantised_latent_projection_keeps_a_dequantised_copy() -> None:
    quantised = facts(published.DEEPSEEK_V3)
    plain = facts({key: value for key, value in published.DEEPSEEK_V3.items() if key != "quantization_config"})
    one, eight = (shard_weights(quantised, settings("0.33", ranks))[0].detail["attention"] for ranks in (1, 8))
    per_layer = 512 * 128 * 256
    scales = 61 * sum(-(-out // 128) * -(-into // 128) * 4 for out, into in DEEPSEEK_LINEARS)
    weights = 61 * sum(out * into for out, into in DEEPSEEK_LINEARS)
    norms = 61 * (1536 + 512) * 2
    assert one == weights + scales + norms + 61 * per_layer * 2
    assert eight < one
    assert shard_weights(plain, settings("0.33"))[0].detail["attention"] == 2 * weights + norms


DEEPSEEK_LINEARS = [(1536, 7168), (128 * 192, 1536), (576, 7168), (128 * 256, 512), (7168, 128 * 128)]


def test_block_scales_are_widened_on_cards_without_fp8_units() -> None:
    model = facts(published.DEEPSEEK_V3)
    modern = shard_weights(model, settings("0.33", 8, compute_capability=(9, 0)))[0].detail["mlp"]
    ampere = shard_weights(model, settings("0.33", 8, compute_capability=(8, 6)))[0].detail["mlp"]
    parameters = 3 * 3 * 7168 * 18432 // 8
    assert modern == parameters + parameters // 128 // 128 * 4
    assert ampere == parameters + parameters // 128 * 2


def test_gptq_zero_points_of_linear_layers_are_freed_and_those_of_experts_kept() -> None:
    group = {"method": "gptq", "bits": 4, "group_size": 128}
    expert = TensorGroup("model.layers.{l}.mlp.experts.{e}.down_proj.qzeros", "I32", (4, 256), 4096, 8, {0: 8})
    linear = TensorGroup("model.layers.{l}.mlp.down_proj.qzeros", "I32", (4, 256), 4096, 1, {0: 1})
    embedding = TensorGroup("model.embed_tokens.weight", "BF16", (64, 64), 8192, 1)
    model = ModelFacts(
        name="two layers",
        architecture="Qwen3MoeForCausalLM",
        text=TextConfig(num_hidden_layers=1, num_experts=8, tie_word_embeddings=True),
        quantization=Quantization(**group),  # type: ignore[arg-type]
        tensors=(expert, linear, embedding),
    )
    assert shard_weights(model, settings("0.26"))[0].detail == {"experts": 8 * 2048, "embeddings": 8192}
    assert shard_weights(model, settings("0.27"))[0].detail == {"experts": 8 * 4096, "embeddings": 8192}


def test_activation_order_keeps_the_order_and_all_scales_of_row_parallel_layers() -> None:
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    config = {**published.LLAMA_3_8B, "num_hidden_layers": 1}
    plain = facts({**config, "quantization_config": {**quantised, "desc_act": False}})
    ordered = facts({**config, "quantization_config": {**quantised, "desc_act": True}})
    for ranks in (1, 2):
        without, with_order = (
            shard_weights(model, settings("0.33", ranks))[0].detail["mlp"] for model in (plain, ordered)
        )
        order = 2 * 4 * (4096 + 4096 + 14336 // ranks)
        scales = 14336 // 128 * 4096 * 2
        assert with_order - without == order + scales - scales // ranks


def test_cpu_offload_takes_decoder_layers_out() -> None:
    model = facts(published.LLAMA_3_8B)
    plain = shard_weights(model, settings("0.33"))[0]
    offloaded = shard_weights(model, settings("0.33", cpu_offload_bytes=4 * GIB))[0]
    everything = shard_weights(model, settings("0.33", cpu_offload_bytes=400 * GIB))[0]
    assert plain.total - offloaded.total == 4 * GIB
    assert everything.total >= 2 * 128256 * 4096 * 2
    assert offloaded.notes


def test_adapter_slots_are_assumed_with_bounds() -> None:
    weights = shard_weights(facts(published.LLAMA_3_8B), settings("0.33", enable_lora=True, max_lora_rank=64))[0]
    other = weights.components["weights.other"]
    assert other.basis == "assumed"
    assert other.low < other.bytes < other.high
    # seven linear layers a decoder layer, rank 64, both matrices in 16 bits
    widths = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    assert weights.detail["lora slots"] == 32 * sum(out + into for out, into in widths) * 64 * 2


def test_largest_layer_that_is_repacked() -> None:
    model = facts(published.QWEN_3_5_35B_W4)
    assert shard_weights(model, settings("0.24.0", 2))[0].largest_transient == 128 << 20  # gate and up of 256 experts
    assert shard_weights(facts(published.LLAMA_3_8B), settings("0.24.0"))[0].largest_transient == 0


# ------------------------------------------------------------------------------------------ what is not known


def unknown_model() -> ModelFacts:
    layers = dict.fromkeys(range(4), 1)
    return ModelFacts(
        name="unknown",
        architecture="NobodysForCausalLM",
        text=TextConfig(num_hidden_layers=4, max_position_embeddings=4096, head_dim=64),
        tensors=(
            TensorGroup("model.embed_tokens.weight", "BF16", (1024, 512), 1 << 20, 1),
            TensorGroup("lm_head.weight", "BF16", (1024, 512), 1 << 20, 1),
            TensorGroup("model.layers.{l}.mixer.strange.weight", "BF16", (512, 512), 512 << 10, 4, layers),
            TensorGroup("model.layers.{l}.mixer.norm.weight", "BF16", (512,), 1024, 4, layers),
        ),
    )


def test_an_unknown_architecture_has_wide_bounds_and_says_so() -> None:
    weights = shard_weights(unknown_model(), settings("0.33", 2))[0]
    language = weights.components["weights.language"]
    assert language.basis == "assumed"
    assert language.bytes == (1 << 20) + (1 << 20) + 4096
    assert language.low < language.bytes < language.high
    assert language.high == (1 << 20) + 4 * (512 << 10) + 4096
    assert "NobodysForCausalLM" in weights.notes[0]


def test_a_model_without_tensors_is_said_to_be_unknown() -> None:
    weights = shard_weights(ModelFacts(name="nothing", architecture="NobodysForCausalLM"), settings("0.33"))[0]
    assert weights.components == {}
    assert "unknown" in weights.notes[0]


def test_a_model_known_by_its_size_alone() -> None:
    model = ModelFacts(name="size", architecture="NobodysForCausalLM", weight_bytes=8 * GIB)
    amount = shard_weights(model, settings("0.33", 2))[0].components["weights.language"]
    assert amount == Amount(4 * GIB, 0, 8 * GIB, "assumed", amount.note)


def test_basis() -> None:
    model = facts(published.LLAMA_3_8B)
    assert shard_weights(model, settings("0.33"))[0].components["weights.language"].basis == "computed"
    assert shard_weights(with_headers(model), settings("0.33"))[0].components["weights.language"].basis == "read"


def test_a_layer_partition_that_does_not_fit_is_named() -> None:
    launch = settings("0.33", pipeline_parallel_size=2, pipeline_layer_partition=(10, 10))
    ranks = shard_weights(facts(published.LLAMA_3_8B), launch)
    assert len(ranks) == 2
    assert any("partition" in note for note in ranks[0].notes)


def test_a_large_checkpoint_is_split_in_milliseconds() -> None:
    model = with_headers(facts(published.DEEPSEEK_V3))
    launch = settings("0.33", 8, expert_parallel=True)
    shard_weights(model, launch)
    start = time.perf_counter()
    shard_weights(model, launch)
    assert time.perf_counter() - start < 0.1


NAMES = st.sampled_from(
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "lm_head.qweight",
        "model.layers.{l}.self_attn.q_proj.weight",
        "model.layers.{l}.self_attn.k_proj.scales",
        "model.layers.{l}.mlp.down_proj.weight_scale_inv",
        "model.layers.{l}.mlp.experts.{e}.w2.qzeros",
        "model.layers.{l}.mlp.experts.gate_up_proj_scale_inv",
        "model.layers.{l}.mlp.experts.down_proj_bias",
        "model.layers.{l}.linear_attn.A_log",
        "model.visual.blocks.{l}.attn.qkv.weight",
        "mtp.layers.{l}.mlp.up_proj.weight",
        "weight",
        ".",
        "",
    ]
)


@st.composite
def groups(draw: st.DrawFn) -> TensorGroup:
    shape = tuple(draw(st.lists(st.integers(0, 300), max_size=4)))
    layers = draw(st.none() | st.dictionaries(st.integers(0, 70), st.integers(1, 4), min_size=1, max_size=5))
    count = sum(layers.values()) if layers else draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["BF16", "F32", "I32", "U8", "F8_E4M3", "F4", "?"]))
    return TensorGroup(draw(NAMES), dtype, shape, draw(st.integers(0, 1 << 20)), count, layers)


@given(
    st.lists(groups(), max_size=8),
    st.sampled_from(["Qwen3_5MoeForConditionalGeneration", "LlamaForCausalLM", "DeepseekV3ForCausalLM", "X", None]),
    st.sampled_from([None, "awq", "gptq", "fp8", "compressed-tensors", "bitsandbytes", "?"]),
    st.integers(1, 9),
    st.integers(1, 4),
    st.booleans(),
)
def test_no_checkpoint_breaks_the_split(
    tensors: list[TensorGroup], architecture: str | None, method: str | None, ranks: int, stages: int, parallel: bool
) -> None:
    model = ModelFacts(
        name="anything",
        architecture=architecture,
        text=TextConfig(num_hidden_layers=61, num_experts=8, num_key_value_heads=2, num_attention_heads=7),
        quantization=Quantization(method=method),
        tensors=tuple(tensors),
    )
    launch = settings(
        "0.33", ranks, pipeline_parallel_size=stages, expert_parallel=parallel, enable_lora=parallel,
        speculative_method="mtp", num_speculative_tokens=1,
    )  # fmt: skip
    weights = shard_weights(model, launch)
    assert len(weights) == ranks * stages
    for rank in weights:
        assert all(0 <= amount.low <= amount.bytes <= amount.high for amount in rank.components.values())


def test_many_groups_are_split_in_milliseconds() -> None:
    layers = dict.fromkeys(range(60), 1)
    tensors = tuple(
        TensorGroup(f"model.layers.{{l}}.mlp.{name}.weight", "BF16", (1024, 512 + index), 1 << 20, 60, layers)
        for index in range(1000)
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    model = ModelFacts(
        name="many", architecture="LlamaForCausalLM", text=TextConfig(num_hidden_layers=60), tensors=tensors
    )
    start = time.perf_counter()
    shard_weights(model, settings("0.33", 8))
    assert time.perf_counter() - start < 1
