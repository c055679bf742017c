"""The plan that ``loadmaster init`` makes: which engine, which flags, and a sentence above each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from loadmaster.commands.reading import engine_facts, read_cards, read_model
from loadmaster.failure import USAGE, Failure

if TYPE_CHECKING:
    from loadmaster.core.facts import EngineFacts, LoadSheet, ModelFacts


class FirstPlan(Struct, frozen=True, kw_only=True):
    """What the first configuration says. ``sheet`` None: not planned, and ``not_planned`` says why."""

    kind: str
    model: str
    projector: str | None = None
    flags: tuple[str, ...] = ()
    notes: dict[str, str] = {}
    recommended: bool = False  # the flags are the plan's own
    sheet: LoadSheet | None = None
    not_planned: str | None = None


def first_plan(
    model: str, projector: Path | None, gpu_spec: str, kind: str | None, version: str | None, flags: Sequence[str]
) -> FirstPlan:
    """Plans what can be planned. Raises :class:`Failure` for a model or cards that are named wrongly."""
    model = absolute(model)
    try:
        facts = read_model(model, projector=projector)
    except Failure as error:
        if error.exit_code == USAGE or kind == "llamacpp":
            raise
        # the hub cannot be asked now; a deployment may be prepared all the same
        return _unplanned(kind or "vllm", model, flags, error.message)
    engine = engine_facts(kind, None if kind == "llamacpp" else version, facts)
    if engine.name == "llamacpp":
        if facts.path is None:
            raise Failure("the embedded engine needs the GGUF file itself", f"loadmaster fetch {model}")
        return _host_plan(facts, facts.path, projector or _projector_of(facts), gpu_spec, engine, flags)
    if facts.format == "gguf":
        raise Failure("vLLM does not serve GGUF files", "leave --engine out")
    return _card_plan(facts, model, gpu_spec, engine, flags)


def _projector_of(facts: ModelFacts) -> Path | None:
    """The projector that was found beside the model and planned with it."""
    found = next((file.name for file in facts.files if file.kind == "processor"), None)
    return Path(facts.path).absolute().parent / found if found is not None and facts.path is not None else None


def absolute(model: str) -> str:
    """A path as seen from anywhere; a name as it is."""
    try:
        path = Path(model).expanduser()
        return str(path.absolute()) if path.exists() else model
    except OSError as error:
        raise Failure(f"{model}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RuntimeError) as error:
        raise Failure(f"{model!r} cannot be a model: {error}") from None


def _unplanned(kind: str, model: str, flags: Sequence[str], why: str) -> FirstPlan:
    return FirstPlan(
        kind=kind,
        model=model,
        flags=tuple(flags),
        notes={"engine.flags": f"Not planned: {why}."},
        not_planned=why,
    )


def _card_plan(facts: ModelFacts, model: str, gpu_spec: str, engine: EngineFacts, flags: Sequence[str]) -> FirstPlan:
    from loadmaster.core.argv import parse_argv
    from loadmaster.core.plan import make_plan
    from loadmaster.core.recommend import recommend

    try:
        cards = read_cards(gpu_spec)
    except Failure as error:
        if gpu_spec != "auto":
            raise
        return _unplanned("vllm", model, flags, error.message)
    launch = parse_argv(["vllm", "serve", model, *flags], engine_version=engine.version)
    sheet = make_plan(facts, cards, launch, engine) if flags else recommend(facts, cards, launch, engine)
    if flags and sheet.fits is True:  # what was given is kept, word by word
        return FirstPlan(
            kind="vllm", model=model, flags=tuple(flags), notes={"engine.flags": _verdict(sheet, gpu_spec)}, sheet=sheet
        )
    if flags:
        sheet = recommend(facts, cards, launch, engine)
    if sheet.fits is not True:
        return FirstPlan(
            kind="vllm", model=model, flags=tuple(flags), notes={"engine.flags": _verdict(sheet, gpu_spec)}, sheet=sheet
        )
    notes = {change.flag: _reason(change) for change in sheet.launch.changed}
    notes["engine.flags"] = _verdict(sheet, gpu_spec)
    chosen = _flags_of(sheet, model)
    return FirstPlan(kind="vllm", model=model, flags=chosen, notes=notes, recommended=True, sheet=sheet)


def _host_plan(
    facts: ModelFacts, model: str, projector: Path | None, gpu_spec: str, engine: EngineFacts, flags: Sequence[str]
) -> FirstPlan:
    from loadmaster.core.facts import LaunchArgs
    from loadmaster.core.hostplan import make_host_plan
    from loadmaster.edge.host import read_host

    if gpu_spec not in ("cpu", "auto"):
        raise Failure(f"a GGUF file is planned for the host's memory, not for {gpu_spec}", "leave --gpus out")
    host = read_host()
    chosen, notes = tuple(flags), {}

    def planned(words: Sequence[str]) -> LoadSheet:
        return make_host_plan(facts, host, LaunchArgs(model=model, argv=tuple(words), extra=tuple(words)), engine)

    sheet = planned(chosen)
    for fix in (fix for finding in sheet.findings for fix in finding.fixes if fix.replanned and fix.argv):
        smaller = planned((*flags, *fix.argv))
        if sheet.fits is not True and smaller.fits is True:
            chosen, sheet = (*flags, *fix.argv), smaller
            notes = {word: _plain(fix.why) for word in fix.argv if word.startswith("-")}
            break
    notes["engine.flags"] = _verdict(sheet, "this machine's memory")
    return FirstPlan(
        kind="llamacpp",
        model=absolute(model),
        projector=str(projector.absolute()) if projector is not None else None,
        flags=chosen,
        notes=notes,
        recommended=chosen != tuple(flags),
        sheet=sheet,
    )


def _flags_of(sheet: LoadSheet, model: str) -> tuple[str, ...]:
    words = list(sheet.launch.argv)
    if words[:2] == ["vllm", "serve"]:
        words = words[2:]
    return tuple(words[1:] if words and words[0] == model else words)


def _reason(change: Any) -> str:
    before = "" if change.from_ is None else f" (was {change.from_})"
    return f"{_plain(change.why)}{before}"


def _plain(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".")


def _verdict(sheet: LoadSheet, where: str) -> str:
    """One sentence above the flags: what was planned, and the answer."""
    version = f" {sheet.engine.version}" if sheet.engine.version else ""
    cards = "the cards of this machine" if where == "auto" else where
    answer = {
        True: "it fits",
        False: "it does not fit, so nothing was added",
        None: "whether it fits could not be told, so nothing was added",
    }[sheet.fits]
    return f"Planned for {sheet.engine.name}{version} on {cards}: {answer}."
