"""The first stage of the trainer: a thread that reads and decodes ahead, so that the next events wait ready.

    log -> XREAD -> decode -> derive -> portions -> (a queue of AHEAD) -> the loop

A portion is what the loop learns and publishes as one step. Decoding is Python and holds the GIL; learning and
publishing are kernels and do not, so the two overlap as far as there is a core for it.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.board import Board
from trainer.codec import EntryDecoder
from trainer.commands import COMMAND_FIELD, Command, decode
from trainer.errors import BadEvent, LivebedError, LogFull
from trainer.events import EventBatch, derive_batch
from trainer.quarantine import Quarantine
from trainer.schema import Schema
from trainer.settings import StreamSettings
from trainer.stream import EventLog, entry_time_ms, parse_id

logger = logging.getLogger(__name__)

# Portions that may wait for the loop: one is being learned, the next is ready; more would only make events older.
AHEAD = 2
# A read that finds nothing returns after this long, so that the heartbeat and the watermark move on a quiet log.
QUIET_READ_MS = 20
PUT_S = 0.05  # how often a reader that waits for room looks whether it should stop
US = 1_000_000

Entry = tuple[str, dict[bytes, bytes]]


@dataclass(frozen=True)
class Portion:
    """Entries that are learned together: at most `max_batch` events, or one command.

    An entry of more events comes in several portions, of which the last `is_whole`: only then may a checkpoint say that
    the entry was learned. `num_read`: entries ever added to the log up to the last one here, None if not known.
    """

    entries: Sequence[Entry]
    batch: EventBatch | None
    command: Command | None = None
    is_whole: bool = True
    num_read: int | None = None

    @property
    def last_id(self) -> str:
        """Where the log stands after this portion."""
        return self.entries[-1][0]


@dataclass(frozen=True)
class Quiet:
    """Nothing came: what was acknowledged before `read_us` has all been handed over."""

    read_us: int


class Intake:
    """Reads one log from a position on, in a thread of its own, until it is closed or fails."""

    def __init__(
        self,
        log: EventLog,
        schema: Schema,
        stream: StreamSettings,
        board: Board,
        *,
        after: str,
        num_read: int | None,
        passed_over: Quarantine | frozenset[str] = frozenset(),
        until: str | None = None,
        entry_by_entry: bool = False,
        careful_to: str | None = None,
        parts_done: int = 0,
    ) -> None:
        """Start reading after a position; `log` belongs to this thread from now on.

        `passed_over`: entries whose events are not handed on. `until`: the last id that is read. `entry_by_entry`:
        portions are cut by the log alone, not by when it was read; so are they up to `careful_to`.
        `parts_done`: portions of the first entry that were handed over before.
        """
        self._log, self._schema, self._stream, self._board = log, schema, stream, board
        self._decoder = EntryDecoder(schema)
        self._stage = board.histogram("livebed_stage_duration_seconds", stage="decode")
        self._after, self._num_read, self._until = after, num_read, until
        self._passed_over, self._entry_by_entry, self._careful_to = passed_over, entry_by_entry, careful_to
        self._parts_done = parts_done
        # AHEAD portions: when it is full the reader waits, and the log keeps what comes.
        self._ready: queue.Queue[Portion | Quiet | Exception] = queue.Queue(AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        self._thread.start()

    def take(self, timeout_s: float) -> Portion | Quiet | None:
        """What comes next in the log; None at the deadline.

        Raises:
            LogError: the reader met it and has ended: start another one. Anything else is a bug, raised here too.
        """
        try:
            taken = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(taken, Exception):
            raise taken
        return taken

    def close(self) -> None:
        """End the thread and forget what it has read."""
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            self._ready.get_nowait()
        self._thread.join()
        self._log.close()

    def _run(self) -> None:
        try:
            self._log.check_position(self._after, num_read=self._num_read)
            while not self._stop.is_set():
                self._turn()
        except Exception as error:  # raised in the loop, by `take`
            if not isinstance(error, LivebedError):
                logger.exception("the intake failed")
            self._put(error)

    def _turn(self) -> None:
        read_us = time.time_ns() // 1000
        entries = self._read()
        if not entries:
            if self._ready.empty():
                self._put(Quiet(read_us))
            return
        last_read = self._log.num_added_at(entries[-1][0])
        started_s = time.perf_counter()
        for portion in self._portions(entries, None if last_read is None else last_read - len(entries)):
            self._stage.observe(time.perf_counter() - started_s)
            self._put(portion)
            started_s = time.perf_counter()
        self._after = entries[-1][0]

    def _read(self) -> list[Entry]:
        """What has arrived, up to max_batch entries, waiting for more at most linger_ms."""
        size = self._stream.max_batch
        entries = self._log.read(self._after, count=size, block_ms=QUIET_READ_MS)
        deadline = time.monotonic() + self._stream.linger_ms / 1000
        while entries and len(entries) < size and (left_ms := (deadline - time.monotonic()) * 1000) >= 1:
            entries += self._log.read(entries[-1][0], count=size - len(entries), block_ms=int(left_ms))
        if self._until is not None:
            entries = [entry for entry in entries if parse_id(entry[0]) <= parse_id(self._until)]
        return entries

    def _portions(self, entries: Sequence[Entry], num_before: int | None) -> Iterator[Portion]:
        """Cut entries into portions; what cannot be read goes to the dead-letter stream with its reason."""
        waiting: list[Entry] = []
        batches: list[EventBatch] = []
        for place, (entry_id, fields) in enumerate(entries):
            num_read = None if num_before is None else num_before + place
            command, batch = self._decode(entry_id, fields)
            size = sum(map(len, batches))
            full = batch is not None and size + len(batch) > self._stream.max_batch
            alone = self._comes_alone(entry_id) or (bool(waiting) and self._comes_alone(waiting[-1][0]))
            if waiting and (full or command is not None or alone):
                yield Portion(waiting, _joined(batches), num_read=num_read)
                waiting, batches = [], []
            if command is not None:
                yield Portion([(entry_id, fields)], None, command, num_read=None if num_read is None else num_read + 1)
                continue
            waiting.append((entry_id, fields))
            if batch is not None:
                *first, last = batch.split(self._stream.max_batch)
                for part in first[self._parts_done :]:
                    yield Portion([(entry_id, fields)], part, is_whole=False)
                self._parts_done = 0
                batches.append(last)
        if waiting:
            yield Portion(waiting, _joined(batches), num_read=None if num_before is None else num_before + len(entries))

    def _comes_alone(self, entry_id: str) -> bool:
        """Whether an entry makes a portion of its own."""
        careful_to = self._careful_to
        return self._entry_by_entry or (careful_to is not None and parse_id(entry_id) <= parse_id(careful_to))

    def _decode(self, entry_id: str, fields: dict[bytes, bytes]) -> tuple[Command | None, EventBatch | None]:
        """One entry's command or valid events."""
        if entry_id in self._passed_over:
            return None, None
        try:
            if COMMAND_FIELD in fields:
                return decode(fields[COMMAND_FIELD], self._schema), None
            raw, rejected = self._decoder.decode_entry(fields, entry_time_ms(entry_id) * 1000)
        except BadEvent as error:
            self._refuse(entry_id, fields, error.code, error.detail)
            return None, None
        except Exception:
            logger.exception(
                "entry %s cannot be decoded, which is a fault of ours; it goes to the dead letters", entry_id
            )
            self._refuse(entry_id, fields, "undecodable", "decoding it failed; the trainer's log says how")
            return None, None
        for rejection in rejected:
            self._refuse(entry_id, fields, rejection.code, f"event {rejection.index}: {rejection.detail}")
        return None, derive_batch(self._schema, raw) if raw.inputs.count else None

    def _refuse(self, entry_id: str, fields: dict[bytes, bytes], code: str, detail: str) -> None:
        logger.warning("entry %s refused (%s): %s", entry_id, code, detail)
        try:
            self._log.dead_letter(entry_id, fields, code, detail)
        except LogFull as error:  # waiting for room would stop the learning that makes room
            logger.error("entry %s is not kept among the dead letters: %s", entry_id, error)
        self._board.counter("livebed_dead_letter_total", reason=code).inc()

    def _put(self, item: Portion | Quiet | Exception) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=PUT_S)
                return


def _joined(batches: Sequence[EventBatch]) -> EventBatch | None:
    return EventBatch.concatenate(batches) if batches else None
