"""The load sheet: laws that every plan obeys, recorded launches, and the case that the project starts from."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadmaster.core.facts import GIB, EngineFacts, LaunchArgs, LoadSheet, ModelFacts
from loadmaster.core.plan import make_plan
from tests.core import published
from tests.core.launches import (
    ARTICLE,
    DENSE_9B,
    GEMMA_27B,
    MOE_35B,
    QWEN_3_8B,
    TEXT_8B,
    UNKNOWN,
    VL_7B,
    cards,
    launch,
    model_of,
    part,
    plan,
)

MODELS = {"moe": MOE_35B, "dense": DENSE_9B, "vl": VL_7B, "text": TEXT_8B, "gemma": GEMMA_27B, "unknown": UNKNOWN}
H200 = {"compute_capability": (9, 0), "sm_count": 132, "name": "NVIDIA H200"}
COMPONENTS = {
    "context",
    "weights.language",
    "weights.vision",
    "weights.other",
    "activations.language",
    "activations.vision",
    "workspace",
    "sampler",
    "cuda_graphs",
    "kv_cache",
    "headroom",
}

launches = st.builds(
    lambda model, version, gib, count, tensor, length, seqs, tokens, share, eager, pixels, given: (
        MODELS[model],
        version,
        cards(*[gib] * count),
        {
            "--tensor-parallel-size": tensor,
            "--max-model-len": length,
            "--max-num-seqs": seqs,
            "--max-num-batched-tokens": tokens,
            "--gpu-memory-utilization": share,
            "--enforce-eager": eager,
            "--kv-cache-memory-bytes": given,
            "--mm-processor-kwargs": {"max_pixels": pixels},
        },
    ),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([None, "0.17.1", "0.19.0", "0.24.0", "0.27.0", "0.33.0", "0.50.0"]),
    st.sampled_from([8, 16, 24, 47.5, 79.2, 139.8]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 512, 4096, 32768, 262144]),
    st.sampled_from([None, 1, 16, 256, 1024]),
    st.sampled_from([None, 512, 2048, 8192]),
    st.sampled_from([None, 0.2, 0.9, 1.0]),
    st.sampled_from([None, True]),
    st.sampled_from([None, 50176, 1048576]),
    st.sampled_from([None, 1 * GIB, 10 * GIB]),
)


def sheet_of(case: tuple[ModelFacts, str | None, tuple[object, ...], dict[str, object]]) -> LoadSheet:
    model, version, gpus, flags = case
    used = {name: value for name, value in flags.items() if value is not None and value != {"max_pixels": None}}
    return make_plan(model, gpus, LaunchArgs(flags=used), EngineFacts("vllm", version))  # type: ignore[arg-type]


@given(launches)
def test_laws_of_every_sheet(case: tuple[ModelFacts, str | None, tuple[object, ...], dict[str, object]]) -> None:
    sheet = sheet_of(case)
    for load in sheet.gpus:
        names = [line.name for line in load.components]
        assert set(names) <= COMPONENTS
        assert len(names) == len(set(names))
        held = [line for line in load.components if line.name != "headroom"]
        assert sum(line.bytes for line in held) == load.peak_bytes["serving"]
        for line in load.components:
            assert line.low <= line.bytes <= line.high, line
            assert line.basis != "assumed" or line.low < line.high or line.bytes == 0
        peaks, low, high = load.peak_bytes, load.peak_low_bytes, load.peak_high_bytes
        for name in ("start", "steady", "serving"):
            assert low[name] <= peaks[name] <= high[name], name
        assert peaks["start"] >= peaks["steady"]
        assert peaks["serving"] >= peaks["steady"]
    if sheet.fits is True:
        assert not [item for item in sheet.findings if item.severity == "error"]
        for load in sheet.gpus:
            assert max(load.peak_high_bytes.values()) <= load.total_bytes
    else:
        assert sheet.findings or sheet.notes
    cache = sheet.kv_cache
    if cache is not None and cache.available_low_bytes is not None and cache.available_high_bytes is not None:
        assert cache.available_bytes is not None
        assert cache.available_low_bytes <= cache.available_bytes <= cache.available_high_bytes


@pytest.mark.parametrize("version", ["0.17.1", "0.24.0", "0.33.0"])
@pytest.mark.parametrize(
    ("flag", "values", "peak"),
    [
        ("--max-num-batched-tokens", [512, 2048, 8192, 32768], "serving"),
        # More sequences leave larger blocks behind, which pictures use again: only the idle need must not fall.
        ("--max-num-seqs", [1, 16, 64, 256, 1024], "steady"),
        ("--mm-processor-kwargs", [{"max_pixels": side * side} for side in (256, 1024, 2048, 4096)], "serving"),
    ],
)
def test_need_never_falls_with_what_is_asked_for(version: str, flag: str, values: list[object], peak: str) -> None:
    """With a cache of a given size, everything else can only grow."""
    needs = []
    for value in values:
        flags = {"--tensor-parallel-size": 2, "--kv-cache-memory-bytes": 4 * GIB, "--max-num-seqs": 16, flag: value}
        sheet = make_plan(MOE_35B, cards(24, 24), LaunchArgs(flags=flags), EngineFacts("vllm", version))
        needs.append(sheet.gpus[0].peak_bytes[peak])
    assert needs == sorted(needs)
    assert needs[0] < needs[-1]


def test_a_longer_context_needs_more_cache() -> None:
    needs = []
    for length in (4096, 32768, 131072, 262144):
        cache = plan(MOE_35B, cards(24, 24), f"--tensor-parallel-size 2 --max-model-len {length}").kv_cache
        assert cache is not None and cache.bytes_per_request_at_max_len is not None
        needs.append(cache.bytes_per_request_at_max_len)
    assert needs == sorted(set(needs))


# Recorded starts of vLLM 0.24.0 on two H200, dummy weights: `Available KV cache memory`, and what NVML showed when
# ready and at the highest, less the 0.60 GiB that the driver reserves. 1.92 GiB were in use before the first
# allocation. The pictures were 512, 1024 and 2000 pixels wide, then 4096; in the last line 2896 came before 4096.
SIXTEEN = "--max-model-len 262144 --max-num-seqs 16"


@pytest.mark.parametrize(
    ("flags", "cache", "ready", "highest"),
    [
        ("--max-model-len 4096 --max-num-seqs 256 --enforce-eager", 8.26, 23.57, 23.58),
        ("--max-model-len 4096 --max-num-seqs 256", 7.59, 23.87, 23.87),
        (SIXTEEN, 8.05, 22.46, 24.92),
        (SIXTEEN, 8.05, 22.46, 25.80),
        ("--max-model-len 32768 --max-num-seqs 16 --enforce-eager --mm-encoder-tp-mode data", 7.25, 21.90, None),
        (SIXTEEN + ' --mm-processor-kwargs {"max_pixels":4194304}', 9.15, 23.58, 24.36),
    ],
)
def test_recorded_launches(flags: str, cache: float, ready: float, highest: float | None) -> None:
    common = "--tensor-parallel-size 2 --gpu-memory-utilization 0.1545 --max-num-batched-tokens 2048"
    sheet = plan(MOE_35B, cards(139.8, 139.8, **H200), f"{common} {flags}")
    load = sheet.gpus[0]
    assert sheet.kv_cache is not None and sheet.kv_cache.available_bytes is not None
    assert sheet.kv_cache.available_bytes / GIB == pytest.approx(cache, abs=0.1)
    assert load.peak_bytes["steady"] / GIB == pytest.approx(ready, abs=0.15)
    if highest is not None:
        assert load.peak_bytes["serving"] / GIB == pytest.approx(highest, abs=0.6)
        assert load.peak_low_bytes["serving"] / GIB <= highest <= load.peak_high_bytes["serving"] / GIB


# The same on one H200, other models: NVML less 0.60 GiB; pictures of 512, 1024, 2000, 2896 and 4096 pixels.
@pytest.mark.parametrize(
    ("model", "flags", "cache", "ready", "highest"),
    [
        (DENSE_9B, "--max-num-batched-tokens 2048 --max-num-seqs 16", 8.95, 27.63, 31.83),
        (VL_7B, "--max-num-batched-tokens 2048 --max-num-seqs 256", 8.18, 25.87, 29.34),
    ],
)
def test_recorded_launches_on_one_card(
    model: ModelFacts, flags: str, cache: float, ready: float, highest: float
) -> None:
    sheet = plan(model, cards(139.8, **H200), f"--gpu-memory-utilization 0.2065 --max-model-len 32768 {flags}")
    load = sheet.gpus[0]
    assert sheet.kv_cache is not None and sheet.kv_cache.available_bytes is not None
    assert sheet.kv_cache.available_bytes / GIB == pytest.approx(cache, abs=0.1)
    assert load.peak_bytes["steady"] / GIB == pytest.approx(ready, abs=0.25)
    assert load.peak_bytes["serving"] / GIB == pytest.approx(highest, abs=0.6)
    assert highest <= load.peak_high_bytes["serving"] / GIB + 0.1


# Text models on one H200, which vLLM 0.24.0 serves with its second model runner.
@pytest.mark.parametrize(
    ("config", "flags", "cache"),
    [
        (QWEN_3_8B, "--gpu-memory-utilization 0.1545 --max-model-len 32768 --max-num-batched-tokens 2048", 4.91),
        (
            published.LLAMA_3_1_8B,
            "--gpu-memory-utilization 0.5212 --max-model-len 65536 --max-num-batched-tokens 8192 --max-num-seqs 64",
            56.53,
        ),
    ],
)
def test_recorded_launches_of_text_models(config: published.Config, flags: str, cache: float) -> None:
    found = plan(
        model_of(config), cards(139.8, **H200), f"{flags} " + ("" if "seqs" in flags else "--max-num-seqs 256")
    )
    assert found.kv_cache is not None and found.kv_cache.available_bytes is not None
    assert found.kv_cache.available_bytes / GIB == pytest.approx(cache, abs=0.25)


def test_expandable_segments_need_less_for_a_large_picture() -> None:
    flags = "--tensor-parallel-size 2 --gpu-memory-utilization 0.9 --max-num-seqs 16"
    given = structs.replace(launch(flags), env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    sheet = make_plan(MOE_35B, cards(24, 24), given, EngineFacts("vllm", "0.24.0"))
    usual = plan(MOE_35B, cards(24, 24), flags)
    assert part(sheet, "activations.vision") < 0.7 * part(usual, "activations.vision")


# Public logs, text only; the context's bytes and most other terms differ from the launches above.
@pytest.mark.parametrize(
    ("model", "gib", "flags", "version", "cache"),
    [
        # https://github.com/vllm-project/vllm, log of 0.26.1rc1.dev156, A100 80 GB
        (
            "QWEN_3_30B_A3B",
            79.25,
            "--max-model-len 131072 --gpu-memory-utilization 0.9 --max-num-seqs 16",
            "0.26.1",
            13.84,
        ),
        # log of 0.18.1, four cards of 24 GB
        (
            "QWEN_2_5_32B",
            23.64,
            "--tensor-parallel-size 4 --enforce-eager --gpu-memory-utilization 0.88 --max-num-seqs 1",
            "0.18.1",
            5.24,
        ),
        # log of 0.10.2, one card of 24 GB
        ("QWEN_2_5_3B", 23.65, "--max-model-len 4096 --max-num-seqs 1 --gpu-memory-utilization 0.9", "0.17.0", 15.31),
    ],
)
def test_public_logs(model: str, gib: float, flags: str, version: str, cache: float) -> None:
    config = getattr(published, model)
    flags += " --max-num-batched-tokens 2048"
    count = 4 if "--tensor-parallel-size 4" in flags else 1
    sheet = plan(model_of(config), cards(*[gib] * count), flags, version)
    assert sheet.kv_cache is not None and sheet.kv_cache.available_bytes is not None
    assert sheet.kv_cache.available_bytes / GIB == pytest.approx(cache, abs=0.35)


# ------------------------------------------------------------------------------------------------ the first case


@pytest.mark.parametrize("version", [None, "0.20.2", "0.24.0", "0.33.0"])
def test_the_article_launch_fits_and_refuses_the_large_picture(version: str | None) -> None:
    sheet = plan(MOE_35B, cards(24, 24), ARTICLE, version)
    assert sheet.fits is True
    assert sheet.images is not None
    assert sheet.images.refused[0] == "a 4096x4096 picture is refused: 16,384 tokens > 4096"
    assert sheet.images.largest_size is not None and sheet.images.largest_tokens is not None
    assert 4000 <= sheet.images.largest_tokens <= 4064
    assert sheet.images.peak_bytes is not None and 0.2 * GIB < sheet.images.peak_bytes < 0.6 * GIB
    assert [item.code for item in sheet.findings] == ["image-tokens-exceed-context"]


def test_without_a_pixel_cap_the_first_large_picture_overshoots() -> None:
    flags = "--tensor-parallel-size 2 --gpu-memory-utilization 0.9 --max-model-len 262144 --max-num-seqs 16"
    sheet = plan(MOE_35B, cards(24, 24), flags)
    assert sheet.fits is not True
    found = sheet.findings[0]
    assert (found.code, found.severity) == ("oom-runtime", "warning")
    assert found.cause.startswith("The first 4096x4096 picture overshoots GPU 0 by ")
    over = sheet.gpus[0].peak_bytes["serving"] - sheet.gpus[0].total_bytes
    assert over > 0
    assert f"by {over / GIB:.2f} GiB: " in found.cause and "of 24.00 GiB" in found.cause
    assert found.fixes[0].replanned
    assert "max_pixels" in found.fixes[0].argv[1]


def test_one_card_of_24_gib_is_too_small() -> None:
    sheet = plan(MOE_35B, cards(24), "--max-model-len 4096 --enforce-eager --gpu-memory-utilization 0.9")
    assert sheet.fits is False
    assert {item.code for item in sheet.findings} >= {"no-kv-memory"}
    cause = next(item.cause for item in sheet.findings if item.code == "no-kv-memory")
    assert "The weights take 22.40 GiB of a budget of 21.60 GiB" in cause


def test_more_ranks_than_cards() -> None:
    sheet = plan(MOE_35B, cards(24), ARTICLE)
    assert sheet.fits is False
    assert sheet.findings[0].code == "tp-exceeds-gpus"
    assert len(sheet.gpus) == 1


# ------------------------------------------------------------------------------------------------ cards


def test_the_smallest_card_decides() -> None:
    equal = plan(MOE_35B, cards(18, 18), ARTICLE)
    mixed = plan(MOE_35B, cards(24, 18), ARTICLE)
    assert equal.kv_cache is not None and mixed.kv_cache is not None
    assert mixed.kv_cache.blocks == equal.kv_cache.blocks
    assert part(mixed, "kv_cache", 0) == part(mixed, "kv_cache", 1)
    assert "gpus-unequal" in {item.code for item in mixed.findings}


def test_the_format_of_plain_weights_is_known() -> None:
    assert plan(TEXT_8B, cards(48), "--max-model-len 4096").model.quantization == "bfloat16, not quantised"
    online = plan(TEXT_8B, cards(48), "--max-model-len 4096 --quantization fp8").model.quantization
    assert online == "fp8, quantised while loading"
    assert plan(ModelFacts(name="m"), cards(48), "--max-model-len 4096").model.quantization is None


def test_other_processes_count_as_context() -> None:
    free = plan(MOE_35B, cards(24, 24), ARTICLE)
    taken = plan(MOE_35B, cards(24, 24, free_bytes=22 * GIB), ARTICLE)
    assert part(taken, "context") - part(free, "context") == 2 * GIB
    assert taken.fits is False
    assert "util-out-of-range" in {item.code for item in taken.findings}
    silent = plan(MOE_35B, cards(24, 24, free_bytes=20 * GIB), "--tensor-parallel-size 2")
    assert "free-memory-below-request" in {item.code for item in silent.findings}


def test_ranks_take_cards_in_order_and_spare_cards_are_named() -> None:
    sheet = plan(DENSE_9B, cards(*[24] * 6), "--tensor-parallel-size 2 --pipeline-parallel-size 2")
    assert [(load.index, load.pipeline_rank, load.tensor_rank) for load in sheet.gpus] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert "2 of 6 cards are not used by this launch" in sheet.notes
    replicas = plan(DENSE_9B, cards(*[24] * 2), "--data-parallel-size 2")
    assert [load.data_rank for load in replicas.gpus] == [0, 1]
    assert not part(sheet, "activations.vision", 2), "pictures are encoded by the first stage"


def test_a_given_cache_is_taken_as_it_is() -> None:
    sheet = plan(MOE_35B, cards(24, 24), f"{ARTICLE} --kv-cache-memory-bytes {3 * GIB}")
    assert sheet.kv_cache is not None
    assert sheet.kv_cache.available_bytes == 3 * GIB
    pool = part(sheet, "kv_cache")
    assert 3 * GIB - 11 * 2**20 < pool <= 3 * GIB


def test_the_trial_pool_by_version() -> None:
    """512 blocks of temporary cache do not fit a card of 32 GiB beside the weights; fewer graphs need fewer."""
    flags = "--max-model-len 8192"
    old = plan(MOE_35B, cards(32), flags, "0.25.0")
    assert "oom-cudagraph-profile-pool" in {item.code for item in old.findings}
    assert "oom-cudagraph-profile-pool" not in {
        item.code for item in plan(MOE_35B, cards(32), flags, "0.17.0").findings
    }
    few = plan(MOE_35B, cards(32), flags + " --max-num-seqs 16", "0.25.0")
    assert "oom-cudagraph-profile-pool" not in {item.code for item in few.findings}


def test_a_step_must_hold_a_block_in_older_versions() -> None:
    flags = "--tensor-parallel-size 2 --enable-prefix-caching --max-num-batched-tokens 512 --max-num-seqs 16"
    old = plan(MOE_35B, cards(24, 24), flags, "0.26.0")
    assert old.fits is False
    assert "batched-tokens-below-block" in {item.code for item in old.findings}
    assert "batched-tokens-below-block" not in {
        item.code for item in plan(MOE_35B, cards(24, 24), flags, "0.27.0").findings
    }


def test_graphs_take_memory_and_eager_mode_does_not() -> None:
    graphs = plan(MOE_35B, cards(24, 24), "--tensor-parallel-size 2")
    eager = plan(MOE_35B, cards(24, 24), "--tensor-parallel-size 2 --enforce-eager")
    assert part(graphs, "cuda_graphs") > 0.4 * GIB
    assert part(eager, "cuda_graphs") == 0
    assert eager.kv_cache is not None and graphs.kv_cache is not None
    assert (eager.kv_cache.available_bytes or 0) > (graphs.kv_cache.available_bytes or 0)


def test_language_only_has_no_pictures() -> None:
    sheet = plan(MOE_35B, cards(24, 24), "--tensor-parallel-size 2 --language-model-only")
    assert sheet.images is None
    assert part(sheet, "activations.vision") == 0
    assert part(sheet, "weights.vision") == 0


def test_the_dummy_picture_can_be_smaller_than_the_real_one() -> None:
    limit = '--limit-mm-per-prompt {"image":{"count":1,"width":512,"height":512},"video":0}'
    sheet = plan(MOE_35B, cards(24, 24), f"--tensor-parallel-size 2 {limit}")
    assert sheet.images is not None
    assert (sheet.images.profiled_tokens, sheet.images.largest_tokens) == (256, 16384)
    assert "profile-below-images" in {item.code for item in sheet.findings}


def test_automatic_context_becomes_what_fits() -> None:
    sheet = plan(DENSE_9B, cards(24), "--max-model-len auto --max-num-seqs 16")
    assert sheet.settings is not None and sheet.kv_cache is not None
    assert sheet.settings.max_model_len == sheet.kv_cache.max_model_len
    assert sheet.settings.max_model_len is not None and 2048 < sheet.settings.max_model_len < 262144
    assert any("auto" in note for note in sheet.notes)


# ------------------------------------------------------------------------------------------------ what is not known


def test_an_unknown_model_is_planned_and_said() -> None:
    sheet = plan(UNKNOWN, cards(24))
    assert sheet.fits is not True
    assert sheet.notes


@pytest.mark.parametrize("missing", ["max_position_embeddings", "vocab_size", "num_attention_heads", "hidden_size"])
def test_a_missing_field_does_not_break_the_plan(missing: str) -> None:
    model = structs.replace(TEXT_8B, text=structs.replace(TEXT_8B.text, **{missing: None}))
    sheet = plan(model, cards(24))
    assert sheet.gpus
    if missing == "max_position_embeddings":
        assert sheet.fits is None
        assert any("context is unknown" in note for note in sheet.notes)


def test_the_version_is_said_when_there_are_no_rules_for_it() -> None:
    assert any("0.33" in note for note in plan(TEXT_8B, cards(24), version="1.2.0").notes)
    assert any("0.17" in note for note in plan(TEXT_8B, cards(24), version="0.6.3").notes)


huge = st.one_of(st.integers(-5, 5), st.sampled_from([10**6, 10**12, 2**70]), st.none(), st.text(max_size=4))


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "--max-model-len",
                "--max-num-seqs",
                "--max-num-batched-tokens",
                "--tensor-parallel-size",
                "--pipeline-parallel-size",
                "--data-parallel-size",
                "--gpu-memory-utilization",
                "--kv-cache-memory-bytes",
                "--max-cudagraph-capture-size",
                "--num-gpu-blocks-override",
                "--block-size",
                "--cpu-offload-gb",
                "--decode-context-parallel-size",
            ]
        ),
        huge,
    ),
    huge,
    st.sampled_from(sorted(MODELS)),
)
def test_no_flag_breaks_the_plan(flags: dict[str, object], pixels: object, model: str) -> None:
    given_flags = {**flags, "--mm-processor-kwargs": {"max_pixels": pixels}}
    begin = time.perf_counter()
    make_plan(MODELS[model], cards(24, 24), LaunchArgs(flags=given_flags), EngineFacts("vllm", "0.24.0"))
    assert time.perf_counter() - begin < 5


def test_a_plan_is_fast() -> None:
    plan(MOE_35B, cards(24, 24), ARTICLE)
    begin = time.perf_counter()
    for _ in range(10):
        make_plan(MOE_35B, cards(24, 24), launch(ARTICLE), EngineFacts("vllm", "0.24.0"))
    assert (time.perf_counter() - begin) / 10 < 0.1  # a few milliseconds; the bound is for slow machines


def test_a_request_that_may_not_fit_names_the_bound_that_decides() -> None:
    """A length between what fits for certain and what fits by the expected figures."""
    flags = "--gpu-memory-utilization 0.9 --max-num-seqs 4 --max-model-len "
    (first,) = [
        item for item in plan(TEXT_8B, cards(24), flags + "131072").findings if item.code == "seq-too-long-for-memory"
    ]
    surely = int(first.fixes[-1].argv[-1])
    assert surely < 131072 and f"{surely:,} tokens fit for certain" in first.cause
    assert plan(TEXT_8B, cards(24), f"{flags}{surely}").fits is True
    sheet = plan(TEXT_8B, cards(24), f"{flags}{surely + 2000}")
    (found,) = [item for item in sheet.findings if item.code == "seq-too-long-for-memory"]
    assert (found.severity, found.confidence, sheet.fits) == ("warning", "possible", None)
    assert sheet.kv_cache is not None and sheet.kv_cache.available_low_bytes is not None
    assert f"it may be as little as {sheet.kv_cache.available_low_bytes / GIB:.2f} GiB" in found.cause
    lengths = [int(fix.argv[1]) for fix in found.fixes if fix.argv[:1] == ("--max-model-len",)]
    assert lengths and max(lengths) == surely


@pytest.mark.parametrize("model", [TEXT_8B, VL_7B, MOE_35B], ids=["text", "vl", "moe"])
@pytest.mark.parametrize("length", [4096, 40000, 131072])
def test_no_length_is_proposed_beyond_what_was_asked_or_what_the_model_has(model: ModelFacts, length: int) -> None:
    for size in (12, 18, 24):
        for item in plan(model, cards(size), f"--max-model-len {length} --max-num-seqs 4").findings:
            for fix in item.fixes:
                for flag, value in zip(fix.argv, fix.argv[1:], strict=False):
                    if flag == "--max-model-len":
                        assert int(value) <= length


def test_a_length_that_is_left_to_the_engine_is_no_finding() -> None:
    sheet = plan(VL_7B, cards(24), "--max-model-len -1 --max-num-seqs 4")
    assert "seq-too-long-for-memory" not in {item.code for item in sheet.findings}


def test_a_fix_stands_with_the_finding_that_it_mends() -> None:
    """Not with the first one that is there: a smaller share serves no larger picture."""
    sheet = plan(MOE_35B, cards(24, 24), "--tensor-parallel-size 2 --max-model-len 8192 --gpu-memory-utilization 0.93")
    assert sheet.fits is not True
    assert {item.code for item in sheet.findings} >= {"image-tokens-exceed-context", "oom-runtime"}
    for item in sheet.findings:
        planned = [fix for fix in item.fixes if fix.replanned]
        assert bool(planned) is (item.code == "oom-runtime"), item.code
