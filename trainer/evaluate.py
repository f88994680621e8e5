"""Progressive validation of a click log: predict each event, then learn it, over the whole file in time order.

The same tables, engine and metrics as in the trainer, without a broker. The figure is honest by construction: no
event is learned before it has been predicted.
"""

import time as clock
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trainer.dense import LearnerState
from trainer.engines import build_engine
from trainer.errors import SettingsError
from trainer.events import derive
from trainer.metrics import summary
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.table_file import chunks, read_table
from trainer.tables import Tables

STEP_ROWS = 4096  # rows a kernel call; long enough to hide its cost, short enough to show progress

Progress = Callable[[int, int], None]


def evaluate(
    settings: Settings,
    path: Path,
    *,
    label: str,
    time: str | None = None,
    batch: int | None = None,
    max_rows: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Validate a file progressively and return the figures.

    batch: events predicted before they are learned in one update; none: one by one on the event engine, the
    stream's max_batch on the torchrec engine. progress: called with (rows done, rows in all).

    Returns auc, logloss, ne (logloss over that of the running base rate), calibration (mean prediction over mean
    label), events, events_per_s (reading and hashing included), rows per table, engine, batch.

    Raises:
        SettingsError: the file or one of its columns cannot be used.
    """
    started = clock.perf_counter()
    schema = Schema.from_settings(settings)
    tables = Tables(schema, settings.model)
    engine = build_engine(settings, schema, tables, LearnerState.initial(schema, settings.model))
    micro_batch = batch or (1 if engine.name == "event" else settings.stream.max_batch)
    step = max(1, STEP_ROWS // micro_batch) * micro_batch
    read_started = clock.perf_counter()
    table = read_table(path, time=time, max_rows=max_rows)
    all_labels, all_logits, done = [], [], 0
    for chunk in chunks(schema, table, label=label, time=time):
        features = derive(schema, chunk.inputs, chunk.time_ms_B)
        for start in range(0, len(features), step):
            rows = features.rows(start, start + step)
            labels_B = chunk.labels_B[start : start + step]
            now_s = int(chunk.time_ms_B[start] // 1000)
            assignment = tables.assign(rows, None, now_s)
            all_logits.append(engine.learn(assignment.slots_BC, rows, labels_B, micro_batch=micro_batch))
            all_labels.append(labels_B)
            done += len(rows)
            if progress is not None:
                progress(done, table.num_rows)
    run_s = clock.perf_counter() - read_started
    if not done:
        raise SettingsError("data", got=f"{path} without rows", wanted="at least one event")
    return {
        **asdict(summary(np.concatenate(all_labels), np.concatenate(all_logits))),
        "events": done,
        "events_per_s": done / run_s,
        "seconds": run_s,
        "setup_seconds": read_started - started,
        "rows": {t.name: len(tables.occupied(t.index)) for t in schema.tables},
        "engine": engine.name,
        "batch": micro_batch,
        "label": label,
    }
