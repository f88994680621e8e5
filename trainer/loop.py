"""The trainer's main path, told from top to bottom: take -> learn -> guard -> publish -> checkpoint.

One thread, one order; only checkpoints are written beside it, at most one at a time, by a process of its own. The
numbers in `Trainer.step` mark the effects in the order in which they become visible; a crash between any two loses
nothing, for the position in the log moves on disk only with the tables it belongs to.
"""

import logging
import threading
import time
from collections import deque

import numpy as np
import numpy.typing as npt

from trainer.board import Board
from trainer.checkpoint import load, load_latest, path_of
from trainer.commands import Command, Forget
from trainer.control import ControlServer, Request
from trainer.errors import (
    CheckpointError,
    ControlRefused,
    LivebedError,
    LogFull,
    LogTruncated,
    LogUnavailable,
    SettingsError,
    StoreUnavailable,
)
from trainer.forgotten import ForgottenIds
from trainer.guard import Finding
from trainer.held import HeldSteps
from trainer.intake import Intake, Portion, Quiet
from trainer.operator_requests import answer
from trainer.outlet import Outlet, rolled_back_to
from trainer.quarantine import Quarantine
from trainer.saver import Saver
from trainer.settings import Settings
from trainer.snapshot import Snapshot
from trainer.stream import EventLog, parse_id
from trainer.training import Learned, TrainingState, describe
from trainer.warm import MODULES, warm

logger = logging.getLogger(__name__)

