"""The trainer's main path, told from top to bottom: read -> decode -> learn -> publish -> checkpoint.

One thread, one order. The numbers in `Trainer.step` mark the effects in the order in which they become visible; a
crash between any two loses nothing, for the position in the log moves on disk only with the tables it belongs to.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.board import Board
from trainer.checkpoint import load_latest
from trainer.codec import EntryDecoder
from trainer.dense import LearnerState
from trainer.engines import build_engine
from trainer.entities import Entities
from trainer.errors import BadEvent, LivebedError, LogFull, LogTruncated, LogUnavailable
from trainer.events import EventBatch, derive_batch
from trainer.live import Writer
from trainer.metrics import Progressive
from trainer.publish import Publisher, layout_for
from trainer.saver import Saver
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.snapshot import Progress, Snapshot, capture, restore
from trainer.stream import START, EventLog, entry_time_ms
from trainer.tables import Tables
from trainer.warm import MODULES, warm

logger = logging.getLogger(__name__)

# A read that finds nothing returns after this long, so that the heartbeat and the watermark move on a quiet log.
QUIET_READ_MS = 20
# How long a trainer without its broker waits before it asks again; readers meanwhile see the model age.
RETRY_S = 0.2
GAUGES_EVERY_S = 0.25
EXPIRE_SLOTS = 4096  # slots that one step sweeps for expired ids: some 10 us
US = 1_000_000


@dataclass
class Place:
    """Where the trainer stands; a restart begins from what of this is in the last checkpoint."""

    entry_id: str = START  # newest log entry applied
    step: int = 0  # examples learned
    watermark_us: int = 0  # every event acknowledged before this is in the model
    version: int = 0  # of the live store


def now_us() -> int:
    """Wall clock in microseconds since 1970 UTC."""
    return time.time_ns() // 1000


class Trainer:
    """Learns from one event log and publishes every step into one live store.

    Raises:
        SettingsError, SchemaMismatch, CheckpointError: the configuration and what is on disk do not fit.
    """

    def __init__(self, settings: Settings) -> None:
        if settings.stream.url is None:
            raise ValueError("stream.url is not set: the supervisor starts a broker and sets it")
        self.settings = settings
        self.schema = Schema.from_settings(settings)
        self.tables = Tables(self.schema, settings.model)
        self.entities = Entities(self.schema)
        self.state = LearnerState.initial(self.schema, settings.model)
        self.engine = build_engine(settings, self.schema, self.tables, self.state)
        self.metrics = Progressive()
        self.place = Place()
        self._num_read = self._restore()
        self.board = Board.open(settings.metrics_path, "trainer")
        self.log = EventLog(settings.stream.url, settings.stream.key)
        self.saver = Saver(settings.checkpoint_path, settings.checkpoint, self.board)
        layout = layout_for(self.schema, settings.model, settings.store.num_shards)
        self.writer = Writer.create(settings.store_path, layout, after_version=self.place.version)
        self.publisher = Publisher(self.writer, self.tables, self.entities, self.state, settings.model)
        self._decoder = EntryDecoder(self.schema)
        self._freshness = self.board.histogram("livebed_event_to_visible_seconds")
        self._applied = self.board.counter("livebed_events_applied_total")
        self._gauges_due_s = 0.0
        self._is_held = False  # whether readers lack what has been learned, since it must not be shown
        self._held_reasons: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Publish what was restored, then learn until told to stop; ends with a checkpoint."""
        for module in MODULES:  # from the cache: the first events do not wait for their kernels
            warm(module)
        self.publisher.publish_all(step=self.place.step, watermark_us=self.place.watermark_us)
        self.writer.activate()
        self._check_log(stop)
        logger.info("learning from %s after entry %s", self.settings.stream.key, self.place.entry_id)
        try:
            while not stop.is_set():
                self.step()
            self.saver.finish(None if self._is_held else self._capture())
        finally:
            self.writer.close()
            self.log.close()
            self.board.close()

    def step(self) -> int:
        """One turn of the loop; returns the number of log entries taken."""
        read_us = now_us()
        try:
            entries = self._read()
            batch = self._decode(entries)  # 1. what cannot be read is in the dead-letter stream
        except LogTruncated as gap:
            self._go_on_after(gap)
            return 0
        except (LogUnavailable, LogFull) as error:
            self._wait_for_broker(error)
            return 0
        if batch is not None:
            for part in batch.split(self.settings.stream.max_batch):
                self._learn(part)  # 2. learned, then 3. visible to readers
        if entries:
            self.place.entry_id = entries[-1][0]  # 4. taken: the next checkpoint says so
        elif not self._is_held:  # all that was acknowledged before this read is visible
            self.place.watermark_us = max(self.place.watermark_us, read_us)
        self._sweep()
        self.writer.heartbeat(now_us(), self.place.watermark_us)
        if self.saver.is_due and not self._is_held:  # what must not be shown must not be begun from either
            self._trim()
            self.saver.start(self._capture())  # 5. a restart begins here
        self._show_gauges()
        return len(entries)

    def _read(self) -> list[tuple[str, dict[bytes, bytes]]]:
        """What has arrived, up to max_batch entries, waiting for more at most linger_ms."""
        stream = self.settings.stream
        entries = self.log.read(self.place.entry_id, count=stream.max_batch, block_ms=QUIET_READ_MS)
        deadline = time.monotonic() + stream.linger_ms / 1000
        while entries and len(entries) < stream.max_batch and (left_ms := (deadline - time.monotonic()) * 1000) >= 1:
            entries += self.log.read(entries[-1][0], count=stream.max_batch - len(entries), block_ms=int(left_ms))
        return entries

    def _decode(self, entries: Sequence[tuple[str, dict[bytes, bytes]]]) -> EventBatch | None:
        """All valid events of the entries, in order; the others go to the dead-letter stream with their reason."""
        batches = []
        for entry_id, fields in entries:
            try:
                raw, rejected = self._decoder.decode_entry(fields, entry_time_ms(entry_id) * 1000)
            except BadEvent as error:
                self._refuse(entry_id, fields, error.code, error.detail)
                continue
            for rejection in rejected:
                self._refuse(entry_id, fields, rejection.code, f"event {rejection.index}: {rejection.detail}")
            if raw.inputs.count:
                batches.append(derive_batch(self.schema, raw))
        return EventBatch.concatenate(batches) if batches else None

    def _refuse(self, entry_id: str, fields: dict[bytes, bytes], code: str, detail: str) -> None:
        logger.warning("entry %s refused (%s): %s", entry_id, code, detail)
        self.log.dead_letter(entry_id, fields, code, detail)
        self.board.counter("livebed_dead_letter_total", reason=code).inc()

    def _learn(self, batch: EventBatch) -> None:
        """Fill in entity state, predict and learn, publish, measure: one step."""
        changes = self.entities.apply(batch)
        examples_B = batch.entity_B < 0
        assignment = self.tables.assign(batch.features, examples_B, int(batch.accepted_us_B[-1]) // US)
        logits_B = self.engine.learn(assignment.slots_BC, batch.features, batch.labels_B)
        self.place.step += int(np.count_nonzero(examples_B))
        watermark_us = max(self.place.watermark_us, int(batch.accepted_us_B.max()))
        report = self.publisher.publish(
            assignment,
            changes,
            self.engine.touched_pairs,
            step=self.place.step,
            watermark_us=watermark_us,
        )
        self.place.version = report.version
        self._is_held = report.held_dense
        self._count_held("dense_not_finite", int(report.held_dense))
        if not report.held_dense:
            self.place.watermark_us = watermark_us
            self._freshness.observe_many((now_us() - batch.accepted_us_B) / US)
        self._applied.inc(len(batch))
        self.metrics.update(batch.labels_B[examples_B], logits_B[examples_B])
        self._count_held("row_not_finite", report.held_rows)
        self._count_held("pair_not_finite", report.held_pairs)
        if len(assignment.evicted_tables_E):
            self._count_removed(assignment.evicted_tables_E, "lru")

    def _count_held(self, reason: str, count: int) -> None:
        if count:
            self.board.counter("livebed_guard_held_total", reason=reason).inc(count)
            if reason not in self._held_reasons:  # once: the counter says how often
                self._held_reasons.add(reason)
                logger.error("held back, readers keep what they had: %s (livebed_guard_held_total counts)", reason)

    def _sweep(self) -> None:
        """Take expired ids out of the tables and the live store, a few at a time."""
        removed = self.tables.expire(now_us() // US, EXPIRE_SLOTS)
        if len(removed):
            self.publisher.remove(removed, step=self.place.step, watermark_us=self.place.watermark_us)
            self._count_removed(np.searchsorted(self.tables.slot_base_T, removed, side="right") - 1, "ttl")

    def _count_removed(self, tables_N: npt.NDArray[np.int64], reason: str) -> None:
        for table, count in zip(
            self.schema.tables, np.bincount(tables_N, minlength=len(self.schema.tables)), strict=True
        ):
            self.board.counter("livebed_evictions_total", table=table.name, reason=reason).inc(int(count))

    def _restore(self) -> int | None:
        """Begin from the newest good checkpoint, if there is one; returns how much of the log that had read."""
        loaded = load_latest(self.settings.checkpoint_path)
        for problem in loaded.problems:
            logger.error("checkpoint: %s", problem)
        if loaded.snapshot is None:
            return 0
        for note in restore(loaded.snapshot, self.tables, self.entities, self.state, self.settings.model):
            logger.warning("checkpoint: %s", note)
        progress = loaded.snapshot.progress
        self.place = Place(progress.position, progress.step, progress.watermark_us, progress.store_version)
        self.metrics.load_state(loaded.snapshot.metrics)
        logger.info("restored %s: step %d, log entry %s", loaded.path, progress.step, progress.position)
        return progress.num_read

    def _check_log(self, stop: threading.Event) -> None:
        """Nothing may be missing between the checkpoint and the log; waits for the broker to say so."""
        while not stop.is_set():
            try:
                self.log.check_position(self.place.entry_id, num_read=self._num_read)
            except LogTruncated as gap:
                self._go_on_after(gap)
            except (LogUnavailable, LogFull) as error:
                self._wait_for_broker(error)
                continue
            return

    def _go_on_after(self, gap: LogTruncated) -> None:
        """Entries are gone that nobody has learned from: end with the reason, or say it and go on, as configured."""
        if self.settings.stream.on_gap == "stop":
            raise gap
        self.place.entry_id = self.log.skip_gap()
        logger.error("%s; going on after %s (stream.on_gap: continue)", gap, self.place.entry_id)

    def _wait_for_broker(self, error: LivebedError) -> None:
        logger.warning("the event log does not answer, trying again: %s", error)
        self.writer.heartbeat(now_us(), None)
        time.sleep(RETRY_S)

    def _capture(self) -> Snapshot:
        place = self.place
        num_read = self.log.num_added_at(place.entry_id)
        progress = Progress(place.step, place.entry_id, place.version, place.watermark_us, num_read)
        model, metrics = self.settings.model, self.metrics.state()
        return capture(self.tables, self.entities, self.state, model, progress=progress, metrics=metrics)

    def _trim(self) -> None:
        """Drop from the log what every kept checkpoint has learned."""
        position = self.saver.oldest_position()
        try:
            if position is not None:
                self.log.trim_before(position)
        except (LogUnavailable, LogFull) as error:
            logger.warning("the log could not be trimmed, the next checkpoint tries again: %s", error)

    def _show_gauges(self) -> None:
        """Put what only changes slowly on the metric board, a few times a second."""
        if time.monotonic() < self._gauges_due_s:
            return
        self._gauges_due_s = time.monotonic() + GAUGES_EVERY_S
        gauge, recent = self.board.gauge, self.metrics.recent()
        gauge("livebed_progressive_auc").set(recent.auc)
        gauge("livebed_progressive_logloss").set(recent.logloss)
        gauge("livebed_calibration_ratio").set(recent.calibration_ratio)
        for table in self.schema.tables:
            gauge("livebed_table_rows", table=table.name).set(int(self.tables.num_rows_T[table.index]))
        try:
            gauge("livebed_stream_lag_entries").set(self.log.lag(self.place.entry_id))
        except (LogUnavailable, LogFull):
            return
