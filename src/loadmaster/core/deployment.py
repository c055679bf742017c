"""One deployment: what is served, by which engine, behind which gateway, and which values make no sense.

The structs mirror the sections of ``loadmaster.toml``. Reading files and the environment is not done here;
:func:`problems` says in words what is wrong with values that were read.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct, field

from loadmaster.core.facts import GIB, MIB, Severity
from loadmaster.core.gputable import GpuSpecError, parse_gpu_spec

SCHEMA = 1
EngineKind = Literal["vllm", "llamacpp", "command"]
RUN_VARIABLE = "LOADMASTER_RUN"  # marks every process of a run; set by loadmaster alone

# Routes beyond chat, completions and models that the gateway can judge by the same rules.
FURTHER_ROUTES = ("/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize")

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?")
_ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
_BACKEND_URL = re.compile(r"https?://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?/?")
_WEBHOOK = re.compile(r"https?://[A-Za-z0-9.\[\]:_@%~-]{1,253}(/[!-~]*)?(\?[!-~]*)?")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!_-]{0,39}")
_MOST_SECONDS = 7 * 24 * 3600
_MOST_DAYS = 36_500


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program that answers. ``flags`` reach it verbatim.

    ``version``: what the plan is made for; None: asked of the engine. ``python``: the interpreter of vLLM's own
    environment. ``container``: an image that docker runs instead. ``command``: any program that speaks the OpenAI
    API, for kind "command"; ``{port}`` and ``{model}`` are filled in. ``port``: where the engine listens on
    127.0.0.1, or the next free one. ``start_timeout_s``: seconds from the start to the first real answer.
    """

    kind: EngineKind = "vllm"
    version: str | None = None
    python: str | None = None
    container: str | None = None
    flags: list[str] = []
    env: dict[str, str] = {}
    command: list[str] = []
    port: int = 8000
    start_timeout_s: float = 1800.0


class GatewaySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The door. ``insecure``: listen beyond this machine without keys. ``extra_routes``: of FURTHER_ROUTES.

    ``allowed_hosts``: names by which clients call it, beyond its address. ``allowed_origins``: web origins whose
    pages may use it. ``backends``: further engines behind the same gateway, each the NAME of another deployment or
    ``MODEL=URL`` of any OpenAI service; several of one model are replicas.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    insecure: bool = False
    max_body_bytes: int = 64 * MIB
    allow_url_images: bool = False
    allowed_hosts: list[str] = []
    allowed_origins: list[str] = []
    backends: list[str] = []
    extra_routes: list[str] = field(default_factory=lambda: list(FURTHER_ROUTES))


class KeysSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the keys of the users are: ``file`` of hashes, or the name of an ``environment`` variable."""

    file: str | None = None
    environment: str | None = None

    @property
    def given(self) -> bool:
        return self.file is not None or self.environment is not None


class LimitsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``max_images``: newest pictures of a conversation that reach the engine. ``queue``: requests that may wait.

    ``max_image_pixels`` and ``concurrency`` None: what the plan says fits. ``per_key_requests_per_minute`` None: no
    limit.
    """

    max_images: int = 4
    max_image_pixels: int | None = None
    queue: int = 64
    concurrency: int | None = None
    per_key_requests_per_minute: int | None = None


class PageSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The chat page. ``storage``: where conversations are kept; "off": there is no page.

    ``quota_bytes``: of one key, or of all where no keys are asked for. ``retention_days``: conversations that nobody
    touched for so long are deleted; None: never.
    """

    storage: Literal["server", "browser", "off"] = "server"
    quota_bytes: int = 2 * GIB
    retention_days: float | None = None


class AlertsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where alerts go beside the log. ``webhook``: an address that takes JSON, or the name of a variable that has it.

    ``command``: a program and its arguments, which gets the same JSON on its standard input; no shell reads it.
    ``least``: the mildest severity that is sent. ``ended``: also say when an alert is over. ``timeout_s``: of one try.
    """

    webhook: str | None = None
    webhook_environment: str | None = None
    command: list[str] = []
    least: Severity = "warning"
    ended: bool = True
    timeout_s: float = 10.0


class SupervisionSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens after a crash, in seconds.

    The wait before the next start begins at ``backoff_first_s``, doubles up to ``backoff_most_s``, and begins
    anew after ``steady_after_s`` of service. ``stuck_after_s``: how long an engine with work may stand still.
    ``memory_wait_s``: how long a start waits for GPU memory that others hold. ``stop_s``: patience between
    SIGTERM and SIGKILL.
    """

    backoff_first_s: float = 2.0
    backoff_most_s: float = 120.0
    steady_after_s: float = 600.0
    stuck_after_s: float = 60.0
    memory_wait_s: float = 600.0
    stop_s: float = 20.0


class Deployment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model``: a folder, a GGUF file or a name. ``projector``: GGUF file of the vision part (llamacpp).

    Sections that were not given are shared between deployments; their lists and objects are not to be changed.
    ``gpus``: as for ``--gpus``: "auto", "2x24GiB", a recording.
    """

    schema: int = SCHEMA
    name: str
    model: str
    projector: str | None = None
    gpus: str = "auto"
    engine: EngineSection = EngineSection()
    gateway: GatewaySection = GatewaySection()
    keys: KeysSection = KeysSection()
    limits: LimitsSection = LimitsSection()
    page: PageSection = PageSection()
    supervision: SupervisionSection = SupervisionSection()
    alerts: AlertsSection = AlertsSection()


def is_deployment_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def is_loopback(host: str) -> bool:
    """Whether a program that listens on ``host`` is reachable from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def problems(deployment: Deployment) -> list[str]:
    """What is wrong with the values, a sentence each, with the key's name in front; empty when nothing is."""
    return [
        *_whole(deployment),
        *_engine(deployment),
        *_gateway(deployment),
        *_keys(deployment.keys),
        *_limits(deployment.limits),
        *_page(deployment.page),
        *_supervision(deployment.supervision),
        *_alerts(deployment.alerts),
    ]


def _whole(deployment: Deployment) -> Iterator[str]:
    if deployment.schema != SCHEMA:
        yield f"schema: {deployment.schema} is not known, this release reads {SCHEMA}"
    if not is_deployment_name(deployment.name):
        yield (
            f"name: {deployment.name!r} has to be 1 to 40 small letters, digits and hyphens "
            "and to begin with a letter or digit"
        )
    yield from _text("model", deployment.model)
    if deployment.projector is not None:
        yield from _text("projector", deployment.projector)
        if deployment.engine.kind != "llamacpp":
            yield 'projector: only the engine "llamacpp" takes one'
    yield from _gpus(deployment.gpus)


def _gpus(spec: str) -> Iterator[str]:
    text = spec.strip()
    if not text:
        yield 'gpus: is empty; "auto" means the cards of this machine'
    elif text.lower() != "auto" and not text.lower().endswith(".json") and "/" not in text:
        try:
            parse_gpu_spec(text)
        except GpuSpecError as error:
            yield f"gpus: {error}"


def _engine(deployment: Deployment) -> Iterator[str]:
    engine = deployment.engine
    if engine.kind == "command":
        if not engine.command:
            yield 'engine.command: is empty; the engine "command" needs the program and its arguments'
    elif engine.command:
        yield f'engine.command: is for the engine "command", not for "{engine.kind}"'
    for key, value in (("python", engine.python), ("container", engine.container)):
        if value is None:
            continue
        yield from _text(f"engine.{key}", value)
        if engine.kind == "command" or (engine.kind == "llamacpp" and key == "container"):
            yield f'engine.{key}: the engine "{engine.kind}" takes none'
    if engine.python is not None and engine.container is not None:
        yield "engine.container: either a container or a python, not both"
    if engine.version is not None and not _VERSION.fullmatch(engine.version):
        yield f'engine.version: {engine.version!r} is no version such as "0.33.0"'
    for place, word in enumerate((*engine.flags, *engine.command)):
        if "\0" in word:
            yield f"engine.flags: word {place + 1} has a zero byte"
    for variable, value in engine.env.items():
        if not _VARIABLE.fullmatch(variable):
            yield f"engine.env: {variable!r} cannot be the name of an environment variable"
        elif variable == RUN_VARIABLE:
            yield f"engine.env: {RUN_VARIABLE} is set by loadmaster"
        if "\0" in value:
            yield f"engine.env: the value of {variable!r} has a zero byte"
    yield from _port("engine.port", engine.port)
    yield from _seconds("engine.start_timeout_s", engine.start_timeout_s, above_zero=True)


def split_backend(text: str) -> tuple[str, str] | None:
    """``MODEL=URL`` as (model, url without a slash at its end); None when it is not of this form."""
    model, _, url = text.rpartition("=")
    found = _BACKEND_URL.fullmatch(url)
    return (model, url.rstrip("/")) if model.strip() == model and model and found else None


