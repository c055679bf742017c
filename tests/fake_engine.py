"""A program that speaks the OpenAI API and plays a vLLM in every state a real one gets into.

    python fake_engine.py --port 8000 --load 2 --tps 50
    python fake_engine.py --port 8000 --oom-at kv --version 0.24.0

Standard library alone, one file. Its log has vLLM's wording (0.24 and 0.33). While it runs, ``POST /fake`` with an
object of the switches in ``Switches`` changes its behaviour, ``GET /fake`` tells what it has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OOM_PLACES = ("load", "profile-vision", "profile-language", "sampler", "graph-pool", "kv", "capture", "runtime")
MESSAGES = ("context", "free-memory", "bad-flag", "truncated", "port")
STAGES = ("start", "load", "profile", "capture", "ready")
WORDS = ("The", " picture", " shows", " a", " red", " square", " and", " a", " blue", " circle", ".")
GARBAGE = b"\x00\xff\xfe HTTP garbage \x80\x81\r\n\r\n"
MOST_BODY = 256 * 1024 * 1024


class Switches:
    """What can be changed while the program runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tps: float = options.tps
        self.tokens: int = options.tokens
        self.stuck: bool = options.stuck
        self.stuck_after: int | None = options.stuck_after
        self.garbage: bool = options.garbage
        self.crash_after_tokens: int | None = options.crash_after_tokens
        self.status: int | None = options.status
        self.delay: float = options.delay
        self.answers: list[list[str]] = []
        self.oom: bool = options.oom_at == "runtime"


