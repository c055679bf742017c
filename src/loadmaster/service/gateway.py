"""The gateway: one door for all requests to the engines behind it.

A request's way: host and origin, key and its limits, body within bounds, shape, model, a ticket, picture rules, a
turn, the engine, and back. Whatever is refused on the way gets OpenAI's error object that says who refused it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from aiohttp import HttpVersion11, web

from loadmaster.service.backends import Backends
from loadmaster.service.connections import Listener, machine_name, raise_open_files
from loadmaster.service.errors import ApiError, error_body, places_of
from loadmaster.service.gatewaymetrics import CLIENT_LEFT, CONTENT_TYPE, GatewayMetrics
from loadmaster.service.gatewaysettings import (
    CHAT_ROUTE,
    COMPLETIONS_ROUTE,
    MODELS_ROUTE,
    GatewaySettings,
    SettingsError,
    check_settings,
)
from loadmaster.service.keys import Key, KeyRing, KeysError, KeyUse
from loadmaster.service.passage import CHANGES_HEADER, Passage, stopping
from loadmaster.service.relay import ClientOutlet
from loadmaster.service.requestbody import Body, BodyBudget, check_head, parse_object, read_body
from loadmaster.service.requestrules import judge
from loadmaster.service.visitors import HostRules, OriginRules
from loadmaster.service.web import Page

OPEN_ROUTES = ("/health", "/ready")
NAME, MODEL, ORIGIN = web.RequestKey("name", str), web.RequestKey("model", str), web.RequestKey("origin", str)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_log = logging.getLogger("loadmaster.gateway")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """What all requests share."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises :class:`SettingsError`."""
        check_settings(settings)
        self.settings = settings
        self.limits = settings.limits
        self.backends = Backends(settings.backends, settings.limits, settings.probes)
        self.metrics = GatewayMetrics(self.backends)
        for collector in settings.collectors:
            self.metrics.registry.register(collector)
        self.hosts = HostRules(settings.host, settings.allowed_hosts, machine_name())
        self.origins = OriginRules(settings.allowed_origins)
        self.keys: KeyRing | None = None
        if settings.asks_for_keys:
            file = Path(settings.keys_file) if settings.keys_file is not None else None
            try:
                self.keys = KeyRing(file, settings.keys_environment)
            except KeysError as error:
                raise SettingsError(error.message, error.hint) from None
        self.key_use = KeyUse(self.limits.requests_per_minute, self.limits.requests_per_key)
        self.budget = BodyBudget(self.limits.body_bytes_at_once or 2 * self.limits.max_body_bytes)
        self.routes = (CHAT_ROUTE, COMPLETIONS_ROUTE, *settings.further_routes)
        self.passage = Passage(self.backends, self.metrics, self.limits, settings.image_rules)
        self.stopping = False
        self.page: Page | None = None

    # --- what is told about the gateway itself

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """200 when every model has an engine that truly answers."""
        if self.stopping:
            raise stopping()
        for group in self.backends.groups.values():
            group.check_up()
            answers = await asyncio.gather(*(self.backends.answers(backend) for backend in group.backends))
            if not any(answers):
                raise ApiError(503, "engine_silent", f"the engine of {group.model} does not answer", retry_after=5)
        return web.json_response({"status": "ready", "models": list(self.backends.groups)})

    async def figures(self, request: web.Request) -> web.StreamResponse:
        self.key_of(request)
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: web.Request) -> web.StreamResponse:
        self.key_of(request)
        cards = self.backends.cards()
        if not cards:
            raise next(iter(self.backends.groups.values())).reason()
        return web.json_response({"object": "list", "data": cards})

    # --- requests to an engine

    def key_of(self, request: web.Request) -> Key | None:
        """The key that a request brings; None when none is asked for. Raises :class:`ApiError` 401."""
        if self.keys is None:
            return None
        values = request.headers.getall("Authorization", [])
        challenge = {"WWW-Authenticate": "Bearer"}
        if not values:
            raise ApiError(401, "api_key_missing", "send a key: Authorization: Bearer KEY", headers=challenge)
        scheme, _, secret = values[0].partition(" ")
        key = None
        if len(values) == 1 and scheme.lower() == "bearer" and 0 < len(secret) <= 512:
            key = self.keys.find(secret.strip())
        if key is None:
            raise ApiError(401, "api_key_invalid", "the key is not valid here", headers=challenge)
        return key

    @contextlib.contextmanager
    def use_of(self, key: Key | None) -> Iterator[None]:
        """Count a request of the key. Raises :class:`ApiError` 429 when it has used up its share."""
        if key is None:
            yield
            return
        exhausted = self.key_use.begin(key)
        if exhausted is not None:
            what, wait = exhausted
            per = "a minute" if what == "minute" else "at once"
            raise ApiError(
                429, "rate_limit_exceeded", f"the key {key.name} has no more requests {per}", retry_after=wait
            )
        try:
            yield
        finally:
            self.key_use.end(key)

    async def expected(self, request: web.Request) -> web.StreamResponse | None:
        """Ask for a body only where its headers are not refused. Raises HTTPExpectationFailed."""
        if request.version < HttpVersion11:
            return None
        if request.headers["Expect"].strip().lower() != "100-continue":
            self.metrics.count(request.path, "", 417, 0.0)  # it does not come to the door
            raise web.HTTPExpectationFailed
        try:
            check_head(request, self.limits)
        except ApiError as error:
            self.metrics.refusals.labels(error.code).inc()
            self.metrics.count(request.path, "", error.status, 0.0)
            return _refuse(error, request)
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
        return None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.stopping:
            raise stopping()
        began = asyncio.get_running_loop().time()
        route = request.path
        key = self.key_of(request)
        with self.use_of(key), Body(self.budget) as body:
            check_head(request, self.limits)
            await read_body(request, body, self.limits)
            self.metrics.bytes_in.inc(len(body.content))
            asked_body = parse_object(body.content, self.limits.max_depth)
            body.content = bytearray()
            asked = judge(route, asked_body)
            request[MODEL] = self.backends.group(asked.model).model
            outlet = ClientOutlet(request)
            with self.passage.flight(outlet, request[NAME]) as flight:
                client = key.name if key is not None else ""
                whole = await self.passage.answer(route, asked_body, asked, client, flight, began)
            return whole if whole is not None else outlet.response or web.Response(status=CLIENT_LEFT)

    async def drain(self, seconds: float) -> None:
        """Take nothing new; wait so long for what runs, then end it with a word."""
        self.stopping = True
        await self.passage.drain(seconds)


