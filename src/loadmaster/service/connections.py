"""The listening side: sockets, their bounds, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from loadmaster.service.errors import error_body, invalid
from loadmaster.service.gatewaysettings import GatewaySettings

_log = logging.getLogger("loadmaster.gateway")


class Connection(web.RequestHandler):
    """A client's connection. What is not HTTP gets an error object and no traceback in the log."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun, none can follow")
        words = " ".join((message or "").split())[:200]
        words = "".join(letter if letter.isprintable() else "\ufffd" for letter in words)
        error = invalid("not_http", "the request is not valid HTTP" + (f": {words}" if words else ""))
        response = web.Response(status=400, body=error_body(error), content_type="application/json")
        response.force_close()
        return response


class _TurnedAway(asyncio.Protocol):
    """A connection beyond the most there may be: closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Listener:
    """An application on its socket. ``url`` is known once it is open."""

    def __init__(self, app: web.Application, settings: GatewaySettings) -> None:
        self._settings = settings
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        host = self._settings.host
        if host in ("0.0.0.0", "::", ""):
            host = "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def open(self) -> None:
        """Start the application and listen. Raises OSError when the address cannot be had."""
        await self._runner.setup()
        try:
            self._server = await self._listen()
        except BaseException:
            await self._runner.cleanup()
            raise
        if self._settings.address_file is not None:
            write_address(Path(self._settings.address_file), self.url, self._settings.host, self.port)

    async def _listen(self) -> asyncio.Server:
        manager = self._runner.server
        if manager is None:
            raise RuntimeError("the application was not set up")
        loop = asyncio.get_running_loop()
        limits = self._settings.limits
        options: dict[str, Any] = {
            "keepalive_timeout": limits.idle_connection_s,
            "max_line_size": limits.max_header_bytes,
            "max_field_size": limits.max_header_bytes,
            "max_headers": 100,
            "lingering_time": 5.0,  # a client that still sends its refused body has to see the answer first
            "auto_decompress": False,
            "access_log": None,
            "logger": _log,
        }

        def connection() -> asyncio.Protocol:
            if len(manager.connections) >= limits.max_connections:
                return _TurnedAway()
            return Connection(manager, loop=loop, **options)

        host = self._settings.host
        server = await loop.create_server(connection, host or None, self._settings.port, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Close what is still open; requests should have ended before."""
        self.stop_listening()
        manager = self._runner.server
        if manager is not None:
            manager.pre_shutdown()
            await manager.shutdown(1.0)
        await self._runner.cleanup()
        if self._settings.address_file is not None:
            remove_address(Path(self._settings.address_file))


def write_address(path: Path, url: str, host: str, port: int) -> None:
    """Tell other programs where the gateway is, whole or not at all."""
    content = msgspec.json.encode({"schema": 1, "url": url, "host": host, "port": port, "pid": os.getpid()})
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content + b"\n")
    Path(temporary).replace(path)


def remove_address(path: Path) -> None:
    """Take the file away, unless another gateway has written it since."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if msgspec.json.decode(path.read_bytes()).get("pid") == os.getpid():
            path.unlink()


def machine_name() -> str:
    with contextlib.suppress(OSError):
        return socket.gethostname()
    return ""


def raise_open_files() -> None:
    """Allow as many open files as the system lets us: every request holds two."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
