"""What a gateway is told before it starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeAlias

from msgspec import Struct
from prometheus_client.registry import Collector

from loadmaster.core.deployment import FURTHER_ROUTES, is_loopback
from loadmaster.core.facts import GIB, MIB, Finding, LoadSheet
from loadmaster.core.observation import Snapshot
from loadmaster.core.verification import Report, Step
from loadmaster.service.imagepool import Outcome

CHAT_ROUTE, COMPLETIONS_ROUTE, MODELS_ROUTE = "/v1/chat/completions", "/v1/completions", "/v1/models"

# Messages of a request -> the messages to send on, and what was changed, in words. Raises ImageError.
ImageRules: TypeAlias = Callable[[list[Any]], Awaitable[tuple[list[Any], list[str]]]]


class BackendSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. ``model``: the name that users ask for; several backends of one name are replicas.

    ``served_name``: the engine's own name of the model, None: the same. ``url``: without ``/v1``. ``concurrency``:
    requests that fit at once, by the plan. ``state_file``: ``engine.json`` of the deployment, which tells why an
    engine does not answer, on which port it listens, and its name of the model when ``served_name`` is None.
    ``llamacpp``: the engine is llama.cpp, whose server has names of its own for some fields.
    """

    model: str
    url: str
    served_name: str | None = None
    api_key: str | None = None
    concurrency: int = 8
    state_file: str | None = None
    llamacpp: bool = False


class LimitSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what one visitor can take. Bytes, seconds, counts.

    ``body_bytes_at_once``: request bodies held at the same time, None: two of the largest. ``queue``: requests of
    a model beyond those that run. ``queue_timeout_s``: the longest wait in the queue. ``first_byte_timeout_s``: the
    longest wait for the engine's first or next byte; a long prompt is silent until it is read. ``client_timeout_s``:
    how long a client may leave its answer unread. ``drain_s``: how long running answers may go on after a stop.
    """

    max_body_bytes: int = 64 * MIB
    body_bytes_at_once: int | None = None
    max_depth: int = 40
    body_idle_timeout_s: float = 20.0
    body_timeout_s: float = 300.0
    idle_connection_s: float = 30.0
    max_connections: int = 2048
    max_header_bytes: int = 16384
    queue: int = 64
    queue_timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 1800.0
    client_timeout_s: float = 60.0
    max_answer_bytes: int = 256 * MIB
    drain_s: float = 20.0
    requests_per_minute: int | None = None
    requests_per_key: int | None = None


class ProbeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How backends are looked after: seconds between probes and for one, failures in a row that take one out."""

    interval_s: float = 2.0
    timeout_s: float = 5.0
    failures: int = 3
    answer_timeout_s: float = 15.0
    answer_fresh_s: float = 10.0


class Watched(Protocol):
    """What sees cards and engine, second by second. What it tells has a ``kind`` and ``data``."""

    @property
    def latest(self) -> Snapshot | None: ...

    @property
    def findings(self) -> tuple[Finding, ...]: ...

    def subscribe(self) -> AsyncIterator[Any]: ...


class PageSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The chat page. ``database``: the file of conversations, None: browsers keep them.

    ``look_at``: decodes a picture apart from this process; raises ImageError. ``max_images``, ``max_pixels``: what the
    picture rules let through, None: all. ``thinking``: whether the model's template knows the switch, None: unknown.
    ``log``, ``engine_state``: the engine's files. ``runs``: the file of recorded runs. ``watch``: what sees cards and
    engine (service/watch.py), None: nothing does. ``prove``: runs the checklist and calls back after each step.
    """

    deployment: str
    database: str | None = None
    quota_bytes: int = 2 * GIB
    retention_s: float | None = None
    look_at: Callable[[bytes], Awaitable[Outcome]] | None = None
    max_images: int | None = None
    max_pixels: int | None = None
    thinking: bool | None = None
    plan: LoadSheet | None = None
    log: str | None = None
    engine_state: str | None = None
    runs: str | None = None
    watch: Watched | None = None
    prove: Callable[[Callable[[Step], None]], Awaitable[Report]] | None = None


class GatewaySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``host``, ``port``: where to listen, port 0 picks a free one. ``insecure``: beyond this machine without keys.

    ``keys_file``, ``keys_environment``: a file of hashed keys; the value of a variable with plain ones.
    ``allowed_hosts``: names by which clients call the gateway, beyond its address. ``allowed_origins``: web origins
    whose pages may use it. ``further_routes``: of ``FURTHER_ROUTES``. ``image_rules`` None: pictures pass as they
    are, from ``data:`` URLs only. ``closing``: called at the end, to end what the image rules hold.
    ``address_file``: where to write the address once it is open. ``page`` None: no page is served.
    ``collectors``: of Prometheus, beside the gateway's own figures. ``beside``: run as long as the gateway is open.
    ``made``: called with the gateway once it is made, for who reads its queue.
    """

    backends: tuple[BackendSettings, ...]
    host: str = "127.0.0.1"
    port: int = 7860
    insecure: bool = False
    keys_file: str | None = None
    keys_environment: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    further_routes: tuple[str, ...] = FURTHER_ROUTES
    limits: LimitSettings = LimitSettings()
    probes: ProbeSettings = ProbeSettings()
    image_rules: ImageRules | None = None
    closing: Callable[[], Awaitable[None]] | None = None
    address_file: str | None = None
    page: PageSettings | None = None
    collectors: tuple[Collector, ...] = ()
    beside: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()
    made: Callable[[Any], None] | None = None

    @property
    def asks_for_keys(self) -> bool:
        return self.keys_file is not None or self.keys_environment is not None


class SettingsError(Exception):
    """Settings with which a gateway must not start. ``hint`` says what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def check_settings(settings: GatewaySettings) -> None:
    """Refuse what would be open to strangers or cannot work. Raises :class:`SettingsError`."""
    if not is_loopback(settings.host) and not settings.asks_for_keys and not settings.insecure:
        raise SettingsError(
            f"{settings.host} is reachable from other machines, and there are no keys",
            "add one with `loadmaster keys add NAME`, listen on 127.0.0.1, or say --insecure",
        )
    if not settings.backends:
        raise SettingsError("there is no backend to send requests to")
    for backend in settings.backends:
        if not backend.url.startswith(("http://", "https://")):
            raise SettingsError(f"the backend's address {backend.url!r} does not begin with http:// or https://")
        if backend.api_key is not None and not (backend.api_key.isascii() and backend.api_key.isprintable()):
            raise SettingsError(f"the key for the backend of {backend.model} has letters that no header can hold")
        if backend.concurrency < 1:
            raise SettingsError(f"the backend of {backend.model} may answer {backend.concurrency} requests at once")
    if not 0 <= settings.port <= 65535:
        raise SettingsError(f"{settings.port} is no port, 0 to 65535 are")
    for route in settings.further_routes:
        if route not in FURTHER_ROUTES:
            raise SettingsError(f"{route!r} is not one of the routes {', '.join(FURTHER_ROUTES)}")
    for origin in settings.allowed_origins:
        if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
            raise SettingsError(f"{origin!r} is no web origin", "such as https://chat.example.org, without a path")