def create_app(settings: GatewaySettings) -> web.Application:
    """The gateway as an application; its ``Gateway`` is ``app[GATEWAY]``. Raises :class:`SettingsError`."""
    gateway = Gateway(settings)
    app = web.Application(middlewares=[_door(gateway)], handler_args={"auto_decompress": False})
    app[GATEWAY] = gateway
    app.router.add_get("/health", gateway.health)
    app.router.add_get("/ready", gateway.ready)
    app.router.add_get("/metrics", gateway.figures)
    app.router.add_get(MODELS_ROUTE, gateway.models)
    for route in gateway.routes:
        app.router.add_post(route, gateway.answer, expect_handler=gateway.expected)
    app.cleanup_ctx.append(_running)
    if settings.page is not None:
        gateway.page = Page(gateway, settings.page)
        gateway.page.attach(app)
    app.on_response_prepare.append(_headers)
    if settings.made is not None:
        settings.made(gateway)
    return app


GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)


async def _running(app: web.Application) -> AsyncIterator[None]:
    gateway = app[GATEWAY]
    await gateway.backends.open()
    tasks = [asyncio.create_task(gateway.passage.keep_house())]
    tasks += [asyncio.create_task(_beside(work)) for work in gateway.settings.beside]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await gateway.backends.close()
    if gateway.settings.closing is not None:
        await gateway.settings.closing()


