"""From a whole log to its root cause: facts, order of time, starts, excerpts; and laws that hold for any mishandling."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core.diagnosis import Diagnoser, Diagnosis, ExitSeen

HEALTHY = """\
(APIServer pid=7) INFO 11-30 09:31:25 [api_utils.py:273] non-default args: {'model_tag': '/models/m', 'host': '127.0.0.1', 'model': '/models/m', 'max_model_len': 262144, 'tensor_parallel_size': 2, 'max_num_seqs': 16, 'api_key': ['abc']}
(APIServer pid=7) INFO 11-30 09:31:25 [model.py:598] Resolved architecture: Qwen3_5MoeForConditionalGeneration
(EngineCore pid=8) INFO 11-30 09:31:46 [core.py:114] Initializing a V1 LLM engine (v0.24.0) with config: model='/models/m', quantization=compressed-tensors, tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, seed=0
(Worker_TP0 pid=9) INFO 11-30 09:32:08 [gpu_model_runner.py:5160] Starting to load model /models/m...
(Worker_TP0 pid=9) INFO 11-30 09:32:09 [cuda.py:480] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON_ATTN'].
(Worker_TP0 pid=9) INFO 11-30 09:32:13 [gpu_model_runner.py:5255] Model loading took 11.3 GiB memory and 2.981296 seconds
(Worker_TP1 pid=10) INFO 11-30 09:32:14 [gpu_model_runner.py:5255] Model loading took 11.5 GiB memory and 2.981296 seconds
(EngineCore pid=8) INFO 11-30 09:33:14 [shm_broadcast.py:705] No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging.
(Worker_TP0 pid=9) INFO 11-30 09:35:02 [gpu_worker.py:508] Available KV cache memory: 8.05 GiB
(EngineCore pid=8) INFO 11-30 09:35:02 [kv_cache_utils.py:2146] GPU KV cache size: 831,162 tokens
(EngineCore pid=8) INFO 11-30 09:35:02 [kv_cache_utils.py:2147] Maximum concurrency for 262,144 tokens per request: 3.17x
Capturing CUDA graphs (decode, FULL): 100%|##########| 5/5
(Worker_TP0 pid=9) INFO 11-30 09:35:06 [gpu_model_runner.py:6656] Graph capturing finished in 4 secs, took 0.12 GiB
(EngineCore pid=8) INFO 11-30 09:35:07 [core.py:337] init engine (profile, create kv cache, warmup model) took 173.74 s
(APIServer pid=7) INFO:     Application startup complete.
(APIServer pid=7) INFO:     127.0.0.1:58158 - "POST /v1/chat/completions HTTP/1.1" 200 OK
"""
LOADED = "".join(HEALTHY.splitlines(keepends=True)[:6])
PROFILED = "".join(HEALTHY.splitlines(keepends=True)[:11])
MASK = """\
(EngineCore pid=8) ERROR 11-30 09:36:01 [core.py:1136] EngineCore failed to start.
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def raised(*frames: str, message: str, speaker: str = "Worker_TP1 pid=10", clock: str = "09:36:00") -> str:
    head = f"({speaker}) ERROR 11-30 {clock} [multiproc_executor.py:949] "
    lines = ["Traceback (most recent call last):", *(f'  File "/v/{frame}.py", line 7, in {frame}' for frame in frames)]
    return "".join(f"{head}{line}\n" for line in [*lines, message])


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 23.52 GiB of "
    "which 115.69 MiB is free. Including non-PyTorch memory, this process has 23.37 GiB memory in use. Of the allocated "
    "memory 22.69 GiB is allocated by PyTorch, and 209.68 MiB is reserved by PyTorch but unallocated."
)
FAILED = {
    "oom-profile-language": LOADED
    + raised("determine_available_memory", "profile_run", "_dummy_run", message=OOM)
    + MASK,
    "oom-cudagraph-capture": PROFILED + raised("capture_model", message=OOM) + MASK,
    "oom-weights": LOADED.rsplit("\n", 2)[0] + "\n" + raised("load_model", "create_weights", message=OOM) + MASK,
    "oom-runtime": HEALTHY + raised("execute_model", message=OOM) + MASK,
    "context-exceeds-kv": PROFILED
    + raised(
        "get_kv_cache_configs",
        message="ValueError: To serve at least one request with the model's max seq len (262144), (9.1 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (8.05 GiB). Based on the available memory, the "
        "estimated maximum model length is 231000.",
    )
    + MASK,
    "weights-truncated": LOADED
    + raised(
        "safetensors_weights_iterator",
        message="safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    )
    + MASK,
}


def read(text: str, exit: ExitSeen | None = None) -> Diagnosis:
    diagnoser = Diagnoser()
    diagnoser.read(text.encode("utf-8", "replace") + b"\n")
    return diagnoser.close(exit)


def codes(found: Diagnosis) -> list[str]:
    return [finding.code for finding in found.findings]


# ------------------------------------------------------------------------------------------------------- facts


def test_a_healthy_start_and_its_facts() -> None:
    found = read(HEALTHY)
    facts = found.facts
    assert found.healthy is True
    assert [(item.code, item.severity) for item in found.findings] == [("worker-not-answering", "note")]
    assert (facts.engine.name, facts.engine.version, facts.model) == ("vllm", "0.24.0", "/models/m")
    assert (facts.quantization, facts.tensor_parallel_size) == ("compressed-tensors", 2)
    assert (facts.reached, facts.starts, facts.backends) == ("served", 1, {"attention": "FLASH_ATTN"})
    assert facts.launch is not None
    assert facts.launch.argv[:3] == ("vllm", "serve", "/models/m")
    assert facts.launch.flags["--max-model-len"] == 262144
    assert "abc" not in str(facts.launch)
    gib = 2**30
    assert facts.readings.model_loading_bytes == (round(11.3 * gib), round(11.5 * gib))
    assert (facts.readings.kv_available_bytes, facts.readings.kv_available_per_rank) == (
        round(8.05 * gib),
        (round(8.05 * gib), None),
    )
    assert (facts.readings.kv_tokens, facts.readings.max_concurrency) == (831162, 3.17)
    assert (facts.readings.max_model_len, facts.readings.graph_bytes) == (262144, round(0.12 * gib))
    assert [(phase.name, phase.seconds) for phase in facts.phases][1:4] == [("engine", 22.0), ("loading", 5.0), ("profiling", 169.0)]  # fmt: skip


def test_arguments_of_old_versions_over_several_lines() -> None:
    text = """\
INFO 06-15 14:33:24 api_server.py:177] vLLM API server version 0.5.0.post1
INFO 06-15 14:33:24 api_server.py:178] args: Namespace(host=None, port=8000, allowed_origins=['*'], model='/models/l', dtype='half',
 tensor_parallel_size=2, gpu_memory_utilization=0.8, max_model_len=None, qu
antization='awq', enforce_eager=True, swap_space=4)
INFO 06-15 14:33:32 model_runner.py:160] Loading model weights took 5.3128 GB
INFO 06-15 14:34:17 gpu_executor.py:83] # GPU blocks: 2595, # CPU blocks: 2048
"""
    facts = read(text).facts
    assert facts.launch is not None
    assert facts.launch.flags == {
        "--dtype": "half",
        "--tensor-parallel-size": 2,
        "--gpu-memory-utilization": 0.8,
        "--quantization": "awq",
        "--enforce-eager": True,
    }
    assert (facts.model, facts.engine.version) == ("/models/l", "0.5.0.post1")
    assert facts.readings.kv_tokens == 2595 * 16
    assert facts.readings.model_loading_bytes == (round(5.3128 * 2**30), None)


def test_numbers_of_an_out_of_memory_error() -> None:
    readings = read(FAILED["oom-cudagraph-capture"]).facts.readings
    assert readings.tried_to_allocate_bytes == round(1.02 * 2**30)
    assert readings.card_total_bytes == round(23.52 * 2**30)
    assert readings.card_free_bytes == round(115.69 * 2**20)
    assert readings.in_use_bytes == round(23.37 * 2**30)


# -------------------------------------------------------------------------------------------------- root causes


@pytest.mark.parametrize("code", FAILED)
def test_the_root_cause_is_first(code: str) -> None:
    found = read(FAILED[code])
    assert found.healthy is False
    assert codes(found)[0] == code
    assert "engine-dead-masked" not in codes(found)
    lines = FAILED[code].splitlines()
    for evidence in found.findings[0].evidence:
        assert evidence.line is not None
        assert lines[evidence.line - 1].strip().startswith(evidence.text[:80])


def test_the_earliest_over_all_ranks_counts_not_the_first_written() -> None:
    late = raised("x", message="RuntimeError: CUDA error: an illegal memory access was encountered", clock="09:36:30")
    early = raised("capture_model", message=OOM, speaker="Worker_TP0 pid=9", clock="09:35:59")
    assert codes(read(PROFILED + late + early + MASK))[:2] == ["oom-cudagraph-capture", "illegal-memory-access"]


def test_only_a_death_without_its_cause() -> None:
    found = read(LOADED + raised("f", message="FrobnicationError: x") + MASK)
    assert codes(found) == ["engine-dead-masked"]
    assert "FrobnicationError" in found.suspicious[0].text


def test_unknown_words_are_said_to_be_unknown() -> None:
    found = read(LOADED + raised("f", message="FrobnicationError: the frobnicator is out of order"))
    assert (found.healthy, codes(found)) == (None, [])
    assert "FrobnicationError" in found.suspicious[0].text


def test_what_came_before_a_server_that_answers_did_no_harm() -> None:
    odd = raised("x", message="ValueError: No available memory for the cache blocks. Try increasing it")
    found = read(LOADED + odd + HEALTHY.split("\n", 6)[6])
    assert found.healthy is True
    assert "no-kv-memory" not in codes(found)
    assert any("no-kv-memory" in note for note in found.notes)


def test_an_error_after_the_server_answered_leaves_it_open() -> None:
    found = read(HEALTHY + raised("f", message="FrobnicationError: x"))
    assert found.healthy is None


def test_the_last_of_several_starts_is_meant() -> None:
    found = read(FAILED["oom-weights"] + HEALTHY)
    assert (found.healthy, found.facts.starts) == (True, 2)
    assert any("oom-weights" in note for note in found.notes)
    found = read(HEALTHY + FAILED["context-exceeds-kv"])
    assert (codes(found)[0], found.facts.starts) == ("context-exceeds-kv", 2)


@pytest.mark.parametrize(
    ("free", "first"),
    [("13.58/15.99", "free-memory-below-request"), ("5.92/15.99", "gpu-held-by-other-process"), ("15.2/15.99", "free-memory-below-request")],
)  # fmt: skip
def test_a_little_too_much_asked_for_or_a_card_held_by_others(free: str, first: str) -> None:
    asked = 15.3 if free.startswith("15") else 13.59
    text = f"ValueError: Free memory on device cuda:0 ({free} GiB) on startup is less than desired GPU memory utilization (0.85, {asked} GiB)."
    assert codes(read(text))[0] == first


def test_other_processes_in_an_out_of_memory_error() -> None:
    held = OOM.replace("this process has 23.37 GiB", "this process has 9.37 GiB").replace("22.69", "9.00")
    found = read(PROFILED + raised("capture_model", message=held))
    assert codes(found)[:2] == ["gpu-held-by-other-process", "oom-cudagraph-capture"]


def test_how_the_process_ended() -> None:
    found = read(HEALTHY, ExitSeen(signal=9, oom_kills=1))
    assert codes(found)[0] == "host-ram-killed"
    found = read(HEALTHY, ExitSeen(code=1))
    assert found.healthy is False
    found = read(FAILED["oom-weights"], ExitSeen(code=0))
    assert any("exit code 0" in note for note in found.notes)


def test_several_files_are_named() -> None:
    diagnoser = Diagnoser()
    for name, text in (("a.log", PROFILED), ("b.log", raised("capture_model", message=OOM))):
        diagnoser.begin_file(name)
        diagnoser.read(text.encode())
    evidence = diagnoser.close().findings[0].evidence[0]
    assert (evidence.path, evidence.line) == ("b.log", 3)


# --------------------------------------------------------------------------------------------------------- laws


def wrapped(text: str, width: int) -> str:
    return "\n".join(line[at : at + width] for line in text.splitlines() for at in range(0, max(len(line), 1), width))


def noisy(text: str, chance: random.Random) -> str:
    """Lines of others between those of the log, as a busy machine writes them."""
    others = (
        '(APIServer pid=7) INFO:     127.0.0.1:9 - "GET /health HTTP/1.1" 503 Service Unavailable',
        "/usr/lib/python3.12/x.py:254: UserWarning: resource_tracker: 1 leaked object to clean up",
        "",
        "(Worker_TP0 pid=9) WARNING 11-30 09:32:14 [a.py:1] Using default MoE config. Performance might be sub-optimal!",
    )
    return "\n".join(
        part
        for line in text.splitlines()
        for part in ((line, chance.choice(others)) if chance.random() < 0.3 else (line,))
    )


def interleaved(text: str, chance: random.Random) -> str:
    """Processes write at the same time: each one's lines stay in their order."""
    lines = text.splitlines()
    queues: dict[str, list[str]] = {}
    for line in lines:
        queues.setdefault(line.split(")")[0], []).append(line)
    start = [line for line in lines if "ERROR" not in line and "RuntimeError" not in line]
    failing = {name: [line for line in queue if line not in start] for name, queue in queues.items()}
    mixed = []
    while any(failing.values()):
        name = chance.choice([name for name, queue in failing.items() if queue])
        mixed.append(failing[name].pop(0))
    return "\n".join([*start, *mixed])


AROUND: tuple[Callable[[str], str], ...] = (
    lambda line: line,
    lambda line: f"vllm-1  | {line}",
    lambda line: f"> {line}",
    lambda line: f"\x1b[36m{line}\x1b[0m",
    lambda line: f"Nov 30 09:48:14 host vllm[123]: {line}",
    lambda line: f"2026-11-30T09:48:14.123456789Z stderr F {line}",
    lambda line: json.dumps({"log": line + "\n", "stream": "stderr"}),
    lambda line: f"{line}\r",
)


@settings(max_examples=60, deadline=None)
@given(
    code=st.sampled_from(sorted(FAILED)),
    around=st.sampled_from(AROUND),
    seed=st.integers(0, 999),
    width=st.sampled_from((None, 200, 120, 100)),
    noise=st.booleans(),
    mixed=st.booleans(),
)
def test_no_mishandling_loses_the_root_cause(
    code: str, around: Callable[[str], str], seed: int, width: int | None, noise: bool, mixed: bool
) -> None:
    chance = random.Random(seed)
    text = interleaved(FAILED[code], chance) if mixed and code != "oom-runtime" else FAILED[code]
    if noise and width is None:
        text = noisy(text, chance)
    if width is not None:
        text = wrapped(text, width)
    text = "\n".join(around(line) for line in text.splitlines())
    assert codes(read(text))[0] == code


@settings(max_examples=80, deadline=None)
@given(code=st.sampled_from(sorted(FAILED)), data=st.data())
def test_a_log_that_is_cut_anywhere(code: str, data: st.DataObject) -> None:
    whole = FAILED[code].encode()
    cut = data.draw(st.integers(0, len(whole)))
    diagnoser = Diagnoser()
    diagnoser.read(whole[:cut] + b"\n")
    found = codes(diagnoser.close())
    cause = whole.index(MASK.encode())
    if cut >= cause:
        assert found[0] == code
    elif found:
        assert "engine-dead-masked" not in found


@settings(max_examples=40, deadline=None)
@given(code=st.sampled_from(sorted(FAILED)), size=st.integers(1, 4000))
def test_blocks_and_lines_tell_the_same(code: str, size: int) -> None:
    text = FAILED[code]
    by_line, by_block = Diagnoser(), Diagnoser()
    for number, line in enumerate(text.splitlines(), 1):
        by_line.feed(line, number)
    lines = text.encode().splitlines(keepends=True)
    block = b""
    for line_bytes in lines:
        block += line_bytes
        if len(block) >= size:
            by_block.read(block)
            block = b""
    if block:
        by_block.read(block)
    one, other = by_line.close(), by_block.close()
    assert codes(one) == codes(other)
    assert one.facts == other.facts
    assert [finding.evidence for finding in one.findings] == [finding.evidence for finding in other.findings]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_are_read(data: bytes) -> None:
    diagnoser = Diagnoser()
    diagnoser.read(LOADED.encode() + data + b"\n")
    diagnoser.close()


def test_a_cause_after_a_hundred_thousand_dull_lines() -> None:
    dull = "".join(
        f'(APIServer pid=7) INFO:     127.0.0.1:{port} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        for port in range(100_000)
    )
    found = read(HEALTHY + dull + raised("execute_model", message=OOM) + MASK)
    assert codes(found)[0] == "oom-runtime"
    assert found.findings[0].evidence[0].line == len((HEALTHY + dull).splitlines()) + 3


PASTED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.00 GiB. GPU 1 has a total capacity of 23.56 GiB?"
)
ASKED = {
    "prompt": f"INFO [logger.py:39] Received request chatcmpl-1: prompt: 'Why? {PASTED}', params: SamplingParams(n=1), "
    "prompt_token_ids: None, lora_request: None, prompt_adapter_request: None.\n",
    "answer": "(APIServer pid=7) INFO 11-30 09:40:00 [logger.py:77] Generated response chatcmpl-1 (streaming complete): "
    "output: 'It says [Errno 98] Address already in use', output_token_ids: None, finish_reason: stop\n",
    "details": f'(APIServer pid=7) DEBUG 11-30 09:40:00 [request_logger.py:52] Request cmpl-1 details: prompt: "{PASTED}", '
    "prompt_token_ids: None, prompt_embeds shape: None.\n",
    "several lines": "(APIServer pid=7) INFO 11-30 09:40:00 [logger.py:39] Received request chatcmpl-1: prompt: 'Why?\n"
    f"ERROR 11-30 09:20:45 [core.py:708] EngineCore failed to start.\nTraceback (most recent call last):\n{PASTED}\n"
    "', params: SamplingParams(n=1), lora_request: None.\n",
    "sglang": f"[2026-11-30 09:40:00] Receive: obj=GenerateReqInput(rid='1', text='{PASTED}')\n",
}
ANSWERED = '(APIServer pid=7) INFO:     127.0.0.1:58158 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'


