"""The live store: how fast rows are read and written, beside numpy's `take`; and a race that must show no fault.

    python -m tests.bench.store [--json] [--quick]

`take` copies rows of 16 floats from an array by number: what memory allows. The store's reader is given ids instead,
hashes them, checks each row's identity and its seqlock, and copies 17 words (a row of 16 and its wide weight). Both get
the same rows in the same random order, turn by turn, new ones each time; both allocate what they return; what counts is
the time of this thread on a core, so that other work on the machine does not.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.harness import arguments, emit, goal
from tests.system.live_race import FREE, WORDS, layout, place, race
from trainer.live import LEARNED, Reader, Writer, warm
from trainer.probe import WINDOW

NUM_ROWS = 1_000_000
CAPACITY = 4 * NUM_ROWS // 3
BULK = 100_000  # ids of one large read: with their cache lines, more than the caches next to a core hold
RACE_CAPACITY = 64  # small: nearly every read meets a slot that has just changed hands

Int64s = npt.NDArray[np.int64]


def shared_memory() -> Path | None:
    """Where a store lies in service, if this machine has it."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else None


def fill(writer: Writer, rng: np.random.Generator) -> tuple[Int64s, float]:
    """Write all rows, in random order. (ids, ns per row of writing them a second time)."""
    ids_N, ids_G = rng.integers(1, 2**62, NUM_ROWS), np.full(CAPACITY, FREE, np.int64)
    slots_N = np.empty(NUM_ROWS, np.int64)
    place(ids_N, ids_G, rng.integers(0, WINDOW, NUM_ROWS), slots_N)
    rows_NW, ones_N = rng.integers(0, 2**32, (NUM_ROWS, WORDS), dtype=np.uint32), np.ones(NUM_ROWS, np.uint32)
    writer.put("rows", slots_N, ids_N, rows_NW, ones_N, ones_N)
    began_s = time.perf_counter()
    writer.put("rows", slots_N, ids_N, rows_NW, ones_N, ones_N)
    write_ns = (time.perf_counter() - began_s) / NUM_ROWS * 1e9
    return ids_N[ids_G[slots_N] == ids_N], write_ns  # the few that lost their slot are left out


def medians_s(
    calls: dict[str, Callable[[Int64s], object]], picks: list[Int64s], clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Median seconds of each call; they take turns, and no two in a row get the same rows."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(len(picks)):
        for k, (name, call) in enumerate(calls.items()):
            pick = picks[(turn + k * len(picks) // len(calls)) % len(picks)]
            began_s = clock()
            call(pick)
            times[name].append(clock() - began_s)
    return {name: float(np.median(taken[1:])) for name, taken in times.items()}


def measure_reads(reader: Reader, ids_N: Int64s, rng: np.random.Generator, rounds: int) -> dict[str, float]:
    """Bulk reads against `take`, and small ones in microseconds a call."""
    table_ND = rng.random((len(ids_N), WORDS - 1), np.float32)
    positions = [rng.integers(0, len(ids_N), BULK) for _ in range(rounds)]
    ids_at = {id(position): ids_N[position] for position in positions}  # made here: not part of a read
    bulk = medians_s(
        {
            "gather": lambda position: reader.gather("rows", ids_at[id(position)]),
            "take": lambda position: np.take(table_ND, position, axis=0),
        },
        positions,
    )
    results = {f"{name}_ns_per_row": taken_s / BULK * 1e9 for name, taken_s in bulk.items()}
    results["ratio_to_take"] = bulk["gather"] / bulk["take"]
    for size in (1, 100, 1000):
        picks = [ids_N[rng.integers(0, len(ids_N), size)] for _ in range(50 * rounds)]
        call_s = medians_s({"gather": lambda ids: reader.gather("rows", ids)}, picks, time.perf_counter)["gather"]
        results[f"us_{size}_ids"] = call_s * 1e6
    strangers = [rng.integers(2**62, 2**63 - 1, BULK) for _ in range(rounds)]
    missed_s = medians_s({"gather": lambda ids: reader.gather("rows", ids)}, strangers)["gather"]
    results["unknown_ns_per_id"] = missed_s / BULK * 1e9
    return results


def measure(rounds: int) -> dict[str, float]:
    """Reads and writes of one million rows, in one process."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=shared_memory()) as directory:
        with Writer.create(directory, layout(CAPACITY)) as writer:
            ids_N, write_ns = fill(writer, rng)
            writer.activate()
        reader = Reader(directory)
        reader.attach(0)
        if not (reader.gather("rows", ids_N)[1] == LEARNED).all():
            raise RuntimeError("not every row that was written is read")
        return {"rows": len(ids_N), **measure_reads(reader, ids_N, rng, rounds), "write_ns_per_row": write_ns}


def measure_race(seconds: float) -> dict[str, float]:
    """What two readers saw of an evicting writer."""
    with tempfile.TemporaryDirectory(dir=shared_memory()) as directory:
        return asdict(race(Path(directory), capacity=RACE_CAPACITY, seconds=seconds))


def main() -> None:
    """Measure, and print one JSON object."""
    options = arguments(__doc__ or "").parse_args()
    warm()
    results: dict[str, Any] = measure(rounds=15 if options.quick else 60)
    results["race"] = measure_race(seconds=4 if options.quick else 20)
    goals = [
        goal("random row reads, ratio to numpy take", results["ratio_to_take"], "x", at_most=1.6),
        goal("100 ids", results["us_100_ids"], "us", at_most=10),
        goal("torn rows in the race", results["race"]["torn_rows"], "rows", at_most=0),
        goal("rows of another id in the race", results["race"]["foreign_rows"], "rows", at_most=0),
    ]
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in results.items()}
    emit("store", rounded, goals, options.json)


if __name__ == "__main__":
    main()
