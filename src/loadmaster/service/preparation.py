"""What is known of a deployment before its engine starts: the model, the plan, and what the checklist finds.

The same for ``up``, which says it, and for run-engine, which acts on it. Nothing is downloaded, nothing is loaded.
Cards and memory are taken as if nothing else were on them: who holds memory now may be gone soon, and is waited for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from msgspec import Struct, structs

from loadmaster.core.argv import parse_argv
from loadmaster.core.check import check_launch
from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import EngineFacts, Finding, GpuFacts, LaunchArgs, LoadSheet, ModelFacts
from loadmaster.core.hostplan import make_host_plan
from loadmaster.core.knownmodels import known_model
from loadmaster.core.localcalibration import with_learnt
from loadmaster.core.plan import make_plan
from loadmaster.core.secrets import hide_in_environment, hide_in_words
from loadmaster.edge.gguf import read_gguf
from loadmaster.edge.gpus import GpuSpecError, resolve_gpus
from loadmaster.edge.host import read_host
from loadmaster.edge.learnt import read_learnt
from loadmaster.edge.modeldir import ModelError, read_source
from loadmaster.edge.resolve import resolve
from loadmaster.engines.base import Engine
from loadmaster.service.enginechoice import engine_of
from loadmaster.service.refusal import PROBLEM, USAGE, Refusal

__all__ = ["Prepared", "engine_of", "prepare", "refuse", "shown_sheet"]


class Prepared(Struct, frozen=True, kw_only=True):
    """``sheet`` None: nothing could be planned. ``not_checked``: what could not be looked at, a sentence each."""

    version: str | None = None
    model: ModelFacts | None = None
    gpus: tuple[GpuFacts, ...] = ()
    sheet: LoadSheet | None = None
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[str, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings for which the start would fail again and again."""
        return tuple(f for f in self.findings if f.severity == "error" and f.confidence == "certain")


def prepare(deployment: Deployment, engine: Engine) -> Prepared:
    """Read, plan and check. Raises :class:`Refusal` for a model, program or card that is not there."""
    if deployment.engine.kind == "command":
        return _prepare_command(deployment)
    version = deployment.engine.version or engine.detect_version()
    if deployment.engine.kind == "llamacpp":
        return _prepare_host(deployment, version)
    return _prepare_cards(deployment, version)


def configured(deployment: Deployment) -> tuple[ModelFacts | None, tuple[GpuFacts, ...] | None]:
    """The checkpoint and the cards that the configuration names, for whatever program serves them. None: not here."""
    model, cards = None, None
    with contextlib.suppress(Refusal):
        model = _model(deployment.model, [])
    with contextlib.suppress(Refusal):
        cards = _cards(deployment.gpus, [])
    return model, cards


def refuse(prepared: Prepared) -> None:
    """Raises :class:`Refusal` when the start cannot succeed."""
    errors = prepared.errors
    if errors:
        raise Refusal(errors[0].title, findings=prepared.findings)
    if prepared.sheet is not None and prepared.sheet.fits is False:
        raise Refusal(
            "the model does not fit", "loadmaster plan says where the memory goes", findings=prepared.findings
        )


def shown_sheet(sheet: LoadSheet) -> LoadSheet:
    """The plan as it may be written to a file: without keys and tokens."""
    launch = structs.replace(
        sheet.launch,
        argv=tuple(hide_in_words(sheet.launch.argv)),
        env=hide_in_environment(sheet.launch.env),
        changed=sheet.launch.changed,
    )
    return structs.replace(sheet, launch=launch)


# ---------------------------------------------------------------------------------------------- the kinds


def _prepare_command(deployment: Deployment) -> Prepared:
    program = deployment.engine.command[0]
    if shutil.which(program) is None:
        raise Refusal(f"the engine's program {program!r} is not there", "see engine.command in loadmaster.toml")
    return Prepared(not_checked=("the model: a program of your own serves it",))


def _prepare_host(deployment: Deployment, version: str | None) -> Prepared:
    model = Path(deployment.model).expanduser()
    projector = Path(deployment.projector).expanduser() if deployment.projector is not None else None
    for what, path in (("model", model), ("projector", projector)):
        if path is not None and not path.exists():
            raise Refusal(f"there is no {what} at {path}", "fetch it, or correct loadmaster.toml", USAGE)
    try:
        facts = read_gguf(model, projector)
    except ModelError as error:
        raise Refusal(error.message, error.hint) from None
    flags = tuple(deployment.engine.flags)
    launch = LaunchArgs(model=deployment.model, argv=flags, extra=flags)
    host, engine = read_host(), EngineFacts("llamacpp", version)
    sheet = make_host_plan(facts, host, launch, engine)
    notes: tuple[str, ...] = ()
    if sheet.fits is False:
        emptied = make_host_plan(facts, structs.replace(host, memory_available_bytes=None), launch, engine)
        if emptied.fits is not False:
            notes = ("memory: other programs hold so much of it now that the model does not fit beside them",)
            sheet = structs.replace(emptied, notes=(*emptied.notes, *notes))
    return Prepared(version=version, model=facts, sheet=sheet, findings=sheet.findings, not_checked=notes)


def _prepare_cards(deployment: Deployment, version: str | None) -> Prepared:
    engine = EngineFacts("vllm", version)
    words = ["vllm", "serve", deployment.model, *deployment.engine.flags]
    launch = parse_argv(words, engine_version=version, env=deployment.engine.env)
    not_checked: list[str] = []
    model = _model(deployment.model, not_checked)
    gpus = _cards(deployment.gpus, not_checked)
    if gpus is not None:
        learnt, problem = read_learnt()
        gpus = with_learnt(gpus, learnt)
        not_checked += [] if problem is None else [f"earlier runs: {problem}"]
    # a port that is taken is stepped around, and what others hold on the cards is waited for
    host = structs.replace(read_host(), ports_in_use=())
    empty = None if gpus is None else tuple(structs.replace(gpu, free_bytes=None, processes=None) for gpu in gpus)
    findings = check_launch(launch, model=model, gpus=empty, engine=engine, host=host)
    sheet = make_plan(model, empty, launch, engine) if model is not None and empty else None
    return Prepared(
        version=version,
        model=model,
        gpus=gpus or (),
        sheet=sheet,
        findings=findings,
        not_checked=tuple(not_checked),
    )


def _model(name: str, not_checked: list[str]) -> ModelFacts | None:
    """The checkpoint of this machine, else what the table of public models knows; the network is not asked."""
    path = Path(name).expanduser()
    try:
        source = resolve(name, {**os.environ, "HF_HUB_OFFLINE": "1"})
        if isinstance(source, Path):
            return read_gguf(source)
        return read_source(source)
    except ModelError as error:
        if path.exists() or name.startswith(("/", ".", "~")):
            raise Refusal(error.message, error.hint, PROBLEM if path.exists() else USAGE) from None
    known = known_model(name)
    if known is None:
        not_checked.append(f"the model: {name} is not on this machine; the engine fetches it")
    else:
        not_checked.append(f"the model's files: {name} is not on this machine; the engine fetches it")
    return known


def _cards(spec: str, not_checked: list[str]) -> tuple[GpuFacts, ...] | None:
    try:
        return resolve_gpus(spec)
    except GpuSpecError as error:
        if spec.strip().lower() != "auto":
            raise Refusal(str(error), error.hint, USAGE) from None
        not_checked.append(f"memory: {error}")
        return None
