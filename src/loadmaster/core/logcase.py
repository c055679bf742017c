"""What a fix for a failed start can be computed from: the launch, the cards and the model as the log gives them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from loadmaster.core.argv import parse_argv
from loadmaster.core.diagnosis import Diagnosis
from loadmaster.core.enginerules import rules_for
from loadmaster.core.facts import EngineFacts, Finding, GpuFacts, LaunchArgs, ModelFacts
from loadmaster.core.knownmodels import known_model
from loadmaster.core.logfacts import LogFacts, LogReadings
from loadmaster.core.logfigures import Figures
from loadmaster.core.verdict import gib

_MOST_CARDS = 64
_SMALLEST_CARD, _LARGEST_CARD = 1 << 30, 1 << 41  # bytes; a broken line is no card
_SAME_CARD = 0.1  # by which a card's name and what its driver leaves of it differ at most
_OTHERS_FROM = 300 << 20  # bytes; what a driver takes for itself is less


class LogCase(Struct, frozen=True, kw_only=True):
    """``model``, ``gpus`` None: not known. ``finding``: the cause that is to be cured, ``figures``: its numbers."""

    finding: Finding
    figures: Figures
    facts: LogFacts
    launch: LaunchArgs
    engine: EngineFacts
    model: ModelFacts | None
    gpus: tuple[GpuFacts, ...] | None
    conflict: str | None = None  # what was named for it and cannot be what the log is of, a sentence

    @property
    def readings(self) -> LogReadings:
        return self.facts.readings

    @property
    def share(self) -> float:
        """``--gpu-memory-utilization``: as the message says or as given, else the version's default."""
        said = self.figures.number("share")
        if said is not None and 0 < said <= 1:
            return said
        given = self.launch.flags.get("--gpu-memory-utilization")
        if isinstance(given, int | float) and not isinstance(given, bool) and 0 < given <= 1:
            return float(given)
        return rules_for(self.engine).gpu_memory_utilization

    @property
    def share_known(self) -> bool:
        """Whether the log tells the share, be it by showing a launch without one."""
        return self.facts.launch is not None or self.figures.number("share") is not None

    @property
    def tensor_parallel(self) -> int:
        given = self.launch.flags.get("--tensor-parallel-size", self.facts.tensor_parallel_size)
        return given if isinstance(given, int) and given > 0 else 1

    @property
    def card_bytes(self) -> int | None:
        """Total of the smallest card, as the log or the cards say."""
        if self.gpus:
            return min(gpu.total_bytes for gpu in self.gpus)
        return self.card_bytes_said

    @property
    def card_bytes_said(self) -> int | None:
        """Total of a card as the log alone says."""
        said = self.readings.card_total_bytes or self.readings.total_bytes or self.figures.gib("total")
        return said if said is not None and _SMALLEST_CARD <= said <= _LARGEST_CARD else None


def case_of(
    diagnosis: Diagnosis, finding: Finding, model: ModelFacts | None, gpus: Sequence[GpuFacts] | None
) -> LogCase:
    """``model`` None: looked up by the log's name for it. ``gpus`` None: as many as the launch takes, of the size
    that the log says. Where the cards that are given have another size than the log says, the log is believed."""
    facts = diagnosis.facts
    launch = _launch(facts)
    name = launch.model or facts.model
    if model is None and name is not None:
        model = known_model(name)
    case = LogCase(
        finding=finding,
        figures=Figures(finding.code, diagnosis.messages.get(finding.code, "")),
        facts=facts,
        launch=launch,
        engine=facts.engine,
        model=model,
        gpus=tuple(gpus) if gpus else None,
    )
    said = case.card_bytes_said
    if case.gpus and said is not None and all(_other_size(gpu, said) for gpu in case.gpus):
        words = (
            f"the cards that were named have {gib(case.gpus[0].total_bytes)}, those of the log {gib(said)}: "
            "planned with the log's"
        )
        return structs.replace(case, gpus=cards_of(case, said), conflict=words)
    if case.gpus or said is None:
        return case
    return structs.replace(case, gpus=cards_of(case, said))


def _other_size(gpu: GpuFacts, said: int) -> bool:
    return abs(gpu.total_bytes - said) > _SAME_CARD * max(gpu.total_bytes, said)


def _launch(facts: LogFacts) -> LaunchArgs:
    """The launch of the log; what its configuration line alone says where no arguments are printed."""
    sizes = (
        ("--tensor-parallel-size", facts.tensor_parallel_size),
        ("--pipeline-parallel-size", facts.pipeline_parallel_size),
        ("--data-parallel-size", facts.data_parallel_size),
    )
    said = [word for flag, size in sizes if size and size > 1 for word in (flag, str(size))]
    if facts.readings.max_model_len:
        said += ["--max-model-len", str(facts.readings.max_model_len)]
    if facts.launch is None:
        model = [facts.model] if facts.model else []
        return parse_argv(["vllm", "serve", *model, *said], engine_version=facts.engine.version)
    missing = [
        word
        for flag, size in sizes
        if size and size > 1 and flag not in facts.launch.flags
        for word in (flag, str(size))
    ]
    if not missing:
        return facts.launch
    return parse_argv([*facts.launch.argv, *missing], engine_version=facts.engine.version, env=facts.launch.env)


def cards_of(case: LogCase, total: int) -> tuple[GpuFacts, ...] | None:
    """As many cards of this size as the launch takes, with what others held of them; None for more than 64."""
    readings, free = case.readings, None
    if readings.card_free_bytes is not None and readings.in_use_bytes is not None and readings.card_total_bytes:
        others = readings.card_total_bytes - readings.card_free_bytes - readings.in_use_bytes
        free = max(0, total - others) if others > _OTHERS_FROM else None
    count = case.tensor_parallel
    for flag, said in (
        ("--pipeline-parallel-size", case.facts.pipeline_parallel_size),
        ("--data-parallel-size", case.facts.data_parallel_size),
    ):
        size = case.launch.flags.get(flag, said)
        count *= size if isinstance(size, int) and size > 0 else 1
    if count > _MOST_CARDS:
        return None
    return tuple(
        GpuFacts(index=index, total_bytes=total, free_bytes=free, source="log", note="as the log says")
        for index in range(count)
    )
