"""Files of a hub onto this disk: resumed, checked, and whole or not there.

A file grows as ``NAME.part`` beside its place and gets its name when size and hash are right. Whatever ends a
download early (a signal, a cut line, a full disk), the part stays and the next call goes on from there.
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import IO, Any

from msgspec import Struct, structs

from loadmaster.edge.hashes import Progress
from loadmaster.edge.hub import HubSource
from loadmaster.edge.source import ModelError

PART = ".part"
AT_ONCE = 4  # files
TRIES = 6  # in a row without a byte of progress
LONGEST_WAIT_S = 300.0  # a longer Retry-After is not waited for
_CHUNK = 1 << 20
_RANGE = re.compile(r"bytes (\d+)-\d*/(\d+|\*)")
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class DownloadError(Exception):
    """A download that has to be given up. What came is kept. ``hint``: what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RemoteFile(Struct, frozen=True):
    """A file of a hub and its place here. ``hash``: SHA-256, or SHA-1 of the Git blob; None: not told."""

    name: str
    place: Path
    size: int | None = None
    hash: str | None = None


class _Again(Exception):
    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s


class _Stopped(Exception):
    pass


def safe_name(name: str) -> bool:
    """Whether a name from a listing stays inside the folder it is put into."""
    path = PurePosixPath(name)
    plain = bool(name) and "\\" not in name and all(letter.isprintable() for letter in name)
    return plain and not path.is_absolute() and ".." not in path.parts and str(path) == name and len(name) < 1024


def bytes_missing(files: Sequence[RemoteFile]) -> int:
    """What is still to be written, complete files and parts counted as there; unknown sizes as nothing."""
    return sum(max(file.size - _there(file), 0) for file in files if file.size is not None)


def _there(file: RemoteFile) -> int:
    for path in (file.place, _part(file)):
        with contextlib.suppress(OSError):
            return path.stat().st_size
    return 0


def free_bytes(folder: Path) -> int | None:
    """Free room for this user where ``folder`` is, or will be."""
    for place in (folder, *folder.parents):
        if place.exists():
            try:
                return shutil.disk_usage(place).free
            except OSError:
                return None
    return None


