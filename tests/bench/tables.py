"""Tables on an endless stream of ids: does a small table learn as well as one that keeps every id, in flat memory?

    python -m tests.bench.tables [--json] [--quick]

The stream: one id an event. Half of the events are of ids that never come again; the others are drawn by Zipf's law
from a fixed set, whose more frequent half has a planted signal: the label of each such id leans to one side, by an
amount of its own. (The rest of the ids carry no signal, as an id that hardly ever comes again cannot teach it.) Each
event is predicted before it is learned, by the event engine; a table of 100,000 rows with every eviction and admission
policy against one with a row for every id there is. After every so many events ids are looked up in the live store,
where they must be exactly as the trainer has them, and the resident memory is read.

Then the index alone: ns an id found, inserted, and inserted where another must go; beside a static lookup with numpy.
"""

import os
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.harness import arguments, emit, goal
from trainer.budget import Costs, training_bytes
from trainer.dense import LearnerState
from trainer.engine_event import EventEngine
from trainer.entities import Entities, EntityChanges
from trainer.events import Features
from trainer.live import LEARNED, Reader, Writer
from trainer.metrics import summary
from trainer.publish import Publisher, layout_for, row_section
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.tables import Ids, Tables

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

BATCH = 256  # events a step, as the trainer takes them
WIDTH = 4
LOOKUPS = 64  # ids looked up in the live store at every check
ADMISSIONS: dict[str, dict[str, Any]] = {
    "all": {"kind": "all"},
    "probability": {"kind": "probability", "probability": 0.25},
    "count": {"kind": "count"},
}
NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class Stream:
    """Ids and labels in order, and how many ids differ."""

    ids_N: Int64s
    labels_N: Float32s
    num_ids: int


