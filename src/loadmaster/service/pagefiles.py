"""The page's files: read from the package, told apart by their content, compressed once.

A file is asked for by a name that is in the table of those read at the start, so no path reaches the file system.
The address of a file holds a hash of all of them, so that a browser keeps it for good and never mixes two releases.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from functools import cached_property
from pathlib import Path

import zstandard
from aiohttp import web

from loadmaster.service.errors import ApiError

FOLDER = Path(__file__).parent / "static"
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".webp": "image/webp",
    ".ico": "image/x-icon",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
}
_PACKED = frozenset({".html", ".js", ".css", ".json", ".svg", ".txt", ".webmanifest"})
_LEAST_TO_COMPRESS = 512
_OWN_ADDRESS = re.compile(r'\b(src|href)="(?:\./|/)?static/([^":?#]+)"')


class StaticFile:
    """One file: its bytes, and their compressed forms once somebody takes them."""

    def __init__(self, content: bytes, ending: str) -> None:
        self.content = content
        self.media_type = _TYPES[ending]
        self.hash = hashlib.sha256(content).hexdigest()[:20]
        self.packed = ending in _PACKED and len(content) >= _LEAST_TO_COMPRESS

    @cached_property
    def gzip(self) -> bytes:
        return gzip.compress(self.content, 9, mtime=0)

    @cached_property
    def zstd(self) -> bytes:
        return zstandard.ZstdCompressor(level=19).compress(self.content)

    def encoded(self, accepted: str) -> tuple[str | None, bytes]:
        """The smallest form that the client takes, and what it is called."""
        if self.packed:
            taken = _codings(accepted)
            if "zstd" in taken:
                return "zstd", self.zstd
            if "gzip" in taken:
                return "gzip", self.gzip
        return None, self.content


class PageFiles:
    """All files under a folder, read anew when one of them has changed (an upgrade while the gateway runs)."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._stamp: tuple[tuple[str, int, int], ...] = ()
        self._files: dict[str, StaticFile] = {}
        self.version = ""
        self._read()

    def _read(self) -> None:
        paths = {
            path.relative_to(self._folder).as_posix(): path
            for path in sorted(self._folder.rglob("*"))
            if path.suffix in _TYPES and path.is_file() and not path.is_symlink()
        }
        states = {name: path.stat() for name, path in paths.items()}
        stamp = tuple((name, state.st_mtime_ns, state.st_size) for name, state in states.items())
        if stamp == self._stamp:
            return
        files = {name: StaticFile(path.read_bytes(), path.suffix) for name, path in paths.items()}
        every = "".join(f"{name} {file.hash}\n" for name, file in files.items())
        self.version = hashlib.sha256(every.encode()).hexdigest()[:16]
        if "index.html" in files:
            files["index.html"] = StaticFile(self._index(files["index.html"].content), ".html")
        self._files, self._stamp = files, stamp

    def _index(self, content: bytes) -> bytes:
        """The page with the version in the addresses of its files."""
        return _OWN_ADDRESS.sub(rf'\1="static/{self.version}/\2"', content.decode()).encode()

    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def content(self, name: str) -> bytes | None:
        file = self._files.get(name)
        return None if file is None else file.content

    async def index(self, request: web.Request) -> web.StreamResponse:
        self._read()
        return self._answer(request, "index.html", kept=False)

    async def file(self, request: web.Request) -> web.StreamResponse:
        """``/static/VERSION/NAME`` for good, ``/static/NAME`` asked about each time."""
        name = request.match_info["name"]
        version, _, rest = name.partition("/")
        if version == self.version:
            return self._answer(request, rest, kept=True)
        return self._answer(request, name, kept=False)

    def _answer(self, request: web.Request, name: str, *, kept: bool) -> web.StreamResponse:
        file = self._files.get(name)
        if file is None:
            raise ApiError(
                404, "file_not_found", "the page has no such file; load it again if it is of another release"
            )
        coding, content = file.encoded(request.headers.get("Accept-Encoding", ""))
        tag = f'"{file.hash}{f"-{coding}" if coding else ""}"'
        headers = HEADERS | {
            "ETag": tag,
            "Vary": "Accept-Encoding",
            "Cache-Control": "public, max-age=31536000, immutable" if kept else "no-cache",
        }
        asked = request.headers.get("If-None-Match", "")
        if asked.strip() == "*" or tag in (part.strip().removeprefix("W/") for part in asked.split(",")):
            return web.Response(status=304, headers=headers)
        headers["Content-Type"] = file.media_type
        if coding:
            headers["Content-Encoding"] = coding
        return web.Response(body=content, headers=headers)


def _codings(accepted: str) -> set[str]:
    """What an Accept-Encoding names without refusing it."""
    found = set()
    for part in accepted.lower().split(","):
        name, _, parameters = part.partition(";")
        weight = parameters.replace(" ", "").partition("q=")[2]
        try:
            refused = bool(weight) and float(weight) == 0
        except ValueError:
            refused = True
        if not refused:
            found.add(name.strip())
    return found
