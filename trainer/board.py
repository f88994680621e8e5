"""The metric board: counters, gauges and histograms in shared memory, right sums over processes.

Each process maps one file of its own, `<process>.board` in a directory all share, and adds to it in
place; whoever is asked for the metrics reads every file. Nothing is lost when a process is killed, and
one that starts again under its name counts on. All names are declared in `families.py`.

File: magic (8 bytes), layout (8), used bytes (8), then records of 8-byte words:
    number of key bytes << 32 | number of values; the key as JSON, padded; the values as float64
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from trainer.errors import LivebedError
from trainer.families import FAMILIES, Family, family_of

__all__ = ["CONTENT_TYPE", "FAMILIES", "Board", "Counter", "Gauge", "Histogram", "Snapshot", "read", "render"]

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
MAGIC: Final = b"LBBOARD1"
HEADER_BYTES: Final = 24
# Sparse, so only what is used costs memory: room for about 2,000 histograms. A label that needs more is
# none, and running into this bound says so.
FILE_BYTES: Final = 1 << 20
# A reader holds the lock for microseconds, a process being replaced for a little longer.
LOCK_WAIT_S: Final = 2.0
# A file written under other names or buckets is of another version: it is begun anew.
LAYOUT: Final = zlib.crc32(repr(sorted((f.name, f.kind, f.labels, f.buckets) for f in FAMILIES.values())).encode())

# Label values in the order of their family's labels.
SeriesKey = tuple[str, tuple[str, ...]]
Values = NDArray[np.float64]
# float64 in the mapping.
Place: TypeAlias = "memoryview[float]"


class Counter:
    """A number that only grows; its place on the board is one float64."""

    def __init__(self, values: Place, lock: threading.Lock) -> None:
        """Take the place and the lock of the board (several threads may count)."""
        self._values = values
        self._lock = lock

    def inc(self, amount: float = 1.0) -> None:
        """Add to it (about 0.4 us)."""
        with self._lock:
            self._values[0] += amount


class Gauge:
    """A number that is set; its place holds the value and when it was set."""

    def __init__(self, values: Place, lock: threading.Lock) -> None:
        """Take the place and the lock of the board."""
        self._values = values
        self._lock = lock

    def set(self, value: float) -> None:
        """Replace it."""
        with self._lock:
            self._values[0] = value
            self._values[1] = time.time()


class Histogram:
    """How many observations fell under each bound, and their sum."""

    def __init__(self, values: Place, lock: threading.Lock, bounds: tuple[float, ...]) -> None:
        """Take the place: the sum, then one count for each bucket, the last of which has no bound."""
        self._values = values
        self._lock = lock
        self._bounds = bounds
        self._bounds_array = np.array(bounds)
        self._array: Values = np.asarray(values)

    def observe(self, value: float) -> None:
        """Count one (about 0.6 us); NaN is no measurement and is left out."""
        if value != value:  # noqa: PLR0124 -- the fastest test for NaN
            return
        bucket = 1 + bisect_left(self._bounds, value)
        values = self._values
        with self._lock:
            values[bucket] += 1.0
            values[0] += value

    def observe_many(self, values_N: ArrayLike) -> None:
        """Count every value of an array; NaN is left out."""
        measured = np.asarray(values_N, dtype=np.float64).ravel()
        measured = measured[~np.isnan(measured)]
        buckets = np.searchsorted(self._bounds_array, measured, side="left")
        counts = np.bincount(buckets, minlength=len(self._bounds) + 1)
        with self._lock:
            self._array[1:] += counts
            self._array[0] += measured.sum()


class Board:
    """The file of one process. Ask for a metric once and keep it: asking costs microseconds.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> board = Board.open(directory, "worker-0")
    >>> board.counter("livebed_dead_letter_total", reason="bad_json").inc(2)
    >>> read(directory).value("livebed_dead_letter_total")
    2.0
    >>> board.close()
    """

    def __init__(self, file_fd: int, path: Path) -> None:
        """Take the locked file; `open` is the way in."""
        self.path = path
        self._fd = file_fd
        self._lock = threading.Lock()
        self._mapping = mmap.mmap(file_fd, FILE_BYTES)
        if not _is_ours(self._mapping):
            self._mapping[:] = bytes(FILE_BYTES)
            self._mapping[8:HEADER_BYTES] = LAYOUT.to_bytes(8, "little") + HEADER_BYTES.to_bytes(8, "little")
            self._mapping[:8] = MAGIC
        self._words = memoryview(self._mapping).cast("Q")
        self._floats = memoryview(self._mapping).cast("d")
        self._places = {key: place for key, place, _ in _records(memoryview(self._mapping))}

    @classmethod
    def open(cls, directory: Path, process: str) -> Self:
        """Open the board of a process by its name, which no other living process may hold."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{process}.board"
        file_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while not _locked(file_fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline_s:
                os.close(file_fd)
                raise LivebedError(f"the metric board {path} belongs to a living process: choose another name")
            time.sleep(0.005)
        os.ftruncate(file_fd, FILE_BYTES)
        return cls(file_fd, path)

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the counter of a declared name and these labels."""
        return Counter(self._place(family_of(name, "counter", labels), labels), self._lock)

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return the gauge of a declared name and these labels."""
        return Gauge(self._place(family_of(name, "gauge", labels), labels), self._lock)

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return the histogram of a declared name and these labels."""
        family = family_of(name, "histogram", labels)
        return Histogram(self._place(family, labels), self._lock, family.buckets)

    def close(self) -> None:
        """Give the name back. The counts stay in the file; the mapping goes with the last metric that uses it."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def _place(self, family: Family, labels: Mapping[str, str]) -> Place:
        """Return where a series lies, making it if it is new."""
        key = (family.name, tuple(labels[label] for label in family.labels))
        with self._lock:
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = self._append(key, family.num_values)
        return self._floats[place : place + family.num_values]

    def _append(self, key: SeriesKey, num_values: int) -> int:
        """Add a record of zeros; return the word at which its values begin."""
        text = json.dumps([key[0], *key[1]]).encode()
        begin, key_words = self._words[2] // 8, -(-len(text) // 8)
        place = begin + 1 + key_words
        if (place + num_values) * 8 > FILE_BYTES:
            raise LivebedError(f"the metric board {self.path} is full at {key}: some label takes too many values")
        self._words[begin] = len(text) << 32 | num_values
        self._mapping[(begin + 1) * 8 : (begin + 1) * 8 + len(text)] = text
        # Last: whoever reads sees no record, or all of it.
        self._words[2] = (place + num_values) * 8
        return place


@dataclass(frozen=True)
class Snapshot:
    """What all processes of a directory had counted at one moment.

    Labels left out of a question are summed over: `value("livebed_evictions_total", table="items")`.
    """

    series: Mapping[SeriesKey, Values]

    def value(self, name: str, **labels: str) -> float:
        """Return a counter's total or a gauge's value; of what was never counted 0, of what was never set NaN."""
        matching = [values[0] for _, values in self._matching(name, labels)]
        return float(sum(matching)) if matching or FAMILIES[name].kind != "gauge" else math.nan

    def count(self, name: str, **labels: str) -> int:
        """Return how many observations a histogram has."""
        return int(self._histogram(name, labels)[1:].sum())

    def mean(self, name: str, **labels: str) -> float:
        """Return a histogram's mean, NaN when it is empty."""
        values = self._histogram(name, labels)
        return float(values[0] / values[1:].sum()) if values[1:].any() else math.nan

    def quantile(self, name: str, q: float, **labels: str) -> float:
        """Return a histogram's quantile, linear within its bucket; NaN when empty, the last bound beyond it."""
        counts = self._histogram(name, labels)[1:]
        if not counts.any():
            return math.nan
        bounds = (0.0, *FAMILIES[name].buckets, FAMILIES[name].buckets[-1])
        below = np.concatenate(([0.0], np.cumsum(counts)))
        rank = q * below[-1]
        bucket = min(int(np.searchsorted(below[1:], rank, side="left")), len(counts) - 1)
        share = (rank - below[bucket]) / counts[bucket] if counts[bucket] else 0.0
        return float(bounds[bucket] + share * (bounds[bucket + 1] - bounds[bucket]))

    def since(self, earlier: "Snapshot") -> "Snapshot":
        """Return what was counted after an earlier snapshot; gauges stay as they are."""
        return Snapshot(
            {
                key: values if FAMILIES[key[0]].kind == "gauge" else values - earlier.series.get(key, np.zeros(1))
                for key, values in self.series.items()
            }
        )

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterator[tuple[SeriesKey, Values]]:
        wanted = {FAMILIES[name].labels.index(label): value for label, value in labels.items()}
        for key, values in self.series.items():
            if key[0] == name and all(key[1][index] == value for index, value in wanted.items()):
                yield key, values

    def _histogram(self, name: str, labels: Mapping[str, str]) -> Values:
        if FAMILIES[name].kind != "histogram":
            raise ValueError(f"{name} is a {FAMILIES[name].kind}, not a histogram")
        return sum((values for _, values in self._matching(name, labels)), np.zeros(FAMILIES[name].num_values))


def read(directory: Path) -> Snapshot:
    """Sum the boards of all processes, those that are gone included (about 50 us a file)."""
    series: dict[SeriesKey, Values] = {}
    for path in sorted(directory.glob("*.board")):
        lives, records = _read_file(path)
        for key, values in records:
            family = FAMILIES[key[0]]
            # What a process that is gone was last busy with is no longer so.
            if family.kind == "gauge" and family.combine != "latest" and not lives:
                continue
            series[key] = _combined(family, series[key], values) if key in series else values
    return Snapshot(series)


def render(directory: Path) -> bytes:
    """Return all metrics in Prometheus' text format, of type `CONTENT_TYPE`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exposition(read(directory)))
    return generate_latest(registry)


class _Exposition(Collector):
    """A snapshot as Prometheus metric families."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield every family, those without a series too, so that a dashboard finds its names."""
        for name, family in FAMILIES.items():
            found = [(key[1], values) for key, values in self._snapshot.series.items() if key[0] == name]
            if not found and family.kind != "gauge" and not family.labels:
                found = [((), np.zeros(family.num_values))]
            yield _metric(family, found)


def _metric(family: Family, found: list[tuple[tuple[str, ...], Values]]) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels, unit=family.unit)
        bounds = [*map(floatToGoString, family.buckets), "+Inf"]
        for labels, values in found:
            histogram.add_metric(
                labels, list(zip(bounds, np.cumsum(values[1:]).tolist(), strict=True)), float(values[0])
            )
        return histogram
    plain = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = plain(family.name, family.help, labels=family.labels, unit=family.unit)
    for labels, values in found:
        metric.add_metric(labels, float(values[0]))
    return metric


