"""Which rows of a table changed since the last look: the sequence words of its records, compared.

Every write of a record raises its seqlock's word (`trainer.live_kernels`), so a look is one comparison of an array with
its copy: 12 bytes a slot are kept, and a look at a million slots took 7 ms with rows of 16 floats, 8 ms with 64, on a
machine whose cores were all busy; beginning, 16 to 20 ms. Nothing is asked of the writer, and what changes between two
looks is reported once, however often it changed: a caller who reads slowly gets fewer, larger reports, and nothing
queues up.

Legend: G slots of the table, over all shards.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.live import Reader, ShardView
from trainer.live_kernels import CAPACITY, RECORDS, SEQ, STRIDE
from trainer.probe import EMPTY, REMOVED

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Change:
    """Hashed ids. `resync`: the store was made anew since the last look, and what changed by that is not known."""

    changed_N: Int64s
    removed_N: Int64s
    resync: bool


class Changes:
    """Follows one section of a live store; `look` from one thread at a time."""

    def __init__(self, reader: Reader, section: str) -> None:
        """What changes from here on is reported."""
        self._reader, self._section = reader, section
        self._begin()

    def look(self) -> Change:
        """What changed since the last look, or since the beginning."""
        if self._reader.shards is not self._views:
            self._begin()
            nothing = np.empty(0, np.int64)
            return Change(nothing, nothing, resync=True)
        parts = [shard.look() for shard in self._shards]
        changed, removed = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
        # What only moved to another slot has not gone.
        return Change(changed, np.setdiff1d(removed, changed), resync=False)

    def _begin(self) -> None:
        self._views = self._reader.shards
        place = [section.name for section in self._reader.layout.sections].index(self._section)
        self._shards = [_Shard(view, view.descriptors_S7[place]) for view in self._views]


class _Shard:
    def __init__(self, view: ShardView, descriptor_7: Int64s) -> None:
        records, stride, capacity = (int(descriptor_7[k]) for k in (RECORDS, STRIDE, CAPACITY))
        end = records + capacity * stride
        self._sequence_now_G = view.u32[records + SEQ : end : stride]
        self._keys_now_G = view.i64[records // 2 : end // 2 : stride // 2]
        self._sequence_G = self._sequence_now_G.copy()
        self._keys_G = self._keys_now_G.copy()

    def look(self) -> tuple[Int64s, Int64s]:
        """Ids with new rows, ids without one."""
        sequence_G = self._sequence_now_G.copy()
        slots = np.flatnonzero(sequence_G != self._sequence_G)
        slots = slots[sequence_G[slots] & 1 == 0]  # a record that is being written counts the next time
        before, now = self._keys_G[slots], self._keys_now_G[slots]
        was_written = self._sequence_G[slots] != 0  # else its key is nobody's, and no id 0
        self._sequence_G[slots], self._keys_G[slots] = sequence_G[slots], now
        gone = was_written & (before != now) & (before != EMPTY) & (before != REMOVED)
        return now[(now != EMPTY) & (now != REMOVED)], before[gone]
