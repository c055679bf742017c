"""A hub on 127.0.0.1 that speaks Hugging Face's and ModelScope's interfaces and misbehaves on demand."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """What happens to one request for a file. ``cut``: bytes after which the line is cut. ``body``: sent instead."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    body: bytes | None = None
    silent_after: int | None = None  # bytes after which nothing more comes


@dataclass
class LoopbackHub:
    """``faults``: file name → what happens to its first requests, in order. ``always``: to all that follow."""

    files: dict[str, bytes]
    large: tuple[str, ...] = (".safetensors", ".gguf")
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    ignores_ranges: bool = False
    hashes: bool = True
    listing: bytes | None = None
    names: dict[str, str] = field(default_factory=dict)  # name in the listing, where it differs
    token: str | None = None
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # file, range
    port: int = 0
    gone: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def list_hugging_face(self) -> bytes:
        siblings: list[dict[str, Any]] = []
        for name, content in self.files.items():
            entry: dict[str, Any] = {"rfilename": self.names.get(name, name), "size": len(content)}
            if self.hashes and name.endswith(self.large):
                entry["lfs"] = {"size": len(content), "sha256": sha256(content)}
            elif self.hashes:
                entry["blobId"] = git_hash(content)
            siblings.append(entry)
        return json.dumps({"sha": COMMIT, "siblings": siblings}).encode()

    def list_tree(self) -> bytes:
        entries: list[dict[str, Any]] = []
        for name, content in self.files.items():
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
            if name.endswith(self.large):
                entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        return json.dumps(entries).encode()

    def list_modelscope(self) -> bytes:
        files: list[dict[str, Any]] = [{"Path": "folder", "Type": "tree", "Size": 0}]
        for name, content in self.files.items():
            entry = {"Path": self.names.get(name, name), "Name": name, "Type": "blob", "Size": len(content)}
            files.append({**entry, "Sha256": sha256(content)} if self.hashes else entry)
        return json.dumps({"Code": 200, "Data": {"Files": files}}).encode()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, url = self.hub, urllib.parse.urlsplit(self.path)
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.answer(401)
        query = urllib.parse.parse_qs(url.query)
        if url.path.endswith("/repo/files"):
            return self.answer(200, hub.listing if hub.listing is not None else hub.list_modelscope())
        if "/tree/" in url.path:
            return self.answer(200, hub.list_tree())
        if url.path.startswith("/api/models/"):
            return self.answer(200, hub.listing if hub.listing is not None else hub.list_hugging_face())
        name = query["FilePath"][0] if "FilePath" in query else urllib.parse.unquote(url.path.split(f"/{COMMIT}/")[-1])
        if name not in hub.files:
            return self.answer(404)
        if self.command == "GET":
            hub.requests.append((name, self.headers.get("Range")))
        waiting = hub.faults.get(name)
        fault = waiting.pop(0) if waiting and self.command == "GET" else hub.always.get(name, Fault())
        if fault.status is not None:
            return self.answer(fault.status, headers=fault.headers)
        return self.send(name, hub.files[name] if fault.body is None else fault.body, fault)

    def send(self, name: str, content: bytes, fault: Fault) -> None:
        start, wanted = 0, self.headers.get("Range")
        status, headers = 200, {}
        if wanted is not None and not self.hub.ignores_ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) if last else len(content) - 1
            if start >= len(content):
                return self.answer(416)
            status, headers = 206, {"Content-Range": f"bytes {start}-{min(end, len(content) - 1)}/{len(content)}"}
            body = content[start : end + 1]
        else:
            body = content
        plain = self.hub.files[name]
        self.send_response(status)
        headers |= {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        headers["ETag"] = f'"{sha256(plain) if name.endswith(self.hub.large) else git_hash(plain)}"'
        if name.endswith(self.hub.large):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(plain))}
        for header, value in (headers | fault.headers).items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        limit = fault.cut if fault.cut is not None else fault.silent_after
        self.wfile.write(body if limit is None else body[:limit])
        if fault.silent_after is not None:
            self.wfile.flush()
            self.hub.gone.wait(10)
        if limit is not None:
            self.close_connection = True
        return None


@contextmanager
def serve(hub: LoopbackHub) -> Iterator[LoopbackHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.gone.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
