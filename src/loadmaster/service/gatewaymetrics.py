"""The gateway's own figures, in a registry of their own. Base units; labels come from short, fixed lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from loadmaster.service.backends import Backends

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

CLIENT_LEFT = 499  # as nginx counts them; never sent

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class GatewayMetrics:
    """Counters that the handlers feed. ``model`` is a configured name or "", ``route`` a served one or "other".

    Each request that comes in is counted once, at its end, by :meth:`count`: so over all statuses ``requests`` is the
    count of ``seconds``, and its status 499 is ``left``. The other figures are of a part of them; what the page asks
    the engine is in those, and among the requests it stands under its own route.
    """

    def __init__(self, backends: Backends) -> None:
        self.registry = CollectorRegistry()
        answered, where = ("route", "model", "status"), ("route", "model")
        self.requests = Counter(
            "loadmaster_requests", "Requests that ended, by HTTP status.", answered, registry=self.registry
        )
        self.refusals = Counter(
            "loadmaster_refusals", "Requests that the gateway itself did not let through.", ("code",),
            registry=self.registry,
        )  # fmt: skip
        self.left = Counter(
            "loadmaster_clients_left", "Requests whose client went away before the end.", where, registry=self.registry
        )
        self.broken = Counter(
            "loadmaster_streams_broken", "Streams that the engine did not finish.", where, registry=self.registry
        )
        self.seconds = Histogram(
            "loadmaster_request_duration_seconds", "From the request's head to its end.", where,
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.first_byte = Histogram(
            "loadmaster_first_byte_seconds", "From the request's head to the answer's first byte.", where,
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.queued = Histogram(
            "loadmaster_queue_wait_seconds", "Time in the queue of those who got a turn.", ("model",),
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.bytes_in = Counter(
            "loadmaster_request_body_bytes", "Bytes of request bodies read.", registry=self.registry
        )
        self.bytes_out = Counter("loadmaster_answer_bytes", "Bytes of answers sent on.", where, registry=self.registry)
        self.changed = Counter(
            "loadmaster_requests_changed", "Requests whose pictures the gateway changed.", ("model",),
            registry=self.registry,
        )  # fmt: skip
        self.registry.register(_Now(backends))

    def count(self, route: str, model: str, status: int, seconds: float) -> None:
        """A request has ended."""
        self.requests.labels(route, model, str(status)).inc()
        self.seconds.labels(route, model).observe(seconds)
        if status == CLIENT_LEFT:
            self.left.labels(route, model).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Now(Collector):
    """What is true at the moment of asking."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    def collect(self) -> Iterable[Metric]:
        running = GaugeMetricFamily("loadmaster_requests_running", "Requests at the engine.", labels=["model"])
        waiting = GaugeMetricFamily("loadmaster_requests_waiting", "Requests in the queue.", labels=["model"])
        places = GaugeMetricFamily("loadmaster_places", "Requests that may be at the engine.", labels=["model"])
        up = GaugeMetricFamily("loadmaster_backend_up", "1 when the engine answers.", labels=["model", "backend"])
        busy = GaugeMetricFamily("loadmaster_backend_requests", "Requests at this engine.", labels=["model", "backend"])
        for group in self._backends.groups.values():
            running.add_metric([group.model], group.admission.running)
            waiting.add_metric([group.model], group.admission.waiting)
            places.add_metric([group.model], group.admission.limit)
            for place, backend in enumerate(group.backends):
                up.add_metric([group.model, str(place)], 1.0 if backend.up else 0.0)
                busy.add_metric([group.model, str(place)], backend.outstanding)
        return [running, waiting, places, up, busy]
