"""The checklist before a launch: every reason that can be known now why it would fail or be slow.

>>> findings = check_launch(launch, model=model, gpus=cards, engine=EngineFacts("vllm", "0.24.0"))

A finding is raised only when the facts that decide it are known; its confidence says how sure it is that the
launch is as described. The parts are in :mod:`loadmaster.core.checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from loadmaster.core.checks.architecture import check_architecture
from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import order
from loadmaster.core.checks.container import check_container, check_named_files
from loadmaster.core.checks.context import check_context
from loadmaster.core.checks.damage import check_damage
from loadmaster.core.checks.flags import check_flags
from loadmaster.core.checks.images import check_images
from loadmaster.core.checks.machine import check_machine
from loadmaster.core.checks.parallel import check_parallel
from loadmaster.core.checks.planning import check_plan
from loadmaster.core.checks.quantization import check_quantization
from loadmaster.core.checks.shapes import check_shapes
from loadmaster.core.facts import GIB, EngineFacts, Finding, GpuFacts, HostFacts, LaunchArgs, ModelFacts
from loadmaster.core.review import weights_are_whole

_CHECKS = (
    check_damage,
    check_flags,
    check_architecture,
    check_quantization,
    check_parallel,
    check_shapes,
    check_context,
    check_images,
    check_machine,
    check_container,
    check_named_files,
)


class Checked(Struct, frozen=True):
    """``findings``: the most severe first, the root cause before what follows. ``undecided``: what cannot be told."""

    findings: tuple[Finding, ...]
    undecided: tuple[str, ...]


def check_launch(
    launch: LaunchArgs,
    *,
    model: ModelFacts | None,
    gpus: Sequence[GpuFacts] | None,
    engine: EngineFacts,
    host: HostFacts | None = None,
) -> tuple[Finding, ...]:
    """The findings of :func:`checked_launch`."""
    return checked_launch(launch, model=model, gpus=gpus, engine=engine, host=host).findings


def checked_launch(
    launch: LaunchArgs,
    *,
    model: ModelFacts | None,
    gpus: Sequence[GpuFacts] | None,
    engine: EngineFacts,
    host: HostFacts | None = None,
) -> Checked:
    """All findings about a launch, and what nobody can tell of it.

    ``model`` None: looked up by its name in the table of public models, else unknown. ``gpus`` None: unknown.
    ``host`` None: the machine is not looked at. Never raises for any launch.
    """
    if model is None and launch.model is not None:
        from loadmaster.core.knownmodels import known_model

        model = known_model(launch.model)
    case = LaunchCase(launch, model, gpus, engine, host)
    own = _distinct(item for check in _CHECKS for item in check(case))
    findings = order([*own, *_unsaid(own, _distinct(check_plan(case)))])
    return Checked(findings, tuple(_undecided(case, findings)))


def _undecided(case: LaunchCase, findings: Sequence[Finding]) -> Iterator[str]:
    """Why nobody can tell whether the launch fits, where the plan cannot and no error is known."""
    sheet = case.sheet
    if sheet is None or case.model is None or any(item.severity == "error" for item in findings):
        return
    if not weights_are_whole(case.model) and case.text("--load-format") != "dummy":
        yield "memory: not all weights can be read"
    elif sheet.fits is None:
        peaks = [
            f"GPU {load.index} may reach {max(load.peak_high_bytes.values()) / GIB:.2f} of "
            f"{load.total_bytes / GIB:.2f} GiB"
            for load in sheet.gpus
            if max(load.peak_high_bytes.values()) > load.total_bytes
        ]
        yield "memory: the plan could not tell whether it fits" + (f": {peaks[0]}" if peaks else "")


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
