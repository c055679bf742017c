"""Where the page's conversations and pictures are: on the disk, or pictures alone in memory.

A disk that is full or may not be written takes nothing from the service: the page is told why, browsers keep the
conversations, and the disk is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from loadmaster.edge.conversations import ConversationStore, Picture, QuotaError, StoreError
from loadmaster.service.errors import ApiError

MEMORY_BYTES = 256 << 20  # pictures of all owners while browsers keep the conversations
AGAIN_S = 10.0
SWEEP_S = 3600.0

T = TypeVar("T")
_log = logging.getLogger("loadmaster.gateway")


class Shelf:
    """All that the page keeps. ``path`` None: browsers keep the conversations."""

    def __init__(self, path: Path | None, quota: int, retention_s: float | None, memory: int = MEMORY_BYTES) -> None:
        self.quota = quota if path is not None else min(quota, memory)
        self.retention_s = retention_s
        self.problem: str | None = None
        self._store = ConversationStore(path, quota, lambda text: _log.error("%s", text)) if path is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="conversations")
        self._memory = _MemoryPictures(memory)
        self._tried = 0.0

    async def open(self) -> None:
        if self._store is not None:
            try:
                await self._in_thread(self._store.open)
            except StoreError as error:
                self._broke(error)

    async def close(self) -> None:
        if self._store is not None:
            await self._in_thread(self._store.close)
        self._thread.shutdown()

    @property
    def keeps(self) -> bool:
        """Whether the server keeps conversations now."""
        return self._store is not None and self.problem is None

    async def look(self) -> None:
        """Try the disk again, when it refused a while ago."""
        if self._store is None or self.problem is None or time.monotonic() - self._tried < AGAIN_S:
            return
        self._tried = time.monotonic()
        try:
            await self._in_thread(self._store.check)
        except StoreError as error:
            self._broke(error)
        else:
            self.problem = None
            _log.info("conversations can be kept again")

    async def ask(self, what: Callable[..., T], *values: Any, **named: Any) -> T:
        """Call a method of the store in its thread. Raises :class:`ApiError` for what the disk or the quota refuses."""
        if self._store is None:
            raise ApiError(409, "storage_browser", "this deployment keeps no conversations, the browser does")
        try:
            result = await self._in_thread(partial(what, self._store, *values, **named))
        except StoreError as error:
            self._broke(error)
            raise ApiError(507, error.code, error.message) from None
        except QuotaError as error:
            raise _over_quota(error) from None
        except KeyError:
            raise not_found() from None
        return result

    def _broke(self, error: StoreError) -> None:
        if self.problem is None:
            _log.error("conversations are not kept: %s", error.message)
        self.problem = error.message
        self._tried = time.monotonic()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # ------------------------------------------------------------------------------------------ pictures

    async def put_picture(self, owner: str, picture: Picture, content: bytes) -> None:
        """Raises :class:`ApiError` 413 when the owner has no more room."""
        if self.keeps:
            try:
                await self.ask(ConversationStore.put_picture, owner, picture, content)
            except ApiError as error:
                if error.status != 507:
                    raise
            else:
                return
        self._memory.put(owner, picture, content)

    async def pictures(self, owner: str, hashes: Iterable[str]) -> dict[str, Picture]:
        """Those of the owner's among them, by their hash."""
        wanted = set(hashes)
        found = self._memory.pictures(owner, wanted)
        rest = wanted - found.keys()
        if rest and self.keeps:
            found |= await self.ask(ConversationStore.pictures, owner, rest)
        return found

    async def picture_bytes(self, owner: str, sha256: str) -> bytes | None:
        content = self._memory.content(owner, sha256)
        if content is None and self.keeps:
            content = await self.ask(ConversationStore.picture_bytes, owner, sha256)
        return content

    async def used(self, owner: str) -> int:
        if not self.keeps:
            return self._memory.used(owner)
        return await self.ask(ConversationStore.used, owner)

    async def keep_house(self) -> None:
        """Now and every hour: take away what is too old or belongs to nobody."""
        while True:
            if self.keeps:
                try:
                    await self.ask(ConversationStore.sweep, time.time(), self.retention_s)
                except ApiError as error:
                    _log.error("old conversations stay: %s", error.message)
            await asyncio.sleep(SWEEP_S)


class _MemoryPictures:
    """Pictures of a session, at most ``limit`` bytes; who holds the most loses their least recently used first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[str, OrderedDict[str, tuple[Picture, bytes]]] = {}
        self._bytes: dict[str, int] = {}

    def put(self, owner: str, picture: Picture, content: bytes) -> None:
        held = self._held.setdefault(owner, OrderedDict())
        before = held.pop(picture.sha256, None)
        held[picture.sha256] = (picture, content)
        self._bytes[owner] = self.used(owner) + len(content) - (len(before[1]) if before else 0)
        while sum(self._bytes.values()) > self._limit:
            most = max(self._bytes, key=self._bytes.__getitem__)
            _, (_, oldest) = self._held[most].popitem(last=False)
            self._bytes[most] -= len(oldest)
            if not self._held[most]:
                del self._held[most], self._bytes[most]

    def pictures(self, owner: str, hashes: set[str]) -> dict[str, Picture]:
        held = self._held.get(owner) or OrderedDict[str, tuple[Picture, bytes]]()
        return {sha256: held[sha256][0] for sha256 in hashes if sha256 in held}

    def content(self, owner: str, sha256: str) -> bytes | None:
        held = self._held.get(owner)
        if held is None or sha256 not in held:
            return None
        held.move_to_end(sha256)
        return held[sha256][1]

    def used(self, owner: str) -> int:
        return self._bytes.get(owner, 0)


def _over_quota(error: QuotaError) -> ApiError:
    words = (
        f"{error.used:,} of {error.quota:,} bytes are used, {error.wanted:,} more do not fit: "
        "delete conversations with pictures, or ask the operator for a larger page.quota_bytes"
    )
    return ApiError(413, "quota_exceeded", words)


def not_found() -> ApiError:
    return ApiError(404, "conversation_not_found", "there is no such conversation or message")
