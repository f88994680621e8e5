"""The metric board: counters, gauges and histograms in shared memory, right sums over processes.

Each process maps one file of its own, `<process>.board` in a directory all share, and adds to it in
place; whoever is asked for the metrics reads every file. Nothing is lost when a process is killed, and
one that starts again under its name counts on. All names are declared in `FAMILIES`.

File: magic (8 bytes), layout (8), used bytes (8), then records of 8-byte words:
    word 0: number of key bytes << 32 | number of values    key: JSON, padded    values: float64
    values of a counter: total; of a gauge: value, Unix time; of a histogram: sum, then a count a bucket
A record is written before `used` moves past it, and a value is one aligned 8-byte store, so a reader in
another process sees whole numbers (though perhaps a histogram's count one event before its sum).
"""

import fcntl
import json
import math
import mmap
import os
import threading
import time
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from trainer.errors import LivebedError

Kind = Literal["counter", "gauge", "histogram"]
# Over processes, a gauge is the sum or the largest of the living ones, or what was set last by any.
Combine = Literal["sum", "max", "latest"]
Labels = tuple[tuple[str, str], ...]

MAGIC: Final = b"LBBOARD1"
HEADER_BYTES: Final = 24
# Sparse, so only what is used costs memory: room for about 2,000 histograms. A label that needs more is
# not a label, and running into this says so.
FILE_BYTES: Final = 1 << 20
LOCK_WAIT_S: Final = 2.0

# Bounds in seconds. Dense where the goals lie, so that a quantile read from buckets is within a few percent.
FRESHNESS_S: Final = (
    *(0.0005, 0.00075, 0.001, 0.00125, 0.0015, 0.00175, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045, 0.005),
    *(0.006, 0.007, 0.008, 0.009, 0.01, 0.011, 0.012, 0.014, 0.016, 0.018, 0.02, 0.0225, 0.025, 0.0275, 0.03),
    *(0.035, 0.04, 0.045, 0.05, 0.06, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
REQUEST_S: Final = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01),
    *(0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
STAGE_S: Final = tuple(base * 10.0**power for power in range(-6, 0) for base in (1.0, 2.0, 5.0))
CHECKPOINT_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True)
class Family:
    """One metric: what it counts, in which unit, under which labels."""

    name: str
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    combine: Combine = "latest"

    @property
    def num_values(self) -> int:
        """How many float64 one series takes on the board."""
        return {"counter": 1, "gauge": 2, "histogram": len(self.buckets) + 2}[self.kind]


FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        Family(
            "livebed_event_to_visible_seconds",
            "histogram",
            "Time from an event's acceptance to its effect in the live store.",
            unit="seconds",
            buckets=FRESHNESS_S,
        ),
        Family(
            "livebed_model_age_seconds",
            "gauge",
            "Now minus the newest event that the served model has learned.",
            unit="seconds",
            combine="max",
        ),
        Family(
            "livebed_request_duration_seconds",
            "histogram",
            "Time from a request's arrival to its answer, by route template and outcome.",
            unit="seconds",
            labels=("face", "route", "code"),
            buckets=REQUEST_S,
        ),
        Family(
            "livebed_queue_wait_seconds",
            "histogram",
            "Time a request waited for its turn.",
            unit="seconds",
            labels=("queue",),
            buckets=REQUEST_S,
        ),
        Family(
            "livebed_stage_duration_seconds",
            "histogram",
            "Time of one stage of the trainer's step.",
            unit="seconds",
            labels=("stage",),
            buckets=STAGE_S,
        ),
        Family(
            "livebed_checkpoint_duration_seconds",
            "histogram",
            "Time to write one checkpoint, on disk.",
            unit="seconds",
            buckets=CHECKPOINT_S,
        ),
        Family(
            "livebed_rejected_requests_total",
            "counter",
            "Requests refused before any work, by reason.",
            labels=("reason",),
        ),
        Family(
            "livebed_embedding_lookups_total",
            "counter",
            "Rows looked up, by table and by what was found.",
            labels=("table", "status"),
        ),
        Family("livebed_events_received_total", "counter", "Events that arrived at the service."),
        Family("livebed_events_accepted_total", "counter", "Events written to the log."),
        Family("livebed_events_duplicate_total", "counter", "Events whose event_id was seen within the window."),
        Family("livebed_events_rejected_total", "counter", "Events refused one by one, the rest of their batch kept."),
        Family("livebed_events_applied_total", "counter", "Events applied by the trainer."),
        Family(
            "livebed_dead_letter_total",
            "counter",
            "Entries of the log that could not be learned from, by reason.",
            labels=("reason",),
        ),
        Family(
            "livebed_evictions_total",
            "counter",
            "Rows removed from a table, by reason.",
            labels=("table", "reason"),
        ),
        Family(
            "livebed_guard_held_total",
            "counter",
            "Publishes or rows held back because they were unsafe, by reason.",
            labels=("reason",),
        ),
        Family("livebed_table_rows", "gauge", "Rows in use.", labels=("table",)),
        Family("livebed_table_bytes", "gauge", "Memory of a table.", unit="bytes", labels=("table",)),
        Family("livebed_stream_lag_entries", "gauge", "Entries of the log that the trainer has not read."),
        Family("livebed_progressive_logloss", "gauge", "Logloss of predictions made before learning, recent."),
        Family("livebed_progressive_auc", "gauge", "AUC of predictions made before learning, recent."),
        Family("livebed_calibration_ratio", "gauge", "Mean prediction over mean label, recent.", unit="ratio"),
        Family("livebed_build_info", "gauge", "Always 1; the labels say what runs.", labels=("version",)),
    )
}
# A file written under other names or buckets is of another version: it is begun anew.
LAYOUT: Final = zlib.crc32(repr(sorted((f.name, f.kind, f.labels, f.buckets) for f in FAMILIES.values())).encode())


