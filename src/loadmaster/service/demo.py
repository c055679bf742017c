"""The demonstration: a tiny model that sees, planned, served under supervision, verified, asked, taken down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType

import aiohttp
from msgspec import Struct

from loadmaster.config import PREFIX, load_deployment, write_deployment
from loadmaster.core.deployment import Deployment, EngineSection, GatewaySection, SupervisionSection
from loadmaster.core.facts import LoadSheet
from loadmaster.core.verification import Report, Step
from loadmaster.edge.demomodel import DamagedModel, write_demo_model
from loadmaster.edge.ports import next_free
from loadmaster.edge.statehome import state_home
from loadmaster.service import demowatch, verifypictures
from loadmaster.service.launch import begin, wait_until_up
from loadmaster.service.places import Places
from loadmaster.service.status import Status
from loadmaster.service.takedown import take_down
from loadmaster.service.verify import planned_limits, verify
from loadmaster.service.verifyclient import Service
from loadmaster.service.verifylocal import Installation
from loadmaster.service.verifysteps import shown
from loadmaster.service.webprogram import read_plan

NAME = demowatch.NAME
HOST, FIRST_PORT, ENGINE_PORT = "127.0.0.1", 7860, 8000
_HOME = "LOADMASTER_HOME"
_START_S = 120.0
_STOP_S = 5.0
_TIMEOUT_S = 60.0
# Four requests of 2,048 tokens, and no store of past prompts beyond 64 MiB. A picture has at most 100 tokens; one of
# fewer than 70 is scaled up, which makes small digits legible to the model.
FLAGS = ("--ctx-size", "8192", "--parallel", "4", "--image-min-tokens", "70", "--cache-ram", "64")

Said = Callable[[str], None]


class DemoError(Exception):
    """The demonstration did not come up. ``hint``: what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Demonstration(Struct, frozen=True, kw_only=True):
    """What runs: ``url`` of the gateway; ``ready_s``: of the start."""

    url: str
    folder: Path
    deployment: Deployment
    plan: LoadSheet | None
    installation: Installation
    ready_s: float


class Question(Struct, frozen=True):
    """One question about a picture that was put through the gateway, and what came back."""

    picture: str
    question: str
    answer: str
    seconds: float


@contextlib.contextmanager
def demonstration(port: int | None, keep: bool, said: Said) -> Iterator[Demonstration]:
    """Bring the demonstration up, and take it down when the block ends, also by SIGINT, SIGTERM and SIGHUP.

    ``port``: of the gateway, None: 7860 or the next free one. ``keep``: leave the folder with model, configuration
    and logs. Raises :class:`DemoError`, and what ``loadmaster up`` raises.
    """
    for old in demowatch.earlier():
        if demowatch.take_away(old):
            said(f"took away what a killed demonstration left in {old}")
    folder = Path(tempfile.mkdtemp(prefix=demowatch.PREFIX))
    demowatch.own(folder, keep)
    with demowatch.watched(folder), _own_state(folder / "state"), _ending_signals():
        try:
            deployment = _deployment(folder, port)
            said(f"wrote a tiny model into {folder}")
            places = Places.of(NAME)
            try:
                yield _up(folder, deployment, places, said)
            finally:
                with _ignored_signals():
                    _, left = take_down(deployment, places, lambda text: None)
            if left:
                names = ", ".join(f"{member.pid} {member.name}" for member in left)
                raise DemoError(f"these processes could not be ended: {names}")
        finally:
            if not keep:
                with _ignored_signals():
                    shutil.rmtree(folder, ignore_errors=True)


def ask(demo: Demonstration) -> Question:
    """One question with a picture, through the gateway. Raises ServiceError."""
    picture = verifypictures.two_shapes(Random(0))
    answers = picture.answers
    question = f"What colour is the {answers['left shape']}?"

    async def answer() -> str:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            service = Service(session, demo.url, timeout_s=_TIMEOUT_S)
            service.model = NAME
            return (await service.chat([shown([picture], question)], max_tokens=32)).text

    begun = time.monotonic()
    text = asyncio.run(answer())
    seen = (
        f"a {answers['left colour']} {answers['left shape']} and a {answers['right colour']} {answers['right shape']}"
    )
    return Question(seen, question, text, time.monotonic() - begun)


def prove(demo: Demonstration, progress: Callable[[Step], None] | None = None) -> Report:
    """The end-to-end proof of what runs."""
    installation = demo.installation
    proof = verify(
        demo.url,
        limits=planned_limits(installation),
        installation=installation,
        timeout_s=_TIMEOUT_S,
        seed=0,
        progress=progress,
    )
    return asyncio.run(proof)


def _deployment(folder: Path, port: int | None) -> Deployment:
    try:
        model, projector = write_demo_model(folder / "model")
    except DamagedModel as damage:
        hint = "install loadmaster again: python -m pip install --force-reinstall loadmaster"
        raise DemoError(str(damage), hint) from None
    chosen = port if port is not None else next_free(HOST, FIRST_PORT, {ENGINE_PORT})
    if chosen is None:
        raise DemoError(f"no port from {FIRST_PORT} on is free")
    deployment = Deployment(
        name=NAME,
        model=str(model),
        projector=str(projector),
        engine=EngineSection(kind="llamacpp", flags=list(FLAGS), port=ENGINE_PORT if chosen != ENGINE_PORT else 8001),
        gateway=GatewaySection(host=HOST, port=chosen),
        supervision=SupervisionSection(stop_s=_STOP_S),
    )
    write_deployment(deployment)
    return load_deployment(NAME).deployment


def _up(folder: Path, deployment: Deployment, places: Places, said: Said) -> Demonstration:
    begun = time.monotonic()
    begin(deployment, places, said)
    shown_states: list[str] = []

    def show(status: Status) -> None:
        if status.state not in shown_states:
            shown_states.append(status.state)
            said(status.state.replace("-", " "))

    status = wait_until_up(deployment, places, _START_S, show)
    if not status.healthy or status.gateway.url is None:
        raise DemoError(
            f"the service did not come up: {status.state}{f', {status.message}' if status.message else ''}",
            _last_words(places),
        )
    plan = read_plan(places.plan)
    return Demonstration(
        url=status.gateway.url,
        folder=folder,
        deployment=deployment,
        plan=plan,
        installation=Installation(
            deployment=deployment,
            plan=plan,
            log=places.backend_log,
            engine_pid=status.backend.pid,
            engine_url=status.backend.url,
        ),
        ready_s=time.monotonic() - begun,
    )


def _last_words(places: Places) -> str | None:
    """The end of the engine's log, which goes away with the folder."""
    for log in (places.backend_log, places.web_log):
        with contextlib.suppress(OSError):
            lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
            if lines:
                return f"{log.name} ends with: {' / '.join(lines[-4:])[-600:]}"
    return None


@contextlib.contextmanager
def _own_state(home: Path) -> Iterator[None]:
    """A state folder of its own; settings of other deployments in the environment do not count."""
    before = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    for name in before:
        del os.environ[name]
    os.environ[_HOME] = str(home)
    state_home()
    try:
        yield
    finally:
        del os.environ[_HOME]
        os.environ.update(before)


@contextlib.contextmanager
def _ending_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ignored_signals() -> Iterator[None]:
    """Taking down is bounded in time; impatience does not leave half of it behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
