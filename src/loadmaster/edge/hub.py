"""A model on a hub, configuration and headers only: small files whole, weight files by ranged reads.

Speaks the parts of the Hugging Face hub's HTTP interface that its own client and its mirrors share
(``/api/models/…?blobs=true`` and ``/…/resolve/…``). The token goes to the endpoint alone: never to another host
that it redirects to, never over plain HTTP beyond this machine, and never into a message.
"""

from __future__ import annotations

import contextlib
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPMessage, InvalidURL
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct, field

from loadmaster.core.integrity import Origin
from loadmaster.edge.resolve import hugging_face_home
from loadmaster.edge.source import ModelError, ReadError

ENDPOINT = "https://huggingface.co"
SILENCE_SECONDS = 15.0  # without a byte, then the server counts as gone
REQUEST_SECONDS = 180.0  # for one answer in all, however slowly it drips
LISTING_LIMIT = 32 << 20  # bytes of the repository's listing
PREFIX_BYTES = 128 << 10  # first read of a weight file; holds most headers whole
_AT_ONCE = 8  # connections while the headers are fetched
_CHUNK = 1 << 20
_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


class _Large(Struct):
    size: int | None = None
    sha256: str | None = None


class _Sibling(Struct):
    rfilename: str
    size: int | None = None
    lfs: _Large | None = None
    blob_id: str | None = field(default=None, name="blobId")


