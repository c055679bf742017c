"""Worker processes that convert pictures, shared by all requests of a gateway, and a cache of their results."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

import loadmaster
from loadmaster.service.imagerules import ImageError, ImageRules
from loadmaster.service.imageworker import Job, Reply, read_message, write_message

MEMORY_BYTES = 1 << 30  # address space that a worker may add for one picture: 64 million pixels, decoded and composed
CACHE_BYTES = 64 << 20
MAX_WAITING = 256
MAX_PAYLOAD = 512 << 20
# A worker is replaced after so many pictures: what a decoder may leak stays bounded.
JOBS_OF_A_WORKER = 2000
START_TIMEOUT_S = 30.0
# The result of a picture is at most as large as the uncompressed picture in base64, and some room for headers.
_MAX_REPLY = 512 << 20
# Environment that a worker gets: what finds libraries and marks the process, no keys.
_ENVIRONMENT = (
    "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "HOME", "PYTHONHOME", "VIRTUAL_ENV",
    "LOADMASTER_RUN",
)  # fmt: skip
_HASH_IN_THREAD = 256 << 10
_HASH_PIECE = 256 << 10
_ENTRY_OVERHEAD = 512

_T = TypeVar("_T")


class Outcome(msgspec.Struct, frozen=True):
    """``url``: the data: URL for the engine; None: the client's own may stay. ``notes``: what was done.

    ``source_size``, ``size``: pixels across and down, upright, as the picture came and as it goes to the engine.
    """

    url: str | None
    notes: tuple[str, ...] = ()
    source_size: tuple[int, int] | None = None
    size: tuple[int, int] | None = None


class _CrashError(Exception):
    """The worker ended before it answered."""


class _Worker:
    """One process. ``convert`` blocks and is called from a thread of the pool; ``kill`` from anywhere."""

    def __init__(self, memory_bytes: int) -> None:
        root = str(Path(loadmaster.__file__).resolve().parent.parent)
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = root
        command = [sys.executable, "-P", "-m", "loadmaster.service.imageworker", str(memory_bytes), str(MAX_PAYLOAD)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.jobs = 0
        _widen(self.process)

    def wait_until_up(self) -> None:
        self._read()

    def convert(self, header: bytes, source: str | bytes) -> tuple[Reply, bytes]:
        assert self.process.stdin is not None
        self.jobs += 1
        payload = _encoded(source)  # only here: pictures that wait are held once
        try:
            write_message(self.process.stdin, header, payload)
            answer_header, answer = self._read()
            return msgspec.msgpack.decode(answer_header, type=Reply), answer
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise _CrashError(str(error)) from None

    def _read(self) -> tuple[bytes, bytes]:
        assert self.process.stdout is not None
        try:
            message = read_message(self.process.stdout, _MAX_REPLY)
        except (OSError, ValueError) as error:
            raise _CrashError(str(error)) from None
        if message is None:
            raise _CrashError("the worker ended")
        return message

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """Ends and reaps the process; afterwards nothing of it is left."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _widen(process: subprocess.Popen[bytes]) -> None:
    """A megabyte for each pipe where the system allows it: fewer switches for a picture of several."""
    with contextlib.suppress(OSError, ImportError, AttributeError):
        import fcntl

        for stream in (process.stdin, process.stdout):
            if stream is not None:
                fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)


class _Shared:
    """One conversion that several requests may wait for; it ends when none does."""

    def __init__(self, task: asyncio.Task[Outcome]) -> None:
        self.task = task
        self.waiting = 0


