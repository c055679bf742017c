"""Ranks against cards and heads: counts, divisibility, unequal and idle cards."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from loadmaster.core.argv import with_flags
from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import GIB, Confidence, Evidence, Finding, Fix, GpuFacts, Severity
from loadmaster.core.loaderlimits import experts_refused, split_refused, stored_whole

# Vision towers whose attention takes whole heads on each rank (vLLM model_executor/models: divide(num_heads, tp)).
# InternVL's is not among them: it adds dummy heads.
_STRICT_TOWERS = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe",
     "siglip_vision_model", "siglip2_vision_model", "clip_vision_model", "pixtral"}
)  # fmt: skip
_VISIBLE_ENV = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_SAME_SIZE = 0.01  # cards of one kind differ by less than this share of their memory


def check_parallel(case: LaunchCase) -> Iterator[Finding]:
    """Everything about the number of ranks."""
    yield from _cards(case)
    yield from _heads(case)
    yield from _loader(case)
    yield from _unequal(case)
    yield from _idle(case)


# ------------------------------------------------------------------------------------------ cards


def _cards(case: LaunchCase) -> Iterator[Finding]:
    if case.cards is None or case.world <= case.cards:
        return
    nodes = case.integer("--nnodes")
    if nodes is not None and nodes > 1:
        return
    sizes = [
        f"{name} {size}"
        for name, size in (
            ("tensor", case.tensor_parallel),
            ("pipeline", case.pipeline_parallel),
            ("data", case.data_parallel),
        )
        if size > 1
    ]
    product = " x ".join(sizes) or "one rank"
    severity, confidence = _over_nodes(case)
    known = case.visible[1] if case.visible and case.visible[0] == case.cards else f"{case.cards} cards are there"
    evidence = [
        *case.evidence("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
        Evidence("gpu" if known.endswith("there") else "command", known),
    ]
    yield finding(
        "tp-exceeds-gpus",
        f"The launch ({product}) needs {case.world} card{'s' if case.world > 1 else ''}, the engine sees {case.cards}."
        + ("" if confidence == "certain" else " Right only if other nodes bring the rest."),
        evidence=evidence,
        fixes=_card_fixes(case),
        severity=severity,
        confidence=confidence,
    )


def _over_nodes(case: LaunchCase) -> tuple[Severity, Confidence]:
    """How bad it is: other nodes may bring the rest with Ray, or where a tensor group fits and its stages do not."""
    ray = "ray" in (case.value("--distributed-executor-backend"), case.value("--data-parallel-backend"))
    assert case.cards is not None
    spread = case.pipeline_parallel * case.data_parallel > 1 and case.tensor_parallel <= case.cards
    remote = case.has("--data-parallel-address") or case.has("--data-parallel-rank") or case.has("--node-rank")
    if ray or remote:
        return "note", "possible"
    if spread and case.data_parallel == 1:
        return "note", "possible"
    return "error", "certain"


def _card_fixes(case: LaunchCase) -> list[Fix]:
    assert case.cards is not None
    fixes = []
    named = case.launch.env.get("CUDA_VISIBLE_DEVICES", "")
    for part in named.split(","):
        part = part.strip()
        if part.isdigit() and len(part) > 1 and int(part) > 15:
            guess = named.replace(part, ",".join(part))
            fixes.append(Fix(f"{part} is hardly a card; a comma may be missing.", env={"CUDA_VISIBLE_DEVICES": guess}))
            break
    fixes += _more_cards(case)
    size = _largest_size(case, case.cards // (case.pipeline_parallel * case.data_parallel))
    if size is not None and size < case.tensor_parallel and not (fixes and _too_small(case, size)):
        fixes.append(Fix("The largest size for these cards.", ("--tensor-parallel-size", str(size))))
    elif case.data_parallel > 1 and case.cards // (case.tensor_parallel * case.pipeline_parallel) >= 1:
        replicas = case.cards // (case.tensor_parallel * case.pipeline_parallel)
        fixes.append(Fix("As many replicas as the cards hold.", ("--data-parallel-size", str(replicas))))
    return fixes


def _more_cards(case: LaunchCase) -> list[Fix]:
    """Cards that the machine may have and the text keeps from the engine."""
    if case.visible is None or case.visible[0] != case.cards or case.cards < 1:
        return []
    if case.gpu_count is not None and case.gpu_count < case.world:
        return []
    count = case.world
    named = next((name for name in _VISIBLE_ENV if case.launch.env.get(name)), None)
    if named is not None:
        if case.gpu_count is None:
            return []
        listed = ",".join(str(index) for index in range(count))
        return [Fix("Let the engine see as many cards as it has ranks.", env={named: listed})]
    words = {
        "compose": f"count: {count}  (deploy.resources.reservations.devices)",
        "kubernetes": f"nvidia.com/gpu: {count}  (resources.limits)",
        "docker-run": f"--gpus {count}",
    }
    command = words.get(case.launch.kind)
    return [Fix(f"Give the container {count} cards.", command=command)] if command else []


def _too_small(case: LaunchCase, size: int) -> bool:
    """Whether so few ranks surely cannot hold the model."""
    if case.model is None or not case.gpus or case.model.format == "gguf":
        return False
    return case.plan(with_flags(case.launch, {"--tensor-parallel-size": size})).fits is False


def _largest_size(case: LaunchCase, limit: int) -> int | None:
    """The largest size that divides the heads; of unknown heads, the largest power of two."""
    heads = case.model.text.num_attention_heads if case.model else None
    if stored_whole(case.model):
        return 1
    for size in range(limit, 0, -1):
        if (size & (size - 1) == 0) if heads is None else heads % size == 0:
            return size
    return None


def _idle(case: LaunchCase) -> Iterator[Finding]:
    if case.cards is None or case.cards < 2 or case.world >= case.cards:
        return
    where = case.visible[1] if case.visible and case.visible[0] == case.cards else f"{case.cards} cards are there"
    if case.world > 1:
        yield finding(
            "one-gpu-idle",
            f"{case.world} of {case.cards} cards are used.",
            evidence=[Evidence("command", where), *case.evidence("--tensor-parallel-size", "--pipeline-parallel-size")],
            severity="note",
        )
        return
    if case.launch.env.get("CUDA_VISIBLE_DEVICES") is None and case.launch.visible_gpus is None and case.gpus is None:
        return
    size = _largest_size(case, case.cards)
    fixes = []
    if size is not None and size > 1:
        fixes.append(Fix("Every rank on a card of its own.", ("--tensor-parallel-size", str(size))))
    elif stored_whole(case.model):
        stages = ("--pipeline-parallel-size", str(case.cards))
        fixes.append(Fix("A part of the layers on each: the checkpoint cannot be cut otherwise.", stages))
    fixes.append(Fix("Or let the engine see one card only.", env={"CUDA_VISIBLE_DEVICES": "0"}))
    sizes = case.evidence("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
    given = " and ".join(item.text for item in sizes)
    yield finding(
        "one-gpu-idle",
        f"By {given} one of {case.cards} cards does all the work."
        if given
        else f"No parallel size is given, so one of {case.cards} cards does all the work.",
        evidence=[Evidence("command", where), *sizes],
        fixes=fixes,
    )


def _unequal(case: LaunchCase) -> Iterator[Finding]:
    cards = case.used_gpus
    if cards is None or case.world < 2 or len(cards) < 2:
        return
    sizes = [gpu.total_bytes for gpu in cards]
    small, large = min(sizes), max(sizes)
    capabilities = {gpu.compute_capability for gpu in cards} - {None}
    if large - small <= _SAME_SIZE * large and len(capabilities) < 2:
        return
    lost = sum(size - small for size in sizes)
    smallest = cards[sizes.index(small)]
    words = f"Every rank is planned for card {smallest.index} with {small / GIB:.2f} GiB"
    words += f"; {lost / GIB:.2f} GiB of the others stay unused." if lost > _SAME_SIZE * large else "."
    if len(capabilities) > 1:
        words += " Kernels are chosen by the oldest generation."
    yield finding(
        "gpus-unequal",
        words,
        evidence=[
            Evidence(
                "gpu",
                f"card {gpu.index}: {gpu.name or 'unnamed'}, {gpu.total_bytes / GIB:.2f} GiB"
                + (
                    f", compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}"
                    if gpu.compute_capability
                    else ""
                ),
            )
            for gpu in cards
        ],
        fixes=_without_smallest(case, cards, smallest),
    )


def _without_smallest(case: LaunchCase, cards: tuple[GpuFacts, ...], smallest: GpuFacts) -> list[Fix]:
    rest = [gpu for gpu in cards if gpu is not smallest]
    size = _largest_size(case, len(rest))
    if case.pipeline_parallel * case.data_parallel > 1 or size is None:
        return []
    argv = ("--tensor-parallel-size", str(size)) if size != case.tensor_parallel else ()
    env = {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in rest)}
    return [Fix("Leave the small card out if the rest is enough.", argv, env=env)]


# ------------------------------------------------------------------------------------------ what the engine refuses


def _loader(case: LaunchCase) -> Iterator[Finding]:
    """Checkpoints that cannot be split, and experts where there are none."""
    if case.model is None:
        return
    refused = split_refused(case.model, case.tensor_parallel, case.pipeline_parallel)
    if refused is not None:
        sure: Confidence = "likely" if case.assumed_format or case.model_confidence != "certain" else "certain"
        yield structs.replace(
            refused, evidence=(*case.evidence("--tensor-parallel-size"), *refused.evidence), confidence=sure
        )
    if case.switch("--enable-expert-parallel") and experts_refused(case.model):
        yield finding(
            "flag-conflict",
            "--enable-expert-parallel, and the model has no experts: the engine refuses it.",
            evidence=[
                *case.evidence("--enable-expert-parallel"),
                case.model_evidence(f"{case.model.architecture or 'the configuration'}: no number of experts"),
            ],
            fixes=[Fix("A dense model needs no such flag.", remove=("--enable-expert-parallel",))],
            confidence=case.model_confidence if case.model_confidence != "possible" else "likely",
        )


# ------------------------------------------------------------------------------------------ heads


def _heads(case: LaunchCase) -> Iterator[Finding]:
    size = case.tensor_parallel
    if case.model is None or size < 2 or case.model.format == "gguf":
        return
    text, vision = case.model.text, case.model.vision
    problems: list[tuple[str, str, Confidence]] = []
    heads, kv = text.num_attention_heads, text.num_key_value_heads
    if heads is not None and heads % size:
        problems.append((f"{heads} attention heads", "num_attention_heads", "certain"))
    elif kv is not None and kv != heads and not _kv_divides(kv, size) and text.kv_lora_rank is None:
        problems.append((f"{kv} key-value heads", "num_key_value_heads", "likely"))
    for count, name in (
        (text.linear_num_key_heads, "linear_num_key_heads"),
        (text.linear_num_value_heads, "linear_num_value_heads"),
    ):
        if count is not None and count % size:
            problems.append((f"{count} heads of linear attention", name, "likely"))
            break
    mode = case.text("--mm-encoder-tp-mode")
    if (
        vision is not None
        and vision.num_heads is not None
        and vision.num_heads % size
        and mode != "data"
        and not case.text_only
        and vision.model_type in _STRICT_TOWERS
    ):
        problems.append((f"{vision.num_heads} heads of the vision tower", "vision_config.num_heads", "likely"))
    if not problems:
        return
    words = " and ".join(problem[0] for problem in problems)
    sure: Confidence = "certain" if problems[0][2] == "certain" else "likely"
    if case.model_confidence != "certain":
        sure = "likely"
    yield finding(
        "heads-vs-tp",
        f"{words} cannot be divided among {size} ranks.",
        evidence=[
            *case.evidence("--tensor-parallel-size"),
            *(case.model_evidence(f"{name}: {words.split()[0]}") for words, name, _ in problems),
        ],
        fixes=_head_fixes(case, only_tower=all("vision" in problem[1] for problem in problems)),
        confidence=sure,
    )


def _kv_divides(kv: int, size: int) -> bool:
    return kv % size == 0 if kv >= size else size % kv == 0


def _head_fixes(case: LaunchCase, *, only_tower: bool) -> list[Fix]:
    assert case.model is not None
    text, size = case.model.text, case.tensor_parallel
    heads, kv = text.num_attention_heads, text.num_key_value_heads
    if only_tower:
        return [Fix("Each rank then holds the whole tower.", ("--mm-encoder-tp-mode", "data"))]
    if heads is None:
        return []
    good = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0
        and (kv is None or text.kv_lora_rank is not None or _kv_divides(kv, n))
        and (text.linear_num_key_heads or 0) % n == 0
        and (text.linear_num_value_heads or 0) % n == 0
    ]
    below = [n for n in good if n < size]
    above = [n for n in good if n > size and case.cards is not None and n <= case.cards]
    fixes = []
    for n in (*below[-1:], *above[:1]):
        fixes.append(Fix(f"Sizes that divide: {', '.join(map(str, good[:10]))}.", ("--tensor-parallel-size", str(n))))
    if size > 1:
        fixes.append(
            Fix(
                f"All {size} cards, one after the other: each holds a part of the layers.",
                ("--pipeline-parallel-size", str(size), "--tensor-parallel-size", "1"),
            )
        )
    return fixes
