"""A run of an engine as the store keeps it: begun with its plan, compared when it is ready, ended with its cause.

Recording never stops a run: what cannot be kept is said once in the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from msgspec import structs

from loadmaster import __version__
from loadmaster.core.argv import parse_argv
from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import GIB, MIB, EngineFacts, GpuFacts, LoadSheet
from loadmaster.core.localcalibration import learnt_for
from loadmaster.core.logfacts import LogReadings
from loadmaster.core.reconcile import CardActual, Reconciliation, RunActual, reconcile, reconcile_host
from loadmaster.core.runrecord import RunEnding, RunRecord
from loadmaster.core.secrets import hide_in_environment, hide_in_words
from loadmaster.core.served import RankReplay, rank_replays
from loadmaster.core.sheet import plan_of
from loadmaster.edge.residentmemory import resident_bytes
from loadmaster.edge.runquery import RunObservation
from loadmaster.edge.runschema import FILE
from loadmaster.edge.runstore import RunStore
from loadmaster.service.places import Places
from loadmaster.service.preparation import Prepared, shown_sheet

DEPLOYMENTS = "deployments"


def store_path(places: Places) -> Path:
    """The file of runs: one for all deployments of a state folder; a deployment anywhere else has its own."""
    above = places.folder.parent
    return (above.parent if above.name == DEPLOYMENTS else places.folder) / FILE


class RunRecorder:
    """Keeps one run. Its methods wait for the disk, so they are for a thread.

    ``number``: of the run, None: not kept.
    """

    def __init__(self, places: Places, report: Callable[[str], None]) -> None:
        self._store = RunStore(store_path(places), places.name, report)
        self._prepared = Prepared()
        self._replays: tuple[RankReplay, ...] = ()
        self.number: int | None = None

    def begin(self, deployment: Deployment, prepared: Prepared) -> int | None:
        """Keep the beginning of a run, and return its number."""
        self._prepared = prepared
        self._replays = _replays(deployment, prepared)
        sheet = None if prepared.sheet is None else shown_sheet(prepared.sheet)
        self.number = self._store.begin_run(run_record(self._store.deployment, deployment, prepared), sheet)
        return self.number

    def ready(self, log: LogReadings, cards: Sequence[GpuFacts] | None, own: Collection[int]) -> Reconciliation | None:
        """Compare the plan with what is held now. ``own``: numbers of the engine's processes."""
        sheet = self._prepared.sheet
        if self.number is None or sheet is None or not sheet.gpus:
            return None
        if sheet.engine.name == "llamacpp":  # planned for the host's memory
            found = reconcile_host(sheet, resident_bytes(own))
            self._store.reconcile(self.number, time.time(), found)
            return found
        if not self._prepared.gpus:
            return None
        actual = RunActual(
            cards=tuple(card_actual(card, own) for card in cards or ()), log=log, context_bytes=context_of(log)
        )
        found = reconcile(sheet, actual, "ready", self._replays)
        self._store.observe(self.number, RunObservation(actual=actual, replays=self._replays))
        self._store.reconcile(self.number, time.time(), found)
        return found

    def end(self, message: str, code: int | None) -> None:
        if self.number is not None:
            self._store.finish_run(self.number, RunEnding(ended=time.time(), message=message, code=code))

    def close(self) -> None:
        self._store.close()


def run_record(name: str, deployment: Deployment, prepared: Prepared) -> RunRecord:
    """What is kept of the beginning of a run, without secrets and without what is on the cards at the moment."""
    model, sheet = prepared.model, prepared.sheet
    engine = sheet.engine if sheet is not None else EngineFacts("vllm", prepared.version)
    section = deployment.engine
    words = ["vllm", "serve", deployment.model, *section.flags]
    if section.kind == "command":
        words = list(section.command)
    elif section.kind == "llamacpp":
        words = ["llama-server", "--model", deployment.model, *section.flags]
    return RunRecord(
        deployment=name,
        started=time.time(),
        engine=engine,
        argv=tuple(hide_in_words(words)),
        env=hide_in_environment(section.env),
        model=deployment.model or None,
        architecture=None if model is None else model.architecture,
        quantization=None if sheet is None else sheet.model.quantization,
        cards=tuple(structs.replace(card, free_bytes=None, processes=None) for card in prepared.gpus),
        loadmaster=__version__,
        corrections=_corrections(prepared, sheet),
    )


def _corrections(prepared: Prepared, sheet: LoadSheet | None) -> dict[str, int]:
    if sheet is None or prepared.model is None:
        return {}
    used: dict[str, int] = {}
    for card in prepared.gpus[:1]:
        learnt = learnt_for(card, len(prepared.gpus), sheet.engine, prepared.model.architecture)
        used = {component: one.difference for component, one in learnt.items()}
    return used


def _replays(deployment: Deployment, prepared: Prepared) -> tuple[RankReplay, ...]:
    if prepared.model is None or not prepared.gpus or deployment.engine.kind != "vllm":
        return ()
    words = ["vllm", "serve", deployment.model, *deployment.engine.flags]
    launch = parse_argv(words, engine_version=prepared.version, env=deployment.engine.env)
    cards = tuple(structs.replace(card, free_bytes=None, processes=None) for card in prepared.gpus)
    return rank_replays(plan_of(prepared.model, cards, launch, EngineFacts("vllm", prepared.version)))


def card_actual(card: GpuFacts, own: Collection[int]) -> CardActual:
    """What a card holds now. The driver's count has its reserve in it, as its total has."""
    total = card.driver_total_bytes
    used = None if card.free_bytes is None or total is None else total - card.free_bytes
    return CardActual(
        index=card.index,
        driver_reserved_bytes=None if total is None else max(0, total - card.total_bytes),
        other_bytes=_others(card, own),
        ready_bytes=used,
    )


def _others(card: GpuFacts, own: Collection[int]) -> int | None:
    """What other processes hold; None where the driver's process numbers are not those seen here."""
    if card.processes is None or not any(process.pid in own for process in card.processes):
        return None
    held = [process.used_bytes for process in card.processes if process.pid not in own]
    return None if None in held else sum(size for size in held if size is not None)


def context_of(log: LogReadings) -> int | None:
    """What was in use on a card before the engine's first allocation, as CUDA counts."""
    if log.total_bytes is None or log.free_bytes is None or log.free_bytes > log.total_bytes:
        return None
    return log.total_bytes - log.free_bytes


def said_of(found: Reconciliation) -> list[str]:
    """A line a card, or one for the host, for the log: what is held, and which components are off."""
    lines = []
    if found.host is not None:
        host = found.host
        held = "unknown" if host.resident_bytes is None else f"{host.resident_bytes / MIB:,.1f} MiB"
        lines.append(
            f"host memory: {held} resident, planned {host.low_bytes / MIB:,.1f} to {host.high_bytes / MIB:,.1f} MiB"
        )
    for card in found.cards:
        off = [line for line in card.lines if line.name in card.off]
        words = [f"{line.name} {(line.difference or 0) / GIB:+.2f}" for line in off]
        if card.unexplained_bytes is not None:
            words.append(f"unexplained {card.unexplained_bytes / GIB:+.2f}")
        held = "unknown" if card.actual_bytes is None else f"{card.actual_bytes / GIB:.2f} GiB"
        planned = (card.planned_bytes + (card.driver_reserved_bytes or 0)) / GIB
        lines.append(
            f"GPU {card.index} holds {held}, planned {planned:.2f} GiB"
            + (f" (GiB: {', '.join(words)})" if words else "")
        )
    return lines