class ImagePool:
    """Converts pictures in worker processes.

    ``workers``: pictures at once. ``memory_bytes``: what one may take while it is decoded. ``cache_bytes``: results
    kept for the next turn of a conversation; 0: none. ``max_waiting``: pictures in the queue, beyond which
    ImageError 429 says so. Processes start with the first picture and are replaced when they crash, exceed the time
    of a picture or its memory. Used from one event loop; ``stop`` leaves no process.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        memory_bytes: int = MEMORY_BYTES,
        cache_bytes: int = CACHE_BYTES,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        if workers < 1:
            raise ValueError("workers must be at least 1")
        self._memory_bytes = memory_bytes
        self._max_waiting = max_waiting
        self._slots = asyncio.Semaphore(workers)
        self._workers = workers
        self._threads: ThreadPoolExecutor | None = None
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._shared: dict[bytes, _Shared] = {}
        self._cache = _Cache(cache_bytes)
        self._stopped = False

    async def start(self) -> None:
        """Starts the processes now, so that the first picture need not wait for them. Not needed otherwise."""
        started = [await self._new_worker() for _ in range(self._workers - len(self._alive))]
        self._idle.extend(started)

    async def stop(self) -> None:
        """Ends all processes; pictures being converted fail. The pool cannot be used again."""
        self._stopped = True
        tasks = [shared.task for shared in self._shared.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers = list(self._alive)
        self._idle.clear()
        self._alive.clear()
        for worker in workers:
            worker.kill()
        for worker in workers:
            await asyncio.to_thread(worker.close)
        if self._threads is not None:
            await asyncio.to_thread(self._threads.shutdown)
            self._threads = None

    def processes(self) -> tuple[int, ...]:
        """The process numbers of the workers alive."""
        return tuple(sorted(worker.process.pid for worker in self._alive if worker.process.poll() is None))

    async def convert_url(self, url: str, rules: ImageRules) -> Outcome:
        """Applies ``rules`` to the picture of a data: URL. Raises ImageError."""
        # Base64 is four characters for three bytes; each may be percent-encoded.
        if len(url) > 4 * rules.max_bytes + 4096:
            raise ImageError("image_file_too_large", f"The picture has more than {rules.max_bytes} bytes.")
        return await self._cached(url, rules, encoded=False)

    async def convert_bytes(self, data: bytes, rules: ImageRules) -> Outcome:
        """Applies ``rules`` to a picture file; ``url`` of the result is never None. Raises ImageError."""
        return await self._cached(data, rules, encoded=True)

    async def _cached(self, source: str | bytes, rules: ImageRules, *, encoded: bool) -> Outcome:
        header = msgspec.msgpack.encode(Job(rules=rules, encoded=encoded))
        if len(source) > _HASH_IN_THREAD:
            key = await asyncio.to_thread(_key, source, header)
        else:
            key = _key(source, header)
        known = self._cache.get(key)
        if known is not None:
            return _outcome_of(known)
        shared = self._shared.get(key)
        if shared is None:
            if self._stopped:
                raise _unavailable("it is shutting down")
            if len(self._shared) >= self._max_waiting:
                raise ImageError("rate_limit_exceeded", "Too many pictures are waiting to be converted.", status=429)
            shared = _Shared(asyncio.create_task(self._convert(key, header, source, rules)))
            self._shared[key] = shared
            shared.task.add_done_callback(lambda task: self._finished(key, task))
        del source
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        except asyncio.CancelledError:
            if shared.task.cancelled():
                raise _unavailable("it is shutting down") from None
            raise
        finally:
            shared.waiting -= 1
            if not shared.waiting and not shared.task.done():
                self._shared.pop(key, None)
                shared.task.cancel()

    def _finished(self, key: bytes, task: asyncio.Task[Outcome]) -> None:
        shared = self._shared.get(key)
        if shared is not None and shared.task is task:
            del self._shared[key]
        if not task.cancelled():
            task.exception()  # fetched, so that an error for which nobody waits any more is not logged

    async def _convert(self, key: bytes, header: bytes, source: str | bytes, rules: ImageRules) -> Outcome:
        async with self._slots:
            reply, answer = await self._in_worker(header, source, rules)
        entry: Outcome | ImageError
        if reply.code is not None:
            entry = ImageError(reply.code, reply.message)
        else:
            url = answer.decode("ascii") if answer else None
            entry = Outcome(url, reply.notes, reply.source_size, reply.size)
        self._cache.put(key, entry)
        return _outcome_of(entry)

    async def _in_worker(self, header: bytes, source: str | bytes, rules: ImageRules) -> tuple[Reply, bytes]:
        """One picture in an idle or new worker; once more in a new one when the first dies."""
        for _ in range(2):
            worker = self._idle.pop() if self._idle else await self._new_worker()
            usable = False
            try:
                reply, answer = await self._in_thread(worker, partial(worker.convert, header, source), rules.timeout_s)
                usable = not reply.spent and worker.jobs < JOBS_OF_A_WORKER and not self._stopped
            except _CrashError:
                continue
            except TimeoutError:
                message = f"The picture takes longer than {rules.timeout_s:g} s to decode."
                raise ImageError("image_parse_error", message) from None
            finally:
                if usable:
                    self._idle.append(worker)
                else:
                    self._discard(worker)
            return reply, answer
        raise ImageError("image_parse_error", "The picture cannot be decoded: the decoder fails on it.")

    async def _new_worker(self) -> _Worker:
        if self._stopped:
            raise _unavailable("it is shutting down")
        if self._threads is None:
            # A worker dies with the thread that started it (Linux), so threads live as long as the pool.
            self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="images")
        worker = None
        try:
            starting = asyncio.get_running_loop().run_in_executor(self._threads, _Worker, self._memory_bytes)
            try:
                worker = await asyncio.shield(starting)
            except asyncio.CancelledError:
                worker = await starting
                raise
            self._alive.add(worker)
            await self._in_thread(worker, worker.wait_until_up, START_TIMEOUT_S)
        except (OSError, TimeoutError, _CrashError):
            if worker is not None:
                self._discard(worker)
            raise _unavailable("its decoder does not start") from None
        except asyncio.CancelledError:
            if worker is not None:
                self._discard(worker)
            raise
        return worker

    async def _in_thread(self, worker: _Worker, call: Callable[[], _T], timeout_s: float) -> _T:
        """Runs a blocking call on the worker; at the time limit or when cancelled, kills it, which ends the call."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            return await asyncio.wait_for(asyncio.shield(future), timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            worker.kill()
            with contextlib.suppress(_CrashError):
                await future
            raise

    def _discard(self, worker: _Worker) -> None:
        """Ends a worker; it is reaped in a thread, since the system takes its time to give back much memory."""
        self._alive.discard(worker)
        worker.kill()
        if self._threads is not None:
            self._threads.submit(worker.close)


