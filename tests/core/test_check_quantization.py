"""--quantization, --dtype and the cards against the checkpoint."""

from __future__ import annotations

import pytest

from loadmaster.core.facts import ModelFacts, Quantization
from tests.launchcases import cards, codes, dense, found, moe, of, vision

AWQ = Quantization(method="awq", bits=4, group_size=128, zero_point=True, label="awq w4 g128")
PACKED = Quantization(
    method="compressed-tensors", format="pack-quantized", bits=4, group_size=32, label="compressed-tensors w4 g32"
)


def test_method_that_no_release_has() -> None:
    item = of(found("vllm serve m --quantization int4"), "quant-format-unsupported")
    assert (item.severity, item.confidence) == ("error", "certain")
    assert item.fixes[0].remove == ("--quantization",)
    assert "quant-format-unsupported" not in codes(found("vllm serve m --quantization fp8"))


def test_method_of_other_versions() -> None:
    assert of(found("vllm serve m --quantization bitsandbytes", version="0.28.0"), "quant-format-unsupported")
    assert "quant-format-unsupported" not in codes(found("vllm serve m --quantization bitsandbytes", version="0.27.0"))
    unsure = of(found("vllm serve m --quantization bitsandbytes"), "quant-format-unsupported")
    assert (unsure.severity, unsure.confidence) == ("warning", "possible")


def test_deprecated_method_needs_its_switch() -> None:
    line = "vllm serve m --quantization fbgemm_fp8"
    assert "quant-format-unsupported" in codes(found(line, version="0.20.0"))
    assert "quant-format-unsupported" not in codes(found(line, version="0.13.0"))
    assert "quant-format-unsupported" not in codes(found(line + " --allow-deprecated-quantization", version="0.20.0"))


def test_checkpoint_of_a_method_that_left() -> None:
    model = dense(quantization=Quantization(method="aqlm", bits=2))
    assert "quant-format-unsupported" in codes(found("vllm serve m", model, version="0.24.0"))
    assert "quant-format-unsupported" not in codes(found("vllm serve m", model, version="0.9.0"))


@pytest.mark.parametrize(
    ("flag", "quantization"),
    [("awq", PACKED), ("gptq", AWQ), ("fp8", AWQ), ("awq", Quantization()), ("compressed-tensors", AWQ)],
)
def test_mismatch(flag: str, quantization: Quantization) -> None:
    item = of(found(f"vllm serve m --quantization {flag}", dense(quantization=quantization)), "quant-method-mismatch")
    assert item.fixes[0].remove == ("--quantization",)


@pytest.mark.parametrize(
    ("flag", "quantization"),
    [("awq_marlin", AWQ), ("compressed-tensors", PACKED), ("fp8", Quantization()), ("moe_wna16", AWQ)],
)
def test_match(flag: str, quantization: Quantization) -> None:
    assert "quant-method-mismatch" not in codes(
        found(f"vllm serve m --quantization {flag}", dense(quantization=quantization))
    )


def test_mismatch_is_not_said_of_an_unknown_model() -> None:
    assert "quant-method-mismatch" not in codes(found("vllm serve /nowhere/m --quantization awq"))


def test_slow_kernel() -> None:
    line = "vllm serve m --quantization awq --dtype half --enforce-eager"
    item = of(found(line, dense(quantization=AWQ), version="0.17.0"), "slow-awq-kernel")
    assert item.fixes[0].remove == ("--quantization", "--dtype", "--enforce-eager")
    assert "slow-awq-kernel" in codes(found("vllm serve /nowhere/m-awq --quantization awq"))


def test_kernel_is_not_slow_when_the_name_means_marlin_or_nothing_else_runs() -> None:
    model = dense(quantization=AWQ)
    assert "slow-awq-kernel" not in codes(found("vllm serve m --quantization awq", model, version="0.24.0"))
    assert "slow-awq-kernel" not in codes(found("vllm serve m --quantization awq_marlin", model, version="0.17.0"))
    turing = cards(1, 11, (7, 5))
    assert "slow-awq-kernel" not in codes(found("vllm serve m --quantization awq", model, turing, version="0.13.0"))
    assert "slow-awq-kernel" in codes(found("vllm serve m --quantization awq", model, turing, version="0.17.0"))


