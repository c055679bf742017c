"""Asks a supervisord over its unix socket, with a limit of time: a stopped one must not hang who asks."""

from __future__ import annotations

import http.client
import socket
import xmlrpc.client
from pathlib import Path
from typing import Any

_TIMEOUT_S = 5.0
_RUNNING = 1  # supervisord's number of its own state


class SupervisorError(Exception):
    """The supervisor does not answer, or refuses."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self._path)
        except OSError:
            self.close()
            raise


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__()
        self._path = path
        self._timeout_s = timeout_s

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = _Connection(self._path, self._timeout_s)
        self._connection = host, connection  # which close() closes
        return connection


class Supervisor:
    """The methods of supervisord's XML-RPC interface that are used here. All raise :class:`SupervisorError`."""

    def __init__(self, path: Path, timeout_s: float = _TIMEOUT_S) -> None:
        self._path = str(path)
        self._timeout_s = timeout_s

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        transport = _Transport(self._path, timeout_s or self._timeout_s)
        try:
            with xmlrpc.client.ServerProxy("http://localhost/RPC2", transport=transport) as proxy:
                return getattr(proxy.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            raise SupervisorError(f"supervisord refuses {method}: {fault.faultString}") from None
        except (OSError, http.client.HTTPException, xmlrpc.client.Error, ValueError) as error:
            raise SupervisorError(f"supervisord does not answer ({error})") from None

    def pid(self) -> int:
        return int(self._call("getPID"))

    def stays(self) -> bool:
        """Whether it goes on; False: it is shutting down."""
        return int(self._call("getState")["statecode"]) == _RUNNING

    def programs(self) -> dict[str, dict[str, Any]]:
        """Program → what supervisorctl's status knows of it: statename, pid, start, exitstatus, description."""
        return {str(one["name"]): dict(one) for one in self._call("getAllProcessInfo")}

    def shutdown(self) -> None:
        self._call("shutdown")

    def start(self, program: str) -> None:
        self._call("startProcess", program, False)

    def stop(self, program: str, timeout_s: float) -> None:
        """Returns when it has stopped."""
        self._call("stopProcess", program, True, timeout_s=timeout_s)
