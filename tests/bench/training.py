"""Events a second of both engines and of the peers over the KuaiRand log, from raw values, and the logloss of each.

    python -m tests.bench.training [--json] [--quick]

Every run starts at the raw file and ends with the last update, in one thread, whose time on a core counts. A batch is
what a learner is handed at a time: PyTorch and the torchrec engine predict it whole and then learn it, which is a label
delay of a batch; the event engine is handed the same batches and learns event by event ("exact"), or predicts a whole
batch first ("delayed"), for the same delay. All take turns, so that a slow minute slows all; figures are
medians, ratios those of the runs of one turn. PyTorch's learning rates are the best for this log, in hindsight;
Livebed's are its defaults.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench import peers
from tests.bench.harness import arguments, emit, goal, median_s
from tests.bench.kuairand import CONFIGURATION
from tests.bench.peers import Run, read
from trainer.dense import LearnerState
from trainer.engine_event import EventEngine, build_memory, build_plan, build_rules
from trainer.engine_torchrec import TorchrecEngine
from trainer.engines import Engine
from trainer.entities import Entities, EntityChanges
from trainer.event_kernels import Batch, Memory, Plan, Rules, learn_ids
from trainer.events import Features
from trainer.forward import build_net
from trainer.gradient_pool import Pool, make_pool
from trainer.kernel import kernel_fast
from trainer.live import Writer
from trainer.publish import Publisher, layout_for
from trainer.rows import Rows
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.tables import Tables
from trainer.wide import batch_of

BATCHES = (16, 256, 4096)
RIVER_ROWS = 4096  # river's FM does a few hundred events a second: it gets this prefix, and so does what it is held to
QUICK_ROWS = DYNAMIC_ROWS = 8192
STAGES = ("read_and_hash", "index", "learn", "publish")
SETTINGS = Settings.load(CONFIGURATION, environment={})
SCHEMA = Schema.from_settings(SETTINGS)

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]
Figures = dict[str, Any]


class Livebed:
    """Tables, state and an engine, before the first event."""

    def __init__(self, engine: str) -> None:
        self.tables = Tables(SCHEMA, SETTINGS.model)
        for array in (self.tables.keys, self.tables.stamps, self.tables.weights, self.tables.accumulators):
            array[:] = array.copy()  # fetches the pages, as initialising its table does for PyTorch
        self.state = LearnerState.initial(SCHEMA, SETTINGS.model)
        kind = EventEngine if engine == "event" else TorchrecEngine
        self.engine: Engine = kind(SCHEMA, SETTINGS.model, self.tables, self.state)


def livebed(engine: str, batch: int, micro_batch: int, max_rows: int | None, *, delayed: bool = False) -> Run:
    """One pass, handed over batch by batch; `delayed`: each is predicted whole before it is learned."""
    parts = Livebed(engine)
    labels, logits = [], []
    started = time.thread_time()
    for features, labels_B, time_ms_B in read(SCHEMA, max_rows):
        for i in range(0, len(labels_B), batch):
            rows, y_N = features.rows(i, i + batch), labels_B[i : i + batch]
            slots_NC = parts.tables.assign(rows, None, int(time_ms_B[i] // 1000)).slots_BC
            known_N = parts.engine.predict(slots_NC, rows) if delayed else None
            learned_N = parts.engine.learn(slots_NC, rows, y_N, micro_batch=micro_batch)
            logits.append(learned_N if known_N is None else known_N)
        labels.append(labels_B)
    return Run(np.concatenate(labels), np.concatenate(logits), time.thread_time() - started)


def contenders(max_rows: int | None) -> dict[str, Any]:
    """What takes turns: name -> a run."""
    few = min(RIVER_ROWS, max_rows or RIVER_ROWS) // (8 if max_rows else 1)
    runs: dict[str, Any] = {}
    for batch in BATCHES:
        runs[f"pytorch_{batch}"] = lambda batch=batch: peers.pytorch(batch, max_rows)
        runs[f"event_exact_{batch}"] = lambda batch=batch: livebed("event", batch, 1, max_rows)
        runs[f"event_delayed_{batch}"] = lambda batch=batch: livebed("event", batch, 1, max_rows, delayed=True)
        runs[f"torchrec_{batch}"] = lambda batch=batch: livebed("torchrec", batch, batch, max_rows)
    runs["vw_pairs_python"] = lambda: peers.vw_python(max_rows)
    runs["vw_pairs_file"] = lambda: peers.vw_file(max_rows)
    runs["river_fm_prefix"] = lambda: peers.river_fm(few)
    runs["event_exact_prefix"] = lambda: livebed("event", 4096, 1, few)
    return runs


def stages(engine: str, batch: int, micro_batch: int, max_rows: int | None) -> Figures:
    """Nanoseconds an event of each stage of the main path, publishing included."""
    parts, spent = Livebed(engine), dict.fromkeys(STAGES, 0.0)
    nothing = np.empty(0, np.int64)
    now = time.thread_time()

    def lap(stage: str) -> None:
        nonlocal now
        before, now = now, time.thread_time()
        spent[stage] += now - before

    with (
        tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory,
        Writer.create(directory, layout_for(SCHEMA, SETTINGS.model, 1)) as writer,
    ):
        publisher = Publisher(writer, parts.tables, Entities(SCHEMA), parts.state, SETTINGS.model)
        now, count = time.thread_time(), 0
        for features, labels_B, time_ms_B in read(SCHEMA, max_rows):
            lap("read_and_hash")
            for i in range(0, len(labels_B), batch):
                rows = features.rows(i, i + batch)
                assignment = parts.tables.assign(rows, None, int(time_ms_B[i] // 1000))
                lap("index")
                parts.engine.learn(assignment.slots_BC, rows, labels_B[i : i + batch], micro_batch=micro_batch)
                lap("learn")
                changes = EntityChanges(nothing, nothing)
                publisher.publish(assignment, changes, parts.engine.touched_pairs, step=i, watermark_us=0)
                lap("publish")
            count += len(labels_B)
    return {f"{stage}_ns_per_event": spent[stage] / count * 1e9 for stage in STAGES}


@kernel_fast
def update_rows(  # noqa: PLR0917 -- numba unpacks no objects
    batch: Batch, plan: Plan, rules: Rules, memory: Memory, pool: Pool, dx: Float32s
) -> None:
    """What the event engine does to rows when it learns event by event, and nothing else."""
    for b in range(batch.slots_BC.shape[0]):
        learn_ids(batch, b, plan, rules, memory, dx, np.float32(1e-3), pool, True)


def placed(parts: Livebed, num_rows: int) -> tuple[Int64s, Features, Float32s]:
    """Slots, features and labels of the log's first events, all of whose ids have their place."""
    features, labels_B, _ = next(read(SCHEMA, num_rows))
    return parts.tables.assign(features, None, 1).slots_BC, features, labels_B