def test_card_too_old_for_the_format() -> None:
    model = dense(quantization=Quantization(method="fp8", bits=8, label="fp8 per tensor"))
    item = of(found("vllm serve m", model, cards(1, 16, (7, 5)), version="0.13.0"), "quant-compute-capability")
    assert "8.0" in item.cause and "7.5" in item.cause
    assert "quant-compute-capability" not in codes(found("vllm serve m", model, cards(1, 16, (7, 5)), version="0.24.0"))
    assert "quant-compute-capability" not in codes(found("vllm serve m", model, cards(1, 16, (8, 0)), version="0.13.0"))
    assert "quant-compute-capability" not in codes(found("vllm serve m", model, cards(1, 16, None), version="0.13.0"))


def test_awq_checkpoint_runs_on_turing_by_the_old_kernel() -> None:
    model = dense(quantization=AWQ)
    turing = cards(1, 24, (7, 5))
    assert "quant-compute-capability" not in codes(found("vllm serve m --dtype half", model, turing, version="0.13.0"))
    assert "quant-compute-capability" in codes(
        found("vllm serve m --quantization awq_marlin --dtype half", model, turing, version="0.13.0")
    )


def test_fp8_cache_on_old_cards() -> None:
    line = "vllm serve m --kv-cache-dtype fp8"
    assert of(found(line, dense(), cards(1, 24, (7, 5))), "quant-compute-capability").severity == "warning"
    assert of(found(line, dense(), cards(1, 24, (8, 6))), "quant-compute-capability").severity == "note"
    assert "quant-compute-capability" not in codes(found(line, dense(), cards(1, 24, (8, 9))))


def test_pascal_has_no_build() -> None:
    assert "sm-unsupported" in codes(found("vllm serve m", dense(), cards(1, 24, (6, 1))))
    assert "sm-unsupported" not in codes(found("vllm serve m", dense(), cards(1, 24, (7, 0))))


def test_bfloat16_on_turing() -> None:
    turing = cards(1, 24, (7, 5))
    assert of(found("vllm serve m --dtype bfloat16", dense(), turing), "quant-dtype").severity == "error"
    assert of(found("vllm serve m", dense(), turing), "quant-dtype").severity == "note"
    assert "quant-dtype" not in codes(found("vllm serve m --dtype bfloat16", dense(), cards(1, 24, (8, 0))))
    assert "quant-dtype" not in codes(found("vllm serve m --dtype half", dense(), turing))


def test_old_awq_kernel_takes_float16_only() -> None:
    model = dense(quantization=AWQ)
    line = "vllm serve m --quantization awq --dtype bfloat16"
    assert "quant-dtype" in codes(found(line, model, version="0.17.0"))
    assert "quant-dtype" not in codes(found(line, model, version="0.24.0"))
    assert "quant-dtype" not in codes(found("vllm serve m --dtype bfloat16", model, version="0.17.0"))


def test_float16_on_a_bfloat16_model() -> None:
    item = of(found("vllm serve m --dtype half", dense(), cards()), "dtype-downcast")
    assert item.severity == "note"
    assert "dtype-downcast" not in codes(found("vllm serve m --dtype half", dense(dtype="float16"), cards()))
    assert "dtype-downcast" not in codes(found("vllm serve m --dtype half", dense(), cards(1, 24, (7, 5))))
    assert "dtype-downcast" not in codes(found("vllm serve m --dtype bfloat16", dense(), cards()))


# ------------------------------------------------------------------------------------------ shapes


def test_group_cut_by_tensor_parallelism() -> None:
    model = vision(quantization=AWQ, intermediate_size=11008)
    item = of(found("vllm serve m -tp 4", model, version="0.24.0"), "quant-group-vs-tp")
    assert "11,008 on 4 ranks is 2,752 a rank, no multiple of the group of 128" in item.cause
    assert ("--tensor-parallel-size", "2") in [fix.argv[:2] for fix in item.fixes]
    assert "quant-group-vs-tp" not in codes(found("vllm serve m -tp 2", model, version="0.24.0"))
    wide = vision(quantization=AWQ, intermediate_size=16384)
    assert "quant-group-vs-tp" not in codes(found("vllm serve m -tp 4", wide, version="0.24.0"))