def family_of(name: str, kind: Kind, labels: Mapping[str, str]) -> Family:
    """Return the family, or refuse a name, a kind or labels that are not as declared."""
    family = FAMILIES.get(name)
    if family is None or family.kind != kind:
        raise ValueError(f"no {kind} is called {name}: metrics are declared in trainer/board.py")
    if set(labels) != set(family.labels):
        raise ValueError(f"{name} has the labels {list(family.labels)}, got {sorted(labels)}")
    return family


class Counter:
    """A number that only grows."""

    def __init__(self, values: memoryview, lock: threading.Lock) -> None:
        """Take the place on the board: one float64."""
        self._values = values
        self._lock = lock

    def inc(self, amount: float = 1.0) -> None:
        """Add to it (about 0.2 us)."""
        with self._lock:
            self._values[0] += amount


class Gauge:
    """A number that is set."""

    def __init__(self, values: memoryview, lock: threading.Lock) -> None:
        """Take the place on the board: the value and when it was set."""
        self._values = values
        self._lock = lock

    def set(self, value: float) -> None:
        """Replace it."""
        with self._lock:
            self._values[0] = value
            self._values[1] = time.time()


class Histogram:
    """How many observations fell under each bound, and their sum."""

    def __init__(self, values: memoryview, lock: threading.Lock, bounds: tuple[float, ...]) -> None:
        """Take the place on the board: the sum, then one count a bucket, the last without a bound."""
        self._values = values
        self._lock = lock
        self._bounds = bounds
        self._bounds_array = np.array(bounds)
        self._array = np.frombuffer(values, dtype=np.float64)

    def observe(self, value: float) -> None:
        """Count one (about 0.5 us); NaN is not a measurement and is left out."""
        if math.isnan(value):
            return
        bucket = 1 + bisect_left(self._bounds, value)
        with self._lock:
            self._values[bucket] += 1.0
            self._values[0] += value

    def observe_many(self, values_N: ArrayLike) -> None:
        """Count all of an array; NaN is left out."""
        measured = np.asarray(values_N, dtype=np.float64).ravel()
        measured = measured[~np.isnan(measured)]
        buckets = np.searchsorted(self._bounds_array, measured, side="left")
        counts = np.bincount(buckets, minlength=len(self._bounds) + 1)
        with self._lock:
            self._array[1:] += counts
            self._array[0] += measured.sum()


class Board:
    """The file of one process. Ask once for a metric and keep it: the asking takes microseconds.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> board = Board.open(directory, "worker-0")
    >>> board.counter("livebed_dead_letter_total", reason="bad_json").inc(2)
    >>> board.close()
    >>> read(directory).value("livebed_dead_letter_total")
    2.0
    """

    def __init__(self, file_fd: int, path: Path) -> None:
        """Take a locked descriptor of the file; see `open`."""
        self.path = path
        self._fd = file_fd
        self._lock = threading.Lock()
        self._mapping = mmap.mmap(file_fd, FILE_BYTES)
        if bytes(self._mapping[:16]) != MAGIC + LAYOUT.to_bytes(8, "little"):
            self._mapping[:] = bytes(FILE_BYTES)
            self._mapping[8:24] = LAYOUT.to_bytes(8, "little") + HEADER_BYTES.to_bytes(8, "little")
            self._mapping[:8] = MAGIC
        self._words = memoryview(self._mapping).cast("Q")
        self._floats = memoryview(self._mapping).cast("d")
        self._places = {record.key: record.place for record in _records(self._mapping)}
        self._metrics: dict[tuple[str, Labels], Counter | Gauge | Histogram] = {}

    @classmethod
    def open(cls, directory: Path, process: str) -> "Board":
        """Open the board of a process by its name, which no other living process may use."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{process}.board"
        file_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while not _try_lock(file_fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline_s:
                os.close(file_fd)
                raise LivebedError(f"the metric board {path} belongs to another living process: use another name")
            time.sleep(0.005)
        os.ftruncate(file_fd, FILE_BYTES)
        return cls(file_fd, path)

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the counter of a declared name and these labels."""
        metric = self._metric(family_of(name, "counter", labels), labels)
        assert isinstance(metric, Counter)  # noqa: S101 -- family_of has looked at the kind
        return metric

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return the gauge of a declared name and these labels."""
        metric = self._metric(family_of(name, "gauge", labels), labels)
        assert isinstance(metric, Gauge)  # noqa: S101 -- family_of has looked at the kind
        return metric

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return the histogram of a declared name and these labels."""
        metric = self._metric(family_of(name, "histogram", labels), labels)
        assert isinstance(metric, Histogram)  # noqa: S101 -- family_of has looked at the kind
        return metric
