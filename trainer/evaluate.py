"""Progressive validation of a click log: predict each event, then learn it, over the whole file in time order.

The same tables, engine and metrics as in the trainer, without a broker. The figure is honest by construction: no
event is learned before it has been predicted, and with a delay not before so many more have been.
"""

import time as clock
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.dense import LearnerState
from trainer.engines import Engine, build_engine
from trainer.errors import SettingsError
from trainer.events import Features, derive
from trainer.metrics import event_losses, summary
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.table_file import chunks, read_table
from trainer.tables import Tables
from trainer.warm import warm

STEP_ROWS = 4096  # rows a kernel call; long enough to hide its cost, short enough to show progress
# Events whose loss differences count as one: neighbours are alike, so that single events would look too sure.
BLOCK_EVENTS = 256

Progress = Callable[[int, int], None]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Validation:
    """What came of one log: the figures, and what they were made of. rows_over_time: (events done, rows by table)."""

    figures: dict[str, Any]
    labels_N: Float32s
    logits_N: Float32s
    rows_over_time: list[tuple[int, dict[str, int]]]


def evaluate(settings: Settings, path: Path, **options: Any) -> dict[str, Any]:
    """The figures of `validate`, which takes the same options."""
    return validate(settings, path, **options).figures


def validate(
    settings: Settings,
    path: Path,
    *,
    label: str,
    time: str | None = None,
    batch: int | None = None,
    delay: int = 0,
    max_rows: int | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Validate a file progressively.

    batch: events predicted before they are learned in one update; none: one by one on the event engine, the
    stream's max_batch on the torchrec engine. delay: so many events (whole batches of them are rounded up) come between
    an event's prediction and its learning; ids are placed when they are learned, and until then read zeros, as in
    serving. progress: called with (rows done, rows in all).

    Figures: auc, logloss, ne (logloss over that of the running base rate), calibration (mean prediction over mean
    label), events, events_per_s (reading and hashing included), rows per table, engine, batch, delay.

    Raises:
        SettingsError: the file, one of its columns or an option cannot be used.
    """
    _check_options(batch=(batch, 1), delay=(delay, 0), max_rows=(max_rows, 1))
    started = clock.perf_counter()
    for module in ("hashing", "events", "tables", "engine_event"):  # no run pays for the kernels of all
        warm(module)
    schema = Schema.from_settings(settings)
    tables = Tables(schema, settings.model)
    engine = build_engine(settings, schema, tables, LearnerState.initial(schema, settings.model))
    micro_batch = batch or (1 if engine.name == "event" else settings.stream.max_batch)
    learner = _Learner(tables, engine, micro_batch, delay)
    read_started = clock.perf_counter()
    table = read_table(path, time=time, max_rows=max_rows)
    all_labels, all_logits, done, rows_over_time = [], [], 0, []
    for features, labels_B, now_s in _steps(schema, table, label, time, max(1, STEP_ROWS // micro_batch) * micro_batch):
        all_logits.append(learner.step(features, labels_B, now_s))
        all_labels.append(labels_B)
        done += len(features)
        rows_over_time.append((done, {t.name: tables.num_rows(t.index) for t in schema.tables}))
        if progress is not None:
            progress(done, table.num_rows)
    run_s = clock.perf_counter() - read_started
    if not done:
        raise SettingsError("data", got=f"{path} without rows", wanted="at least one event")
    labels_N, logits_N = np.concatenate(all_labels), np.concatenate(all_logits)
    figures = {
        **asdict(summary(labels_N, logits_N)),
        "events": done,
        "events_per_s": done / run_s,
        "seconds": run_s,
        "setup_seconds": read_started - started,
        "rows": rows_over_time[-1][1],
        "engine": engine.name,
        "batch": micro_batch,
        "delay": delay,
        "label": label,
    }
    return Validation(figures, labels_N, logits_N, rows_over_time)


def compare(one: Validation, other: Validation) -> dict[str, float]:
    """How much the second differs from the first on the same events: differences of figures, and of logloss by event.

    The standard error is that of the mean over blocks of BLOCK_EVENTS neighbouring events, for neighbours are alike; a
    difference of less than two of them may be chance.
    """
    if not np.array_equal(one.labels_N, other.labels_N):
        raise SettingsError(
            "label", got="other outcomes of the same events", wanted="one label, and one threshold, for all"
        )
    differences_N = event_losses(other.labels_N, other.logits_N) - event_losses(one.labels_N, one.logits_N)
    whole = len(differences_N) // BLOCK_EVENTS * BLOCK_EVENTS
    blocks_K = differences_N[:whole].reshape(-1, BLOCK_EVENTS).mean(axis=1)
    error = float(blocks_K.std(ddof=1) / np.sqrt(len(blocks_K))) if len(blocks_K) > 1 else float("nan")
    names = ("auc", "logloss", "ne", "calibration")
    return {
        **{name: float(other.figures[name] - one.figures[name]) for name in names},
        "events_per_s_ratio": float(other.figures["events_per_s"] / one.figures["events_per_s"]),
        "logloss_mean_difference": float(differences_N.mean()),
        "logloss_standard_error": error,
    }


def _check_options(**options: tuple[int | None, int]) -> None:
    """Of each: the value, and the least that it may be."""
    for name, (value, least) in options.items():
        if value is not None and value < least:
            raise SettingsError(name, got=value, wanted=f"at least {least}")


class _Learner:
    """Predicts and learns in steps; with a delay, what was predicted waits in a queue of that many events."""

    def __init__(self, tables: Tables, engine: Engine, micro_batch: int, delay: int) -> None:
        self._tables, self._engine, self._micro_batch, self._delay = tables, engine, micro_batch, delay
        self._waiting: deque[tuple[Features, Float32s, int]] = deque()  # at most `delay` events and a micro-batch
        self._num_waiting = 0

    def step(self, features: Features, labels_B: Float32s, now_s: int) -> Float32s:
        """Logits of some events, each made before it was learned."""
        if self._delay == 0:
            return self._learn(features, labels_B, now_s)
        logits = []
        for start in range(0, len(features), self._micro_batch):
            rows = features.rows(start, start + self._micro_batch)
            labels = labels_B[start : start + self._micro_batch]
            logits.append(self._engine.predict(self._find(rows), rows))
            self._waiting.append((rows, labels, now_s))
            self._num_waiting += len(rows)
            while self._num_waiting - len(self._waiting[0][0]) >= self._delay:
                oldest = self._waiting.popleft()
                self._num_waiting -= len(oldest[0])
                self._learn(*oldest)
        return np.concatenate(logits)

    def _learn(self, features: Features, labels_B: Float32s, now_s: int) -> Float32s:
        assignment = self._tables.assign(features, None, now_s)
        return self._engine.learn(assignment.slots_BC, features, labels_B, micro_batch=self._micro_batch)

    def _find(self, features: Features) -> npt.NDArray[np.int64]:
        """Slots as serving would find them: asking places nothing."""
        table_C = self._tables.schema.column_table_C
        slots_BC = np.empty(features.ids_BC.shape, np.int64)
        for t in np.unique(table_C).tolist():
            columns = table_C == t
            ids = np.ascontiguousarray(features.ids_BC[:, columns])
            slots_BC[:, columns] = self._tables.find(t, ids.reshape(-1)).reshape(ids.shape)
        return slots_BC


def _steps(
    schema: Schema, table: Any, label: str, time: str | None, size: int
) -> Iterator[tuple[Features, Float32s, int]]:
    """Features, labels and the time (s) of up to `size` rows at a time, in order."""
    for chunk in chunks(schema, table, label=label, time=time):
        features = derive(schema, chunk.inputs, chunk.time_ms_B)
        for start in range(0, len(features), size):
            labels_B = chunk.labels_B[start : start + size]
            yield features.rows(start, start + size), labels_B, int(chunk.time_ms_B[start] // 1000)
