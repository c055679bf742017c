"""Phases and causes out of engines' logs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.checks.catalogue import codes
from loadmaster.core.enginelog import LogReader, grammar, phase_words, repeats
from loadmaster.core.signatures import signatures

VLLM, LLAMACPP = "vllm-log.toml", "llamacpp-log.toml"

# vLLM 0.24, runner V1
START_V1 = """\
(APIServer pid=718) INFO 11-30 09:48:14 [api_utils.py:273] non-default args: {'model': '/models/m'}
(EngineCore pid=964) INFO 11-30 09:49:06 [core.py:114] Initializing a V1 LLM engine (v0.24.0) with config: model='/m'
(Worker_TP0 pid=1075) INFO 11-30 09:49:29 [gpu_model_runner.py:5160] Starting to load model /models/m...
(Worker_TP1 pid=1076) INFO 11-30 09:49:30 [gpu_model_runner.py:5160] Starting to load model /models/m...
(Worker_TP0 pid=1075) INFO 11-30 09:49:41 [gpu_model_runner.py:5255] Model loading took 10.66 GiB memory and 11.0 seconds
(Worker_TP0 pid=1075) INFO 11-30 09:49:43 [gpu_model_runner.py:6271] Encoder cache will be initialized with a budget of 16384 tokens, and profiled with 1 image items of the maximum feature size.
(Worker_TP0 pid=1075) INFO 11-30 09:49:50 [gpu_model_runner.py:6470] Profiling CUDA graph memory: PIECEWISE=51 (largest=512), FULL=35 (largest=256)
(Worker_TP0 pid=1075) INFO 11-30 09:50:37 [gpu_worker.py:508] Available KV cache memory: 8.91 GiB
(EngineCore pid=964) INFO 11-30 09:50:37 [kv_cache_utils.py:1714] GPU KV cache size: 831,162 tokens
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|##########| 51/51
(Worker_TP0 pid=1075) INFO 11-30 09:50:57 [gpu_model_runner.py:6680] Graph capturing finished in 9 secs, took 0.30 GiB
(EngineCore pid=964) INFO 11-30 09:51:04 [core.py:337] init engine (profile, create kv cache, warmup model) took 183.48 s
(APIServer pid=718) INFO:     Application startup complete.
"""
# vLLM 0.33, runner V2: graphs are captured once before the cache is sized, and no line announces it
START_V2 = """\
(APIServer pid=1) INFO 11-30 09:48:14 [startup.py:96] non-default args: {'model': '/models/m'}
(EngineCore pid=2) INFO 11-30 09:49:06 [core.py:114] Initializing a V1 LLM engine (v0.33.0) with config: model='/m'
(Worker_TP0 pid=3) INFO 11-30 09:49:29 [model_runner.py:390] Starting to load model /models/m...
(Worker_TP0 pid=3) INFO 11-30 09:49:41 [model_runner.py:429] Model loading took 10.66 GiB memory and 11.0 seconds
Capturing CUDA graphs (decode, FULL): 100%|##########| 2/2
(Worker_TP0 pid=3) INFO 11-30 09:50:01 [model_runner.py:1164] Graph capturing finished in 1 secs, took 0.02 GiB
(Worker_TP0 pid=3) INFO 11-30 09:50:37 [gpu_worker.py:773] Available KV cache memory: 8.91 GiB
Capturing CUDA graphs (decode, FULL): 100%|##########| 35/35
(EngineCore pid=2) INFO 11-30 09:51:04 [core.py:413] init engine (profile, create kv cache, warmup model) took 83.48 s
(APIServer pid=1) INFO:     Application startup complete.
"""
# vLLM 0.32 on a CPU, eager, the cache's size given
START_CPU = """\
(APIServer pid=1) INFO 11-30 17:12:01 [startup.py:96] non-default args: {'model_tag': '/models/tiny'}
(EngineCore pid=2) INFO 11-30 17:12:13 [core.py:114] Initializing a V1 LLM engine (v0.32.0+cpu) with config: model='/models/tiny'
(Worker pid=3) INFO 11-30 17:12:25 [cpu_model_runner.py:62] Starting to load model /models/tiny...
(Worker pid=3) INFO 11-30 17:12:26 [cpu_worker.py:260] Explicitly set (0.06/23.54) GiB for KV cache on node 0.
(EngineCore pid=2) INFO 11-30 17:12:26 [kv_cache_utils.py:2327] CPU KV cache size: 26,112 tokens, Maximum concurrency for 1,024 tokens per request: 25.50x
(EngineCore pid=2) INFO 11-30 17:12:26 [core.py:413] init engine (profile, create kv cache, warmup model) took 0.05 s
INFO:     Started server process [1]
INFO:     Waiting for application startup.
INFO:     Application startup complete.
"""
ALL = ["starting", "engine", "loading", "profiling", "profiling-graphs", "cache", "capturing", "warming-up", "serving"]


def read(text: str, name: str = VLLM) -> tuple[LogReader, list[str]]:
    reader, phases = LogReader(name), []
    for line in text.splitlines():
        phase = reader.phase(line)
        if phase is not None:
            phases.append(phase)
        reader.failure(line)
    return reader, phases


@pytest.mark.parametrize("text", [START_V1, START_V2])
def test_a_start_goes_through_its_phases_once(text: str) -> None:
    reader, phases = read(text)
    assert phases == ALL
    assert (reader.cause, reader.weak_cause, reader.cause_line) == (None, None, None)


def test_an_eager_start_has_no_graphs() -> None:
    text = "\n".join(line for line in START_V1.splitlines() if "graph" not in line.lower())
    assert read(text)[1] == [name for name in ALL if name not in ("profiling-graphs", "capturing")]


def test_a_start_on_a_processor() -> None:
    assert read(START_CPU)[1] == ["starting", "engine", "loading", "cache", "warming-up", "serving"]


def oom(*frames: str, before: str = "") -> str:
    lines = [f'(Worker_TP0 pid=9) ERROR 11-30 09:49:31 [x.py:1]   File "{frame}", line 1, in f' for frame in frames]
    head = "(Worker_TP0 pid=9) ERROR 11-30 09:49:31 [x.py:1] Traceback (most recent call last):"
    last = "(Worker_TP0 pid=9) ERROR 11-30 09:49:31 [x.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    return "\n".join([before, head, *lines, last])


def upto(phase: str) -> str:
    """The start's log until the phase begins."""
    lines: list[str] = []
    reader = LogReader(VLLM)
    for line in START_V1.splitlines():
        lines.append(line)
        if reader.phase(line) == phase:
            break
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("phase", "frames", "code"),
    [
        ("loading", ("worker.py load_model", "linear.py create_weights"), "oom-weights"),
        ("profiling", ("profile_run", "qwen3_vl.py self.visual(pixel_values)"), "oom-profile-vision"),
        ("profiling", ("profile_run", "_dummy_run", "fused_moe.py"), "oom-profile-language"),
        ("profiling", ("profile_run", "_dummy_sampler_run"), "oom-sampler-warmup"),
        ("profiling", ("profile_cudagraph_memory", "allocate_kv_cache"), "oom-cudagraph-profile-pool"),
        ("profiling-graphs", ("profile_cudagraph_memory", "_allocate_kv_cache_tensors"), "oom-cudagraph-profile-pool"),
        ("capturing", ("capture_model", "torch/cuda/graphs.py"), "oom-cudagraph-capture"),
        ("capturing", (), "oom-cudagraph-capture"),
        ("serving", ("execute_model", "visual"), "oom-runtime"),
        ("cache", ("something_else",), "oom-cudagraph-capture"),
    ],
)
def test_out_of_memory_is_told_apart_by_its_place(phase: str, frames: tuple[str, ...], code: str | None) -> None:
    reader, phases = read(oom(*frames, before=upto(phase)))
    assert phases[-1] == phase
    assert reader.cause == code
    if code is not None:
        assert "Tried to allocate 1.00 GiB" in (reader.cause_line or "")