class _Listing(Struct):
    siblings: list[_Sibling] = []
    sha: str | None = None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects as urllib does, without the token once host, port or scheme changes."""

    max_redirections = 5

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if urllib.parse.urlsplit(newurl).scheme not in ("http", "https"):
            raise urllib.error.URLError("redirected to something that is not HTTP")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and _origin(req.full_url) != _origin(newurl):
            request.remove_header("Authorization")
        return request


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


class HubSource:
    """The files of one revision of a repository.

    ``hashes``: SHA-256 of large files, SHA-1 of the Git blob of small ones, as far as the hub's listing says.
    """

    hub = "huggingface"

    def __init__(
        self,
        repository: str,
        commit: str,
        files: Mapping[str, int | None],
        client: Client,
        hashes: Mapping[str, str] | None = None,
    ) -> None:
        self.label = repository
        self.origin = Origin(None, repository, self.hub)
        self.files = files
        self.hashes = hashes or {}
        self.commit = commit
        self._client = client
        self._prefixes: dict[str, bytes] = {}

    def read(self, name: str, limit: int) -> bytes:
        size = self.files.get(name)
        if size is not None and size > limit:
            raise ReadError(f"{size} bytes, more than the {limit} that such a file may have")
        content = self._fetch(name, 0, limit + 1)
        if len(content) > limit:
            raise ReadError(f"more than the {limit} bytes that such a file may have")
        return content

    def read_range(self, name: str, start: int, length: int) -> bytes:
        if name.endswith(".safetensors") and name not in self._prefixes:
            self._fetch_prefixes(file for file in self.files if file.endswith(".safetensors"))
        prefix = self._prefixes.get(name, b"")
        end = start + length
        if end <= len(prefix) or len(prefix) == self.files.get(name):
            return prefix[start:end]
        if start < len(prefix):
            return prefix[start:] + self._fetch(name, len(prefix), end - len(prefix))
        return self._fetch(name, start, length)

    def _fetch_prefixes(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self._prefixes and self.files.get(name) is not None]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            futures = {name: pool.submit(self._fetch, name, 0, PREFIX_BYTES) for name in missing}
            for name, future in futures.items():
                try:
                    self._prefixes[name] = future.result()
                except ReadError:
                    self._prefixes[name] = b""  # asked for again, and reported, when it is read

    @property
    def client(self) -> Client:
        return self._client

    def path_of(self, name: str) -> str:
        """Where the file is, from the endpoint on."""
        parts = (*self.label.split("/"), "resolve", self.commit)
        return "/".join(urllib.parse.quote(part, safe="") for part in parts) + "/" + urllib.parse.quote(name)

    def _fetch(self, name: str, start: int, length: int) -> bytes:
        try:
            return self._client.get(self.path_of(name), start, length)
        except ModelError as error:
            raise ReadError(error.message) from error


class Client:
    """GET with a deadline, a size limit, and errors in words."""

    another_way = "set HF_ENDPOINT to a mirror"

    def __init__(self, endpoint: str, token: str | None) -> None:
        self.endpoint = endpoint
        self.host = urllib.parse.urlsplit(endpoint).hostname or endpoint
        self._token = token
        self._opener = urllib.request.build_opener(_Redirects())

    @property
    def token(self) -> str | None:
        return self._token

    def get(self, path: str, start: int, length: int, *, ranged: bool = True) -> bytes:
        """At most ``length`` bytes from ``start``; a server that ignores ranges is read up to there."""
        headers = {"User-Agent": "loadmaster", "Accept-Encoding": "identity"}
        if ranged:
            headers["Range"] = f"bytes={start}-{start + length - 1}"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(f"{self.endpoint}/{path}", headers=headers)
        deadline = time.monotonic() + REQUEST_SECONDS
        try:
            with contextlib.closing(self._opener.open(request, timeout=SILENCE_SECONDS)) as answer:
                skip = start if ranged and answer.status != 206 else 0
                if skip > PREFIX_BYTES:
                    raise ModelError(f"{self.host} ignores ranged reads, and {start} bytes would have to be read first")
                return _read(answer, skip + length, deadline)[skip:]
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:
                return b""  # a range behind the end: nothing there
            raise self.refused(error) from None
        except (OSError, ValueError, HTTPException) as error:
            raise self._unreachable(error) from None

    def open(self, path: str, start: int) -> Any:
        """The answer itself, from byte ``start`` on where the server can; to be closed by the caller.

        Raises :class:`urllib.error.HTTPError` and what else urllib raises; :meth:`refused` has words for it.
        """
        headers = {"User-Agent": "loadmaster", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(f"{self.endpoint}/{path}", headers=headers)
        return self._opener.open(request, timeout=SILENCE_SECONDS)

    def refused(self, error: urllib.error.HTTPError) -> ModelError:
        code = error.headers.get("X-Error-Code", "") if error.headers else ""
        if error.code in (401, 403) and code not in ("RepoNotFound", "RevisionNotFound"):
            return ModelError(
                f"{self.host} refuses access ({error.code})",
                "Accept the licence on the model's page and log in (hf auth login), or set HF_TOKEN",
                "gated-or-auth",
            )
        if error.code in (401, 404):
            return ModelError(
                f"{self.host} has no such model or file ({error.code}), or it is private",
                "Check the name's spelling; for a private model log in (hf auth login) or set HF_TOKEN",
                "gated-or-auth" if error.code == 401 else None,
            )
        return ModelError(
            f"{self.host} answers {error.code}", "Try again later, or give a local directory", "hub-offline"
        )

    def _unreachable(self, error: Exception) -> ModelError:
        if isinstance(error, InvalidURL) or (isinstance(error, ValueError) and not isinstance(error, OSError)):
            return ModelError(
                f"cannot reach {self.host}: an address on the way there is malformed ({error})",
                "Check HTTPS_PROXY, HTTP_PROXY and ALL_PROXY: http://HOST:PORT",
                "hub-offline",
            )
        reason = getattr(error, "reason", error)
        words = "no answer in time" if isinstance(reason, TimeoutError) else str(reason) or type(reason).__name__
        return ModelError(
            f"cannot reach {self.host}: {words}",
            f"Give the path of a complete local directory, or {self.another_way}",
            "hub-offline",
        )


def _read(answer: Any, limit: int, deadline: float) -> bytes:
    chunks: list[bytes] = []
    while limit > 0:
        chunk = answer.read1(min(limit, _CHUNK))
        if not chunk:
            break
        chunks.append(chunk)
        limit -= len(chunk)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(chunks)


def is_address(endpoint: str) -> bool:
    """Whether requests can be made to it: http or https, a host, a port that is a number, nothing that is no URL."""
    if not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        return False
    try:
        parts = urllib.parse.urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def keeps_secret(endpoint: str) -> bool:
    """Whether a token may go there: encrypted, or to this machine."""
    parts = urllib.parse.urlsplit(endpoint)
    return parts.scheme == "https" or parts.hostname in ("127.0.0.1", "localhost", "::1")


def open_hub(repository: str, revision: str, environment: Mapping[str, str]) -> HubSource:
    """Lists a repository. Raises :class:`ModelError` when it is not there, not open, or not reachable."""
    endpoint = environment.get("HF_ENDPOINT", "").strip().rstrip("/") or ENDPOINT
    if not is_address(endpoint):
        raise ModelError("HF_ENDPOINT is no http or https address", "For example https://hf-mirror.com")
    client = Client(endpoint, _token(environment) if keeps_secret(endpoint) else None)
    quoted = urllib.parse.quote(repository), urllib.parse.quote(revision, safe="")
    raw = client.get(f"api/models/{quoted[0]}/revision/{quoted[1]}?blobs=true", 0, LISTING_LIMIT + 1, ranged=False)
    try:
        listing = msgspec.json.decode(raw, type=_Listing)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ModelError(
            f"{client.host} does not answer as a model hub does",
            "Check HF_ENDPOINT, and whether a proxy stands between",
        ) from None
    files: dict[str, int | None] = {}
    hashes: dict[str, str] = {}
    for sibling in listing.siblings:
        size = sibling.lfs.size if sibling.lfs is not None else sibling.size
        files[sibling.rfilename] = size if size is not None and 0 <= size < 1 << 62 else None
        known = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
        if known is not None and _HASH.fullmatch(known):
            hashes[sibling.rfilename] = known
    commit = listing.sha if listing.sha is not None and _HASH.fullmatch(listing.sha) else revision
    return HubSource(repository, commit, dict(sorted(files.items())), client, hashes)


def _token(environment: Mapping[str, str]) -> str | None:
    """As huggingface_hub looks for it: the variable, else the file of ``hf auth login``."""
    if environment.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _TRUE:
        return None
    token = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN")
    if not token:
        stated = environment.get("HF_TOKEN_PATH")
        path = Path(stated).expanduser() if stated else hugging_face_home(environment) / "token"
        try:
            with path.open("r", encoding="ascii") as file:
                token = file.read(4096)
        except (OSError, ValueError):
            return None
    token = token.strip()
    return token if token and token.isascii() and token.isprintable() and " " not in token else None
