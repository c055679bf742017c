"""Fixes from a log's own arguments and readings: they hold when planned again, and say what they cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from loadmaster.core.argv import parse_argv, with_flags
from loadmaster.core.checks.catalogue import codes, finding
from loadmaster.core.diagnosis import Diagnosis
from loadmaster.core.facts import GIB, MIB, EngineFacts, Fix, GpuFacts
from loadmaster.core.knownmodels import known_model
from loadmaster.core.levers import gentlest
from loadmaster.core.logcase import case_of
from loadmaster.core.logcorrection import Seen, correction, seen_in
from loadmaster.core.logfacts import LogFacts, LogReadings
from loadmaster.core.logfixes import remedies, with_fixes
from loadmaster.core.replanning import Case
from loadmaster.core.sheet import load_sheet, plan_of
from loadmaster.core.verdict import starts_of

VERSION = "0.24.0"
AWQ = "vllm serve cyankiwi/Qwen3.5-35B-A3B-AWQ-4bit --tensor-parallel-size 2"
UNKNOWN = "vllm serve /models/home-made"
CONTEXT = (
    "ValueError: To serve at least one request with the model's max seq len ({length}), ({needed} GiB KV cache is "
    "needed, which is larger than the available KV cache memory ({available} GiB).{estimate} Try increasing "
    "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
FREE = (
    "ValueError: Free memory on device cuda:0 ({free}/23.52 GiB) on startup is less than desired GPU memory "
    "utilization ({share}, {wanted} GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
FULL_CARD: dict[str, Any] = {
    "card_total_bytes": round(23.52 * GIB),
    "card_free_bytes": 128 * MIB,
    "in_use_bytes": round(23.39 * GIB),
}
WEIGHTS = (round(11.28 * GIB),) * 2


def size(gib: float) -> int:
    return round(gib * GIB)


def shown(
    code: str, message: str = "", command: str = UNKNOWN, version: str | None = VERSION, **readings: Any
) -> Diagnosis:
    """A diagnosis as the reader of logs makes it, before its fixes."""
    launch = parse_argv(command.split(), engine_version=version)
    facts = LogFacts(
        engine=EngineFacts("vllm", version), launch=launch, model=launch.model, readings=LogReadings(**readings)
    )
    return Diagnosis(False, facts, (finding(code, "it failed"),), messages={code: message})


def fixes_of(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    return with_fixes(diagnosis, None, None).findings[0].fixes


# ---------------------------------------------------------------------------------------------- the engine's numbers


def test_the_context_that_the_engine_itself_estimates() -> None:
    estimate = " Based on the available memory, the estimated maximum model length is 96000."
    message = CONTEXT.format(length=262144, needed=2.57, available=0.95, estimate=estimate)
    first, *_ = fixes_of(shown("context-exceeds-kv", message, kv_available_bytes=size(0.95)))
    assert first.argv == ("--max-model-len", "96000")
    assert first.replanned
    assert "at most 96,000 tokens, not 262,144" in first.why


def test_the_context_by_bytes_a_token_where_the_engine_estimates_none() -> None:
    message = CONTEXT.format(length=32768, needed="6.00", available="4.10", estimate="")
    first, second, *_ = fixes_of(shown("context-exceeds-kv", message))
    assert first.argv == ("--max-model-len", "22336")
    assert 22336 / 32768 * 6.005 <= 4.10
    assert second.argv == ("--kv-cache-dtype", "fp8")
    assert not second.replanned


def test_a_larger_share_is_sure_only_where_the_log_says_that_it_was_free() -> None:
    message = CONTEXT.format(length=32768, needed="6.00", available="4.10", estimate="")
    command = f"{UNKNOWN} --gpu-memory-utilization 0.8"
    card: dict[str, Any] = {"total_bytes": size(24)}
    told = fixes_of(shown("context-exceeds-kv", message, command, free_bytes=size(23.6), **card))
    untold = fixes_of(shown("context-exceeds-kv", message, command, **card))
    wanted = ("--gpu-memory-utilization", "0.88")
    assert [fix.replanned for fix in told if fix.argv == wanted] == [True]
    assert [fix.replanned for fix in untold if fix.argv == wanted] == [False]
    tight = fixes_of(shown("context-exceeds-kv", message, command, free_bytes=size(20), **card))
    assert not [fix for fix in tight if "--gpu-memory-utilization" in fix.argv]


def test_as_many_sequences_as_there_are_blocks_of_state() -> None:
    message = "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (171). Each decode sequence"
    (fix,) = fixes_of(shown("mamba-blocks", message))
    assert fix.argv == ("--max-num-seqs", "171")
    assert fix.replanned
    assert "at most 171 requests at once, not 256" in fix.why


def test_memory_missing_while_serving_is_taken_from_the_cache_and_the_cost_is_named() -> None:
    (fix,) = fixes_of(
        shown(
            "oom-runtime",
            command=f"{UNKNOWN} --gpu-memory-utilization 0.92",
            kv_available_bytes=size(8.04),
            max_concurrency=25.36,
            max_model_len=32768,
            tried_to_allocate_bytes=1310 * MIB,
            **FULL_CARD,
        )
    )
    assert fix.argv == ("--gpu-memory-utilization", "0.86")
    assert fix.replanned
    assert "the cache is 6.63 GiB, not 8.04 GiB: room for 20.9 requests of 32,768 tokens, not 25.4" in fix.why


def test_a_share_that_leaves_no_request_any_room_is_not_proposed() -> None:
    found = with_fixes(
        shown(
            "oom-runtime",
            command=f"{UNKNOWN} --gpu-memory-utilization 0.92",
            kv_available_bytes=size(1.0),
            max_concurrency=1.1,
            max_model_len=32768,
            tried_to_allocate_bytes=1310 * MIB,
            **FULL_CARD,
        ),
        None,
        None,
    )
    assert not any(fix.replanned or fix.argv for fix in found.findings[0].fixes)
    assert "was not planned" in found.notes[0]


def test_without_a_checkpoint_and_readings_nothing_is_called_planned_and_that_is_said() -> None:
    for code in remedies():
        found = with_fixes(shown(code), None, None)
        assert not any(fix.replanned for fix in found.findings[0].fixes), code
        assert found.findings[0].fixes[-1].why.startswith(tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ`-"))
        assert "--model DIR says where it is, --gpus what cards it ran on" in found.notes[0]


# ---------------------------------------------------------------------------------------------- planned again

CAUSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "oom-cudagraph-profile-pool": (AWQ, "--max-cudagraph-capture-size", {"tried_to_allocate_bytes": 1048 * MIB}),
    "oom-cudagraph-capture": (
        f"{AWQ} --gpu-memory-utilization 0.96",
        "--gpu-memory-utilization",
        {"tried_to_allocate_bytes": 64 * MIB, "kv_available_bytes": size(8.04)},
    ),
    "oom-runtime": (
        f"{AWQ} --max-model-len 32768",
        "--gpu-memory-utilization",
        {"tried_to_allocate_bytes": 1310 * MIB, "kv_available_bytes": size(8.04), "graph_bytes": size(0.28)},
    ),
    "no-kv-memory": (
        "vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 8192 --gpu-memory-utilization 0.6",
        "--gpu-memory-utilization",
        {"kv_available_bytes": size(-0.7), "model_loading_bytes": (size(14.25),)},
    ),
}


@pytest.mark.parametrize("code", CAUSES)
def test_a_fix_that_was_planned_again_holds_in_a_plan_of_its_own(code: str) -> None:
    command, flag, readings = CAUSES[code]
    card: dict[str, Any] = {} if "model_loading_bytes" in readings else {**FULL_CARD, "model_loading_bytes": WEIGHTS}
    gpus = [
        GpuFacts(index=index, total_bytes=round(23.52 * GIB)) for index in range(2 if command.startswith(AWQ) else 1)
    ]
    diagnosis = shown(code, command=command, **card, **readings)
    first = with_fixes(diagnosis, None, gpus).findings[0].fixes[0]
    assert first.argv[0] == flag, first
    assert first.replanned
    assert " GiB" in first.why
    assert "It costs" in first.why
    launch = diagnosis.facts.launch
    assert launch is not None
    model = known_model(launch.model or "")
    assert model is not None
    engine = EngineFacts("vllm", VERSION)
    as_read = correction(plan_of(model, gpus, launch, engine), seen_in(diagnosis.facts.readings, None))
    changed = with_flags(launch, parse_argv(["vllm", "serve", "m", *first.argv], engine_version=VERSION).flags)
    before, after = (as_read(plan_of(model, gpus, each, engine)) for each in (launch, changed))
    assert starts_of(after, load_sheet(after).gpus) is True
    if code == "no-kv-memory":
        assert starts_of(before, load_sheet(before).gpus) is False


def test_the_smallest_change_is_taken() -> None:
    """One step back towards the launch that failed fails again, by the plan that the readings corrected."""
    command, flag, readings = CAUSES["oom-cudagraph-capture"]
    diagnosis = shown("oom-cudagraph-capture", command=command, model_loading_bytes=WEIGHTS, **FULL_CARD, **readings)
    share = float(fixes_of(diagnosis)[0].argv[1])
    case = case_of(diagnosis, diagnosis.findings[0], None, None)
    assert case.model is not None
    assert case.gpus is not None
    given_case = Case(case.model, case.gpus, case.launch, case.engine)
    seen = Seen(
        weights=WEIGHTS[0],
        cache=readings["kv_available_bytes"],
        used=FULL_CARD["card_total_bytes"] - 64 * MIB,
        stage="capture",
    )
    corrected = structs.replace(given_case, corrected=correction(given_case.plan(), seen))
    plan, sheet = corrected.with_changes({flag: share})
    assert starts_of(plan, sheet.gpus) is True
    plan, sheet = corrected.with_changes({flag: round(share + 0.01, 2)})
    assert starts_of(plan, sheet.gpus) is not True


def test_what_a_fix_does_not_cure_is_said() -> None:
    command, _, readings = CAUSES["oom-cudagraph-profile-pool"]
    first = fixes_of(
        shown("oom-cudagraph-profile-pool", command=command, model_loading_bytes=WEIGHTS, **FULL_CARD, **readings)
    )[0]
    assert "Not cured by it: a picture of 4096x4096 may take the card to" in first.why


def test_a_launch_that_fits_by_the_plan_is_a_contradiction_and_no_fix_is_invented() -> None:
    gpus = [GpuFacts(index=0, total_bytes=80 * GIB)]
    diagnosis = shown("oom-weights", command="vllm serve Qwen/Qwen3-8B --max-model-len 8192")
    found = with_fixes(diagnosis, None, gpus)
    assert not any(fix.replanned for fix in found.findings[0].fixes)
    assert "by the plan this launch fits" in found.notes[0]


def test_weights_that_are_too_heavy_need_more_cards_or_fewer_bits() -> None:
    command = "vllm serve Qwen/Qwen3-VL-30B-A3B-Instruct"
    fixes = fixes_of(shown("oom-weights", command=command, tried_to_allocate_bytes=512 * MIB, **FULL_CARD))
    assert "fewer bits" in fixes[0].why
    assert fixes[-1].argv[:2] == ("--tensor-parallel-size", "4")
    assert fixes[-1].why.startswith("Needs other hardware: 4 cards")
    assert not any(fix.replanned for fix in fixes)  # none on the two cards that are there


def test_the_share_beside_what_others_hold_leaves_a_cache() -> None:
    message = FREE.format(free=20.51, share=0.92, wanted=21.64)
    fixes = fixes_of(shown("free-memory-below-request", message, AWQ))
    assert fixes[0].argv == ("--gpu-memory-utilization", "0.82")
    assert fixes[0].replanned
    assert "are left for the cache" in fixes[0].why
    too_little = fixes_of(shown("free-memory-below-request", FREE.format(free=12.51, share=0.92, wanted=21.64), AWQ))
    assert (too_little[0].command or "").startswith("nvidia-smi")
    assert not any(fix.replanned for fix in too_little)
    assert any("not surely enough" in fix.why for fix in too_little)


def test_cards_that_the_log_does_not_name_are_computed_from_what_it_measured() -> None:
    command, _, readings = CAUSES["no-kv-memory"]
    found = with_fixes(shown("no-kv-memory", command=command, **readings), None, None)
    assert found.findings[0].fixes[0].argv[0] == "--gpu-memory-utilization"
    assert "the cards are taken to have about" in found.notes[0]


# ---------------------------------------------------------------------------------------------- laws


def case_on(cards: int = 2) -> Case:
    model = known_model("cyankiwi/Qwen3.5-35B-A3B-AWQ-4bit")
    assert model is not None
    gpus = tuple(GpuFacts(index=index, total_bytes=round(23.52 * GIB)) for index in range(cards))
    return Case(model, gpus, parse_argv(AWQ.split(), engine_version=VERSION), EngineFacts("vllm", VERSION))


@given(weights=st.integers(6 * GIB, 16 * GIB), cache=st.integers(-2 * GIB, 12 * GIB))
@settings(max_examples=25, deadline=None)
def test_a_corrected_plan_has_what_was_measured(weights: int, cache: int) -> None:
    case = case_on()
    fixed = structs.replace(case, corrected=correction(case.plan(), Seen(weights=weights, cache=cache)))
    plan = fixed.plan()
    assert plan.kv_cache is not None
    assert abs(max(rank.weight_bytes for rank in plan.ranks) - weights) < 100
    assert abs((plan.kv_cache.available_bytes or 0) - cache) < 100
    higher = fixed.plan({"--gpu-memory-utilization": 0.95})
    assert higher.kv_cache is not None
    gained = (higher.kv_cache.available_bytes or 0) - cache
    assert abs(gained - 0.03 * 23.52 * GIB) < 4096


@given(stage=st.sampled_from(["weights", "profile", "pool", "capture", "serving"]), over=st.integers(0, 4 * GIB))
@settings(max_examples=25, deadline=None)
def test_where_memory_ran_out_the_plan_reaches_at_least_what_was_in_use(stage: Any, over: int) -> None:
    case = case_on()
    used = round(23.52 * GIB) + over
    fixed = structs.replace(case, corrected=correction(case.plan(), Seen(used=used, stage=stage)))
    _, sheet = fixed.with_changes({})
    peak = {"capture": "steady", "serving": "serving"}.get(stage, "start")
    assert max(load.peak_bytes[peak] for load in sheet.gpus) >= used - 4096


def test_a_lever_gives_the_gentlest_value_that_holds() -> None:
    case = case_on()
    plan, sheet = case.with_changes({})
    limit = 40
    tried: list[int] = []

    def holds(plan: Any, sheet: Any) -> bool:
        tried.append(plan.settings.max_num_seqs)
        return bool(plan.settings.max_num_seqs <= limit)

    found = gentlest(case, "sequences", plan, sheet, holds)
    assert found is not None
    assert found.changes == {"--max-num-seqs": 32}
    assert len(tried) <= 6
    assert gentlest(case, "sequences", plan, sheet, lambda plan, sheet: False) is None


SIZES = st.none() | st.integers(-GIB, 200 * GIB)


@given(
    code=st.sampled_from(codes()),
    message=st.text(max_size=200),
    command=st.sampled_from([AWQ, UNKNOWN, "vllm serve", f"{AWQ} --max-model-len x --gpu-memory-utilization 7"]),
    version=st.sampled_from([None, "0.6.3", "0.24.0", "9.9", "nightly"]),
    sizes=st.fixed_dictionaries(
        {
            "kv_available_bytes": SIZES,
            "card_total_bytes": SIZES,
            "card_free_bytes": SIZES,
            "in_use_bytes": SIZES,
            "tried_to_allocate_bytes": SIZES,
            "total_bytes": SIZES,
            "free_bytes": SIZES,
            "graph_bytes": SIZES,
        }
    ),
)
@settings(max_examples=60, deadline=None)
def test_any_readings_give_fixes_or_none_and_never_an_error(
    code: str, message: str, command: str, version: str | None, sizes: dict[str, int | None]
) -> None:
    found = with_fixes(shown(code, message, command, version, **sizes), None, None)
    assert found.findings[0].code == code
    for fix in found.findings[0].fixes:
        assert fix.why
        assert not fix.replanned or fix.argv


# ---------------------------------------------------------------------------------------------- what was named


PROFILE: dict[str, Any] = {
    "model_loading_bytes": (size(11.52),) * 2,
    "tried_to_allocate_bytes": 512 * MIB,
    "card_total_bytes": size(15.99),
    "card_free_bytes": 305 * MIB,
    "in_use_bytes": size(15.65),
}
MANY_TOKENS = f"{AWQ} --max-num-batched-tokens 16384 --max-model-len 131072"


def test_fewer_tokens_in_a_step_are_part_of_the_fix_on_the_cards_that_are_there() -> None:
    fixes = fixes_of(shown("oom-profile-language", command=MANY_TOKENS, **PROFILE))
    sure = [fix for fix in fixes if fix.replanned]
    assert sure
    assert "--max-num-batched-tokens" in sure[0].argv
    assert not {"--tensor-parallel-size", "--enforce-eager", "--max-model-len"} & set(sure[0].argv)
    assert "The peak of the start falls from" in sure[0].why
    assert "It costs: " in sure[0].why


def test_a_checkpoint_of_other_weights_is_not_planned_with() -> None:
    other = known_model("Qwen/Qwen3-8B")
    assert other is not None
    found = with_fixes(shown("oom-profile-language", command=MANY_TOKENS, **PROFILE), other, None)
    assert not any(fix.replanned for fix in found.findings[0].fixes)
    assert "the checkpoint is not the one of this log: a rank loaded 11.52 GiB" in found.notes[0]


def test_cards_that_contradict_the_log_are_said_and_the_log_is_believed() -> None:
    named = [GpuFacts(index=index, total_bytes=size(23.56)) for index in range(2)]
    diagnosis = shown("oom-profile-language", command=MANY_TOKENS, **PROFILE)
    found = with_fixes(diagnosis, None, named)
    assert found.findings[0].fixes == with_fixes(diagnosis, None, None).findings[0].fixes
    assert found.notes[-1].startswith("the cards that were named have 23.56 GiB, those of the log 15.99 GiB")
    near = [GpuFacts(index=index, total_bytes=16 * GIB) for index in range(2)]
    assert not any("the cards that were named" in note for note in with_fixes(diagnosis, None, near).notes)


def test_memory_of_the_host_is_what_the_launch_itself_takes_of_it() -> None:
    command = f"{UNKNOWN} --tensor-parallel-size 2 --swap-space 16 --cpu-offload-gb 20"
    old = with_fixes(shown("host-ram-killed", command=command, version="0.7.3"), None, None)
    swap, offload, *others = old.findings[0].fixes
    assert (swap.argv, offload.remove) == (("--swap-space", "0"), ("--cpu-offload-gb",))
    assert "32 GiB in all" in swap.why
    assert "40 GiB in all" in offload.why
    assert not any("--mm-processor-cache-gb" in (fix.why + " ".join(fix.argv)) for fix in others)
    assert len(old.findings) == 1  # neither is called advice without effect
    new = with_fixes(shown("host-ram-killed", command=command, version="0.11.0"), None, None)
    assert not any("--swap-space" in fix.argv for fix in new.findings[0].fixes)
    assert any(fix.argv == ("--mm-processor-cache-gb", "0") for fix in new.findings[0].fixes)
    assert any("V1 engine" in item.cause for item in new.findings[1:])


@pytest.mark.parametrize(
    ("message", "command", "port"),
    [
        ("[Errno 98] error while attempting to bind on address ('0.0.0.0', 8123)", UNKNOWN, 8123),
        ("OSError: [Errno 98] Address already in use", f"{UNKNOWN} --port 9000", 9000),
        ("OSError: [Errno 98] Address already in use", UNKNOWN, 8000),
    ],
)
def test_a_port_that_is_taken_is_named_and_another_given(message: str, command: str, port: int) -> None:
    look, other, *_ = fixes_of(shown("port-in-use", message, command))
    assert look.command == f"ss -ltnp 'sport = :{port}'"
    assert other.argv == ("--port", str(port + 1))


def test_a_port_among_the_engines_own_processes_is_not_the_servers() -> None:
    message = "torch.distributed.DistNetworkError: The server socket has failed to listen (EADDRINUSE)"
    assert not any("--port" in fix.argv for fix in fixes_of(shown("port-in-use", message)))


def test_the_format_of_the_checkpoint_decides_about_the_flag() -> None:
    command = f"{AWQ} --quantization awq --max-model-len 16384 --gpu-memory-utilization 0.7"
    on_cards = shown("quant-method-mismatch", command=command)
    gpus = [GpuFacts(index=index, total_bytes=48 * GIB) for index in range(2)]
    (fix,) = with_fixes(on_cards, None, gpus).findings[0].fixes
    assert fix.remove == ("--quantization",)
    assert fix.replanned
    assert fix.why.startswith("The checkpoint is in the format compressed-tensors.")
    assert " GiB of 48.00 GiB while serving" in fix.why
    (unplanned,) = with_fixes(on_cards, None, None).findings[0].fixes
    assert not unplanned.replanned
    assert "--gpus does" in unplanned.why


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("--max-model-length 4096", ("--max-model-len", "4096")),
        ("--limit-mm image=2", ("--limit-mm-per-prompt", "image=2")),
        ("--enable-expert-paralel", ("--enable-expert-parallel",)),
    ],
)
def test_an_unknown_flag_gets_the_nearest_by_name(words: str, argv: tuple[str, ...]) -> None:
    first, *_ = fixes_of(shown("unknown-flag", f"vllm serve: error: unrecognized arguments: {words}"))
    assert first.argv == argv
    assert first.remove == (words.split()[0],)
