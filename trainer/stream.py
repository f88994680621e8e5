"""The event log: one Redis stream, written by the service (or any producer) and read by the trainer.

An entry is a few fields; we write one, `proto` (the bytes of an EventBatch), and read also `json` (one
event, an array, or NDJSON), so that a plain `XADD key * json '{...}'` from any client is an event.
Positions are entry ids as text, "ms-sequence"; "0-0" is before the first entry. They are kept in the
trainer's checkpoint, so no consumer group is needed, and "after position P" is all that a reader asks.

Nothing is retried here: a write whose answer was lost may have happened, and only its producer can say
(by event id) whether to send it again. Connections are opened anew by the call after a failure.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from trainer.errors import LogError, LogFull, LogOverloaded, LogTruncated, LogUnavailable

Entry = Mapping[bytes, bytes]
PROTO_FIELD = b"proto"
JSON_FIELD = b"json"
START = "0-0"

# The longest any call waits for the broker: larger hides a dead one, smaller mistakes a slow disk for it.
TIMEOUT_S = 2.0
# A read blocks at most this long, well within TIMEOUT_S, or a quiet log would look like a dead broker.
MAX_BLOCK_MS = 1000
# How often a reader looks whether the log still continues from its position.
CHECK_EVERY_S = 1.0
# Counting entries costs their transfer: beyond this many, lag says "at least".
MAX_COUNTED = 2_000
COUNT_STEP = 500
# The dead letters kept, about; and the most bytes kept of one.
MAX_DEAD_LETTERS = 10_000
MAX_DEAD_BYTES = 64 * 1024
# One pipeline of the asynchronous log: more would make the first of them wait for the last.
MAX_GROUP = 256


def parse_id(entry_id: str) -> tuple[int, int]:
    """Split an entry id into what orders it.

    >>> parse_id("1700000000000-7") < parse_id("1700000000000-10")
    True
    """
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def entry_time_ms(entry_id: str) -> int:
    """When the broker accepted the entry, in Unix milliseconds (of an id that the broker gave)."""
    return parse_id(entry_id)[0]


class StreamState(NamedTuple):
    """What the broker says of the stream; all zero when there is none."""

    num_entries: int
    first_id: str
    last_id: str
    # Ever added, trimmed ones included.
    num_added: int


class EventLog:
    """The log as the trainer sees it: one reader, synchronous. Not for several threads at once.

    >>> with EventLog(url, "livebed:events") as log:                                  # doctest: +SKIP
    ...     log.append([{b"json": b'{"label": 1}'}])
    ...     log.read("0-0", count=100)
    """

    def __init__(self, url: str, key: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Name the broker and the stream's key; the first call connects."""
        self.key = key
        self.dead_key = f"{key}:dead"
        self._where = _without_secrets(url)
        self._client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_options(timeout_s))
        self._check_due_s = 0.0
        # A position and how many entries were ever added up to it: this makes lag a subtraction.
        self._anchor: tuple[str, int] | None = None

    def append(self, entries: Sequence[Entry]) -> list[str]:
        """Append in order, in one round trip; return the ids.

        Raises LogUnavailable or LogFull; some of the entries may have been written then.
        """
        with self._answering(), self._client.pipeline(transaction=False) as pipeline:
            _queue(pipeline, self.key, entries)
            replies = pipeline.execute(raise_on_error=False)
        return _ids(replies, self._where)

    def read(self, after_id: str, *, count: int = 1024, block_ms: int = 0) -> list[tuple[str, dict[bytes, bytes]]]:
        """Return up to `count` entries after a position, waiting up to `block_ms` (1,000 at most) for the first.

        On the first read, after a failure, and once a second it also checks that the log continues from
        the position, and raises LogTruncated if not.
        """
        if time.monotonic() >= self._check_due_s:
            self.check_position(after_id)
        # To Redis, BLOCK 0 is for ever; to us it is not at all.
        block = min(block_ms, MAX_BLOCK_MS) or None
        with self._answering():
            reply: Any = self._client.xread({self.key: after_id}, count=count, block=block)
        found = [(entry_id.decode(), fields) for entry_id, fields in reply[0][1]] if reply else []
        if found:
            self._anchor = _moved(self._anchor, after_id, found[-1][0], len(found))
        return found

    def check_position(self, position: str, *, num_read: int | None = None) -> None:
        """Raise LogTruncated unless every entry ever added after `position` is still in the log.

        `num_read` is how many entries had been added up to the position (`num_added_at`, kept beside it in a
        checkpoint). Without it a log whose entries up to and including the position are all gone is
        refused, since nothing then shows that the next one was not lost: trim with `trim_before(position)`.
        """
        state = self.state()
        self._check_due_s = time.monotonic() + CHECK_EVERY_S
        if num_read is None:
            num_read = self.num_added_at(position)
        problem = _gap(state, position, num_read)
        if problem:
            self._check_due_s = 0.0
            self._anchor = None
            raise LogTruncated(f"the log {self.key} at {self._where} cannot be continued from {position}: {problem}")
        if num_read is not None:
            self._anchor = (position, num_read)

    def skip_gap(self, after: str) -> tuple[str, int]:
        """Return where to read on when the log does not continue from a position: (position, entries added up to it).

        Just before the oldest entry that is left; after the newest one if all of them lie before that position.
        """
        state = self.state()
        milliseconds, sequence = parse_id(state.first_id if state.num_entries else state.last_id)
        position = state.last_id
        if parse_id(after) > parse_id(state.last_id):  # its end was lost: what is left has been read
            self._anchor = (position, state.num_added)
            return self._anchor
        if state.num_entries:
            position = f"{milliseconds}-{sequence - 1}" if sequence else f"{max(milliseconds - 1, 0)}-{2**64 - 1}"
        self._anchor = (position, state.num_added - state.num_entries)
        return self._anchor

    def num_added_at(self, position: str) -> int | None:
        """Return how many entries had ever been added up to the reader's position, None if not known."""
        if parse_id(position) == (0, 0):
            return 0
        return self._anchor[1] if self._anchor is not None and self._anchor[0] == position else None

    def lag(self, position: str, *, num_read: int | None = None) -> int:
        """Return how many entries wait after a position.

        Exact (XDEL aside) when the reader came here by reading or `num_read` is given; met in its middle otherwise,
        the log is counted, and 2,000 means "at least".
        """
        state = self.state()
        if num_read is not None:
            self._anchor = (position, num_read)
        if parse_id(position) >= parse_id(state.last_id):
            self._anchor = (position, state.num_added) if position == state.last_id else None
            return 0
        if parse_id(position) < parse_id(state.first_id):
            return state.num_entries
        num_read = self.num_added_at(position)
        if num_read is not None and num_read < state.num_added:
            return state.num_added - num_read
        num_waiting = self._count(position, state.last_id)
        self._anchor = (position, state.num_added - num_waiting) if num_waiting < MAX_COUNTED else None
        return num_waiting

    def last_id(self) -> str:
        """Return the id of the newest entry ever added, "0-0" if there was none."""
        return self.state().last_id

    def length(self) -> int:
        """Return the number of entries in the log."""
        return self.state().num_entries

    def state(self) -> StreamState:
        """Ask the broker about the stream (about 50 us and the transfer of two entries)."""
        with self._answering():
            try:
                reply: Any = self._client.xinfo_stream(self.key)
            except exceptions.ResponseError as error:
                if "no such key" not in str(error):
                    raise
                return StreamState(num_entries=0, first_id=START, last_id=START, num_added=0)
        first = reply["first-entry"]
        return StreamState(
            num_entries=reply["length"],
            first_id=first[0].decode() if first else START,
            last_id=reply["last-generated-id"].decode(),
            num_added=reply["entries-added"],
        )

    def trim_before(self, entry_id: str, *, exact: bool = False) -> int:
        """Drop the entries before an id and keep the id itself; return how many went.

        Not exact means whole blocks of about 100 entries, which is far cheaper. Give it the position of
        the oldest checkpoint that is kept; a blind MAXLEN would drop what nobody has learned from.
        """
        with self._answering():
            reply: Any = self._client.xtrim(self.key, minid=entry_id, approximate=not exact)
        return int(reply)

    def dead_letter(self, entry_id: str, fields: Entry, code: str, detail: str) -> None:
        """Keep a refused entry and the reason in the stream `<key>:dead`, for a person to look at.

        At least once: after a crash the same entry is refused, and kept, again. Long values are cut.
        """
        letter: dict[Any, Any] = {
            b"entry_id": entry_id.encode(),
            b"code": code.encode(),
            b"detail": detail.encode(errors="replace")[:1024],
        }
        space = MAX_DEAD_BYTES
        for name, value in fields.items():
            if len(name) >= space:
                letter[b"cut"] = b"1"
                break
            letter[b"original:" + name] = value[: space - len(name)]
            if len(value) > space - len(name):
                letter[b"cut"] = b"1"
            space -= len(name) + len(value)
        with self._answering():
            self._client.xadd(self.dead_key, letter, maxlen=MAX_DEAD_LETTERS, approximate=True)

    def ping(self) -> None:
        """Raise LogUnavailable unless the broker answers, LogFull if it cannot write its file."""
        with self._answering():
            self._client.ping()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        """Return itself; the first call connects."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _count(self, after_id: str, last_id: str) -> int:
        """Count the entries after one id up to another, MAX_COUNTED at most."""
        num_found, step = 0, COUNT_STEP
        while num_found < MAX_COUNTED and step == COUNT_STEP:
            with self._answering():
                found: Any = self._client.xrange(self.key, min=f"({after_id}", max=last_id, count=COUNT_STEP)
            step = len(found)
            num_found += step
            after_id = found[-1][0].decode() if found else after_id
        return num_found

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn the client's errors into ours; after one, the next read checks its position again."""
        try:
            yield
        except (exceptions.RedisError, OSError) as error:
            self._check_due_s = 0.0
            raise _log_error(error, self._where) from error