def make_stream(num_ids: int, *, regulars: int, seed: int = 0) -> Stream:
    """`num_ids` ids that differ, all but `regulars` of them seen once; as many events again of the regulars."""
    random = np.random.default_rng(seed)
    once = num_ids - regulars
    shares = 1 / np.arange(1, regulars + 1) ** 1.05
    drawn = np.searchsorted(np.cumsum(shares / shares.sum()), random.random(once)).clip(max=regulars - 1)
    ids_N = np.empty(2 * once, np.int64)
    is_once_N = np.zeros(2 * once, np.bool_)
    is_once_N[:once] = True
    random.shuffle(is_once_N)
    ids_N[is_once_N] = np.arange(regulars, num_ids)
    ids_N[~is_once_N] = drawn
    leanings = np.where(np.arange(regulars) < regulars // 2, random.normal(0, 1.5, regulars), 0.0)
    logits_N = np.full(2 * once, -1.0)
    logits_N[~is_once_N] += leanings[drawn]
    labels_N = (random.random(2 * once) < 1 / (1 + np.exp(-logits_N))).astype(np.float32)
    return Stream(ids_N, labels_N, len(np.unique(ids_N)))


def configuration(capacity: int, **table: Any) -> Settings:
    """One table, read by one feature; a small network over it."""
    model = {"hidden": [4], "cross_layers": 0}
    return Settings.model_validate(
        {
            "tables": {"id": {"width": WIDTH, "capacity": capacity, **table}},
            "features": {"id": {"kind": "categorical"}},
            "model": model,
        }
    )


class Run:
    """A trainer without its log: tables, engine, and a live store where `directory` is given."""

    def __init__(self, settings: Settings, directory: str | None) -> None:
        self.schema = Schema.from_settings(settings)
        self.tables = Tables(self.schema, settings.model)
        state = LearnerState.initial(self.schema, settings.model)
        self.engine = EventEngine(self.schema, settings.model, self.tables, state)
        self.writer = self.publisher = self.reader = None
        if directory is not None:
            self.writer = Writer.create(directory, layout_for(self.schema, settings.model, 1))
            self.publisher = Publisher(self.writer, self.tables, Entities(self.schema), state, settings.model)
            self.publisher.publish_all(step=0, watermark_us=0)
            self.writer.activate()
            self.reader = Reader(directory)
            self.reader.attach(0)
        self.refused = self.evicted = self.unplaced = self.failed = 0

    def learn(self, ids_N: Int64s, labels_N: Float32s) -> Float32s:
        """Predict and learn a batch, and publish it."""
        ids_B1, B = ids_N[:, None], len(ids_N)
        assignment = self.tables.assign(Ids(ids_B1), None, 0)
        features = Features(ids_B1, np.ones((B, 1), np.int32), np.empty((B, 0), np.float32), np.ones((B, 1), np.uint8))
        logits_N = self.engine.learn(assignment.slots_BC, features, labels_N)
        self.refused += assignment.num_refused
        self.evicted += len(assignment.evicted_ids_E)
        self.unplaced += assignment.num_unplaced
        if self.publisher is not None:
            changes = EntityChanges(NOTHING, NOTHING)
            self.publisher.publish(assignment, changes, NOTHING, step=1, watermark_us=1)
        return logits_N

    def look_up(self, ids_N: Int64s) -> None:
        """Count the ids whose answer is not what the trainer has: another row, or a row where it has none."""
        if self.reader is None:
            return
        table = self.schema.tables[0]
        words_NW, status_N = self.reader.gather(row_section(table), ids_N)
        slots_N = self.tables.find(0, ids_N)
        rows_ND = np.where(slots_N[:, None] >= 0, self.tables.rows(0)[slots_N], np.float32(0))
        right_N = (words_NW.view(np.float32)[:, :-1] == rows_ND).all(1) & ((status_N == LEARNED) == (slots_N >= 0))
        self.failed += int((~right_N).sum())

    def close(self) -> None:
        """End the live store."""
        if self.writer is not None:
            self.writer.close()


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def learn_all(stream: Stream, settings: Settings, *, live: bool, checks: int) -> dict[str, float]:
    """One policy over the whole stream."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if live and Path("/dev/shm").is_dir() else None) as directory:
        run = Run(settings, directory if live else None)
        random = np.random.default_rng(1)
        num_events = len(stream.ids_N)
        logits_N = np.full(num_events, np.nan, np.float32)  # all of it in memory from the start
        every = max(1, num_events // BATCH // checks)
        resident, started_s = [], time.thread_time()
        for batch, start in enumerate(range(0, num_events, BATCH)):
            part = slice(start, start + BATCH)
            logits_N[part] = run.learn(stream.ids_N[part], stream.labels_N[part])
            if batch % every == 0:
                run.look_up(stream.ids_N[random.integers(0, min(start + BATCH, num_events), LOOKUPS)])
                resident.append(resident_bytes())
        took_s = time.thread_time() - started_s
        run.close()
    settled = np.array(resident[len(resident) // 4 :], np.float64)  # by then all rows of a small table are in use
    slope = np.polyfit(np.linspace(0, 1, len(settled)), settled, 1)[0]
    return {
        "logloss": summary(stream.labels_N, logits_N).logloss,
        "auc": summary(stream.labels_N, logits_N).auc,
        "rows": run.tables.num_rows(0),
        "bytes": run.tables.table_bytes(0),
        "memory_growth": float(slope / settled.mean()),
        "refused": run.refused,
        "evicted": run.evicted,
        "unplaced": run.unplaced,
        "failed_lookups": run.failed,
        "events_per_s": num_events / took_s,
    }


def learn_with_every_policy(num_ids: int, capacity: int, *, regulars: int, checks: int) -> dict[str, Any]:
    """The unbounded table, then each eviction with each admission."""
    stream = make_stream(num_ids, regulars=regulars)
    unbounded = learn_all(stream, configuration(num_ids * 3 // 2), live=False, checks=checks)
    results: dict[str, Any] = {"events": len(stream.ids_N), "ids": stream.num_ids, "unbounded": unbounded}
    for eviction, (name, admission) in product(("lru", "lfu"), ADMISSIONS.items()):
        settings = configuration(capacity, eviction=eviction, admission=admission)
        one = learn_all(stream, settings, live=True, checks=checks)
        one["logloss_over_unbounded"] = one["logloss"] / unbounded["logloss"]
        results[f"{eviction} {name}"] = one
    return results


def index_ns(num_slots: int, rounds: int) -> dict[str, Any]:
    """ns an id of the index alone, by policy; they take turns, so that a slow moment slows all."""
    policies: dict[str, dict[str, Any]] = {
        "lru": {},
        "lfu": {"eviction": "lfu"},
        "lru count": {"admission": {"kind": "count", "min_count": 1, "pressure_from": 1.0}},
    }
    random = np.random.default_rng(2)
    ids_N, count = random.permutation(num_slots * 7 // 10) + 1, num_slots // 10
    tables = {name: Tables(Schema.from_settings(s := configuration(num_slots, **p)), s.model)
              for name, p in policies.items()}  # fmt: skip
    times: dict[str, list[float]] = {}

    def assign(name: str, what: str, ids: Int64s) -> None:
        started_s = time.thread_time()
        for start in range(0, len(ids), 4096):
            tables[name].assign(Ids(ids[start : start + 4096, None]), None, 0)
        times.setdefault(f"{name} {what}", []).append((time.thread_time() - started_s) / len(ids) * 1e9)

    for part in np.array_split(ids_N, rounds):
        for name in tables:
            assign(name, "insert", part)
    sorted_N = np.sort(ids_N)
    slots_N = random.permutation(len(ids_N))
    for _ in range(rounds):
        held_N = random.choice(ids_N, count)
        for name in tables:
            assign(name, "hit", held_N[tables[name].find(0, held_N) >= 0])
        started_s = time.thread_time()
        np.take(slots_N, np.searchsorted(sorted_N, held_N))
        times.setdefault("numpy static lookup", []).append((time.thread_time() - started_s) / count * 1e9)
        started_s = time.thread_time()
        np.take(slots_N, held_N % len(slots_N))
        times.setdefault("numpy take", []).append((time.thread_time() - started_s) / count * 1e9)
    static = dict(zip(ids_N.tolist(), slots_N.tolist(), strict=True))
    held = random.choice(ids_N, count).tolist()
    started_s = time.thread_time()
    for id_ in held:
        static[id_]
    times["dict static lookup"] = [(time.thread_time() - started_s) / count * 1e9]
    next_id = num_slots
    for turn in range(2 * rounds):  # the first half fills what is free
        for name in tables:
            assign(name, "fill" if turn < rounds else "evict", np.arange(next_id, next_id + num_slots // rounds))
        next_id += num_slots // rounds
    return {name: round(float(np.median(taken)), 1) for name, taken in times.items() if "fill" not in name}


def main() -> None:
    """Measure, and print one JSON object."""
    options = arguments(__doc__ or "").parse_args()
    num_ids, capacity, checks = (200_000, 2_000, 40) if options.quick else (10_000_000, 100_000, 200)
    results = learn_with_every_policy(num_ids, capacity, regulars=capacity, checks=checks)
    results["index_ns"] = index_ns(100_000 if options.quick else 1_000_000, rounds=10)
    runs = {name: one for name, one in results.items() if name.split()[0] in ("lru", "lfu")}
    beside = Costs(wide=False, moments=False, num_shards=1)
    spec = configuration(capacity).tables["id"]
    results["bytes_beside_the_row"] = training_bytes(spec, capacity, beside) / capacity - 4 * WIDTH
    goals = [
        goal(f"{name}: logloss over that of a row for every id", one["logloss_over_unbounded"], "x", at_most=1.01)
        for name, one in runs.items()
    ]
    goals += [
        goal("lookups that failed", sum(one["failed_lookups"] for one in runs.values()), "ids", at_most=0),
        goal(
            "growth of resident memory once a table is full",
            max(one["memory_growth"] for one in runs.values()),
            "of it",
            at_most=0.01,
        ),
        goal("bytes an id beside its row", results["bytes_beside_the_row"], "bytes", at_most=24),
    ]
    emit("tables", results, goals, options.json)


if __name__ == "__main__":
    main()