def update_ns(repeats: int) -> Figures:
    """Nanoseconds to update one row from one id of an event, in each engine, in batches of 4,096 events of the log."""
    parts = Livebed("event")
    slots_BC, features, labels_B = placed(parts, 4096)
    tables, state, net = parts.tables, parts.state, build_net(SCHEMA, SETTINGS.model)
    batch, plan = batch_of(slots_BC, features, labels_B), build_plan(SCHEMA, SETTINGS.model, tables, net)
    rules = build_rules(SETTINGS.model)
    memory = build_memory(tables, state)
    pool = make_pool(entries=64, width=SCHEMA.tables[0].width, dense=0, touched_pairs=0, pair_slots=0)
    dx = np.full(SCHEMA.x_width, 1e-6, np.float32)
    event_s = median_s(lambda: update_rows(batch, plan, rules, memory, pool, dx), repeats=repeats)
    rows, rows_N = Rows(SCHEMA, tables), np.arange(len(labels_B))
    dx_Nn = rows(rows_N, batch) * 1e-6
    torchrec_s = median_s(lambda: rows.learn(dx_Nn), repeats=repeats)
    return {"event_ns": event_s / slots_BC.size * 1e9, "torchrec_ns": torchrec_s / slots_BC.size * 1e9}


def dynamic_over_static(engine: str, batch: int, repeats: int) -> float:
    """Time of a step that asks the index, over that of the same step on slots known beforehand; batch by batch."""
    parts = Livebed(engine)
    slots_BC, features, labels_B = placed(parts, DYNAMIC_ROWS)
    micro_batch = 1 if engine == "event" else batch
    spent = {True: 0.0, False: 0.0}
    for repeat in range(1 + repeats):
        for i in range(0, len(labels_B), batch):
            rows, known_NC, y_N = features.rows(i, i + batch), slots_BC[i : i + batch], labels_B[i : i + batch]
            first = (i // batch + repeat) % 2 == 0  # whichever goes second finds the rows in the cache
            for dynamic in (first, not first):
                started = time.thread_time()
                slots_NC = parts.tables.assign(rows, None, 1).slots_BC if dynamic else known_NC
                parts.engine.learn(slots_NC, rows, y_N, micro_batch=micro_batch)
                spent[dynamic] += (time.thread_time() - started) * (repeat > 0)
    return spent[True] / spent[False]


def bytes_beside_the_row() -> float:
    """Of one id: index, optimizer state and counters."""
    tables = Tables(SCHEMA, SETTINGS.model)
    return (tables.num_bytes - tables.weights.nbytes) / int(tables.capacity_T.sum())


def measure(repeats: int, max_rows: int | None) -> Figures:
    """All turns."""
    runs = contenders(max_rows)
    for engine in ("event", "torchrec"):
        stages(engine, 256, 256, 1024)  # loads compiled kernels and libraries
    turns = [{name: run() for name, run in runs.items()} for _ in range(repeats)]

    def speed(name: str) -> float:
        return float(np.median([turn[name].events_per_s for turn in turns]))

    def ratio(ours: str, theirs: str) -> float:
        return float(np.median([turn[ours].events_per_s / turn[theirs].events_per_s for turn in turns]))

    last = turns[-1]
    results: Figures = {
        "events": len(last["pytorch_16"].labels_B),
        "events_river": len(last["river_fm_prefix"].labels_B),
        "events_per_s": {name: speed(name) for name in runs},
        "logloss": {name: last[name].logloss for name in runs},
        "ratios": {
            **{f"event_over_pytorch_{b}": ratio(f"event_exact_{b}", f"pytorch_{b}") for b in BATCHES},
            **{f"event_delayed_over_pytorch_{b}": ratio(f"event_delayed_{b}", f"pytorch_{b}") for b in BATCHES},
            **{f"torchrec_over_pytorch_{b}": ratio(f"torchrec_{b}", f"pytorch_{b}") for b in BATCHES},
            "event_over_vw_python": ratio("event_exact_256", "vw_pairs_python"),
            "event_over_vw_file": ratio("event_exact_256", "vw_pairs_file"),
            "event_over_river_fm": ratio("event_exact_prefix", "river_fm_prefix"),
        },
    }
    split = {
        "event": ("event", 256, 1),
        "torchrec_256": ("torchrec", 256, 256),
        "torchrec_4096": ("torchrec", 4096, 4096),
    }
    laps = {name: [stages(*what, max_rows) for _ in range(repeats)] for name, what in split.items()}
    results["stages"] = {
        name: {key: float(np.median([lap[key] for lap in taken])) for key in taken[0]} for name, taken in laps.items()
    }
    results["row_update"] = update_ns(10 * repeats)
    results["dynamic_over_static"] = {
        "event": dynamic_over_static("event", 256, 2 * repeats),
        "torchrec": dynamic_over_static("torchrec", 256, 2 * repeats),
    }
    results["bytes_beside_the_row"] = bytes_beside_the_row()
    return results


def goals_of(results: Figures) -> list[Figures]:
    """What the figures are held to."""
    ratios, logloss = results["ratios"], results["logloss"]
    over = {f"event_delayed_{b}": f"pytorch_{b}" for b in BATCHES} | {f"torchrec_{b}": f"pytorch_{b}" for b in BATCHES}
    over |= {"event_exact_256": "vw_pairs_python", "event_exact_prefix": "river_fm_prefix"}
    return [
        goal("event engine over PyTorch, batch 16", ratios["event_over_pytorch_16"], "x", at_least=8),
        goal("event engine over PyTorch, batch 256", ratios["event_over_pytorch_256"], "x", at_least=1.5),
        goal("event engine over VW's Python parser, pairs", ratios["event_over_vw_python"], "x", at_least=1.5),
        goal("event engine over VW's file parser, pairs", ratios["event_over_vw_file"], "x", at_least=1),
        goal("torchrec engine over PyTorch, batch 256", ratios["torchrec_over_pytorch_256"], "x", at_least=1.5),
        goal("torchrec engine over PyTorch, batch 4,096", ratios["torchrec_over_pytorch_4096"], "x", at_least=1.5),
        *(
            goal(f"logloss of {ours} over that of {theirs}", logloss[ours] / logloss[theirs], "x", at_most=1)
            for ours, theirs in over.items()
        ),
        *(
            goal(f"dynamic over static table, {engine} engine", value, "x", at_most=1.15)
            for engine, value in results["dynamic_over_static"].items()
        ),
        goal("bytes of an id beside its row", results["bytes_beside_the_row"], "B", at_most=24),
    ]


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "").parse_args()
    results = measure(*((1, QUICK_ROWS) if options.quick else (5, None)))
    emit("training", results, goals_of(results), options.json)


if __name__ == "__main__":
    main()
