"""Admission: never too many inside, nobody overtakes, and no place is lost, whoever leaves when."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.service.admission import Admission, FullError, Ticket


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_a_place_is_given_at_once_while_there_is_one() -> None:
    async def scene() -> None:
        admission = Admission(2, 1)
        first, second, third = (admission.enter() for _ in range(3))
        assert await first.start() == 0.0 and await second.start() == 0.0
        with pytest.raises(FullError):
            admission.enter()
        task = asyncio.create_task(third.start())
        await settle()
        assert (admission.running, admission.waiting) == (2, 1)
        first.leave()
        await task
        assert (admission.running, admission.waiting) == (2, 0)
        first.leave()  # again: nothing
        assert admission.running == 2

    play(scene())


def test_a_ticket_that_never_starts_counts_until_it_is_given_back() -> None:
    admission = Admission(1, 0)
    with admission.enter(), pytest.raises(FullError):
        admission.enter()
    with admission.enter():
        pass
    assert admission.tickets == 0


def test_cancelled_in_the_moment_of_its_turn() -> None:
    async def scene() -> None:
        admission = Admission(1, 5)
        inside = admission.enter()
        await inside.start()

        async def visit() -> None:
            with admission.enter() as ticket:
                await ticket.start()
                await asyncio.Event().wait()

        unlucky, next_one = asyncio.create_task(visit()), asyncio.create_task(visit())
        await settle()
        inside.leave()  # the turn is given ...
        unlucky.cancel()  # ... and not taken
        await settle()
        assert (admission.running, admission.waiting, admission.tickets) == (1, 0, 1)
        next_one.cancel()
        await asyncio.gather(unlucky, next_one, return_exceptions=True)
        assert (admission.running, admission.places_in_use, admission.tickets) == (0, 0, 0)

    play(scene())


def test_turns_go_round_between_clients() -> None:
    async def scene() -> None:
        admission = Admission(1, 20)
        order: list[str] = []
        door = admission.enter("door")
        await door.start()

        async def visit(client: str, number: int) -> None:
            with admission.enter(client) as ticket:
                await ticket.start()
                order.append(f"{client}{number}")

        tasks = [asyncio.create_task(visit("a", number)) for number in range(4)]
        await settle()
        tasks += [asyncio.create_task(visit(client, number)) for client in "bc" for number in range(2)]
        await settle()
        door.leave()
        await asyncio.gather(*tasks)
        assert order == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "a3"]

    play(scene())


def test_a_wide_request_waits_for_its_places_and_is_not_overtaken() -> None:
    async def scene() -> None:
        admission = Admission(4, 20)
        small = [admission.enter() for _ in range(3)]
        for ticket in small:
            await ticket.start()
        wide, late = admission.enter(places=9), admission.enter()
        tasks = [asyncio.create_task(ticket.start()) for ticket in (wide, late)]
        await settle()
        assert admission.waiting == 2  # one place is free, and nobody takes it before the wide one
        for ticket in small:
            ticket.leave()
        await settle()
        assert wide.taken == 4 and late.taken == 0
        admission.set_limit(2)
        wide.leave()
        await asyncio.gather(*tasks)
        assert late.taken == 1

    play(scene())


def test_fewer_and_more_places() -> None:
    async def scene() -> None:
        admission = Admission(4, 20)
        tickets = [admission.enter() for _ in range(6)]
        tasks = [asyncio.create_task(ticket.start()) for ticket in tickets]
        await settle()
        admission.set_limit(1)
        for ticket in tickets[:3]:
            ticket.leave()
        await settle()
        assert (admission.running, admission.waiting) == (1, 2)
        admission.set_limit(3)
        await asyncio.gather(*tasks)
        assert admission.running == 3

    play(scene())


def test_when_to_come_back() -> None:
    now = [0.0]
    admission = Admission(2, 0, clock=lambda: now[0])

    async def scene() -> None:
        assert admission.retry_after() == 1
        with admission.enter() as ticket:
            await ticket.start()
            now[0] = 30.0
        assert admission.retry_after() == 15
        with admission.enter() as ticket:
            await ticket.start()
            now[0] = 10_000.0
        assert admission.retry_after() == 60

    play(scene())


@given(
    limit=st.integers(1, 4),
    queue=st.integers(0, 6),
    clients=st.integers(1, 3),
    visits=st.integers(1, 40),
    seed=st.integers(0, 1 << 32),
)
def test_laws_under_random_leaving(limit: int, queue: int, clients: int, visits: int, seed: int) -> None:
    chance = random.Random(seed)
    moment = itertools.count()
    admission = Admission(limit, queue, clock=lambda: next(moment))
    started: dict[str, list[tuple[float, int]]] = {}
    asked: dict[str, list[int]] = {}
    turned_away = 0

    def check() -> None:
        assert admission.places_in_use <= limit
        assert admission.tickets <= limit + queue
        if admission.waiting:
            # Nobody waits while the first in line would fit.
            assert admission.places_in_use > 0

    async def visit(number: int, client: str, places: int) -> None:
        nonlocal turned_away
        try:
            ticket: Ticket = admission.enter(client, places)
        except FullError:
            turned_away += 1
            assert admission.tickets == limit + queue
            return
        with ticket:
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            asked.setdefault(client, []).append(number)
            await ticket.start()
            assert ticket.began is not None
            started.setdefault(client, []).append((ticket.began, number))
            check()
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
                check()

    async def scene() -> None:
        tasks = []
        for number in range(visits):
            client = f"client{chance.randrange(clients)}"
            tasks.append(asyncio.create_task(visit(number, client, chance.choice((1, 1, 1, 2, limit + 1)))))
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            if chance.random() < 0.4:
                chance.choice(tasks).cancel()
            check()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)

    play(scene())
    assert (admission.running, admission.waiting, admission.places_in_use, admission.tickets) == (0, 0, 0, 0)
    for client, turns in started.items():  # first in, first out, those who left taken out
        numbers = [number for _, number in sorted(turns)]
        assert numbers == [number for number in asked[client] if number in set(numbers)]