def _gateway(deployment: Deployment) -> Iterator[str]:
    gateway = deployment.gateway
    yield from _text("gateway.host", gateway.host)
    yield from _port("gateway.port", gateway.port)
    if gateway.port == deployment.engine.port:
        yield f"gateway.port: {gateway.port} is the engine's port too"
    if not is_loopback(gateway.host) and not deployment.keys.given and not gateway.insecure:
        yield (
            f"gateway.host: {gateway.host} is reachable from other machines, which needs keys "
            "(keys.file or keys.environment), or gateway.insecure = true"
        )
    if gateway.max_body_bytes < 1024:
        yield f"gateway.max_body_bytes: {gateway.max_body_bytes} is under 1,024, no request fits in"
    for route in gateway.extra_routes:
        if route not in FURTHER_ROUTES:
            yield f"gateway.extra_routes: {route!r} is not one of {', '.join(FURTHER_ROUTES)}"
    for host in gateway.allowed_hosts:
        if not _HOST.fullmatch(host):
            yield f"gateway.allowed_hosts: {host!r} is no name such as models.example.org, without a port"
    for backend in gateway.backends:
        if backend == deployment.name:
            yield f"gateway.backends: {backend!r} is this deployment itself, which is always there"
        elif split_backend(backend) is None and not is_deployment_name(backend):
            yield f"gateway.backends: {backend!r} is neither a deployment's name nor MODEL=http://host:port"
    for origin in gateway.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            yield f"gateway.allowed_origins: {origin!r} is no origin such as https://chat.example.org, without a path"


def _keys(keys: KeysSection) -> Iterator[str]:
    if keys.file is not None:
        yield from _text("keys.file", keys.file)
    if keys.environment is not None and not _VARIABLE.fullmatch(keys.environment):
        yield f"keys.environment: {keys.environment!r} cannot be the name of an environment variable"


def _limits(limits: LimitsSection) -> Iterator[str]:
    yield from _least("limits.max_images", limits.max_images, 0)
    yield from _least("limits.max_image_pixels", limits.max_image_pixels, 1024)
    yield from _least("limits.queue", limits.queue, 0)
    yield from _least("limits.concurrency", limits.concurrency, 1)
    yield from _least("limits.per_key_requests_per_minute", limits.per_key_requests_per_minute, 1)


def _page(page: PageSection) -> Iterator[str]:
    yield from _least("page.quota_bytes", page.quota_bytes, MIB)
    days = page.retention_days
    if days is not None and not (math.isfinite(days) and 0 < days <= _MOST_DAYS):
        yield f"page.retention_days: {days:g} is no number of days from above 0 to {_MOST_DAYS:,}"


def _supervision(supervision: SupervisionSection) -> Iterator[str]:
    for key in ("backoff_first_s", "backoff_most_s", "stuck_after_s", "stop_s"):
        yield from _seconds(f"supervision.{key}", getattr(supervision, key), above_zero=True)
    for key in ("steady_after_s", "memory_wait_s"):
        yield from _seconds(f"supervision.{key}", getattr(supervision, key), above_zero=False)
    if supervision.backoff_most_s < supervision.backoff_first_s:
        yield (
            f"supervision.backoff_most_s: {supervision.backoff_most_s:g} is under "
            f"backoff_first_s, {supervision.backoff_first_s:g}"
        )


def _alerts(alerts: AlertsSection) -> Iterator[str]:
    if alerts.webhook is not None and not _WEBHOOK.fullmatch(alerts.webhook):
        # the address is not repeated: it may hold a secret
        yield "alerts.webhook: has to begin with http:// or https:// and a host, and to have no blanks"
    variable = alerts.webhook_environment
    if variable is not None and not _VARIABLE.fullmatch(variable):
        yield f"alerts.webhook_environment: {variable!r} cannot be the name of an environment variable"
    if any("\0" in word for word in alerts.command):
        yield "alerts.command: has a zero byte"
    elif alerts.command and not alerts.command[0].strip():
        yield "alerts.command: its first word has to be a program"
    yield from _seconds("alerts.timeout_s", alerts.timeout_s, above_zero=True)


def _text(key: str, value: str) -> Iterator[str]:
    if not value.strip():
        yield f"{key}: is empty"
    elif any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        yield f"{key}: has a control character"


def _port(key: str, value: int) -> Iterator[str]:
    if not 1 <= value <= 65535:
        yield f"{key}: {value} is no port, 1 to 65535 are"


def _least(key: str, value: int | None, least: int) -> Iterator[str]:
    if value is not None and value < least:
        yield f"{key}: {value} is under {least}"


def _seconds(key: str, value: float, *, above_zero: bool) -> Iterator[str]:
    if not math.isfinite(value) or value > _MOST_SECONDS or value < 0 or (above_zero and value == 0):
        yield f"{key}: {value:g} is no number of seconds from {'above 0' if above_zero else '0'} to a week"
