"""Facts of this machine against cards that were only described; containers with too few cards; values and their fixes."""

from __future__ import annotations

import pytest

from loadmaster.core.facts import GIB, HostFacts
from tests.core.launches import DENSE_9B
from tests.launchcases import cards, found, launch_of, of

HERE = HostFacts(ports_in_use=(8000,), memory_total_bytes=8 * GIB, shm_total_bytes=64 << 20)
ELSEWHERE = HostFacts(ports_in_use=(8000,), memory_total_bytes=8 * GIB, shm_total_bytes=64 << 20, holds_cards=False)
COMMAND = "vllm serve m -tp 2 --cpu-offload-gb 64"


@pytest.mark.parametrize("code", ["port-in-use", "host-ram-killed", "shm-too-small"])
def test_this_machine_counts_only_where_it_holds_the_cards(code: str) -> None:
    item = of(found(COMMAND, gpus=cards(2), host=HERE), code)
    assert item.severity == "error"
    item = of(found(COMMAND, gpus=cards(2), host=ELSEWHERE), code)
    assert (item.severity, item.confidence) == ("note", "possible")
    assert "this machine" in item.cause


def test_shared_memory_of_the_text_counts_anywhere() -> None:
    item = of(found(launch_of("vllm serve m -tp 2", kind="docker-run"), gpus=cards(2), host=ELSEWHERE), "shm-too-small")
    assert item.severity == "error"


@pytest.mark.parametrize(
    ("flags", "argv", "remove"),
    [
        ("--swap-space 16", (), ("--swap-space",)),
        ("--cpu-offload-gb 64", ("--cpu-offload-gb", "4"), ()),
    ],
)
def test_too_much_host_memory_is_mended_at_the_flag_that_asks(
    flags: str, argv: tuple[str, ...], remove: tuple[str, ...]
) -> None:
    item = of(found(f"vllm serve m {flags}", host=HERE), "host-ram-killed")
    assert [(fix.argv, fix.remove) for fix in item.fixes] == [(argv, remove)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("compose", "count: 2"), ("kubernetes", "nvidia.com/gpu: 2"), ("docker-run", "--gpus 2")],
)
def test_a_container_with_too_few_cards_is_given_more(kind: str, words: str) -> None:
    """A smaller size is offered only where the plan does not refuse it."""
    launch = launch_of("vllm serve m -tp 2 --max-model-len 4096", kind=kind, visible_gpus=1, ipc_host=True)
    small = of(found(launch, DENSE_9B, cards(2, 16), "0.24.0"), "tp-exceeds-gpus")
    assert [fix.argv for fix in small.fixes] == [()] and words in (small.fixes[0].command or "")
    large = of(found(launch, DENSE_9B, cards(2, 48), "0.24.0"), "tp-exceeds-gpus")
    assert [fix.argv for fix in large.fixes] == [(), ("--tensor-parallel-size", "1")]
    one = of(found(launch, DENSE_9B, cards(1, 48), "0.24.0"), "tp-exceeds-gpus")
    assert [fix.argv for fix in one.fixes] == [("--tensor-parallel-size", "1")]


def test_an_idle_card_is_told_by_the_facts() -> None:
    assert of(found("vllm serve m", gpus=cards(2)), "one-gpu-idle").cause.startswith("No parallel size is given")
    given = of(found("vllm serve m --tensor-parallel-size 1", gpus=cards(2)), "one-gpu-idle")
    assert given.cause == "By --tensor-parallel-size 1 one of 2 cards does all the work."


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--limit-mm-per-prompt {image:2}", ("--limit-mm-per-prompt", '{"image": 2}')),
        ("--limit-mm-per-prompt {image:2,video:0}", ("--limit-mm-per-prompt", '{"image": 2, "video": 0}')),
        ("--limit-mm-per-prompt image:2 video:0", ("--limit-mm-per-prompt", '{"image": 2, "video": 0}')),
        (
            "--hf-overrides {rope_scaling:{rope_type:yarn,factor:2.0}}",
            ("--hf-overrides", '{"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}'),
        ),
        ("--kv-cache-dtype fp8e5m2", ("--kv-cache-dtype", "fp8_e5m2")),
    ],
)
def test_a_value_is_mended(words: str, fix: tuple[str, ...]) -> None:
    item = of(found(f"vllm serve m {words}", version="0.24.0"), "flag-value-invalid")
    assert [mended.argv for mended in item.fixes] == [fix]


@pytest.mark.parametrize("words", ["--max-num-seqs 0", "--max-model-len -5", "--port 70000", "--block-size -16"])
def test_a_value_out_of_range_can_be_dropped(words: str) -> None:
    item = of(found(f"vllm serve m {words}", version="0.24.0"), "flag-value-invalid")
    assert [fix.remove for fix in item.fixes] == [(words.split()[0],)]


@pytest.mark.parametrize(("written", "number"), [("32k", "32768"), ("32K", "32768"), ("1m", "1048576"), ("x", None)])
def test_llama_cpp_reads_digits_only(written: str, number: str | None) -> None:
    from loadmaster.core.facts import EngineFacts, LaunchArgs, ModelFacts
    from loadmaster.core.hostplan import make_host_plan

    model = ModelFacts(name="x", format="gguf", path="x.gguf")
    launch = LaunchArgs(model="x.gguf", argv=("-c", written))
    sheet = make_host_plan(model, HostFacts(memory_total_bytes=16 * GIB), launch, EngineFacts("llamacpp"))
    item = of(sheet.findings, "flag-value-invalid")
    assert [fix.argv for fix in item.fixes] == ([("-c", number)] if number else [])


def test_a_gguf_file_is_refused_for_vllm_by_the_plan_too() -> None:
    from msgspec.structs import replace

    from loadmaster.core.facts import EngineFacts
    from loadmaster.core.plan import make_plan

    model = replace(DENSE_9B, name="x.gguf", format="gguf")
    sheet = make_plan(model, cards(1, 80), launch_of("vllm serve x.gguf"), EngineFacts("vllm", "0.24.0"))
    assert sheet.fits is False and sheet.findings[0].code == "gguf-unsupported"
