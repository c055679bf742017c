"""Why an engine ended, from its log, its exit and the kernel's count of processes killed for memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from loadmaster.core.argv import parse_argv
from loadmaster.core.deployment import Deployment
from loadmaster.core.diagnosis import Diagnosis
from loadmaster.core.enginelog import repeats
from loadmaster.core.facts import EngineFacts, Finding
from loadmaster.core.logfixes import with_fixes
from loadmaster.core.secrets import hide_in_environment, hide_in_words
from loadmaster.service.preparation import Prepared, configured

CRASHED = 4
_MASK = "engine-dead-masked"
_LONGEST_LINE = 300
# What others hold may be gone at the next start, which waits for it.
_PASSES = frozenset({"gpu-held-by-other-process", "free-memory-below-request", "port-in-use", "hub-offline"})


def explained(diagnosis: Diagnosis, deployment: Deployment, prepared: Prepared) -> Diagnosis:
    """The diagnosis with fixes for what the deployment launches, on the cards and with the model that are here."""
    facts = diagnosis.facts
    if deployment.engine.kind == "vllm":
        version = prepared.version or facts.engine.version
        words = hide_in_words(["vllm", "serve", deployment.model, *deployment.engine.flags])
        launch = parse_argv(words, engine_version=version, env=hide_in_environment(deployment.engine.env))
        facts = structs.replace(facts, launch=launch, engine=EngineFacts("vllm", version))
    elif deployment.engine.kind == "llamacpp":
        facts = structs.replace(facts, engine=EngineFacts("llamacpp", prepared.version))
    model, gpus = prepared.model, prepared.gpus
    if facts.engine.name == "vllm" and (model is None or not gpus):  # a program of one's own, or one that is gone
        named, cards_named = configured(deployment)
        model, gpus = model or named, gpus or cards_named or ()
    # what others held of the cards then is in the log, what they hold now is another matter
    cards = tuple(structs.replace(gpu, free_bytes=None, processes=None) for gpu in gpus)
    return with_fixes(structs.replace(diagnosis, facts=facts), model, cards or None)


def all_findings(diagnosis: Diagnosis, prepared: Prepared) -> tuple[Finding, ...]:
    """What the log shows, then what was found before the start and is not among it."""
    said = {item.code for item in diagnosis.findings}
    return (*diagnosis.findings, *(item for item in prepared.findings if item.code not in said))


def open_questions(diagnosis: Diagnosis, last: str | None = None) -> tuple[str, ...]:
    """What is not known, and where no cause is: the first lines that look like one, else the ``last`` line."""
    lines = [f"line {one.line} looks like a failure: {one.text}" for one in diagnosis.suspicious]
    if not lines and last is not None and root_of(diagnosis) is None:
        lines = [f"the log names no cause; its last line is: {last.strip()[:_LONGEST_LINE]}"]
    return (*diagnosis.notes, *lines)


def root_of(diagnosis: Diagnosis) -> Finding | None:
    """The finding that says why it ended; None where none does."""
    first = next(iter(diagnosis.findings), None)
    return first if first is not None and first.severity == "error" else None


def exit_code_of(found: Sequence[Finding], grammar: str, *, served: bool) -> int:
    """1: the same launch would fail again; 4: another start is worth its while.

    An engine that served once is started again whatever it died of, and so is one whose cause is not certain.
    """
    root = next(iter(found), None)
    if served or root is None or root.severity != "error" or root.confidence != "certain":
        return CRASHED
    if root.code in _PASSES or root.code == _MASK:
        return CRASHED
    return 1 if repeats(grammar, root.code) else CRASHED


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory, here or in all; 0 where it does not tell."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0
