"""``loadmaster run-web NAME``: the gateway of a deployment, as supervisor runs it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import structs

from loadmaster.config import ConfigError, load_deployment
from loadmaster.core.deployment import Deployment, KeysSection, split_backend
from loadmaster.core.facts import LoadSheet
from loadmaster.edge.ports import holder_words
from loadmaster.edge.statehome import StateError, write_file
from loadmaster.service.enginechoice import engine_of
from loadmaster.service.gateway import Gateway, serve
from loadmaster.service.gatewaysettings import (
    BackendSettings,
    GatewaySettings,
    ImageRules,
    LimitSettings,
    PageSettings,
    ProbeSettings,
    SettingsError,
)
from loadmaster.service.images import ImagePool, apply
from loadmaster.service.images import ImageRules as PictureRules
from loadmaster.service.keys import OWN_NAME, keys_path, write_own_key
from loadmaster.service.pagesetup import page_settings
from loadmaster.service.places import Places
from loadmaster.service.planfile import read_plan as read_plan
from loadmaster.service.portchoice import listening_port, remembered_port
from loadmaster.service.sampler import GatewayLoad
from loadmaster.service.watch import Watch
from loadmaster.service.watching import Watching

RESTART = 4
_LOOK_EVERY_S = 0.25
_PROBE_EVERY_S = 0.5  # the engine is on this machine; a new one is found at once
_CONCURRENCY = 8  # where neither the deployment nor the plan says


def gateway_settings(
    deployment: Deployment,
    places: Places,
    plan: LoadSheet | None,
    port: int,
    image_rules: ImageRules | None,
    own_key: str | None = None,
    *,
    closing: Callable[[], Awaitable[None]] | None = None,
    page: PageSettings | None = None,
) -> GatewaySettings:
    """What the gateway of this deployment is told, with its engine at ``port`` of this machine.

    ``own_key``: one more key that it takes, of loadmaster's own commands. ``closing``: called when it has closed.
    ``page`` None: no page is served.
    """
    gateway, limits, keys = deployment.gateway, deployment.limits, deployment.keys
    return GatewaySettings(
        backends=(backend(deployment, places, plan, port), *further_backends(deployment)),
        host=gateway.host,
        port=gateway.port,
        insecure=gateway.insecure,
        keys_file=str(keys_path(places.folder, keys.file)) if keys.file is not None else None,
        keys_environment=_plain_keys(keys, own_key),
        allowed_hosts=tuple(gateway.allowed_hosts),
        allowed_origins=tuple(gateway.allowed_origins),
        further_routes=tuple(gateway.extra_routes),
        limits=LimitSettings(
            max_body_bytes=gateway.max_body_bytes,
            queue=limits.queue,
            requests_per_minute=limits.per_key_requests_per_minute,
        ),
        probes=ProbeSettings(interval_s=_PROBE_EVERY_S),
        image_rules=image_rules,
        closing=closing,
        address_file=str(places.web),
        page=page,
    )


def backend(deployment: Deployment, places: Places, plan: LoadSheet | None, port: int) -> BackendSettings:
    """The engine of a deployment of this machine."""
    engine = engine_of(deployment)
    return BackendSettings(
        model=engine.served_model(deployment),
        url=f"http://127.0.0.1:{port}",
        api_key=engine.api_key(deployment),
        concurrency=concurrency(deployment, plan),
        state_file=str(places.engine),
        llamacpp=deployment.engine.kind == "llamacpp",
    )


def further_backends(deployment: Deployment) -> tuple[BackendSettings, ...]:
    """What ``gateway.backends`` names beside the deployment's own engine. Raises :class:`SettingsError`."""
    found = []
    for text in deployment.gateway.backends:
        given = split_backend(text)
        if given is not None:
            found.append(BackendSettings(model=given[0], url=given[1], concurrency=_CONCURRENCY))
            continue
        try:
            other, places = load_deployment(text).deployment, Places.of(text)
        except (ConfigError, StateError) as error:
            raise SettingsError(f"gateway.backends: {text}: {error.message}", error.hint) from error
        port = listening_port(other, remembered_port(places) or other.engine.port)
        found.append(backend(other, places, read_plan(places.plan), port))
    return tuple(found)


def _plain_keys(keys: KeysSection, own_key: str | None) -> str | None:
    """The keys that are no hashes, as a variable would have them; None: there are none of this kind."""
    given = os.environ.get(keys.environment, "") if keys.environment is not None else None
    own = f"{OWN_NAME}={own_key}" if own_key is not None else None
    if given is None or own is None:
        return own if given is None else given
    return f"{given} {own}" if given.strip() else given  # a variable without a key is refused


def concurrency(deployment: Deployment, plan: LoadSheet | None) -> int:
    """Requests at once: the deployment's, else the sequences that the plan was made for."""
    if deployment.limits.concurrency is not None:
        return deployment.limits.concurrency
    if plan is not None and plan.settings is not None:
        return plan.settings.max_num_seqs
    if plan is not None and plan.kv_cache is not None and plan.kv_cache.max_concurrency is not None:
        return max(1, int(plan.kv_cache.max_concurrency))
    return _CONCURRENCY


