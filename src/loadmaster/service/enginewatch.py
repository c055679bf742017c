"""Looks after an engine that is ready: its metrics, and a probe whenever it has work and does not move."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from loadmaster.engines.base import Engine, Progress
from loadmaster.engines.readiness import probe
from loadmaster.service.stuckwatch import StuckWatch

_MOST_BYTES = 8 * 1024 * 1024
# Looks within the time after which an engine counts as stuck.
_LOOKS = 6
_LONGEST_PAUSE_S = 10.0
_METRICS_TIMEOUT_S = 5.0


async def watch_engine(
    url: str, model: str, api_key: str | None, engine: Engine, stuck_after_s: float, *, chat: bool = True
) -> float:
    """Returns when the engine is stuck: the seconds for which it has been. Cancelled by who waits otherwise."""
    watch = StuckWatch(stuck_after_s)
    pause = min(stuck_after_s / _LOOKS, _LONGEST_PAUSE_S)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(headers=headers, trust_env=False) as session:
        while True:
            await asyncio.sleep(pause)
            progress = await _progress(session, url, engine, min(_METRICS_TIMEOUT_S, max(0.5, pause)))
            if not watch.look(time.monotonic(), progress):
                continue
            began = time.monotonic()
            failed = await probe(url, model, api_key, max(0.5, pause), chat=chat)
            if watch.probed(time.monotonic(), began, failed is None):
                since = watch.standing_since
                return time.monotonic() - since if since is not None else stuck_after_s


async def _progress(session: aiohttp.ClientSession, url: str, engine: Engine, timeout_s: float) -> Progress | None:
    """What the metrics say now; None when they do not answer or do not tell."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(f"{url}/metrics", timeout=timeout, allow_redirects=False) as answer:
            if answer.status != 200:
                return None
            data = bytearray()
            async for part in answer.content.iter_any():
                data += part
                if len(data) > _MOST_BYTES:
                    return None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
    return engine.running_waiting_tokens(data.decode("utf-8", "replace"))
