"""Whose turn it is on a worker's one event loop, and who is refused because too much work waits before it.

Parsing and scoring hold the loop. Without order, every request whose bytes have arrived would be worked through
before a socket is looked at again: a flood of events would stand before each score, and nobody would see it. Here:

    1. a request says how large it is; what that costs is estimated from what such requests have taken so far
    2. it begins at once if nothing of its lane waits and this turn of the loop has time left; a large write never does
    3. else it waits in its lane, or is refused (`overloaded`) when the lane's budget of waiting work is spent
    4. each turn of the loop: reads for SLICE_S, every other turn one write; then sockets are read again. While there
       are reads, a write that waited is followed by a rest, so that such writes have a third of the time at most
    5. who has waited past the deadline, or has gone, does no work

Where else something waits: connections in the kernel's queue (`ports.BACKLOG`), bytes in socket buffers, and events on
their way into the log (`AsyncEventLog`, 16 MiB, then `overloaded`).
"""

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from service.errors import ServiceError
from service.exchange import Exchange
from trainer.settings import QueueSettings

# Work begun in one turn of the loop before sockets are read again. Larger makes reads that arrive meanwhile wait,
# smaller costs a system call more often.
SLICE_S: Final = 0.002
SMALL_WRITE_S: Final = 0.0002  # a write that takes less need not let reads go first
FIRST_GUESS_S: Final = 50e-9  # a byte, before anything was measured
REQUEST_BYTES: Final = 2048  # what a request costs beside its body, in bytes of one
REST: Final = 2.0  # after a write that waited, in times of what it took
READS_ARE_RECENT_S: Final = 0.05  # after the last read so long, writes need not rest
SMOOTHING: Final = 0.05  # weight of the newest measurement
MAX_SURPRISE: Final = 4.0  # one pause of the machine must not be taken for the price of a request


@dataclass(slots=True)
class Lane:
    """Requests of one kind that wait: at most `budget_s` of estimated work."""

    name: str
    budget_s: float
    waiting: "deque[_Waiting]" = field(default_factory=deque)
    waiting_s: float = 0.0


@dataclass(slots=True)
class _Waiting:
    cost_s: float
    turn: "asyncio.Future[None]"


class Work:
    """One request that was let in; `done` once it no longer holds the loop."""

    __slots__ = ("_pace", "_size", "began_s", "took_s")

    def __init__(self, pace: "Pace", size: int) -> None:
        self._pace = pace
        self._size = size
        self.began_s = time.perf_counter()
        self.took_s = 0.0  # zero: not done yet

    def done(self) -> None:
        """Measure it, the first time that this is called."""
        if not self.took_s:
            self.took_s = time.perf_counter() - self.began_s
            self._pace.learn(self._size, self.took_s)


class Pace:
    """What a byte of one route costs, as a moving average.

    >>> pace = Pace()
    >>> round(pace.cost_s(0) * 1e6)
    102
    """

    def __init__(self) -> None:
        self._byte_s = FIRST_GUESS_S

    def cost_s(self, size: int) -> float:
        """Estimate for a body of so many bytes."""
        return self._byte_s * (size + REQUEST_BYTES)

    def learn(self, size: int, took_s: float) -> None:
        """Move towards what one took."""
        measured_s = min(took_s / (size + REQUEST_BYTES), MAX_SURPRISE * self._byte_s)
        self._byte_s += SMOOTHING * (measured_s - self._byte_s)


class Admission:
    """The lanes of one worker; used from its event loop alone."""

    def __init__(self, settings: QueueSettings) -> None:
        self.reads = Lane("reads", settings.read_ms / 1000)
        self.writes = Lane("writes", settings.write_ms / 1000)
        self._paces: dict[str, Pace] = {}
        self._begun_s = 0.0  # estimated work begun in this turn of the loop
        self._has_turn = False  # whether the next turn is arranged
        self._wrote = False  # whether a write that waited has begun in the last turn
        self._last_read_s = -math.inf
        self._last_write: Work | None = None  # of those that waited
        self._rest: asyncio.TimerHandle | None = None  # while the next of them lets reads go first

    async def enter(self, exchange: Exchange, lane: Lane, size: int) -> bool:
        """Return when the request may begin: whether it had to wait. `exchange.finish` ends what begins here.

        Raises ServiceError: `overloaded`, or `deadline_exceeded` if it waited too long.
        """
        pace = self._paces.get(exchange.route)
        if pace is None:
            pace = self._paces[exchange.route] = Pace()
        cost_s = pace.cost_s(size)
        waits = not self._may_begin(lane, cost_s)
        if waits:
            await self._wait(exchange, lane, cost_s)
        else:
            self._begun_s += cost_s
            self._arrange_turn()
        exchange.check_deadline()
        exchange.work = Work(pace, size)
        if lane is self.reads:
            self._last_read_s = exchange.work.began_s
        elif waits:
            self._last_write = exchange.work
        return waits

    def _may_begin(self, lane: Lane, cost_s: float) -> bool:
        if self.reads.waiting or lane.waiting or self._begun_s >= SLICE_S:
            return False
        return lane is self.reads or cost_s <= SMALL_WRITE_S

    async def _wait(self, exchange: Exchange, lane: Lane, cost_s: float) -> None:
        if lane.waiting and lane.waiting_s + cost_s > min(lane.budget_s, exchange.remaining_s):
            raise ServiceError(
                "overloaded",
                f"{lane.name} that would take {lane.waiting_s * 1000:.0f} ms wait already, of "
                f"{lane.budget_s * 1000:.0f} ms that may",
            )
        waiting = _Waiting(cost_s, asyncio.get_running_loop().create_future())
        lane.waiting.append(waiting)  # bounded by the budget just looked at, and by MAX_IN_FLIGHT
        lane.waiting_s += cost_s
        self._arrange_turn()
        await waiting.turn

    def _arrange_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._has_turn = False
        self._begun_s = 0.0
        if self.reads.waiting:
            self._last_read_s = time.perf_counter()
        while self.reads.waiting and self._begun_s < SLICE_S:
            self._begin_next(self.reads)
        if self._wrote:  # what came while that write held the loop is seen in the next turn, before another write
            self._wrote = False
            self._arrange_turn()
        elif self.writes.waiting and self._rest is None:
            self._begin_write()
        if self._begun_s:
            self._arrange_turn()

    def _begin_write(self) -> None:
        rest_s = self._rest_s()
        if rest_s > 0:
            self._rest = asyncio.get_running_loop().call_later(rest_s, self._end_rest)
        else:
            self._wrote = True
            self._begin_next(self.writes)

    def _end_rest(self) -> None:
        self._rest = None
        self._arrange_turn()

    def _rest_s(self) -> float:
        """How long the next write that waits has to let reads go first."""
        now_s = time.perf_counter()
        last = self._last_write
        if last is None or now_s - self._last_read_s > READS_ARE_RECENT_S:
            return 0.0
        return last.began_s + last.took_s + REST * last.took_s - now_s

    def _begin_next(self, lane: Lane) -> None:
        """Wake the first that still wants its turn."""
        while lane.waiting:
            first = lane.waiting.popleft()
            lane.waiting_s = max(0.0, lane.waiting_s - first.cost_s) if lane.waiting else 0.0
            if not first.turn.done():  # else it was cancelled
                self._begun_s += first.cost_s
                first.turn.set_result(None)
                return