def picture_rules(deployment: Deployment, plan: LoadSheet | None) -> PictureRules:
    """The limits of pictures: the deployment's, within the plan's."""
    images = plan.images if plan is not None else None
    limits = deployment.limits
    planned = images.largest_pixels if images is not None else None
    pixels = [number for number in (limits.max_image_pixels, planned) if number is not None]
    most = plan.settings.image_limit if plan is not None and plan.settings is not None else None
    return PictureRules(
        max_pixels=min(pixels) if pixels else None,
        max_images=limits.max_images if most is None else min(most, limits.max_images),
        max_bytes=deployment.gateway.max_body_bytes,
        allow_urls=deployment.gateway.allow_url_images,
    )


def run_web(deployment: Deployment, places: Places, supervisor: int | None = None) -> int:
    """Serve until a signal, until the supervisor has gone, or until the engine has another port (then 4)."""
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="[loadmaster %(asctime)s] %(message)s", datefmt="%H:%M:%S"
    )
    plan = read_plan(places.plan)
    port = listening_port(deployment, remembered_port(places) or deployment.engine.port)
    pool = ImagePool(workers=1)
    rules = picture_rules(deployment, plan)

    watching = Watching(places, plan)
    watch = watching.watch = Watch(deployment, places, plan, store=watching.store)
    model = engine_of(deployment).served_model(deployment)

    async def convert(messages: list[Any]) -> tuple[list[Any], list[str]]:
        return await apply(messages, rules, pool, seen=watching.peak.saw_picture)

    watcher = _Watcher(deployment, places, port, supervisor)
    try:
        own_key = _own_key(deployment, places)
        page = page_settings(deployment, places, plan, rules, pool, own_key)
        page = structs.replace(page, watch=watch) if page is not None else None
        settings = gateway_settings(deployment, places, plan, port, convert, own_key, closing=pool.stop, page=page)
        settings = structs.replace(settings, collectors=(watching.metrics,), beside=(watch.run, watching.run))
        settings = structs.replace(settings, made=lambda gateway: _show_load(watch, gateway, model))
        threading.Thread(target=watcher.watch, daemon=True).start()
        serve(settings, lambda url: _opened(places, url, port))
    except SettingsError as error:
        _not_opened(places, f"{error.message}{f' ({error.hint})' if error.hint else ''}")
        return 1
    except OSError as error:
        held = holder_words(deployment.gateway.port)
        by = f"held by {held}" if held else error.strerror or str(error)
        _not_opened(places, f"cannot listen on port {deployment.gateway.port} of {deployment.gateway.host}: {by}")
        return RESTART if watcher.why is None else 0
    finally:
        for pid in pool.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        watching.close()
    if watcher.why is not None:
        logging.info("ended: %s", watcher.why)
    return RESTART if watcher.restart else 0


def _show_load(watch: Watch, gateway: Gateway, model: str) -> None:
    """Let the watch see what waits in the gateway for the deployment's own engine, and what that engine thought."""

    def load() -> GatewayLoad:
        group = gateway.backends.groups[model]
        own = group.backends[0]
        return GatewayLoad(group.admission.waiting, own.thinking_tokens)

    watch.load = load


def _own_key(deployment: Deployment, places: Places) -> str | None:
    """A key of this start for ``verify`` and ``upgrade``; None when no keys are asked for, or the disk is full."""
    with contextlib.suppress(OSError):
        places.web_key.unlink()
    if deployment.keys.file is None and deployment.keys.environment is None:
        return None
    try:
        return write_own_key(places.web_key)
    except StateError as error:
        logging.error("%s; loadmaster verify needs --api-key-file", error.message)
        return None


def _opened(places: Places, url: str, port: int) -> None:
    with contextlib.suppress(OSError):
        places.web_problem.unlink()
    logging.info("open at %s, the engine is at port %d", url, port)


def _not_opened(places: Places, why: str) -> None:
    """Say it in the log, and where ``status`` finds it."""
    logging.error("%s", why)
    with contextlib.suppress(StateError):
        write_file(places.web_problem, why.encode("utf-8", "replace"))


class _Watcher:
    """Ends this process by the signals that end it otherwise, when the supervisor or the engine's port has changed."""

    def __init__(self, deployment: Deployment, places: Places, port: int, supervisor: int | None) -> None:
        self._deployment = deployment
        self._places = places
        self._port = port
        self._parent = os.getppid() if supervisor is None else supervisor
        self.why: str | None = None
        self.restart = False

    def watch(self) -> None:
        while self.why is None:
            time.sleep(_LOOK_EVERY_S)
            if os.getppid() != self._parent:
                self.why = "the supervisor has gone"
            else:
                now = remembered_port(self._places)
                if now is not None and listening_port(self._deployment, now) != self._port:
                    self.why, self.restart = f"the engine has another port now, {now}", True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGTERM)  # nobody to wait for: whoever is answered now loses the engine as well