def download(
    files: Sequence[RemoteFile],
    source: HubSource,
    progress: Progress | None = None,
    *,
    pause: Callable[[float], object] | None = None,
    at_once: int = AT_ONCE,
) -> None:
    """Brings every file to its place. Raises :class:`DownloadError`, or :class:`ModelError` when the hub refuses.

    ``pause`` sleeps between tries. A complete file is read and its hash compared; one with another content is kept
    as ``NAME.bak``.
    """
    stop = threading.Event()
    tally = _Tally(sum(file.size or 0 for file in files), progress)
    jobs = [_Job(file, source, tally, stop, pause or stop.wait) for file in files]
    with ThreadPoolExecutor(at_once, thread_name_prefix="download") as pool:
        futures = [pool.submit(job.run) for job in jobs]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    failed = [error for future in done if not future.cancelled() and (error := future.exception()) is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, _Stopped)):
        raise error


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One download into a folder at a time. Raises :class:`DownloadError` when another one is at work."""
    lock = folder / ".loadmaster-fetch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _disk_error(error, folder) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DownloadError(f"another download into {folder} is at work", "wait for it, or end it") from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()
    finally:
        os.close(descriptor)


class _Tally:
    """Bytes of all files together, from several threads."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done: dict[str, int] = {}
        self._lock = threading.Lock()

    def set(self, name: str, done: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._done[name] = done
            self._progress(sum(self._done.values()), max(self._total, 1), name)

    def say(self, words: str) -> None:
        if self._progress is not None:
            with self._lock:
                self._progress(sum(self._done.values()), max(self._total, 1), words)


class _Job:
    """One file, tried until it is there or hopeless."""

    def __init__(
        self,
        file: RemoteFile,
        source: HubSource,
        tally: _Tally,
        stop: threading.Event,
        pause: Callable[[float], object],
    ) -> None:
        # the SHA-1 of a Git blob begins with the size, so it says nothing where the size is not known
        known = file.hash is None or len(file.hash) == 64 or file.size is not None
        self.file = file if known else structs.replace(file, hash=None)
        self.source = source
        self.tally = tally
        self.stop = stop
        self.pause = pause
        self.part = _part(file)

    def run(self) -> None:
        if self._complete():
            return
        tries, wrong = 0, 0
        while True:
            before = _size(self.part)
            after: float | None
            try:
                self._fetch()
                return
            except _Again as again:
                why, after = str(again), again.after_s
            except _WrongContent as error:
                wrong += 1
                if wrong > 1:
                    raise DownloadError(
                        f"{self.file.name}: {error}, twice", "the hub or a proxy between alters the file; try another"
                    ) from None
                why, after = str(error), 0.0
            tries = 0 if _size(self.part) > before else tries + 1
            if tries >= TRIES:
                raise DownloadError(f"{self.file.name}: {why}, {tries} times in a row", _KEPT)
            if after is not None and after > LONGEST_WAIT_S:
                raise DownloadError(
                    f"{self.source.client.host} asks to wait {after / 60:.0f} minutes ({why})", f"{_KEPT} then"
                )
            seconds = after if after is not None else min(2.0**tries, 60.0)
            self.tally.say(f"{self.file.name}: {why}, goes on in {seconds:.0f} s")
            self.pause(seconds)
            self._go_on()

    def _go_on(self) -> None:
        if self.stop.is_set():
            raise _Stopped

    def _complete(self) -> bool:
        place = self.file.place
        try:
            if not place.exists():
                return False
            same_size = self.file.size is None or place.stat().st_size == self.file.size
            if same_size and self._hash_of(place) == self.file.hash:
                self.tally.set(self.file.name, self.file.size or 0)
                return True
            place.replace(place.with_name(f"{place.name}.bak"))
        except OSError as error:
            raise _disk_error(error, place) from None
        return False

    def _hash_of(self, path: Path) -> str | None:
        if self.file.hash is None:
            return None
        digest = self._new_digest()
        with path.open("rb", buffering=0) as file:
            self._feed(digest, file)
        return str(digest.hexdigest())

    def _new_digest(self) -> Any:
        if self.file.hash is not None and len(self.file.hash) == 40:
            return hashlib.sha1(b"blob %d\0" % (self.file.size or 0), usedforsecurity=False)
        return hashlib.sha256()

    def _feed(self, digest: Any, file: IO[bytes]) -> int:
        done = 0
        while chunk := file.read(8 * _CHUNK):
            self._go_on()
            digest.update(chunk)
            done += len(chunk)
            self.tally.set(self.file.name, done)
        return done

    def _fetch(self) -> None:
        digest = self._new_digest()
        try:
            self.part.parent.mkdir(parents=True, exist_ok=True)
            with self.part.open("a+b", buffering=0) as file:
                file.seek(0)
                start = self._feed(digest, file)
                if self.file.size is not None and start > self.file.size:
                    file.truncate(0)
                    raise _Again("the part was longer than the file", 0.0)
                if self.file.size is None or start < self.file.size:
                    digest = self._receive(file, start, digest)
                os.fsync(file.fileno())
        except OSError as error:
            raise _disk_error(error, self.part) from None
        if self.file.hash is not None and digest.hexdigest() != self.file.hash:
            self.part.unlink(missing_ok=True)
            raise _WrongContent(f"the content has hash {digest.hexdigest()[:12]}…, not {self.file.hash[:12]}…")
        try:
            self.part.replace(self.file.place)
        except OSError as error:
            raise _disk_error(error, self.file.place) from None

    def _receive(self, file: IO[bytes], start: int, digest: Any) -> Any:
        """Appends what the hub sends; returns the digest of the whole, anew if the hub began anew."""
        with contextlib.closing(self._open(start)) as answer:
            at, total = _extent(answer, start)
            if at == 0 and start > 0:  # ranges are ignored here: from the beginning
                file.truncate(0)
                digest = self._new_digest()
            elif at != start:
                raise _Again(f"the hub sent from byte {at}, not {start}")
            if total is not None and self.file.size is not None and total != self.file.size:
                raise DownloadError(
                    f"{self.file.name}: the list says {self.file.size} bytes, but {total} are sent",
                    "a proxy or a login page may stand between, or the repository has just changed",
                )
            done = at
            while True:
                self._go_on()
                chunk = _read(answer)
                if not chunk:
                    break
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                self.tally.set(self.file.name, done)
        expected = self.file.size if self.file.size is not None else total
        if expected is not None and done < expected:
            raise _Again(f"the line was cut after {done} of {expected} bytes")
        if expected is not None and done > expected:
            file.truncate(0)
            raise _WrongContent(f"{done} bytes came, {expected} were announced")
        return digest

    def _open(self, start: int) -> Any:
        client = self.source.client
        try:
            return client.open(self.source.path_of(self.file.name), start)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:
                self.part.unlink(missing_ok=True)
                raise _Again("the hub has no such range", 0.0) from None
            if error.code in _AGAIN:
                raise _Again(f"{client.host} answers {error.code}", _retry_after(error.headers)) from None
            refused = client.refused(error)
            raise ModelError(f"{self.file.name}: {refused.message}", refused.hint, refused.code) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            words = "no answer in time" if isinstance(reason, TimeoutError) else str(reason) or type(reason).__name__
            raise _Again(f"cannot reach {client.host}: {words}") from None


class _WrongContent(Exception):
    pass


_KEPT = "what came is kept; the same command goes on from there"


def _part(file: RemoteFile) -> Path:
    return file.place.with_name(f"{file.place.name}{PART}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(answer: Any) -> bytes:
    try:
        chunk: bytes = answer.read1(_CHUNK)
    except TimeoutError:
        raise _Again("nothing came for a while") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Again(f"the line was cut: {error or type(error).__name__}") from None
    return chunk


def _extent(answer: Any, start: int) -> tuple[int, int | None]:
    """(first byte that is sent, size of the whole file or None)."""
    if answer.status == 206:
        match = _RANGE.match(answer.headers.get("Content-Range", ""))
        if match is None:
            raise _Again("the hub does not say which range it sends")
        return int(match[1]), None if match[2] == "*" else int(match[2])
    length = answer.headers.get("Content-Length", "")
    return 0, int(length) if length.isdigit() else None


def _retry_after(headers: Message | None) -> float | None:
    """Seconds: the header has a number or a date."""
    value = (headers.get("Retry-After") or "").strip() if headers is not None else ""
    if value.isdigit() and len(value) < 10:
        return float(value)
    with contextlib.suppress(ValueError, TypeError):
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    return None


def _disk_error(error: OSError, path: Path) -> DownloadError:
    if error.errno in _FULL:
        return DownloadError(f"the disk is full at {path.parent}", f"make room; {_KEPT}")
    return DownloadError(f"cannot write {path}: {(error.strerror or str(error)).lower()}")
