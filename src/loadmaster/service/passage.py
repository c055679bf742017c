"""A judged request's way through the gateway: a ticket, the picture rules, a turn, the engine.

Requests of clients and questions of the page go the same way, so that the same limits hold for both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from aiohttp import web

from loadmaster.service.admission import FullError, Ticket
from loadmaster.service.backends import Backend, Backends, Group
from loadmaster.service.errors import ApiError, ImageError, invalid
from loadmaster.service.gatewaymetrics import GatewayMetrics
from loadmaster.service.gatewaysettings import ImageRules, LimitSettings
from loadmaster.service.relay import Flight, NotConnectedError, Outlet, relay
from loadmaster.service.requestrules import Asked, urls_of_pictures
from loadmaster.service.tokenizing import TOKENIZE_ROUTE, llamacpp_request, vllm_answer

CHANGES_HEADER = "X-Loadmaster-Changes"
_PLACE_EVERY_S = 0.5

# Told the place in the queue, 1 for the next one, whenever it changes; None: the turn has come.
Told = Callable[[int | None], None]


class Passage:
    """What all requests to the engines share. ``flights``: those that are being answered."""

    def __init__(
        self, backends: Backends, metrics: GatewayMetrics, limits: LimitSettings, image_rules: ImageRules | None
    ) -> None:
        self.backends = backends
        self.metrics = metrics
        self.limits = limits
        self.image_rules = image_rules or _data_urls_only
        self.flights: set[Flight] = set()

    async def answer(
        self,
        route: str,
        body: dict[str, Any],
        asked: Asked,
        client: str,
        flight: Flight,
        began: float,
        told: Told | None = None,
    ) -> web.Response | None:
        """The engine's answer; None when it went into the flight's outlet. ``body`` is emptied on the way.

        ``client``: whose turn it is among those who wait. ``began``: when the request came, by the loop's clock.
        Raises :class:`ApiError` when there is none.
        """
        group = self.backends.group(asked.model)
        group.check_up()
        try:
            ticket = group.admission.enter(client, asked.places)
        except FullError as error:
            raise full(error) from None
        with ticket:
            changes = await self._apply_image_rules(body, asked)
            headers = {}
            if changes:
                self.metrics.changed.labels(group.model).inc()
                headers[CHANGES_HEADER] = _header("; ".join(changes))
            first = group.backends[0]
            kinds = {backend.settings.llamacpp for backend in group.backends}
            if route == TOKENIZE_ROUTE and len(kinds) > 1:
                raise invalid("tokenize_not_offered", f"the engines of {group.model} tokenize in different ways")
            translated = route == TOKENIZE_ROUTE and first.settings.llamacpp
            sent = body | {"model": first.served_name}
            contents = Contents(llamacpp_request(sent) if translated else sent)
            body.clear()
            del sent, asked
            await self._turn(ticket, group, told)
            try:
                response = await self._send(route, group, contents, flight, headers)
                if translated and response is not None and response.status == 200:
                    response.body = vllm_answer(response.body, first.card.get("max_model_len"))
                return response
            finally:
                self._count(route, group, flight, began)

    async def _turn(self, ticket: Ticket, group: Group, told: Told | None) -> None:
        """Wait for the turn, within bounds."""
        telling = asyncio.create_task(_tell(ticket, group, told)) if told is not None else None
        try:
            async with asyncio.timeout(self.limits.queue_timeout_s):
                waited = await ticket.start()
        except TimeoutError:
            wait = group.admission.retry_after()
            raise ApiError(429, "queue_too_slow", "the queue did not move in time", retry_after=wait) from None
        finally:
            if telling is not None:
                telling.cancel()
        if told is not None:
            told(None)
        self.metrics.queued.labels(group.model).observe(waited)

    async def _send(
        self, route: str, group: Group, contents: Contents, flight: Flight, headers: dict[str, str]
    ) -> web.Response | None:
        """To the least busy engine; to the next one only when nothing was sent."""
        tried: list[Backend] = []
        while True:
            backend = group.choose(tried)
            backend.outstanding += 1
            try:
                return await relay(
                    backend, route, contents.for_model(backend.served_name), flight, headers, self.limits
                )
            except NotConnectedError:
                self.backends.refused(group, backend)
                tried.append(backend)
            finally:
                backend.outstanding -= 1

    async def _apply_image_rules(self, body: dict[str, Any], asked: Asked) -> list[str]:
        """Put the pictures that may go to the engine in place of those asked; what was changed, in words."""
        if asked.conversation is None or not asked.pictures:
            return []
        try:
            body[asked.conversation], changes = await self.image_rules(body[asked.conversation])
        except ImageError as error:
            status, param = getattr(error, "status", 400), getattr(error, "param", None)
            wait = 2 if status == 429 else None
            raise ApiError(status, error.code, error.message, param=param, retry_after=wait) from None
        return changes

    @contextlib.contextmanager
    def flight(self, outlet: Outlet, name: str) -> Iterator[Flight]:
        """A request that this task answers."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is answered in a task")
        flight = Flight(task, outlet, name)
        self.flights.add(flight)
        try:
            yield flight
        except asyncio.CancelledError:
            if flight.stopped is None:
                raise
            task.uncancel()
            if flight.first_byte_at is not None:
                raise ConnectionResetError("the client did not read its answer") from None
            raise flight.stopped from None
        finally:
            self.flights.discard(flight)

    def _count(self, route: str, group: Group, flight: Flight, began: float) -> None:
        labels = (route, group.model)
        if flight.first_byte_at is not None:
            self.metrics.first_byte.labels(*labels).observe(flight.first_byte_at - began)
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
                    flight.outlet.abort()

    async def drain(self, seconds: float) -> None:
        """Wait so long for what runs, then end it with a word."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.flights and loop.time() < end:
            await asyncio.sleep(0.05)
        for flight in tuple(self.flights):
            flight.stop(stopping())
        end = loop.time() + 2
        while self.flights and loop.time() < end:
            await asyncio.sleep(0.02)


class Contents:
    """A request's body in bytes, with the name of the model that an engine knows.

    Written once; written again only for replicas that call the model differently.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self._model = body.get("model")
        self._bytes = msgspec.json.encode(body)

    def for_model(self, served_name: str) -> bytes:
        if served_name != self._model:
            body = msgspec.json.decode(self._bytes)
            body["model"] = self._model = served_name
            self._bytes = msgspec.json.encode(body)
        return self._bytes


def full(error: FullError) -> ApiError:
    words = "as many requests wait as may wait, try again later"
    return ApiError(429, "queue_full", words, retry_after=error.retry_after)


def stopping() -> ApiError:
    return ApiError(503, "gateway_stopping", "the gateway is stopping", retry_after=10)


async def _tell(ticket: Ticket, group: Group, told: Told) -> None:
    last: int | None = None
    while True:
        place = group.admission.place(ticket)
        if place is not None and place != last:
            told(place)
            last = place
        await asyncio.sleep(_PLACE_EVERY_S)


def _header(text: str) -> str:
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)[:2000]


async def _data_urls_only(messages: list[Any]) -> tuple[list[Any], list[str]]:
    """Without rules for pictures: none that the engine would have to fetch."""
    if any(url[:5].lower() != "data:" for url in urls_of_pictures(messages)):
        raise ImageError("image_url_not_allowed", "pictures are taken from data: URLs only")
    return messages, []