def test_frames_of_one_process_do_not_colour_anothers_failure() -> None:
    other = '(Worker_TP1 pid=8) ERROR 11-30 09:49:31 [x.py:1]   File "profile_run visual", line 1, in f'
    reader, _ = read(oom("profile_run", "_dummy_run", before=f"{upto('profiling')}\n{other}"))
    assert reader.cause == "oom-profile-language"


def test_frames_of_an_earlier_traceback_do_not_count() -> None:
    text = oom("profile_run", "visual").replace(
        "torch.OutOfMemoryError: CUDA out of memory. Tried", "ValueError: x. Tried"
    )
    reader, _ = read(oom("profile_run", "_dummy_run", before=f"{upto('profiling')}\n{text}"))
    assert reader.cause == "oom-profile-language"


def test_the_root_cause_comes_before_what_hides_it() -> None:
    hiding = "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    cause = "(EngineCore pid=9) ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    reader, _ = read(hiding)
    assert (reader.cause, reader.weak_cause) == (None, "engine-dead-masked")
    reader, _ = read("\n".join([cause, hiding, cause.replace("No available", "x")]))
    assert (reader.cause, reader.weak_cause) == ("no-kv-memory", None)
    assert reader.cause_line == cause


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("ValueError: Free memory on device cuda:0 (12.5/23.5 GiB) on startup is less than desired GPU memory utilization (0.92, 21.6 GiB).", "free-memory-below-request"),
        ("ValueError: To serve at least one request with the models's max seq len (8192), (1.0 GiB KV cache is needed", "context-exceeds-kv"),
        ("ValueError: To serve at least one request with the model's max seq len (8192), (1.0 GiB KV cache is needed", "context-exceeds-kv"),
        ("vllm: error: unrecognized arguments: --max-modle-len", "unknown-flag"),
        ("OSError: [Errno 98] Address already in use", "port-in-use"),
        ("\x1b[36m(EngineCore_DP0 pid=367)\x1b[0m SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", "weights-truncated"),
    ],
)  # fmt: skip
def test_messages_that_name_their_cause(line: str, code: str) -> None:
    assert LogReader(VLLM).failure(line) == code


