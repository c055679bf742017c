"""The steps of the proof for a service on this machine: its cards, its memory against the plan, its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from msgspec import Struct

from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import GpuLoad, LoadSheet
from loadmaster.core.startarguments import Arguments, llamacpp_arguments, vllm_arguments
from loadmaster.edge.cardactivity import CardActivity, CardReader, open_cards
from loadmaster.edge.gpus import GpuSpecError, read_nvml
from loadmaster.render.units import gib, size
from loadmaster.service.verifysteps import Outcome, failed, not_applicable, passed

_SAMPLE_EVERY_S = 0.1
# Cards of one plan that do the same work: more apart than this, the work is not spread evenly. Measured at 1-3 %.
_MOST_UNEVEN = 0.1
_LOG_BYTES = 8 << 20
_LOG_HEAD = 2 << 20


class Installation(Struct, frozen=True, kw_only=True):
    """Where the service runs. ``plan`` None: it was never planned. ``engine_pid``, ``engine_url`` None: unknown."""

    deployment: Deployment
    plan: LoadSheet | None = None
    log: Path | None = None
    engine_pid: int | None = None
    engine_url: str | None = None


class Watch:
    """What the cards did while requests ran: the busiest reading of each, and the last memory reading."""

    def __init__(self) -> None:
        self.busiest: dict[str, int] = {}
        self.most_used: dict[str, int] = {}
        self.samples = 0

    def add(self, readings: tuple[CardActivity, ...]) -> None:
        self.samples += bool(readings)
        for reading in readings:
            if reading.busy_percent is not None:
                self.busiest[reading.uuid] = max(reading.busy_percent, self.busiest.get(reading.uuid, 0))
            if reading.used_bytes is not None:
                self.most_used[reading.uuid] = max(reading.used_bytes, self.most_used.get(reading.uuid, 0))


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[Watch]:
    """Samples the cards while the block runs; without a driver there are no samples."""
    watch = Watch()
    with open_cards() as reader:
        if reader is None:
            yield watch
            return
        task = asyncio.create_task(_sample(reader, watch))
        try:
            yield watch
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _sample(reader: CardReader, watch: Watch) -> None:
    while True:
        watch.add(await asyncio.to_thread(reader.read))
        await asyncio.sleep(_SAMPLE_EVERY_S)


def _planned_cards(installation: Installation) -> dict[str, GpuLoad] | str:
    """The plan's cards by their identity in the driver; a text when there are none, with the reason."""
    plan = installation.plan
    if plan is None:
        return "the service has no plan"
    if plan.engine.name == "llamacpp":
        return "the engine works in host memory, not on cards"
    try:
        cards = {card.index: card for card in read_nvml()}
    except GpuSpecError as error:
        return f"the cards cannot be read: {error}"
    found = {}
    for load in plan.gpus:
        card = cards.get(load.index)
        if card is None or card.uuid is None or card.total_bytes != load.total_bytes:
            return "the plan was made for other cards than those of this machine"
        found[card.uuid] = load
    return found


def cards(installation: Installation, watch: Watch) -> Outcome:
    """Whether every planned card worked while requests ran, and holds as much as the others with the same plan."""
    planned = _planned_cards(installation)
    if isinstance(planned, str):
        return not_applicable(planned)
    busy = {uuid: watch.busiest.get(uuid) for uuid in planned}
    if not watch.samples or any(value is None for value in busy.values()):
        return not_applicable("the driver does not tell how busy the cards are")
    words = ", ".join(
        f"GPU {load.index}: at most {busy[uuid]} % busy, {gib(watch.most_used.get(uuid))}"
        for uuid, load in planned.items()
    )
    idle = [load.index for uuid, load in planned.items() if not busy[uuid]]
    if idle:
        return failed(f"GPU {', '.join(map(str, idle))} did nothing while requests ran; {words}")
    for uuid, load in planned.items():
        for other_uuid, other in planned.items():
            used, other_used = watch.most_used.get(uuid), watch.most_used.get(other_uuid)
            if used is None or other_used is None or load.budget_bytes != other.budget_bytes:
                continue
            if used - other_used > _MOST_UNEVEN * load.budget_bytes:
                return failed(f"the cards are filled unevenly; {words}")
    return passed(words)


