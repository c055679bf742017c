"""Effective settings: defaults by version, card and model, and the forms in which people give values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadmaster.core.enginerules import rules_for
from loadmaster.core.facts import EngineFacts, LaunchArgs, ModelFacts, Settings, TextConfig
from loadmaster.core.settings import effective_settings, model_context
from tests.core.launches import DENSE_9B, GEMMA_27B, MOE_35B, TEXT_8B, VL_7B, cards, launch


def settings(
    flags: str = "", version: str | None = "0.24.0", model: ModelFacts = MOE_35B, gib: float = 24, **card: object
) -> Settings:
    return effective_settings(launch(flags, version), model, cards(gib, **card), EngineFacts("vllm", version))


@pytest.mark.parametrize(("version", "share"), [("0.17.1", 0.90), ("0.19.1", 0.90), ("0.20.0", 0.92), ("0.33.0", 0.92)])
def test_share_of_the_card_by_version(version: str, share: float) -> None:
    assert settings(version=version).gpu_memory_utilization == share


@pytest.mark.parametrize(
    ("gib", "name", "version", "tokens", "seqs"),
    [
        (24, None, "0.24.0", 2048, 256),
        (79.2, "NVIDIA H100 80GB HBM3", "0.24.0", 8192, 1024),
        (79.3, "NVIDIA A100-SXM4-80GB", "0.24.0", 2048, 256),
        (178, "NVIDIA B200", "0.27.1", 8192, 1024),
        (178, "NVIDIA B200", "0.28.0", 16384, 1024),
    ],
)
def test_batch_by_card_and_version(gib: float, name: str | None, version: str, tokens: int, seqs: int) -> None:
    found = settings(version=version, gib=gib, name=name)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (tokens, seqs)


def test_batch_never_exceeds_what_all_sequences_can_hold() -> None:
    assert settings("--max-num-seqs 1 --max-model-len 1000").max_num_batched_tokens == 1000
    assert settings("--max-num-batched-tokens 64").max_num_seqs == 64


def test_a_picture_of_a_prefix_model_fits_one_batch() -> None:
    small = structs.replace(GEMMA_27B, vision=structs.replace(GEMMA_27B.vision, tokens_per_image=4000))  # type: ignore[type-var]
    assert settings(model=small).max_num_batched_tokens == 4000


@pytest.mark.parametrize(
    ("scaling", "positions", "expected"),
    [
        (None, 32768, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 40960, 131072),
        ({"rope_type": "linear", "factor": 2.0}, 4096, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096, 8192),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072, 131072),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 131072, 4096),
        ({"rope_type": "default", "mrope_section": [11, 11, 10]}, 262144, 262144),
        ({"rope_type": "yarn", "factor": "x"}, 4096, 4096),
    ],
)
def test_context_of_the_model(scaling: dict[str, object] | None, positions: int, expected: int) -> None:
    model = ModelFacts(name="m", text=TextConfig(max_position_embeddings=positions, rope_scaling=scaling))
    assert model_context(model) == expected


def test_gemma_context_is_already_scaled() -> None:
    text = TextConfig(model_type="gemma3_text", max_position_embeddings=131072, rope_scaling={"factor": 8.0})
    assert model_context(ModelFacts(name="m", text=text)) == 131072


def test_unknown_context_stays_unknown() -> None:
    assert settings(model=ModelFacts(name="m")).max_model_len is None


@pytest.mark.parametrize("value", ["-1", "auto"])
def test_automatic_context(value: str) -> None:
    found = settings(f"--max-model-len {value}")
    assert (found.max_model_len, found.max_model_len_auto) == (262144, True)


@pytest.mark.parametrize(
    ("version", "flags", "mode"),
    [
        ("0.25.0", "", "none"),
        ("0.25.0", "--enable-prefix-caching", "align"),
        ("0.26.0", "", "align"),
        ("0.26.0", "--no-enable-prefix-caching", "none"),
    ],
)
def test_recurrent_state_follows_prefix_caching(version: str, flags: str, mode: str) -> None:
    found = settings(flags, version)
    assert found.mamba_cache_mode == mode
    assert found.enable_prefix_caching is (mode == "align")


def test_prefix_caching_is_on_for_attention_only() -> None:
    assert settings(version="0.17.0", model=TEXT_8B).enable_prefix_caching


@pytest.mark.parametrize(
    ("flags", "mode", "count", "largest"),
    [
        ("", "FULL_AND_PIECEWISE", 51, 512),
        ("--max-num-seqs 16", "FULL_AND_PIECEWISE", 7, 32),
        ("--enforce-eager", "NONE", 0, 0),
        ("-O0", "NONE", 0, 0),
        ("-O1", "PIECEWISE", 51, 512),
        ('--compilation-config {"cudagraph_mode":"full_decode_only"}', "FULL_DECODE_ONLY", 51, 512),
        ("-cc.cudagraph_mode=PIECEWISE", "PIECEWISE", 51, 512),
        ("--cudagraph-capture-sizes 1 2 4", "FULL_AND_PIECEWISE", 3, 4),
        ("--max-cudagraph-capture-size 64", "FULL_AND_PIECEWISE", 11, 64),
        ("--max-num-batched-tokens 100", "FULL_AND_PIECEWISE", 16, 100),
    ],
)
def test_graph_sizes(flags: str, mode: str, count: int, largest: int) -> None:
    found = settings(flags)
    assert found.cudagraph_mode == mode
    assert len(found.cudagraph_capture_sizes) == count
    assert max(found.cudagraph_capture_sizes, default=0) == largest


def test_graph_sizes_by_version() -> None:
    assert 100 not in settings("--max-num-seqs 100", "0.28.0").cudagraph_capture_sizes
    assert 100 in settings("--max-num-seqs 100", "0.29.0").cudagraph_capture_sizes
    blackwell = {"gib": 178, "compute_capability": (10, 0)}
    assert max(settings("", "0.27.0", **blackwell).cudagraph_capture_sizes) == 512  # type: ignore[arg-type]
    assert max(settings("", "0.28.0", **blackwell).cudagraph_capture_sizes) == 1024  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "image", "video", "size"),
    [
        ("", None, None, None),
        ('--limit-mm-per-prompt {"image":2,"video":0}', 2, 0, None),
        ("--limit-mm-per-prompt image=3,video=1", 3, 1, None),
        ('--limit-mm-per-prompt {"image":{"count":1,"width":512,"height":256}}', 1, None, (512, 256)),
        ("--limit-mm-per-prompt.image 4", 4, None, None),
    ],
)
def test_picture_limits(flags: str, image: int | None, video: int | None, size: tuple[int, int] | None) -> None:
    found = settings(flags)
    assert (found.image_limit, found.video_limit, found.dummy_image_size) == (image, video, size)


@pytest.mark.parametrize(
    "flags",
    [
        '--mm-processor-kwargs {"max_pixels":1048576}',
        '--mm-processor-kwargs {"size":{"longest_edge":1048576,"shortest_edge":65536}}',
        '--mm-processor-kwargs {"images_kwargs":{"max_pixels":1048576}}',
    ],
)
def test_pixel_cap(flags: str) -> None:
    assert settings(flags).max_pixels == 1048576


@pytest.mark.parametrize(
    ("declared", "flag", "capability", "expected"),
    [
        ("bfloat16", "", None, "bfloat16"),
        ("bfloat16", "", (7, 5), "float16"),
        ("float32", "", (8, 6), "bfloat16"),
        ("float16", "", (8, 6), "float16"),
        ("bfloat16", "--dtype half", (8, 6), "float16"),
        ("float16", "--dtype auto", None, "float16"),
    ],
)
def test_type(declared: str, flag: str, capability: tuple[int, int] | None, expected: str) -> None:
    model = structs.replace(TEXT_8B, text=structs.replace(TEXT_8B.text, dtype=declared))
    assert settings(flag, model=model, compute_capability=capability).dtype == expected


def test_cache_type_from_flag_and_checkpoint() -> None:
    assert settings("--kv-cache-dtype fp8_e5m2").kv_cache_dtype_bytes == 1
    scheme = structs.replace(MOE_35B.quantization, kv_cache_scheme={"num_bits": 8, "type": "float"})
    found = settings(model=structs.replace(MOE_35B, quantization=scheme))
    assert (found.kv_cache_dtype, found.kv_cache_dtype_bytes) == ("fp8", 1)
    assert settings().kv_cache_dtype_bytes == 2


def test_speculation() -> None:
    found = settings('--speculative-config {"method":"mtp","num_speculative_tokens":3}')
    assert (found.speculative_method, found.num_speculative_tokens) == ("mtp", 3)


@pytest.mark.parametrize(
    ("version", "used", "said"),
    [
        ("0.24.0", "0.24.0", False),
        ("0.26.1rc1.dev156+g0eec856cc", "0.26.1", False),
        (None, "0.33", True),
        ("nightly", "0.33", True),
        ("0.40.1", "0.33", True),
        ("0.8.5", "0.17", True),
    ],
)
def test_version_of_the_rules(version: str | None, used: str, said: bool) -> None:
    rules = rules_for(EngineFacts("vllm", version))
    assert rules.version == used
    assert (rules.note is not None) is said


@pytest.mark.parametrize(
    ("model", "version", "second"),
    [
        (TEXT_8B, "0.23.0", False),
        (TEXT_8B, "0.24.0", True),
        (MOE_35B, "0.28.0", False),
        (MOE_35B, "0.29.0", True),
        (DENSE_9B, "0.27.0", False),
        (VL_7B, "0.25.0", False),
        (VL_7B, "0.26.0", True),
    ],
)
def test_model_runner(model: ModelFacts, version: str, second: bool) -> None:
    assert settings(version=version, model=model).second_model_runner is second


def test_every_value_says_where_it_comes_from() -> None:
    found = settings("--max-model-len 4096", model=DENSE_9B)
    assert found.origins["max_model_len"].origin == "given"
    assert found.origins["max_num_seqs"].origin == "engine-default"
    assert found.origins["dtype"].origin == "model"


values = st.one_of(
    st.none(), st.booleans(), st.integers(-10, 10**12), st.floats(), st.text(max_size=8), st.lists(st.integers())
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "--max-model-len",
                "--max-num-seqs",
                "--max-num-batched-tokens",
                "--gpu-memory-utilization",
                "--tensor-parallel-size",
                "--limit-mm-per-prompt",
                "--mm-processor-kwargs",
                "--compilation-config",
                "--cudagraph-capture-sizes",
                "--speculative-config",
                "--kv-cache-memory-bytes",
                "--kv-cache-dtype",
                "--dtype",
                "--cpu-offload-gb",
                "--optimization-level",
            ]
        ),
        values,
    )
)
def test_no_value_breaks_the_settings(flags: dict[str, object]) -> None:
    found = effective_settings(LaunchArgs(flags=flags), VL_7B, cards(24), EngineFacts("vllm", "0.24.0"))
    assert found.max_num_seqs >= 1
    assert found.max_num_batched_tokens >= 1
    assert found.tensor_parallel_size >= 1