class _Cache:
    """Results by content, the least recently used thrown away first; at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._entries: OrderedDict[bytes, tuple[int, Outcome | ImageError]] = OrderedDict()

    def get(self, key: bytes) -> Outcome | ImageError | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, key: bytes, value: Outcome | ImageError) -> None:
        size = _ENTRY_OVERHEAD + (len(value.url or "") if isinstance(value, Outcome) else len(value.message))
        if size > self._limit:
            return
        before = self._entries.pop(key, None)
        self._bytes += size - (before[0] if before else 0)
        self._entries[key] = (size, value)
        while self._bytes > self._limit:
            _, (old_size, _) = self._entries.popitem(last=False)
            self._bytes -= old_size


def _key(source: str | bytes, header: bytes) -> bytes:
    """Names a picture and its rules; a text is hashed in pieces, without a copy of the whole."""
    digest = hashlib.sha256(header)
    for start in range(0, len(source), _HASH_PIECE):
        digest.update(_encoded(source[start : start + _HASH_PIECE]))
    return digest.digest()


def _encoded(source: str | bytes) -> bytes:
    return source.encode("utf-8", "replace") if isinstance(source, str) else source


def _outcome_of(entry: Outcome | ImageError) -> Outcome:
    if isinstance(entry, ImageError):
        raise ImageError(entry.code, entry.message, status=entry.status)  # a new one: tracebacks are not shared
    return entry


def _unavailable(reason: str) -> ImageError:
    return ImageError("images_unavailable", f"This service cannot take pictures now: {reason}.", status=503)
