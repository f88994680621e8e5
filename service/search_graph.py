"""The approximate index of a large table: an HNSW graph over the slots of its live store, and what it has to catch up.

A node of the graph is a slot, not an id. Who is in a slot is read from the store when a search is answered, under the
slot's seqlock, so a graph that is behind can miss a near row, and can never name a wrong one or a similarity that is
not so. What it is behind by is known: `pass_over` looks through all slots for rows that changed, and until such a row
has its new place in the graph its slot is on a list, whose rows every search compares one by one.

A row that moved by less than `TOLERANCE` of its length keeps its place: an online learner moves rows a little all the
time, and placing one costs about 0.2 ms.

Legend: G slots, of all shards one after the other; N slots of a list; D width.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from usearch.index import Index

from trainer.live import ShardView
from trainer.live_kernels import CAPACITY
from trainer.live_scan import ABSENT, PENDING, PRESENT, changed_slots, read_slots
from trainer.probe import EMPTY

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

TOLERANCE = 0.05  # at 0.05 the angle changes by 3 degrees at most: recall does not show it, and most steps move less
CONNECTIVITY = 16  # usearch's and hnswlib's default, and enough for rows of 16 to 64
EXPANSION_ADD, EXPANSION_SEARCH = 64, 96  # larger: better recall, slower; the benchmark has what these reach
CHUNK = 1 << 15  # slots looked at in one slice of a pass: under 1 ms
BATCH = 8  # rows placed in one slice: about 1 ms
NEVER = np.uint32(0xFFFFFFFF)  # no record that can be read has this sequence word: it is odd


class Graph:
    """The graph of one table under one metric. One thread calls it; nothing here waits."""

    def __init__(self, views: Sequence[ShardView], section: int, width: int, *, by_angle: bool) -> None:
        self._section, self._width = section, width
        self.views = list(views)
        self.capacity = int(self._descriptor(0)[CAPACITY])  # of each shard
        num_slots = self.capacity * len(views)
        self._index = Index(
            ndim=width,
            metric="cos" if by_angle else "ip",
            dtype="f32",
            connectivity=CONNECTIVITY,
            expansion_add=EXPANSION_ADD,
            expansion_search=EXPANSION_SEARCH,
        )
        self._seen_G = np.zeros(num_slots, np.uint32)
        self._rows_GD = np.zeros((num_slots, width), np.float32)
        self._marks_G = np.full(num_slots, ABSENT, np.uint8)
        self._queue_G = np.empty(num_slots, np.int64)  # a ring: a slot is in it once at most
        self._head, self.num_pending = 0, 0
        self._found_N = np.empty(CHUNK, np.int64)
        self._at = 0  # where the pass is

    def fits(self, views: Sequence[ShardView]) -> bool:
        """Take these files for those of before, if the slots are as many. A new generation's rows are all compared."""
        if len(views) != len(self.views) or int(views[0].descriptors_S7[self._section][CAPACITY]) != self.capacity:
            return False
        if any(new is not old for new, old in zip(views, self.views, strict=True)):
            self.views = list(views)
            self._seen_G[:] = NEVER
        return True

    def begin_pass(self) -> None:
        """Let the next `pass_over` begin with the first slot."""
        self._at = 0

    def pass_over(self) -> bool:
        """Look at the next slots for changes; whether those were the last."""
        shard, first = divmod(self._at, self.capacity)
        last, base, view = min(first + CHUNK, self.capacity), shard * self.capacity, self.views[shard]
        mine = slice(base, base + self.capacity)
        count = changed_slots(
            view.u32, view.f32, view.u32.view(np.uint8), self._descriptor(shard), first, last, TOLERANCE,
            self._seen_G[mine], self._rows_GD[mine], self._marks_G[mine], self._found_N,
        )  # fmt: skip
        places_N = (self._head + self.num_pending + np.arange(count)) % len(self._queue_G)
        self._queue_G[places_N] = base + self._found_N[:count]
        self.num_pending += count
        self._at = (base + last) % len(self._queue_G)
        return self._at == 0

    def place(self) -> None:
        """Give the slots that wait longest their place in the graph, as their rows are now."""
        count = min(BATCH, self.num_pending)
        slots_N = self._queue_G[(self._head + np.arange(count)) % len(self._queue_G)]
        shards_N, locals_N = np.divmod(slots_N, self.capacity)
        keys_N, rows_ND = np.empty(count, np.int64), np.empty((count, self._width), np.float32)
        for shard in np.unique(shards_N).tolist():
            mine_N = np.flatnonzero(shards_N == shard)
            keys_M, rows_MD = np.empty(len(mine_N), np.int64), np.empty((len(mine_N), self._width), np.float32)
            view = self.views[shard]
            read_slots(view.u32, view.f32, self._descriptor(shard), locals_N[mine_N], keys_M, rows_MD)
            keys_N[mine_N], rows_ND[mine_N] = keys_M, rows_MD
        had_N = slots_N[self._marks_G[slots_N] & PRESENT != 0]
        if len(had_N):
            self._index.remove(had_N.astype(np.uint64))
        here_N = keys_N != EMPTY
        if here_N.any():
            self._index.add(slots_N[here_N].astype(np.uint64), rows_ND[here_N], threads=1)
        self._rows_GD[slots_N] = rows_ND
        self._marks_G[slots_N] = np.where(here_N, PRESENT, ABSENT)
        self._head = (self._head + count) % len(self._queue_G)
        self.num_pending -= count

    def nearest(self, query_D: Float32s, count: int) -> Int64s:
        """Slots worth comparing: about the nearest `count` of the graph, and all that wait."""
        pending_N: Int64s = self._queue_G[(self._head + np.arange(self.num_pending)) % len(self._queue_G)]
        if len(self._index) == 0:
            return pending_N
        found_N: Int64s = self._index.search(query_D, count, threads=1).keys.astype(np.int64)
        return np.append(found_N[self._marks_G[found_N] & PENDING == 0], pending_N)

    def memory_bytes(self) -> int:
        """What this keeps, the graph as its library counts it."""
        arrays = (self._seen_G, self._rows_GD, self._marks_G, self._queue_G)
        return int(self._index.memory_usage) + sum(array.nbytes for array in arrays)

    def _descriptor(self, shard: int) -> Int64s:
        descriptor_7: Int64s = self.views[shard].descriptors_S7[self._section]
        return descriptor_7
