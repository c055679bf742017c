"""The program that supervisor runs: one start of one engine, from the checks to its end.

It checks, waits for what is missing, starts the engine in a session of its own, says in ``engine.json`` how far it
is, and when the engine dies, why. Exit codes: 0 stopped as asked; 1 to 3 starting it again is useless; 4 it crashed and
a start is worth its while.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.deployment import Deployment
from loadmaster.core.diagnosis import Diagnosis, ExitSeen
from loadmaster.core.enginelog import phase_words
from loadmaster.core.facts import Evidence, Finding
from loadmaster.core.logfacts import LogFacts
from loadmaster.core.secrets import hide_in_text
from loadmaster.edge.gpurelease import wait_released
from loadmaster.edge.ports import holder, is_free
from loadmaster.edge.process import Child, Exit, ProcessError, Stopped
from loadmaster.edge.statehome import StateError
from loadmaster.engines.base import Engine, EngineError
from loadmaster.engines.readiness import NotReady, Ready, probe, wait_ready, warm_up, warm_up_picture
from loadmaster.service import backoff, gpumemory
from loadmaster.service.background import in_thread
from loadmaster.service.causes import all_findings, exit_code_of, explained, oom_kills, open_questions, root_of
from loadmaster.service.enginechoice import engine_of
from loadmaster.service.enginestate import (
    FINAL,
    EngineRun,
    EngineState,
    ExitFacts,
    Pid,
    State,
    next_state,
    read_run,
    read_state,
    write_run,
    write_state,
)
from loadmaster.service.enginewatch import watch_engine
from loadmaster.service.guard import Guard, end_run
from loadmaster.service.keywords import without_key
from loadmaster.service.outputs import Outputs, secret_values
from loadmaster.service.places import FOLDER_VARIABLE, Busy, Places, locked
from loadmaster.service.portchoice import choose_port, listening_port
from loadmaster.service.preparation import Prepared, prepare, refuse
from loadmaster.service.refusal import Refusal
from loadmaster.service.runrecorder import RunRecorder, said_of

CRASHED = 4
_LOOK_EVERY_S = 0.1
_MEMORY_LOOK_S = 2.0
_LOCK_WAIT_S = 60.0
_HURRY_S = 4.0  # patience with an engine whose supervisor has gone
_READ_REST_S = 2.0
_PROBE_S = 10.0

T = TypeVar("T")


class Outcome(Struct, frozen=True, kw_only=True):
    """How a run ended: exit code of run-engine, and what stands in ``engine.json``."""

    code: int
    message: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    exit: ExitFacts | None = None
    crashed: bool = False


class RunEngine:
    """One run. ``supervisor``: the process that has to be the parent, None when nobody has to."""

    def __init__(self, deployment: Deployment, places: Places, supervisor: int | None = None) -> None:
        self._deployment = deployment
        self._places = places
        self._supervisor = supervisor
        self._stop = asyncio.Event()
        self._why_stopped = ""
        self._child: Child | None = None
        self._outputs: Outputs | None = None
        self._engine: Engine = engine_of(deployment)
        self._guard = Guard()
        self._ready_since: float | None = None
        self._oom_kills = 0
        self._stop_patience_s = deployment.supervision.stop_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._prepared = Prepared()
        self._recorder: RunRecorder | None = None
        self._state = EngineState(
            state="checking", since=time.time(), runner=Pid.of(os.getpid()), supervisor=supervisor
        )

    # ------------------------------------------------------------------------------------------ the run

    async def run(self) -> int:
        """From the lock to the exit code."""
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            self._loop.add_signal_handler(number, self._ask_stop, f"asked to stop by {signal.Signals(number).name}")
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            self._loop.add_signal_handler(number, self._forward, number)
        parent = asyncio.create_task(self._watch_parent())
        work = asyncio.create_task(self._serve())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                outcome = _outcome_of(work)
            else:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                outcome = Outcome(code=0, message=f"stopped: {self._why_stopped}")
                self._say("stopping", self._why_stopped, retry_at=None)
            stopped = await self._end_engine()
        finally:
            for task in (parent, work, stop):
                task.cancel()
        return self._conclude(outcome, stopped)

    async def _serve(self) -> Outcome:
        """The run until the engine ends by itself; cancelled when a stop is asked for."""
        last = read_state(self._places.engine)
        if last is not None and last.runner == self._state.runner:
            last = None
        now = time.time()
        failures, restarts = backoff.begin_after(last, now, self._deployment.supervision)
        self._state = msgspec.structs.replace(self._state, failures=failures, restarts=restarts)
        if not await in_thread(self._end_earlier_run):
            return Outcome(code=CRASHED, message="processes of an earlier run cannot be ended", crashed=True)
        await self._back_off(last)
        self._say("checking", "reading the model and planning")
        try:
            self._prepared = await in_thread(lambda: prepare(self._deployment, self._engine))
            refuse(self._prepared)
        except Refusal as refusal:
            hint = f" ({refusal.hint})" if refusal.hint else ""
            return Outcome(code=refusal.exit_code, message=refusal.message + hint, findings=refusal.findings)
        for sentence in self._prepared.not_checked:
            self._log(f"not checked: {sentence}")
        if (short := await self._wait_for_memory()) is not None:
            return short
        run = await in_thread(self._record)
        self._state = msgspec.structs.replace(self._state, run=run)
        try:
            port = self._start()
        except (EngineError, ProcessError) as error:
            hint = f" ({error.hint})" if error.hint else ""
            return Outcome(code=1, message=error.message + hint)
        except StateError as error:
            return Outcome(code=1, message=error.message)
        return await self._until_it_ends(f"http://127.0.0.1:{port}")

    async def _until_it_ends(self, url: str) -> Outcome:
        deployment, engine = self._deployment, self._engine
        model, key = engine.served_model(deployment), engine.api_key(deployment)
        deadline = time.monotonic() + deployment.engine.start_timeout_s
        try:
            begin = time.monotonic()
            ready: Ready = await self._while_it_lives(
                wait_ready(url, model, key, deadline, lambda: self._ended() is None, self._waiting)
            )
            self._say("warming-up", "warming up")
            done = await self._while_it_lives(
                warm_up(
                    url,
                    model,
                    key,
                    picture=warm_up_picture(deployment, self._prepared.sheet),
                    timeout_s=max(1.0, deadline - time.monotonic()),
                    chat=ready.chat,
                    report=lambda text: self._say("warming-up", text),
                )
            )
            # a picture that is refused is no failure of the start; an engine that is silent afterwards is
            silent: str | None = None
            if done.problems:
                silent = await self._while_it_lives(probe(url, model, key, _PROBE_S, chat=ready.chat))
        except NotReady as reason:
            hint = f" ({reason.hint})" if reason.hint else ""
            if self._ended() is not None:
                return self._died()
            message = f"{hide_in_text(reason.message)}{hint}"
            return self._outcome(1 if reason.final else CRASHED, message)
        except _Died:
            return self._died()
        for problem in done.problems:
            self._log(hide_in_text(problem))
        if silent is not None:
            message = hide_in_text(f"it stopped answering in its warm-up: {'; '.join(done.problems)}")
            return self._outcome(CRASHED, message)
        seconds = {"listed": ready.listed_s, "answered": ready.answered_s, "ready": time.monotonic() - begin}
        seconds |= {"warm-up text": done.text_s} if done.text_s is not None else {}
        seconds |= {"warm-up picture": done.picture_s} if done.picture_s is not None else {}
        self._ready_since = time.time()
        said = hide_in_text("; ".join(done.problems)) or f"answers at {url}"
        self._say("ready", said, timings={name: round(value, 3) for name, value in seconds.items()})
        await in_thread(self._reconcile)
        try:
            standing = await self._while_it_lives(
                watch_engine(url, model, key, engine, deployment.supervision.stuck_after_s, chat=ready.chat)
            )
        except _Died:
            return self._died()
        message = f"stuck: it has work, its counter stands still and probes fail, for {standing:.0f} s"
        self._say("stuck", message)
        return Outcome(code=CRASHED, message=message, crashed=True)

    # ------------------------------------------------------------------------------------------ before the start

    def _end_earlier_run(self) -> bool:
        run = read_run(self._places.engine_run)
        if run is None:
            return True
        ended = end_run(run)
        if ended:
            with contextlib.suppress(OSError):
                self._places.engine_run.unlink()
        return ended

    async def _back_off(self, last: EngineState | None) -> None:
        wait_s = backoff.wait_s(self._state.failures, self._deployment.supervision)
        if wait_s <= 0:
            return
        why = "run-engine was killed"
        if last is not None and last.state in FINAL:
            why = last.message
            self._state = msgspec.structs.replace(self._state, exit=last.exit, findings=last.findings, notes=last.notes)
        self._say("exited", f"{why}; starts again in {wait_s:.3g} s", retry_at=time.time() + wait_s)
        await asyncio.sleep(wait_s)
        self._state = msgspec.structs.replace(self._state, exit=None, findings=(), notes=(), retry_at=None)

    async def _wait_for_memory(self) -> Outcome | None:
        wanted = gpumemory.needed(self._prepared.sheet, self._prepared.gpus)
        if not wanted:
            return None
        deadline = time.monotonic() + self._deployment.supervision.memory_wait_s
        while True:
            cards = await in_thread(gpumemory.read_cards)
            short = gpumemory.shortages(wanted, cards or ())
            if not short:
                return None
            words = "; ".join(one.words for one in short)
            if time.monotonic() >= deadline:
                found = finding(
                    "gpu-held-by-other-process", words, evidence=[Evidence("gpu", one.words) for one in short]
                )
                message = f"the GPU memory did not become free: {words}"
                return Outcome(code=1, message=message, findings=(found, *self._prepared.findings))
            self._say("waiting-for-memory", words)
            await asyncio.sleep(_MEMORY_LOOK_S)

    def _start(self) -> int:
        """Start the engine and return its port. Raises EngineError, ProcessError, StateError."""
        deployment, engine = self._deployment, self._engine
        wanted = choose_port(self._places, deployment)
        section = deployment.engine
        command = engine.command(deployment, self._prepared.sheet, wanted)
        command, visible = without_key(command, section.kind, container=section.container is not None)
        if visible:
            self._log("note: the engine's API key stands in its command line; keys of the gateway do not")
        port = listening_port(deployment, wanted)
        if port != wanted and not is_free("127.0.0.1", port):
            found = holder(port)
            by = f" by process {found[0]} {found[1]}" if found else ""
            raise EngineError(f"port {port} is taken{by}", "take --port out of engine.flags")
        secrets = secret_values(deployment, engine.api_key(deployment), os.environ)
        # known before the start, so that a process of which nobody has the number yet is found by its mark
        run = EngineRun(marker=uuid.uuid4().hex, cleanup=tuple(command.cleanup))
        write_run(self._places.engine_run, run)
        self._guard.watch(run)
        outputs = Outputs(engine, secrets, self._phase)
        try:
            child = Child.start(command, outputs.writer, marker=run.marker)
        except ProcessError:
            outputs.abandon()
            raise
        self._child, self._outputs = child, outputs
        outputs.begin()
        run = msgspec.structs.replace(run, pid=child.pid, started=child.identity.started)
        self._guard.watch(run)
        with contextlib.suppress(StateError):
            write_run(self._places.engine_run, run)
        self._state = msgspec.structs.replace(
            self._state,
            pid=child.pid,
            port=port,
            process=Pid(child.pid, child.identity.started),
            model=engine.served_model(deployment),
            version=self._prepared.version,
        )
        self._oom_kills = oom_kills()
        self._say("loading", f"started as process {child.pid}, port {port}")
        return port

    # ------------------------------------------------------------------------------------------ what is kept of it

    def _record(self) -> int | None:
        """Keep the beginning of this run; its number."""
        self._recorder = RunRecorder(self._places, self._log)
        return self._recorder.begin(self._deployment, self._prepared)

    def _reconcile(self) -> None:
        """Compare the plan with what the ready engine holds, and say who is off."""
        child, outputs, recorder = self._child, self._outputs, self._recorder
        if child is None or outputs is None or recorder is None:
            return
        own = [member.pid for member in child.members()]
        found = recorder.ready(outputs.readings(), gpumemory.read_cards() if self._prepared.gpus else None, own)
        for line in [] if found is None else said_of(found):
            self._log(line)

    # ------------------------------------------------------------------------------------------ while it runs

    async def _while_it_lives(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. Raises :class:`_Died` as soon as the engine's first process has ended."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LOOK_EVERY_S)
                if self._ended() is not None:
                    raise _Died
                self._guard.keep()
            return task.result()
        finally:
            task.cancel()
            with contextlib.suppress(BaseException):
                await asyncio.gather(task, return_exceptions=True)

    def _ended(self) -> Exit | None:
        return self._child.poll() if self._child is not None else None

    def _phase(self, phase: str) -> None:
        """Called by the thread that reads the log."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._show_phase, phase)

    def _show_phase(self, phase: str) -> None:
        if self._state.state == "loading" and not self._stop.is_set():
            self._say("loading", phase_words(self._grammar, phase), phase=phase)
        else:
            self._state = msgspec.structs.replace(self._state, phase=phase)

    def _waiting(self, text: str) -> None:
        """What readiness waits for; the log says more while it loads."""
        if self._state.phase in (None, "serving"):
            self._say("loading", hide_in_text(text))

    async def _watch_parent(self) -> None:
        """A killed supervisor must not leave an engine behind."""
        parent = os.getppid()
        while True:
            if (self._supervisor is not None and os.getppid() != self._supervisor) or os.getppid() != parent:
                self._stop_patience_s = min(self._stop_patience_s, _HURRY_S)
                self._ask_stop("its supervisor has gone")
                return
            await asyncio.sleep(0.25)

    def _ask_stop(self, why: str) -> None:
        if not self._stop.is_set():
            self._why_stopped = why
            self._stop.set()

    def _forward(self, number: int) -> None:
        if self._child is not None:
            self._child.signal(number)

    # ------------------------------------------------------------------------------------------ the end

    async def _end_engine(self) -> Stopped | None:
        """Stop whatever is left of the engine, and prove that its memory is free."""
        if self._child is None:
            return None
        child, patience = self._child, self._stop_patience_s
        stopped = await in_thread(lambda: child.stop(patience))
        if self._outputs is not None:
            await in_thread(lambda: self._outputs.finish(_READ_REST_S) if self._outputs else None)
        if stopped.cleanup_failed:
            self._log(f"the clean-up said: {hide_in_text(stopped.cleanup_failed)}")
        if stopped.left:
            names = ", ".join(f"{member.pid} {member.name}" for member in stopped.left)
            self._log(f"these processes cannot be ended, they wait for a device: {names}")
        else:
            self._guard.watch(None)
            with contextlib.suppress(OSError):
                self._places.engine_run.unlink()
        if self._prepared.gpus and any(gpu.source == "nvml" for gpu in self._prepared.gpus):
            release = await in_thread(lambda: wait_released(stopped.pids, before=self._prepared.gpus))
            free = {True: "is free again", False: "is NOT free", None: "could not be looked at"}[release.free]
            self._log(f"GPU memory {free}: {release.why}")
        return stopped

    def _died(self) -> Outcome:
        """What is known of an engine that ended by itself."""
        ended = self._ended() or Exit()
        if self._outputs is not None:
            self._outputs.finish(_READ_REST_S)
        seen = ExitSeen(code=ended.code, signal=ended.signal, oom_kills=oom_kills() - self._oom_kills)
        diagnosis = self._diagnosis(seen)
        code = exit_code_of(diagnosis.findings, self._grammar, served=self._ready_since is not None)
        where = f"in the phase {self._state.phase}" if self._state.phase else "before it said how far it was"
        if self._ready_since is not None:
            where = "while it served"
        root = root_of(diagnosis)
        title = f": {root.title}" if root is not None else ""
        return Outcome(
            code=code,
            message=f"the engine ended {where} ({ended.words}){title}",
            findings=all_findings(diagnosis, self._prepared),
            notes=open_questions(diagnosis, self._last_line()),
            exit=ExitFacts(ended.code, ended.signal),
            crashed=code == CRASHED,
        )

    def _outcome(self, code: int, message: str) -> Outcome:
        """Of an engine that lives and has to be ended, with what its log says of it."""
        diagnosis = self._diagnosis(None)
        return Outcome(
            code=code,
            message=message,
            findings=all_findings(diagnosis, self._prepared),
            notes=open_questions(diagnosis, self._last_line()),
            crashed=True,
        )

    def _last_line(self) -> str | None:
        return self._outputs.last[-1] if self._outputs is not None and self._outputs.last else None

    def _diagnosis(self, ended: ExitSeen | None) -> Diagnosis:
        if self._outputs is None:
            return Diagnosis(None, LogFacts())
        return explained(self._outputs.diagnosis(ended), self._deployment, self._prepared)

    def _conclude(self, outcome: Outcome, stopped: Stopped | None) -> int:
        failures = 0
        if outcome.crashed and outcome.code == CRASHED:
            failures = backoff.failures_after(
                self._state.failures, self._ready_since, time.time(), self._deployment.supervision
            )
        state: State = "failed" if outcome.code in (1, 2, 3) else "exited"
        ended = outcome.exit
        if ended is None and stopped is not None and stopped.exit is not None:
            ended = ExitFacts(stopped.exit.code, stopped.exit.signal)
        self._say(
            state,
            outcome.message,
            findings=outcome.findings,
            notes=outcome.notes,
            exit=ended,
            failures=failures,
            pid=None,
            process=None,
            retry_at=None,
        )
        if self._recorder is not None:
            self._recorder.end(hide_in_text(outcome.message), outcome.code)
            self._recorder.close()
        self._guard.close()
        return outcome.code

    # ------------------------------------------------------------------------------------------ saying

    @property
    def _grammar(self) -> str:
        return str(getattr(self._engine, "grammar", "vllm-log.toml"))

    def _say(self, state: State, message: str, **changes: Any) -> None:
        new = next_state(self._state, state, message=message, **changes)
        if new == self._state:
            return
        if (new.state, new.message) != (self._state.state, self._state.message):
            self._log(f"{new.state}: {new.message}")
        self._state = new
        try:
            write_state(self._places.engine, new)
        except StateError as error:
            self._log(f"error: {error.message}")

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stdout.write(f"[loadmaster {time.strftime('%H:%M:%S')}] {text}\n")
            sys.stdout.flush()


class _Died(Exception):
    """The engine's first process has ended."""


def _outcome_of(work: asyncio.Task[Outcome]) -> Outcome:
    error = work.exception()
    if error is None:
        return work.result()
    if isinstance(error, StateError):
        return Outcome(code=1, message=error.message)
    import traceback

    traceback.print_exception(error)
    return Outcome(code=CRASHED, message=f"an error in loadmaster itself: {type(error).__name__}", crashed=True)


def run_engine(deployment: Deployment, places: Places, supervisor: int | None = None) -> int:
    """Run the engine of a deployment and return the exit code. Raises :class:`StateError`."""
    places.make()
    os.environ[FOLDER_VARIABLE] = str(places.folder)  # under another supervisor, or none
    try:
        with locked(places.engine_lock, _LOCK_WAIT_S, _say_waiting):
            return asyncio.run(RunEngine(deployment, places, supervisor).run())
    except Busy as busy:
        sys.stdout.write(f"[loadmaster] another run-engine works on {places.name} ({busy})\n")
        return CRASHED


def _say_waiting(holder_pid: int | None) -> None:
    sys.stdout.write(f"[loadmaster] waiting for an earlier run-engine (process {holder_pid}) to end\n")
    sys.stdout.flush()
