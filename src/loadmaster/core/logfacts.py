"""What an engine's log says of its launch, beside why it failed."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from loadmaster.core.facts import EngineFacts, LaunchArgs

Reached = Literal["nothing", "loaded", "profiled", "captured", "ready", "served"]


class PhaseTime(Struct, frozen=True):
    """A phase of the start. ``line``: where it began; ``at``: seconds since the log's first time stamp.

    ``seconds``: until the next phase began, or as the engine said; None: the log does not tell.
    """

    name: str
    line: int
    at: float | None = None
    seconds: float | None = None


class LogReadings(Struct, frozen=True, kw_only=True):
    """Memory as the engine printed it, in bytes. None: not said. Tuples are in the order of ranks."""

    model_loading_bytes: tuple[int | None, ...] = ()
    kv_available_bytes: int | None = None  # the smallest over ranks
    kv_available_per_rank: tuple[int | None, ...] = ()
    kv_tokens: int | None = None
    max_concurrency: float | None = None
    max_model_len: int | None = None
    graph_bytes: int | None = None  # taken by the capture
    graph_estimated_bytes: int | None = None
    profile_peak_bytes: int | None = None
    non_torch_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None  # at the start
    requested_bytes: int | None = None  # utilisation times total
    # from the message of an out-of-memory error
    tried_to_allocate_bytes: int | None = None
    card_total_bytes: int | None = None
    card_free_bytes: int | None = None
    in_use_bytes: int | None = None  # by this process
    allocated_by_torch_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None


class LogFacts(Struct, frozen=True, kw_only=True):
    """``starts``: how many starts the log holds; the facts are the last one's. ``lines``: how many were read.

    ``backends``: what the engine chose, by what for: "attention", "quantization", "sampler", "moe", "vision".
    """

    engine: EngineFacts = EngineFacts()
    launch: LaunchArgs | None = None
    model: str | None = None
    quantization: str | None = None
    backends: dict[str, str] = {}
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    readings: LogReadings = LogReadings()
    phases: tuple[PhaseTime, ...] = ()
    reached: Reached = "nothing"
    starts: int = 0
    lines: int = 0
