"""API keys: made once, shown once, kept as hashes.

A key holds 256 random bits, so nobody can try candidates against a stolen hash, and a slow hash, which protects
short secrets that people choose, would only cost every request. HMAC-SHA-256 under a random salt of each key's own
is enough. Every key of the file is compared on every request, in constant time, so that neither a prefix nor the
position of a key can be timed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from loadmaster.edge.statehome import WriteError, write_file, write_problem

SCHEMA = 1
DEFAULT_FILE = "keys.json"
OWN_NAME = "loadmaster"  # of the key that loadmaster's own commands use
PREFIX = "lm-"
LEAST_LETTERS = 20  # of a key given by the environment
MOST_KEYS = 1000
MOST_FILE_BYTES = 1 << 20
RECHECK_S = 1.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_log = logging.getLogger("loadmaster.gateway")


class KeysError(Exception):
    """A file of keys that cannot be used, or a name that cannot be added. ``hint`` says what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``salt``, ``hash``: hexadecimal. ``created``: seconds since 1970. Limits None: those of the gateway."""

    name: str
    salt: str
    hash: str
    created: int = 0
    requests_per_minute: int | None = None
    requests_at_once: int | None = None


class KeysFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int = SCHEMA
    keys: tuple[Key, ...] = ()


def keys_path(folder: Path, stated: str) -> Path:
    """Where a file of keys is that a deployment names; relative to the folder of its configuration."""
    return folder / Path(stated).expanduser()


def is_key_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hashed(
    name: str,
    secret: str,
    *,
    created: int = 0,
    requests_per_minute: int | None = None,
    requests_at_once: int | None = None,
) -> Key:
    salt = secrets.token_bytes(16)
    return Key(
        name=name,
        salt=salt.hex(),
        hash=_digest(salt, secret).hex(),
        created=created,
        requests_per_minute=requests_per_minute,
        requests_at_once=requests_at_once,
    )


def _digest(salt: bytes, secret: str) -> bytes:
    return hmac.digest(salt, secret.encode("utf-8", "surrogateescape"), "sha256")


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file. Raises :class:`KeysError` when it is missing or damaged."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise KeysError(f"{path}: larger than {MOST_FILE_BYTES:,} bytes, this is no file of keys")
        content = path.read_bytes()
    except FileNotFoundError:
        raise KeysError(f"{path}: no such file", "`loadmaster keys add NAME` makes it") from None
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror or error}") from None
    try:
        file = msgspec.json.decode(content, type=KeysFile)
        for key in file.keys:
            bytes.fromhex(key.salt)
            if len(bytes.fromhex(key.hash)) != hashlib.sha256().digest_size or not is_key_name(key.name):
                raise ValueError(f"the entry {key.name!r} is damaged")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise KeysError(f"{path}: {error}", "restore it, or remove it and add the keys again") from None
    if file.schema != SCHEMA:
        raise KeysError(f"{path}: schema {file.schema} is not known, this release reads {SCHEMA}")
    return file.keys


def add_key(
    path: Path, name: str, *, requests_per_minute: int | None = None, requests_at_once: int | None = None
) -> str:
    """Add a key to the file, which is made if missing, and return it; it cannot be read back later.

    Raises :class:`KeysError`, and WriteError when the disk is full or the file may not be written.
    """
    if not is_key_name(name):
        raise KeysError(f"{name!r} has to be 1 to 64 letters, digits, dots, hyphens and underscores")
    with _locked(path):
        keys = read_keys(path) if path.exists() else ()
        if any(key.name == name for key in keys):
            raise KeysError(f"there is a key {name!r} already", "remove it first, or choose another name")
        if len(keys) >= MOST_KEYS:
            raise KeysError(f"{path}: has {MOST_KEYS:,} keys, which is the most")
        secret = new_secret()
        key = hashed(
            name,
            secret,
            created=int(time.time()),
            requests_per_minute=requests_per_minute,
            requests_at_once=requests_at_once,
        )
        _write(path, (*keys, key))
    return secret


def remove_key(path: Path, name: str) -> None:
    """Remove a key; the gateway refuses it from its next look at the file on, a second later."""
    with _locked(path):
        keys = read_keys(path)
        kept = tuple(key for key in keys if key.name != name)
        if len(kept) == len(keys):
            raise KeysError(f"there is no key {name!r}", "`loadmaster keys list` shows the names")
        _write(path, kept)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with Path(f"{path}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise WriteError(*write_problem(error, path)) from None


def _write(path: Path, keys: tuple[Key, ...]) -> None:
    """Whole or not at all, readable by the owner alone."""
    content = msgspec.json.format(msgspec.json.encode(KeysFile(keys=keys)), indent=2) + b"\n"
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def keys_of_environment(value: str) -> tuple[Key, ...]:
    """Keys from a variable: ``KEY`` or ``NAME=KEY``, several apart by commas or white space."""
    found: list[Key] = []
    for name, secret in secrets_of_environment(value):
        if len(secret) < LEAST_LETTERS:
            raise KeysError(
                f"a key in the environment has {len(secret)} letters, at least {LEAST_LETTERS} are needed",
                "`python -c 'import secrets; print(secrets.token_urlsafe(32))'` makes a good one",
            )
        found.append(hashed(name, secret))
    return tuple(found)


def secrets_of_environment(value: str) -> tuple[tuple[str, str], ...]:
    """``(name, key)`` of each word of such a variable; a key without a name gets one from its place."""
    found: list[tuple[str, str]] = []
    for word in re.split(r"[,\s]+", value.strip()):
        name, separator, secret = word.partition("=")
        if not separator or not is_key_name(name) or len(secret) < LEAST_LETTERS:
            name, secret = f"environment-{len(found) + 1}", word
        found.append((name, secret))
    return tuple(found)


def write_own_key(path: Path) -> str:
    """Make the key by which loadmaster's own commands ask the gateway that starts now, readable by the owner alone.

    Raises StateError.
    """
    secret = new_secret()
    write_file(path, secret.encode("ascii"))
    return secret


def read_own_key(path: Path) -> str | None:
    """The key of the gateway that runs, None when it asks for none or could not write it."""
    try:
        return path.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


class KeyRing:
    """The keys that are valid now. The file is read again when it changed.

    A file that is gone holds no keys; one that is damaged leaves those that were read before.
    """

    def __init__(self, file: Path | None, environment: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises :class:`KeysError` when a key source cannot be used."""
        self._file = file
        self._fixed = keys_of_environment(environment) if environment is not None else ()
        self._clock = clock
        self._stamp = self._stamp_of_file()
        self._looked = clock()
        self._set(read_keys(file) if file is not None else ())

    def _set(self, keys: tuple[Key, ...]) -> None:
        self.keys = (*self._fixed, *keys)
        self._prepared = [(bytes.fromhex(key.salt), bytes.fromhex(key.hash), key) for key in self.keys]

    def _stamp_of_file(self) -> tuple[int, int, int] | None:
        try:
            state = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if state is None else (state.st_mtime_ns, state.st_size, state.st_ino)

    def _look(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked < RECHECK_S:
            return
        self._looked = now
        stamp = self._stamp_of_file()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._set(read_keys(self._file) if stamp is not None else ())
        except KeysError as error:
            _log.error("the keys stay as they were: %s", error)
        else:
            _log.info("read the keys again: %d", len(self.keys))

    def current(self) -> tuple[Key, ...]:
        """The keys that are valid now."""
        self._look()
        return self.keys

    def find(self, secret: str) -> Key | None:
        """The key whose secret this is."""
        self._look()
        found: Key | None = None
        for salt, expected, key in self._prepared:
            if hmac.compare_digest(_digest(salt, secret), expected):
                found = key
        return found


class Allowance:
    """Requests per minute as a bucket: it holds a minute's worth and refills evenly."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._at = clock()

    def take(self) -> int | None:
        """Take one request; None: granted, else whole seconds until the next one is."""
        now = self._clock()
        self._left = min(float(self.per_minute), self._left + (now - self._at) * self.per_minute / 60)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return None
        return max(1, math.ceil((1 - self._left) * 60 / self.per_minute))


class KeyUse:
    """What each key has in use: requests at once and its allowance per minute."""

    def __init__(
        self, per_minute: int | None, at_once: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute = per_minute
        self._at_once = at_once
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}
        self._running: dict[str, int] = {}

    def most_at_once(self, key: Key) -> int | None:
        return key.requests_at_once if key.requests_at_once is not None else self._at_once

    def begin(self, key: Key) -> tuple[str, int] | None:
        """Count a request; None: granted, else what is exhausted, "minute" or "at once", and seconds to wait.

        A granted one is to be ended by :meth:`end`.
        """
        most = self.most_at_once(key)
        if most is not None and self._running.get(key.name, 0) >= most:
            return "at once", 1
        per_minute = key.requests_per_minute if key.requests_per_minute is not None else self._per_minute
        if per_minute is not None:
            allowance = self._allowances.get(key.name)
            if allowance is None or allowance.per_minute != per_minute:
                allowance = self._allowances[key.name] = Allowance(per_minute, self._clock)
            wait = allowance.take()
            if wait is not None:
                return "minute", wait
        self._running[key.name] = self._running.get(key.name, 0) + 1
        return None

    def end(self, key: Key) -> None:
        left = self._running.get(key.name, 0) - 1
        if left > 0:
            self._running[key.name] = left
        else:
            self._running.pop(key.name, None)