def test_group_rules_leave_what_is_not_quantised() -> None:
    ignoring = Quantization(method="awq", bits=4, group_size=128, ignore=("mlp", "self_attn"))
    model = vision(quantization=ignoring, intermediate_size=11008)
    assert "quant-group-vs-tp" not in codes(found("vllm serve m -tp 4", model, version="0.24.0"))


def test_marlin_tile_before_padding() -> None:
    model = dense(intermediate_size=12352, quantization=PACKED)  # 6,176 on two ranks: 32-groups fit, a tile of 128 not
    assert "quant-group-vs-tp" in codes(found("vllm serve m -tp 2", model, version="0.20.0"))
    assert "quant-group-vs-tp" not in codes(found("vllm serve m -tp 2", model, version="0.24.0"))


def test_fp8_block_cut_by_tensor_parallelism() -> None:
    item = of(found("vllm serve m -tp 8", moe(num_key_value_heads=8)), "fp8-block-vs-tp")
    assert "80 a rank" in item.cause
    assert item.fixes[0].argv == ("--enable-expert-parallel",)
    assert "fp8-block-vs-tp" not in codes(
        found("vllm serve m -tp 8 --enable-expert-parallel", moe(num_key_value_heads=8))
    )


def test_fp8_expert_blocks_may_be_cut_since_0_29() -> None:
    assert "fp8-block-vs-tp" in codes(found("vllm serve m -tp 4", moe(), version="0.28.0"))  # 160 a rank
    assert "fp8-block-vs-tp" not in codes(found("vllm serve m -tp 4", moe(), version="0.30.0"))
    assert "fp8-block-vs-tp" not in codes(found("vllm serve m -tp 1", moe(), version="0.28.0"))


def test_fp8_blocks_of_joined_layers_pass_since_0_14() -> None:
    blocks = Quantization(method="fp8", bits=8, block_shape=(128, 128), label="fp8 block 128x128")
    model = dense(head_dim=64, quantization=blocks, config={"head_dim": 64})  # one head of 64 rows a rank
    assert "fp8-block-vs-tp" in codes(found("vllm serve m -tp 8", model, version="0.13.0"))
    assert "fp8-block-vs-tp" not in codes(found("vllm serve m -tp 8", model, version="0.14.0"))


def test_a_head_size_that_nobody_wrote_down_is_not_guessed() -> None:
    blocks = Quantization(method="fp8", bits=8, block_shape=(128, 128), label="fp8 block 128x128")
    odd = dense(hidden_size=2560, num_attention_heads=24, head_dim=106, num_key_value_heads=8, quantization=blocks)
    assert "fp8-block-vs-tp" not in codes(found("vllm serve m -tp 8", odd, version="0.13.0"))


def group(weights: str, bits: int, inputs: tuple[str, int] | None) -> dict[str, object]:
    found: dict[str, object] = {"targets": ["Linear"], "weights": {"type": weights, "num_bits": bits}}
    if inputs is not None:
        found["input_activations"] = {"type": inputs[0], "num_bits": inputs[1]}
    return found


