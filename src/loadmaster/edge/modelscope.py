"""A model on ModelScope, by its HTTP interface: the list of files with sizes and SHA-256, and the files.

``MODELSCOPE_DOMAIN`` (a host or an address, as its own client takes it) names another site, ``MODELSCOPE_API_TOKEN``
a token.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.parse
from collections.abc import Mapping

import msgspec
from msgspec import Struct, field

from loadmaster.edge.hub import LISTING_LIMIT, Client, HubSource, is_address, keeps_secret
from loadmaster.edge.source import ModelError

DOMAIN = "www.modelscope.cn"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _File(Struct):
    path: str = field(name="Path")
    size: int | None = field(default=None, name="Size")
    sha256: str | None = field(default=None, name="Sha256")
    type: str | None = field(default=None, name="Type")


class _Files(Struct):
    files: list[_File] | None = field(default=None, name="Files")


class _Listing(Struct):
    code: int = field(default=200, name="Code")
    message: str | None = field(default=None, name="Message")
    data: _Files | None = field(default=None, name="Data")


class ModelScopeClient(Client):
    """GET with ModelScope's own words for refusals."""

    another_way = "fetch it from Hugging Face: --from hf"

    def refused(self, error: urllib.error.HTTPError) -> ModelError:
        if error.code in (401, 403):
            return ModelError(
                f"{self.host} refuses access ({error.code})",
                "Accept the licence on the model's page, and set MODELSCOPE_API_TOKEN",
                "gated-or-auth",
            )
        if error.code == 404:
            return ModelError(f"{self.host} has no such model or file (404)", "Check the name's spelling")
        return ModelError(f"{self.host} answers {error.code}", "Try again later", "hub-offline")


class ModelScopeSource(HubSource):
    """The files of one revision; ``commit`` is the revision's name."""

    hub = "modelscope"

    def path_of(self, name: str) -> str:
        query = urllib.parse.urlencode({"Revision": self.commit, "FilePath": name})
        return f"api/v1/models/{urllib.parse.quote(self.label)}/repo?{query}"


def open_modelscope(repository: str, revision: str, environment: Mapping[str, str]) -> ModelScopeSource:
    """Lists a repository. Raises :class:`ModelError` when it is not there, not open, or not reachable."""
    stated = environment.get("MODELSCOPE_DOMAIN", "").strip().rstrip("/") or DOMAIN
    endpoint = stated if "://" in stated else f"https://{stated}"
    if not is_address(endpoint):
        raise ModelError("MODELSCOPE_DOMAIN is no host or address", f"For example {DOMAIN}")
    token = environment.get("MODELSCOPE_API_TOKEN", "").strip()
    usable = token.isascii() and token.isprintable() and " " not in token and token != ""
    client = ModelScopeClient(endpoint, token if usable and keeps_secret(endpoint) else None)
    query = urllib.parse.urlencode({"Revision": revision, "Recursive": "true"})
    path = f"api/v1/models/{urllib.parse.quote(repository)}/repo/files?{query}"
    raw = client.get(path, 0, LISTING_LIMIT + 1, ranged=False)
    try:
        listing = msgspec.json.decode(raw, type=_Listing)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ModelError(f"{client.host} does not answer as ModelScope does", "Check MODELSCOPE_DOMAIN") from None
    if listing.code != 200 or listing.data is None or listing.data.files is None:
        said = "".join(letter for letter in (listing.message or "no list of files")[:200] if letter.isprintable())
        raise ModelError(f"{client.host}: {said}", "Check the name's spelling")
    files: dict[str, int | None] = {}
    hashes: dict[str, str] = {}
    for entry in listing.data.files:
        if entry.type == "tree":
            continue
        files[entry.path] = entry.size if entry.size is not None and 0 <= entry.size < 1 << 62 else None
        if entry.sha256 is not None and _SHA256.fullmatch(entry.sha256.lower()):
            hashes[entry.path] = entry.sha256.lower()
    return ModelScopeSource(repository, revision, dict(sorted(files.items())), client, hashes)
