"""What an end-to-end proof of a service consists of, and what its steps add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

Kind = Literal["transport", "answer"]
Status = Literal["passed", "failed", "not_applicable"]


class Step(Struct, frozen=True, kw_only=True):
    """One question put to the service. ``detail``: what was seen, or why there was nothing to see.

    ``kind``: "transport" is about the service's form and working, "answer" about what the model says. ``control``:
    the question in words that shows whether the model can be asked about pictures at all. ``undecided``: nothing
    was seen though it should have been, or it is unknown whether it should.
    """

    name: str
    kind: Kind
    status: Status
    seconds: float
    detail: str
    control: bool = False
    undecided: bool = False


class Limits(Struct, frozen=True, kw_only=True):
    """What a service is said to hold; None: unknown. ``context``: tokens of one request, its answer included.

    ``pictures``: whether the model takes any. ``images``: pictures in one request. ``concurrency``: requests at once.
    """

    concurrency: int | None = None
    context: int | None = None
    images: int | None = None
    pictures: bool | None = None


class Report(Struct, frozen=True, kw_only=True):
    """``ok`` None: could not tell, since the model is too weak to be asked or a deciding fact is unknown.

    ``seconds``: of the whole proof. ``model`` None: the service listed none.
    """

    schema: int = 1
    ok: bool | None
    url: str
    model: str | None
    seconds: float
    limits: Limits
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()


def verdict(steps: Sequence[Step]) -> bool | None:
    """False when a step failed that a working service passes with any model, or that this model showed it can.

    None when only controls failed, or nothing failed but a step is undecided.
    """
    if any(step.status == "failed" and not step.control for step in steps):
        return False
    if any(step.status == "failed" or step.undecided for step in steps):
        return None
    return True


def counts(steps: Sequence[Step]) -> dict[str, int]:
    """How many steps have each status, all three always there."""
    found: dict[str, int] = {"passed": 0, "failed": 0, "not_applicable": 0}
    for step in steps:
        found[step.status] += 1
    return found


def report_document(report: Report) -> dict[str, Any]:
    """The object of ``verify --json``."""
    return {
        "schema": report.schema,
        "ok": report.ok,
        "url": report.url,
        "model": report.model,
        "seconds": round(report.seconds, 3),
        "limits": {
            "concurrency": report.limits.concurrency,
            "context": report.limits.context,
            "images": report.limits.images,
            "pictures": report.limits.pictures,
        },
        "steps": [
            {
                "name": step.name,
                "kind": step.kind,
                "status": step.status,
                "seconds": round(step.seconds, 3),
                "detail": step.detail,
            }
            for step in report.steps
        ],
        "notes": list(report.notes),
    }