# How long a trainer without its broker waits before it asks again; readers meanwhile see the model age.
RETRY_S = 0.2
GAUGES_EVERY_S = 0.25
EXPIRE_SLOTS = 4096  # slots that one step sweeps for expired ids: some 10 us
STAGES = ("index", "learn", "publish")
US = 1_000_000


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
        if settings.store.num_shards != 1:
            raise SettingsError("store.num_shards", settings.store.num_shards, "1: one trainer writes one shard")
        self.settings = settings
        self.board = Board.open(settings.metrics_path, "trainer")
        self.saver = Saver(
            settings.checkpoint_path, settings.checkpoint, self.board, spared=lambda: rolled_back_to(settings)
        )
        self.state, self.restored_version = self._restored()
        self.engine_name = self.state.engine.name  # made now: what cannot be learned is said at the start
        self.log = EventLog(settings.stream.url, settings.stream.key)
        home = settings.data_dir / settings.name
        self.held_steps = HeldSteps(home / "held", settings.guard.keep)
        self.quarantine = Quarantine(home / "quarantine.json")
        self.forgotten = ForgottenIds(home / "forgotten.json")
        self.outlet = Outlet(settings, self.state, after_version=self.restored_version)
        self.num_rewinds = 0  # since the last checkpoint
        self._catch_up_to: str | None = None  # after a rewind: nothing is shown before this entry
        self._parts_done = 0  # of an entry that comes in several portions; 0: the place says all of what is learned
        self._num_searches = 0  # rewinds to find the entry that did harm, since the last checkpoint
        guard = settings.guard
        self._window_of = {"loss_spike": guard.loss_window, "calibration": guard.calibration_window}
        # Entries of the longest window, and their share of its labelled events.
        self._recent: deque[tuple[str, float]] = deque()
        self._recent_events = 0.0
        self._save_requests: list[Request] = []  # who waits for the next checkpoint, and for the one being written
        self._saving_for: list[Request] = []
        self._freshness = self.board.histogram("livebed_event_to_visible_seconds")
        self._applied = self.board.counter("livebed_events_applied_total")
        self._stages = {s: self.board.histogram("livebed_stage_duration_seconds", stage=s) for s in STAGES}
        self._gauges_due_s = 0.0

    def run(self, stop: threading.Event) -> None:
        """Show what was restored, then learn until told to stop; ends with a checkpoint."""
        for module in MODULES:  # from the cache: the first events do not wait for their kernels
            warm(module)
        self._check_log()
        self._open_outlet()
        self.control = ControlServer(self.settings.run_path)
        self.intake = self._intake()
        logger.info("learning from %s after entry %s", self.settings.stream.key, self.state.place.entry_id)
        try:
            while not stop.is_set():
                self.step()
            self.saver.finish(self.capture if self.may_save and self._parts_done == 0 else None)
        finally:
            self.control.close()
            self.intake.close()
            self.outlet.close()
            self.log.close()
            self.board.close()

    def step(self) -> None:
        """One turn of the loop."""
        for request in self.control.pending():
            answer(self, request)
        if not self.may_save:
            self._refuse_saves()
        self._reap()
        try:
            taken = self.intake.take()  # 1. what cannot be read is in the dead-letter stream
        except LogTruncated as gap:
            self._go_on_after(gap)
            return
        except (LogUnavailable, LogFull) as error:
            self._wait_for_broker(error)
            return
        if isinstance(taken, Portion):
            # 2. learned, 3. looked at by the guard, 4. visible to readers, 5. the place moved
            if not self._apply(taken):
                return  # gone back to before it
        else:
            self.state.saw_quiet(taken.read_us)
        self._sweep(taken)
        self.outlet.heartbeat(now_us(), self.state.place.watermark_us)
        if self.is_save_due:
            self._save()  # 6. a restart begins here
        self._show_gauges()

    def _apply(self, portion: Portion) -> bool:
        """Learn one portion, look at what that did, and show it; False if the trainer went back to before it."""
        if portion.command is not None:
            self._obey(portion.command, portion.last_id)
        elif portion.batch is not None:
            learned = self.state.learn(portion.batch)
            findings = self.state.judge(learned)
            if findings and self._hold(portion, findings):
                return False
            self.state.count(learned)
            self._show(learned)
            self._remember(portion)
        self._parts_done += 1
        if portion.is_whole:
            self._parts_done = 0
            self.state.moved_to(portion.last_id, portion.num_read)
        self._end_catching_up()
        return True

    def _remember(self, portion: Portion) -> None:
        """Keep the ids of the entries of the guard's windows, which count labelled events."""
        events = 0 if portion.batch is None else int((~np.isnan(portion.batch.labels_B)).sum())
        self._recent += [(entry_id, events / len(portion.entries)) for entry_id, _ in portion.entries]
        self._recent_events += events
        longest = max(self._window_of.values())
        while self._recent and self._recent_events - self._recent[0][1] >= longest:
            self._recent_events -= self._recent.popleft()[1]

    def _show(self, learned: Learned) -> None:
        """Publish a step, and count what it did."""
        started_s = time.perf_counter()
        report = self.outlet.publish(learned, self.state.place)
        self._stages["index"].observe(learned.index_s)
        self._stages["learn"].observe(learned.learn_s)
        self._stages["publish"].observe(time.perf_counter() - started_s)
        if report is not None and not report.held_dense:
            self._freshness.observe_many((now_us() - learned.batch.accepted_us_B) / US)
        if report is not None:
            self._count_held("dense_not_finite", int(report.held_dense))
            self._count_held("row_not_finite", report.held_rows)
            self._count_held("pair_not_finite", report.held_pairs)
        self._applied.inc(len(learned.batch))
        if learned.num_duplicates:
            self.board.counter("livebed_events_duplicate_total").inc(learned.num_duplicates)
        assignment = learned.assignment
        if len(assignment.evicted_tables_E):
            by_ttl_E = assignment.evicted_reason_E == 1
            self._count_removed(assignment.evicted_tables_E[by_ttl_E], "ttl")
            self._count_removed(assignment.evicted_tables_E[~by_ttl_E], None)
        if assignment.num_refused:
            self.board.counter("livebed_admissions_refused_total").inc(assignment.num_refused)

    def _obey(self, command: Command, entry_id: str) -> None:
        """A command in the log: forget an id, or resize a table, here and for the readers."""
        table = self.state.schema.table(command.table)
        assert table is not None  # noqa: S101 -- `commands.decode` has looked
        if isinstance(command, Forget):
            self.forgotten.add(entry_id, command.table, command.key)
            forgotten = self.state.forget(command)
            self.outlet.forget(table, command.key, forgotten, self.state.place)
            logger.info("an id of table %s is forgotten (%d rows)", command.table, len(forgotten.slots_N))
            return
        started_s = time.perf_counter()
        try:
            num_dropped = self.state.resize(command)
        except (SettingsError, MemoryError) as error:  # beyond the table's budget, or the machine's memory
            logger.error("table %s is not resized: %s", command.table, error)
            return
        if self.outlet.is_live:
            self._go_live()
        took_s = time.perf_counter() - started_s
        text = "table %s has %d slots now, %d ids had no room (%.2f s)"
        logger.info(text, command.table, command.capacity, num_dropped, took_s)

    def _hold(self, portion: Portion, findings: list[Finding]) -> bool:
        """Keep a harmful step from the readers; True if the trainer went back to before it.

        1. the step is kept for inspection   2. its entries are in quarantine   3. the state is that of the checkpoint
        """
        if self.outlet.mode == "held" and not self._catch_up_to:
            self._keep(portion, findings)
            return False  # nothing is shown anyway, and an operator knows
        guard, reasons = self.settings.guard, sorted({finding.reason for finding in findings})
        may_rewind = guard.on_hold == "rewind" and self.num_rewinds < guard.max_rewinds
        may_search = self._num_searches < guard.max_rewinds and not _is_of_a_window(findings)
        if may_rewind and may_search and len(portion.entries) > 1:
            self._num_searches += 1
            logger.warning("a step of %d entries does harm: looking for the one", len(portion.entries))
            self._rewind(portion.last_id, list(reasons), careful=True)
            return True
        self._keep(portion, findings)  # 1
        if not may_rewind:
            self._catch_up_to = None
            if self.outlet.mode != "rolled_back":
                self.outlet.hold(list(reasons))
            logger.error("nothing is shown until `livebed model release`, or `activate` of a checkpoint")
            return False
        self.num_rewinds += 1
        self.quarantine.add(self._to_blame(portion, findings))  # 2
        self._rewind(portion.last_id, list(reasons), careful=True)  # 3
        return True

    def _keep(self, portion: Portion, findings: list[Finding]) -> None:
        """Keep a harmful step with its events, and count it by reason."""
        self._count_findings(findings)
        place = self.state.place
        number = self.held_steps.keep(findings, list(portion.entries), step=place.step, position=place.entry_id)
        logger.error("step held back (%s), kept as held step %s: %s", portion.last_id, number, describe(findings))

    def _count_findings(self, findings: list[Finding]) -> None:
        for finding in findings:
            self._count_held(finding.reason, 1)

    def _to_blame(self, portion: Portion, findings: list[Finding]) -> list[str]:
        """Entries not to be learned again: of the step, or of the whole window where only that showed the harm."""
        blamed = [entry_id for entry_id, _ in portion.entries]
        if not _is_of_a_window(findings):
            return blamed
        left = 1.0 * max(self._window_of[finding.reason] for finding in findings)
        for entry_id, events in reversed(self._recent):
            if left <= 0:
                break
            blamed.append(entry_id)
            left -= events
        return blamed

    def _rewind(self, up_to: str, reasons: list[str], *, careful: bool) -> None:
        """Begin again from the newest checkpoint; readers keep what they have until all up to an entry is learned.

        `careful`: one entry a step up to there, so that only the one that does harm is blamed.
        """
        self.board.counter("livebed_guard_rewinds_total").inc()
        self.intake.close()
        if self.outlet.is_live:
            self.outlet.hold(reasons)
        self._catch_up_to = max(up_to, self._catch_up_to or up_to, key=parse_id)
        self.state, _ = self._restored()
        self._parts_done = 0
        self._recent.clear()
        self._recent_events = 0.0
        self.intake = self._intake(careful_to=self._catch_up_to if careful else None)
        logger.warning("went back to entry %s and learns again", self.state.place.entry_id)

    def _end_catching_up(self) -> None:
        """After a rewind: show the state again once it has come as far as it was."""
        if self._catch_up_to is None or parse_id(self.state.place.entry_id) < parse_id(self._catch_up_to):
            return
        self._catch_up_to = None
        if self.outlet.mode == "held":
            self._go_live()
        logger.warning("caught up at entry %s", self.state.place.entry_id)

    def _go_live(self) -> None:
        """Show the state in a new generation; where that cannot be, hold, for readers are served all the same."""
        try:
            self.outlet.release(self.state)
        except (ControlRefused, StoreUnavailable) as error:
            self.outlet.hold(["no_new_generation"])
            logger.error("nothing is shown until `livebed model release`: %s", error)

    @property
    def may_save(self) -> bool:
        """Whether a restart may begin from this state: not from one that must not be shown."""
        return self.outlet.is_live or self._catch_up_to is not None

    @property
    def is_save_due(self) -> bool:
        """Whether to write a checkpoint now."""
        asked = self._save_requests and not self.saver.is_running
        return bool(self.saver.is_due or asked) and self.may_save and self._parts_done == 0

    def ask_to_save(self, request: Request) -> None:
        """Write a checkpoint as soon as possible, and answer when it is on disk."""
        self._save_requests.append(request)

    def capture(self) -> Snapshot:
        """A copy of the state."""
        return self.state.capture(version=self.outlet.version)

    def _refuse_saves(self) -> None:
        """Who asked for a checkpoint before the hold is told; nobody waits for what will not come."""
        for request in self._save_requests:
            request.refuse("held", f"what is held back is not saved ({', '.join(self.outlet.reasons)})")
        self._save_requests = []

    def _save(self) -> None:
        self._trim()
        self._saving_for, self._save_requests = self._save_requests, []
        self.saver.start(self.capture)

    def _reap(self) -> None:
        """Look whether a checkpoint has been written, and tell who waits for it."""
        result = self.saver.poll()
        if result is None:
            return
        for request in self._saving_for:
            if result.error is not None:
                request.refuse("checkpoint_failed", result.error)
            else:
                request.answer(
                    checkpoint=result.number,
                    step=result.step,
                    position=result.position,
                    seconds=result.seconds,
                    pause_s=result.pause_s,
                )
        self._saving_for = []
        if result.error is None:
            self.num_rewinds = self._num_searches = 0
            if (oldest := self.saver.oldest_position()) is not None:
                self.quarantine.drop_before(oldest)
                self.forgotten.drop_before(oldest)

    def _count_held(self, reason: str, count: int) -> None:
        if count:
            self.board.counter("livebed_guard_held_total", reason=reason).inc(count)

    def _sweep(self, taken: Portion | Quiet) -> None:
        """Take expired ids out of tables and live store, a few at a time; by the log's time if deterministic."""
        now_s = now_us() // US
        if self.settings.deterministic:
            if not isinstance(taken, Portion) or taken.batch is None or not len(taken.batch):
                return
            now_s = int(taken.batch.accepted_us_B[-1]) // US
        removed = self.state.expire(now_s, EXPIRE_SLOTS)
        if len(removed):
            self.outlet.remove(removed, self.state.place)
            self._count_removed(np.searchsorted(self.state.tables.slot_base_T, removed, side="right") - 1, "ttl")

    def _count_removed(self, tables_N: npt.NDArray[np.int64], reason: str | None) -> None:
        """Count rows that left; without a reason they made room, by their table's policy."""
        tables = self.state.schema.tables
        for table, count in zip(tables, np.bincount(tables_N, minlength=len(tables)), strict=True):
            if count:
                named = reason or table.spec.eviction
                self.board.counter("livebed_evictions_total", table=table.name, reason=named).inc(int(count))

    def _restored(self) -> tuple[TrainingState, int]:
        """The state of the newest good checkpoint, or the first one; and the version readers had then."""
        directory = self.settings.checkpoint_path
        try:
            loaded = load_latest(directory)
        except CheckpointError:
            if not self.saver.is_running:
                raise
            time.sleep(RETRY_S)  # the one that it read has just been dropped for a newer one
            loaded = load_latest(directory)
        for problem in loaded.problems:
            logger.error("checkpoint: %s", problem)
        state, notes = TrainingState.from_snapshot(self.settings, loaded.snapshot)
        for note in notes:
            logger.warning("checkpoint: %s", note)
        if loaded.snapshot is None:
            return state, 0
        logger.info("restored %s: step %d, log entry %s", loaded.path, state.place.step, state.place.entry_id)
        return state, loaded.snapshot.progress.store_version

    def _check_log(self) -> None:
        """Nothing becomes visible of a trainer that cannot go on: raises LogTruncated. A dead broker can wait."""
        place = self.state.place
        try:
            self.log.check_position(place.entry_id, num_read=place.num_read)
        except LogTruncated:
            if self.settings.stream.on_gap == "stop":
                raise
        except (LogUnavailable, LogFull) as error:
            logger.warning("the event log does not answer yet: %s", error)

    def _open_outlet(self) -> None:
        """Show the restored state, or the checkpoint that an operator rolled back to."""
        number = rolled_back_to(self.settings)
        if number is None:
            self.outlet.release(self.state)
            return
        try:
            self.roll_back(number)
        except CheckpointError as error:
            logger.error("checkpoint %d cannot be served, what is learned is served instead: %s", number, error)
            self.outlet.release(self.state)

    def roll_back(self, number: int) -> int:
        """Serve a kept checkpoint. Returns the version. Raises CheckpointError if it cannot be read."""
        saved, _ = TrainingState.from_snapshot(self.settings, load(path_of(self.settings.checkpoint_path, number)))
        for table, key in self.forgotten.after(saved.place.entry_id):
            saved.forget(Forget(table, key))
        self._catch_up_to = None
        return self.outlet.roll_back(saved, number)

    def release(self) -> int:
        """Show what has been learned, whatever held it back. Returns the version."""
        self._catch_up_to = None
        return self.outlet.version if self.outlet.is_live else self.outlet.release(self.state)

    def _intake(self, careful_to: str | None = None) -> Intake:
        """Read on from where the state stands."""
        stream, place = self.settings.stream, self.state.place
        assert stream.url is not None  # noqa: S101 -- looked at in __init__
        return Intake(
            EventLog(stream.url, stream.key),
            self.state.schema,
            stream,
            self.board,
            after=place.entry_id,
            num_read=place.num_read,
            passed_over=self.quarantine,
            entry_by_entry=self.settings.deterministic,
            careful_to=careful_to,
            parts_done=self._parts_done,
        )

    def _go_on_after(self, gap: LogTruncated) -> None:
        """Entries are gone that nobody has learned from: end with the reason, or say it and go on, as configured."""
        if self.settings.stream.on_gap == "stop":
            raise gap
        self.intake.close()
        try:
            position, num_read = self.log.skip_gap(self.state.place.entry_id)
        except (LogUnavailable, LogFull) as error:
            self._wait_for_broker(error)
            return
        self.state.moved_to(position, num_read)
        logger.error("%s; going on after %s (stream.on_gap: continue)", gap, position)
        self.intake = self._intake()

    def _wait_for_broker(self, error: LivebedError) -> None:
        logger.warning("the event log does not answer, trying again: %s", error)
        self.intake.close()
        self.outlet.heartbeat(now_us(), 0)
        if self.is_save_due:
            self._save()
        time.sleep(RETRY_S)
        self.intake = self._intake()

    def _trim(self) -> None:
        """Drop from the log what every kept checkpoint has learned, and this run too: it may have gone back further."""
        oldest = self.saver.oldest_position()
        try:
            if oldest is not None:
                self.log.trim_before(min(oldest, self.state.place.entry_id, key=parse_id))
        except (LogUnavailable, LogFull) as error:
            logger.warning("the log could not be trimmed, the next checkpoint tries again: %s", error)

    def _show_gauges(self) -> None:
        """Put what only changes slowly on the metric board, a few times a second."""
        if time.monotonic() < self._gauges_due_s:
            return
        self._gauges_due_s = time.monotonic() + GAUGES_EVERY_S
        gauge, state = self.board.gauge, self.state
        recent = state.metrics.recent()
        gauge("livebed_progressive_auc").set(recent.auc)
        gauge("livebed_progressive_logloss").set(recent.logloss)
        gauge("livebed_calibration_ratio").set(recent.calibration_ratio)
        gauge("livebed_publishing_held").set(float(not self.outlet.is_live))
        for table in state.schema.tables:
            gauge("livebed_table_rows", table=table.name).set(state.tables.num_rows(table.index))
            gauge("livebed_table_bytes", table=table.name).set(state.tables.table_bytes(table.index))
        try:
            lag = self.log.lag(state.place.entry_id, num_read=state.place.num_read)
            gauge("livebed_stream_lag_entries").set(lag)
        except (LogUnavailable, LogFull):
            return


def _is_of_a_window(findings: list[Finding]) -> bool:
    """Whether only what many events did together shows the harm, and no one entry can be blamed."""
    return all(finding.reason in {"loss_spike", "calibration"} for finding in findings)