def test_a_remark_about_memory_is_no_failure() -> None:
    reader = LogReader(VLLM)
    for line in (
        "INFO [gpu_worker.py:9] Free memory on device cuda:0 (23.1/23.52 GiB) on startup. Desired GPU memory utilization is (0.92, 21.64 GiB).",
        "WARNING Found ulimit of 20000 ... This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
        "INFO No available shared memory broadcast block found in 60 seconds.",
    ):
        assert reader.failure(line) is None


@pytest.mark.parametrize("name", [VLLM, LLAMACPP])
def test_phases_are_complete(name: str) -> None:
    for phase in grammar(name).phase:
        assert phase.source
        assert phase.texts
        assert phase_words(name, phase.name) == phase.words
    names = [phase.name for phase in grammar(name).phase]
    assert len(names) == len(set(names))


def test_codes_are_known_and_phases_named() -> None:
    known = set(codes())
    names = {phase.name for name in (VLLM, LLAMACPP) for phase in grammar(name).phase}
    for entry in signatures():
        assert entry.code in known
        assert entry.source
        assert set(entry.phases) <= {*names, ""}


def test_which_failures_come_again() -> None:
    assert repeats(VLLM, "oom-weights") is True
    assert repeats(VLLM, "oom-runtime") is False
    assert repeats(VLLM, "port-in-use") is False
    assert repeats(VLLM, "no-such-code") is None


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("0.00.004.104 E gguf_init_from_reader: invalid magic characters: '#??t', expected 'GGUF'", "header-invalid"),
        ("0.00.004.5 E llama_model_load: error loading model: tensor 'token_embd.weight' data is not within the file bounds, model is corrupted or incomplete", "weights-truncated"),
        ("0.00.004.045 E llama_model_load: error loading model: CLIP cannot be used as main model, use it with --mmproj instead", "config-invalid"),
        ("0.00.013.362 E mtmd_init_from_file: error: Failed to load CLIP model from junk.gguf", "processor-missing"),
        ("0.00.005.657 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18932", "port-in-use"),
    ],
)  # fmt: skip
def test_llamacpp_messages(line: str, code: str) -> None:
    assert LogReader(LLAMACPP).failure(line) == code


@given(st.lists(st.text(max_size=200)))
def test_any_text_is_read(lines: list[str]) -> None:
    reader = LogReader(VLLM)
    for line in lines:
        reader.phase(line)
        reader.failure(line)


def test_endless_lines_and_speakers_are_bounded() -> None:
    reader = LogReader(VLLM)
    for number in range(500):
        for _ in range(3):
            reader.failure(f'(Worker pid={number})   File "{"x" * 9000}", line 1')
    assert len(reader._tracebacks._frames) <= 64
    assert max(len(frame) for frames in reader._tracebacks._frames.values() for frame in frames) <= 4000
