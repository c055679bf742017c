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
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from loadmaster.service.admission import FullError, Ticket
from loadmaster.service.backends import Backend, Backends, Group
from loadmaster.service.connections import Listener, machine_name, raise_open_files
from loadmaster.service.errors import ApiError, ImageError, error_body, invalid
from loadmaster.service.gatewaymetrics import CONTENT_TYPE, GatewayMetrics
from loadmaster.service.gatewaysettings import (
    CHAT_ROUTE,
    COMPLETIONS_ROUTE,
    MODELS_ROUTE,
    GatewaySettings,
    SettingsError,
    check_settings,
)
from loadmaster.service.keys import Key, KeyRing, KeysError, KeyUse
from loadmaster.service.relay import Flight, NotConnectedError, relay
from loadmaster.service.requestbody import Body, BodyBudget, check_head, parse_object, read_body
from loadmaster.service.requestrules import Asked, judge, urls_of_pictures
from loadmaster.service.tokenizing import TOKENIZE_ROUTE, llamacpp_request, vllm_answer
from loadmaster.service.visitors import HostRules, OriginRules

CHANGES_HEADER = "X-Loadmaster-Changes"
CLIENT_LEFT = 499  # as nginx counts them; never sent
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
        self.flights: set[Flight] = set()
        self.stopping = False

    # --- what is told about the gateway itself

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """200 when every model has an engine that truly answers."""
        if self.stopping:
            raise _stopping()
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
            raise web.HTTPExpectationFailed
        try:
            check_head(request, self.limits)
        except ApiError as error:
            self.metrics.refusals.labels(error.code).inc()
            return _refuse(error, request)
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
        return None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.stopping:
            raise _stopping()
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
            group = self.backends.group(asked.model)
            request[MODEL] = group.model
            group.check_up()
            try:
                ticket = group.admission.enter(key.name if key is not None else "", asked.places)
            except FullError as full:
                raise ApiError(
                    429,
                    "queue_full",
                    "as many requests wait as may wait, try again later",
                    retry_after=full.retry_after,
                ) from None
            with ticket, self.flight(request) as flight:
                changes = await self.apply_image_rules(asked_body, asked)
                headers = {}
                if changes:
                    self.metrics.changed.labels(group.model).inc()
                    headers[CHANGES_HEADER] = _header("; ".join(changes))
                first = group.backends[0]
                asked_body["model"] = first.served_name
                kinds = {backend.settings.llamacpp for backend in group.backends}
                if route == TOKENIZE_ROUTE and len(kinds) > 1:
                    raise invalid("tokenize_not_offered", f"the engines of {group.model} tokenize in different ways")
                translated = route == TOKENIZE_ROUTE and first.settings.llamacpp
                if translated:
                    asked_body = llamacpp_request(asked_body)
                contents = Contents(asked_body)
                del asked_body, asked
                await self.turn(ticket, group)
                try:
                    response = await self.send(request, route, group, contents, flight, headers)
                    if translated and isinstance(response, web.Response) and response.status == 200:
                        response.body = vllm_answer(response.body, first.card.get("max_model_len"))
                    return response
                finally:
                    self.count(route, group, flight, began)

    async def turn(self, ticket: Ticket, group: Group) -> None:
        """Wait for the turn, within bounds."""
        try:
            async with asyncio.timeout(self.limits.queue_timeout_s):
                waited = await ticket.start()
        except TimeoutError:
            wait = group.admission.retry_after()
            raise ApiError(429, "queue_too_slow", "the queue did not move in time", retry_after=wait) from None
        self.metrics.queued.labels(group.model).observe(waited)

    async def send(
        self,
        request: web.Request,
        route: str,
        group: Group,
        contents: Contents,
        flight: Flight,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        """To the least busy engine; to the next one only when nothing was sent."""
        tried: list[Backend] = []
        while True:
            backend = group.choose(tried)
            backend.outstanding += 1
            try:
                return await relay(
                    backend,
                    route,
                    contents.for_model(backend.served_name),
                    flight,
                    headers,
                    self.limits,
                )
            except NotConnectedError:
                self.backends.refused(group, backend)
                tried.append(backend)
            finally:
                backend.outstanding -= 1

    async def apply_image_rules(self, body: dict[str, Any], asked: Asked) -> list[str]:
        """Put the pictures that may go to the engine in place of those asked; what was changed, in words."""
        if asked.conversation is None or not asked.pictures:
            return []
        rules = self.settings.image_rules or _data_urls_only
        try:
            body[asked.conversation], changes = await rules(body[asked.conversation])
        except ImageError as error:
            status, param = getattr(error, "status", 400), getattr(error, "param", None)
            wait = 2 if status == 429 else None
            raise ApiError(status, error.code, error.message, param=param, retry_after=wait) from None
        return changes

    # --- what runs now

    @contextlib.contextmanager
    def flight(self, request: web.Request) -> Iterator[Flight]:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is answered in a task")
        flight = Flight(task, request, request[NAME])
        self.flights.add(flight)
        try:
            yield flight
        except asyncio.CancelledError:
            if flight.stopped is None:
                self.metrics.left.labels(request.path, request.get(MODEL, "")).inc()
                raise
            task.uncancel()
            if flight.first_byte_at is not None:
                raise ConnectionResetError("the client did not read its answer") from None
            raise flight.stopped from None
        finally:
            self.flights.discard(flight)

    def count(self, route: str, group: Group, flight: Flight, began: float) -> None:
        labels = (route, group.model)
        if flight.first_byte_at is not None:
            self.metrics.first_byte.labels(*labels).observe(flight.first_byte_at - began)
            self.metrics.seconds.labels(*labels).observe(asyncio.get_running_loop().time() - began)
            self.metrics.bytes_out.labels(*labels).inc(flight.bytes_out)
        if flight.broken:
            self.metrics.broken.labels(*labels).inc()

    async def keep_house(self) -> None:
        """Every second: end the requests whose client or engine is not there any more."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1)
            late = loop.time() - self.limits.client_timeout_s
            for flight in tuple(self.flights):
                if flight.exchange is not None:
                    flight.exchange.check(self.limits.first_byte_timeout_s)
                if flight.writing_since is not None and flight.writing_since < late:
                    flight.stop(ApiError(408, "client_too_slow", "the client did not read its answer"))
                    if flight.request.transport is not None:
                        flight.request.transport.abort()

    async def drain(self, seconds: float) -> None:
        """Take nothing new; wait so long for what runs, then end it with a word."""
        self.stopping = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.flights and loop.time() < end:
            await asyncio.sleep(0.05)
        for flight in tuple(self.flights):
            flight.stop(_stopping())
        end = loop.time() + 2
        while self.flights and loop.time() < end:
            await asyncio.sleep(0.02)


class Contents:
    """A request's body in bytes, with the name of the model that an engine knows.

    Written once; written again only for replicas that call the model differently.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self._model = body["model"]
        self._bytes = msgspec.json.encode(body)

    def for_model(self, served_name: str) -> bytes:
        if served_name != self._model:
            body = msgspec.json.decode(self._bytes)
            body["model"] = self._model = served_name
            self._bytes = msgspec.json.encode(body)
        return self._bytes


def _stopping() -> ApiError:
    return ApiError(503, "gateway_stopping", "the gateway is stopping", retry_after=10)


def _header(text: str) -> str:
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)[:2000]