def memory(installation: Installation, watch: Watch) -> Outcome:
    """What is in use against the plan: between its low when idle and its high when serving."""
    plan = installation.plan
    if plan is not None and plan.engine.name == "llamacpp":
        return _host_memory(installation, plan)
    planned = _planned_cards(installation)
    if isinstance(planned, str):
        return not_applicable(planned)
    used = {uuid: watch.most_used.get(uuid) for uuid in planned}
    if any(value is None for value in used.values()):
        return not_applicable("the driver does not tell how much memory is in use")
    words, wrong = [], False
    for uuid, load in planned.items():
        low, high = load.peak_low_bytes["steady"], load.peak_high_bytes["serving"]
        amount = used[uuid] or 0
        wrong = wrong or not low <= amount <= high
        words.append(f"GPU {load.index}: {gib(amount)} in use, planned {gib(low)} to {gib(high)}")
    return failed("; ".join(words)) if wrong else passed("; ".join(words))


def _host_memory(installation: Installation, plan: LoadSheet) -> Outcome:
    if not plan.gpus:
        return not_applicable("the plan has no figure for host memory")
    if installation.engine_pid is None:
        return not_applicable("the engine's process is not known")
    most = _most_resident(installation.engine_pid)
    if most is None:
        return not_applicable("the system does not tell how much memory the engine's process had")
    load = plan.gpus[0]
    low, high = load.peak_low_bytes["serving"], load.peak_high_bytes["serving"]
    words = f"at most {size(most)} resident, planned {size(low)} to {size(high)}"
    # a file that is mapped into memory need not be resident as a whole, so less is no contradiction
    return passed(words) if most <= high else failed(words)


def _most_resident(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return None


def arguments(installation: Installation) -> Outcome:
    """Whether the engine's log shows the arguments that the deployment or its plan give."""
    if installation.log is None:
        return not_applicable("the engine's log is not known")
    try:
        lines = _read_log(installation.log)
    except OSError as error:
        return not_applicable(f"the log cannot be read: {error.strerror}")
    found = _compared(installation, lines)
    if isinstance(found, str):
        return not_applicable(found)
    if found.other:
        flag, wanted, other = found.other[0]
        return failed(f"the log says {flag} {other}, wanted is {wanted}")
    shown = f"in the log: {', '.join(found.shown)}" if found.shown else "the log contradicts none"
    rest = f"; not named, as is a default: {', '.join(found.unnamed)}" if found.unnamed else ""
    return passed(shown + rest)


def _compared(installation: Installation, lines: list[str]) -> Arguments | str:
    deployment, plan = installation.deployment, installation.plan
    if deployment.engine.kind == "llamacpp":
        from loadmaster.core.hostsettings import parse_flags

        slots = parse_flags(deployment.engine.flags).values.get("--parallel")
        context = plan.kv_cache.max_model_len if plan is not None and plan.kv_cache is not None else None
        wanted = slots if isinstance(slots, int) and slots > 0 else None
        return llamacpp_arguments(lines, wanted, context) or "the log does not say how the engine was started"
    if deployment.engine.kind != "vllm":
        return "what the log of this program says of its arguments is not known"
    from loadmaster.core.argv import parse_argv

    argv = list(plan.launch.argv) if plan is not None and plan.launch.argv else [deployment.model]
    if plan is None or not plan.launch.argv:
        argv = ["vllm", "serve", deployment.model, *deployment.engine.flags]
    flags = parse_argv(argv, engine_version=deployment.engine.version).flags
    if not flags:
        return "the deployment gives no arguments"
    return vllm_arguments(lines, flags) or "the log has no line with the arguments"


def _read_log(path: Path) -> list[str]:
    """The beginning and the end of the log, where an engine's arguments stand after a start."""
    with path.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(0)
        if length <= _LOG_BYTES:
            content = file.read()
        else:
            content = file.read(_LOG_HEAD)
            file.seek(length - (_LOG_BYTES - _LOG_HEAD))
            content += b"\n" + file.read()
    return content.decode("utf-8", "replace").splitlines()
