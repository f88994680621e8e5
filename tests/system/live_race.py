"""A race on the live store, for tests and benchmark: an evicting writer and readers, each a process of its own.

Every row says which id and which write it is of, and every word of it depends on both, so that a row put together from
two writes (torn) or found under another id (foreign) is known for what it is.
"""

import multiprocessing
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.kernel import kernel
from trainer.live import LEARNED, Layout, Reader, Section, Writer
from trainer.probe import WINDOW, home_slot

Int64s = npt.NDArray[np.int64]
Uint32s = npt.NDArray[np.uint32]

WORDS = 17  # a row of 16 and its wide weight
DENSE_SIZE = 4001
BATCH = 256
FREE = -1
SALT_W = np.random.default_rng(5).integers(1, 2**32, WORDS, dtype=np.uint32)
CONTEXT = multiprocessing.get_context("spawn")


@dataclass
class Seen:
    """What readers saw; all but the first two must stay 0."""

    reads: int = 0
    versions: int = 0
    torn_rows: int = 0
    foreign_rows: int = 0
    mixed_dense: int = 0
    versions_back: int = 0


def layout(capacity: int) -> Layout:
    """One table, dense weights."""
    return Layout((Section("rows", "rows", capacity, WORDS),), DENSE_SIZE, 0, num_shards=1, schema_hash=1)


def encode(ids_N: Int64s, clock: int) -> Uint32s:
    """Rows of `ids_N` as written at `clock`: id, clock, and words made of both."""
    rows_NW = np.empty((len(ids_N), WORDS), np.uint32)
    rows_NW[:, 0] = ids_N.astype(np.uint32)
    rows_NW[:, 1] = clock
    rows_NW[:, 2:] = (rows_NW[:, :1] + 1) * SALT_W[2:] ^ (rows_NW[:, 1:2] + 7) * SALT_W[:-2]
    return rows_NW


def count_faults(ids_N: Int64s, rows_NW: Uint32s) -> tuple[int, int]:
    """(torn, foreign) rows among those read for `ids_N`."""
    whole_NW = (rows_NW[:, :1] + 1) * SALT_W[2:] ^ (rows_NW[:, 1:2] + 7) * SALT_W[:-2]
    torn_N = (rows_NW[:, 2:] != whole_NW).any(1)
    return int(torn_N.sum()), int((rows_NW[:, 0] != ids_N.astype(np.uint32)).sum())


@kernel
def place(ids_N: Int64s, ids_G: Int64s, pick_N: Int64s, slots_N: Int64s) -> None:
    """Find or make a slot for each id, as the trainer's index does: free ones first, else evict the `pick`ed one."""
    for i in range(ids_N.shape[0]):
        found = np.int64(FREE)
        for p in range(min(WINDOW, ids_G.shape[0])):
            slot = (home_slot(ids_N[i], ids_G.shape[0]) + p) % ids_G.shape[0]
            if ids_G[slot] == ids_N[i]:
                found = slot
                break
            if ids_G[slot] == FREE and found == FREE:
                found = slot
        if found == FREE:
            found = (home_slot(ids_N[i], ids_G.shape[0]) + pick_N[i]) % ids_G.shape[0]
        ids_G[found] = ids_N[i]
        slots_N[i] = found


def write(directory: Path, capacity: int, seed: int, after_version: int) -> None:
    """Publish until killed: evicting puts, removals, dense weights, version."""
    rng = np.random.default_rng(seed)
    ids_G, slots_N = np.full(capacity, FREE, np.int64), np.empty(BATCH, np.int64)
    ones_N, dense_P = np.ones(BATCH, np.uint32), np.empty(DENSE_SIZE, np.float32)
    writer, clock = Writer.create(directory, layout(capacity), after_version=after_version), 0
    while True:
        clock += 1
        ids_N = rng.integers(0, 3 * capacity, BATCH)
        place(ids_N, ids_G, rng.integers(0, min(WINDOW, capacity), BATCH), slots_N)
        writer.put("rows", slots_N, ids_N, encode(ids_N, clock), ones_N, ones_N)
        gone = rng.integers(0, capacity, 4)
        ids_G[gone] = FREE
        writer.remove("rows", gone)
        dense_P[:] = clock % 4096
        writer.put_dense(dense_P)
        writer.commit(step=clock, watermark_us=clock)
        if clock == 64:
            writer.activate()


def read(directory: Path, capacity: int, seed: int, seconds: float, answer: Connection) -> None:
    """Read at random for some time, then send what was `Seen`."""
    reader = Reader(directory)
    reader.attach(60)
    watch(reader, capacity, seed, seconds=0.01)  # kernels loaded
    answer.send("ready")
    answer.recv()
    answer.send(asdict(watch(reader, capacity, seed, seconds)))


def watch(reader: Reader, capacity: int, seed: int, seconds: float) -> Seen:
    """Read at random for some time."""
    rng, seen, version = np.random.default_rng(seed), Seen(), reader.state().version
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        reader.refresh()
        ids_N = rng.integers(0, 3 * capacity, 500)
        rows_NW, status_N = reader.gather("rows", ids_N)
        learned_N = status_N == LEARNED
        torn, foreign = count_faults(ids_N[learned_N], rows_NW[learned_N])
        dense_P, _ = reader.dense()
        before, version = version, reader.state().version
        seen.reads += int(learned_N.sum())
        seen.versions += version != before
        seen.torn_rows += torn
        seen.foreign_rows += foreign
        seen.mixed_dense += bool((dense_P != dense_P[0]).any())
        seen.versions_back += version < before
    return seen


def start_writer(directory: Path, capacity: int, *, seed: int = 0, after_version: int = 0) -> BaseProcess:
    """A writer process; the caller kills it."""
    process = CONTEXT.Process(target=write, args=(directory, capacity, seed, after_version), daemon=True)
    process.start()
    return process


def race(directory: Path, *, capacity: int, seconds: float, num_readers: int = 2) -> Seen:
    """One evicting writer against readers in processes of their own; what all of them saw."""
    writer = start_writer(directory, capacity)
    pipes = [CONTEXT.Pipe() for _ in range(num_readers)]
    readers = [
        CONTEXT.Process(target=read, args=(directory, capacity, seed, seconds, theirs), daemon=True)
        for seed, (_, theirs) in enumerate(pipes)
    ]
    try:
        for reader in readers:
            reader.start()
        for ours, _ in pipes:
            _receive(ours)
        for ours, _ in pipes:
            ours.send("go")
        each = [_receive(ours, seconds) for ours, _ in pipes]
    finally:
        started: list[BaseProcess] = [writer, *readers]
        for process in started:
            process.kill()
            process.join()
    return Seen(**{name: sum(seen[name] for seen in each) for name in asdict(Seen())})


def _receive(ours: Connection, seconds: float = 0) -> dict[str, int]:
    if not ours.poll(60 + seconds):
        raise TimeoutError("a reader of the race did not answer")
    answer: dict[str, int] = ours.recv()
    return answer