@pytest.mark.parametrize("what", ASKED)
def test_what_people_ask_and_the_model_answers_is_no_failure(what: str) -> None:
    dull = ANSWERED * 3000
    for log in (HEALTHY + ASKED[what], HEALTHY + dull + ASKED[what] + dull):
        found = read(log)
        assert (found.healthy, codes(found)) == (True, codes(read(HEALTHY)))


@pytest.mark.parametrize("what", ASKED)
def test_a_failure_after_what_people_asked_is_one(what: str) -> None:
    log = HEALTHY + ASKED[what] + ANSWERED + raised("execute_model", message=OOM, clock="09:41:00") + MASK
    assert codes(read(log))[0] == "oom-runtime"
    cut = ASKED[what].splitlines(keepends=True)[0].partition("params:")[0].rstrip() + "\n"  # its end is lost
    assert (
        codes(read(HEALTHY + cut + raised("execute_model", message=OOM, clock="09:41:00") + MASK))[0] == "oom-runtime"
    )


def test_what_systemd_says_is_no_part_of_the_engines_message() -> None:
    log = (
        "Nov 30 10:00:00 box vllm[7]: OSError: [Errno 98] Address already in use\n"
        "Nov 30 10:00:01 box systemd[1]: vllm.service: Main process exited, code=exited, status=1/FAILURE\n"
    )
    found = read(LOADED + log)
    assert codes(found)[0] == "port-in-use"
    assert "vllm.service" not in found.findings[0].cause
