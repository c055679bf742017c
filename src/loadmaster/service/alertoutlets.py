"""Where alerts go: the log, a webhook, a command. All bounded: an outlet that fails loses its message, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from loadmaster.core.alerts import AlertChange
from loadmaster.core.deployment import AlertsSection
from loadmaster.core.facts import Finding, Severity

_RANK: dict[Severity, int] = {"note": 0, "warning": 1, "error": 2}
_WAITING = 100
_TRIES = 3
_FIRST_PAUSE_S = 1.0
_END_S = 5.0

_log = logging.getLogger("loadmaster.alerts")


class Message(Struct, frozen=True, kw_only=True):
    """What an outlet gets, as JSON. ``at``: seconds of the epoch."""

    deployment: str
    event: str  # "began" or "ended"
    at: float
    finding: Finding
    schema: int = 1


class AlertOutlets:
    """Tells of alerts as the section says; ``run`` does the work, ``tell`` returns at once.

    Every outlet has a line of its own, so that a webhook that does not answer does not hold up the command.
    """

    def __init__(self, deployment: str, section: AlertsSection) -> None:
        self._deployment = deployment
        self._section = section
        self._webhook = section.webhook
        if section.webhook_environment is not None:
            self._webhook = os.environ.get(section.webhook_environment) or self._webhook
        self._lines: dict[str, asyncio.Queue[Message]] = {}
        if self._webhook is not None:
            self._lines["webhook"] = asyncio.Queue(_WAITING)
        if section.command:
            self._lines["command"] = asyncio.Queue(_WAITING)

    def tell(self, change: AlertChange) -> None:
        """Into the log now, into the other outlets in their turn."""
        item = change.finding
        if change.began:
            level = {"error": logging.ERROR, "warning": logging.WARNING}.get(item.severity, logging.INFO)
            _log.log(level, "alert %s: %s: %s", item.code, item.title, item.cause)
        else:
            _log.info("alert %s has ended: %s", item.code, item.title)
        if _RANK[item.severity] < _RANK[self._section.least] or not (change.began or self._section.ended):
            return
        message = Message(
            deployment=self._deployment,
            event="began" if change.began else "ended",
            at=change.at,
            finding=item,
        )
        for name, line in self._lines.items():
            if line.full():
                line.get_nowait()
                _log.warning("the %s is behind: the oldest alert for it is dropped", name)
            line.put_nowait(message)

    async def run(self) -> None:
        """Deliver until cancelled."""
        work = {"webhook": self._post, "command": self._start}
        await asyncio.gather(*(self._deliver(name, line, work[name]) for name, line in self._lines.items()))

    async def _deliver(
        self, name: str, line: asyncio.Queue[Message], send: Callable[[Message], Awaitable[str | None]]
    ) -> None:
        while True:
            message = await line.get()
            problem: str | None = None
            for attempt in range(_TRIES):
                if attempt:
                    await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
                try:
                    problem = await send(message)
                except Exception as error:  # an outlet must not end the others
                    problem = type(error).__name__
                if problem is None:
                    break
            else:
                code = message.finding.code
                _log.warning("alert %s did not reach the %s in %d tries: %s", code, name, _TRIES, problem)

    # ------------------------------------------------------------------------------------------ outlets

    async def _post(self, message: Message) -> str | None:
        """None when it was taken. The address is never shown whole: its path and query may be a secret."""
        address = self._webhook or ""
        timeout = aiohttp.ClientTimeout(total=self._section.timeout_s)
        host = urlsplit(address).hostname or "the webhook"
        async with aiohttp.ClientSession(
            trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout
        ) as session:
            try:
                async with session.post(
                    address,
                    data=msgspec.json.encode(message),
                    headers={"Content-Type": "application/json", "User-Agent": "loadmaster"},
                    allow_redirects=False,
                ) as answer:
                    return None if 200 <= answer.status < 300 else f"{host} answers with status {answer.status}"
            except TimeoutError:
                return f"{host} does not answer within {self._section.timeout_s:g} s"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                return f"{host}: {type(error).__name__}"

    async def _start(self, message: Message) -> str | None:
        """The command with the message on its standard input; None when it ended with 0."""
        argv = self._section.command
        environment = {
            **os.environ,
            "LOADMASTER_ALERT": message.finding.code,
            "LOADMASTER_ALERT_EVENT": message.event,
            "LOADMASTER_ALERT_SEVERITY": message.finding.severity,
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return f"cannot start {argv[0]}: {getattr(error, 'strerror', None) or error}"
        try:
            async with asyncio.timeout(self._section.timeout_s):
                await process.communicate(msgspec.json.encode(message))
        except TimeoutError:
            return f"{argv[0]} was ended after {self._section.timeout_s:g} s"
        finally:
            if process.returncode is None:
                await _end(process)
        return None if process.returncode == 0 else f"{argv[0]} ended with {process.returncode}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command that takes too long, with all of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.wait()