@pytest.mark.parametrize(
    ("algorithm", "version", "lowest"),
    [
        # get_min_capability of the class in modelopt.py that reads the algorithm
        ("NVFP4", "0.12.0", (8, 0)),
        ("NVFP4", "0.17.0", (7, 5)),
        ("NVFP4", "0.20.0", (7, 5)),
        ("NVFP4", "0.24.0", (7, 5)),
        ("NVFP4", "0.33.0", (7, 5)),
        ("FP8", "0.17.0", (8, 9)),
        ("FP8", "0.20.0", (8, 9)),
        ("FP8", "0.24.0", (8, 9)),
        ("FP8", "0.33.0", (8, 0)),
        ("MXFP8", "0.20.0", (8, 0)),
        ("MIXED_PRECISION", "0.20.0", (8, 9)),
        ("MIXED_PRECISION", "0.24.0", (7, 5)),
        ("MIXED_PRECISION", "0.33.0", (7, 5)),
    ],
)
@pytest.mark.parametrize("flag", ["", " --quantization modelopt"])
def test_the_algorithm_decides_the_capability(algorithm: str, version: str, lowest: tuple[int, int], flag: str) -> None:
    model = dense(quantization=Quantization(method="modelopt", format=algorithm, label=f"modelopt {algorithm.lower()}"))
    ladder = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0)]
    for capability in ladder:
        refused = "quant-compute-capability" in codes(
            found("vllm serve m" + flag, model, cards(1, 80, capability), version=version)
        )
        assert refused == (capability < lowest), capability


@pytest.mark.parametrize(
    ("kind", "groups", "version", "lowest"),
    [
        # get_min_capability of the scheme that _get_scheme_from_parts takes
        ("pack-quantized", [group("int", 4, None)], "0.17.0", (7, 5)),
        ("pack-quantized", [group("int", 4, ("float", 8))], "0.17.0", (9, 0)),
        ("pack-quantized", [group("int", 4, ("float", 8))], "0.33.0", (9, 0)),
        ("float-quantized", [group("float", 8, ("float", 8))], "0.20.0", (7, 5)),
        ("int-quantized", [group("int", 8, ("int", 8))], "0.24.0", (7, 5)),
        ("nvfp4-pack-quantized", [group("float", 4, ("float", 4))], "0.17.0", (7, 5)),
        ("nvfp4-pack-quantized", [group("float", 4, None)], "0.24.0", (7, 5)),
        ("mxfp4-pack-quantized", [group("float", 4, None)], "0.33.0", (8, 0)),
        ("mixed-precision", [group("int", 4, None), group("int", 4, ("float", 8))], "0.24.0", (7, 0)),
    ],
)
def test_the_schemes_of_all_groups_decide(
    kind: str, groups: list[dict[str, object]], version: str, lowest: tuple[int, int]
) -> None:
    if kind == "mixed-precision":
        groups, lowest = [{**one, "format": "pack-quantized"} for one in groups], (9, 0)
    declared = {"config_groups": {f"group_{number}": one for number, one in enumerate(groups)}}
    model = dense(quantization=Quantization(method="compressed-tensors", format=kind, declared=declared))
    for capability in [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0)]:
        refused = "quant-compute-capability" in codes(
            found("vllm serve m", model, cards(1, 80, capability), version=version)
        )
        assert refused == (capability < lowest), capability


def test_a_kernel_of_bfloat16_alone_cannot_run_on_an_old_card() -> None:
    model = dense(quantization=Quantization(method="mxfp4", bits=4, group_size=32, label="mxfp4 g32"))
    for line in ("vllm serve m", "vllm serve m --dtype half"):
        (item,) = [
            one for one in found(line, model, cards(1, 16, (7, 5)), version="0.24.0") if one.code == "quant-dtype"
        ]
        assert "no --dtype helps" in item.cause
        assert not any(fix.argv for fix in item.fixes)
    assert "quant-dtype" not in codes(found("vllm serve m", model, cards(1, 16, (8, 0)), version="0.24.0"))
    forced = of(found("vllm serve m --dtype half", model, cards(1, 16, (8, 0)), version="0.24.0"), "quant-dtype")
    assert forced.fixes[0].argv == ("--dtype", "bfloat16")


def test_the_types_are_those_of_the_class_that_reads() -> None:
    def model(algorithm: str) -> ModelFacts:
        return dense(quantization=Quantization(method="modelopt", format=algorithm))

    ampere = cards(1, 80, (8, 0))
    for flag in ("", " --quantization modelopt"):
        line = "vllm serve m --dtype half" + flag
        assert "quant-dtype" in codes(found(line, model("MXFP8"), ampere, version="0.24.0"))
        assert "quant-dtype" not in codes(found(line, model("NVFP4"), ampere, version="0.24.0"))