@dataclass(slots=True)
class _Append:
    """One caller's entries on their way, and where it waits for their ids."""

    entries: Sequence[Entry]
    num_bytes: int
    ids: asyncio.Future[list[str]]


class AsyncEventLog:
    """The log as a service worker writes it: many callers at once, grouped.

    What arrives while a round trip is under way goes out together in the next one, in order of arrival,
    so the cost of a trip is shared exactly when there is load and nobody waits for company.
    """

    def __init__(
        self, url: str, key: str, *, timeout_s: float = TIMEOUT_S, max_waiting_bytes: int = 16 * 1024 * 1024
    ) -> None:
        """Name the broker and the key; the first append connects, in the running event loop."""
        self.key = key
        self.timeout_s = timeout_s
        self.num_round_trips = 0
        self._where = _without_secrets(url)
        self._client = redis.asyncio.Redis.from_url(url, retry=AsyncRetry(NoBackoff(), 0), **_options(timeout_s))
        # Bounded by max_waiting_bytes: an append beyond it is refused with LogOverloaded.
        self._waiting: deque[_Append] = deque()
        self._waiting_bytes = 0
        self._max_waiting_bytes = max_waiting_bytes
        self._flusher: asyncio.Task[None] | None = None

    async def append(self, entries: Sequence[Entry]) -> list[str]:
        """Append in order and return the ids, when the broker has them.

        Raises LogOverloaded (nothing written), LogFull, or LogUnavailable (may have been written). A caller
        that is cancelled before its entries went out has written nothing.
        """
        num_bytes = sum(len(name) + len(value) for entry in entries for name, value in entry.items())
        if self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise LogOverloaded(
                f"{self._waiting_bytes} bytes of events already wait for the log, of {self._max_waiting_bytes} allowed"
            )
        append = _Append(entries, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(append)
        self._waiting_bytes += num_bytes
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        return await append.ids

    async def ping(self) -> None:
        """Raise LogUnavailable unless the broker answers, LogFull if it cannot write its file."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._client.ping()
        except (exceptions.RedisError, OSError) as error:
            raise _log_error(error, self._where) from error

    async def close(self) -> None:
        """Send what waits, then close; at most one more time-out long."""
        if self._flusher is not None:
            await asyncio.wait([self._flusher], timeout=self.timeout_s)
            self._flusher.cancel()
        await self._client.aclose()

    async def _flush(self) -> None:
        """Send groups until none waits; whatever happens, everybody taken up gets an answer."""
        group: list[_Append] = []
        try:
            while self._waiting:
                group = self._next_group()
                replies = iter(await self._send([entry for append in group for entry in append.entries]))
                for append in group:
                    _answer(append, list(islice(replies, len(append.entries))), self._where)
        except (exceptions.RedisError, OSError) as error:
            # They have all waited for the same broker: none of them starts a second time-out.
            self._fail(group, _log_error(error, self._where))
        except asyncio.CancelledError:
            self._fail(group, LogUnavailable("the event log was closed while this append waited"))
            raise
        except Exception as error:
            # A bug: each caller raises it, and the next append starts a new flusher.
            self._fail(group, LogError(f"appending failed: {error!r}"))
            raise

    def _next_group(self) -> list[_Append]:
        """Take the oldest waiting appends, MAX_GROUP entries or the first of them at least."""
        group: list[_Append] = []
        num_entries = 0
        while self._waiting and (not group or num_entries + len(self._waiting[0].entries) <= MAX_GROUP):
            append = self._waiting.popleft()
            self._waiting_bytes -= append.num_bytes
            if not append.ids.done():
                group.append(append)
                num_entries += len(append.entries)
        return group

    async def _send(self, entries: Sequence[Entry]) -> list[object]:
        """Send all in one round trip under one time-out; return an id or an error for each."""
        if not entries:
            return []
        self.num_round_trips += 1
        async with asyncio.timeout(self.timeout_s), self._client.pipeline(transaction=False) as pipeline:
            _queue(pipeline, self.key, entries)
            return list(await pipeline.execute(raise_on_error=False))

    def _fail(self, group: Sequence[_Append], error: LogError) -> None:
        """Give one error to a group and to everybody who waits behind it."""
        for append in (*group, *self._waiting):
            if not append.ids.done():
                append.ids.set_exception(type(error)(*error.args))
        self._waiting.clear()
        self._waiting_bytes = 0


def _answer(append: _Append, replies: Sequence[object], where: str) -> None:
    """Hand one caller its ids, or the first error among its own entries."""
    if append.ids.done():
        return
    try:
        append.ids.set_result(_ids(replies, where))
    except LogError as error:
        append.ids.set_exception(error)


def _queue(pipeline: Any, key: str, entries: Sequence[Entry]) -> None:
    """Put one XADD an entry into a pipeline of either kind; the broker chooses the ids."""
    for entry in entries:
        pipeline.execute_command("XADD", key, "*", *chain.from_iterable(entry.items()))


def _ids(replies: Sequence[object], where: str) -> list[str]:
    """Return the ids of a pipeline of XADD, or raise the first error among its replies."""
    ids = []
    for reply in replies:
        if not isinstance(reply, bytes):
            raise _log_error(reply if isinstance(reply, Exception) else LogError(repr(reply)), where)
        ids.append(reply.decode())
    return ids


def _moved(anchor: tuple[str, int] | None, after_id: str, last_id: str, num_read: int) -> tuple[str, int] | None:
    """Return an anchor moved along by what was read, if it stood where the read began."""
    return (last_id, anchor[1] + num_read) if anchor is not None and anchor[0] == after_id else None


def _gap(state: StreamState, position: str, num_read: int | None) -> str | None:
    """Return why entries after a position are missing from the log, or None when they are all there."""
    at, first, last = parse_id(position), parse_id(state.first_id), parse_id(state.last_id)
    if last < at or (num_read is not None and state.num_added < num_read):
        return (
            f"it ends at {state.last_id} after {state.num_added} entries, before that position. The broker lost its "
            "data or is another one: bring the old one back, or restore a checkpoint that fits this log"
        )
    num_gone = state.num_added - state.num_entries
    starts_later = first > at if state.num_entries else last > at
    if starts_later and (num_read is None or num_gone > num_read):
        return (
            f"it now begins at {state.first_id}, and {num_gone} entries before that are gone. Something trimmed it "
            "beyond the oldest checkpoint, or it is another log: restore a checkpoint that fits this log"
        )
    return None


def _log_error(error: Exception, where: str) -> LogError:
    """Return our error for one of the client's."""
    if isinstance(error, LogError):
        return error
    text = str(error) or type(error).__name__
    # A server out of memory says OOM; one that cannot write its file says MISCONF, even to PING.
    if isinstance(error, exceptions.OutOfMemoryError) or text.startswith("MISCONF"):
        return LogFull(f"the broker at {where} refuses writes: {text}")
    if isinstance(error, exceptions.ResponseError) and not isinstance(error, exceptions.ReadOnlyError):
        return LogError(f"the broker at {where} refused: {text}")
    return LogUnavailable(f"no answer from the broker at {where}: {text}")


def _options(timeout_s: float) -> dict[str, Any]:
    # RESP2, so that replies have one shape with every server and client version.
    return {"protocol": 2, "socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}


def _without_secrets(url: str) -> str:
    """Return a broker's address fit for a message: no user, no password.

    >>> _without_secrets("redis://user:secret@cache:6379/0")
    'cache:6379'
    """
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path
