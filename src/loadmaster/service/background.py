"""Blocking work beside an event loop, in threads that do not keep the program from ending."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """The result of ``work``; who is cancelled while it runs leaves it running."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(settle: Callable[[], None]) -> None:
        def settle_once() -> None:
            if not done.done():
                settle()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle_once)

    def body() -> None:
        try:
            value = work()
        except BaseException as error:
            problem = error
            finish(lambda: done.set_exception(problem))
        else:
            finish(lambda: done.set_result(value))

    Thread(target=body, daemon=True).start()
    return await done
