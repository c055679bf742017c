"""Fixes for what an engine refuses: the values that it would take, from the numbers in its message."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator

from loadmaster.core.argv import parse_argv
from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.flags import check_flags
from loadmaster.core.checks.shapes import layers_of, problems_at
from loadmaster.core.engineversion import is_before
from loadmaster.core.facts import Fix, ModelFacts
from loadmaster.core.flagtable import flag_table
from loadmaster.core.logcase import LogCase
from loadmaster.core.readingfixes import largest_free_share
from loadmaster.core.releasetable import architecture_runs, releases
from loadmaster.core.replanning import divides
from loadmaster.core.tables import load_json
from loadmaster.core.verdict import gib

_NAME = re.compile(r"[A-Za-z]\w+")
_HELD_FROM = 1536 << 20  # bytes missing at the start beyond what context and NCCL take
_NO_SWAP_FROM = "0.8.0"  # from here on V1 is the default, which never takes --swap-space from the host
_DEFAULT_PORT = 8000
_LEAST_BEGINNING = 5  # letters of a flag's name with its hyphens
_MOST_RANKS = 64
_LEAST_SHARE = 0.3  # less of a card is no share to serve from


def value_fixes(case: LogCase) -> tuple[Fix, ...]:
    """Empty where the message has no numbers, or nothing is known to help. None of them is planned."""
    compute = _BY_CODE.get(case.finding.code)
    return () if compute is None else tuple(compute(case))


# ------------------------------------------------------------------------------------------------ shapes


def _heads(case: LogCase) -> Iterator[Fix]:
    heads, size = case.figures.whole("heads"), case.figures.whole("size") or case.tensor_parallel
    if not heads or size < 2:
        return
    good = [number for number in range(1, min(heads, _MOST_RANKS) + 1) if heads % number == 0]
    if case.model is not None:
        good = [number for number in good if divides(case.model, number)]
    elif any(_is_power_of_two(number) for number in good if 1 < number < size):
        # of key-value heads, which are not known here, numbers are powers of two nearly always
        good = [number for number in good if _is_power_of_two(number)]
    yield from _sizes(f"{heads} heads", good, size)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _groups(case: LogCase) -> Iterator[Fix]:
    """``width`` is of one rank; the layer's own is that times the ranks."""
    width, unit, size = case.figures.whole("width"), case.figures.whole("unit"), case.tensor_parallel
    if size < 2:
        return
    if case.model is not None and layers_of(case.model):
        yield from _sizes("What the checkpoint has quantised", _sizes_of(case, case.model), size)
        return
    if not width or not unit:
        return
    whole = width * size
    good = [number for number in range(1, size) if whole % number == 0 and whole // number % unit == 0]
    yield from _sizes(f"{whole:,} in units of {unit}", good, size)


def _sizes_of(case: LogCase, model: ModelFacts) -> list[int]:
    """The numbers of ranks, up to the launch's, that cut no layer of the checkpoint badly."""
    whole, dtype = bool(case.launch.flags.get("--enable-expert-parallel")), case.launch.flags.get("--dtype")
    asked = dtype if isinstance(dtype, str) else None
    return [
        number
        for number in range(1, case.tensor_parallel)
        if divides(model, number) and not problems_at(model, number, whole, case.engine.version, asked)
    ]


def _blocks(case: LogCase) -> Iterator[Fix]:
    if case.tensor_parallel > 1 and "--enable-expert-parallel" not in case.launch.flags:
        model = case.model
        if model is None or model.text.num_experts:
            yield Fix(
                "If the layer is one of experts: they stay whole, and each rank holds some of them.",
                argv=("--enable-expert-parallel",),
            )
    yield from _groups(case)


def _sizes(what: str, good: list[int], size: int) -> Iterator[Fix]:
    below = [number for number in good if number < size]
    if not below:
        return
    best = below[-1]
    listed = ", ".join(str(number) for number in good[:8])
    yield Fix(
        f"{what} can be divided over {listed} ranks, not over {size}. It costs: only {best} "
        f"card{'s' * (best > 1)} hold{'s' * (best == 1)} the weights.",
        argv=("--tensor-parallel-size", str(best)),
    )
    if size // best > 1 and size % best == 0:
        yield Fix(
            f"The same {size} cards, {size // best} stages of layers one after the other.",
            argv=("--tensor-parallel-size", str(best), "--pipeline-parallel-size", str(size // best)),
        )
    elif best == 1:
        yield Fix(
            f"The same {size} cards, each with a part of the layers, one after the other.",
            argv=("--tensor-parallel-size", "1", "--pipeline-parallel-size", str(size)),
        )


def _too_many_ranks(case: LogCase) -> Iterator[Fix]:
    cards = case.figures.whole("cards")
    if not cards:
        return
    heads = case.model.text.num_attention_heads if case.model is not None else None
    size = next(number for number in range(cards, 0, -1) if heads is None or heads % number == 0)
    argv = ["--tensor-parallel-size", str(size)]
    drop = tuple(f for f in ("--pipeline-parallel-size", "--data-parallel-size") if f in case.launch.flags)
    yield Fix(f"There {'is one card' if cards == 1 else f'are {cards} cards'}.", argv=tuple(argv), remove=drop)


# ------------------------------------------------------------------------------------------------ architecture


def _architecture(case: LogCase) -> Iterator[Fix]:
    for name in _NAME.findall(case.figures.text("names") or ""):
        yield from _release_with(name, case.engine.version)


def _model_type(case: LogCase) -> Iterator[Fix]:
    kind = case.figures.text("type")
    if kind is None:
        return
    wanted = re.sub(r"[^a-z0-9]", "", kind.lower())
    places: dict[str, int] = {}
    for name, entry in load_json("vllm-architectures.json")["architectures"].items():
        begin = re.match(r"(.+?)(?:For\w+|Model|LMHeadModel)$", name)
        if begin is not None and re.sub(r"[^a-z0-9]", "", begin.group(1).lower()) == wanted:
            places[name] = entry["in"][0][0]
    if places:
        yield from _release_with(min(places, key=lambda name: places[name]), case.engine.version)


def _release_with(name: str, version: str | None) -> Iterator[Fix]:
    runs = architecture_runs(name)
    if not runs:
        yield Fix(f"No vLLM up to {releases()[-1]} has a class for {name}: an engine that has one, or another model.")
        return
    first, last = runs[0][0], runs[-1][1]
    if last != releases()[-1]:
        yield Fix(
            f"{name} is in vLLM {first} to {last} only.",
            command=f"loadmaster engine install vllm --version {last}",
        )
        return
    here = f", and this is {version}" if version else ""
    yield Fix(
        f"{name} is in vLLM from {first} on{here}; it brings the transformers that it was released with.",
        command=f"loadmaster engine install vllm --version {first}",
    )


# ------------------------------------------------------------------------------------------------ flags


def _unknown_flags(case: LogCase) -> Iterator[Fix]:
    text = case.figures.text("words")
    if text is None:
        return
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    launch = parse_argv(["vllm", "serve", "m", *words], engine_version=case.engine.version)
    for item in check_flags(LaunchCase(launch, None, None, case.engine, None)):
        if item.code == "unknown-flag":
            cause = item.cause if item.cause.endswith(("?", ".")) else f"{item.cause}."
            for fix in item.fixes:
                yield Fix(f"{cause} {fix.why}", fix.argv, fix.remove, fix.env, fix.command)
    yield from _shortened_flags(words, case.engine.version)


def _shortened_flags(words: list[str], version: str | None) -> Iterator[Fix]:
    """Beginnings of a flag: some releases refuse what others complete."""
    names = sorted(name for name in flag_table(version).options if name.startswith("--"))
    for place, word in enumerate(words):
        given, _, value = word.partition("=")
        whole = [name for name in names if name.startswith(given) and not name.startswith("--no-")]
        if not given.startswith("--") or given in names or len(given) < _LEAST_BEGINNING or len(whole) != 1:
            continue
        follows = words[place + 1 : place + 2] if not value else [value]
        values = [text for text in follows if not text.startswith("-")]
        yield Fix(f"{whole[0]} is the whole name, which this version wants.", (whole[0], *values), (given,))


def _derived_context(case: LogCase) -> Iterator[Fix]:
    most = case.figures.whole("most")
    if most:
        length = case.figures.whole("length")
        asked = f", not {length:,}" if length else ""
        yield Fix(
            f"The model's positions end at {most:,}{asked}; more only with its documented rope scaling.",
            argv=("--max-model-len", str(most)),
        )


def _block_in_batch(case: LogCase) -> Iterator[Fix]:
    block = case.figures.whole("block")
    if block:
        yield Fix(
            f"A step must have room for a block of {block:,} tokens. It costs a little memory for activations.",
            argv=("--max-num-batched-tokens", str(block)),
        )


def _port(case: LogCase) -> Iterator[Fix]:
    port = case.figures.whole("port")
    if port is None and case.facts.launch is not None and not case.figures.text("inner"):
        given = case.launch.flags.get("--port", _DEFAULT_PORT)  # the message names none: it is the server's own
        port = given if isinstance(given, int) and not isinstance(given, bool) else None
    if port is None or not 0 < port < 65535:
        return
    yield Fix(f"Shows who listens on {port}; end it if it is an old server.", command=f"ss -ltnp 'sport = :{port}'")
    yield Fix("Another port; clients must ask there.", argv=("--port", str(port + 1)))


# ------------------------------------------------------------------------------------------------ the host's memory


def _host_memory(case: LogCase) -> Iterator[Fix]:
    """What the launch itself holds of the host's memory, for each rank."""
    ranks = case.tensor_parallel
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    swap, offload = (_size(case, flag) for flag in ("--swap-space", "--cpu-offload-gb"))
    if swap and is_before(case.engine.version, _NO_SWAP_FROM):
        total = f", {swap * ranks:g} GiB in all," if ranks > 1 else ""
        yield Fix(
            f"{swap:g} GiB of the host's memory are reserved{each}{total} and none then. It costs: a request that the "
            "cache has no room for is computed again, not swapped back.",
            argv=("--swap-space", "0"),
        )
    if offload:
        total = f", {offload * ranks:g} GiB in all," if ranks > 1 else ""
        yield Fix(
            f"{offload:g} GiB of weights stay in the host's memory{each}{total} and none then. It costs: they must fit "
            "the cards instead.",
            remove=("--cpu-offload-gb",),
        )


def _size(case: LogCase, flag: str) -> float | None:
    given = case.launch.flags.get(flag)
    return float(given) if isinstance(given, int | float) and not isinstance(given, bool) and given > 0 else None


# ------------------------------------------------------------------------------------------------ pictures


def _image_limit(case: LogCase) -> Iterator[Fix]:
    kind, most, given = case.figures.text("kind"), case.figures.whole("most"), case.figures.whole("given")
    if kind is None or most is None:
        return
    wanted = given or most + 1
    held = case.launch.flags.get("--limit-mm-per-prompt")
    limits = {**(held if isinstance(held, dict) else {}), kind: wanted}
    cost = f"It costs: {wanted} at once must fit the context and the card."
    asked = f"The request has {given}" if given else f"More than {most}"
    yield Fix(
        f"{asked} of kind {kind}, the server takes {most}. {cost}", argv=("--limit-mm-per-prompt", json.dumps(limits))
    )


def _prompt_length(case: LogCase) -> Iterator[Fix]:
    length, most = case.figures.whole("length"), case.figures.whole("most") or case.readings.max_model_len
    if not length or not most:
        return
    wanted = -(-length // 1024) * 1024 + 1024  # and room for an answer
    tokens = case.readings.kv_tokens
    # from 0.20 on the printed count is of requests of the whole length; what fits of another length is at least near
    fits = tokens is not None and tokens >= wanted * 1.1
    known = f"the cache has room for {tokens:,} tokens" if tokens is not None else "whether it fits is not known"
    yield Fix(
        f"The prompt has {length:,} tokens, the server takes {most:,}; {known}. It costs: fewer such requests at once.",
        argv=("--max-model-len", str(wanted)),
        replanned=fits,
    )
    yield Fix("Or smaller pictures: scale them before they are sent, or cap them in the processor.")


def _encoder_cache(case: LogCase) -> Iterator[Fix]:
    length, most = case.figures.whole("length"), case.figures.whole("most")
    if not length or not most:
        return
    yield Fix(
        f"The picture makes {length:,} tokens, {most:,} have room. It costs: activations for steps of {length:,} "
        "tokens, which the profile then takes from the cache.",
        argv=("--max-num-batched-tokens", str(-(-length // 64) * 64)),
    )
    yield Fix(f"Or send pictures of {most / length:.0%} of that area.")


# ------------------------------------------------------------------------------------------------ who holds the card


def _held(case: LogCase) -> Iterator[Fix]:
    readings = case.readings
    held = None
    free, total = case.figures.gib("free"), case.figures.gib("total")
    if free is not None and total is not None:
        held = total - free
    elif readings.card_total_bytes and readings.card_free_bytes is not None and readings.in_use_bytes is not None:
        held = readings.card_total_bytes - readings.card_free_bytes - readings.in_use_bytes
    if held is None or held >= _HELD_FROM:
        size = f"the {gib(held)} that are not free" if held is not None else "the memory"
        yield Fix(
            f"Shows which processes hold {size}; end them if they are yours, such as workers of a dead server.",
            command="nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory,process_name --format=csv",
        )
    yield from _what_is_free(case)


def _what_is_free(case: LogCase) -> Iterator[Fix]:
    share = largest_free_share(case)
    free, total = case.figures.gib("free"), case.figures.gib("total")
    if share is None or not _LEAST_SHARE <= share < case.share or free is None or total is None:
        return
    smaller = gib(round((case.share - share) * total))
    yield Fix(
        f"{gib(free)} of {gib(total)} are free, and {case.share:g} of the card asks for more. It costs: the cache is "
        f"smaller by {smaller}; whether it still holds a request is not known without the checkpoint.",
        argv=("--gpu-memory-utilization", f"{share:g}"),
    )


_BY_CODE: dict[str, Callable[[LogCase], Iterator[Fix]]] = {
    "heads-vs-tp": _heads,
    "quant-group-vs-tp": _groups,
    "fp8-block-vs-tp": _blocks,
    "tp-exceeds-gpus": _too_many_ranks,
    "arch-unknown-engine": _architecture,
    "arch-unknown-transformers": _model_type,
    "transformers-fallback": _architecture,
    "unknown-flag": _unknown_flags,
    "context-beyond-model": _derived_context,
    "batched-tokens-below-block": _block_in_batch,
    "port-in-use": _port,
    "host-ram-killed": _host_memory,
    "image-limit-exceeded": _image_limit,
    "image-tokens-exceed-context": _prompt_length,
    "encoder-cache-too-small": _encoder_cache,
    "gpu-held-by-other-process": _held,
    "free-memory-below-request": _held,
}
