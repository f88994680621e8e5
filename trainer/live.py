"""The live store: what the trainer publishes and the service reads, in shared memory.

One writer a shard (`live_writer`), any number of readers without locks, in any process (`live_reader`).

The writer's order at a publish, so that a version never promises what a reader cannot see yet:

    1. rows and tombstones (`put`, `remove`)   2. pairs   3. dense weights   4. `commit`: version, step, watermark

A generation is one set of files. A new writer always begins a new one, beside the old, and readers move over when it is
complete; so a writer may die at any point, and whatever it left half done (an odd seqlock) is gone with its generation.
`live_layout.py` says where everything lies, `live_kernels.py` how it is read and written.
"""

import tempfile

import numpy as np

from trainer.errors import SchemaMismatch, StoreUnavailable
from trainer.live_kernels import DEFAULT, LEARNED, UNKNOWN, read_record
from trainer.live_layout import Layout, Section
from trainer.live_reader import Reader, ShardView, StoreState
from trainer.live_writer import Writer
from trainer.probe import home_slot

__all__ = [
    "DEFAULT",
    "LEARNED",
    "UNKNOWN",
    "Layout",
    "Reader",
    "SchemaMismatch",
    "Section",
    "ShardView",
    "StoreState",
    "StoreUnavailable",
    "Writer",
    "read_record",
    "warm",
]


def warm() -> None:
    """Compile every kernel for the types it is called with, or load it from the cache: some seconds, or a tenth."""
    section = Section("warm", "rows", capacity=64, words=4)
    ids = np.arange(2, dtype=np.int64)
    frozen_ids = np.frombuffer(ids.tobytes(), np.int64)  # what a request's bytes decode to: another type for numba
    with tempfile.TemporaryDirectory() as directory:
        layout = Layout((section,), dense_size=3, pair_slots=4, num_shards=1, schema_hash=1)
        with Writer.create(directory, layout) as writer:
            slots = np.array([int(home_slot(i, section.capacity)) for i in ids.tolist()], np.int64)
            ones = np.ones(2, np.uint32)
            writer.put("warm", slots, ids, np.ones((2, 4), np.uint32), ones, ones)
            writer.remove("warm", slots)
            writer.put_pairs(ids, np.ones(2, np.float32))
            writer.put_dense(np.ones(3, np.float32))
            writer.commit(step=1, watermark_us=1)
            writer.activate()
            reader = Reader(directory)
            reader.attach(0)
            reader.gather("warm", ids)
            reader.gather("warm", frozen_ids)
            reader.dense()
            reader.state()
            reader.peek("warm", 1)
