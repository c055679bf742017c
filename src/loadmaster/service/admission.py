"""Who may go to the engine now, who waits, and who is sent away.

A request takes a ticket when it arrives, waits for its turn when its body is read and judged, and gives the ticket
back when it is over. Nothing here touches the network; a ticket is correct at every moment, so a request that is
cancelled anywhere only has to give it back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import TracebackType


class FullError(Exception):
    """No room, also not to wait. ``retry_after``: whole seconds until a place is likely to be free."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"full, try again in {retry_after} s")
        self.retry_after = retry_after


class State(Enum):
    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    GONE = "gone"


class Ticket:
    """The right to a turn. A context manager: leaving it gives everything back, whatever happened inside."""

    def __init__(self, admission: Admission, client: str, places: int) -> None:
        self._admission = admission
        self.client = client
        self.places = places
        self.taken = 0
        self.state = State.PREPARING
        self.arrived = admission.clock()
        self.began: float | None = None
        self.turn: asyncio.Future[None] | None = None

    async def start(self) -> float:
        """Wait for the turn; seconds waited. Cancelling it is safe."""
        return await self._admission.start(self)

    def leave(self) -> None:
        """Give the place, or the position in the queue, back. Doing so again does nothing."""
        self._admission.leave(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class Admission:
    """At most ``limit`` places in use, at most ``queue`` further tickets.

    Within one client the order is that of ``start``; between clients turns go round, so that one who asks for much
    does not keep others out. A request whose places are not free yet holds the queue: nobody overtakes it.
    """

    def __init__(self, limit: int, queue: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.queue = queue
        self.clock = clock
        self.places_in_use = 0
        self.running = 0
        self.tickets = 0
        self._lines: dict[str, deque[Ticket]] = {}  # in the order of turns
        self._mean_s: float | None = None

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def place(self, ticket: Ticket) -> int | None:
        """How many turns come up to and including this one; None: it does not wait. Turns go round the clients."""
        if ticket.state is not State.WAITING:
            return None
        own = self._lines[ticket.client].index(ticket)
        ahead, before = own, True
        for client, line in self._lines.items():
            if client == ticket.client:
                before = False
            else:
                ahead += min(len(line), own + before)
        return ahead + 1

    def set_limit(self, limit: int) -> None:
        """Change how many places there are; who is inside stays."""
        self.limit = limit
        self._call()

    def enter(self, client: str = "", places: int = 1) -> Ticket:
        """A ticket for a request that needs so many places. Raises :class:`FullError`."""
        self.check_room()
        self.tickets += 1
        return Ticket(self, client, max(1, places))

    def check_room(self) -> None:
        """Raise :class:`FullError` when a ticket could not be had now."""
        if self.tickets >= self.limit + self.queue:
            raise FullError(self.retry_after())

    def retry_after(self) -> int:
        """Seconds until a place is likely free: the mean time of a request times the rounds ahead, 1 to 60."""
        mean = 1.0 if self._mean_s is None else self._mean_s
        return min(60, max(1, math.ceil(mean * (self.waiting + 1) / max(1, self.limit))))

    async def start(self, ticket: Ticket) -> float:
        if ticket.state is not State.PREPARING:
            raise RuntimeError("a ticket starts once")
        if not self._lines and self._fits(ticket):
            self._grant(ticket)
            return 0.0
        asked = self.clock()
        ticket.state = State.WAITING
        ticket.turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(ticket.client, deque()).append(ticket)
        await ticket.turn
        return self.clock() - asked

    def leave(self, ticket: Ticket) -> None:
        state, ticket.state = ticket.state, State.GONE
        if state is State.GONE:
            return
        self.tickets -= 1
        if state is State.WAITING:
            line = self._lines[ticket.client]
            line.remove(ticket)
            if not line:
                del self._lines[ticket.client]
        elif state is State.RUNNING:
            self.running -= 1
            self.places_in_use -= ticket.taken
            if ticket.began is not None:
                spent = self.clock() - ticket.began
                self._mean_s = spent if self._mean_s is None else self._mean_s + (spent - self._mean_s) / 16
        self._call()

    def _fits(self, ticket: Ticket) -> bool:
        return self.places_in_use + min(ticket.places, self.limit) <= self.limit

    def _grant(self, ticket: Ticket) -> None:
        ticket.state = State.RUNNING
        ticket.taken = min(ticket.places, self.limit)
        ticket.began = self.clock()
        self.running += 1
        self.places_in_use += ticket.taken

    def _call(self) -> None:
        """Let in whoever is next, as long as there is room."""
        while self._lines:
            client, line = next(iter(self._lines.items()))
            if not self._fits(line[0]):
                return
            ticket = line.popleft()
            del self._lines[client]
            if line:
                self._lines[client] = line  # the client's next turn comes after everybody else's
            self._grant(ticket)
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_result(None)