class Log:
    """Lines as vLLM writes them. ``version`` decides between the wordings of 0.24 and 0.33."""

    def __init__(self, version: str) -> None:
        self.new = tuple(int(part) for part in version.split(".")[:2]) >= (0, 28)
        self.version = version
        self.api, self.core, self.worker = os.getpid(), os.getpid() + 1, os.getpid() + 2

    def raw(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def line(self, speaker: str, place: str, text: str, level: str = "INFO") -> None:
        pid = {"APIServer": self.api, "EngineCore": self.core}.get(speaker, self.worker)
        now = time.strftime("%m-%d %H:%M:%S")
        for part in text.split("\n"):
            self.raw(f"({speaker} pid={pid}) {level} {now} [{place}] {part}")

    def traceback(self, speaker: str, place: str, head: str, frames: list[tuple[str, int, str]], error: str) -> None:
        lines = [head, "Traceback (most recent call last):"]
        for file, number, function in frames:
            lines.append(f'  File "/opt/vllm/lib/python3.12/site-packages/{file}", line {number}, in {function}')
        self.line(speaker, place, "\n".join([*lines, error]), "ERROR")


def out_of_memory(mib: float, free: float = 128.0) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {mib:.2f} MiB. GPU 0 has a total capacity of "
        f"23.52 GiB of which {free:.2f} MiB is free. Including non-PyTorch memory, this process has 23.39 GiB memory "
        "in use. Of the allocated memory 22.71 GiB is allocated by PyTorch, and 214.37 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


PROGRESS = " 50%|█████     | 26/51 [00:02<00:02, 11.20it/s]"
NEW_UTILS = "vllm/v1/worker/utils.py"
WORKER = "vllm/v1/worker/gpu_worker.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
QWEN = "vllm/model_executor/models/qwen3_vl.py"
CORE_FRAMES = [("vllm/v1/engine/core.py", 1091, "run_engine_core"), ("vllm/v1/engine/core.py", 130, "__init__")]


def die(log: Log, head_frames: list[tuple[str, int, str]], error: str) -> None:
    """The end of a start as vLLM logs it: the worker's traceback, the engine's, and the one that hides both."""
    log.traceback("Worker_TP0", "multiproc_executor.py:1057", "WorkerProc failed to start.", head_frames, error)
    log.traceback("EngineCore", "core.py:1100", "EngineCore failed to start.", CORE_FRAMES + head_frames, error)
    log.raw(f"(APIServer pid={log.api}) Traceback (most recent call last):")
    log.raw(f'(APIServer pid={log.api})   File "/opt/vllm/bin/vllm", line 8, in <module>')
    log.raw(
        f"(APIServer pid={log.api}) RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {'EngineCore': 1}"
    )
    sys.exit(1)


def profile(*last: tuple[str, int, str]) -> list[tuple[str, int, str]]:
    return [(WORKER, 428, "determine_available_memory"), (RUNNER, 6290, "profile_run"), *last]


class Start:
    """Plays the start, stage by stage."""

    def __init__(self, options: argparse.Namespace, log: Log) -> None:
        self.options = options
        self.log = log

    async def run(self) -> None:
        options, log = self.options, self.log
        await self._stage("start")
        if options.message == "bad-flag":
            log.raw("usage: vllm serve [model_tag] [options]")
            log.raw("vllm: error: unrecognized arguments: --max-modle-len 4096")
            sys.exit(2)
        log.line("APIServer", "api_utils.py:273", f"non-default args: {{'model': {options.model!r}}}")
        log.line("APIServer", "model.py:598", "Resolved architecture: Qwen3_5MoeForConditionalGeneration")
        log.line("APIServer", "model.py:1725", "Using max model len 32768")
        log.line(
            "EngineCore",
            "core.py:114",
            f"Initializing a V1 LLM engine (v{log.version}) with config: model={options.model!r}",
        )
        log.line(
            "Worker",
            "parallel_state.py:1588",
            "world_size=1 rank=0 local_rank=0 distributed_init_method=tcp://127.0.0.1:52371 backend=nccl",
        )
        if options.message == "free-memory":
            die(
                log,
                [(WORKER, 344, "init_device"), ("vllm/v1/worker/utils.py", 762, "request_memory")],
                "ValueError: Free memory on device cuda:0 (12.51/23.52 GiB) on startup is less than desired GPU memory "
                "utilization (0.92, 21.64 GiB). Decrease GPU memory utilization or reduce GPU memory used by "
                "other processes.",
            )
        log.line("Worker_TP0", "gpu_model_runner.py:5160", f"Starting to load model {options.model}...")
        if options.message == "truncated":
            die(
                log,
                [
                    (RUNNER, 5200, "load_model"),
                    ("vllm/model_executor/model_loader/weight_utils.py", 912, "safetensors_weights_iterator"),
                ],
                "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
            )
        await self._stage("load")
        if options.oom_at == "load":
            die(
                log,
                [
                    (WORKER, 371, "load_model"),
                    (RUNNER, 5210, "load_model"),
                    ("vllm/model_executor/layers/fused_moe/layer.py", 612, "create_weights"),
                ],
                out_of_memory(512),
            )
        log.line("Worker_TP0", "gpu_model_runner.py:5255", "Model loading took 11.28 GiB memory and 11.013612 seconds")
        log.line(
            "Worker_TP0",
            "gpu_model_runner.py:6271",
            "Encoder cache will be initialized with a budget of 16384 tokens, and profiled with 1 image items of the "
            "maximum feature size.",
        )
        await self._stage("profile")
        self._profile()
        await self._stage("capture")
        self._capture()
        log.line(
            "EngineCore",
            "core.py:337",
            "init engine (profile, create kv cache, warmup model) took 12.48 s (compilation: 3.98 s)",
        )
        await self._stage("ready")
        log.line("APIServer", "api_server.py:581", f"Starting vLLM server on http://{options.host}:{options.port}")

    def _profile(self) -> None:
        options, log = self.options, self.log
        if options.oom_at == "profile-vision":
            frames = profile(
                (RUNNER, 3120, "embed_multimodal"), (QWEN, 1890, "_process_image_input"), (QWEN, 640, "forward")
            )
            die(log, frames, out_of_memory(1310))
        if options.oom_at == "profile-language":
            frames = profile(
                (RUNNER, 5890, "_dummy_run"),
                ("vllm/model_executor/models/qwen3_next.py", 1012, "forward"),
                ("vllm/model_executor/layers/fused_moe/fused_marlin_moe.py", 244, "fused_marlin_moe"),
            )
            die(log, frames, out_of_memory(512))
        if options.oom_at == "sampler":
            frames = profile((RUNNER, 5925, "_dummy_sampler_run"))
            message = (
                "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try "
                "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
            )
            die(log, frames, out_of_memory(970) if log.new else message)
        self._profile_graphs()
        available = "-0.7" if options.oom_at == "kv" else "8.04"
        log.line("Worker_TP0", "gpu_worker.py:508", f"Available KV cache memory: {available} GiB")
        if options.oom_at == "kv":
            die(
                log,
                [("vllm/v1/core/kv_cache_utils.py", 624, "_check_enough_kv_cache_memory")],
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
                "initializing the engine. See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more "
                "details.",
            )
        if options.message == "context":
            die(
                log,
                [("vllm/v1/core/kv_cache_utils.py", 642, "_check_enough_kv_cache_memory")],
                "ValueError: To serve at least one request with the model's max seq len (262144), (2.57 GiB KV cache "
                "is needed, which is larger than the available KV cache memory (0.95 GiB). Based on the available "
                "memory, the estimated maximum model length is 96000. Try increasing `gpu_memory_utilization` or "
                "decreasing `max_model_len` when initializing the engine.",
            )
        if log.new:
            log.line(
                "EngineCore",
                "kv_cache_planning.py:310",
                "GPU KV cache size: 831,162 tokens, Maximum concurrency for 32,768 tokens per request: 25.36x",
            )
        else:
            log.line("EngineCore", "kv_cache_utils.py:1714", "GPU KV cache size: 831,162 tokens")
            log.line(
                "EngineCore", "kv_cache_utils.py:1719", "Maximum concurrency for 32,768 tokens per request: 25.36x"
            )

    def _profile_graphs(self) -> None:
        """The estimate of the graphs' memory: 0.24 announces it, 0.33 captures without a word before it."""
        options, log = self.options, self.log
        if not log.new:
            groups = "PIECEWISE=51 (largest=512), FULL=35 (largest=256)"
            log.line("Worker_TP0", "gpu_model_runner.py:6304", f"Profiling CUDA graph memory: {groups}")
        if options.oom_at == "graph-pool":
            inner = (NEW_UTILS, 564, "allocate_kv_cache") if log.new else (RUNNER, 7029, "_allocate_kv_cache_tensors")
            frames = [(WORKER, 717, "determine_available_memory"), (RUNNER, 6447, "profile_cudagraph_memory"), inner]
            die(log, frames, out_of_memory(1048.0))
        if log.new:
            log.raw(f"Capturing CUDA graphs (decode, FULL): {PROGRESS}")
            log.line("Worker_TP0", "model_runner.py:1164", "Graph capturing finished in 1 secs, took 0.02 GiB")
        else:
            log.line("Worker_TP0", "gpu_model_runner.py:6370", "Estimated CUDA graph memory: 0.31 GiB total")

    def _capture(self) -> None:
        options, log = self.options, self.log
        log.raw(
            "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%|█████     | 26/51 [00:02<00:02, 11.20it/s]"
        )
        if options.oom_at == "capture":
            die(
                log,
                [(RUNNER, 6480, "capture_model"), ("torch/cuda/graphs.py", 268, "capture_end")],
                out_of_memory(64, free=12),
            )
        log.line("Worker_TP0", "gpu_model_runner.py:6517", "Graph capturing finished in 5 secs, took 0.28 GiB")

    async def _stage(self, stage: str) -> None:
        """The stage's share of the loading time; hangs or exits here when asked to."""
        if self.options.exit_at == stage:
            sys.exit(self.options.exit)
        if self.options.crash_at == stage:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.options.hang == stage:
            await asyncio.Event().wait()
        await asyncio.sleep(self.options.load / len(STAGES))


class HttpError(Exception):
    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


class Server:
    """HTTP/1.1 over asyncio's streams: enough for clients that mean well."""

    def __init__(self, options: argparse.Namespace, log: Log) -> None:
        self.options = options
        self.log = log
        self.switches = Switches(options)
        if options.answers:
            self.switches.answers = json.loads(Path(options.answers).read_text(encoding="utf-8"))
        self.running = self.most_running = self.requests = self.cancelled = self.finished = 0
        self.steps = self.prompt_tokens = self.generated = 0
        self.last_body: Any = None
        self.last_headers: dict[str, str] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ", 2)
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])
        }
        body = await self._body(reader, headers)
        path = target.partition("?")[0]
        if self.switches.garbage and not path.startswith("/fake"):
            writer.write(GARBAGE)
            await writer.drain()
            return False
        try:
            await self._route(method, path, headers, body, reader, writer)
        except HttpError as error:
            document = {"error": {"message": error.message, "type": error.kind, "param": None, "code": error.status}}
            await _reply(writer, error.status, document)
        return headers.get("connection", "").lower() != "close"

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            parts: list[bytes] = []
            while size := int((await reader.readline()).split(b";")[0], 16):
                parts.append(await reader.readexactly(size))
                await reader.readexactly(2)
            await reader.readline()
            return b"".join(parts)
        length = int(headers.get("content-length", "0"))
        return await reader.readexactly(min(length, MOST_BODY))

    async def _route(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if path == "/fake":
            await self._fake(method, body, writer)
            return
        if path == "/health":
            await _reply(writer, 200, None)
            return
        if path == "/metrics" and self.options.metrics != "none":
            await _reply(writer, 200, self._metrics(), "text/plain; version=0.0.4; charset=utf-8")
            return
        if path == "/version":
            await _reply(writer, 200, {"version": self.options.version})
            return
        key = self.options.api_key
        if key and path.startswith("/v1") and headers.get("authorization") != f"Bearer {key}":
            await _reply(writer, 401, {"error": "Unauthorized"})
            return
        if path == "/v1/models":
            card = {
                "id": self.options.model,
                "object": "model",
                "owned_by": "vllm",
                "max_model_len": self.options.max_model_len,
            }
            await _reply(writer, 200, {"object": "list", "data": [card]})
            return
        if path in ("/v1/chat/completions", "/v1/completions") and method == "POST":
            self.last_headers = headers
            await self._complete(path, _object(body), reader, writer)
            return
        if path == "/tokenize" and method == "POST":
            text = str(_object(body).get("prompt", ""))
            await _reply(
                writer, 200, {"count": len(text.split()), "max_model_len": self.options.max_model_len, "tokens": []}
            )
            return
        if path == "/v1/embeddings" and method == "POST":
            data = [{"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}]
            await _reply(
                writer,
                200,
                {
                    "object": "list",
                    "data": data,
                    "model": self.options.model,
                    "usage": {"prompt_tokens": 1, "total_tokens": 1},
                },
            )
            return
        raise HttpError(404, "Not Found", "NotFoundError")

    async def _fake(self, method: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if method == "POST":
            for name, value in _object(body).items():
                setattr(self.switches, name, value)
        seen = {
            name: getattr(self, name)
            for name in (
                "running",
                "most_running",
                "requests",
                "cancelled",
                "finished",
                "steps",
                "last_body",
                "last_headers",
            )
        }
        await _reply(writer, 200, {**seen, "switches": vars(self.switches), "pid": os.getpid()})

    def _metrics(self) -> str:
        labels = f'{{engine="0",model_name="{self.options.model}"}}'
        if self.options.metrics == "llamacpp":
            rows = [
                ("llamacpp:requests_processing", "gauge", self.running),
                ("llamacpp:requests_deferred", "gauge", 0),
                ("llamacpp:n_decode_total", "counter", self.steps),
                ("llamacpp:tokens_predicted_total", "counter", self.generated),
            ]
            labels = ""
        else:
            rows = [
                ("vllm:num_requests_running", "gauge", self.running),
                ("vllm:num_requests_waiting", "gauge", 0),
                ("vllm:iteration_tokens_total_count", "counter", self.steps),
                ("vllm:generation_tokens_total", "counter", self.generated),
                ("vllm:prompt_tokens_total", "counter", self.prompt_tokens),
            ]
        return "".join(f"# TYPE {name} {kind}\n{name}{labels} {float(value)}\n" for name, kind, value in rows)

    async def _complete(
        self, path: str, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        chat = path == "/v1/chat/completions"
        prompt, pictures = _prompt(request, chat)
        if request.get("model") not in (None, self.options.model):
            raise HttpError(404, f"The model `{request.get('model')}` does not exist.", "NotFoundError")
        if pictures > self.options.max_images:
            raise HttpError(400, f"At most {self.options.max_images} image(s) may be provided in one request.")
        if self.switches.status is not None:
            raise HttpError(self.switches.status, "as asked for", "InternalServerError")
        self.requests += 1
        self.last_body = request
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        gone = asyncio.ensure_future(reader.read(1))
        work = asyncio.ensure_future(self._answer(chat, request, prompt, writer))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.cancelled += 1
                work.cancel()
                raise ConnectionResetError("the client left")
            work.result()
            self.finished += 1
        finally:
            self.running -= 1
            work.cancel()
            gone.cancel()
            # a reader that is cancelled and not awaited takes the next one's wake-up with it
            await asyncio.gather(gone, return_exceptions=True)
        if not gone.cancelled():
            byte = gone.result()
            if not byte:
                raise ConnectionResetError("the client left")
            vars(reader)["_buffer"][:0] = byte  # the next request has begun

    async def _answer(self, chat: bool, request: dict[str, Any], prompt: str, writer: asyncio.StreamWriter) -> None:
        switches = self.switches
        if switches.stuck or (switches.stuck_after is not None and self.requests > switches.stuck_after):
            await asyncio.Event().wait()
        if switches.oom:
            self._run_out_of_memory()
        if switches.delay:
            await asyncio.sleep(switches.delay)
        limit = request.get("max_completion_tokens", request.get("max_tokens"))
        words = self._words(prompt)
        length = len(words) if limit is None else min(len(words), int(limit))
        reason = "stop" if length == len(words) else "length"
        prompt_tokens = max(1, len(prompt.split()))
        self.prompt_tokens += prompt_tokens
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": length, "total_tokens": prompt_tokens + length}
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.requests}",
            "object": ("chat.completion" if chat else "text_completion")
            + (".chunk" if chat and request.get("stream") else ""),
            "created": int(time.time()),
            "model": self.options.model,
        }
        if request.get("stream"):
            with_usage = bool((request.get("stream_options") or {}).get("include_usage"))
            await self._stream(chat, head, words[:length], reason, usage if with_usage else None, writer)
            return
        begin = time.monotonic()
        for place in range(length):
            await self._token(begin, place)
        text = "".join(words[:length])
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        await _reply(writer, 200, {**head, "choices": [choice], "usage": usage})

    def _words(self, prompt: str) -> list[str]:
        """The answer's tokens: of ``answers`` the first whose key the prompt holds, else a sentence over and over."""
        for key, answer in self.switches.answers:
            if key.lower() in prompt.lower():
                first, *rest = answer.split(" ")
                return [first, *(f" {word}" for word in rest)]
        return [WORDS[place % len(WORDS)] for place in range(self.switches.tokens)]

    async def _token(self, begin: float, place: int) -> None:
        if self.switches.tps > 0:
            wait = begin + (place + 1) / self.switches.tps - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
        self.steps += 1
        self.generated += 1
        if self.switches.stuck:
            await asyncio.Event().wait()
        if self.switches.crash_after_tokens is not None and self.generated >= self.switches.crash_after_tokens:
            os.kill(os.getpid(), signal.SIGKILL)

    async def _stream(
        self,
        chat: bool,
        head: dict[str, Any],
        words: list[str],
        reason: str,
        usage: dict[str, int] | None,
        writer: asyncio.StreamWriter,
    ) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
        )

        async def event(choices: list[dict[str, Any]], **more: Any) -> None:
            _chunk(writer, b"data: " + json.dumps({**head, "choices": choices, **more}).encode() + b"\n\n")
            await writer.drain()

        if chat:
            await event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        begin = time.monotonic()
        for place, word in enumerate(words):
            await self._token(begin, place)
            part: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
            await event([{"index": 0, **part, "finish_reason": None}])
        await event([{"index": 0, **({"delta": {}} if chat else {"text": ""}), "finish_reason": reason}])
        if usage is not None:
            await event([], usage=usage)
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _run_out_of_memory(self) -> None:
        frames = [(RUNNER, 4012, "execute_model"), (QWEN, 640, "forward")]
        self.log.traceback(
            "Worker_TP0", "multiproc_executor.py:949", "WorkerProc hit an exception.", frames, out_of_memory(1310)
        )
        self.log.traceback(
            "EngineCore", "core.py:1102", "EngineCore encountered a fatal error.", CORE_FRAMES, out_of_memory(1310)
        )
        self.log.line("APIServer", "async_llm.py:708", "AsyncLLM output_handler failed.", "ERROR")
        self.log.raw(
            f"(APIServer pid={self.log.api}) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an "
            "issue. See stack trace (above) for the root cause."
        )
        os._exit(1)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"Invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise HttpError(400, "Input should be a valid dictionary")
    return value


def _prompt(request: dict[str, Any], chat: bool) -> tuple[str, int]:
    """The text of the prompt and the number of pictures in it."""
    if not chat:
        return str(request.get("prompt", "")), 0
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HttpError(400, "messages: Field required")
    texts: list[str] = []
    pictures = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            if not isinstance(part, dict):
                raise HttpError(400, "messages: Input should be a valid dictionary")
            if part.get("type") == "image_url":
                pictures += 1
            else:
                texts.append(str(part.get("text") or ""))
    return "\n".join(texts), pictures


async def _reply(writer: asyncio.StreamWriter, status: int, document: Any, kind: str = "application/json") -> None:
    body = (
        b"" if document is None else document.encode() if isinstance(document, str) else json.dumps(document).encode()
    )
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one; it is written to --port-file")
    parser.add_argument("--port-file")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--version", default="0.33.0", choices=("0.24.0", "0.33.0"))
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--max-images", type=int, default=8)
    parser.add_argument("--api-key")
    parser.add_argument("--load", type=float, default=0.0, help="seconds until it answers")
    parser.add_argument("--tps", type=float, default=0.0, help="tokens a second and stream; 0: at once")
    parser.add_argument("--tokens", type=int, default=16, help="length of an answer")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before the first token")
    parser.add_argument("--answers", help="JSON file: [[text in the prompt, answer], ...]")
    parser.add_argument("--oom-at", choices=OOM_PLACES)
    parser.add_argument("--message", choices=MESSAGES, help="fail at the start with this message")
    parser.add_argument("--hang", nargs="?", const="load", choices=STAGES, help="stop for ever at this stage")
    parser.add_argument("--exit", type=int, default=1)
    parser.add_argument("--exit-at", choices=STAGES, help="leave with --exit at this stage")
    parser.add_argument("--crash-at", choices=STAGES, help="SIGSEGV at this stage")
    parser.add_argument("--crash-after-tokens", type=int, help="SIGKILL itself after so many tokens in all")
    parser.add_argument("--garbage", action="store_true", help="answer with bytes that are no HTTP")
    parser.add_argument("--stuck", action="store_true", help="take requests and never answer; /health stays 200")
    parser.add_argument("--stuck-after", type=int, help="stuck from the request after this many")
    parser.add_argument("--status", type=int, help="answer every completion with this status")
    parser.add_argument("--metrics", default="vllm", choices=("vllm", "llamacpp", "none"))
    parser.add_argument("--workers", type=int, default=0, help="child processes that outlive it")
    parser.add_argument("--stray", action="store_true", help="one of them in a session of its own")
    parser.add_argument("--titled", action="store_true", help="they overwrite their environment, as vLLM's do")
    parser.add_argument("--ignore-term", action="store_true", help="SIGTERM does nothing")
    parser.add_argument("--starts", help="file that counts the starts")
    parser.add_argument("--only-first", type=int, help="fail in any way only in the first so many starts")
    return parser.parse_args(words)


def _healthy_again(options: argparse.Namespace) -> None:
    """Count this start; from the one after ``--only-first`` on, nothing goes wrong."""
    if options.starts is None:
        return
    file = Path(options.starts)
    count = int(file.read_text() or 0) + 1 if file.exists() else 1
    file.write_text(str(count))
    if options.only_first is not None and count > options.only_first:
        options.oom_at = options.message = options.hang = options.exit_at = options.crash_at = None
        options.crash_after_tokens = options.stuck_after = options.status = None
        options.garbage = options.stuck = False


# What vLLM's workers do: a title is written over the arguments and the environment behind them.
TITLE = """
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[47]), int(fields[48])
with open("/proc/self/mem", "r+b", buffering=0) as memory:
    memory.seek(start)
    memory.write(bytes(end - start))
"""


def _start_workers(options: argparse.Namespace) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += (TITLE if options.titled else "") + "time.sleep(600)"
    for number in range(options.workers):
        argv = [sys.executable, "-c", code]
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=options.stray and number == 0)


async def run(options: argparse.Namespace) -> None:
    log = Log(options.version)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, (lambda: None) if options.ignore_term else stop.set)
    _start_workers(options)
    starting = asyncio.ensure_future(Start(options, log).run())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        starting.cancel()
        return
    starting.result()
    engine = Server(options, log)
    try:
        server = await asyncio.start_server(engine.serve, options.host, options.port, limit=1 << 20)
    except OSError:
        log.raw(
            f"(APIServer pid={log.api}) ERROR:    [Errno 98] error while attempting to bind on address "
            f"('{options.host}', {options.port}): address already in use"
        )
        sys.exit(1)
    options.port = server.sockets[0].getsockname()[1]
    if options.port_file:
        partial = Path(f"{options.port_file}.part")
        partial.write_text(str(options.port))
        partial.replace(options.port_file)
    log.raw(f"(APIServer pid={log.api}) INFO:     Started server process [{log.api}]")
    log.raw(f"(APIServer pid={log.api}) INFO:     Waiting for application startup.")
    log.raw(f"(APIServer pid={log.api}) INFO:     Application startup complete.")
    await stop.wait()
    server.close()


def main() -> None:
    options = arguments(sys.argv[1:])
    _healthy_again(options)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
