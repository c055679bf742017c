"""Who uses the page: a key in a header, or a cookie that stands for a key which was typed once.

The cookie holds 256 random bits. What it stands for is kept here, bound to the key itself: a key that is taken away
or made anew under the same name ends its sessions at once.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from aiohttp import web
from msgspec import Struct

from loadmaster.service.errors import ApiError
from loadmaster.service.keys import Allowance, Key, KeyRing
from loadmaster.service.visitors import split_host

IDLE_S = 12 * 3600.0
LONGEST_S = 14 * 24 * 3600.0
MOST_SESSIONS = 10_000
ATTEMPTS_A_MINUTE = 10  # of one address; a key has 256 bits, so this only keeps noise and load down
_MOST_ADDRESSES = 4096


class Visitor(Struct, frozen=True):
    """``owner``: whose conversations these are: the key's name, "" where no keys are asked for."""

    owner: str
    key: Key | None = None


class _Session(Struct):
    key_hash: str
    began: float
    used: float


class Sessions:
    """The cookies that are valid now, lost when the gateway ends."""

    def __init__(self, keys: KeyRing, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._attempts: OrderedDict[str, Allowance] = OrderedDict()

    def login(self, secret: str, address: str) -> tuple[str, Key]:
        """A new cookie for a key. Raises :class:`ApiError` 401, and 429 after too many attempts."""
        allowance = self._attempts.get(address)
        if allowance is None:
            allowance = self._attempts[address] = Allowance(ATTEMPTS_A_MINUTE, self._clock)
        self._attempts.move_to_end(address)
        while len(self._attempts) > _MOST_ADDRESSES:
            self._attempts.popitem(last=False)
        wait = allowance.take()
        if wait is not None:
            raise ApiError(429, "too_many_attempts", "too many attempts, wait a little", retry_after=wait)
        key = self._keys.find(secret) if 0 < len(secret) <= 512 else None
        if key is None:
            raise ApiError(401, "api_key_invalid", "the key is not valid here")
        cookie, now = secrets.token_urlsafe(32), self._clock()
        self._sessions[_digest(cookie)] = _Session(key.hash, now, now)
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return cookie, key

    def find(self, cookie: str) -> Key | None:
        """The key that a cookie stands for; None: it is unknown, too old, or its key is not valid any more."""
        name = _digest(cookie)
        session = self._sessions.get(name)
        if session is None:
            return None
        now = self._clock()
        key = next((key for key in self._keys.current() if key.hash == session.key_hash), None)
        if key is None or now - session.used > IDLE_S or now - session.began > LONGEST_S:
            del self._sessions[name]
            return None
        session.used = now
        self._sessions.move_to_end(name)
        return key

    def logout(self, cookie: str) -> None:
        self._sessions.pop(_digest(cookie), None)


def _digest(cookie: str) -> str:
    return hashlib.sha256(cookie.encode("utf-8", "replace")).hexdigest()


def cookie_name(request: web.BaseRequest) -> str:
    """Cookies do not tell ports apart: two gateways of one machine need two names."""
    parts = split_host(request.headers.get("Host", ""))
    return f"loadmaster-{parts[1] if parts and parts[1] else 'page'}"


def check_own_page(request: web.BaseRequest) -> None:
    """A change that a cookie stands for has to come from the gateway's own page. Raises :class:`ApiError`.

    The door has refused foreign origins; here one has to be named, since a browser always does.
    """
    origin = request.headers.get("Origin", "").lower().partition("://")[2]
    own = bool(origin) and origin == request.headers.get("Host", "").lower()
    if not own and request.headers.get("Sec-Fetch-Site") != "same-origin":
        raise ApiError(403, "origin_missing", "a change with a cookie has to come from the gateway's own page")