async def _data_urls_only(messages: list[Any]) -> tuple[list[Any], list[str]]:
    """Without rules for pictures: none that the engine would have to fetch."""
    if any(url[:5].lower() != "data:" for url in urls_of_pictures(messages)):
        raise ImageError("image_url_not_allowed", "pictures are taken from data: URLs only")
    return messages, []


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
    app.on_response_prepare.append(_headers)
    return app


GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)


async def _running(app: web.Application) -> AsyncIterator[None]:
    gateway = app[GATEWAY]
    await gateway.backends.open()
    house = asyncio.create_task(gateway.keep_house())
    yield
    house.cancel()
    await asyncio.gather(house, return_exceptions=True)
    await gateway.backends.close()
    if gateway.settings.closing is not None:
        await gateway.settings.closing()


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
        try:
            response = await _let_in(gateway, request, handler)
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
        except Exception:
            # The traceback names code, not values: a request's text or a key must not reach the log.
            _log.error("request %s failed: %s", request[NAME], _places(sys.exc_info()))
            response = _refuse(ApiError(500, "internal_error", "the gateway failed; its log says where"), request)
        route = request.path if request.path in known else "other"
        gateway.metrics.requests.labels(route, request.get(MODEL, ""), str(response.status)).inc()
        if route not in OPEN_ROUTES:
            spent = time.perf_counter() - began
            _log.info("%s %s %s %d %.3f s", request[NAME], request.method, route, response.status, spent)
        return response

    return door


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


def _places(failure: Any) -> str:
    """Where an exception came from: its type, and the lines that it went through."""
    kind, _, trace = failure
    places = []
    while trace is not None:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{kind.__name__ if kind else 'error'} at {' > '.join(places[-8:])}"


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
        _log.info("stopping: %d requests run", len(gateway.flights))
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