async def _beside(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Work that the gateway does not depend on: when it fails, it is said, and requests are answered all the same."""
    try:
        await work()
    except Exception:
        _log.exception("what runs beside the gateway has ended")


async def _headers(request: web.Request, response: web.StreamResponse) -> None:
    if NAME not in request:
        request[NAME] = _name_of(request)  # refused before the door: an expectation
    if isinstance(response, web.HTTPExpectationFailed):
        words = "the one expectation that is met here is 100-continue"
        response.body = error_body(ApiError(417, "expectation_failed", words), request.path)
        response.content_type, response.charset = "application/json", None
        response.headers["Content-Length"] = str(len(response.body))
        response.force_close()
    response.headers["X-Request-Id"] = request[NAME]
    response.headers["Server"] = "loadmaster"
    response.headers["X-Content-Type-Options"] = "nosniff"
    origin = request.get(ORIGIN)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = f"Retry-After, X-Request-Id, {CHANGES_HEADER}"
        response.headers["Vary"] = "Origin"


def _name_of(request: web.BaseRequest) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if _NAME.fullmatch(given) else secrets.token_hex(8)


def _door(gateway: Gateway) -> Any:
    """The middleware around every request: who may come in, and what errors look like."""
    known = frozenset((*gateway.routes, MODELS_ROUTE, "/metrics", *OPEN_ROUTES))

    @web.middleware
    async def door(request: web.Request, handler: _Handler) -> web.StreamResponse:
        began = time.perf_counter()
        request[NAME] = _name_of(request)
        route = _route(request, known)

        def ended(status: int) -> None:
            spent = time.perf_counter() - began
            gateway.metrics.count(route, request.get(MODEL, ""), status, spent)
            if route not in OPEN_ROUTES:
                _log.info("%s %s %s %d %.3f s", request[NAME], request.method, route, status, spent)

        try:
            response = await _let_in(gateway, request, handler)
        except asyncio.CancelledError:
            ended(CLIENT_LEFT)
            raise
        except ApiError as error:
            gateway.metrics.refusals.labels(error.code).inc()
            response = _refuse(error, request)
        except web.HTTPException as error:
            response = _refuse(_of_http(error, gateway), request)
        except ConnectionError:
            # The client went away while its answer was written: nobody reads what is returned here.
            if request.transport is not None:
                request.transport.abort()
            response = web.Response(status=CLIENT_LEFT)
        except Exception as error:
            # The traceback names code, not values: a request's text or a key must not reach the log.
            _log.error("request %s failed: %s", request[NAME], places_of(error))
            response = _refuse(ApiError(500, "internal_error", "the gateway failed; its log says where"), request)
        ended(response.status)
        return response

    return door


def _route(request: web.Request, known: frozenset[str]) -> str:
    """The request's route among those that there are, without names that a client chose."""
    if request.path in known:
        return request.path
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None and resource.canonical.startswith("/api/") else "other"


async def _let_in(gateway: Gateway, request: web.Request, handler: _Handler) -> web.StreamResponse:
    headers = request.headers
    hosts = headers.getall("Host", [])
    gateway.hosts.check(hosts)
    changes = request.method not in ("GET", "HEAD", "OPTIONS")
    origin = gateway.origins.check(
        headers.getall("Origin", []), headers.get("Sec-Fetch-Site"), hosts[0], changes=changes
    )
    if origin is not None:
        request[ORIGIN] = origin
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in headers:
            return web.Response(
                status=204,
                headers={
                    "Access-Control-Allow-Methods": "GET, POST",
                    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Request-Id",
                    "Access-Control-Max-Age": "600",
                },
            )
    return await handler(request)


def _of_http(error: web.HTTPException, gateway: Gateway) -> ApiError:
    """The router's refusals in our form."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(405, "method_not_allowed", f"this route takes {allowed}", headers={"Allow": allowed})
    if error.status == 404:
        routes = ", ".join((*gateway.routes, MODELS_ROUTE))
        return ApiError(404, "route_not_found", f"there is no such route here; there are {routes}")
    return ApiError(error.status, "refused", error.reason)


def _refuse(error: ApiError, request: web.Request) -> web.Response:
    headers = dict(error.headers)
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    response = web.Response(
        status=error.status,
        body=error_body(error, request.path),
        headers=headers,
        content_type="application/json",
    )
    if request.can_read_body and not request.content.at_eof():
        response.force_close()  # the rest of the body is not worth reading
    return response


def serve(settings: GatewaySettings, announce: Callable[[str], None] | None = None) -> None:
    """Run the gateway until SIGTERM or SIGINT. ``announce`` gets its address once it is open.

    A second signal ends at once what still runs. Raises :class:`SettingsError`, and OSError when the address cannot
    be had.
    """
    raise_open_files()
    asyncio.run(_serve(settings, announce))


async def _serve(settings: GatewaySettings, announce: Callable[[str], None] | None) -> None:
    app = create_app(settings)
    gateway = app[GATEWAY]
    listener = Listener(app, settings)
    stop = asyncio.Event()
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    await listener.open()
    try:
        _log.info("listening on %s", listener.url)
        if announce is not None:
            announce(listener.url)
        await stop.wait()
        listener.stop_listening()
        _log.info("stopping: %d requests run", len(gateway.passage.flights))
        draining = asyncio.create_task(gateway.drain(settings.limits.drain_s))
        hurrying = asyncio.create_task(hurry.wait())
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            draining.cancel()
            await gateway.drain(0)
        hurrying.cancel()
        await asyncio.gather(draining, hurrying, return_exceptions=True)
    finally:
        await listener.close()
