"""Replays a click log against a running system through its public HTTP API, in time order.

Each impression is scored before its label is sent, in slates of a few, so a served score is at most a few events
behind. What is known of an item (here a video's duration) is sent as a feature event some slates before the item's
first impression; the score request then names the item by id alone, and the service fills in the rest.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow.parquet as pq

from service.keepalive import KeepAlive
from trainer.settings import TIME_INPUT, CategoricalFeature, Settings

SLATE_ROWS: Final = 4
# Feature events go out this many slates ahead: some 50 ms at the demo's speed, several times what it takes them
# to become visible.
AHEAD_SLATES: Final = 16
HOUR_MS: Final = 3_600_000


@dataclass(frozen=True)
class Slate:
    """Impressions scored in one request; all of one hour, for one request has one time."""

    time_ms: int
    times_ms: list[int]
    rows: list[dict[str, Any]]
    labels: list[int]
    facts: list[dict[str, Any]]  # feature events about items that are seen here for the first time


@dataclass
class Outcome:
    """What came of a replay so far. One thread appends; readers take a length first and look no further."""

    labels: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    score_s: list[float] = field(default_factory=list)
    num_sent: int = 0  # labelled events accepted
    num_facts: int = 0  # feature events accepted
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class ClickLog:
    """A parquet file as slates of a configuration: which columns are sent with a score, and which as facts."""

    def __init__(self, settings: Settings, path: Path, *, time_column: str, slate_rows: int = SLATE_ROWS) -> None:
        """Read the file; columns that the configuration does not name are left out."""
        table = pq.read_table(path)
        self.num_rows = table.num_rows
        self._slate_rows = slate_rows
        self._times_ms: list[int] = table[time_column].to_pylist()
        self._labels: list[int] = table[settings.label.name].to_pylist()
        self._values = {name: table[name].to_pylist() for name in _inputs(settings, None) if name in table.column_names}
        self._entities = {}
        for entity, spec in settings.entities.items():
            key = _source(settings, spec.key)
            known = {name: table[name].to_pylist() for name in _inputs(settings, entity) if name in table.column_names}
            self._entities[entity] = (self._values[key], known)

    def slates(self) -> Iterator[Slate]:
        """All rows, in order."""
        seen: set[tuple[str, Any]] = set()
        begin = 0
        while begin < self.num_rows:
            end = min(begin + self._slate_rows, self.num_rows)
            hour = self._times_ms[begin] // HOUR_MS
            while self._times_ms[end - 1] // HOUR_MS != hour:
                end -= 1
            yield self._slate(begin, end, seen)
            begin = end

    def _slate(self, begin: int, end: int, seen: set[tuple[str, Any]]) -> Slate:
        names = list(self._values)
        rows = [
            dict(zip(names, row, strict=True))
            for row in zip(*(self._values[name][begin:end] for name in names), strict=True)
        ]
        facts = []
        for k in range(begin, end):
            for entity, (keys, known) in self._entities.items():
                if (entity, keys[k]) not in seen:
                    seen.add((entity, keys[k]))
                    features = {name: column[k] for name, column in known.items()}
                    facts.append({"entity": entity, "id": keys[k], "features": features, "time_ms": self._times_ms[k]})
        return Slate(self._times_ms[begin], self._times_ms[begin:end], rows, self._labels[begin:end], facts)


class Replay(threading.Thread):
    """The replay as a thread; `outcome` may be read while it runs. It ends with the log, at `stop`, or in time."""

    def __init__(self, log: ClickLog, host: str, port: int, *, rate: float | None, seconds: float | None) -> None:
        """rate: impressions a second (None: as fast as answers come). seconds: when to end (None: with the log)."""
        super().__init__(name="replay", daemon=True)
        self.outcome = Outcome()
        self._log = log
        self._http = KeepAlive(host, port)
        self._rate = rate
        self._seconds = seconds
        self._stop_asked = threading.Event()

    def stop(self) -> None:
        """End after the current slate."""
        self._stop_asked.set()

    def run(self) -> None:
        """Score, then send what happened, slate by slate."""
        started_s = time.monotonic()
        with self._http:
            slates = self._log.slates()
            ahead = list(islice(slates, AHEAD_SLATES))
            self._publish([], [fact for slate in ahead for fact in slate.facts])
            num_rows = 0
            while ahead and not self._over(started_s, num_rows):
                slate, upcoming = ahead.pop(0), next(slates, None)
                self._score(slate)
                if upcoming is not None:
                    ahead.append(upcoming)
                self._publish(_events(slate), upcoming.facts if upcoming is not None else [])
                num_rows += len(slate.rows)
                self.outcome.seconds = time.monotonic() - started_s

    def _over(self, started_s: float, num_rows: int) -> bool:
        """Wait until the next slate is due; True if the replay is to end instead."""
        due_s = started_s + num_rows / self._rate if self._rate else 0.0
        if self._seconds is not None and max(time.monotonic(), due_s) >= started_s + self._seconds:
            return True
        return self._stop_asked.wait(max(0.0, due_s - time.monotonic()))

    def _score(self, slate: Slate) -> None:
        begun_s = time.perf_counter()
        answer = self._post("/v1/score", {"rows": slate.rows, "time_ms": slate.time_ms}, wanted=200)
        if answer is None:
            return
        self.outcome.score_s.append(time.perf_counter() - begun_s)
        scores = answer["scores"]
        if len(scores) != len(slate.rows):
            self.outcome.errors[f"score: {len(scores)} scores for {len(slate.rows)} rows"] += 1
            return
        self.outcome.labels += slate.labels
        self.outcome.scores += scores

    def _publish(self, examples: list[dict[str, Any]], facts: list[dict[str, Any]]) -> None:
        if not examples and not facts:
            return
        answer = self._post("/v1/events", examples + facts, wanted=202)
        if answer is None:
            return
        rejected = answer["rejected"]
        for one in rejected:
            self.outcome.errors[f"event rejected: {one['code']}: {one['detail']}"] += 1
        refused_facts = sum(one["index"] >= len(examples) for one in rejected)
        self.outcome.num_facts += len(facts) - refused_facts
        self.outcome.num_sent += len(examples) - (len(rejected) - refused_facts)

    def _post(self, path: str, content: object, *, wanted: int) -> dict[str, Any] | None:
        """The decoded answer, or None after an error, which is counted."""
        try:
            status, body = self._http.post(path, msgspec.json.encode(content))
        except OSError as error:
            self.outcome.errors[f"{path}: {error}"] += 1
            return None
        if status != wanted:
            self.outcome.errors[f"{path}: {status} {body[:200].decode(errors='replace')}"] += 1
            return None
        answer: dict[str, Any] = msgspec.json.decode(body)
        return answer


def _events(slate: Slate) -> list[dict[str, Any]]:
    return [
        {"features": row, "label": label, "time_ms": time_ms}
        for row, label, time_ms in zip(slate.rows, slate.labels, slate.times_ms, strict=True)
    ]


def _inputs(settings: Settings, entity: str | None) -> Sequence[str]:
    """The inputs that a request gives itself (entity None), or that are kept for an entity."""
    sources = [spec.source or name for name, spec in settings.features.items() if spec.entity == entity]
    return [source for source in dict.fromkeys(sources) if source != TIME_INPUT]


def _source(settings: Settings, feature: str) -> str:
    spec = settings.features[feature]
    assert isinstance(spec, CategoricalFeature)  # noqa: S101 - the schema has checked an entity's key
    return spec.source or feature
