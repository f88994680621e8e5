"""The first stage of the trainer: the log, cut into portions.

    log -> XREAD -> decode -> derive -> portions -> the loop

A portion is what the loop learns and publishes as one step; it is decoded when the loop asks for it, so that no more
events wait here than one read brought. Reading and decoding ahead in a thread was tried and left: its Python takes
turns with the loop's, and cost events/s and freshness (trainer/README has the figures).
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.board import Board
from trainer.codec import EntryDecoder
from trainer.commands import COMMAND_FIELD, Command, decode
from trainer.errors import BadEvent, LogFull
from trainer.events import EventBatch, derive_batch
from trainer.quarantine import Quarantine
from trainer.schema import Schema
from trainer.settings import StreamSettings
from trainer.stream import EventLog, entry_time_ms, parse_id

logger = logging.getLogger(__name__)

# A read that finds nothing returns after this long, so that the heartbeat and the watermark move on a quiet log.
QUIET_READ_MS = 20

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
    """Reads one log from a position on. After an error it is to be closed, and another one made."""

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
        """Read after a position; `log` is ours from now on.

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
        self._is_checked = False
        self._waiting: Iterator[Portion] = iter(())  # what is left of the last read

    def take(self) -> Portion | Quiet:
        """What comes next in the log, waiting at most QUIET_READ_MS for it.

        Raises:
            LogError: the log does not answer, or does not continue from the position.
        """
        started_s = time.perf_counter()
        portion = next(self._waiting, None)
        if portion is None:
            read_us = time.time_ns() // 1000
            entries = self._read()
            if not entries:
                return Quiet(read_us)
            self._after = entries[-1][0]
            last_read = self._log.num_added_at(self._after)
            started_s = time.perf_counter()
            self._waiting = self._portions(entries, None if last_read is None else last_read - len(entries))
            portion = next(self._waiting)
        self._stage.observe(time.perf_counter() - started_s)
        return portion

    def close(self) -> None:
        """Forget what was read and close the connection."""
        self._waiting = iter(())
        self._log.close()

    def _read(self) -> list[Entry]:
        """What has arrived, up to max_batch entries, waiting for more at most linger_ms."""
        if not self._is_checked:
            self._log.check_position(self._after, num_read=self._num_read)
            self._is_checked = True
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
        size = 0
        for place, (entry_id, fields) in enumerate(entries):
            num_read = None if num_before is None else num_before + place
            command, batch = self._decode(entry_id, fields)
            full = batch is not None and size + len(batch) > self._stream.max_batch
            alone = self._comes_alone(entry_id) or (bool(waiting) and self._comes_alone(waiting[-1][0]))
            if waiting and (full or command is not None or alone):
                yield Portion(waiting, _joined(batches), num_read=num_read)
                waiting, batches, size = [], [], 0
            if command is not None:
                yield Portion([(entry_id, fields)], None, command, num_read=None if num_read is None else num_read + 1)
                continue
            waiting.append((entry_id, fields))
            if batch is not None:
                if len(batch) > self._stream.max_batch:
                    *first, batch = batch.split(self._stream.max_batch)
                    for part in first[self._parts_done :]:
                        yield Portion([(entry_id, fields)], part, is_whole=False)
                self._parts_done = 0
                batches.append(batch)
                size += len(batch)
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


def _joined(batches: Sequence[EventBatch]) -> EventBatch | None:
    return EventBatch.concatenate(batches) if batches else None
