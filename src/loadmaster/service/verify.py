"""The end-to-end proof of a service that speaks the OpenAI API, ours or anybody's, a step after the other."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from random import Random

import aiohttp
from msgspec import Struct

from loadmaster.core.verification import Kind, Limits, Report, Step, verdict
from loadmaster.service import verifyload, verifylocal, verifysteps
from loadmaster.service.verifyclient import Service, ServiceError
from loadmaster.service.verifylocal import Installation, Watch
from loadmaster.service.verifysteps import Outcome, Proof, StepFunction


class Plan(Struct, frozen=True):
    """One step: ``after`` is a step that has to have passed, ``pictures``: it shows some, ``control``: see Step."""

    name: str
    kind: Kind
    ask: StepFunction
    after: str | None = None
    pictures: bool = False
    control: bool = False


STEPS = (
    Plan("models", "transport", verifysteps.models),
    Plan("text", "transport", verifysteps.text, after="models"),
    Plan("stream", "transport", verifysteps.stream, after="text"),
    Plan("image", "transport", verifysteps.image, after="text", pictures=True),
    Plan("image-large", "transport", verifysteps.image_large, after="image", pictures=True),
    Plan("control-colour", "answer", verifysteps.control_colour, after="text", control=True),
    Plan("image-colour", "answer", verifysteps.image_colour, after="control-colour", pictures=True),
    Plan("image-second-turn", "answer", verifysteps.image_second_turn, after="control-colour", pictures=True),
    Plan("image-exif", "answer", verifysteps.image_exif, after="control-colour", pictures=True),
    Plan("image-order", "answer", verifysteps.image_order, after="control-colour", pictures=True),
    Plan("control-number", "answer", verifysteps.control_number, after="text", control=True),
    Plan("conversation", "answer", verifysteps.conversation, after="control-number"),
    Plan("image-number", "answer", verifysteps.image_number, after="control-number", pictures=True),
    Plan("image-huge", "answer", verifysteps.image_huge, after="control-number", pictures=True),
    Plan("json-schema", "transport", verifysteps.json_schema, after="text"),
    Plan("concurrent", "transport", verifyload.concurrent, after="stream"),
    Plan("longest-prompt", "transport", verifyload.longest_prompt, after="text"),
    Plan("cancel", "transport", verifyload.cancel, after="stream"),
)
LOCAL = ("cards", "memory", "arguments")


async def verify(
    url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    limits: Limits | None = None,
    installation: Installation | None = None,
    timeout_s: float = 120.0,
    seed: int | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Report:
    """Ask everything and report. ``url`` with or without ``/v1``; ``model`` None: the first one listed.

    ``limits``: what is known beforehand; the service's own words fill in the rest. ``installation``: where the
    service runs, for the steps that look at this machine. ``timeout_s``: of one request, the longest prompt has five
    times as much. ``seed``: of the pictures, None: others every time. ``progress`` is called after each step.
    Raises :class:`AddressError` for a ``url`` that is none.
    """
    begin = time.monotonic()
    steps: list[Step] = []

    def done(step: Step) -> None:
        steps.append(step)
        if progress is not None:
            progress(step)

    # a connection for each request: one that the server closes while it is idle must not look like a failure
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        service = Service(session, url, api_key=api_key, timeout_s=timeout_s)
        service.model = model or ""
        proof = Proof(service, limits or Limits(), Random(secrets.randbits(64) if seed is None else seed))
        proof.engine_url = installation.engine_url if installation is not None else None
        watcher = verifylocal.watching() if installation is not None else contextlib.nullcontext(Watch())
        async with watcher as watch:
            for plan in STEPS:
                step = await _step(plan, proof)
                proof.statuses[plan.name] = step.status
                done(step)
        for name in LOCAL:
            done(_local(name, installation, watch))
    notes = tuple(f"the service refused {name}, it was left out" for name in service.refused)
    return Report(
        ok=verdict(steps),
        url=service.url,
        model=service.model or None,
        seconds=time.monotonic() - begin,
        limits=proof.limits,
        steps=tuple(steps),
        notes=notes,
    )


async def _step(plan: Plan, proof: Proof) -> Step:
    begin = time.monotonic()
    outcome = _not_asked(plan, proof)
    control = plan.control
    if outcome is None:
        try:
            outcome = await plan.ask(proof)
        except ServiceError as error:
            control = False  # no answer at all says nothing about the model
            outcome = _refused(plan, proof, error)
        else:
            if control and outcome.status == "failed":
                proof.too_weak.add(plan.name)
    return Step(
        name=plan.name,
        kind=plan.kind,
        status=outcome.status,
        seconds=time.monotonic() - begin,
        detail=outcome.detail,
        control=control,
        undecided=outcome.undecided,
    )


def _not_asked(plan: Plan, proof: Proof) -> Outcome | None:
    """Why a step is left out, None when it is not."""
    if plan.pictures and proof.picture_refusal is not None:
        return verifysteps.not_applicable("the service takes no pictures")
    if plan.after is None or proof.statuses.get(plan.after) == "passed":
        return None
    if plan.after in proof.too_weak:
        return verifysteps.not_applicable("not asked: the same question in words was answered wrongly")
    return verifysteps.not_applicable(f"the step {plan.after!r} has not passed")


def _refused(plan: Plan, proof: Proof, error: ServiceError) -> Outcome:
    """What it means that a step got no answer."""
    if not plan.pictures or not verifysteps.refuses_pictures(error):
        return verifysteps.failed(error.message)
    if proof.limits.pictures is True:
        return verifysteps.failed(f"the model takes pictures, but the service does not: {error.message}")
    proof.picture_refusal = error.message
    undecided = proof.limits.pictures is None
    unknown = "; whether it should is not known" if undecided else ""
    return verifysteps.not_applicable(f"the service takes no pictures{unknown}: {error.message}", undecided=undecided)


def _local(name: str, installation: Installation | None, watch: Watch) -> Step:
    begin = time.monotonic()
    if installation is None:
        outcome = verifysteps.not_applicable("the service is not a deployment of this machine")
    elif name == "cards":
        outcome = verifylocal.cards(installation, watch)
    elif name == "memory":
        outcome = verifylocal.memory(installation, watch)
    else:
        outcome = verifylocal.arguments(installation)
    return Step(
        name=name,
        kind="transport",
        status=outcome.status,
        seconds=time.monotonic() - begin,
        detail=outcome.detail,
    )


def planned_limits(installation: Installation) -> Limits:
    """What the deployment and its plan say that the service holds, as its gateway reads them."""
    from loadmaster.service.webprogram import concurrency, picture_rules

    deployment, plan = installation.deployment, installation.plan
    cache = plan.kv_cache if plan is not None else None
    return Limits(
        concurrency=concurrency(deployment, plan),
        context=cache.max_model_len if cache is not None else None,
        images=picture_rules(deployment, plan).max_images,
        pictures=True if plan is not None and plan.images is not None else None,
    )