def _combined(family: Family, one: Values, other: Values) -> Values:
    """Put two processes' values of one series together."""
    if family.kind != "gauge" or family.combine == "sum":
        return one + other
    index = 1 if family.combine == "latest" else 0
    return max(one, other, key=lambda values: float(values[index]))


def _read_file(path: Path) -> tuple[bool, list[tuple[SeriesKey, Values]]]:
    """Return whether the file's process lives, and a copy of its series."""
    with path.open("rb") as file:
        lives = not _locked(file.fileno(), fcntl.LOCK_SH)
        header = file.read(HEADER_BYTES)
        if not _is_ours(header):
            return lives, []
        view = memoryview(header + file.read(int.from_bytes(header[16:], "little") - HEADER_BYTES))
    return lives, [(key, np.frombuffer(view, np.float64, count, place * 8)) for key, place, count in _records(view)]


def _records(view: memoryview) -> Iterator[tuple[SeriesKey, int, int]]:
    """Yield the key of each record, the word where its values begin, and their number."""
    words = view.cast("Q")
    word, end = HEADER_BYTES // 8, words[2] // 8
    while word < end:
        key_bytes, count = words[word] >> 32, words[word] & 0xFFFFFFFF
        name, *labels = json.loads(bytes(view[(word + 1) * 8 : (word + 1) * 8 + key_bytes]))
        place = word + 1 + -(-key_bytes // 8)
        yield (name, tuple(labels)), place, count
        word = place + count


def _is_ours(content: bytes | mmap.mmap) -> bool:
    """Say whether a board's first bytes show this version's layout."""
    return content[:16] == MAGIC + LAYOUT.to_bytes(8, "little")


def _locked(file_fd: int, mode: int) -> bool:
    """Try to lock without waiting; the lock goes with the descriptor."""
    try:
        fcntl.flock(file_fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
