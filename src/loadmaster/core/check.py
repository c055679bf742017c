"""The checklist before a launch: every reason that can be known now why it would fail or be slow.

>>> findings = check_launch(launch, model=model, gpus=cards, engine=EngineFacts("vllm", "0.24.0"))

A finding is raised only when the facts that decide it are known; its confidence says how sure it is that the
launch is as described. The parts are in :mod:`loadmaster.core.checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loadmaster.core.checks.architecture import check_architecture
from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import order
from loadmaster.core.checks.context import check_context
from loadmaster.core.checks.flags import check_flags
from loadmaster.core.checks.images import check_images
from loadmaster.core.checks.machine import check_machine
from loadmaster.core.checks.parallel import check_parallel
from loadmaster.core.checks.planning import check_plan
from loadmaster.core.checks.quantization import check_quantization
from loadmaster.core.checks.shapes import check_shapes
from loadmaster.core.facts import EngineFacts, Finding, GpuFacts, HostFacts, LaunchArgs, ModelFacts

_CHECKS = (
    check_flags,
    check_architecture,
    check_quantization,
    check_parallel,
    check_shapes,
    check_context,
    check_images,
    check_machine,
)


def check_launch(
    launch: LaunchArgs,
    *,
    model: ModelFacts | None,
    gpus: Sequence[GpuFacts] | None,
    engine: EngineFacts,
    host: HostFacts | None = None,
) -> tuple[Finding, ...]:
    """All findings about a launch, the most severe first and the root cause before what follows from it.

    ``model`` None: looked up by its name in the table of public models, else unknown. ``gpus`` None: unknown.
    ``host`` None: the machine is not looked at. Never raises for any launch.
    """
    if model is None and launch.model is not None:
        from loadmaster.core.knownmodels import known_model

        model = known_model(launch.model)
    case = LaunchCase(launch, model, gpus, engine, host)
    own = _distinct(item for check in _CHECKS for item in check(case))
    return order([*own, *_unsaid(own, _distinct(check_plan(case)))])


def _distinct(findings: Iterable[Finding]) -> list[Finding]:
    """Each once: a cause that two checks see is said by the first."""
    kept: dict[tuple[str, str], Finding] = {}
    for item in findings:
        kept.setdefault((item.code, item.cause), item)
    return list(kept.values())


def _unsaid(own: Sequence[Finding], planned: Sequence[Finding]) -> list[Finding]:
    """The plan's findings without those that a check has said already, with more evidence and fixes."""
    said = {item.code for item in own}
    if "util-out-of-range" in said or "gpu-held-by-other-process" in said:
        said.add("free-memory-below-request")
    return [item for item in planned if item.code not in said]
